"""The search over whole plans: residency x recomputation, each completed by plan-swap and priced by the simulator.

Planner passes decide, rewrites apply, `simulate` judges the lowered graph; a candidate that does not fit is never relaxed. When
none fits, the smallest shortfall is the refusal, and it is true: it is what the best candidate lacks at one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch.fx as fx

from .effects import Channel, Tier
from .errors import PlanError
from .graph import Role, copy_graph, info, name_of, set_info
from .liveness import liveness
from .machine import Machine
from .pipeline import Context, get_pass
from .plans import Decision, GraphPlan, Prediction, Recompute, Reside
from .simulate import Simulation, simulate
from .sizes import format_bytes
from .spill import scan

# Bytes of scalars a training loop keeps on the device beside the graph's values (losses, seeds).
USER_SCALAR_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Parameter:
    """What planning needs to know of one parameter: `n_bytes` of its Storage; `home` is the host tier it lives in when off the device."""

    fqn: str
    n_bytes: int
    trainable: bool
    home: Tier


@dataclass(frozen=True, slots=True)
class Problem:
    """One Graph to plan. `fixed_bytes`: device bytes no input of this graph owns (other residents, overheads).

    `resident`: None lets the planner choose which frozen parameters reside on the device; else it is fixed.
    """

    graph: fx.Graph
    context: Context
    parameters: Mapping[str, Parameter]
    machine: Machine
    fixed_bytes: int = 0
    resident: frozenset[str] | None = None
    pinned_to_device: frozenset[str] = frozenset()
    pinned_to_host: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen residency and decisions, the lowered graph they give, and what the simulator says of it."""

    resident: frozenset[str]
    decisions: tuple[Decision, ...]
    lowered: fx.Graph
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to choose what is recomputed."""

    keep: str
    blocks: int = -1


def solve(problem: Problem) -> Solution:
    """The fastest Solution found under the budget. Raises PlanError with the true shortfall when there is none."""
    refusals: list[PlanError] = []
    best: Solution | None = None
    for recipe in _recipes(problem):
        base = _with_recomputation(problem, recipe)
        for resident in _residencies(problem):
            try:
                found = _complete(problem, base, resident)
            except PlanError as refusal:
                refusals.append(refusal)
                continue
            if best is None or found.simulation.step_s < best.simulation.step_s * 0.999:
                best = found
            break
    if best is None:
        raise min(refusals, key=lambda r: r.shortfall_bytes or 0)
    return best


def _recipes(problem: Problem) -> Iterator[Recipe]:
    yield Recipe("all")
    if problem.context.device_budget_bytes is None:
        return
    yield from (Recipe("costly"), Recipe("blocks"))


def _residencies(problem: Problem) -> Iterator[frozenset[str]]:
    """Candidate resident sets, most bytes first; the first that fits is the best of its recipe."""
    if problem.resident is not None:
        yield problem.resident
        return
    used = {info(n).fqn for n in problem.graph.find_nodes(op="placeholder") if info(n).role is Role.PARAMETER and n.users}
    must = frozenset(problem.pinned_to_device)
    free = [p for p in problem.parameters.values() if p.fqn in used and not p.trainable and p.fqn not in problem.pinned_to_host | must]
    total = sum(p.n_bytes for p in free)
    seen: set[frozenset[str]] = set()
    for eighths in (8, 7, 6, 5, 4, 3, 2, 1, 0):
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


@dataclass(frozen=True, slots=True)
class _Base:
    graph: fx.Graph
    recomputed: tuple[Decision, ...]


def _with_recomputation(problem: Problem, recipe: Recipe) -> _Base:
    graph = copy_graph(problem.graph)
    place_parameters(graph, problem.parameters, frozenset())
    recomputed = decide("plan-recompute", graph, replace(problem.context, options={"keep": recipe.keep, "blocks": recipe.blocks}))
    return _Base(graph, recomputed)


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


# The rewrites that plan-swap must see done, and those that apply what it decides.
_BEFORE_SWAPS = ("sink-gradients", "insert-checkpoint", "recompute")
_AFTER_SWAPS = ("insert-gather", "lower-gather", "insert-swap", "hoist-transfers", "sink-waits", "insert-release")


def _complete(problem: Problem, base: _Base, resident: frozenset[str]) -> Solution:
    budget = problem.context.device_budget_bytes
    outside = problem.fixed_bytes + _outside_bytes(problem, resident)
    context = replace(
        problem.context,
        device_budget_bytes=None if budget is None else budget - outside,
        plan=GraphPlan("", base.recomputed, (), NOTHING),
    )
    graph = copy_graph(base.graph)
    place_parameters(graph, problem.parameters, resident)
    graph = apply(graph, context, _BEFORE_SWAPS)
    try:
        moves = decide("plan-swap", graph, context)
    except PlanError as short:
        raise PlanError(_refusal(problem, graph, context, outside, short), short.shortfall_bytes) from None
    decisions = base.recomputed + moves
    lowered = apply(graph, replace(context, plan=GraphPlan("", decisions, (), NOTHING)), _AFTER_SWAPS)
    simulation = simulate(lowered, problem.context.bounds, problem.machine, outside)
    if budget is not None and simulation.device_peak_bytes > budget:
        over = simulation.device_peak_bytes - budget
        raise PlanError(f"the lowered graph needs {over} bytes more than the scan said", over)
    return Solution(resident, decisions, lowered, simulation)


NOTHING = Prediction(0, 0)


def _outside_bytes(problem: Problem, resident: frozenset[str]) -> int:
    """Resident parameters that are no input of this graph."""
    inputs = {info(n).fqn for n in problem.graph.find_nodes(op="placeholder")}
    return sum(problem.parameters[fqn].n_bytes for fqn in sorted(resident) if fqn not in inputs)


def _refusal(problem: Problem, graph: fx.Graph, context: Context, outside: int, short: PlanError) -> str:
    """One message: what is short, where, the ten largest values there, and what would help."""
    live = liveness(graph, context.bounds)
    found = scan(graph, live, context.device_budget_bytes, kept=context.kept_values)
    budget = problem.context.device_budget_bytes or 0
    fixed = outside + sum(s.n_bytes for s in live.first if s.is_input and s.tier is Tier.DEVICE)
    largest = sorted(found.live_at_worst, key=lambda s: (-s.n_bytes, s.name))[:10]
    listing = "; ".join(f"{s.name} {format_bytes(s.n_bytes)}" for s in largest)
    return (
        f"device_budget of {budget} bytes ({format_bytes(budget)}) is {short.shortfall_bytes} bytes short at "
        f"{name_of(live.nodes[found.worst])}: {budget + (short.shortfall_bytes or 0)} bytes would do. Fixed on the device: "
        f"{format_bytes(fixed)}. Largest live values there: {listing}. A smaller batch or sequence, or the missing bytes, would help."
    )
