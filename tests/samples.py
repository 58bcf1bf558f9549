"""Graphs that several tests look at. `mutants.py` damages them and expects a test to notice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.fx as fx
from hypothesis import strategies as st
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from fxoffload.plans import GraphPlan
from fxoffload.text import COLUMN_PREFIX

# One weight that comes from the host twice, one activation that leaves and returns, one gradient that goes to the host.
LOWERED = """\
graph "sample" (s0 <= 4)
%x: f32[s0,8] = input {role=batch}
%w: f32[8,8]@pinned = input {role=parameter, fqn="w", trainable=true}
%t: f32[s0,8] = input {role=tangent}
%w@0/in: f32[8,8] = fxo.swap_in %w, device
%w@0: f32[8,8] = fxo.wait %w@0/in
%h: f32[s0,8] = aten.mm %x, %w@0
fxo.release %w@0/in
%a: f32[s0,8] = aten.relu %h
fxo.release %h
%a^0/out: f32[s0,8]@pinned = fxo.swap_out %a, host, "pinned"
%y: f32[s0,8] = aten.mul.Tensor %a, 2.0
%a^0: f32[s0,8]@pinned = fxo.wait %a^0/out
fxo.release %a
fxo.backward
%a@0/in: f32[s0,8] = fxo.swap_in %a^0, device
%w@1/in: f32[8,8] = fxo.swap_in %w, device
%g: f32[s0,8] = aten.mul.Tensor %t, 2.0
%a@0: f32[s0,8] = fxo.wait %a@0/in
%gh: f32[s0,8] = aten.threshold_backward %g, %a@0, 0
fxo.release %g
fxo.release %a@0/in
%w@1: f32[8,8] = fxo.wait %w@1/in
%wt: f32[8,8;1,8] = aten.t %w@1
%gx: f32[s0,8] = aten.mm %gh, %wt
fxo.release %w@1/in
%xt: f32[8,s0;1,8] = aten.t %x
%gw: f32[8,8] = aten.mm %xt, %gh
fxo.release %gh
%w.grad/out: f32[8,8]@pinned = fxo.swap_out %gw, host, "pinned"
%w.grad: f32[8,8]@pinned = fxo.wait %w.grad/out
fxo.release %gw
return ((%y), (%gx, %w.grad))
"""

# The same step before lowering: a checkpoint instead of the swap, a gather and a sink.
LOGICAL = """\
graph "logical" (s0 <= 4)
%x: f32[s0,8] = input {role=batch}
%w: f32[8,8]@pinned = input {role=parameter, fqn="w", trainable=true}
%t: f32[s0,8] = input {role=tangent}
%w@0: f32[8,8] = fxo.gather %w, device
%h: f32[s0,8] = aten.mm %x, %w@0
%a: f32[s0,8] = aten.relu %h
%y: f32[s0,8] = aten.mul.Tensor %a, 2.0
fxo.backward
%a!0: f32[s0,8] = fxo.checkpoint %a
%g: f32[s0,8] = aten.mul.Tensor %t, 2.0
%gh: f32[s0,8] = aten.threshold_backward %g, %a!0, 0
%wt: f32[8,8;1,8] = aten.t %w@0
%gx: f32[s0,8] = aten.mm %gh, %wt
%xt: f32[8,s0;1,8] = aten.t %x
%gw: f32[8,8] = aten.mm %xt, %gh
%w.grad: f32[8,8]@pinned = fxo.sink %gw, host
return ((%y), (%gx, %w.grad))
"""

# Two weights that come in one bucket each way; backward reads them in the other order.
BUCKETS = """\
graph "buckets" (s0 <= 4)
%x: f32[s0,8] = input {role=batch}
%w: f32[8,8]@pinned = input {role=parameter, fqn="w"}
%u: f32[8]@pinned = input {role=parameter, fqn="u"}
%t: f32[s0,8] = input {role=tangent}
%bucket#0/in: u8[1024] = fxo.swap_in_many [%w, %u], device
%a: f32[s0,8] = aten.neg %x
%bucket#0: u8[1024] = fxo.wait %bucket#0/in
%w@0: f32[8,8] = fxo.part %bucket#0, 0, [8, 8], [8, 1], f32
%h: f32[s0,8] = aten.mm %a, %w@0
fxo.release %a
%u@0: f32[8] = fxo.part %bucket#0, 512, [8], [1], f32
%y: f32[s0,8] = aten.mul.Tensor %h, %u@0
fxo.release %bucket#0
fxo.release %h
fxo.backward
%bucket#1/in: u8[1024] = fxo.swap_in_many [%w, %u], device
%bucket#1: u8[1024] = fxo.wait %bucket#1/in
%u@1: f32[8] = fxo.part %bucket#1, 512, [8], [1], f32
%gh: f32[s0,8] = aten.mul.Tensor %t, %u@1
%w@1: f32[8,8] = fxo.part %bucket#1, 0, [8, 8], [8, 1], f32
%wt: f32[8,8;1,8] = aten.t %w@1
%ga: f32[s0,8] = aten.mm %gh, %wt
fxo.release %bucket#1
fxo.release %gh
%gx: f32[s0,8] = aten.neg %ga
fxo.release %ga
return ((%y), (%gx, none, none))
"""


def sample_inputs(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and the tangent of the samples; `rows` is s0."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, 8, generator=generator) for n in (rows, 8, rows))  # type: ignore[return-value]


def sample_results(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
    """What the samples compute, by plain autograd: y and the gradients of x and w."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = (x @ w).relu() * 2.0
    return [y.detach(), *torch.autograd.grad(y, (x, w), t)]


class Block(torch.nn.Module):
    """Layer norm, dropout-free MLP with a residual, batch norm's kind of tuple ops included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.up(self.norm(x)).chunk(2, dim=-1)
        return (x + self.down(torch.cat([left.sigmoid(), torch.nn.functional.gelu(right)], dim=-1))).square().mean()


def captured_step(mode: str) -> tuple[fx.Graph, list[torch.Tensor], list[torch.Tensor]]:
    """make_fx's joint graph of Block ("real" or "symbolic"), inputs for it and what plain PyTorch makes of them."""
    torch.manual_seed(0)
    model = Block()
    names = [name for name, _ in model.named_parameters()]

    def step(parameters: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        loss = functional_call(model, dict(zip(names, parameters)), (x,))
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    parameters = list(model.parameters())
    x = torch.randn(2, 5, 8)
    graph = make_fx(step, tracing_mode=mode)(parameters, x).graph
    if mode == "symbolic":
        x = torch.randn(3, 4, 8)
    return graph, [*(p.detach() for p in parameters), x], step(parameters, x)


_UNARY = ("aten.relu", "aten.neg", "aten.sigmoid", "aten.exp")
_BINARY = ("aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor")
_VIEWS = ("aten.t", "aten.alias")


@st.composite
def programs(draw: st.DrawFn, transfers: bool = False) -> str:
    """Straight-line programs on square matrices, forward and backward; with `transfers` some values travel, in an order that may be
    wrong: starts, waits and releases stand anywhere after what they name."""
    values, lines = ["x", "y"], []
    for i in range(draw(st.integers(2, 8))):
        op = draw(st.sampled_from((*_UNARY, *_BINARY, *_VIEWS)))
        operands = [draw(st.sampled_from(values)) for _ in range(2 if op in _BINARY else 1)]
        lines.append(f"%v{i}: f32[4,4] = {op} {', '.join('%' + o for o in operands)}")
        values.append(f"v{i}")
    returned = values[-1]
    if transfers:
        for k in range(draw(st.integers(1, 2))):
            returned = _travel(draw, lines, k) or returned
    lines.insert(draw(st.integers(0, len(lines))), "fxo.backward")
    inputs = ["%x: f32[4,4] = input {role=batch}", "%y: f32[4,4] = input {role=batch}"]
    return "\n".join(['graph "random"', *inputs, *lines, f"return (%{returned})"]) + "\n"


def _travel(draw: st.DrawFn, lines: list[str], k: int) -> str | None:
    """Sends one value to the host and back, its waits and releases at random places; returns a new last value that reads it."""
    made = [i for i, line in enumerate(lines) if line.startswith("%v") and "aten.t " not in line and "aten.alias" not in line]
    if not made:
        return None
    at = draw(st.sampled_from(made))
    name = lines[at].split(":")[0]
    steps = [
        f'%out{k}: f32[4,4]@pinned = fxo.swap_out {name}, host, "pinned"',
        f"%host{k}: f32[4,4]@pinned = fxo.wait %out{k}",
        f"%in{k}: f32[4,4] = fxo.swap_in %host{k}, device",
        f"%back{k}: f32[4,4] = fxo.wait %in{k}",
        f"%last{k}: f32[4,4] = aten.neg %{draw(st.sampled_from((f'back{k}', f'in{k}')))}",
    ]
    for step in steps:
        at = draw(st.integers(at + 1, len(lines)))
        lines.insert(at, step)
    if draw(st.booleans()):
        lines.insert(draw(st.integers(1, len(lines))), f'fxo.release {name} {{name="drop{k}"}}')
    if draw(st.booleans()):
        lines.insert(draw(st.integers(1, len(lines))), f"fxo.release %in{k}")
    return f"last{k}"


@dataclass(frozen=True)
class Llama:
    """A really captured and lowered step: `before` is the canonical graph, `after` the lowered one, `unmerged` the same before copies
    are merged into buckets and values released, all as text."""

    before: str
    unmerged: str
    after: str
    plan: GraphPlan
    device_budget_bytes: int


def llama() -> Llama:
    """A two-layer Llama on the CPU under a budget at which it streams, swaps and recomputes. `mutants.py` damages what this returns."""
    return _captured_llama()


@cache
def _captured_llama() -> Llama:
    import tempfile
    from pathlib import Path

    import transformers

    import fxoffload

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, 16))
    with tempfile.TemporaryDirectory() as folder:
        fxoffload.compile(
            model, {"input_ids": ids, "labels": ids.clone()}, device="cpu", device_budget="60KiB", host_budget="1GiB",
            pins=(fxoffload.pin("*silu*", "checkpoint"),), dump_dir=folder,
        )
        dumps = sorted((Path(folder) / "train").glob("*.ir"))
        before, unmerged, after = (dumps[i].read_text() for i in (0, -3, -1))
        plan = next(graph for graph in model.fxoffload.plan.graphs.values() if graph.label == "train")
        budget = model.fxoffload.plan.device_budget_bytes
        model.fxoffload.close()
    return Llama(*map(_without_columns, (before, unmerged, after)), plan, budget)


def _without_columns(dump: str) -> str:
    lines = [COLUMN_PREFIX.sub("", line) for line in dump.splitlines()]
    return "".join(f"{line}\n" for line in lines if not line.startswith("//"))
