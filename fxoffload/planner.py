"""Planning one Graph: the search finds the fastest candidate, rewrites apply it, the simulator judges what they gave.

A candidate that does not fit is never relaxed. When none fits, the smallest shortfall is the refusal, and it is true: it is what the
best candidate lacks at one node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from .candidates import Candidate, bare
from .errors import HostShort, PlanError, VerifyError
from .graph import copy_graph, name_of
from .heap import heap_at_rest, keep
from .ladder import LIVE_BITS, Search, least_bytes, rungs_within, step_of
from .least_map import least_taken_bytes
from .liveness import liveness, with_releases
from .lowered import placing
from .memory_map import MemoryMap
from .plans import Decision
from .problem import USER_SCALAR_BYTES, Parameter, Problem, apply, outside_bytes, place_parameters
from .reasons import Tried
from .rung import Schedules, Shared
from .simulate import Simulation, simulate
from .sizes import format_bytes
from .swaps import decisions_of

__all__ = ["TRAINED_SHARE", "USER_SCALAR_BYTES", "Parameter", "Problem", "Searches", "Solution", "outside_bytes", "place_parameters", "solve"]


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen residency and decisions, the lowered graph they give, and what the simulator says of it.

    `estimated_s`: the seconds it was estimated at before it was lowered; `after_s`: those of the optimizer's step behind it. `tried`: every
    candidate of the search. `replays`: it is to be recorded. `tight_bytes`: of a step that can be, a budget below which memory is tight.
    """

    resident: frozenset[str]
    decisions: tuple[Decision, ...]
    lowered: fx.Graph
    simulation: Simulation
    estimated_s: float
    tried: tuple[Tried, ...] = ()
    replays: bool = False
    after_s: float = 0.0
    tight_bytes: int = 0

    @property
    def total_s(self) -> float:
        """What it was chosen for."""
        return self.estimated_s + self.after_s


# Of what a plan was estimated to need at once it takes all but one byte in so many in the end, when its copies are put off and results lie where operands
# did: the lowest seen is 7 % less. The more that may be, the more larger rungs may have what is a smaller budget's plan.
_ESTIMATED = 8


@dataclass(slots=True)
class Searches:
    """The Searches so far: problems that differ in nothing but the budget share them, and no rung is searched twice.

    `graphs`: those that the search is of, by the graph before its lookups and chunks, and these. `schedules`: see Shared.
    """

    found: list[Search] = field(default_factory=list)
    graphs: dict[tuple[fx.Graph, tuple[Decision, ...]], fx.Graph] = field(default_factory=dict)
    schedules: Schedules = field(default_factory=Schedules)

    def applied(self, problem: Problem, decisions: tuple[Decision, ...], rewrites: Sequence[str]) -> Problem:
        """The problem with the decisions applied by those rewrites, once."""
        key = problem.graph, decisions
        if key not in self.graphs:
            context = replace(problem.context, plan=bare(decisions))
            self.graphs[key] = apply(copy_graph(problem.graph), context, rewrites)
        return replace(problem, graph=self.graphs[key])

    def of(self, problem: Problem, trained: frozenset[str]) -> Search:
        """The Search of the problem with those trained parameters on the device."""
        problem = replace(problem, context=replace(problem.context, device_budget_bytes=None))
        shared = Shared(schedules=self.schedules)
        for search in self.found:
            if search.problem == problem:
                if search.trained == trained:
                    return search
                shared = search.shared
        self.found.append(Search(problem, trained, shared=shared))
        return self.found[-1]


def solve(problem: Problem, known: Searches | None = None) -> Solution:
    """The fastest Solution found under the budget, the same one whatever is `known`. Raises PlanError with the true shortfall when there
    is none."""
    shared, known = known is not None, known if known is not None else Searches()
    with heap_at_rest():
        for chosen in attempts(problem, known):
            if shared:
                keep()  # what the searches made, which lasts as long as they do
            if (solution := chosen.completed(problem)) is not None:
                return with_tight_bytes(solution, [problem], known)
    raise AssertionError("attempts end in a Solution or a PlanError")


def with_tight_bytes(solution: Solution, problems: Sequence[Problem], known: Searches) -> Solution:
    """The Solution with what says where memory is tight: for any of the problems."""
    recorded = any(one.footprint.recording_bytes is not None for one in problems)
    return replace(solution, tight_bytes=tight_bytes(problems, known)) if recorded else solution


def tight_bytes(problems: Sequence[Problem], known: Searches) -> int:
    """The least budget from which on memory is not tight for all of the problems."""
    return min(search.one.tight_bytes for one in problems for search in searches_of(one, known))


def attempts(problem: Problem, known: Searches | None = None, below: int | None = None) -> Iterator[Chosen]:
    """What may become the Solution, the fastest first, as long as none does. Ends in a PlanError with the true shortfall. `below`: rungs from there
    on are left out."""
    known = known if known is not None else Searches()
    searches = searches_of(problem, known)
    if below is not None:
        for search in searches:
            search.below = below if search.below is None else min(below, search.below)
    budget = problem.context.device_budget_bytes
    if budget is None or not problem.footprint.by_offsets:
        yield Chosen.of(problem, searches, budget)
    else:
        yield from _placed_within(problem, searches, budget)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The fastest candidate under a live budget, and all that were tried: a Solution to be, if its values keep to the budget at their offsets.

    `after_s`: of the optimizer's step.
    """

    candidate: Candidate
    budget: int | None
    tried: tuple[Tried, ...]
    after_s: float

    @property
    def total_s(self) -> float:
        """What it is chosen for."""
        return self.candidate.step_s + self.after_s

    @staticmethod
    def of(problem: Problem, searches: Sequence[Search], budget: int | None) -> Chosen:
        """What the searches find. Raises PlanError when they find nothing."""
        nearest: list[tuple[Candidate, int]] = []
        found: Chosen | None = None
        for search in searches:
            after_s = problem.after_s(search.trained)
            than_s = problem.than_s if found is None else found.total_s
            search.run(budget, None if than_s == math.inf else than_s - after_s)
            if search.best is not None:
                one = Chosen(search.best, budget, tuple(search.tried), after_s)
                found = one if found is None or one.total_s < found.total_s else found
            elif found is None:
                nearest = search.short or nearest
                if search.host_short_bytes:
                    raise HostShort(f"no plan tried keeps to {problem.host_bytes} bytes of host memory", search.host_short_bytes)
        if found is not None and found.total_s < problem.than_s:
            return found
        if found is not None or not nearest:
            raise PlanError(f"no plan takes less than {problem.than_s} s")
        raise _refusal(problem, *min(nearest, key=lambda one: least_bytes(problem, *one)))

    def completed(self, problem: Problem) -> Solution | None:
        """The candidate lowered; None where its values do not keep to the device's budget."""
        solution = self.lowered(problem)
        return solution if self.keeps_to_budget(problem, solution.simulation.device_peak_bytes) else None

    def keeps_to_budget(self, problem: Problem, n_bytes: int) -> bool:
        """Whether the device's budget has room for what its values take at their offsets, and for `least_bytes`."""
        budget = problem.context.device_budget_bytes
        return budget is None or not problem.footprint.by_offsets or max(n_bytes, self.least_bytes(problem)) <= budget

    def least_bytes(self, problem: Problem) -> int:
        """Smaller budgets do not look for this plan: a share of what its values were estimated to need at once."""
        live_bytes = self.candidate.live_bytes
        return live_bytes - live_bytes // _ESTIMATED + (problem.footprint.recording_bytes or 0)

    def lowered(self, problem: Problem) -> Solution:
        """The candidate lowered: its live bytes keep to the live budget; what its values take at offsets may be more than the device's."""
        return replace(_complete(problem, self.candidate, self.budget), tried=self.tried, after_s=self.after_s)


def _placed_within(problem: Problem, searches: Sequence[Search], budget: int) -> Iterator[Chosen]:
    """The candidates of live budgets, the largest first, whose values may keep to `budget` at their offsets.

    Live budgets are rungs that no budget changes, and the least one that works: so a larger budget has the plans of a smaller one to
    choose from, and of two plans the one that takes less is taken only where the other does not fit.
    """
    over = None
    for chosen in _of_live_budgets(problem, searches, budget):
        over = chosen
        if least_taken_bytes(problem, chosen.candidate) <= budget:
            yield chosen
    assert over is not None
    if problem.than_s < math.inf:
        raise PlanError(f"no plan that keeps to the budget takes less than {problem.than_s} s")
    over_bytes = over.lowered(problem).simulation.device_peak_bytes - budget
    raise PlanError(
        f"device_budget of {budget} bytes ({format_bytes(budget)}) is {over_bytes} bytes short: the values of the best plan found "
        "leave gaps between them. The missing bytes would help.", over_bytes)


def _of_live_budgets(problem: Problem, searches: Sequence[Search], budget: int) -> Iterator[Chosen]:
    """What is chosen under the rungs within the budget, the largest first, then under the least one that works. Raises PlanError where nothing is."""
    found, refusal = False, None
    for live_budget in rungs_within(budget, LIVE_BITS):
        try:
            chosen = Chosen.of(problem, searches, live_budget)
        except PlanError as error:
            refusal = error
            break
        if not found:
            yield from _of_larger(problem, searches, budget, live_budget)
        found = True
        yield chosen
    # Against the budget: something within it works. One without was for want of anything faster.
    if refusal is not None and refusal.shortfall_bytes is not None and refusal.shortfall_bytes <= 0:
        try:
            least = Chosen.of(problem, searches, budget + refusal.shortfall_bytes)
        except PlanError as error:
            refusal = error
        else:
            if not found:
                yield from _of_larger(problem, searches, budget, live_budget)
            found = True
            yield least
    if not found:
        assert refusal is not None
        raise refusal


def _of_larger(problem: Problem, searches: Sequence[Search], budget: int, rung: int) -> Iterator[Chosen]:
    """What is chosen under rungs above the largest one within the budget, the largest first, and may take no more than the budget even so: under
    a larger budget it may be the plan, and then it is to be this one's. What a larger rung gives was estimated at no less."""
    most, found = max(search.ample_bytes for search in searches), list[Chosen]()
    while (rung := rung + step_of(rung, LIVE_BITS)) <= most:
        chosen = Chosen.of(problem, searches, rung)
        if chosen.least_bytes(problem) > budget:
            break
        found.append(chosen)
    yield from reversed(found)


# A trained parameter that resides keeps its gradient on the device when the caller accumulates, and has none there when he does not:
# residents are limited to this share of all parameters and of the budget, so that the prediction stays within 5 % either way.
TRAINED_SHARE = 0.02


def searches_of(problem: Problem, known: Searches) -> list[Search]:
    """Of the trained parameters on the device, where they are few (adapters), and of none there. Of a large step's rungs the first has those on which
    they are few, the second those on which they are not, or memory is tight: which ones does not depend on the budget."""
    trained = {p.fqn: p.n_bytes for p in problem.parameters.values() if p.trainable}
    if problem.resident is not None:
        return [known.of(problem, frozenset(trained) & problem.resident)]
    must = frozenset(trained) & problem.pinned_to_device
    beside = known.of(problem, must)
    n_bytes = sum(trained.values())
    if not problem.trained_may_reside or not trained or n_bytes > TRAINED_SHARE * sum(p.n_bytes for p in problem.parameters.values()):
        return [beside]
    there = known.of(problem, (frozenset(trained) - problem.pinned_to_host) | must)
    there.first = int(n_bytes / TRAINED_SHARE)
    if there.one.is_large:
        beside.below = max(there.first, there.one.tight_bytes)
    return [there, beside]


# The rewrites that apply what the search decides beside its recipe; releases come behind them.
_REWRITES = ("insert-gather", "lower-gather", "insert-swap", "hoist-transfers", "sink-waits", "bucket-transfers")


def _complete(problem: Problem, chosen: Candidate, limit: int | None) -> Solution:
    """The candidate's decisions, applied, and the lowered graph simulated: its live bytes keep to `limit`."""
    context, footprint = replace(problem.context, machine=problem.machine), problem.footprint
    graph = copy_graph(chosen.schedule.graph)
    place_parameters(graph, problem.parameters, chosen.resident)
    found = chosen.found
    swaps = decisions_of(chosen.schedule.live, found, context.swap_tier, problem.machine.overlaps)
    decisions = chosen.recomputation.decisions + swaps
    lowered = apply(graph, replace(context, plan=bare(swaps)), _REWRITES)
    live = liveness(lowered, context.bounds)
    lowered = apply(lowered, replace(context, live=live), ("insert-release",))
    live = with_releases(live)
    simulation = simulate(lowered, context.bounds, problem.machine, chosen.outside_bytes, context.workspace, live)
    over = 0 if limit is None else simulation.device_peak_bytes - footprint.live_bytes(limit)
    if over > 0:
        raise VerifyError(f"the lowered graph needs {over} bytes more than the scan said, at {simulation.peak_node}")
    if not footprint.by_offsets:
        taken = footprint.taken_bytes(simulation.device_peak_bytes, limit)
    else:
        lowered = apply(lowered, replace(context, workspace=problem.workspace, live=live), placing(footprint))
        taken = MemoryMap.of(lowered, context.bounds, problem.workspace, live).taken_bytes(footprint, chosen.outside_bytes)
    return Solution(chosen.resident, decisions, lowered, replace(simulation, device_peak_bytes=taken), chosen.step_s)


def _refusal(problem: Problem, nearest: Candidate, tried_bytes: int) -> PlanError:
    """One message: what is short, where, the ten largest values there, and what would help."""
    found, live = nearest.found, nearest.schedule.live
    budget = problem.context.device_budget_bytes or 0
    short = least_bytes(problem, nearest, tried_bytes) - budget
    fixed = nearest.outside_bytes + nearest.schedule.fixed_bytes(nearest.resident)
    largest = sorted(found.live_at_worst, key=lambda s: (-s.n_bytes, s.name))[:10]
    listing = "; ".join(f"{s.name} {format_bytes(s.n_bytes)}" for s in largest)
    return PlanError(
        f"device_budget of {budget} bytes ({format_bytes(budget)}) is {short} bytes short at "
        f"{name_of(live.nodes[found.worst])}: {budget + short} bytes would do. Fixed on the device: "
        f"{format_bytes(fixed)}. Largest live values there: {listing}. A smaller batch or sequence, or the missing bytes, would help.",
        short,
    )
