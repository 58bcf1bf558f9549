"""Pins are kept by the plan, and what they ask that cannot be is said with both sides named."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same
from torch import nn

import fxoffload
from fxoffload import ops
from fxoffload.effects import Tier
from fxoffload.graph import border_of, info
from fxoffload.pins import Pin, pin
from fxoffload.plans import Gather, Plan, Recompute, SwapOut
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.full_search

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
TIGHT = "480KiB"  # one of the four layers' activations leaves, weights stream


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])


def compiled(*pins: Pin, budget: int | str = TIGHT, **options: Any) -> Any:
    return fxoffload.compile(layers(), X, **{"device": "cpu", "device_budget": budget, "pins": pins, "dynamic": False, **options})


def plan_of(*pins: Pin, **options: Any) -> Plan:
    model = compiled(*pins, **options)
    plain = layers()
    for one in (plain, model):
        one(X).square().mean().backward()
    plan: Plan = model.fxoffload.plan
    model.fxoffload.close()
    assert_same(plain, model)
    return plan


def moved(plan: Plan) -> set[str]:
    """Values that do not simply stay on the device until backward."""
    return {d.value for d in plan.decisions if isinstance(d, (SwapOut, Recompute))}


def test_a_value_pinned_to_keep_stays_and_another_leaves() -> None:
    free = moved(plan_of())
    assert free == {"1/tanh#0"}
    assert moved(plan_of(pin("1/tanh#0", "keep"))) == {"3/tanh#0"}


def test_a_value_pinned_to_keep_is_not_recomputed_and_one_pinned_to_checkpoint_is() -> None:
    plan = plan_of(pin("3/tanh#0", "keep"), pin("5/tanh#0", "checkpoint"), budget="1GiB")
    assert {d.value for d in plan.decisions if isinstance(d, Recompute)} == {"5/tanh#0"}
    (graph,) = plan.graphs.values()
    assert "3/tanh#0" in graph.saved and "5/tanh#0" not in graph.saved


def test_a_parameter_pinned_to_the_device_resides_and_is_never_gathered() -> None:
    pinned = {"0.weight", "2.weight"}
    before, after = plan_of(), plan_of(*(pin(name, "device") for name in pinned), budget="560KiB")
    assert not {r.value for r in before.residency if r.tier is Tier.DEVICE}
    assert {r.value for r in after.residency if r.tier is Tier.DEVICE} == pinned
    gathered = {d.value for d in after.decisions if isinstance(d, Gather)}
    assert gathered and not gathered & pinned


def test_a_pin_to_the_device_that_cannot_be_kept_is_refused(simulated_device: SimulatedDevice) -> None:
    with pytest.raises(fxoffload.PlanError, match="0.weight is pinned to the device, and fxsim cannot hold"):
        compiled(pin("0.weight", "device"), device="fxsim")
    with pytest.raises(fxoffload.PlanError, match="0.weight is trained and pinned to the device.*optimizer=None"):
        compiled(pin("0.weight", "device"), optimizer=None)


@pytest.mark.parametrize(("pins", "name"), [
    ((pin("0.weight", "device"), pin("*.weight", "host")), "0.weight"),
    ((pin("*.weight", "disk"), pin("0.*", "pageable")), "0.weight"),
    ((pin("5/tanh#0", "keep"), pin("*.tanh#0", "swap")), "5/tanh#0"),
    ((pin("*tanh*", "checkpoint"), pin("1/*", "keep")), "1/tanh#0"),
], ids=str)
def test_pins_that_disagree_are_refused_with_both_and_the_model_stays_as_it_was(pins: tuple[Pin, Pin], name: str) -> None:
    model = layers()
    with pytest.raises(fxoffload.PlanError) as refused:
        fxoffload.compile(model, X, device="cpu", device_budget="1GiB", pins=pins, disk_budget="1MiB", disk_dir="/tmp")
    a, b = pins
    said = str(refused.value)
    assert f"pins disagree on {name}" in said
    assert f"{a.pattern!r} says {a.place}" in said and f"{b.pattern!r} says {b.place}" in said
    assert type(model[0]) is nn.Linear


def test_a_pin_that_matches_nothing_is_refused() -> None:
    with pytest.raises(fxoffload.PlanError, match="'1/tanh#7' to keep matches no value"):
        compiled(pin("1/tanh#7", "keep"))
    with pytest.raises(ValueError, match="'0.wait' matches no parameter"):
        compiled(pin("0.wait", "device"))


def test_a_named_host_tier_goes_before_any_host_tier(tmp_path: Path) -> None:
    for pins in ((pin("*", "host"), pin("0.weight", "disk")), (pin("0.weight", "disk"), pin("*", "host"))):
        plan = plan_of(*pins, disk_budget="1MiB", disk_dir=tmp_path)
        assert {r.value for r in plan.residency if r.tier is Tier.DISK} == {"0.weight"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.head = nn.Embedding(512, 64), nn.Linear(64, 64), nn.Linear(64, 512, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.middle(self.embedding(ids)).tanh()).view(-1, 512), ids.view(-1))


IDS = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("budget", "forward", "backward"), [("1GiB", 1, 0), ("500KiB", 1, 1)])
def test_a_tied_weight_is_gathered_at_most_once_per_half(budget: str, forward: int, backward: int) -> None:
    model, plain = Tied(), Tied()
    fxoffload.compile(model, IDS, device="cpu", device_budget=budget, pins=[pin("*", "host")])
    (graph,) = model.fxoffload.graphs.values()  # type: ignore[union-attr]
    order = {node: i for i, node in enumerate(graph.nodes)}
    border = border_of(graph)
    copies = [n for op in (ops.swap_in, ops.swap_in_many) for n in graph.find_nodes(op="call_function", target=op)]
    gathers = sorted((n for n in copies for s in n.all_input_nodes if info(s).fqn == "embedding.weight"), key=order.__getitem__)
    assert [order[n] < order[border] for n in gathers] == [True] * forward + [False] * backward
    for one in (model, plain):
        one(IDS).backward()
    model.fxoffload.close()  # type: ignore[union-attr,operator]
    assert_same(plain, model)


def test_nothing_but_gradients_and_activations_goes_to_the_host() -> None:
    model: Any = layers()
    model[:6].requires_grad_(False)
    fxoffload.compile(model, X, device="cpu", device_budget="400KiB", pins=[pin("*", "host"), pin("5/tanh#0", "swap")])
    (graph,) = model.fxoffload.graphs.values()
    names = [info(n).name for n in graph.find_nodes(op="call_function", target=ops.swap_out)]
    assert sorted(names) == ["5/tanh#0^0/out", "6.bias.grad/out", "6.weight.grad/out"]
    model(X).square().mean().backward()
    assert model.fxoffload.transferred["d2h"] == model[6].weight.nbytes + model[6].bias.nbytes + X.nbytes
    model.fxoffload.close()


def test_a_compile_is_one_log_line_with_the_plans_id_what_is_inserted_and_what_is_predicted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fxoffload"):
        plan = plan_of(pin("5/tanh#0", "checkpoint"))
        (line,) = [r.getMessage() for r in caplog.records]
        counts = {kind: n for kind, n in plan.count().items() if n and kind != "reside"}
        assert set(counts) >= {"gather", "recompute"}
        assert line.startswith(f"plan {plan.id}, graph train: {', '.join(f'{n} {kind}' for kind, n in sorted(counts.items()))}; ")
        peak = plan.predicted.device_peak_bytes / 1024
        assert f"predicted device {peak:.2f} KiB, host " in line and line.endswith(f", {plan.predicted.step_s:.4f} s")
        caplog.clear()
        plan_of(plan=plan, replan=False)
        assert [r.getMessage() for r in caplog.records] == [line], "a replay is a compile too"


def test_a_compile_that_changes_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(layers()).requires_grad_(False)
    model.append(nn.Linear(64, 1))
    pins = [pin("8.*", "device")]
    with caplog.at_level(logging.INFO, "fxoffload"):
        fxoffload.compile(model, X, device="cpu", device_budget="1GiB", pins=pins).fxoffload.close()  # type: ignore[union-attr,operator]
    (line,) = [r.getMessage() for r in caplog.records]
    assert "graph train: nothing inserted: an identity rewrite; predicted device " in line
