"""Embeddings that read their rows on the host: who does, what that takes, and the bits of training with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from zoo import FAMILIES

import fxoffload
from fxoffload import ops
from fxoffload.api import captured, planning_options
from fxoffload.effects import Tier
from fxoffload.liveness import Kind, liveness
from fxoffload.lookups import solve_looked_up
from fxoffload.machine import load_machine
from fxoffload.planner import Solution, solve
from fxoffload.plans import Gather, Lookup, Plan
from fxoffload.runtime.host_memory import HostMemory
from fxoffload.runtime.transfers import StreamEngine, SynchronousEngine
from fxoffload.testing.simulated_device import SimulatedDevice
from fxoffload.text import parse

pytestmark = pytest.mark.integration
PINS = [fxoffload.pin("table.weight", "host"), fxoffload.pin("frozen.*", "host")]


class Tagger(nn.Module):
    """A table of which a batch reads little, or, where it has few rows, as much as there is; it may be the head too. What is `frozen` and
    pinned to the host is copied in each step."""

    def __init__(self, n_rows: int = 512, tied: bool = False, **named: Any) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(n_rows, 32, **named), nn.Linear(32, 32), nn.Linear(32, n_rows, bias=False)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.frozen(self.mix(self.table(ids))))).flatten(0, 1), ids.flatten())


def ids(n_rows: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, n_rows, (2, 8), generator=torch.Generator().manual_seed(seed))


def planned(model: nn.Module, budget: str = "100MiB", batch: Any = None, **named: Any) -> Plan:
    return fxoffload.plan(model, (ids(),) if batch is None else batch, device_budget=budget, machine="h200", **named)


def kinds(plan: Plan, kind: type) -> list[Any]:
    return [decision for decision in plan.decisions if isinstance(decision, kind)]


def trained(model: nn.Module, batches: Sequence[torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
    optimizer, losses = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2), []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize(("model", "named", "looks"), [
    (Tagger(), {"pins": [fxoffload.pin("table.weight", "host")]}, True),
    (Tagger(), {"pins": [fxoffload.pin("table.weight", "pageable")]}, False),
    (Tagger(), {"pins": [fxoffload.pin("table.weight", "device")]}, False),
    (Tagger(12), {"pins": [fxoffload.pin("table.weight", "host")], "batch": (ids(12),)}, False),
], ids=["pinned", "pageable", "device", "few rows"])
def test_an_embedding_reads_its_rows_on_the_host_where_the_device_can_reach_them_and_they_are_few(
        model: nn.Module, named: dict[str, Any], looks: bool) -> None:
    named["pins"] = [*named["pins"], fxoffload.pin("frozen.*", "host")]
    plan = planned(model, **named)
    assert bool(kinds(plan, Lookup)) == looks
    gathered = {decision.value for decision in kinds(plan, Gather)}
    assert ("table.weight" in gathered) == (not looks and named["pins"][0].place != "device")


def test_what_fits_is_resident_and_no_rewrite_is_left() -> None:
    model = Tagger().requires_grad_(False)
    model.mix.requires_grad_(True)
    plan = planned(model)
    assert not kinds(plan, Lookup) and {one.value for one in plan.residency if one.tier is Tier.DEVICE} >= {"table.weight", "head.weight"}


def test_the_bytes_of_the_rows_are_counted_and_the_table_takes_no_memory() -> None:
    model = Tagger(1 << 15).requires_grad_(False)
    model.mix.requires_grad_(True)
    plan = planned(model, pins=[fxoffload.pin("table.weight", "host"), fxoffload.pin("head.weight", "device")], optimizer="adamw")
    assert plan.predicted.moved_bytes["h2d"] - 2 * 8 * 32 * 4 < model.table.weight.nbytes // 2


def test_a_table_that_comes_to_reside_is_priced_where_it_lies_then() -> None:
    """A tied head's copies are what makes it reside: its rows are read there too, and plans are compared by what that takes."""
    model = Tagger(1 << 15, tied=True)
    model.table.requires_grad_(False)
    machine = replace(load_machine("h200"), dispatch_s=None)  # issuing would take longer than all of it
    options = planning_options(model, machine, "1GiB", None, 0, "adamw", "auto", None, "bitwise", PINS[1:])
    with captured(model, (ids().repeat(1, 64),), options, machine) as session:
        found = solve_looked_up(session.study.planning.problem(session.study.captured), solve)
    assert "table.weight" in found.resident and any(isinstance(one, Lookup) for one in found.decisions)
    assert found.estimated_s == pytest.approx(found.simulation.step_s, rel=1e-9)


def test_a_table_resides_where_memory_is_left_though_other_parameters_are_copied() -> None:
    model = Tagger(1 << 15)
    model.table.requires_grad_(False)
    machine = replace(load_machine("h200"), dispatch_s=None)
    pins = [*PINS[1:], *(fxoffload.pin(f"{name}.*", "device") for name in ("mix", "head"))]
    options = planning_options(model, machine, "1GiB", None, 0, "adamw", "auto", None, "bitwise", pins)
    with captured(model, (ids().repeat(1, 64),), options, machine) as session:
        planning, graph = session.study.planning, session.study.captured
        ample = solve_looked_up(planning.problem(graph), solve)
        tight = solve_looked_up(replace(planning, budgets=replace(planning.budgets, device_bytes=_without_table(ample, model))).problem(graph), solve)
    assert "table.weight" in ample.resident and "table.weight" not in tight.resident
    assert all(any(isinstance(one, Lookup) for one in found.decisions) for found in (ample, tight))
    assert ample.simulation.step_s < tight.simulation.step_s
    assert ample.estimated_s == pytest.approx(ample.simulation.step_s, rel=1e-9)


def _without_table(found: Solution, model: Tagger) -> int:
    """What the plan takes, but for half of the table."""
    return found.simulation.device_peak_bytes - model.table.weight.nbytes // 2


@pytest.mark.gpu
def test_training_with_a_table_that_is_looked_up_and_resides_has_the_bits_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model = Tagger()
    model.table.requires_grad_(False)
    plain, batches = copy.deepcopy(model).to("cuda"), [ids(seed=i).to("cuda") for i in range(4)]
    ours = fxoffload.compile(model, batches[0], device="cuda", device_budget="1GiB", pins=PINS[1:], dynamic=False)
    (graph,) = ours.fxoffload.graphs.values()
    assert len(graph.find_nodes(op="call_function", target=ops.lookup)) == 1
    assert "table.weight" in {one.value for one in ours.fxoffload.plan.residency if one.tier is Tier.DEVICE}
    assert gradients(ours, batches) == gradients(plain, batches)
    ours.fxoffload.close()


def gradients(model: nn.Module, batches: Sequence[torch.Tensor]) -> list[list[float]]:
    """Of every batch, the loss and the gradients of what is trained."""
    found = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        found.append([loss.item(), *(n for p in trained for n in p.grad.flatten().tolist())])
        model.zero_grad()
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("named", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=["plain", "padding", "scaled"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "fxsim"])
def test_training_has_the_bits_of_the_plain_model(
        tied: bool, frozen: bool, named: dict[str, Any], device: str, simulated_device: SimulatedDevice) -> None:
    torch.manual_seed(0)
    model = Tagger(tied=tied, **named)
    model.table.requires_grad_(not frozen)
    plain = copy.deepcopy(model).to(device)
    if tied:
        plain.head.weight = plain.table.weight  # a simulated device makes two of them
    batches = [ids(seed=i).to(device) for i in range(4)]
    ours = fxoffload.compile(model, batches[0].cpu(), device=device, device_budget="1MiB", pins=PINS, dynamic=frozen)
    (graph,) = ours.fxoffload.graphs.values()
    assert len(graph.find_nodes(op="call_function", target=ops.lookup)) == 1
    assert trained(ours, batches)[0] == trained(plain, batches)[0]
    moved = ours.fxoffload.engine.moved_bytes["h2d"]
    assert moved % ours.fxoffload.plan.predicted.moved_bytes["h2d"] == 0 and moved > 0
    ours.fxoffload.close()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("family", ["lora", "lora_bf16", "qlora"])
def test_models_look_up_where_they_stream(family: str) -> None:
    case = FAMILIES[family]()
    plan = fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="h200", pins=[fxoffload.pin("*", "host")])
    rows = sum(isinstance(module, nn.Embedding) for module in case.model.modules())
    assert 0 < len(kinds(plan, Lookup)) <= 2 * rows


def test_looked_up_rows_are_activations_and_what_is_computed_on_them_too() -> None:
    text = """%i: i64[2,3] = input {role=batch}
%w: f32[16,8]@pinned = input {role=parameter, fqn="w"}
%e: f32[2,3,8] = fxo.lookup %w, %i, device
%s: f32[2,3,8] = aten.sin %e
fxo.backward
return ((%s), ())
"""
    graph = parse(f'graph "rows"\n{text}')
    kinds = {storage.name: storage.kind for storage in liveness(graph).first}
    assert kinds["e"] is kinds["s"] is Kind.ACTIVATION and kinds["w"] is Kind.PARAMETER


def test_an_engine_with_streams_reads_the_rows_itself_and_who_writes_the_table_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Device:
        Stream = Event = current_stream = lambda self, *_: Device()
        record = lambda self, stream: said.append("recorded")
        synchronize = lambda self: said.append("waited")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    memory, table, indices = HostMemory(), torch.randn(50, 8, dtype=torch.bfloat16), torch.tensor([[3, 49, 3], [0, 1, 2]])
    engine, plain = StreamEngine(torch.device("cpu"), memory), SynchronousEngine(torch.device("cpu"), memory)
    for one in (engine, plain):
        out = one.lookup(table, indices, True)
        assert torch.equal(out, torch.embedding(table, indices)) and out.is_contiguous()
        assert one.moved_bytes == {"h2d": out.nbytes} and one.copies == {"h2d": 1}
        assert torch.equal(one.lookup(table, indices, False), out) and one.copies == {"h2d": 1}
    assert said == ["recorded"]
    engine.finish()
    assert said == ["recorded"]
    engine.settle()
    engine.settle()
    assert said == ["recorded", "waited"]
    with engine.recorded() as recorded:
        engine.lookup(table, indices, True)
    assert said == ["recorded", "waited"] and recorded.copies == {"h2d": 1}
    memory.close()


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_rows_in_pinned_memory_are_read_by_the_card(tied: bool) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(0)
        model = Tagger(4096, tied=tied)
        plain = copy.deepcopy(model).cuda()
        batches = [ids(4096, seed=i).cuda() for i in range(8)]
        ours = fxoffload.compile(model, batches[0].cpu(), device="cuda", device_budget="1GiB", pins=PINS)
        (graph,) = ours.fxoffload.graphs.values()
        assert len(graph.find_nodes(op="call_function", target=ops.lookup)) == 1
        for batch in batches:
            losses = [one(batch) for one in (ours, plain)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses) and torch.equal(ours.table.weight.grad, plain.table.weight.grad.cpu())
            ours.zero_grad()
            plain.zero_grad()
        ours.fxoffload.close()
    finally:
        torch.use_deterministic_algorithms(False)


