"""Passes and the Pipeline that runs, checks and dumps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.fx as fx

from .graph import Bounds
from .plan import GraphPlan


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may read besides the graph: sizes, the plan to apply, budgets and options of the pipeline text."""

    bounds: Bounds = field(default_factory=Bounds)
    plan: GraphPlan | None = None
    device_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of a Pipeline. `run` returns a new or the same graph (a rewrite) and never a changed plan."""

    name: str
    run: Callable[[fx.Graph, Context], fx.Graph]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()
