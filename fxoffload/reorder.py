"""What `numerics="reordered"` adds to a search: the same step with its cross-entropy in chunks of rows, where that is a better plan.

Nothing else of a search changes: a chunked graph is a Problem like any other, and its Solution begins with the Chunk decisions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.fx as fx

from .errors import PlanError
from .graph import copy_graph, name_of
from .losses import Whole, find_losses
from .planner import Problem, Solution, solve
from .problem import apply, decide
from .plans import Chunk, Decision, GraphPlan, Prediction
from .reasons import Tried

# Far above the size from which kernels have their full rate, and the few chunks that are alive at once are small beside a block of a
# large model. A small budget has small chunks.
_CHUNK_BYTES = 256 << 20
_BUDGET_SHARE = 1 / 32
# What is tried when nothing of that size fits.
_SMALLER = 4


def solve_reordered(problem: Problem) -> Solution:
    """The fastest Solution, with logits whole or in chunks. Raises PlanError with the smallest shortfall when none fits."""
    limit = _limit_bytes(problem)
    tries = [_Variant((), problem), *_chunked(problem, limit)]
    found, refused = _solutions(tries)
    if not found:
        found, refused_too = _solutions([v for v in _chunked(problem, max(1, limit // _SMALLER)) if v.decisions not in [t.decisions for t in tries]])
        refused += refused_too
    if not found:
        raise min(refused, key=lambda error: error.shortfall_bytes or 0)
    best = min(found, key=lambda solution: solution.estimated_s)
    return replace(best, tried=tuple(one for solution in found for one in solution.tried))


def whole_losses(graph: fx.Graph) -> list[str]:
    """A line for each cross-entropy of the graph that cannot be computed in chunks, with the reason."""
    found = [one for one in find_losses(graph) if isinstance(one, Whole)]
    return [f"the logits of {name_of(one.nll)} stay whole: {one.reason}" for one in found]


@dataclass(frozen=True, slots=True)
class _Variant:
    """The Problem after its Chunk decisions."""

    decisions: tuple[Decision, ...]
    problem: Problem

    def solve(self) -> Solution:
        """Raises PlanError when nothing fits."""
        solution = solve(self.problem)
        tried = tuple(self._told(one) for one in solution.tried)
        return replace(solution, decisions=self.decisions + solution.decisions, tried=tried)

    def _told(self, one: Tried) -> Tried:
        chunks = max((d.chunks for d in self.decisions if isinstance(d, Chunk)), default=1)
        return one if chunks == 1 else replace(one, recipe=f"logits in {chunks} chunks, {one.recipe}")


def _limit_bytes(problem: Problem) -> int:
    budget = problem.context.device_budget_bytes
    return _CHUNK_BYTES if budget is None else max(1, min(_CHUNK_BYTES, int(budget * _BUDGET_SHARE)))


def _chunked(problem: Problem, limit_bytes: int) -> Iterator[_Variant]:
    """The Problem with each loss beyond the limit in chunks; nothing when there is no such loss."""
    context = problem.context
    decisions = decide("plan-chunks", problem.graph, replace(context, options={"limit_bytes": limit_bytes}))
    if decisions:
        applied = replace(context, plan=GraphPlan("", decisions, (), Prediction(0, 0)))
        yield _Variant(decisions, replace(problem, graph=apply(copy_graph(problem.graph), applied, ["chunk-loss"])))


def _solutions(variants: list[_Variant]) -> tuple[list[Solution], list[PlanError]]:
    """What fits of the variants, and the refusals of the others."""
    found, refused = [], []
    for variant in variants:
        try:
            found.append(variant.solve())
        except PlanError as error:
            refused.append(error)
    return found, refused
