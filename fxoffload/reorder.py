"""What `numerics="reordered"` adds to a search: the same step with its cross-entropy in chunks of rows, where that is a better plan, and
without the logits that a forward alone would return, where the budget has no room to read them.

Nothing else of a search changes: a chunked graph is a Problem like any other, and its Solution begins with the Defer and Chunk decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.fx as fx

from .cost import node_s
from .effects import Channel
from .errors import PlanError
from .graph import copy_graph, name_of
from .heads import Head, find_heads
from .losses import Whole, find_losses
from .memory_map import MemoryMap, reading_bytes
from .planner import Problem, Solution, solve
from .problem import apply, decide
from .plans import Chunk, Decision, Defer, GraphPlan, Prediction
from .readings import find_readings
from .reasons import Tried

# Far above the size from which kernels have their full rate, and the few chunks that are alive at once are small beside a block of a
# large model. A small budget has small chunks.
_CHUNK_BYTES = 256 << 20
_BUDGET_SHARE = 1 / 32
# Beside what is read of rows there is nothing but these and a few chunks.
_READING_SHARE = 1 / 8
# What is tried when nothing of that size fits.
_SMALLER = 4


def solve_reordered(problem: Problem) -> Solution:
    """The fastest Solution, with logits whole, in chunks or left to be made when they are read. Raises PlanError with the smallest
    shortfall when none fits."""
    limit = _limit_bytes(problem)
    tries = list(_variants(problem, limit))
    found, refused = _solutions(tries)
    if not found:
        smaller = [v for v in _variants(problem, max(1, limit // _SMALLER)) if v.decisions not in [t.decisions for t in tries]]
        found, refused_too = _solutions(smaller)
        refused += refused_too
    if not found:
        raise min(refused, key=lambda error: error.shortfall_bytes or 0)
    readable = [one for one in found if is_readable(one.variant.problem, one.solution)] or found
    best = min(readable, key=lambda one: one.seconds).solution
    return replace(best, tried=tuple(tried for one in found for tried in one.solution.tried))


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

    def solve(self) -> Solution:
        """Raises PlanError when nothing fits."""
        solution = solve(self.problem)
        tried = tuple(self._told(one) for one in solution.tried)
        return replace(solution, decisions=self.decisions + solution.decisions, tried=tried)

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


@dataclass(frozen=True, slots=True)
class _Found:
    """A variant's Solution."""

    variant: _Variant
    solution: Solution

    @property
    def seconds(self) -> float:
        """Of the graph, and of reading once what it leaves out."""
        return self.solution.estimated_s + self.variant.reading_s(self.solution.resident)


def _limit_bytes(problem: Problem) -> int:
    budget = problem.context.device_budget_bytes
    share = _READING_SHARE if find_readings(problem.graph) else _BUDGET_SHARE
    return _CHUNK_BYTES if budget is None else max(1, min(_CHUNK_BYTES, int(budget * share)))


def _variants(problem: Problem, limit_bytes: int) -> Iterator[_Variant]:
    """The Problem as it is, and without the outputs beyond the limit that rows can make; and each with what is beyond it in chunks."""
    deferrals = _decided("plan-deferrals", problem, limit_bytes)
    names = [d.value for d in deferrals if isinstance(d, Defer)]
    whole = _Variant((), problem, tuple(h for h in find_heads(problem.graph) if name_of(h.output) in names))
    for variant in (whole, *_applied(whole, deferrals, "defer-outputs")):
        yield variant
        yield from _applied(variant, _decided("plan-chunks", variant.problem, limit_bytes), "chunk-loss", "chunk-rows")


def _decided(planner: str, problem: Problem, limit_bytes: int) -> tuple[Decision, ...]:
    return decide(planner, problem.graph, replace(problem.context, options={"limit_bytes": limit_bytes}))


def _applied(variant: _Variant, decisions: tuple[Decision, ...], *rewrites: str) -> Iterator[_Variant]:
    """The variant after these decisions too; nothing when there are none."""
    if decisions:
        problem = variant.problem
        applied = replace(problem.context, plan=GraphPlan("", decisions, (), Prediction(0, 0)))
        graph = apply(copy_graph(problem.graph), applied, rewrites)
        yield _Variant(variant.decisions + decisions, replace(problem, graph=graph), variant.heads)


def _solutions(variants: list[_Variant]) -> tuple[list[_Found], list[PlanError]]:
    """What fits of the variants, and the refusals of the others."""
    found, refused = [], []
    for variant in variants:
        try:
            found.append(_Found(variant, variant.solve()))
        except PlanError as error:
            refused.append(error)
    return found, refused
