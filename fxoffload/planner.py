"""The search over whole plans: residency x recomputation, each completed by plan-swap and priced by the simulator.

Planner passes decide, rewrites apply, `simulate` judges the lowered graph; a candidate that does not fit is never relaxed. When
none fits, the smallest shortfall is the refusal, and it is true: it is what the best candidate lacks at one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.fx as fx

from .blocks import block_position
from .effects import Tier
from .errors import PlanError, VerifyError
from .footprint import Footprint
from .graph import Role, border_of, copy_graph, info, name_of, set_info
from .liveness import no_workspace
from .machine import Machine
from .memory_map import MemoryMap
from .overlap import Rates, overlapped, schedule_s
from .pipeline import Context, get_pass, pipeline_names
from .plans import Decision, GraphPlan, Prediction
from .reasons import Tried
from .simulate import Simulation, simulate
from .sizes import format_bytes
from .spill import Scan, Schedule

# Bytes of scalars a training loop keeps on the device beside the graph's values (losses, seeds).
USER_SCALAR_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Parameter:
    """What planning needs to know of one parameter: `n_bytes` of its Storage; `home` is the host tier it lives in when off the device.

    `gradient_bytes`: a gradient that the caller keeps through the next step, which makes one more before both are added; like
    `state_bytes`, the optimizer's, it lies where the parameter does (states of a parameter on disk lie in host memory). 0 when frozen.
    """

    fqn: str
    n_bytes: int
    trainable: bool
    home: Tier
    gradient_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One Graph to plan. `fixed_bytes`: device bytes no input of this graph owns (other residents, overheads). `footprint`: what the
    device's allocator reserves for live bytes.

    `resident`: None lets the planner choose which frozen parameters reside on the device; else it is fixed. `workspace`: bytes an op needs
    for itself, where the context has none because they are scratch.
    """

    graph: fx.Graph
    context: Context
    parameters: Mapping[str, Parameter]
    machine: Machine
    fixed_bytes: int = 0
    resident: frozenset[str] | None = None
    pinned_to_device: frozenset[str] = frozenset()
    pinned_to_host: frozenset[str] = frozenset()
    trained_may_reside: bool = False
    footprint: Footprint = Footprint()
    workspace: Callable[[fx.Node], int] = no_workspace

    @property
    def live_budget_bytes(self) -> int | None:
        """Live bytes that the device budget has room for."""
        budget = self.context.device_budget_bytes
        return None if budget is None else self.footprint.live_bytes(budget)


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen residency and decisions, the lowered graph they give, and what the simulator says of it.

    `estimated_s`: the seconds it was chosen for, before it was lowered; `tried`: every candidate of the search. `over_bytes`: what it takes
    above the budget once its values have their offsets. `replays`: it is to be recorded.
    """

    resident: frozenset[str]
    decisions: tuple[Decision, ...]
    lowered: fx.Graph
    simulation: Simulation
    estimated_s: float
    tried: tuple[Tried, ...] = ()
    over_bytes: int = 0
    replays: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to choose what is recomputed."""

    keep: str
    blocks: int = -1

    def __str__(self) -> str:
        words = {"all": "saves everything", "costly": "computes cheap ops again"}
        return words.get(self.keep, f"saves only what crosses blocks, in {self.blocks} of them")


# So often a search is repeated with more room for gaps between values.
_ROUNDS = 4


def solve(problem: Problem) -> Solution:
    """The fastest Solution found under the budget. Raises PlanError with the true shortfall when there is none.

    How much lies idle between values at offsets is known only of a whole plan: the search leaves room for gaps, and is repeated with more
    where the plan found has larger ones, or with none where no plan is found.
    """
    budget, footprint = problem.context.device_budget_bytes, problem.footprint
    if budget is None or not footprint.by_offsets:
        return _searched(problem)
    tries = iter([footprint.with_gaps(budget), replace(footprint, gaps_bytes=0)])
    footprint = next(tries)
    for _ in range(_ROUNDS):
        try:
            solution = _searched(replace(problem, footprint=footprint))
        except PlanError:
            smaller = next(tries, None)
            if smaller is None:
                raise
            footprint = smaller
            continue
        if not solution.over_bytes:
            return solution
        footprint = replace(footprint, gaps_bytes=footprint.gaps_bytes + solution.over_bytes * 5 // 4)
        tries = iter(())
    raise PlanError(
        f"device_budget of {budget} bytes ({format_bytes(budget)}) is {solution.over_bytes} bytes short: the values of the best plan found "
        "leave gaps between them. The missing bytes would help.", solution.over_bytes)


def _searched(problem: Problem) -> Solution:
    nearest: list[_Candidate] = []
    for trained in _trained_residents(problem):
        search = _Search(problem, trained)
        search.run()
        if search.best is not None:
            return replace(_complete(problem, _refined(problem, search.best)), tried=tuple(search.tried))
        nearest = search.short
    raise _refusal(problem, min(nearest, key=lambda c: c.found.shortfall_bytes))


class _Search:
    """The best Candidate so far, and those that do not fit. Of equals the first stays: it recomputes least, with the most residents."""

    def __init__(self, problem: Problem, trained: frozenset[str]) -> None:
        self.problem, self.trained = problem, trained
        self.best: _Candidate | None = None
        self.short: list[_Candidate] = []
        self.tried: list[Tried] = []

    def run(self) -> None:
        """Saves all, then what is costly, then what crosses blocks in all blocks, half of them, and a quarter more or less."""
        self.try_recipe(Recipe("all"))
        if self.problem.context.device_budget_bytes is None or border_of(self.problem.graph) is None:
            return
        self.try_recipe(Recipe("costly"))
        n_blocks = _n_blocks(self.problem.graph)
        self.try_recipe(Recipe("blocks", n_blocks))
        if n_blocks >= 4:
            is_better = self.try_recipe(Recipe("blocks", n_blocks // 2))
            self.try_recipe(Recipe("blocks", n_blocks // 4 if is_better else n_blocks * 3 // 4))

    def try_recipe(self, recipe: Recipe) -> bool:
        """Every resident set with what the recipe recomputes, unless its compute alone takes longer than the best plan. True when
        the best plan is one of them now."""
        known = self.best
        recomputation = _recomputation(self.problem, recipe, self.trained)
        compute_s = sum(recomputation.rates.event_s)
        if known is not None and compute_s >= known.step_s:
            self.tried.append(Tried(str(recipe), 0, compute_s, None))
            return False
        worse = 0
        before: float | None = None
        for resident in _residencies(self.problem, self.trained):
            candidate = _with_slack(self.problem, recomputation, resident)
            self.tried.append(_told(self.problem, recipe, candidate))
            if candidate.found.shortfall_bytes:
                self.short.append(candidate)
                continue
            if self.best is None or candidate.step_s < self.best.step_s:
                self.best = candidate
            worse = worse + 1 if before is not None and candidate.step_s >= before else 0
            before = candidate.step_s
            if worse == 2 or not candidate.found.loads:
                break
        return self.best is not known


def _told(problem: Problem, recipe: Recipe, candidate: _Candidate) -> Tried:
    """The candidate as the plan's reasons tell it."""
    resident_bytes = sum(problem.parameters[fqn].n_bytes for fqn in candidate.resident)
    found = candidate.found
    if found.shortfall_bytes:
        return Tried(str(recipe), resident_bytes, None, None, found.shortfall_bytes)
    return Tried(str(recipe), resident_bytes, candidate.step_s, found.peak_bytes + candidate.outside_bytes)


# A trained parameter that resides keeps its gradient on the device when the caller accumulates, and has none there when he does not:
# residents are limited to this share of all parameters and of the budget, so that the prediction stays within 5 % either way.
TRAINED_SHARE = 0.02


def _trained_residents(problem: Problem) -> Iterator[frozenset[str]]:
    """Which trained parameters to let reside: all of them when they are few (adapters), then none."""
    trained = {p.fqn: p.n_bytes for p in problem.parameters.values() if p.trainable}
    if problem.resident is not None:
        yield frozenset(trained) & problem.resident
        return
    must = frozenset(trained) & problem.pinned_to_device
    budget = problem.context.device_budget_bytes
    limit = TRAINED_SHARE * min(sum(p.n_bytes for p in problem.parameters.values()), budget or 1 << 62)
    if problem.trained_may_reside and trained and sum(trained.values()) <= limit:
        yield (frozenset(trained) - problem.pinned_to_host) | must
    yield must


@dataclass(frozen=True, slots=True)
class _Recomputation:
    """A recipe applied: the decisions, and the schedule of the graph they give."""

    decisions: tuple[Decision, ...]
    schedule: Schedule
    rates: Rates


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A recomputation, resident set and slack, scanned: what it would load and spill, and the seconds that gives."""

    recomputation: _Recomputation
    resident: frozenset[str]
    slack_bytes: int
    outside_bytes: int
    found: Scan
    step_s: float

    @property
    def schedule(self) -> Schedule:
        return self.recomputation.schedule


def _n_blocks(graph: fx.Graph) -> int:
    """How many repeated blocks the longest row of them has."""
    return 1 + max((position for node in graph.nodes if (position := block_position(name_of(node))) is not None), default=-1)


def _recomputation(problem: Problem, recipe: Recipe, trained: frozenset[str]) -> _Recomputation:
    context = problem.context
    graph = copy_graph(problem.graph)
    place_parameters(graph, problem.parameters, trained)
    decisions = decide("plan-recompute", graph, replace(context, options={"keep": recipe.keep, "blocks": recipe.blocks}))
    graph = apply(graph, replace(context, plan=_bare(decisions)), _BEFORE_SWAPS)
    schedule = Schedule.of(graph, context.bounds, context.workspace)
    return _Recomputation(decisions, schedule, Rates.of(schedule, context.bounds, problem.machine))


# The share of the budget left to copies that are under way: what is tried first, and what the best candidate is tried with then.
_SLACK_SHARE = 1 / 16
_REFINED_SHARES = (0.0, 1 / 64, 1 / 32, 1 / 8)


def _with_slack(problem: Problem, recomputation: _Recomputation, resident: frozenset[str]) -> _Candidate:
    """The candidate with slack where it fits, else without."""
    candidate = _scanned(problem, recomputation, resident, _SLACK_SHARE if problem.machine.overlaps else 0.0)
    return _scanned(problem, recomputation, resident, 0.0) if candidate.found.shortfall_bytes and candidate.slack_bytes else candidate


def _refined(problem: Problem, best: _Candidate) -> _Candidate:
    """The best of a candidate and the same with other slack."""
    shares = _REFINED_SHARES if problem.machine.overlaps and best.found.loads else ()
    others = [_scanned(problem, best.recomputation, best.resident, share) for share in shares]
    return min([best, *(c for c in others if not c.found.shortfall_bytes)], key=lambda c: c.step_s)


def _scanned(problem: Problem, recomputation: _Recomputation, resident: frozenset[str], slack_share: float) -> _Candidate:
    context, schedule = problem.context, recomputation.schedule
    outside = problem.fixed_bytes + outside_bytes(problem, resident)
    budget = None if problem.live_budget_bytes is None else problem.live_budget_bytes - outside
    slack = 0 if budget is None else int(budget * slack_share)
    found = schedule.scan(
        None if budget is None else budget - slack, context.kept_values, context.swapped_values, resident, to_the_end=not slack)
    if found.shortfall_bytes:
        return _Candidate(recomputation, resident, slack, outside, found, float("inf"))
    capacity = None if budget is None else budget - schedule.fixed_bytes(resident)
    found = overlapped(schedule, found, capacity, recomputation.rates)
    return _Candidate(recomputation, resident, slack, outside, found, schedule_s(schedule, found, recomputation.rates))


def _bare(decisions: tuple[Decision, ...]) -> GraphPlan:
    return GraphPlan("", decisions, (), Prediction(0, 0))


def _residencies(problem: Problem, trained: frozenset[str]) -> Iterator[frozenset[str]]:
    """Candidate resident sets, most bytes first; `trained` is part of each."""
    if problem.resident is not None:
        yield problem.resident
        return
    used = {info(n).fqn for n in problem.graph.find_nodes(op="placeholder") if info(n).role is Role.PARAMETER and n.users}
    must = problem.pinned_to_device | trained
    free = [p for p in problem.parameters.values() if p.fqn in used and not p.trainable and p.fqn not in problem.pinned_to_host | must]
    total = sum(p.n_bytes for p in free)
    seen: set[frozenset[str]] = set()
    for eighths in (8, 6, 5, 4, 3, 2, 1, 0):
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


def place_parameters(graph: fx.Graph, parameters: Mapping[str, Parameter], resident: frozenset[str]) -> None:
    """Notes on every parameter input the tier it lives in, in place."""
    for node in graph.find_nodes(op="placeholder"):
        entry = info(node)
        if entry.role is Role.PARAMETER and entry.fqn is not None:
            set_info(node, tier=Tier.DEVICE if entry.fqn in resident else parameters[entry.fqn].home)


def decide(name: str, graph: fx.Graph, context: Context) -> tuple[Decision, ...]:
    """What the planner pass of that name decides."""
    decisions = get_pass(name).run(graph, context)
    assert isinstance(decisions, tuple), f"{name} is not a planner"
    return decisions


def apply(graph: fx.Graph, context: Context, names: Sequence[str]) -> fx.Graph:
    """The named rewrites on a graph, unchecked: candidates are many, and the chosen one goes through a Pipeline."""
    for name in names:
        result = get_pass(name).run(graph, context)
        assert isinstance(result, fx.Graph), f"{name} is not a rewrite"
        graph = result
    return graph


# The rewrites that plan-swap must see done; those that apply what it decides, which plan-buckets must see done; and the rest.
_BEFORE_SWAPS = ("sink-gradients", "insert-checkpoint", "recompute")
_BEFORE_BUCKETS = ("insert-gather", "lower-gather", "insert-swap", "hoist-transfers", "sink-waits")
_LAST = ("bucket-transfers", "insert-release")


def _complete(problem: Problem, chosen: _Candidate) -> Solution:
    """The candidate with every decision made and the lowered graph simulated."""
    budget = problem.live_budget_bytes
    context = replace(
        problem.context, plan=_bare(chosen.recomputation.decisions), machine=problem.machine,
        device_budget_bytes=None if budget is None else budget - chosen.outside_bytes,
    )
    graph = copy_graph(problem.graph)
    place_parameters(graph, problem.parameters, chosen.resident)
    graph = apply(graph, context, _BEFORE_SWAPS)
    decisions = chosen.recomputation.decisions + decide("plan-swap", graph, replace(context, options={"slack_bytes": chosen.slack_bytes}))
    lowered = apply(graph, replace(context, plan=_bare(decisions)), _BEFORE_BUCKETS)
    decisions += decide("plan-buckets", lowered, context)
    lowered = apply(lowered, replace(context, plan=_bare(decisions)), _LAST)
    simulation = simulate(lowered, context.bounds, problem.machine, chosen.outside_bytes, context.workspace)
    if budget is not None and simulation.device_peak_bytes > budget:
        over = simulation.device_peak_bytes - budget
        raise VerifyError(f"plan-swap: the lowered graph needs {over} bytes more than the scan said, at {simulation.peak_node}")
    limit = problem.context.device_budget_bytes
    if not problem.footprint.by_offsets:
        taken, over = problem.footprint.taken_bytes(simulation.device_peak_bytes, limit), 0
    else:
        lowered = apply(lowered, replace(context, workspace=problem.workspace), pipeline_names("place"))
        taken = MemoryMap.of(lowered, context.bounds, problem.workspace).taken_bytes(problem.footprint, chosen.outside_bytes)
        over = max(taken - limit, 0) if limit is not None else 0
    return Solution(chosen.resident, decisions, lowered, replace(simulation, device_peak_bytes=taken), chosen.step_s, over_bytes=over)


def outside_bytes(problem: Problem, resident: frozenset[str]) -> int:
    """Resident parameters that are no input of this graph, and what residents that are trained bring along."""
    inputs = {info(n).fqn for n in problem.graph.find_nodes(op="placeholder")}
    idle = sum(problem.parameters[fqn].n_bytes for fqn in sorted(resident) if fqn not in inputs)
    return idle + sum(problem.parameters[fqn].gradient_bytes + problem.parameters[fqn].state_bytes for fqn in sorted(resident))


def _refusal(problem: Problem, nearest: _Candidate) -> PlanError:
    """One message: what is short, where, the ten largest values there, and what would help."""
    found, live = nearest.found, nearest.schedule.live
    budget = problem.context.device_budget_bytes or 0
    short = problem.footprint.needed_bytes((problem.live_budget_bytes or 0) + found.shortfall_bytes) - budget
    fixed = nearest.outside_bytes + nearest.schedule.fixed_bytes(nearest.resident)
    largest = sorted(found.live_at_worst, key=lambda s: (-s.n_bytes, s.name))[:10]
    listing = "; ".join(f"{s.name} {format_bytes(s.n_bytes)}" for s in largest)
    return PlanError(
        f"device_budget of {budget} bytes ({format_bytes(budget)}) is {short} bytes short at "
        f"{name_of(live.nodes[found.worst])}: {budget + short} bytes would do. Fixed on the device: "
        f"{format_bytes(fixed)}. Largest live values there: {listing}. A smaller batch or sequence, or the missing bytes, would help.",
        short,
    )
