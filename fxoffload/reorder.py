"""What `numerics="reordered"` adds to a search: the same step with its cross-entropy in chunks of rows, where that is a better plan, and
without the logits that a forward alone would return, where the budget has no room to read them.

Nothing else of a search changes: a chunked graph is a Problem like any other, and its Solution begins with the Defer and Chunk decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.fx as fx

from .cost import node_s
from .effects import Channel
from .errors import PlanError
from .graph import name_of
from .heads import Head, find_heads
from .heap import heap_at_rest
from .liveness import live_curve, liveness
from .losses import Whole, find_losses
from .memory_map import MemoryMap, reading_bytes
from .planner import Chosen, Problem, Searches, Solution, attempts, searches_of, tight_bytes, with_tight_bytes
from .problem import decide
from .plans import Chunk, Decision, Defer
from .readings import find_readings
from .reasons import Tried

# Far above the size from which kernels have their full rate, and the few chunks that are alive at once are small beside a block of a
# large model. A small step has small chunks: this share of all it takes. No budget changes them, or a larger one could be slower.
_CHUNK_BYTES = 256 << 20
_SHARE = 1 / 64
# Beside what is read of rows there is nothing but parameters and a few chunks.
_READING_SHARE = 1 / 16
# What is tried where memory is tight for that size.
_SMALLER = 4


def solve_reordered(problem: Problem, known: Searches | None = None) -> Solution:
    """The fastest Solution, with logits whole, in chunks or left to be made when they are read, the same one whatever is `known`. Raises
    PlanError with the smallest shortfall when none fits."""
    limit, known = _limit_bytes(problem), known if known is not None else Searches()
    tries = list(_variants(problem, limit, known))
    with heap_at_rest():
        found, seconds, refused = _best(tries, known)
        if problem.context.device_budget_bytes is not None:
            other, refused_too = _with_smaller_chunks(problem, tries, limit, known, seconds)
            found, refused = other or found, refused + refused_too
    if found is None:
        raise min(refused, key=lambda error: error.shortfall_bytes or 0)
    return with_tight_bytes(found, [one.problem for one in tries], known)


def _with_smaller_chunks(
    problem: Problem, tries: list[_Variant], limit: int, known: Searches, than_s: float
) -> tuple[Solution | None, list[PlanError]]:
    """What smaller chunks give that is faster, and their refusals: on the rungs where memory is tight for all that was tried, which does not
    depend on the budget."""
    problems = [one.problem for one in tries]
    below = tight_bytes(problems, known)
    if than_s < math.inf and all(search.none_faster(below, than_s) for one in problems for search in searches_of(one, known)):
        return None, []
    smaller = [v for v in _variants(problem, max(1, limit // _SMALLER), known) if v.decisions not in [t.decisions for t in tries]]
    found, _, refused = _best(smaller, known, below, than_s)
    return found, refused


def solve_in_form(problem: Problem, form: tuple[Decision, ...]) -> Solution:
    """The Solution with these Defer and Chunk decisions and no others: every result is rounded as by another plan with them. Raises PlanError
    when none fits."""
    variant, known = _Variant((), problem), Searches()
    for kinds, rewrites in ((Defer, ("defer-outputs",)), (Chunk, ("chunk-loss", "chunk-rows"))):
        variant = next(_applied(variant, tuple(d for d in form if isinstance(d, kinds)), known, *rewrites), variant)
    with heap_at_rest():
        found, _, refused = _best([variant], known)
    if found is None:
        raise refused[0]
    return with_tight_bytes(found, [variant.problem], known)


def is_readable(problem: Problem, solution: Solution) -> bool:
    """Whether the budget has room for what metrics make of the outputs, beside them and what resides."""
    bounds, budget = problem.context.bounds, problem.context.device_budget_bytes
    read = reading_bytes(solution.lowered, bounds)
    if budget is None or not read:
        return True
    if problem.footprint.by_offsets:  # the arena of the graph is still there, and so is a recording
        return solution.simulation.device_peak_bytes + read <= budget
    reside = [problem.parameters[name] for name in sorted(solution.resident)]
    kept = sum(p.n_bytes + p.gradient_bytes + p.state_bytes for p in reside) + MemoryMap.of(solution.lowered, bounds).returned_bytes
    return problem.footprint.needed_bytes(problem.fixed_bytes + kept + read) <= budget


def whole_losses(graph: fx.Graph) -> list[str]:
    """A line for each cross-entropy of the graph that cannot be computed in chunks, with the reason."""
    found = [one for one in find_losses(graph) if isinstance(one, Whole)]
    return [f"the logits of {name_of(one.nll)} stay whole: {one.reason}" for one in found]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The Problem after its decisions. `heads`: outputs that it could leave out, or has."""

    decisions: tuple[Decision, ...]
    problem: Problem
    heads: tuple[Head, ...] = ()

    def completed(self, chosen: Chosen) -> Solution | None:
        """The Solution of what was chosen; None where its values do not keep to the budget."""
        solution = chosen.completed(self.problem)
        return None if solution is None else replace(solution, decisions=self.decisions + solution.decisions)

    def told(self, chosen: Chosen) -> tuple[Tried, ...]:
        """What was tried, as the plan's reasons tell it."""
        return tuple(self._told(one) for one in chosen.tried)

    def _told(self, one: Tried) -> Tried:
        chunks = max((d.chunks for d in self.decisions if isinstance(d, Chunk)), default=1)
        told = [f"logits in {chunks} chunks"] if chunks > 1 else []
        told += ["logits when they are read"] if self.defers else []
        return replace(one, recipe=", ".join([*told, one.recipe]))

    @property
    def defers(self) -> bool:
        """Whether outputs are left to be made when they are read."""
        return any(isinstance(d, Defer) for d in self.decisions)

    def reading_s(self, resident: frozenset[str]) -> float:
        """Seconds of the products that are left for when the outputs are read, and of copying what they read that does not reside."""
        bounds, machine, parameters = self.problem.context.bounds, self.problem.machine, self.problem.parameters
        heads = self.heads if self.defers else ()
        copied = [parameters[name] for head in heads for name in head.parameters if name not in resident]
        copies_s = sum(machine.transfer_s(p.n_bytes, Channel.H2D, p.home) for p in copied)
        return copies_s + sum(node_s(head.product, bounds, machine)[1] for head in heads)


@dataclass(slots=True)
class _Attempt:
    """What was chosen of a variant, and what comes after it."""

    variant: _Variant
    chosen: Chosen
    others: Iterator[Chosen]

    @property
    def seconds(self) -> float:
        """Of the graph and the optimizer's step, and of reading once what it leaves out."""
        return self.chosen.total_s + self.variant.reading_s(self.chosen.candidate.resident)


def _limit_bytes(problem: Problem) -> int:
    """The most of a chunk's log-probabilities, by what the step takes with everything on the device."""
    values = live_curve(liveness(problem.graph, problem.context.bounds)).peak_bytes
    everything = values + sum(p.n_bytes + p.gradient_bytes + p.state_bytes for p in problem.parameters.values())
    share = _READING_SHARE if find_readings(problem.graph) else _SHARE
    return max(1, min(_CHUNK_BYTES, int(everything * share)))


def _variants(problem: Problem, limit_bytes: int, known: Searches) -> Iterator[_Variant]:
    """The Problem as it is, and without the outputs beyond the limit that rows can make; and each with what is beyond it in chunks."""
    deferrals = _decided("plan-deferrals", problem, limit_bytes)
    names = [d.value for d in deferrals if isinstance(d, Defer)]
    whole = _Variant((), problem, tuple(h for h in find_heads(problem.graph) if name_of(h.output) in names))
    for variant in (whole, *_applied(whole, deferrals, known, "defer-outputs")):
        yield variant
        yield from _applied(variant, _decided("plan-chunks", variant.problem, limit_bytes), known, "chunk-loss", "chunk-rows")


def _decided(planner: str, problem: Problem, limit_bytes: int) -> tuple[Decision, ...]:
    return decide(planner, problem.graph, replace(problem.context, options={"limit_bytes": limit_bytes}))


def _applied(variant: _Variant, decisions: tuple[Decision, ...], known: Searches, *rewrites: str) -> Iterator[_Variant]:
    """The variant after these decisions too; nothing when there are none."""
    if decisions:
        yield _Variant(variant.decisions + decisions, known.applied(variant.problem, decisions, rewrites), variant.heads)


def _best(
    variants: list[_Variant], known: Searches, below: int | None = None, than_s: float = math.inf
) -> tuple[Solution | None, float, list[PlanError]]:
    """The Solution of the fastest of the variants that can be read, of all where none can, its seconds by their estimate, and the refusals of the
    others. None is lowered but what is the fastest by its estimate, and faster `than_s`. `below`: rungs from there on are left out."""
    attempted, refused, unreadable, seconds = list[_Attempt](), list[PlanError](), list[tuple[Solution, float]](), math.inf
    for variant in variants:
        others = attempts(variant.problem, known, below)
        try:
            attempted.append(_Attempt(variant, next(others), others))
        except PlanError as error:
            refused.append(error)
    found, waiting = None, list(attempted)
    while waiting and found is None:
        best = min(waiting, key=lambda one: one.seconds)
        if best.seconds >= than_s:
            return None, math.inf, refused
        solution = best.variant.completed(best.chosen)
        if solution is None:
            try:
                best.chosen = next(best.others)
            except PlanError as error:
                refused.append(error)
                waiting.remove(best)
                attempted.remove(best)
        elif is_readable(best.variant.problem, solution):
            found, seconds = solution, best.seconds
        else:
            unreadable.append((solution, best.seconds))
            waiting.remove(best)
    if found is None and unreadable:
        found, seconds = unreadable[0]
    tried = tuple(told for one in attempted for told in one.variant.told(one.chosen))
    return (None if found is None else replace(found, tried=tried)), seconds, refused
