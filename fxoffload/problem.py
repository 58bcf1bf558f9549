"""One Graph to plan, and the two things that are done with passes on the way: deciding and applying."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from .account import OptimizerStep
from .blocks import block_position
from .buckets import GROUP_BYTES
from .effects import Tier
from .footprint import Footprint
from .graph import Role, info, name_of, set_info
from .liveness import no_workspace
from .machine import Machine
from .ops import only_looked_up
from .pipeline import Context, Pass, get_pass
from .plans import Decision

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


@dataclass(frozen=True)
class Problem:
    """One Graph to plan. `fixed_bytes`: device bytes no input of this graph owns (other residents, overheads). `footprint`: what the
    device's allocator reserves for live bytes.

    `resident`: None lets the planner choose which frozen parameters reside on the device; else it is fixed. `workspace`: bytes an op needs
    for itself, where the context has none because they are scratch. `bucket_bytes`: parameters below come in buckets; 0 for none.
    `host_bytes`: what parameters off the device, their optimizer states and swapped values may take of host memory; None without a limit.
    `optimizer`: what steps after backward; None where nothing does, or nobody knows. `thorough`: rungs are half as far apart
    (`rung.py`). `than_s`: what does not take fewer seconds, the optimizer's step included, is not wanted.
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
    bucket_bytes: int = GROUP_BYTES
    host_bytes: int | None = None
    optimizer: OptimizerStep | None = None
    thorough: bool = False
    than_s: float = field(default=math.inf, compare=False)
    residencies: dict[frozenset[str], tuple[frozenset[str], ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def after_s(self, trained: frozenset[str]) -> float:
        """Seconds of the optimizer's step with those trained parameters on the device; 0 where they are unknown."""
        seconds = self.optimizer.seconds(trained) if self.optimizer is not None else None
        return seconds or 0.0

    @functools.cached_property
    def free_names(self) -> frozenset[str]:
        """Frozen parameters that ops read and no pin keeps off the device."""
        return self._frozen(looked_up=False)

    @functools.cached_property
    def table_names(self) -> frozenset[str]:
        """Frozen parameters that lookups alone read and no pin keeps off the device, where they need not be."""
        return self._frozen(looked_up=True)

    def _frozen(self, looked_up: bool) -> frozenset[str]:
        inputs = (n for n in self.graph.find_nodes(op="placeholder") if info(n).role is Role.PARAMETER)
        used = {info(n).fqn for n in inputs if n.users and only_looked_up(n) is looked_up}
        free = (p for p in self.parameters.values() if p.fqn in used and not p.trainable)
        return frozenset(p.fqn for p in free if p.fqn not in self.pinned_to_host)

    @functools.cached_property
    def input_names(self) -> frozenset[str | None]:
        """Parameters and buffers that are inputs of the graph."""
        return frozenset(info(n).fqn for n in self.graph.find_nodes(op="placeholder"))

    @functools.cached_property
    def n_blocks(self) -> int:
        """Repeated blocks of the model."""
        return 1 + max((i for node in self.graph.nodes if (i := block_position(name_of(node))) is not None), default=-1)

    @property
    def live_budget_bytes(self) -> int | None:
        """Live bytes that the device budget has room for."""
        budget = self.context.device_budget_bytes
        return None if budget is None else self.footprint.live_bytes(budget)


def place_parameters(graph: fx.Graph, parameters: Mapping[str, Parameter], resident: frozenset[str]) -> None:
    """Notes on every parameter input the tier it lives in, in place."""
    for node in graph.find_nodes(op="placeholder"):
        entry = info(node)
        if entry.role is Role.PARAMETER and entry.fqn is not None:
            tier = Tier.DEVICE if entry.fqn in resident else parameters[entry.fqn].home
            if entry.tier is not tier:
                set_info(node, tier=tier)


def decide(name: str, graph: fx.Graph, context: Context) -> tuple[Decision, ...]:
    """What the planner pass of that name decides."""
    decisions = get_pass(name).run(graph, context)
    assert isinstance(decisions, tuple), f"{name} is not a planner"
    return decisions


def apply(graph: fx.Graph, context: Context, steps: Sequence[str | Pass]) -> fx.Graph:
    """The rewrites, or those of these names, on a graph, unchecked: candidates are many, and the chosen one goes through a Pipeline."""
    for step in (get_pass(one) if isinstance(one, str) else one for one in steps):
        result = step.run(graph, replace(context, options=step.options) if step.options else context)
        assert isinstance(result, fx.Graph), f"{step.name} is not a rewrite"
        graph = result
    return graph


def outside_bytes(problem: Problem, resident: frozenset[str]) -> int:
    """Resident parameters that are no input of this graph, and what residents that are trained bring along."""
    idle = sum(problem.parameters[fqn].n_bytes for fqn in sorted(resident) if fqn not in problem.input_names)
    return idle + sum(problem.parameters[fqn].gradient_bytes + problem.parameters[fqn].state_bytes for fqn in sorted(resident))
