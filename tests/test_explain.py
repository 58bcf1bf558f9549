"""What a plan says of itself: what binds, limits, candidates, gains and remedies, and that none of it costs a capture."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import zoo
from torch import nn

import fxoffload
from fxoffload.account import least_limits
from fxoffload.api import captured, planning_options
from fxoffload.effects import Channel
from fxoffload.machine import Machine, load_machine
from fxoffload.plans import Plan, plan_from
from fxoffload.router import Router
from fxoffload.session import Session
from fxoffload.study import with_faster_h2d

pytestmark = pytest.mark.integration

BUDGET = "450KiB"
SHAPE = (2, 32)


def small_lora() -> nn.Module:
    return zoo.lora(num_hidden_layers=1).model


@functools.cache
def slow_link() -> Machine:
    """A machine whose copies run beside compute, over a link that a step of a small model waits for."""
    machine = dataclasses.replace(load_machine("cpu"), overlaps=True, dispatch_s=None)
    return with_faster_h2d(machine, 1e7 - machine.channel_bytes_per_s["h2d"])


@functools.cache
def explained() -> Plan:
    config = small_lora()
    return fxoffload.plan(config, SHAPE, device_budget=BUDGET, host_budget="1GiB", machine=slow_link(), explain=True)


def train_reasons(plan: Plan):
    (graph,) = plan.graphs.values()
    return graph.reasons, graph.predicted


def test_a_faster_link_takes_the_bytes_seconds_at_every_size_down() -> None:
    machine = load_machine("h200")
    faster = with_faster_h2d(machine, 1e9)
    for n_bytes in (1 << 12, 1 << 20, 1 << 28):
        assert faster.transfer_s(n_bytes, Channel.H2D) < machine.transfer_s(n_bytes, Channel.H2D)
        assert faster.transfer_s(n_bytes, Channel.D2H) == machine.transfer_s(n_bytes, Channel.D2H)
    assert faster.channel_bytes_per_s["h2d"] == machine.channel_bytes_per_s["h2d"] + 1e9


def test_the_critical_path_ends_with_the_step_and_no_channel_is_busier_than_it() -> None:
    reasons, predicted = train_reasons(explained())
    assert sum(reasons.critical_s.values()) == pytest.approx(predicted.step_s)
    assert all(0 < seconds <= predicted.step_s for seconds in reasons.busy_s.values())
    assert max(reasons.critical_s, key=reasons.critical_s.get) == "h2d", "the link is slow"
    assert reasons.critical_s["h2d"] <= reasons.busy_s["h2d"] * (1 + 1e-9)
    assert 0 < reasons.longest_stall_s <= reasons.stalled_s < predicted.step_s


def test_the_limit_is_below_the_prediction_and_has_the_bytes_that_move_over_the_link() -> None:
    reasons, predicted = train_reasons(explained())
    known = [seconds for seconds in reasons.limit_s.values() if seconds is not None]
    assert 0 < max(known) <= predicted.step_s
    assert reasons.limit_s["h2d"] == pytest.approx(predicted.moved_bytes["h2d"] / 1e7)
    assert reasons.limit_s["host"] is None


@pytest.mark.parametrize("budget", [BUDGET, "1GiB"])
def test_no_plans_limit_is_below_that_of_every_way_to_execute_the_step(budget: str) -> None:
    """Where nothing is computed again both have the same FLOPs."""
    machine, model = slow_link(), small_lora()
    plan = fxoffload.plan(model, SHAPE, device_budget=budget, machine=machine)
    options = planning_options(model, machine, budget, None, 0, "adamw", "auto", None, "bitwise", ())
    with captured(model, SHAPE, options, machine) as session:
        assert session.captured is not None
        least = least_limits(session.captured.graph, session.captured.bounds, machine, plan.device_budget_bytes)
    planned = plan.longest.reasons.limit_s
    assert all(seconds is None or seconds <= planned[term] for term, seconds in least.items())
    if budget == "1GiB":
        assert least["compute"] == planned["compute"] > 0 and least["h2d"] == 0


def test_the_largest_values_at_the_peak_are_no_more_than_the_peak() -> None:
    reasons, predicted = train_reasons(explained())
    sizes = [n_bytes for _, n_bytes in reasons.largest]
    assert sizes == sorted(sizes, reverse=True) and 0 < sum(sizes) <= predicted.device_peak_bytes


def test_the_chosen_plan_is_the_best_that_the_search_tried_and_what_was_refused_says_by_how_much() -> None:
    reasons, predicted = train_reasons(explained())
    fit = [one for one in reasons.tried if one.peak_bytes is not None]
    assert min(one.step_s for one in fit) == pytest.approx(predicted.step_s, rel=0.05)
    assert all(one.peak_bytes <= explained().device_budget_bytes for one in fit)
    refused = [one for one in reasons.tried if one.shortfall_bytes]
    assert refused and all(one.step_s is None and one.peak_bytes is None for one in refused)


def test_more_memory_and_a_faster_link_are_worth_what_a_plan_with_them_predicts() -> None:
    gains = {gain.of: gain.step_s for gain in explained().gains}
    assert list(gains) == ["GiB of device memory", "GiB of host memory", "GB/s to the device"]
    roomy = fxoffload.plan(small_lora(), SHAPE, device_budget=(1 << 30) + 450 * 1024, machine=slow_link())
    assert gains["GiB of device memory"] == roomy.predicted.step_s < explained().predicted.step_s
    assert gains["GB/s to the device"] < explained().predicted.step_s
    assert gains["GiB of host memory"] == explained().predicted.step_s, "1 GiB is more than it needs already"


def test_explaining_captures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, capture = [], Router.capture
    monkeypatch.setattr(Router, "capture", lambda *call: (captures.append(1), capture(*call)))
    fxoffload.plan(small_lora(), SHAPE, device_budget=BUDGET, machine="cpu", explain=True)
    assert len(captures) == 1


def test_the_text_names_what_binds_where_and_what_more_would_give() -> None:
    plan, text = explained(), explained().explain()
    assert f"device memory binds at {plan.predicted.peak_node}; largest there: " in text
    assert re.search(r"critical: h2d, \d+% of the step", text)
    assert re.search(r"idle: .*d2h \d+%", text)
    assert re.search(r"physical limit .*not known: host", text)
    assert re.search(r"saves everything.*: refused, .* short|saves everything, .* resident: ", text)
    assert text.count("(chosen)") == 1
    assert re.search(r"one more GiB of device memory: .*% less", text)
    assert "one more GiB of host memory: nothing faster found" in text


def test_a_plan_with_room_for_everything_says_that_device_memory_does_not_bind() -> None:
    text = fxoffload.plan(small_lora(), SHAPE, device_budget="1GiB", machine="cpu").explain()
    assert "device memory does not bind" in text and "device memory binds" not in text and "one more" not in text


def test_reasons_and_gains_survive_the_file_and_a_plan_without_them_loads(tmp_path: Path) -> None:
    plan = explained()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    old = json.loads(plan.to_json())
    del old["gains"]
    for graph in old["graphs"].values():
        del graph["reasons"]
    loaded = plan_from(old, "old.json")
    assert loaded.decisions == plan.decisions and "no reasons are stored" in loaded.explain()
    for graph in old["graphs"].values():
        graph["reasons"] = {"version": 0, "colour": "green"}
    assert plan_from(old, "other.json") == loaded


def test_every_remedy_of_a_refused_plan_is_a_plan() -> None:
    model = small_lora()
    with pytest.raises(fxoffload.PlanError, match="What would do: device_budget of") as refused:
        fxoffload.plan(model, (4, 32), device_budget="250KiB", machine="cpu", explain=True)
    device, smaller = refused.value.remedies
    needed = int(re.search(r"device_budget of (\d+) bytes", device).group(1))
    assert needed == 250 * 1024 + refused.value.shortfall_bytes
    fxoffload.plan(model, (4, 32), device_budget=needed, machine="cpu")
    batch, sequence = map(int, re.search(r"batch (\d+) x (\d+)", smaller).groups())
    fxoffload.plan(model, (batch, sequence), device_budget="250KiB", machine="cpu")
    with pytest.raises(fxoffload.PlanError):
        fxoffload.plan(model, (2 * batch, sequence) if sequence == 32 else (batch, 2 * sequence), device_budget="250KiB", machine="cpu")


@pytest.mark.slow
def test_a_host_that_is_too_small_is_told_what_host_or_disk_would_do() -> None:
    plan = functools.partial(fxoffload.plan, small_lora(), SHAPE, device_budget=BUDGET, machine="cpu")
    small = sum(one.n_bytes for one in plan().residency if one.tier.on_host) - 100_000  # no plan does with less than all parameters
    with pytest.raises(fxoffload.PlanError, match=f"host_budget of {small} bytes") as refused:
        plan(host_budget=small, explain=True)
    found = {words.split(" of ")[0]: int(words.split()[2]) for words in refused.value.remedies if " of " in words}
    assert {"host_budget", "disk_budget"} <= set(found)
    assert plan(host_budget=found["host_budget"]).predicted.host_peak_bytes <= found["host_budget"]
    assert 0 < plan(host_budget=small, disk_budget=found["disk_budget"]).predicted.disk_bytes <= found["disk_budget"]


def test_a_compiled_model_explains_its_plan_too() -> None:
    model = fxoffload.compile(small_lora(), zoo.tokens(), device="cpu", device_budget=BUDGET)
    session: Session = model.fxoffload
    assert "physical limit" in session.plan.explain() and "the search tried" in session.plan.explain()
    session.close()
