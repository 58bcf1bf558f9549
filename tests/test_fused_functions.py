"""Blocks that are fused by hand pass through: the bits of plain PyTorch inside the budget, and no gathered weight kept for backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.fx as fx
from fused_functions import CASES
from runs import FRACTIONS, fault, rows
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap
from zoo import FAMILIES, Case

import fxoffload
from fxoffload import ops, text
from fxoffload.graph import Role, border_of, info, name_of, operands, output_of
from fxoffload.joint import inputs_of, step_graph
from fxoffload.liveness import liveness
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
# Of the peak of the plan with room: the least in which the largest op of every case still fits.
SHARE = 0.4


def quick(name: str, is_quick: bool) -> Any:
    """The case as a parameter, for `make soak` only unless it is quick."""
    return name if is_quick else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [quick(n, n == "lora-mlp") for n in CASES])
def test_they_train_bit_equal_inside_the_budget(name: str, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, name, CASES[name])
    found = list(rows(name, "fxsim", simulated_device))
    assert len(found) == len(FRACTIONS)
    for row in found:
        assert not fault(row, found[0]), (fault(row, found[0]), row)
    assert not found[1].refused


@pytest.mark.parametrize("name", [quick(n, n == "lora-mlp") for n in CASES if n.startswith("lora")])
def test_frozen_weights_that_a_function_keeps_are_gathered_again_for_backward(name: str) -> None:
    """Under a budget that has no room to keep them; and what is made of weights alone is never saved, whatever the room."""
    case = CASES[name]()
    frozen = {n for n, p in case.model.named_parameters() if not p.requires_grad and "base_layer" in n}
    host = [fxoffload.pin("*", "host")]
    free_bytes = lowered(case, "1GiB", host)[1]
    graph, peak_bytes = lowered(case, int(free_bytes * SHARE), host)
    assert frozen and peak_bytes <= free_bytes * SHARE
    loaded = loads(graph)
    again = {n for n in frozen if loaded[n] == 2}
    # Those of the first block have no operand to give a gradient to; the last ones of forward are the first of backward.
    assert len(again) >= len(frozen) / 2 and all(loaded[n] in (1, 2) for n in frozen - again), loaded


def lowered(case: Case, budget: int | str, pins: list[fxoffload.Pin]) -> tuple[fx.Graph, int]:
    """The lowered step and its predicted peak, after a look at what it saves."""
    model: Any = fxoffload.compile(case.model, case.batch, device="cpu", device_budget=budget, pins=pins, dynamic=False)
    (graph,), peak_bytes = model.fxoffload.graphs.values(), model.fxoffload.plan.predicted.device_peak_bytes
    border, live = border_of(graph), liveness(graph, output_of(graph).meta[text.BOUNDS])
    assert border is not None
    made = {live.of[node][0]: node for node in graph.nodes if node.op == "call_function" and live.defined_at(node)}
    saved = [node for storage, node in made.items() if live.first[storage] < live.border < live.last[storage]]
    of_weights = [name_of(node) for node in saved if node.target not in MOVES and operands(node) and all(map(is_of_weights, operands(node)))]
    assert saved and not of_weights
    model.fxoffload.close()
    return graph, peak_bytes


def test_what_gradients_by_hand_do_twice_or_begin_with_is_left_out_where_sums_may_be_reordered() -> None:
    losses, zeros, products = {}, {}, {}
    for numerics in ("bitwise", "reordered"):
        torch.manual_seed(0)
        case = CASES["lora-mlp"]()
        model: Any = fxoffload.compile(case.model, case.batch, device="cpu", device_budget="1GiB", numerics=numerics, dynamic=False)
        (graph,) = model.fxoffload.graphs.values()
        zeros[numerics] = sum(node.target is torch.ops.aten.zeros_like.default for node in graph.nodes)
        products[numerics] = sum(node.target is torch.ops.aten.mm.default for node in graph.nodes)
        loss = model(**case.batch).loss
        loss.backward()
        losses[numerics] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.fxoffload.close()
    n_mlps = zeros["bitwise"]
    assert n_mlps > zeros["reordered"] == 0
    # Of each an addmm is a product now, and for each of its three linears the gradient's product with B is made once.
    assert products["reordered"] == products["bitwise"] + n_mlps - 3 * n_mlps
    torch.testing.assert_close(losses["reordered"], losses["bitwise"])


MOVES = (ops.swap_in, ops.swap_in_many, ops.swap_out, ops.wait, ops.part)


def is_of_weights(node: fx.Node) -> bool:
    """Whether a value is made of parameters alone."""
    if node.op == "placeholder":
        return info(node).role is Role.PARAMETER
    return bool(operands(node)) and all(map(is_of_weights, operands(node)))


def loads(graph: fx.Graph) -> Counter[str]:
    """How often each parameter comes to the device."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.target in (ops.swap_in, ops.swap_in_many):
            found.update(str(info(source).fqn) for source in operands(node) if source.op == "placeholder")
    return found


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Stands for a Triton kernel."""
    return x


def test_a_triton_kernel_that_the_model_calls_itself_is_refused_by_its_name() -> None:
    joint = fx.Graph()
    x = joint.placeholder("x")
    x.meta["val"] = torch.empty(4)
    index = triton_kernel_wrap.kernel_side_table.add_kernel(scaled)  # type: ignore[arg-type]
    launched = joint.call_function(triton_kernel_wrap.triton_kernel_wrapper_functional, (), {"kernel_idx": index, "kwargs": {"x": x}})
    launched.meta["nn_module_stack"] = {"": ("L['module'].layers.0.norm", nn.Module)}
    joint.output((launched,))
    with pytest.raises(fxoffload.PlanError, match=r"layers\.0\.norm calls the Triton kernel scaled, .*custom_op"):
        step_graph(joint, inputs_of([None]), 1)


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.linear(x),)).sum()


def test_a_graph_inside_of_an_op_is_refused_where_it_stands() -> None:
    with pytest.raises(fxoffload.PlanError, match="uses cond, which cannot be planned"):
        fxoffload.plan(Choosing(), torch.randn(4, 8), device_budget="1GiB", machine="cpu")
