"""Candidates of the search: a recipe of recomputation, a set of residents and a share of slack, scanned and priced."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from .buckets import bucketed
from .derived import Base, Derived
from .effects import Tier
from .fill import filled
from .floor import Needs
from .graph import border_of, copy_graph
from .gaps import Gap, Gaps
from .machine import COPY_ISSUES
from .native import library
from .overlap import Costs, Rates, just_in_time, overlapped, schedule_s, stalls_s, used_bytes
from .plans import Decision, GraphPlan, Prediction, Recompute
from .problem import Parameter, Problem, apply, outside_bytes, place_parameters
from .recipes import Recipe
from .spill import NEVER, Bytes, Ground, Scan, Schedule

# The rewrites that plan-swap must see done.
BEFORE_SWAPS = ("sink-gradients", "insert-checkpoint", "recompute")

# The share of its bound, or of the best one's seconds, that a candidate may take more and is near it.
NEAR = 1 / 100
# The share of the budget left to copies that are under way: what is tried first, and what the best candidate is tried with then.
_SLACK_SHARE = 1 / 16
_REFINED_SHARES = (0.0, 1 / 32, 1 / 8)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A recipe applied: the decisions, the schedule of the graph they give, and what bounds its seconds whatever resides.

    `rates`: with every lookup's table where the graph has it. `must`: what resides at least, with its ground; `grounds`, `gaps`, `outside`,
    `least`, `rated`: of each resident set that was asked for; `more`: see `again`.
    """

    recipe: Recipe
    decisions: tuple[Decision, ...]
    schedule: Schedule
    rates: Rates
    must: frozenset[str]
    needs: Needs
    grounds: dict[frozenset[str], Ground] = field(default_factory=dict)
    gaps: dict[frozenset[str], Gaps] = field(default_factory=dict)
    outside: dict[frozenset[str], int] = field(default_factory=dict)
    least: dict[frozenset[str], int] = field(default_factory=dict)
    rated: dict[frozenset[str], Rates] = field(default_factory=dict)
    more: dict[int, tuple[tuple[Decision, ...], frozenset[str]]] = field(default_factory=dict)

    def again(self, decisions: tuple[Decision, ...]) -> frozenset[str]:
        """Names of what those recompute and its own decisions do not, found out once."""
        if id(decisions) not in self.more:
            # The entry holds the decisions, so that their id cannot become others'.
            self.more[id(decisions)] = decisions, frozenset(_recomputed_by(decisions) - _recomputed_by(self.decisions))
        return self.more[id(decisions)][1]

    def rates_with(self, resident: frozenset[str]) -> Rates:
        """The rates beside the resident set, made once."""
        if resident not in self.rated:
            self.rated[resident] = self.rates.with_residents(resident)
        return self.rated[resident]

    def ground(self, resident: frozenset[str]) -> Ground:
        """The Ground of the resident set, made once."""
        if resident not in self.grounds:
            self.grounds[resident] = self.schedule.ground(resident)
        return self.grounds[resident]

    def outside_bytes(self, problem: Problem, resident: frozenset[str]) -> int:
        """Device bytes beside the graph's inputs and values with that resident set, counted once."""
        if resident not in self.outside:
            self.outside[resident] = problem.fixed_bytes + outside_bytes(problem, resident)
        return self.outside[resident]

    def is_short(self, problem: Problem, resident: frozenset[str], live_bytes: int) -> bool:
        """Whether it is known without a scan that there is no room in so many live bytes beside what is outside."""
        if resident not in self.least:
            self.least[resident] = self.schedule.least_bytes(self.ground(resident), problem.context.kept_values)
        return live_bytes < self.least[resident]

    def least_of_any(self, problem: Problem) -> int:
        """Of the recomputation that saves everything: live bytes that no recipe needs less than, whatever resides. An op reads and makes the same in
        all of them, but its result may take the place of what only some of them let go."""
        return self.schedule.least_bytes(self.ground(self.must), problem.context.kept_values, self.schedule.donable_bytes)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A recomputation and resident set, scanned under some budget: what it loads and spills, the seconds that gives, and the live bytes
    it takes, `outside_bytes` included, before copies are `put_off`. `single`: the scan with every copy by itself, before some were put in buckets. `used`: the `used_bytes`
    of `single` and of `found`, where the search adds to them."""

    recomputation: Recomputation
    resident: frozenset[str]
    outside_bytes: int
    single: Scan
    found: Scan
    step_s: float
    live_bytes: int
    used: tuple[Bytes, Bytes] | None = field(default=None, compare=False, repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.recomputation.schedule

    def host_short_bytes(self, problem: Problem) -> int:
        """What the host lacks for it: at most, since not everything it swaps need be there at once."""
        if problem.host_bytes is None:
            return 0
        off = (p for p in problem.parameters.values() if p.fqn not in self.resident)
        held = sum(p.state_bytes + (p.n_bytes + p.gradient_bytes if p.home is not Tier.DISK else 0) for p in off)
        swapped = self.found.spilled_bytes if problem.context.swap_tier is not Tier.DISK else 0
        return max(held + swapped - problem.host_bytes, 0)


def scheduled(problem: Problem, decisions: tuple[Decision, ...], trained: frozenset[str], base: Base | None = None) -> Schedule:
    """The Schedule of the problem's graph with what they decide recomputed, and the trained parameters `trained` on the device. `base`: what
    `based` gives; from that it is derived, unless something that draws is recomputed."""
    context = problem.context

    def graph() -> fx.Graph:
        return _applied(problem, decisions, trained, BEFORE_SWAPS)

    derived = base.derived(decisions, graph, context.bounds) if base is not None else None
    return derived if derived is not None else Schedule.of(graph(), context.bounds, context.workspace)


def based(problem: Problem, trained: frozenset[str]) -> Base | None:
    """What Schedules of the problem's graph are derived from; None where they cannot be."""
    context = problem.context
    if library() is None or border_of(problem.graph) is None:
        return None
    return Base.of(Schedule.of(_applied(problem, (), trained, BEFORE_SWAPS[:1]), context.bounds, context.workspace), context.workspace)


def _applied(problem: Problem, decisions: tuple[Decision, ...], trained: frozenset[str], rewrites: Sequence[str]) -> fx.Graph:
    graph = copy_graph(problem.graph)
    place_parameters(graph, problem.parameters, trained)
    return apply(graph, replace(problem.context, plan=bare(decisions)), rewrites)


def recomputed(problem: Problem, recipe: Recipe, decisions: tuple[Decision, ...], trained: frozenset[str],
               known: Costs | None = None, schedule: Schedule | None = None) -> Recomputation:
    """The recipe applied, with the trained parameters `trained` on the device. `known`: see Rates.of; `schedule`: what `scheduled` gives, where
    it is known."""
    context, schedule = problem.context, schedule or scheduled(problem, decisions, trained)
    given = context.bounds, problem.machine, context.swap_tier, problem.bucket_bytes, known
    rates = schedule.rates(*given) if isinstance(schedule, Derived) else Rates.of(schedule, *given)
    must = problem.resident if problem.resident is not None else problem.pinned_to_device | trained
    ground = schedule.ground(must)
    return Recomputation(recipe, decisions, schedule, rates, must, Needs.of(schedule, ground, rates, _may_reside(problem)), {must: ground})


def least_s(problem: Problem, recomputation: Recomputation, budget_bytes: int, decisions: tuple[Decision, ...] | None = None) -> float:
    """Seconds that no candidate of the recomputation, or with other decisions that recompute no less, can beat under the budget."""
    outside = recomputation.outside_bytes(problem, recomputation.must)
    room = problem.footprint.live_bytes(budget_bytes) - outside - recomputation.grounds[recomputation.must].fixed_bytes
    return recomputation.needs.least_s(room, recomputation.again(decisions) if decisions is not None else frozenset())


def _recomputed_by(decisions: tuple[Decision, ...]) -> set[str]:
    return {one.value for one in decisions if isinstance(one, Recompute)}


def bare(decisions: tuple[Decision, ...]) -> GraphPlan:
    """The decisions as a plan that says nothing else."""
    return GraphPlan("", decisions, (), Prediction(0, 0))


def swept(problem: Problem, recomputation: Recomputation, trained: frozenset[str], budget_bytes: int | None) -> Iterator[Candidate]:
    """Candidates with every resident set, most bytes first, until two in a row got slower. Of those that do not fit only the one with
    the fewest residents, which lacks least."""
    worse, before = 0, float("inf")
    every = residencies(problem, trained)
    for resident in every:
        candidate = _fitting(problem, recomputation, resident, budget_bytes, resident == every[-1])
        if candidate is None:
            continue
        yield candidate
        worse = worse + 1 if candidate.step_s >= before else 0
        before = candidate.step_s
        if worse == 2 or not candidate.found.has_loads:
            break


def swept_near(problem: Problem, recomputation: Recomputation, trained: frozenset[str], budget_bytes: int,
               near: frozenset[str] | None) -> Iterator[Candidate]:
    """Candidates with the resident set `near`, the fastest of another recipe, or the largest, then with fewer and fewer bytes resident as long
    as that is faster, and with more and more from the one that has fewest: between all and none resident there may be slower ones than both. Of
    those that do not fit only the one with the fewest."""
    every = residencies(problem, trained)
    tried: dict[frozenset[str], Candidate] = {}

    def while_faster(sets: Sequence[frozenset[str]]) -> None:
        before = float("inf")
        for resident in sets:
            if resident not in tried:
                candidate = _fitting(problem, recomputation, resident, budget_bytes, resident == every[-1])
                if candidate is None:
                    continue
                tried[resident] = candidate
            if tried[resident].step_s >= before:
                return
            before = tried[resident].step_s

    while_faster(every[every.index(near) if near in every else 0 :])
    if all(candidate.found.has_loads for candidate in tried.values()):
        while_faster(every[::-1])
    yield from tried.values()


def packed_first(problem: Problem, recomputation: Recomputation, budget_bytes: int) -> Iterator[Candidate]:
    """Candidates in which what is worth most per byte and event resides or stays, with two shares of the memory left to copies under way."""
    shares = _PACKED_SHARES[:2] if problem.machine.overlaps else (0.0,)
    free, must, context, table = free_names(problem), recomputation.must, problem.context, recomputation.schedule.table
    if table is None:
        for resident, kept in _jointly_packed(problem, recomputation, budget_bytes, shares, free, must, _ONE_MORE_POWERS):
            yield from packed_as(problem, recomputation, resident, budget_bytes, kept)
        return
    for share, power in itertools.product(shares, _ONE_MORE_POWERS):
        room = int(room_of(problem, recomputation, must, budget_bytes) * (1 - share))
        more, stays = table.packed(
            recomputation.ground(must), recomputation.rates, room, power, free - must, context.kept_values, context.swapped_values)
        room = room_of(problem, recomputation, must | more, budget_bytes)
        found = Scan(evaluated=table.laid_out(recomputation.ground(must | more), recomputation.rates, stays, room))
        yield from _priced_within(problem, recomputation, must | more, budget_bytes, found)


def _fitting(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int | None,
             least: bool) -> Candidate | None:
    """The candidate with that resident set; None where it does not fit, unless it is the `least` one."""
    if not least and recomputation.is_short(problem, resident, _live_bytes(problem, recomputation, resident, budget_bytes)):
        return None
    candidate = _with_slack(problem, recomputation, resident, budget_bytes, least)
    return candidate if least or not candidate.found.shortfall_bytes else None


def refined(problem: Problem, best: Candidate, trained: frozenset[str], budget_bytes: int, packs: bool) -> Iterator[Candidate]:
    """The candidate with the tables of lookups resident, where it hardly waits for copies, with other slack, with the parameters resident whose
    copies it waits for, and, where it `packs`, with values that stay by their worth."""
    recomputation, tables = best.recomputation, _may_reside(problem) & problem.table_names - best.resident
    if tables and best.step_s <= least_s(problem, recomputation, budget_bytes) * (1 + NEAR):
        yield _with_slack(problem, recomputation, best.resident | tables, budget_bytes)
    if not best.found.has_loads:
        return
    if problem.machine.overlaps:
        for share in _REFINED_SHARES:
            yield scanned(problem, recomputation, best.resident, budget_bytes, share)
        for resident in _with_exposed(problem, best):
            yield _with_slack(problem, recomputation, resident, budget_bytes)
    if packs:
        yield from _packings(problem, recomputation, trained, budget_bytes)


# Weights of time against bytes in what is packed first, and shares of the memory left to copies under way.
_POWERS = (0.0, 1.0, 0.5)
_PACKED_SHARES = (1 / 16, 0.0, 1 / 8)
# What resides, and the gaps that values stay in.
_Packing = tuple[frozenset[str], frozenset[Gap]]
# Parameters that are tried as residents each by itself, and the weights that the rest is packed with then.
_ONE_MORE = 6
_ONE_MORE_POWERS = _POWERS[1:2]


def _packings(problem: Problem, recomputation: Recomputation, trained: frozenset[str], budget_bytes: int) -> Iterator[Candidate]:
    """Candidates whose values stay by their worth alone, not by when they are next used: with every resident set, then the best one
    with other slack. What two ways give alike is one candidate."""
    seen: set[_Packing] = set()
    found: list[Candidate] = []

    def add(packings: Iterable[_Packing]) -> None:
        for one in packings:
            if one not in seen:
                seen.add(one)
                found.extend(packed_as(problem, recomputation, one[0], budget_bytes, one[1]))

    first_share, *shares = _PACKED_SHARES if problem.machine.overlaps else (0.0,)
    for resident, power in itertools.product(residencies(problem, trained), _POWERS[:2]):
        add([_packed(problem, recomputation, resident, budget_bytes, first_share, power)])
    if free := free_names(problem):
        add(_jointly_packed(problem, recomputation, budget_bytes, (first_share, *shares), free, recomputation.must))
    if found:
        best = min(found, key=lambda c: c.step_s)
        add(_with_one_more(problem, best, budget_bytes, first_share))
        for share, power in (*itertools.product(shares, _POWERS), (first_share, _POWERS[2])):
            add([_packed(problem, recomputation, best.resident, budget_bytes, share, power)])
    yield from found


def _packed(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int, share: float, power: float) -> _Packing:
    room = room_of(problem, recomputation, resident, budget_bytes)
    return resident, gaps_of(problem, recomputation, resident).packed(int(room * (1 - share)), power)


def _with_one_more(problem: Problem, best: Candidate, budget_bytes: int, share: float) -> Iterator[_Packing]:
    """With one of the parameters resident that the best candidate copies for longest, whatever else has to leave for it."""
    recomputation, free, copied = best.recomputation, free_names(problem), Counter[str]()
    for load in best.found.loads:
        if load.storage.name in free - best.resident:
            copied[load.storage.name] += load.storage.n_bytes
    for name, _ in sorted(copied.items(), key=lambda item: (-item[1], item[0]))[:_ONE_MORE]:
        yield from _jointly_packed(problem, recomputation, budget_bytes, (share,), free, recomputation.must | {name}, _ONE_MORE_POWERS)


def _jointly_packed(problem: Problem, recomputation: Recomputation, budget_bytes: int, shares: Sequence[float],
                    free: frozenset[str], must: frozenset[str], powers: Sequence[float] = _POWERS) -> Iterator[_Packing]:
    room, gaps = room_of(problem, recomputation, must, budget_bytes), gaps_of(problem, recomputation, must)
    for share, power in itertools.product(shares, powers):
        resident, kept = gaps.packed_jointly(int(room * (1 - share)), power, free - must)
        yield must | resident, kept


def packed_as(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int,
              kept: frozenset[Gap]) -> Iterator[Candidate]:
    """The candidate that stays in exactly the `kept` gaps; none where copies under way leave it no room."""
    found = gaps_of(problem, recomputation, resident).laid_out(kept, room_of(problem, recomputation, resident, budget_bytes))
    yield from _priced_within(problem, recomputation, resident, budget_bytes, found)


def _priced_within(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int, found: Scan) -> Iterator[Candidate]:
    """The candidate of a scan, if what it copies has room while it is under way."""
    room, schedule = room_of(problem, recomputation, resident, budget_bytes), recomputation.schedule
    candidate = priced(problem, recomputation, resident, *overlapped(schedule, found, room, recomputation.rates_with(resident)))
    if candidate.live_bytes <= problem.footprint.live_bytes(budget_bytes):
        yield candidate


def room_of(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int) -> int:
    """Live bytes that a device budget leaves beside the fixed inputs."""
    outside = recomputation.outside_bytes(problem, resident)
    return problem.footprint.live_bytes(budget_bytes) - outside - recomputation.ground(resident).fixed_bytes


def gaps_of(problem: Problem, recomputation: Recomputation, resident: frozenset[str]) -> Gaps:
    """The Gaps beside those residents, made once."""
    if resident not in recomputation.gaps:
        context = problem.context
        recomputation.gaps[resident] = Gaps.of(
            recomputation.schedule, recomputation.ground(resident), recomputation.rates, context.kept_values, context.swapped_values)
    return recomputation.gaps[resident]


def _with_exposed(problem: Problem, best: Candidate) -> Iterator[frozenset[str]]:
    """The residents and the frozen parameters that are waited for longest per byte: the first of them, and all."""
    stalls = stalls_s(best.schedule, best.found, best.recomputation.rates_with(best.resident))
    free = free_names(problem)
    exposed = sorted((s for s in stalls if s.name in free), key=lambda s: (-stalls[s] / s.n_bytes, s.name))
    for n in sorted({min(1, len(exposed)), len(exposed)} - {0}):
        yield best.resident | {s.name for s in exposed[:n]}


def _with_slack(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int | None,
                to_the_end: bool = True) -> Candidate:
    """The candidate with slack where it fits, else without; unless `to_the_end`, what it lacks then is not all of it."""
    if problem.machine.overlaps and budget_bytes is not None:
        live_bytes = _live_bytes(problem, recomputation, resident, budget_bytes)
        if not recomputation.is_short(problem, resident, live_bytes - int(live_bytes * _SLACK_SHARE)):
            candidate = scanned(problem, recomputation, resident, budget_bytes, _SLACK_SHARE)
            if not candidate.found.shortfall_bytes:
                return candidate
    return scanned(problem, recomputation, resident, budget_bytes, 0.0, to_the_end)


def _live_bytes(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int | None) -> int:
    """Live bytes for the graph's inputs and values under a device budget."""
    if budget_bytes is None:
        return NEVER
    return problem.footprint.live_bytes(budget_bytes) - recomputation.outside_bytes(problem, resident)


def scanned(problem: Problem, recomputation: Recomputation, resident: frozenset[str], budget_bytes: int | None, slack_share: float,
            to_the_end: bool = True) -> Candidate:
    """The candidate under a device budget, all memory where None; infinitely slow when it does not fit, and scanned no further then where
    there is slack or it is not `to_the_end`."""
    context, schedule, rates = problem.context, recomputation.schedule, recomputation.rates_with(resident)
    outside, ground = recomputation.outside_bytes(problem, resident), recomputation.ground(resident)
    live = None if budget_bytes is None else _live_bytes(problem, recomputation, resident, budget_bytes)
    slack = 0 if live is None else int(live * slack_share)
    found = schedule.scan(
        None if live is None else live - slack, context.kept_values, context.swapped_values, resident, to_the_end and not slack, ground)
    if found.shortfall_bytes:
        return Candidate(recomputation, resident, outside, found, found, float("inf"), 0)
    return priced(problem, recomputation, resident, *overlapped(schedule, found, None if live is None else live - ground.fixed_bytes, rates))


def unlimited_bytes(problem: Problem, recomputation: Recomputation, resident: frozenset[str]) -> int:
    """The live bytes of a candidate that has all the memory there is."""
    context, schedule, ground = problem.context, recomputation.schedule, recomputation.ground(resident)
    found = schedule.scan(None, context.kept_values, context.swapped_values, resident, ground=ground)
    _, used = overlapped(schedule, found, None, recomputation.rates)
    return recomputation.outside_bytes(problem, resident) + ground.fixed_bytes + int(used.max(initial=0))


def priced(problem: Problem, recomputation: Recomputation, resident: frozenset[str], single: Scan, used: Bytes) -> Candidate:
    """The candidate of a scan whose copies start and end where they should: small ones in buckets, and what that takes. `used`: the
    `used_bytes` of the scan."""
    schedule = recomputation.schedule
    found, with_buckets = bucketed(schedule, single, used, problem.bucket_bytes)
    outside = recomputation.outside_bytes(problem, resident)
    # Buckets stay below the peak that is there without.
    taken = outside + recomputation.ground(resident).fixed_bytes + int(used.max(initial=0))
    step_s = schedule_s(schedule, found, recomputation.rates_with(resident))
    return Candidate(recomputation, resident, outside, single, found, step_s, taken, (used, with_buckets))


def settled(problem: Problem, candidate: Candidate, budget_bytes: int) -> Candidate:
    """The candidate, or that with what else the budget it was scanned under has room for where it is faster: before buckets are made,
    because what came in one cannot stay longer than all of it."""
    assert candidate.used is not None
    more, resident, _ = _filled(problem, candidate, candidate.single, candidate.used[0], budget_bytes, budget_bytes)
    if more is candidate.single:
        return candidate
    used = used_bytes(candidate.schedule, more)
    return min(candidate, priced(problem, candidate.recomputation, resident, more, used), key=lambda c: c.step_s)


def put_off(candidate: Candidate) -> Candidate:
    """The candidate with no copy to the device started before its channel is soon free: never slower, and what copies take is taken later."""
    schedule, rates = candidate.schedule, candidate.recomputation.rates_with(candidate.resident)
    found = just_in_time(schedule, candidate.found, rates)
    if found is candidate.found:
        return candidate
    return replace(candidate, found=found, step_s=schedule_s(schedule, found, rates) if rates.dispatch_s else candidate.step_s)


def put_off_s(candidate: Candidate) -> float:
    """Seconds by which it may be faster when it is `put_off`, at most: those in which the host issues its copies."""
    return candidate.found.n_loads * COPY_ISSUES * candidate.recomputation.rates.dispatch_s


def completed(problem: Problem, candidate: Candidate, budget_bytes: int, most_bytes: int) -> Candidate:
    """The candidate with what else `budget_bytes` has room for, of what `most_bytes`, the largest budget it is asked for, has: never
    slower, and what is left in buckets stays there."""
    assert candidate.used is not None
    found, resident, live_bytes = _filled(problem, candidate, candidate.found, candidate.used[1], budget_bytes, most_bytes)
    same = found is candidate.found
    step_s = candidate.step_s if same else schedule_s(candidate.schedule, found, candidate.recomputation.rates_with(resident))
    return replace(candidate, resident=resident, single=found, found=found, step_s=step_s, live_bytes=live_bytes, used=None)


def taken_bytes(candidate: Candidate) -> int:
    """The least live bytes of what a candidate may be `completed` to: its own, with its buckets."""
    assert candidate.used is not None
    return candidate.outside_bytes + candidate.recomputation.ground(candidate.resident).fixed_bytes + int(candidate.used[1].max(initial=0))


def _filled(problem: Problem, candidate: Candidate, found: Scan, used: Bytes, budget_bytes: int,
            most_bytes: int) -> tuple[Scan, frozenset[str], int]:
    """The scan, whose `used_bytes` are `used`, with what else fits, what resides then, and the live bytes that are taken."""
    recomputation = candidate.recomputation
    outside = candidate.outside_bytes + recomputation.ground(candidate.resident).fixed_bytes
    room, most = (problem.footprint.live_bytes(n) - outside for n in (budget_bytes, most_bytes))
    # What a bucket is left with needs less than is told, which only a plan at offsets may.
    more = filled(candidate.schedule, found, used, recomputation.rates, room, most, _may_reside(problem) - candidate.resident,
                  problem.context.swapped_values, problem.footprint.by_offsets)
    return more.found, candidate.resident | more.resident, outside + more.used_bytes


def free_names(problem: Problem) -> frozenset[str]:
    """Frozen parameters that the planner may let reside."""
    return problem.free_names if problem.resident is None else frozenset()


def _may_reside(problem: Problem) -> frozenset[str]:
    """Frozen parameters that the planner may let reside, and tables that lookups read wherever they are: what memory is left for."""
    return free_names(problem) | problem.table_names if problem.resident is None else frozenset()


def residencies(problem: Problem, trained: frozenset[str]) -> tuple[frozenset[str], ...]:
    """Candidate resident sets, most bytes first; `trained` is part of each."""
    if problem.resident is not None:
        return (problem.resident,)
    must = problem.pinned_to_device | trained
    if must not in problem.residencies:
        problem.residencies[must] = tuple(_residencies(problem, must))
    return problem.residencies[must]


def _residencies(problem: Problem, must: frozenset[str]) -> Iterator[frozenset[str]]:
    names = problem.free_names - must
    free = [p for p in problem.parameters.values() if p.fqn in names]
    total = sum(p.n_bytes for p in free)
    seen: set[frozenset[str]] = set()
    for eighths in (8, 6, 4, 2, 1, 0):
        chosen = must | _take(free, total * eighths // 8)
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def _take(parameters: Sequence[Parameter], limit_bytes: int) -> frozenset[str]:
    """Parameters up to `limit_bytes`, smallest first: small transfers are the dear ones."""
    chosen, total = set(), 0
    for parameter in sorted(parameters, key=lambda p: (p.n_bytes, p.fqn)):
        if total + parameter.n_bytes > limit_bytes:
            break
        total += parameter.n_bytes
        chosen.add(parameter.fqn)
    return frozenset(chosen)
