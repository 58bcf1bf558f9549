"""A plan names the kernel of every attention call, compile compares it with what is dispatched, and what is planned is what runs."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxoffload
from fxoffload import attention, dispatch
from fxoffload.dispatch import Call, assumed, dispatched
from fxoffload.kernels import expanded, grouped
from fxoffload.machine import load_machine

LENGTH, WIDTH, HEADS = 64, 32, 2
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
SCORES_BYTES = 2 * HEADS * LENGTH * LENGTH * 4


class Block(nn.Module):
    def __init__(self, p: float, choice: SDPBackend | None) -> None:
        super().__init__()
        self.qkv, self.out, self.p, self.choice = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), p, choice

    def attend(self, *heads: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.p if self.training else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        if self.choice is None:
            y = self.attend(*heads)
        else:
            with sdpa_kernel(self.choice):
                y = self.attend(*heads)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Blocks(nn.Module):
    """Three blocks, the second of which may have dropout: on the CPU no fused kernel has it."""

    def __init__(self, p: float = 0.0, choice: SDPBackend | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(p if i == 1 else 0.0, choice) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model: nn.Module, **options: Any) -> Any:
    return fxoffload.compile(model, X, **{"device": "cpu", "device_budget": "8MiB", "dynamic": False} | options)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of one step, whose forward alone is inside whatever context is open: backward runs in the default one, as autograd has it."""
    with sdpa_kernel([SDPBackend.MATH]):
        loss = model(X).square().mean()
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) > 0 and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def kernels_of(model: Any) -> dict[str, str]:
    return {one.layers: one.kernel for graph in model.fxoffload.plan.graphs.values() for one in graph.kernels}


# Names ----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.from_regex(r"([a-z]{1,2}|[0-9]|1[0-9])(\.([a-z]|[0-9]|1[0-9])){0,4}/attention#[0-9]", fullmatch=True), unique=True))
def test_names_written_as_ranges_are_the_same_names(names: list[str]) -> None:
    assert sorted(itertools.chain.from_iterable(map(expanded, grouped(names)))) == sorted(names)


def test_layers_are_one_name_and_towers_two() -> None:
    names = [f"model.layers.{i}.self_attn/attention#0" for i in (0, 1, 2, 5)] + [f"vision.blocks.{i}.attn/attention#0" for i in (0, 1)]
    assert grouped(names) == ["model.layers.0-2,5.self_attn/attention#0", "vision.blocks.0-1.attn/attention#0"]


# Which kernel ---------------------------------------------------------------------------------------------------------


def call(dtype: torch.dtype = torch.bfloat16, width: int = 128, device: str = "meta", **changes: Any) -> Call:
    """A causal call of 8 heads; `shared`: how many of keys and values, `masked`: a mask instead of causal."""
    shared, masked = changes.pop("shared", 8), changes.pop("masked", False)
    query, key = (torch.empty(2, 64, h, width, dtype=dtype, device=device).transpose(1, 2) for h in (8, shared))
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device=device) if masked else None
    return replace(Call(query, key, key, mask, 0.0, not masked, None, shared != 8, True), **changes)


RULES = [
    ("h200", call(), "cudnn"), ("b200", call(), "cudnn"), ("a100-80", call(), "flash"), ("rtx5090", call(), "flash"),
    ("h100", call(masked=True), "cudnn"), ("a100-80", call(masked=True), "efficient"),
    ("h100", call(shared=2), "cudnn"), ("a100-40", call(shared=2), "flash"), ("a100-40", call(shared=2, masked=True), "math"),
    ("h100", call(torch.float32), "efficient"), ("h100", call(torch.float32, shared=2), "math"), ("h100", call(torch.float64), "math"),
    ("h100", call(width=256), "cudnn"), ("b200", call(width=256), "flash"), ("h100", call(width=260), "math"), ("h100", call(width=264), "efficient"),
    ("rtx4090", call(width=256), "flash"), ("rtx4090", call(width=256, p=0.125), "efficient"), ("rtx4090", call(width=208), "efficient"),
    ("rtx4090", call(width=208, trains=False), "flash"), ("a100-80", call(width=208), "flash"), ("h100", call(p=0.1), "flash"),
    ("h100", call(p=0.125), "cudnn"),
]


@pytest.mark.parametrize(("machine", "operands", "kernel"), RULES)
def test_without_a_card_torchs_rules_say_which_kernel_it_is(machine: str, operands: Call, kernel: str) -> None:
    assert assumed(operands, load_machine(machine).compute_capability) == kernel


def test_the_users_switches_and_order_are_part_of_the_rules() -> None:
    capability = load_machine("h100").compute_capability
    for backend, kernel in ((SDPBackend.MATH, "math"), (SDPBackend.EFFICIENT_ATTENTION, "efficient"), (SDPBackend.FLASH_ATTENTION, "flash")):
        with sdpa_kernel(backend):
            assert assumed(call(), capability) == kernel
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert assumed(call(), capability) == "efficient"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(fxoffload.PlanError, match="no kernel"):
        assumed(call(masked=True), capability)


FORMS = [
    {"dtype": dtype, "width": width, "shared": shared, "masked": masked, "p": p}
    for dtype, width, shared, masked, p in itertools.product(
        [torch.float32, torch.bfloat16], [16, 20, 64, 128, 256], [8, 2], [False, True], [0.0, 0.125])
]


def torchs_choice(operands: Call) -> str:
    leaf = operands.query.detach().requires_grad_(operands.trains)
    options = operands.mask, operands.p, operands.causal
    choice = torch._fused_sdp_choice(leaf, operands.key, operands.value, *options, scale=operands.scale, enable_gqa=operands.gqa)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}[choice]


def test_the_choice_on_fake_tensors_is_the_one_on_real_tensors() -> None:
    for form in FORMS:
        operands = call(**form, device="cpu")
        assert dispatched(operands, torch.device("cpu")) == torchs_choice(operands), form
    with sdpa_kernel(SDPBackend.MATH):
        assert dispatched(call(device="cpu"), torch.device("cpu")) == torchs_choice(call(device="cpu")) == "math"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(fxoffload.PlanError, match="no kernel on cpu"):
        dispatched(call(p=0.5), torch.device("cpu"))


on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=str)
@pytest.mark.parametrize("form", [pytest.param(form, marks=on_cuda) for form in FORMS], ids=str)
def test_a_cards_choice_is_the_one_that_is_dispatched_and_that_is_assumed_without_it(form: dict[str, Any], backend: Any) -> None:
    device, capability = torch.device("cuda", 0), torch.cuda.get_device_capability()
    dispatch.settle_order(device)
    with sdpa_kernel([SDPBackend.MATH, backend]) if backend is not None else contextlib.nullcontext():
        operands = call(**form, device="cuda")
        expected = torchs_choice(operands)
        assert dispatched(operands, device) == expected
        assert assumed(operands, capability) == expected


# Plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "dtype", "kernel"), [
    ("h100", torch.bfloat16, "cudnn"), ("rtx4090", torch.bfloat16, "flash"), ("rtx4090", torch.float32, "efficient"),
    ("a100-80", torch.float64, "math"), ("cpu", torch.float32, "flash"),
])
def test_a_plan_names_the_kernel_per_layer_and_machine_with_its_bytes(machine: str, dtype: torch.dtype, kernel: str, tmp_path: Path) -> None:
    plan = fxoffload.plan(Blocks().to(dtype), X.to(dtype), device_budget="1GiB", machine=machine)
    (graph,) = plan.graphs.values()
    assert graph.kernels is not None
    (one,) = graph.kernels
    assert (one.layers, one.kernel, len(one.names)) == ("layers.0-2", kernel, 3)
    assert one.saved_bytes >= X.numel() * dtype.itemsize
    assert (one.scratch_bytes >= 2 * SCORES_BYTES) == (kernel == "math")
    assert f"attention of layers.0-2: {kernel}, 3 calls, each saves " in plan.explain()
    plan.save(tmp_path / "plan.json")
    assert fxoffload.Plan.load(tmp_path / "plan.json") == plan


def test_layers_with_other_operands_are_named_apart() -> None:
    plan = fxoffload.plan(Blocks(p=0.1), X, device_budget="1GiB", machine="cpu")
    (graph,) = plan.graphs.values()
    assert {one.layers: one.kernel for one in graph.kernels or ()} == {"layers.0,2": "flash", "layers.1": "math"}


def test_length_x_length_is_planned_where_math_is_dispatched() -> None:
    fused = fxoffload.plan(Blocks(), X, device_budget="1GiB", machine="cpu").predicted.device_peak_bytes
    with sdpa_kernel(SDPBackend.MATH):
        math = fxoffload.plan(Blocks(), X, device_budget="1GiB", machine="cpu").predicted.device_peak_bytes
    assert math >= fused + SCORES_BYTES


def test_an_old_plan_without_kernels_loads_and_replays(tmp_path: Path) -> None:
    model = compiled(Blocks())
    raw = json.loads(model.fxoffload.plan.to_json())
    model.fxoffload.close()
    for graph in raw["graphs"].values():
        del graph["kernels"]
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    old = fxoffload.Plan.load(tmp_path / "plan.json")
    assert [graph.kernels for graph in old.graphs.values()] == [None] and "attention of" not in old.explain()
    compiled(model, plan=old, replan=False).fxoffload.close()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_that_a_model_writes_out_is_math_in_the_graph(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=32,
        attn_implementation=implementation)
    plan = fxoffload.plan(config, (2, LENGTH), device_budget="1GiB", machine="h100")
    (graph,) = plan.graphs.values()
    (one,) = graph.kernels or ()
    assert (one.layers, one.kernel) == ("model.layers.0-1.self_attn", "math"), "fp32 with shared heads has no fused kernel"
    assert (one.saved_bytes >= SCORES_BYTES) == (implementation == "eager")
    assert (one.scratch_bytes >= SCORES_BYTES) == (implementation == "sdpa")


def test_a_model_without_attention_has_nothing_to_name() -> None:
    plan = fxoffload.plan(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Linear(WIDTH, 1)), X, device_budget="1GiB", machine="cpu")
    assert [graph.kernels for graph in plan.graphs.values()] == [()]


# Compile --------------------------------------------------------------------------------------------------------------


def test_another_kernel_than_the_plans_is_refused_with_layer_kernels_and_bytes() -> None:
    model = compiled(Blocks())
    plan = model.fxoffload.plan
    model.fxoffload.close()
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fxoffload.PlanError, match="(?s)flash.*layers.0-2.*math.*KiB.*replan=False") as refused:
        compiled(model, plan=plan, replan=False)
    assert (refused.value.shortfall_bytes or 0) >= SCORES_BYTES


def test_another_kernel_than_the_plans_is_planned_anew_and_is_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = compiled(Blocks()), Blocks()
    plan = model.fxoffload.plan
    model.fxoffload.close()
    with sdpa_kernel(SDPBackend.MATH), caplog.at_level(logging.WARNING, "fxoffload"):
        compiled(model, plan=plan)
    assert "planned anew" in caplog.text and kernels_of(model) == {"layers.0-2": "math"}
    (graph,) = model.fxoffload.graphs.values()
    nodes = [node for node in graph.nodes if node.target in attention.BOTH]
    assert len(nodes) >= 6 and {attention.kernel_named_in(node) for node in nodes} == {"math"}
    assert same(gradients(model), gradients(plain))
    model.fxoffload.close()


def test_switches_that_change_between_steps_are_planned_and_both_halves_run_one_kernel(caplog: pytest.LogCaptureFixture) -> None:
    plain = Blocks()
    model = compiled(Blocks())
    with caplog.at_level(logging.WARNING, "fxoffload"):
        assert same(gradients(model), gradients(plain)), "forward by math, as eager has it"
    assert "planned anew" in caplog.text
    captures = model.fxoffload.router.captures
    for one in (model, plain):
        one(X).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)), "flash again"
    assert model.fxoffload.router.captures == captures, "both are known"
    model.fxoffload.close()


def test_switches_that_change_are_refused_without_replan_and_the_plans_kernel_still_runs() -> None:
    model = compiled(Blocks())
    plan = model.fxoffload.plan
    model.fxoffload.close()
    model = compiled(model, plan=plan, replan=False)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fxoffload.PlanError, match="replan=False"):
        model(X)
    model(X).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters()) and model.fxoffload.plan == plan
    model.fxoffload.close()


def test_a_kernel_chosen_inside_the_model_is_the_one_that_runs() -> None:
    plain = Blocks(choice=SDPBackend.MATH)
    model = compiled(copy.deepcopy(plain))
    assert set(kernels_of(model).values()) == {"math"}
    for one in (model, plain):
        one(X).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.fxoffload.close()


def test_a_plan_for_a_card_runs_on_the_cpu_with_what_the_cpu_has() -> None:
    plain = Blocks(p=0.1)
    model = compiled(copy.deepcopy(plain), machine="h100", device_budget="1GiB")
    assert set(kernels_of(model).values()) == {"efficient"}
    for one in (model, plain):
        torch.manual_seed(1)
        one(X).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.fxoffload.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_a_cards_kernel_is_what_the_plan_of_its_machine_names_and_math_is_within_the_plan() -> None:
    x, model = X.to("cuda", torch.bfloat16), Blocks().to(torch.bfloat16)
    capability = torch.cuda.get_device_capability()
    machine = replace(load_machine("h100"), compute_capability=capability)
    plan = fxoffload.plan(model, X.bfloat16(), device_budget="2GiB", machine=machine)
    fxoffload.compile(model, x, device="cuda", device_budget="2GiB", machine=machine, plan=plan, replan=False)
    captures = model.fxoffload.router.captures  # type: ignore[union-attr]
    model(x).square().mean().backward()
    assert model.fxoffload.router.captures == captures, "the order of kernels is settled before the first capture"  # type: ignore[union-attr]
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fxoffload.PlanError, match="math"):
        model(x)
    model.fxoffload.close()  # type: ignore[union-attr,operator]
