"""Seconds of a node and of an optimizer step on a Machine: measured rates where it has them, else conservative priors."""

from __future__ import annotations

import logging
import math

import torch.fx as fx

from . import ops
from .effects import Channel, Tier
from .graph import Bounds, info, op_name, tensor_bytes, tensors_in
from .liveness import is_view, view_source
from .machine import Machine
from .rates import INSTEAD, MatrixRate
from .work import Work, touched_bytes, work_of

__all__ = ["flops", "node_s", "optimizer_s", "seconds", "touched_bytes"]

log = logging.getLogger("fxoffload")

# An op of unknown kind: as the slowest kind, its bytes twice, since a composite kernel passes over them more than once.
_UNKNOWN_PASSES = 2
# Share of the matrix rate that attention reaches where it is unmeasured: the lower of FlashAttention-2's figures (A100, causal).
_ATTENTION_SHARE = 0.35
# A dtype that has no measured rate: half the slowest known one.
_UNKNOWN_DTYPE_SHARE = 0.5

# Bytes an optimizer reads and writes per fp32 parameter and step: parameter and gradient read, parameter written (12), and every
# state read and written (8 each); relative to AdamW's two states they scale AdamW's rate.
_STEP_BYTES = {"adamw": 28, "adam": 28, "sgd": 12, "momentum": 20, "lion": 20, "adagrad": 20, "rmsprop": 20}
# Unknown optimizers: twice AdamW, more than any with four states.
_UNKNOWN_STEP_BYTES = 2 * _STEP_BYTES["adamw"]
# AdamW on a host that nobody measured: 4e8 parameters per second is what two cores of a server CPU do (machines/cpu.json).
_UNMEASURED_HOST_PARAMS_PER_S = 4e8


def node_s(node: fx.Node, bounds: Bounds, machine: Machine) -> tuple[Channel, float]:
    """The channel the node runs on and its seconds there. Views, tuple items, waits, releases and symbols take none."""
    spec = ops.spec_of(node)
    if node.op != "call_function" or (spec is None and is_view(node)):
        return Channel.COMPUTE, 0.0
    if spec is not None and spec.channel in (Channel.H2D, Channel.D2H):
        n_bytes = sum(tensor_bytes(v, bounds) for source in spec.nodes(node, "src") for v in tensors_in(source.meta.get("val")))
        return spec.channel, machine.transfer_s(n_bytes, spec.channel, host_tier(node, spec))
    if node.target is ops.lookup:
        return Channel.COMPUTE, lookup_s(node, bounds, machine, info(node.args[0]).tier)  # type: ignore[arg-type]
    if spec is not None or op_name(node) == "getitem" or not tensors_in(node.meta.get("val")):
        return Channel.COMPUTE, 0.0
    return Channel.COMPUTE, seconds(work_of(node, bounds), machine)


def lookup_s(node: fx.Node, bounds: Bounds, machine: Machine, tier: Tier) -> float:
    """Seconds of a lookup whose table lies on `tier`: reading and writing the rows; those on the host come over the channel to the device."""
    n_bytes = tensor_bytes(node.meta["val"], bounds)
    there_s = seconds(Work("gather", "other", 2 * n_bytes + tensor_bytes(node.args[1].meta["val"], bounds)), machine)  # type: ignore[union-attr]
    return max(there_s, machine.transfer_s(n_bytes, Channel.H2D, tier)) if tier.on_host else there_s


def flops(node: fx.Node, bounds: Bounds) -> int:
    """Floating-point operations of a matrix-like node at the bounds, 0 for all others."""
    return work_of(node, bounds).n_flops


def seconds(work: Work, machine: Machine) -> float:
    """Seconds of a kernel: its measured rate, no less than its bytes take (roofline). Issuing it is the schedule's matter."""
    known = machine.known_s.get(work)
    if known is None:
        known = machine.known_s[work] = _kernel_s(work, machine)
    return known


def _kernel_s(work: Work, machine: Machine) -> float:
    if work.kind == "matrix":
        rate, share = _matrix_rate(work.dtype, machine)
        return max(work.times * rate.product_s(*work.size) / share, work.n_bytes / machine.device_bytes_per_s)
    if work.kind.startswith("attention"):
        return max(_attention_s(work, machine), work.n_bytes / machine.device_bytes_per_s)
    curve = machine.memory.get(work.kind) or machine.memory.get(INSTEAD.get(work.kind, ""))
    if curve is not None:
        return curve.seconds(work.n_bytes)
    n_bytes = work.n_bytes * (_UNKNOWN_PASSES if work.kind == "unknown" else 1)
    return max(curve.seconds(n_bytes) for curve in machine.memory.values())


def _matrix_rate(dtype: str, machine: Machine) -> tuple[MatrixRate, float]:
    """A dtype's rate and the share of it to count on."""
    if dtype in machine.matrix:
        return machine.matrix[dtype], 1.0
    return min(machine.matrix.values(), key=lambda rate: rate.flops_per_s), _UNKNOWN_DTYPE_SHARE


def _attention_s(work: Work, machine: Machine) -> float:
    """From the rates at the nearest measured head dimension, scaled where they are of another dtype."""
    matrix, share = _matrix_rate(work.dtype, machine)
    if not machine.attention:
        return matrix.latency_s + work.n_flops / (matrix.flops_per_s * share * _ATTENTION_SHARE)
    rate = min(machine.attention, key=lambda rate: (rate.dtype != work.dtype, _apart(rate.head_dim, work.head_dim), rate.head_dim))
    curve = rate.forward if work.kind == "attention_forward" else rate.backward
    measured, measured_share = _matrix_rate(rate.dtype, machine)
    slower = measured.flops_per_s * measured_share / (matrix.flops_per_s * share)
    return curve.seconds(work.n_flops) * max(slower, 1.0)


def _apart(a: int, b: int) -> float:
    """How far two sizes are from each other, as a factor's logarithm."""
    return abs(math.log(a / max(b, 1)))


def host_tier(node: fx.Node, spec: ops.Spec) -> Tier:
    """The host tier that a transfer reads or writes, of several sources the first's; pinned where the graph does not say."""
    origin = node if spec.channel is Channel.D2H else spec.nodes(node, "src")[0]
    while isinstance(origin, fx.Node) and is_view(origin):
        origin = view_source(origin)
    if not isinstance(origin, fx.Node):
        return Tier.PINNED
    if origin.target is ops.swap_out:
        return Tier(ops.SPECS[ops.swap_out].argument(origin, "tier"))
    tier = info(origin).tier
    return tier if tier.on_host else Tier.PINNED


def optimizer_s(kind: str, n_params: int, where: str, machine: Machine, dtype: str = "fp32", fused: bool | None = None) -> float:
    """Seconds of one optimizer step over `n_params` parameters of `dtype` on the "device" or the "host". `fused`: whether by torch's fused
    kernel; None for the faster of its implementations.

    From AdamW's measured rate and the bytes that `kind` moves per parameter; an optimizer nobody knows counts twice AdamW and is
    warned of. Raises ValueError for another place.
    """
    if where not in ("device", "host"):
        raise ValueError(f"where: must be 'device' or 'host', got {where!r}")
    step_bytes = _STEP_BYTES.get(kind.lower())
    if step_bytes is None:
        log.warning("optimizer %r: its seconds are unknown and counted as twice AdamW's", kind)
        step_bytes = _UNKNOWN_STEP_BYTES
    latency_s = machine.memory["copy"].latency_s if where == "device" else 0.0
    return latency_s + n_params / _adamw_params_per_s(where, machine, dtype, fused) * step_bytes / _STEP_BYTES["adamw"]


def _adamw_params_per_s(where: str, machine: Machine, dtype: str, fused: bool | None) -> float:
    """The rate of that implementation, of the faster one where it is unmeasured; fp32's where `dtype` is; unmeasured at all: from
    bandwidth, or a prior."""
    rates = machine.optimizer_params_per_s[where]
    for suffix in (dtype, "fp32"):
        found = {name.removesuffix(f"_{suffix}"): rate for name, rate in rates.items() if name.endswith(f"_{suffix}")}
        if found:
            return found.get("fused" if fused else "foreach", max(found.values())) if fused is not None else max(found.values())
    if where == "device":
        return machine.device_bytes_per_s / _STEP_BYTES["adamw"]
    return _UNMEASURED_HOST_PARAMS_PER_S
