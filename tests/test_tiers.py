"""Host tiers hold the bytes, the disk is a real file, host budgets are kept, and plans replay."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from loops import assert_same, train
import zoo
from torch import nn
from zoo import FAMILIES, Case, tokens

import fxoffload
from fxoffload import text
from fxoffload.api import captured, planning_options
from fxoffload.effects import Tier
from fxoffload.machine import default_machine
from fxoffload.pins import Pin
from fxoffload.places import Places
from fxoffload.plans import Gather, Plan
from fxoffload.study import Study
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
BATCHES = [tokens(seed=i) for i in range(3)]
# Streams parameters and recomputes; the LoRA model swaps activations as well.
DEVICE = {"llama": "600KiB", "lora": "450KiB"}


def llama() -> Case:
    """One layer is enough here, and captured in half the time."""
    return zoo.llama(num_hidden_layers=1)


def lora() -> Case:
    """bf16 base, fp32 adapters."""
    return zoo._lora(zoo._bf16(llama()))


def compiled(case: Case, device_budget: int | str, **options: Any) -> Any:
    return fxoffload.compile(case.model, case.batch, **{"device": "cpu", "device_budget": device_budget, "dynamic": False, **options})


def on_disk(model: Any, folder: Path) -> dict[str, bool]:
    """Which parameters' bytes are found in the swap files of `folder`."""
    held = b"".join(file.read_bytes() for file in sorted(folder.glob("*.swap")))
    return {name: p.detach().view(torch.uint8).numpy().tobytes() in held for name, p in model.named_parameters()}


MAKE = {"llama": llama, "lora": lora}


@functools.cache
def needed_host_bytes(family: str) -> int:
    """The least host_budget with unlimited disk: what a refusal says."""
    with pytest.raises(fxoffload.PlanError, match="host_budget of 1 bytes") as refused:
        compiled(MAKE[family](), DEVICE[family], host_budget=1, disk_budget="1GiB", disk_dir="/tmp")
    assert refused.value.shortfall_bytes is not None
    return 1 + refused.value.shortfall_bytes


@contextlib.contextmanager
def study_of(family: str, pins: tuple[Pin, ...] = ()) -> Iterator[Study]:
    """The family's step, captured once, to be planned under one budget after the other as `compile` would."""
    case, machine = MAKE[family](), default_machine("cpu")
    options = planning_options(case.model, machine, DEVICE[family], None, 0, "adamw", "auto", None, "bitwise", pins)
    with captured(case.model, case.batch, options, machine) as session:
        yield session.study


def plan_under(study: Study, host_budget: int, disk_budget: int = 0) -> Plan:
    return study.plan(replace(study.planning.budgets, host_bytes=host_budget, disk_bytes=disk_budget))


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "lora"])
def test_a_short_host_budget_puts_parameters_into_a_real_file_and_training_stays_bit_equal(family: str, tmp_path: Path) -> None:
    case = MAKE[family]()
    plain = copy.deepcopy(case.model)
    budget = needed_host_bytes(family)
    model = compiled(case, DEVICE[family], host_budget=budget, disk_budget="8MiB", disk_dir=tmp_path)
    housed = {r.value for r in model.fxoffload.plan.residency if r.tier is Tier.DISK}
    (file,) = tmp_path.iterdir()
    assert file.stat().st_blocks * 512 >= file.stat().st_size > 0, "preallocated, not sparse"
    assert str(file) in Path("/proc/self/maps").read_text()
    assert housed and {name for name, found in on_disk(model, tmp_path).items() if found} >= housed
    assert train(model, BATCHES) == train(plain, BATCHES)
    # The optimizer has written through the mapping.
    assert {name for name, found in on_disk(model, tmp_path).items() if found} >= housed
    model.fxoffload.close()
    assert_same(plain, model)
    assert not list(tmp_path.iterdir())
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "nothing lies in the file any more, gradients included"
    assert train(model, BATCHES) == train(plain, BATCHES)


def test_what_the_host_has_no_room_for_is_made_again_instead_of_swapped() -> None:
    """No disk: a plan that swaps more than the host holds gives way to one that computes more again, and less host memory is never faster."""
    with study_of("lora") as study:
        free = study.plan()
        swapped = [d.value for d in free.decisions if isinstance(d, fxoffload.plans.SwapOut)]
        needed = free.predicted.host_peak_bytes
        with pytest.raises(fxoffload.PlanError, match="host_budget") as refused:
            plan_under(study, needed // 2)
        least = needed // 2 + (refused.value.shortfall_bytes or 0)
        plans = [plan_under(study, budget) for budget in (least, (least + needed) // 2, needed - 1)]
    assert swapped and least < needed - 1
    for plan in plans:
        assert plan.host_budget_bytes is not None and plan.predicted.host_peak_bytes <= plan.host_budget_bytes
        assert len([d for d in plan.decisions if isinstance(d, fxoffload.plans.SwapOut)]) < len(swapped)
    seconds = [plan.predicted.step_s or 0.0 for plan in (*plans, free)]
    assert seconds == sorted(seconds, reverse=True)
    assert "what can be made again" in plans[0].explain()


def test_frozen_parameters_go_first_then_swapped_activations() -> None:
    """Between all on the host and all on disk there are budgets that move frozen bytes only, then swapped bytes too. What the free plan
    swaps is pinned, else parameters that come from the disk are reason enough to recompute it."""
    tiers = []
    with study_of("lora") as study:
        swapped = [d.value for d in study.plan().decisions if isinstance(d, fxoffload.plans.SwapOut)]
    with study_of("lora", tuple(fxoffload.pin(value, "swap") for value in swapped)) as study:
        free = study.plan()
        frozen = sum(r.n_bytes for r in free.residency if r.tier.on_host and "lora" not in r.value)
        needed = free.predicted.host_peak_bytes
        for budget in (needed, needed - frozen // 2, needed - frozen - 1):
            plan = plan_under(study, budget, 8 << 20)
            assert plan.predicted.host_peak_bytes <= budget
            swaps = {d.tier for d in plan.decisions if isinstance(d, fxoffload.plans.SwapOut)}
            tiers.append((any(r.tier is Tier.DISK for r in plan.residency), Tier.DISK in swaps))
    assert tiers == [(False, False), (True, False), (True, True)]


def test_swapped_activations_on_disk_are_bit_equal(tmp_path: Path) -> None:
    case = lora()
    plain = copy.deepcopy(case.model)
    budget = needed_host_bytes("lora")
    model = compiled(case, DEVICE["lora"], host_budget=budget, disk_budget="8MiB", disk_dir=tmp_path)
    parameters = model.fxoffload.memory.live_bytes[Tier.DISK]
    assert train(model, BATCHES) == train(plain, BATCHES)
    assert model.fxoffload.memory.peak_bytes[Tier.DISK] > parameters
    assert model.fxoffload.memory.peak_bytes[Tier.DISK] <= model.fxoffload.plan.predicted.disk_bytes
    model.fxoffload.close()
    assert_same(plain, model)


def test_gradients_accumulate_in_the_file(tmp_path: Path) -> None:
    case = llama()
    plain = copy.deepcopy(case.model)
    pins = [fxoffload.pin("*", "disk")]
    model = compiled(case, DEVICE["llama"], pins=pins, disk_budget="8MiB", disk_dir=tmp_path)
    for one in (plain, model):
        for batch in BATCHES:
            one(**batch).loss.backward()
    assert all(model.fxoffload.memory.owns(p.grad) for p in model.parameters())
    assert_same(plain, model)
    model.fxoffload.close()
    assert_same(plain, model)


@pytest.mark.slow
def test_twenty_compiles_leave_files_descriptors_and_mappings_as_they_were(tmp_path: Path) -> None:
    process, counts = psutil.Process(), []
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    for _ in range(20):
        model = fxoffload.compile(
            layers, torch.zeros(4, 64), device="cpu", device_budget="1MiB", pins=[fxoffload.pin("*", "disk")], disk_budget="1MiB",
            disk_dir=tmp_path)
        model(torch.ones(4, 64)).sum().backward()
        assert len(list(tmp_path.iterdir())) == 1
        model.fxoffload.close()
        model.zero_grad()
        gc.collect()
        counts.append((process.num_fds(), len(list(tmp_path.iterdir())), process.num_threads()))
    assert counts[2:] == counts[2:3] * 18
    assert counts[-1][1] == 0


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system of its own; `param` are its mount options."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(tmp_path)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("only root may mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(("mounted", "message"), [("size=64k", "No space left on device"), ("ro", "Read-only file system")], indirect=["mounted"])
def test_a_full_or_read_only_disk_is_one_clear_error_and_leaves_nothing(mounted: Path, message: str) -> None:
    case = llama()
    state = copy.deepcopy(case.model.state_dict())
    with pytest.raises(fxoffload.PlanError, match=f"{mounted}.*{message}"):
        compiled(case, DEVICE["llama"], pins=[fxoffload.pin("*", "disk")], disk_budget="8MiB", disk_dir=mounted)
    assert not list(mounted.iterdir())
    assert type(case.model) is type(llama().model)
    assert all(torch.equal(state[n], p) for n, p in case.model.state_dict().items())


def test_a_disk_budget_that_is_too_small_says_so_and_its_shortfall_is_true(tmp_path: Path) -> None:
    options: dict[str, Any] = {"pins": [fxoffload.pin("*", "disk")], "disk_dir": tmp_path}
    with pytest.raises(fxoffload.PlanError, match="disk_budget of 1000 bytes") as refused:
        compiled(llama(), DEVICE["llama"], disk_budget=1000, **options)
    assert not list(tmp_path.iterdir())
    model = compiled(llama(), DEVICE["llama"], disk_budget=1000 + refused.value.shortfall_bytes, **options)
    train(model, BATCHES)
    model.fxoffload.close()


def test_an_impossible_host_budget_names_its_true_shortfall() -> None:
    with study_of("lora") as study:
        with pytest.raises(fxoffload.PlanError, match="host_budget of 50000 bytes") as refused:
            plan_under(study, 50_000)
        needed = 50_000 + refused.value.shortfall_bytes
        with pytest.raises(fxoffload.PlanError, match="1 bytes short"):
            plan_under(study, needed - 1)
    model = compiled(lora(), DEVICE["lora"], host_budget=needed)
    train(model, BATCHES)
    model.fxoffload.close()


@pytest.mark.parametrize(("family", "accumulated"), [
    ("lora", 1), ("llama", 3), pytest.param("lora", 3, marks=pytest.mark.slow), pytest.param("llama", 1, marks=pytest.mark.slow)])
def test_the_host_peak_is_predicted_and_at_most_5_percent_above_what_lies_there(family: str, accumulated: int) -> None:
    predicted, measured = host_peaks(MAKE[family](), DEVICE[family], accumulated)
    assert measured <= predicted <= 1.05 * measured


def test_accumulation_that_a_host_budget_has_no_room_for_is_refused_before_it_starts_and_its_shortfall_is_true() -> None:
    case = llama()
    with study_of("llama") as study:
        needed = study.plan().predicted.host_peak_bytes
    model = compiled(case, DEVICE["llama"], host_budget=needed)
    model(**BATCHES[0]).loss.backward()
    kept = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(fxoffload.PlanError, match="accumulated") as refused:
        model(**BATCHES[1]).loss.backward()
    assert all(map(torch.equal, kept, (p.grad for p in model.parameters()))), "the refused step left its gradients"
    model.zero_grad()
    model(**BATCHES[1]).loss.backward()
    model.fxoffload.close()
    model = compiled(case, DEVICE["llama"], host_budget=needed + refused.value.shortfall_bytes)
    for batch in BATCHES:
        model(**batch).loss.backward()
    model.fxoffload.close()


def host_peaks(case: Case, device_budget: str, accumulated: int) -> tuple[int, int]:
    """The host bytes of the plan, and the most that lay there in two steps of AdamW, each on so many batches. Gradients stay."""
    model = compiled(case, device_budget)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in BATCHES[:accumulated]:
            model(**batch).loss.backward()
        optimizer.step()
    session = model.fxoffload
    assert all(session.memory.owns(p.grad) for p in model.parameters() if p.grad is not None), "what the counters do not see"
    resident = {r.value for r in session.plan.residency if r.tier is Tier.DEVICE}
    off = [p for n, p in model.named_parameters() if n not in resident]
    states = sum(v.nbytes for p in off for v in optimizer.state[p].values() if v.ndim)
    # What the graphs put on the host, gradients among it, and parameters that come in buckets are counted by the allocator of the tiers.
    elsewhere = sum(p.nbytes for p in off if not session.memory.owns(p))
    measured = elsewhere + states + sum(session.memory.peak_bytes.values())
    session.close()
    return session.plan.predicted.host_peak_bytes, measured


def rendered(model: Any) -> dict[str, str]:
    return {label: text.render(graph) for label, graph in model.fxoffload.graphs.items()}


def test_a_plan_saves_loads_diffs_and_replays_identically(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = compiled(lora(), DEVICE["lora"])
    losses, graphs, plan = train(first, BATCHES), rendered(first), first.fxoffload.plan
    plan.save(path)
    first.fxoffload.close()
    assert fxoffload.Plan.load(path) == plan and fxoffload.Plan.load(path).diff(plan) == ""
    again = compiled(lora(), DEVICE["lora"], plan=path, replan=False)
    assert train(again, BATCHES) == losses
    assert rendered(again) == graphs and again.fxoffload.plan == plan
    again.fxoffload.close()
    other = compiled(lora(), "500KiB")
    assert "device_budget_bytes" in plan.diff(other.fxoffload.plan)
    other.fxoffload.close()


SPEC = {"input_ids": ((2, 32), "int64"), "labels": ((2, 32), "int64")}
ON_HOST = [fxoffload.pin("*", "host")]


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "fxsim"])
def test_a_plan_made_without_weights_replays_on_the_real_model(device: str, tmp_path: Path, simulated_device: SimulatedDevice) -> None:
    config = llama().model.config
    before = copy.deepcopy(config.to_dict())
    plan = fxoffload.plan(config, SPEC, device_budget=DEVICE["llama"], machine="cpu", pins=ON_HOST)
    plan.save(tmp_path / "plan.json")
    assert config.to_dict() == before
    case = llama()
    plain = copy.deepcopy(case.model)
    model = compiled(case, DEVICE["llama"], device=device, plan=tmp_path / "plan.json", replan=False)
    losses = train(model, BATCHES)
    assert model.fxoffload.plan == plan
    model.fxoffload.close()
    if device == "cpu":
        assert losses == train(plain, BATCHES)
        assert_same(plain, model)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_plan_from_a_config_ties_what_the_model_ties_and_replays_on_it(family: str) -> None:
    case = FAMILIES[family]()
    config = case.model.config
    config.architectures = [type(case.model).__name__]
    spec = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in case.batch.items()}
    budget = int(fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="cpu").predicted.device_peak_bytes * 0.6)
    plan = fxoffload.plan(config, spec, device_budget=budget, machine="cpu")
    assert {r.value for r in plan.residency} <= {name for name, _ in case.model.named_parameters()}
    model = compiled(case, budget, plan=plan, replan=False)
    assert train(model, [case.batch]) and model.fxoffload.plan == plan
    model.fxoffload.close()


def test_a_plan_with_residents_is_refused_where_the_device_cannot_hold_them(simulated_device: SimulatedDevice) -> None:
    plan = fxoffload.plan(lora().model, lora().batch, device_budget="700KiB", machine="cpu")
    assert any(r.tier is Tier.DEVICE for r in plan.residency)
    with pytest.raises(fxoffload.PlanError, match="fxsim cannot hold"):
        compiled(lora(), "700KiB", device="fxsim", plan=plan)


def test_a_plan_for_another_graph_or_model_is_refused() -> None:
    case = llama()
    model = compiled(case, DEVICE["llama"])
    plan = model.fxoffload.plan
    model.fxoffload.close()
    with pytest.raises(fxoffload.PlanError, match="another model.*base_model"):
        compiled(lora(), DEVICE["lora"], plan=plan)
    other = Case(case.model, {**case.batch, "attention_mask": torch.tril(torch.ones(2, 32, dtype=torch.long))})
    with pytest.raises(fxoffload.PlanError, match="does not cover this graph.*replan=False$"):
        compiled(other, DEVICE["llama"], plan=plan, replan=False)
    older = replace(plan, made_with={**plan.made_with, "torch": "2.10.0"})
    with pytest.raises(fxoffload.PlanError, match=rf"made with torch 2\.10\.0 \(here {torch.__version__.split('+')[0]}\)$"):
        compiled(other, DEVICE["llama"], plan=older, replan=False)
    with pytest.raises(fxoffload.PlanError, match="bytes more than device_budget, and replan=False"):
        compiled(llama(), str(plan.predicted.device_peak_bytes - 1024), plan=plan, replan=False)


def test_a_packed_weight_and_its_scales_are_gathered_like_any_parameter() -> None:
    torch.manual_seed(0)
    plain = zoo.packed_4bit(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 2)), "1")
    plain[1].requires_grad_()
    x = torch.randn(4, 64)
    model = fxoffload.compile(copy.deepcopy(plain), (x,), device="cpu", device_budget="1MiB", pins=[fxoffload.pin("*", "host")])
    (graph_plan,) = model.fxoffload.plan.graphs.values()
    assert {"0.weight", "0.weight.absmax"} <= {d.value for d in graph_plan.decisions if isinstance(d, Gather)}
    for net in (plain, model):
        net(x).square().mean().backward()
    assert plain[1].weight.grad is not None
    assert_same(plain, model)
    model.fxoffload.close()


@pytest.mark.parametrize(("make", "when", "captures"), [
    (lora, "planned", 1), pytest.param(zoo.qlora, "planned", 1, marks=pytest.mark.slow), pytest.param(zoo.qlora, "later", 2, marks=pytest.mark.slow)])
def test_guards_are_made_where_parameters_reside(make: Callable[[], Case], when: str, captures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A CPU tensor cannot move to another device here: one that is a negative view differs from it by a dispatch key too.
    def move(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data = torch._neg_view(parameter.data.neg())

    case = make()
    nothing = lambda *_: False  # noqa: E731 - these would put them back
    monkeypatch.setattr(Places, "settle", nothing)
    monkeypatch.setattr(Places, "house", nothing)
    monkeypatch.setattr(Places, "reside", (lambda places, resident: move(places.model)) if when == "planned" else nothing)
    session = compiled(case, "1MiB", host_budget="1GiB").fxoffload
    if when == "later":
        move(case.model)
    session.router.capture((), dict(case.batch))
    assert session.router.captures == captures
    session.close()
