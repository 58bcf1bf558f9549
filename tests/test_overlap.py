"""Plans for a machine whose copies run beside compute: what overlap must keep, and the estimate that chose them."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from importlib import resources

import pytest
import torch
import torch.fx as fx
from zoo import FAMILIES

from fxoffload import ops, overlap, text
from fxoffload.effects import Tier
from fxoffload.graph import border_of, info, name_of
from fxoffload.ladder import Search
from fxoffload.machine import load_machine, machine_from
from fxoffload.planner import Problem, Searches, Solution, solve
from fxoffload.plans import Bucket, Gather, Sink, SwapIn, SwapOut
from fxoffload.session import Options, Session
from fxoffload.spill import is_event
from fxoffload.testing.golden import DEVICE
from fxoffload.testing.twins import assert_same_results
from fxoffload.verify import verify

pytestmark = pytest.mark.integration

FACTS = frozenset({"functional", "resident", "lowered", "awaited", "released", "fits"})
SHARES = (0.9, 0.6, 0.45)


@functools.cache
def problem() -> Problem:
    """The step of a two-layer Llama on a CPU whose copies would run beside compute, nothing resident."""
    case = FAMILIES["llama"]()
    machine = replace(load_machine("cpu"), overlaps=True)
    session = Session(case.model, Options(torch.device("cpu"), device_budget_bytes=1 << 40, planning_only=True), machine, None)
    session.router.capture((), dict(case.batch))
    captured, planning = session.captured, session.planning
    found = replace(planning.problem(captured), resident=frozenset())
    session.close()
    return found


SEARCHES = Searches()


@functools.cache
def solved(share: float | None) -> Solution:
    budget = None if share is None else int(solved(None).simulation.device_peak_bytes * share)
    return solve(replace(problem(), context=replace(problem().context, device_budget_bytes=budget)), SEARCHES)


@pytest.mark.parametrize("share", SHARES)
def test_copies_apart_from_their_waits_keep_every_rule_and_the_budget(share: float) -> None:
    context, lowered = problem().context, solved(share).lowered
    verify(lowered, context.bounds, FACTS, int(solved(None).simulation.device_peak_bytes * share), context.workspace)


@pytest.mark.parametrize("share", SHARES)
def test_the_bits_stay_where_every_copy_happens_only_at_its_wait(share: float) -> None:
    before, after = (text.parse(text.render(g, problem().context.bounds, columns=False), DEVICE) for g in (problem().graph, solved(share).lowered))
    assert_same_results(before, after)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dispatch_s", (None, 5e-6))
@pytest.mark.parametrize("tier", (Tier.PINNED, Tier.DISK))
def test_the_estimate_that_chose_a_plan_is_what_the_simulator_says_of_it(share: float, dispatch_s: float | None, tier: Tier) -> None:
    """Issuing of ops, tiers and waits included: plans are compared by the estimate, so it must not be another number."""
    budget = int(solved(None).simulation.device_peak_bytes * share)
    context = replace(problem().context, device_budget_bytes=budget, swap_tier=tier)
    found = solve(replace(problem(), context=context, machine=replace(problem().machine, dispatch_s=dispatch_s)), SEARCHES)
    assert found.estimated_s == pytest.approx(found.simulation.step_s, rel=1e-9)


def test_copies_are_pulled_apart_from_their_waits() -> None:
    decisions = solved(0.6).decisions
    assert any(isinstance(d, Gather) and d.start != d.before for d in decisions)
    assert any(isinstance(d, Sink) for d in decisions)
    assert any(isinstance(d, SwapOut) and d.until != d.after for d in decisions)


def test_every_copy_to_the_device_starts_where_the_plan_says() -> None:
    """Copies for recomputed readers too: between a start and the node it names stand memory nodes and views alone. A copy in a bucket
    starts where the first of its members should."""
    solution = recomputing()
    nodes = list(solution.lowered.nodes)
    place = {name_of(node): i for i, node in enumerate(nodes)}
    loads = [d for d in solution.decisions if isinstance(d, (Gather, SwapIn))]
    assert any("~" in d.before for d in loads if d.start != d.before)
    near = {load: starts_before(nodes, place[load.start]) for load in loads}
    merged = 0
    for load in loads:
        if any(n.target is ops.swap_in and load.value in sources_of(n) for n in near[load]):
            continue
        merged += 1
        buckets = [n for n in nodes[: place[load.start]] if n.target is ops.swap_in_many and load.value in sources_of(n)]
        assert any(bucket in near[one] for bucket in buckets for one in loads if one.value in sources_of(bucket)), load
    assert merged == sum(len(d.values) for d in solution.decisions if isinstance(d, Bucket))


def starts_before(nodes: list[fx.Node], at: int) -> list[fx.Node]:
    """The copies to the device that start right before the node at that place."""
    transfers = (ops.swap_in, ops.swap_in_many, ops.wait, ops.release)
    near = itertools.takewhile(lambda n: n.target in transfers or not is_event(n), reversed(nodes[:at]))
    return [n for n in near if n.target in (ops.swap_in, ops.swap_in_many)]


def sources_of(copy: fx.Node) -> list[str]:
    """What the decisions call the values that a copy brings."""
    return [info(source).fqn or name_of(source).rsplit("^", 1)[0] for source in copy.all_input_nodes]


def recomputing(**changes: int) -> Solution:
    """A plan for a machine whose bus is so slow that values are recomputed rather than moved. `changes`: of the Problem."""
    return solve(on_a_slow_bus(**changes))


def on_a_slow_bus(**changes: int) -> Problem:
    """What is planned there."""
    raw = json.loads(resources.files("fxoffload.machines").joinpath("cpu.json").read_text())
    raw["overlaps"] = True
    for rate in raw["transfers"].values():
        if rate is not None:
            rate["per_s"] /= 50
    budget = int(solved(None).simulation.device_peak_bytes * 0.45)
    return replace(problem(), machine=machine_from(raw, "slow bus"), context=replace(problem().context, device_budget_bytes=budget), **changes)


def test_copies_wait_until_their_channel_is_soon_free_and_the_step_takes_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = on_a_slow_bus(bucket_bytes=0)
    search = Search(one, frozenset())
    search.run(one.context.device_budget_bytes)
    assert search.best is not None
    schedule, found, rates = search.best.schedule, search.best.found, search.best.recomputation.rates_with(search.best.resident)
    monkeypatch.setattr(overlap, "_AHEAD_S", 1e-6)
    later = overlap.just_in_time(schedule, found, rates)
    starts = [{(load.storage, load.before): load.start for load in scan.loads} for scan in (found, later)]
    assert starts[0].keys() == starts[1].keys() and all(starts[1][copy] >= start for copy, start in starts[0].items())
    first = min(starts[0].values())
    assert sum(start == first for start in starts[1].values()) < sum(start == first for start in starts[0].values()) / 2
    assert overlap.schedule_s(schedule, later, rates) == pytest.approx(overlap.schedule_s(schedule, found, rates), rel=1e-9)
    assert (overlap.used_bytes(schedule, later) <= overlap.used_bytes(schedule, found)).all()


def test_values_that_backward_swaps_out_leave_in_forward() -> None:
    """A copy under way is never handed over the border, and one that starts behind it would be waited for in full."""
    lowered = solved(0.45).lowered
    place = {node: i for i, node in enumerate(lowered.nodes)}
    border = place[border_of(lowered)]
    late = [n for n in lowered.find_nodes(op="call_function", target=ops.swap_out) if place[n] > border and info(n).role is None]
    sent = [n for n in late if isinstance(n.args[0], fx.Node) and place[n.args[0]] < border]
    assert not [n for n in sent if all(not border < place[user] < place[n] for user in n.args[0].users)]  # type: ignore[union-attr]


def test_a_step_is_never_shorter_than_its_busiest_channel_nor_longer_than_all_of_them() -> None:
    for share in (None, *SHARES):
        simulation = solved(share).simulation
        busy = simulation.channel_s.values()
        assert max(busy) <= simulation.step_s <= sum(busy) + 1e-9
