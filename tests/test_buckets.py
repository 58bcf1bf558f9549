"""Small parameter copies that come as one, in whole training runs: the same bits, fewer copies, inside what was predicted."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from loops import assert_same
from loops import train as trained
from runs import STEPS, plain_run, train
from zoo import Case, tokens

import fxoffload
from fxoffload import ops
from fxoffload.effects import Tier
from fxoffload.plans import Bucket, Gather, Lookup, SwapIn, neighbours
from fxoffload.session import Session
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
# Adapters and weights stream; values of forward are swapped.
BUDGET = 440 << 10
HOST = [fxoffload.pin("*", "host")]


def lora() -> Case:
    """bf16 base, fp32 adapters, one layer: fourteen adapters and ten weights."""
    return zoo._lora(zoo._bf16(zoo.llama(num_hidden_layers=1)))


def compiled(case: Case, **options: Any) -> Any:
    return fxoffload.compile(case.model, case.batch, **{"device": "cpu", "device_budget": BUDGET, "pins": HOST, "dynamic": False, **options})


def count(session: Session, op: object) -> int:
    return len(session.graphs["train"].find_nodes(op="call_function", target=op))  # type: ignore[arg-type]


def buckets_of(session: Session) -> list[Bucket]:
    assert session.plan is not None
    return [d for d in session.plan.decisions if isinstance(d, Bucket)]


def n_runs(bucket: Bucket, order: tuple[str, ...]) -> int:
    """How many copies move a bucket whose members lie on the host in that order."""
    places = [order.index(value.rsplit("@", 1)[0]) for value in bucket.values]
    return 1 + sum(b != a + 1 for a, b in zip(places, places[1:]))


@pytest.mark.parametrize("device", ["cpu", "fxsim"])
def test_a_streamed_lora_step_has_the_bits_of_plain_pytorch_with_a_copy_for_each_bucket(
        device: str, simulated_device: SimulatedDevice) -> None:
    expected = plain_run(lora, torch.device(device))
    case, base = lora(), simulated_device.memory_allocated()
    simulated_device.set_capacity(base + BUDGET if device == "fxsim" else None)
    simulated_device.reset_peak_memory_stats()
    model = compiled(case, device=device)
    run, session = train(model, case, torch.device(device)), model.fxoffload
    assert run.losses == expected.losses
    for got, wanted in zip([*run.gradients, run.parameters], [*expected.gradients, expected.parameters], strict=True):
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[n], wanted[n]) if wanted[n] is not None else got[n] is None for n in wanted)

    buckets, decisions = buckets_of(session), session.plan.decisions
    merged = sum(len(bucket.values) for bucket in buckets)
    adapters = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(adapters & set(neighbours(decisions))) > len(adapters) / 3, "some stay on the device from forward to backward"
    assert count(session, ops.swap_in_many) == len(buckets) and count(session, ops.part) == merged
    runs = sum(n_runs(bucket, neighbours(decisions)) for bucket in buckets)
    loads = sum(isinstance(d, (Gather, SwapIn, Lookup)) for d in decisions)
    assert session.engine.copies["h2d"] == STEPS * (loads - merged + runs)
    assert 2 * runs < merged, (runs, merged)

    predicted = session.plan.predicted
    assert session.transferred["h2d"] == STEPS * predicted.moved_bytes["h2d"]
    measured = session.meter.peak_bytes if session.meter is not None else simulated_device.max_memory_allocated() - base
    assert measured <= predicted.device_peak_bytes <= BUDGET
    assert device == "cpu" or predicted.device_peak_bytes <= 1.05 * measured
    session.close()


def test_forwards_buckets_are_one_copy_each() -> None:
    model = compiled(lora())
    buckets, order = buckets_of(model.fxoffload), neighbours(model.fxoffload.plan.decisions)
    forward = [bucket for bucket in buckets if all(value.endswith("@0") for value in bucket.values)]
    assert forward and [n_runs(bucket, order) for bucket in forward] == [1] * len(forward)
    places = {n: p.data_ptr() for n, p in model.named_parameters()}
    assert sorted(order, key=places.__getitem__) == list(order)
    model.fxoffload.close()


def test_a_plan_without_buckets_replays_with_a_copy_for_each_load_and_the_same_bits() -> None:
    """As one does that was saved before there were any."""
    case = lora()
    first = compiled(lora())
    plan = first.fxoffload.plan
    losses = trained(first, [tokens(seed=1)])
    copies = first.fxoffload.engine.copies["h2d"]
    first.fxoffload.close()
    graphs = {f: replace(g, decisions=tuple(d for d in g.decisions if not isinstance(d, Bucket))) for f, g in plan.graphs.items()}
    model = compiled(case, plan=replace(plan, graphs=graphs), replan=False)
    assert count(model.fxoffload, ops.swap_in_many) == 0
    assert trained(model, [tokens(seed=1)]) == losses
    loads = sum(isinstance(d, (Gather, SwapIn, Lookup)) for d in plan.decisions)
    assert model.fxoffload.engine.copies["h2d"] == loads > copies
    model.fxoffload.close()


def test_a_plan_with_buckets_saves_loads_and_replays_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = compiled(lora())
    plan, losses = first.fxoffload.plan, trained(first, [tokens(seed=1)])
    first.fxoffload.close()
    plan.save(path)
    assert fxoffload.Plan.load(path) == plan and plan.count()["bucket"] == len([d for d in plan.decisions if isinstance(d, Bucket)]) > 0
    again = compiled(lora(), plan=path, replan=False)
    assert again.fxoffload.plan == plan and trained(again, [tokens(seed=1)]) == losses
    again.fxoffload.close()
    for damage in ('"values": "w@0"', '"values": [1]'):
        raw = json.loads(path.read_text())
        (graph,) = raw["graphs"].values()
        next(d for d in graph["decisions"] if d["kind"] == "bucket").update(json.loads(f"{{{damage}}}"))
        (tmp_path / "damaged.json").write_text(json.dumps(raw))
        with pytest.raises(fxoffload.PlanError, match="damaged plan.*not a list of names"):
            fxoffload.Plan.load(tmp_path / "damaged.json")


def test_what_is_saved_copied_and_closed_is_as_without_buckets(tmp_path: Path) -> None:
    case = lora()
    plain = copy.deepcopy(case.model)
    model = compiled(case)
    assert buckets_of(model.fxoffload)
    assert trained(model, [tokens(seed=1)]) == trained(plain, [tokens(seed=1)])
    for name, net in (("plain", plain), ("mine", model)):
        net.save_pretrained(str(tmp_path / name))
        net.get_base_model().save_pretrained(str(tmp_path / name / "base"))
        torch.save(net.state_dict(), tmp_path / name / "state.pt")
    files = sorted(p.relative_to(tmp_path / "plain") for p in (tmp_path / "plain").rglob("*.safetensors"))
    assert len(files) == 2
    assert all((tmp_path / "plain" / f).read_bytes() == (tmp_path / "mine" / f).read_bytes() for f in files)
    sizes = [(tmp_path / name / "state.pt").stat().st_size for name in ("plain", "mine")]
    assert sizes[0] == sizes[1], "each parameter is saved with its own bytes alone"
    twin = copy.deepcopy(model).state_dict()
    assert all(torch.equal(twin[name], value) for name, value in plain.state_dict().items())
    model.fxoffload.close()
    assert_same(plain, model)
    assert trained(model, [tokens(seed=2)]) == trained(plain, [tokens(seed=2)])
    assert_same(plain, model)


def test_parameters_that_the_caller_moves_or_ties_are_read_where_they_are() -> None:
    first = compiled(lora())
    looking, moved, *_ = neighbours(first.fxoffload.plan.decisions)
    first.fxoffload.close()
    case = lora()
    weight = case.model.get_parameter(looking)
    whole = torch.zeros(2, *weight.shape, dtype=weight.dtype)
    weight.data = whole[1].copy_(weight.data)
    plain = copy.deepcopy(case.model)
    model = compiled(case)
    assert {looking, moved} <= set(neighbours(model.fxoffload.plan.decisions))
    assert weight.data_ptr() == whole[1].data_ptr(), "a view into larger memory stays there"
    for net in (plain, model):
        net.get_parameter(moved).data = net.get_parameter(moved).data.clone() * 2
        trained(net, [tokens(seed=1)])
    assert_same(plain, model)
    model.fxoffload.close()


def test_buckets_of_a_disk_tier_are_one_copy_out_of_the_file(tmp_path: Path) -> None:
    case = lora()
    plain = copy.deepcopy(case.model)
    model = compiled(case, pins=[fxoffload.pin("*", "disk")], disk_budget="8MiB", disk_dir=tmp_path)
    session = model.fxoffload
    order = neighbours(session.plan.decisions)
    assert all(session.memory.owns(p) for n, p in model.named_parameters() if n in order)
    assert session.memory.live_bytes[Tier.DISK] <= session.plan.predicted.disk_bytes
    assert trained(model, [tokens(seed=1)]) == trained(plain, [tokens(seed=1)])
    merged = sum(len(bucket.values) for bucket in buckets_of(session))
    loads = sum(isinstance(d, (Gather, SwapIn)) for d in session.plan.decisions)
    assert session.engine.copies["h2d"] == loads - merged + sum(n_runs(bucket, order) for bucket in buckets_of(session))
    assert session.memory.peak_bytes[Tier.DISK] <= session.plan.predicted.disk_bytes <= 1.05 * session.memory.peak_bytes[Tier.DISK]
    session.close()
    assert_same(plain, model)
    assert not list(tmp_path.iterdir())


def test_what_a_short_host_budget_sends_to_disk_is_in_no_bucket_with_what_stays(tmp_path: Path) -> None:
    free = compiled(lora())
    needed = free.fxoffload.plan.predicted.host_peak_bytes
    free.fxoffload.close()
    model = compiled(lora(), pins=(), host_budget=needed - (40 << 10), disk_budget="8MiB", disk_dir=tmp_path)
    plan = model.fxoffload.plan
    tiers = {r.value: r.tier for r in plan.residency}
    assert {Tier.DISK, Tier.PAGEABLE} <= set(tiers.values())
    mixed = [{tiers[value.rsplit("@", 1)[0]] for value in bucket.values} for bucket in buckets_of(model.fxoffload)]
    assert mixed and all(len(found) == 1 for found in mixed)
    model.fxoffload.close()
