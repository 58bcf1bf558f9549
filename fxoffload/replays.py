"""Whether the device can be told a step once, as a recording that one call replays (`runtime/replay.py`), and what that takes.

A recording runs at the device's pace: what the host takes to issue ops one by one does not count any more. It holds addresses, and memory
beside the arena: what ops make themselves lies in a pool of its own, and what comes anew in every step, or is given to the caller, there
twice.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.fx as fx

from . import functions, masks, neutral, ops
from .cost import host_tier
from .effects import Channel, Tier
from .graph import Bounds, Role, draws, info, is_random, name_of, op_name, remembered, tensors_in
from .footprint import Footprint
from .machine import Machine
from .torch_compat import has_unbacked_sizes


# Libraries whose ops leave nothing to the host but to issue kernels.
_KNOWN = frozenset({"aten", "prims", "bitsandbytes", "fxo"})

# Draws that a recording takes from the device's default generator anew each time: torch hands the kernels where the generator stands, and
# moves it on as they would. Attention with dropout is none: what it keeps of the generator for its gradients is elsewhere when recorded.
_aten = torch.ops.aten
_DRAWN_ON_DEVICE = frozenset({
    neutral.dropout, _aten.native_dropout.default, _aten.bernoulli.default, _aten.bernoulli.p, _aten.rand.default, _aten.rand_like.default,
    _aten.randn.default, _aten.randn_like.default, _aten.uniform.default, _aten.normal_functional.default,
})


def obstacle(graph: fx.Graph) -> str | None:
    """What in a canonical or lowered graph the host may have to do in every step, in words; None when the whole graph can be recorded.

    That is reading a value, drawing random numbers on the host or a second time, copies from and to memory that is not pinned, and whatever
    ops of other libraries do.
    """
    drawn = host_draw(graph)
    if drawn is not None:
        return f"{name_of(drawn)} ({op_name(drawn)}) draws random numbers on the host"
    for node in graph.nodes:
        if node.op == "call_function":
            found = _obstacle(node)
            if found is not None:
                return f"{name_of(node)} ({op_name(node)}) {found}"
    return None


def _obstacle(node: fx.Node) -> str | None:
    spec, call = ops.spec_of(node), _call_of(node.target)
    if call.obstacle is not None:
        return call.obstacle
    if call.is_function and functions.reads_a_value(node.args[1]):  # type: ignore[arg-type]
        return "reads a value on the host"
    if has_unbacked_sizes(node.meta.get("val")):
        return _SIZES
    if masks.counts_true(node):
        return "counts the true elements of a mask"
    if spec is not None and spec.channel in (Channel.H2D, Channel.D2H) and host_tier(node, spec) is not Tier.PINNED:
        return f"copies from or to {host_tier(node, spec)} memory"
    if node.target is ops.lookup and info(node.args[0]).tier not in (Tier.DEVICE, Tier.PINNED):  # type: ignore[arg-type]
        return f"reads {info(node.args[0]).tier} memory"  # type: ignore[arg-type]
    if not call.is_known and tensors_in(node.meta.get("val")):
        return "is no op that is known to leave nothing to the host"
    return None


_SIZES = "has sizes that depend on values"


class _Call(NamedTuple):
    """What is so of every call of a target. `obstacle`: what it leaves to the host; `is_known`: whether it is one of ours, or of a library whose
    ops leave nothing else."""

    obstacle: str | None
    is_function: bool
    is_known: bool


@remembered
def _call_of(target: object) -> _Call:
    is_known = target is operator.getitem or getattr(target, "namespace", None) in _KNOWN
    return _Call(_obstacle_of(target), target in functions.OPS, is_known)


def _obstacle_of(target: object) -> str | None:
    if target in (ops.rng_state, ops.swap_rng_state):
        return "sets a generator back"
    if draws(target) and target not in _DRAWN_ON_DEVICE:
        return "draws random numbers"
    return _SIZES if torch.Tag.data_dependent_output in getattr(target, "tags", ()) else None


def host_draw(graph: fx.Graph) -> fx.Node | None:
    """The first op of a graph on a device that draws from the host's generator; a recording would give its numbers again and again."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    drawn = next((node for node in calls if is_random(node) and "cpu" in _device_types(node)), None)
    return drawn if drawn is not None and any(_device_types(node) - {"cpu"} for node in calls) else None


def _device_types(node: fx.Node) -> set[str]:
    return {value.device.type for value in tensors_in(node.meta.get("val"))}


def comes_anew(role: Role | None) -> bool:
    """True for inputs that lie elsewhere in every step."""
    return role not in (Role.PARAMETER, Role.BUFFER)


def is_read(input_node: fx.Node) -> bool:
    """Whether any op reads the input's values. One that makes something like it, for an output that is left out, reads its shape alone."""
    return any(user.target is not _aten.new_empty.default for user in input_node.users)


def recorded(footprint: Footprint, graph: fx.Graph, bounds: Bounds, gradient_bytes: int) -> Footprint:
    """The footprint of the Step when it is replayed; `gradient_bytes`: of those that it returns on the device."""
    return replace(footprint, recording_bytes=footprint.overhead_bytes + anew_bytes(graph, bounds), handed_out_bytes=gradient_bytes)


def anew_bytes(graph: fx.Graph, bounds: Bounds) -> int:
    """Bytes of the inputs that come anew."""
    inputs = (node for node in graph.find_nodes(op="placeholder") if comes_anew(info(node).role))
    return sum(bounds.bytes_of(node.meta["val"]) for node in inputs if isinstance(node.meta.get("val"), torch.Tensor))


def replaying(machine: Machine) -> Machine:
    """The machine as a recording meets it: no op is issued by the host."""
    return replace(machine, dispatch_s=None)
