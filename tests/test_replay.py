"""Steps that are told to the device once: which may be, what the caller gets and may keep, and when a recording is good no more.

Where there is no CUDA, a double records: it runs the step again, into the results of the recording.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from zoo import FAMILIES, Case, tokens

import fxoffload
from fxoffload import ops
from fxoffload.api import captured, planning_options
from fxoffload.effects import Tier
from fxoffload.footprint import Footprint
from fxoffload.graph import is_random
from fxoffload.layout import extent_bytes
from fxoffload.machine import load_machine
from fxoffload.planner import Problem, Searches, Solution
from fxoffload.planning import Planning
from fxoffload.plans import Plan
from fxoffload.replays import obstacle
from fxoffload.runtime import replay
from fxoffload.runtime.device_arena import DeviceArena
from fxoffload.runtime.early import EarlyStarts
from fxoffload.runtime.host_memory import HostMemory
from fxoffload.runtime.recordings import Boxed, Given, Recordings, Segments
from fxoffload.runtime.transfers import Leaving, Recorded, StreamEngine
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration

# What the plan says --------------------------------------------------------------------------------------------------

def planned(case: Case, budget: str, **named: Any) -> Plan:
    return fxoffload.plan(case.model, case.batch, device_budget=budget, machine="h200", **named)

def lowered(case: Case, budget: str, **named: Any) -> Any:
    machine = load_machine("h200")
    options = planning_options(case.model, machine, budget, None, 0, "adamw", "auto", None, "bitwise", ())
    with captured(case.model, case.batch, replace(options, **named), machine) as session:
        session.lower_captured()
        (graph,) = session.graphs.values()
        return graph

def test_a_plan_says_that_a_step_is_replayed_counts_what_that_takes_and_no_issuing() -> None:
    plan = planned(FAMILIES["lora"](), "1GiB")
    (graph,) = plan.graphs.values()
    assert graph.replays and "replayed" in plan.explain() and '"replays": true' in plan.to_json()
    assert graph.reasons is not None and "issue" not in graph.reasons.critical_s

    machine = load_machine("h200")
    footprint = Footprint.planned(machine)
    assert replace(footprint, recording_bytes=5000).needed_bytes(0) > footprint.needed_bytes(0) + 5000

def test_a_step_that_has_no_room_for_a_recording_is_called() -> None:
    plan = planned(FAMILIES["lora"](), "120MiB")
    (graph,) = plan.graphs.values()
    assert not graph.replays and '"replays"' not in plan.to_json()

@pytest.mark.parametrize("share", (0.5, 2.0))
def test_a_recording_is_compared_with_what_is_called_in_a_budget_that_depends_on_no_budget(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faster, it is the plan of every larger budget; slower, of none."""
    real, asked = Planning._solution, list[Problem]()

    def solution(self: Planning, problem: Problem, known: Searches) -> Solution:
        if problem.context.draws_once:  # to be recorded
            return real(self, problem, known)
        asked.append(problem)
        found = real(self, replace(problem, context=replace(problem.context, device_budget_bytes=1 << 30), than_s=math.inf), known)
        return replace(found, simulation=replace(found.simulation, step_s=share * problem.than_s - found.after_s))

    monkeypatch.setattr(Planning, "_solution", solution)
    for budget in ("1500MiB", "2GiB", "3GiB"):
        (graph,) = planned(FAMILIES["lora"](), budget).graphs.values()
        assert graph.replays is (share > 1), budget
    assert len({one.context.device_budget_bytes for one in asked}) == 1 < len(asked)
    assert all(0 < one.than_s < math.inf and (one.context.device_budget_bytes or 0) < 1500 << 20 for one in asked)


@pytest.mark.parametrize(("family", "says"), [("mixtral", "known"), ("mamba", None)])
def test_what_the_host_may_have_to_do_cannot_be_recorded(family: str, says: str | None) -> None:
    found = obstacle(lowered(FAMILIES[family](), "1GiB"))
    assert found is None if says is None else found is not None and says in found

def test_attention_with_dropout_and_copies_from_memory_that_is_not_pinned_cannot_be_recorded() -> None:
    assert "draws random numbers" in (obstacle(lowered(zoo.llama(attention_dropout=0.5), "1GiB")) or "")
    pageable = lowered(FAMILIES["llama"](), "200MiB", pin_memory=False, pins=(fxoffload.pin("*", "host"),))
    assert "pageable" in (obstacle(pageable) or "")

def test_a_step_with_dropout_is_recorded_unless_the_caller_says_that_it_draws_again() -> None:
    again = fxoffload.pin("*dropout*", "checkpoint")
    free, pinned = (planned(zoo.lora(dropout=0.1, num_hidden_layers=1), "1GiB", pins=pins) for pins in ((), [again]))
    assert [graph.replays for graph in (*free.graphs.values(), *pinned.graphs.values())] == [True, False]
    graph = lowered(zoo.lora(dropout=0.1, num_hidden_layers=1), "1GiB", pins=(again,))
    assert "sets a generator back" in (obstacle(graph) or "") and any(map(is_random, graph.nodes))

class HostNoise(nn.Module):
    """A device's values times a number that the host has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * (torch.rand((), device="cpu") + 0.5)).square().mean()

# What runs -----------------------------------------------------------------------------------------------------------

@dataclass
class Engine:
    """What Replay asks an engine, over one that copies at once."""

    inner: Any
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.inner.device

    @contextmanager
    def recorded(self) -> Iterator[Recorded]:
        before, found = (self.inner.moved_bytes.copy(), self.inner.copies.copy()), Recorded()
        yield found
        found.moved_bytes, found.copies = self.inner.moved_bytes - before[0], self.inner.copies - before[1]
        self.inner.moved_bytes, self.inner.copies = before

    @property
    def memory(self) -> HostMemory:
        return self.inner.memory  # type: ignore[no-any-return]

    def replayed(self, recorded: Recorded) -> None:
        self.inner.moved_bytes.update(recorded.moved_bytes)
        self.inner.copies.update(recorded.copies)

    def finish(self) -> None:
        self.inner.finish()

    def settle(self) -> None:
        self.inner.settle()

class Again(Recordings):
    """A recording that makes the call again, into the results of the first one. `n`: recordings, and replays."""

    def __init__(self, device: torch.device, engine: Any, arena: DeviceArena) -> None:
        self.device, self.engine, self.arena, self._replays = device, Engine(engine), arena, weakref.WeakSet()
        self.early = EarlyStarts(device)
        arena.moves = self.forget
        self.n, self.n_bytes = [0, 0], 0

    def held_bytes(self) -> int:
        return self.n_bytes * sum(one.is_recorded for one in self._replays)

    def record(self, call: Boxed, given: Sequence[object], recorded: Recorded) -> tuple[Sequence[object], Callable[[], None]]:
        self.n[0] += 1
        results = self.undone(lambda: list(call(list(given))))
        arguments, kept = [self.place(one) for one in given], [self.place(one) for one in results]
        for i, one in enumerate(results):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.numel() and not any(one is other for other in given):
                recorded.held[one.data_ptr()] = one
                leaving = recorded.leaving[one.data_ptr()] = Leaving(kept[i](), torch.empty(0), Tier.PAGEABLE)
                kept[i] = partial(getattr, leaving, "out")

        def again() -> None:
            self.n[1] += 1
            with self.engine.recorded():
                for there, now in zip(kept, call([one() for one in arguments]), strict=True):
                    if isinstance(there(), torch.Tensor):
                        there().copy_(now)
        return results, again

    def undone(self, run: Callable[[], list[object]]) -> list[object]:
        """What `run` returns, with the arena as it was: a device that records does nothing."""
        begin, end = self.arena.extent()
        before = self.arena.strided(0, (end - begin,), (1,), torch.uint8).clone()
        state = ops.get_rng_state(self.device)
        results = run()
        ops.set_rng_state(state, self.device)
        self.arena.strided(0, (end - begin,), (1,), torch.uint8).copy_(before)
        return results

    def place(self, value: Any) -> Callable[[], Any]:
        """What is at the same address: like a recording, it keeps nothing alive."""
        begin, _ = self.arena.extent()
        if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() != begin:
            return self.on_host(value) if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() else lambda: value
        offset, shape, stride, dtype = value.storage_offset() * value.element_size(), value.shape, value.stride(), value.dtype
        return lambda: self.arena.strided(offset, shape, stride, dtype)

    @staticmethod
    def on_host(value: torch.Tensor) -> Callable[[], torch.Tensor]:
        address, n_bytes, shape, stride, dtype = value.data_ptr(), extent_bytes(value), value.shape, value.stride(), value.dtype
        there = torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=dtype).as_strided(shape, stride)
        return lambda: there

@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Again]]:
    """Every step on the simulated device is to be replayed; the recordings of all sessions."""
    made: list[Again] = []

    def recordings_for(device: torch.device, engine: Any, arena: Any) -> Recordings:
        made.append(Again(device, engine, arena))
        return made[-1]

    solved = Planning._solve
    monkeypatch.setattr(Planning, "_solve", lambda *args: replace(solved(*args), replays=True))
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True)))
    monkeypatch.setattr("fxoffload.session.recordings_for", recordings_for)
    yield made

def trained(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]], accumulated: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses, which the caller keeps as they are, and the last weights that are trained."""
    torch.manual_seed(0)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    losses = []
    for i, batch in enumerate(batches):
        loss = model(**{name: value.to("fxsim") for name, value in batch.items()}).loss
        loss.backward()
        losses.append(loss.detach())
        if (i + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [one.cpu() for one in losses], [p.detach().cpu() for p in weights]

@pytest.mark.parametrize(("family", "budget", "accumulated"), [
    ("lora", "16MiB", 2), ("lora", "600KiB", 1), ("llama", "700KiB", 2),
    *(pytest.param(family, budget, 1, marks=pytest.mark.slow)
      for family, budget in (("lora_bf16", "16MiB"), ("lora", "16MiB"), ("llama", "700KiB"), ("phi3", "16MiB")))])
def test_replayed_steps_have_the_bits_of_plain_ones_and_copy_as_much(
        family: str, budget: str, accumulated: int, simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    case, batches = FAMILIES[family](), [tokens(seed=i) for i in range(8)]
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, batches[0], device="fxsim", device_budget=budget, dynamic=False)
    expected, got = trained(plain, batches, accumulated), trained(model, batches, accumulated)
    for ours, theirs in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(ours, theirs)
    (recordings,) = replaying
    assert recordings.n[0] == 2 and recordings.n[1] >= 8, "forward and backward were recorded, and replayed"
    assert recordings.early.n_used == 5 and recordings.early.n_in_vain == 0
    assert recordings.n_begun == 5, "and each backward but the first was issued before it was handed what forward has kept"
    moved = dict(model.fxoffload.transferred)
    trained(model, batches[:1])
    assert moved == {channel: n * len(batches) // (len(batches) + 1) for channel, n in model.fxoffload.transferred.items()}
    model.fxoffload.close()

def test_another_shape_is_called_until_it_comes_again_and_a_moved_weight_is_seen(
        simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    case = FAMILIES["lora"]()
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget="16MiB")
    short = [tokens(seed=9, length=16)]
    batches = [tokens(seed=i) for i in range(4)]
    for some in (batches, short, batches, short * 4, batches):
        for ours, theirs in zip(trained(model, some)[0], trained(plain, some)[0], strict=True):
            assert torch.equal(ours, theirs)
    for one in (model, plain):
        frozen = next(p for p in one.parameters() if not p.requires_grad)
        frozen.data = frozen.data.clone() * 2
    for ours, theirs in zip(trained(model, batches)[0], trained(plain, batches)[0], strict=True):
        assert torch.equal(ours, theirs)
    model.fxoffload.close()


class Keeping(nn.Module):
    """Keeps a tensor of its last call, as transformers does, of which the step computes what nothing reads, and may return it."""

    def __init__(self, inner: nn.Module, returns: bool) -> None:
        super().__init__()
        self.inner, self.kept, self.returns = inner, torch.zeros(2), returns

    def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        self.kept.to(batch["input_ids"].device).add(1)
        loss = self.inner(**batch).loss
        return {"loss": loss, "kept": self.kept} if self.returns else {"loss": loss}

@pytest.mark.parametrize("returns", [False, True])
def test_an_input_that_nothing_reads_may_be_another_tensor_in_each_call(
        returns: bool, simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    plain = Keeping(zoo.lora(num_hidden_layers=1).model, returns)
    model = copy.deepcopy(plain)
    plain.to("fxsim")
    fxoffload.compile(model, tokens(), device="fxsim", device_budget="16MiB", dynamic=False)
    early = replaying[0].early
    kept = []
    for i in range(7):
        kept.append(torch.full((2,), float(i), device="fxsim"))  # all alive: none lies where another did
        losses = []
        for one in (plain, model):
            one.kept = kept[-1]
            out = one(**{name: value.to("fxsim") for name, value in tokens(seed=i).items()})
            loss = out["loss"]
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert early.n_used == 4 and early.n_in_vain == 0
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is None if q.grad is None else p.grad is not None and torch.equal(p.grad.cpu(), q.grad.cpu())
    model.fxoffload.close()


def another_weight(model: nn.Module) -> None:
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.o_proj")
    layer.weight = nn.Parameter(layer.weight.detach().clone() * 2, requires_grad=False)

def other_scaling(model: nn.Module) -> None:
    layer = next(m for m in model.modules() if hasattr(m, "scaling") and isinstance(m.scaling, dict))
    layer.scaling["default"] = 2.5 if layer.scaling["default"] == 2.0 else 2.0

def test_a_forward_that_was_issued_before_its_call_was_checked_counts_only_if_nothing_has_changed(
        simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    case = zoo.lora(dropout=0.1, num_hidden_layers=1)
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget="16MiB", dynamic=False)
    early, expected = replaying[0].early, {"used": 0, "in vain": 0}

    def step(used: int, in_vain: int, change: Callable[[nn.Module], object] = lambda _: None) -> None:
        losses = []
        for one in (plain, model):
            change(one)
            torch.manual_seed(expected["used"])
            loss = one(**{name: value.to("fxsim") for name, value in tokens().items()}).loss
            loss.backward()
            losses += [loss.detach(), torch.rand(4, device="fxsim")]
        assert all(map(torch.equal, losses[:2], losses[2:]))
        expected["used"] += used
        expected["in vain"] += in_vain
        assert (early.n_used, early.n_in_vain) == (expected["used"], expected["in vain"])

    for _ in range(3):
        step(0, 0)
    step(1, 0)
    step(0, 1, another_weight)
    for _ in range(2):
        step(0, 0)
    step(1, 0)
    # The forward of `change`, too; what computes its logits is called beside the recordings, as there is room.
    step(2, 0, lambda one: one(**{name: value.to("fxsim") for name, value in tokens().items()}).logits.sum().item())
    step(1, 0)
    step(0, 1, other_scaling)
    for _ in range(2):
        step(0, 0)
    step(1, 0)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is None if q.grad is None else p.grad is not None and torch.equal(p.grad.cpu(), q.grad.cpu())

    for _ in range(12):
        other_scaling(model)
        model(**tokens()).loss.backward()
    assert early.n_in_vain <= 6, "who is wrong three times is believed no more"
    model.fxoffload.close()


def test_what_recordings_hold_goes_with_them_and_not_with_the_garbage_collector(
        simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    """Two models, one after the other, under a budget each: the second one finds the device empty."""
    def train() -> None:
        model: Any = fxoffload.compile(FAMILIES["lora"]().model, tokens(), device="fxsim", device_budget="16MiB", dynamic=False)
        trained(model, [tokens(seed=i) for i in range(6)])
        assert replaying[-1].n == [2, 8]
        model.fxoffload.close()

    gc.collect()
    gc.disable()
    try:
        train()
        assert simulated_device.memory_allocated() == 0
    finally:
        gc.enable()


def test_where_there_is_no_room_beside_recordings_a_step_has_their_memory(
        simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    """A plan has room for what one step makes for itself, be it recorded or called."""
    case = zoo.lora(num_hidden_layers=1)
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget="16MiB", dynamic=False)
    (recordings,) = replaying

    def n_recorded() -> int:
        return sum(one.is_recorded for one in recordings._replays)

    def evaluated() -> int:
        """Of both, equal; how many graphs are recorded then."""
        with torch.no_grad():
            ours, theirs = (one(**{name: value.to("fxsim") for name, value in tokens(seed=9).items()}).loss for one in (model, plain))
        assert torch.equal(ours, theirs)
        return n_recorded()

    def train(n: int) -> int:
        assert all(map(torch.equal, trained(model, [tokens()] * n)[0], trained(plain, [tokens()] * n)[0]))
        return n_recorded()

    assert train(3) == 2
    assert evaluated() == 2 and train(1) == 2 and evaluated() == 2 and evaluated() == 3 and train(1) == 3, "there is room"
    assert recordings.n[0] == 3
    recordings.n_bytes = 16 << 20
    assert evaluated() == 1, "a replay has the memory of the others"
    assert train(2) == 0 and train(1) == 2, "so has a step that is called"
    assert evaluated() == 0 and train(3) == 2
    assert recordings.n[0] == 7
    model.fxoffload.close()


def test_a_backward_that_was_begun_is_the_one_that_is_asked_for(
        simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    """Gradients that a hook scales, a backward that may run again, one whose forward was not replayed, one that is interrupted, and values
    that hooks have packed."""
    case = zoo.lora(num_hidden_layers=1)
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget="16MiB", dynamic=False)
    (recordings,) = replaying

    def loss_of(one: nn.Module, seed: int) -> torch.Tensor:
        return one(**{k: v.to("fxsim") for k, v in tokens(seed=seed).items()}).loss  # type: ignore[no-any-return]

    def scaled(one: nn.Module) -> None:
        loss = loss_of(one, 5)
        loss.grad_fn.register_prehook(lambda gradients: tuple(g if g is None else g * 3 for g in gradients))  # type: ignore[union-attr]
        (loss / 4).backward()

    def twice(one: nn.Module) -> None:
        loss = loss_of(one, 6)
        loss.backward(retain_graph=True)
        loss.backward()

    def crossed(one: nn.Module) -> None:
        first, second = loss_of(one, 7), loss_of(one, 8)
        second.backward()
        first.backward()

    def hooked(one: nn.Module) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            first, second = loss_of(one, 3), loss_of(one, 4)
        first.backward()
        second.backward()

    def checked(step: Callable[[nn.Module], None], n_begun: int) -> None:
        before = recordings.n_begun
        for one in (plain, model):
            step(one)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert p.grad is None if q.grad is None else p.grad is not None and torch.equal(p.grad.cpu(), q.grad.cpu())
            p.grad = q.grad = None
        assert recordings.n_begun - before == n_begun

    def ordinary(one: nn.Module) -> None:
        loss_of(one, 9).backward()

    for n_begun in (0, 0, 0, 1):
        checked(ordinary, n_begun)
    checked(scaled, 1)
    checked(twice, 0)
    checked(crossed, 1)
    checked(ordinary, 1)

    loss = loss_of(model, 9)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="interrupted|inplace"):
        loss.backward()
    del loss
    checked(ordinary, 1)
    checked(hooked, 0)
    model.fxoffload.close()


def test_what_cannot_be_recorded_is_called_and_said(
        simulated_device: SimulatedDevice, replaying: list[Again], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: Again, call: object, given: object, recorded: object) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Again, "record", refuse)
    case, batches = FAMILIES["lora"](), [tokens(seed=i) for i in range(5)]
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, batches[0], device="fxsim", device_budget="16MiB", dynamic=False)
    with caplog.at_level(logging.WARNING, logger="fxoffload"):
        got = trained(model, batches)
    assert all(torch.equal(a, b) for a, b in zip(got[0], trained(plain, batches)[0], strict=True))
    assert sum("cannot be recorded" in one.message for one in caplog.records) == 1
    model.fxoffload.close()


@pytest.mark.parametrize("budget", ["1200KiB", pytest.param("800KiB", marks=pytest.mark.slow)])
def test_a_step_that_swaps_is_recorded_whole_or_not_at_all(budget: str, simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    """What forward moves to the host lies elsewhere once it is recorded: backward is recorded in that step, too."""
    case = FAMILIES["llama"]()
    model: Any = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget=budget, dynamic=False)
    assert model.fxoffload.plan.count()["swapout"], "nothing is moved"
    done = []
    for i in range(6):
        trained(model, [tokens(seed=i)])
        done.append(tuple(replaying[0].n))
    assert done == [(0, 0), (0, 0), *((2, 2 * n) for n in range(1, 5))]
    model.fxoffload.close()


def test_a_recording_writes_elsewhere_while_the_caller_keeps_what_it_gave(simulated_device: SimulatedDevice, replaying: list[Again]) -> None:
    """Gradients on the host that are kept over several backwards: none of them is called beside a recorded forward."""
    case = FAMILIES["llama"]()
    plain = copy.deepcopy(case.model).to("fxsim")
    model: Any = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget="1000KiB", dynamic=False)
    kept: list[list[torch.Tensor]] = [[], []]
    for i in range(7):
        for one, all_kept in zip((plain, model), kept, strict=True):
            one(**{k: v.to("fxsim") for k, v in tokens(seed=i).items()}).loss.backward()
            all_kept += [p.grad for p in one.parameters()]
            one.zero_grad(set_to_none=True)
    for ours, theirs in zip(*kept, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    assert replaying[0].n == [2, 10]
    model.fxoffload.close()


def test_calls_in_another_order_than_a_steps_are_recorded_in_vain_only_a_few_times(
        simulated_device: SimulatedDevice, replaying: list[Again], caplog: pytest.LogCaptureFixture) -> None:
    """Two forwards, then their backwards: each meets what the other one's forward has moved."""
    case = FAMILIES["llama"]()
    plain = copy.deepcopy(case.model).to("fxsim")
    model: Any = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget="1200KiB", dynamic=False)
    for one in (plain, model):
        for i in range(12):
            both = [one(**{k: v.to("fxsim") for k, v in tokens(seed=2 * i + j).items()}).loss for j in range(2)]
            for loss in both:
                loss.backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.allclose(p.grad.cpu(), q.grad.cpu())
    # A forward was recorded whose backward never was: after three steps of that kind nothing is recorded any more.
    assert replaying[0].given_up and replaying[0].n_mixed == 3 and replaying[0].n[0] == 1
    assert sum("recorded no more" in one.message for one in caplog.records) == 1
    model.fxoffload.close()


def test_where_one_half_of_a_step_cannot_be_recorded_both_are_called(
        simulated_device: SimulatedDevice, replaying: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded forward and a called backward would hold temporaries in two pools; the plan has room for those of one."""
    record = Again.record

    def once(self: Again, *given: Any) -> Any:
        if self.n[0]:
            raise RuntimeError("operation not permitted when stream is capturing")
        return record(self, *given)

    monkeypatch.setattr(Again, "record", once)
    case, batches = FAMILIES["lora"](), [tokens(seed=i) for i in range(6)]
    plain = copy.deepcopy(case.model).to("fxsim")
    model = fxoffload.compile(case.model, batches[0], device="fxsim", device_budget="16MiB", dynamic=False)
    got = trained(model, batches)
    assert all(torch.equal(a, b) for a, b in zip(got[0], trained(plain, batches)[0], strict=True))
    (recordings,) = replaying
    assert recordings.n == [1, 1] and recordings.given_up and all(one._recording is None for one in recordings._replays)
    model.fxoffload.close()


def test_a_step_with_numbers_that_the_host_draws_is_called_and_said(
        simulated_device: SimulatedDevice, replaying: list[Again], caplog: pytest.LogCaptureFixture) -> None:
    model, x = HostNoise(), torch.rand(4, 16)
    plain = copy.deepcopy(model).to("fxsim")
    with caplog.at_level(logging.WARNING, logger="fxoffload"):
        model = fxoffload.compile(model, (x,), device="fxsim", device_budget="16MiB", dynamic=False)
        losses = []
        for one in (plain, model):
            torch.manual_seed(0)
            losses.append([one(x.to("fxsim")).item() for _ in range(6)])
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
    assert replaying[0].n == [0, 0] and any("on the host" in one.message for one in caplog.records)
    assert "on the host" in (obstacle(next(iter(model.fxoffload.graphs.values()))) or "")
    model.fxoffload.close()


class Capture:
    """Stands in for a CUDA graph: what it captures is what is told to it while it is open. `fails`: whether its end does."""

    fails = False

    def __init__(self, said: list[str]) -> None:
        self.said, self.captured = said, list[str]()

    def capture_begin(self, **_: object) -> None:
        self.said.append("begin")

    def capture_end(self) -> None:
        self.said.append("end")
        if self.fails:
            raise RuntimeError("unjoined work")
        if not self.captured:
            warnings.warn("The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong device or stream.")

    def replay(self) -> None:
        self.said.append(f"replay {' '.join(self.captured)}")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Capture], list[str]]:
    """The CUDA graphs that are made, and what is said to all of them."""
    made: list[Capture] = []
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: (made.append(Capture(said)), made[-1])[1])
    return made, said


@pytest.mark.parametrize(("fails", "error", "told"), [
    (False, None, None), (True, None, "unjoined work"), (True, RuntimeError("out of memory"), "out of memory"),
    (False, KeyboardInterrupt("stop"), "stop")])
def test_a_capture_is_ended_once_what_failed_first_is_told_and_a_failed_end_is_mended(
        fails: bool, error: BaseException | None, told: str | None, monkeypatch: pytest.MonkeyPatch, captures: tuple[list[Capture], list[str]]) -> None:
    mended: list[object] = []
    monkeypatch.setattr("fxoffload.runtime.recordings.end_failed_capture", lambda device, pool: mended.append((device, pool)))
    monkeypatch.setattr(Capture, "fails", fails)
    segments = Segments(torch.device("cuda", 0), (0, 1))
    expected = contextlib.nullcontext() if told is None else pytest.raises(BaseException, match=f"^{told}$")
    with expected, segments.captured():
        if error is not None:
            raise error
    assert captures[1] == ["begin", "end"] and mended == [(torch.device("cuda", 0), (0, 1))] * fails


def test_copies_and_waits_are_made_between_the_segments_at_each_replay_and_not_before(
        monkeypatch: pytest.MonkeyPatch, captures: tuple[list[Capture], list[str]]) -> None:
    graphs, said = captures

    class Device:
        """A device module whose streams and events say what they do."""

        def __init__(self, name: str = "compute") -> None:
            self.name = name

        def Stream(self, device: torch.device) -> Device:
            return Device("side")

        Event = current_stream = lambda self, *_: Device()
        stream = lambda self, stream: contextlib.nullcontext()

        def record(self, stream: Device) -> None:
            said.append(f"event of {stream.name}")

        def wait_event(self, event: object) -> None:
            said.append(f"{self.name} waits")

        def wait_stream(self, stream: Device) -> None:
            said.append(f"{self.name} follows {stream.name}")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    memory = HostMemory(False)
    engine, weight, segments = StreamEngine(torch.device("cpu"), memory), torch.arange(3.0), Segments(torch.device("cuda", 0), (0, 1))
    with engine.recorded() as recorded:
        recorded.between = segments.cut
        with segments.captured():
            graphs[-1].captured.append("first")
            transfer = engine.swap_in(weight)
            there = transfer.out.zero_()
            graphs[-1].captured.append("second")
            out = engine.wait(transfer)
            engine.wait(engine.swap_out(out, "pageable"))
            graphs[-1].captured.append("third")
    memory.close()
    (sent,) = recorded.held.values()
    assert out is there and not out.any() and set(said) == {"begin", "end"} and recorded.copies == {"h2d": 1, "d2h": 1}
    for i in range(2):
        weight += i
        said.clear()
        segments.replay()
        assert torch.equal(there, weight) and torch.equal(sent, weight)
        copied = ["side follows compute", "event of side"]
        assert said == ["replay first", *copied, "replay second", "compute waits", *copied, "compute waits", "replay third"]
    assert replay._n_uses(there.untyped_storage()) == replay._n_uses(torch.ones(1).untyped_storage())  # no recording keeps it
    # Somebody looks into what was sent: it is sent elsewhere from now on.
    recording = replay._Recording((), segments.replay, recorded, [], lent=[replay._Lent(replay._flat(sent))])
    recording.lent[0].n_uses = 0
    assert recording.renew(memory) and recording.is_free()
    weight += 10
    segments.replay()
    (elsewhere,) = recorded.held.values()
    assert elsewhere is not sent and torch.equal(elsewhere, weight) and torch.equal(sent, weight - 10) and list(recorded.leaving) == [elsewhere.data_ptr()]
    assert not replay._Recording((), segments.replay, Recorded(), [], lent=[replay._Lent(replay._flat(sent), -1)]).renew(memory)


# On a card ------------------------------------------------------------------------------------------------------------


def steps_on_a_card(case: Case, budget: str, pins: Sequence[Any], accumulated: int, n: int = 9) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, the last weights that are trained, and the session, closed."""
    model = fxoffload.compile(case.model, tokens(), device="cuda", device_budget=budget, pins=pins)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(weights, lr=1e-2), []
    for i in range(n):
        loss = model(**{name: value.cuda() for name, value in tokens(seed=i % 4).items()}).loss
        loss.backward()
        losses.append(loss.detach())
        if (i + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    session = model.fxoffload
    found = [one.item() for one in losses], [p.detach().cpu().clone() for p in weights], session
    session.close()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "budget", "pins", "accumulated"), [
    ("lora", "1GiB", (), 1), ("lora", "1GiB", (), 2), ("lora", "1GiB", ("*", "host"), 1), ("llama", "1GiB", (), 1), ("llama", "1GiB", (), 3),
    ("qlora", "1GiB", (), 1), ("lora_bf16", "1GiB", (), 1)])
def test_replayed_steps_on_a_card_have_the_bits_of_called_ones(
        family: str, budget: str, pins: tuple[str, str] | tuple[()], accumulated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)
    found = []
    try:
        for warm in (1 << 30, 2):
            monkeypatch.setattr(replay, "WARM_CALLS", warm)
            replays: list[int] = []
            right: list[bool] = []
            claim = EarlyStarts.claim
            monkeypatch.setattr(EarlyStarts, "claim", lambda *given: (right.append(claim(*given)), right[-1])[1])
            real = torch.cuda.CUDAGraph.replay
            monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), real(self))[1])
            torch.manual_seed(0)
            found.append(steps_on_a_card(FAMILIES[family](), budget, [fxoffload.pin(*pins)] if pins else [], accumulated))
            monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", real)
            monkeypatch.setattr(EarlyStarts, "claim", claim)
            assert bool(replays) == (warm == 2) == bool(right) and all(right), "recorded steps are replayed, and issued early"
    finally:
        torch.use_deterministic_algorithms(False)
    (called, called_weights, _), (replayed, weights, _) = found
    assert called == replayed and all(torch.equal(a, b) for a, b in zip(called_weights, weights, strict=True))


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_the_step_to_be_called(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    record = Recordings.record

    def waiting(self: Recordings, call: Boxed, given: Given, recorded: Recorded) -> Any:
        return record(self, lambda arguments: (torch.ones(1, device="cuda").item(), call(arguments))[1], given, recorded)

    monkeypatch.setattr(Recordings, "record", waiting)
    with caplog.at_level(logging.WARNING, logger="fxoffload"):
        losses, _, _ = steps_on_a_card(FAMILIES["lora"](), "1GiB", (), 1)
    assert sum("cannot be recorded" in one.message for one in caplog.records) == 1 and losses[-1] < losses[0]
    # torch, too, goes on as if there had been no capture: its generator draws, memory that a stream has used comes back.
    monkeypatch.undo()
    assert torch.rand(4, device="cuda").unique().numel() > 1
    used = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    used.record_stream(torch.cuda.Stream())
    del used
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    used = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() == reserved
    gc.collect()
    torch.cuda.empty_cache()
    assert {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} == {(0, 0)}
