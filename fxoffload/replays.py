"""Whether the device can be told a step once, as a recording that one call replays (`runtime/replay.py`), and what that takes.

A recording runs at the device's pace: what the host takes to issue ops one by one does not count any more. It holds addresses, and memory
beside the arena: what ops make themselves lies in a pool of its own, and what comes anew in every step, or is given to the caller, there
twice.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx

from . import ops
from .cost import host_tier
from .effects import Channel, Tier
from .graph import Bounds, Role, info, name_of, op_name
from .footprint import Footprint
from .machine import Machine
from .torch_compat import has_unbacked_sizes


def obstacle(graph: fx.Graph) -> str | None:
    """What in a canonical or lowered graph the host must do in every step, in words; None when the whole graph can be recorded.

    That is reading a value or a random state, and copies from and to memory that is not pinned.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (ops.rng_state, ops.swap_rng_state):
            return f"{name_of(node)} reads the random state on the host"
        spec = ops.spec_of(node)
        if spec is not None and spec.channel in (Channel.H2D, Channel.D2H):
            tier = host_tier(node, spec)
            if tier is not Tier.PINNED:
                return f"{name_of(node)} copies from or to {tier} memory"
        if _reads_values(node):
            return f"{name_of(node)} ({op_name(node)}) has sizes that depend on values"
    return None


def _reads_values(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.data_dependent_output in tags or has_unbacked_sizes(node.meta.get("val"))


def comes_anew(role: Role | None) -> bool:
    """True for inputs that lie elsewhere in every step."""
    return role not in (Role.PARAMETER, Role.BUFFER)


def recorded(footprint: Footprint, graph: fx.Graph, bounds: Bounds, gradient_bytes: int) -> Footprint:
    """The footprint of the Step when it is replayed; `gradient_bytes`: of those that it returns on the device."""
    return replace(footprint, recording_bytes=footprint.overhead_bytes + anew_bytes(graph, bounds) + gradient_bytes)


def anew_bytes(graph: fx.Graph, bounds: Bounds) -> int:
    """Bytes of the inputs that come anew."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if comes_anew(info(node).role))
    return sum(bounds.bytes_of(node.meta["val"]) for node in inputs if isinstance(node.meta.get("val"), torch.Tensor))


def replaying(machine: Machine) -> Machine:
    """The machine as a recording meets it: no op is issued by the host."""
    return replace(machine, dispatch_s=None)
