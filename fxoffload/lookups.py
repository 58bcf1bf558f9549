"""Embeddings whose rows are read where their table lies, in host memory: a batch reads a small part of it, and all of it would have to be
copied before the step could begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.fx as fx

from .effects import Tier
from .errors import PlanError
from .graph import Bounds, Role, info, tensor_bytes
from .machine import Machine
from .planner import Searches, Solution
from .plans import Decision, Gather, SwapIn
from .problem import Problem, decide, place_parameters


def reads_rows_of_host(node: fx.Node, bounds: Bounds, machine: Machine | None) -> bool:
    """Whether the node is an embedding that reads less of a parameter on the host than all of it, and the device can reach it there:
    where copies overlap with compute only pinned memory can be reached."""
    if node.target is not torch.ops.aten.embedding.default:
        return False
    table, result = node.args[0], node.meta["val"]
    if not isinstance(table, fx.Node) or table.op != "placeholder" or info(table).role is not Role.PARAMETER:
        return False
    tier, value = info(table).tier, table.meta["val"]
    reachable = tier is Tier.PINNED or tier is Tier.PAGEABLE and (machine is None or not machine.overlaps)
    return reachable and value.is_contiguous() and tensor_bytes(result, bounds) < tensor_bytes(value, bounds)


def solve_looked_up(problem: Problem, solve: Callable[[Problem], Solution], known: Searches | None = None) -> Solution:
    """The Solution with lookups, where there may be some; where memory binds nothing, so that all that is frozen resides, the faster one
    of it and that with the tables on the device. Raises PlanError as `solve` does: a lookup never needs more memory."""
    place_parameters(problem.graph, problem.parameters, problem.resident if problem.resident is not None else problem.pinned_to_device)
    decisions = decide("plan-lookups", problem.graph, replace(problem.context, machine=problem.machine))
    if not decisions:
        return solve(problem)
    solution = solve((known or Searches()).applied(problem, decisions, ["look-up"]))
    solution = replace(solution, decisions=decisions + solution.decisions)
    if any(_is_for_memory(decision, problem) for decision in solution.decisions):
        return solution
    try:
        return min([solve(problem), solution], key=lambda one: one.total_s)
    except PlanError:
        return solution


def _is_for_memory(decision: Decision, problem: Problem) -> bool:
    """Whether the decision copies what could stay on the device, had that room."""
    return isinstance(decision, SwapIn) or isinstance(decision, Gather) and not problem.parameters[decision.value].trainable
