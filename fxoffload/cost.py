"""Seconds of a node on a Machine: a roofline over its FLOPs and bytes, or a copy over its channel."""

from __future__ import annotations

import torch
import torch.fx as fx

from . import ops
from .effects import Channel
from .graph import Bounds, operands, tensor_bytes, tensors_in
from .liveness import is_view
from .machine import Machine

_DTYPE_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def flops(node: fx.Node, bounds: Bounds) -> int:
    """Floating-point operations of a matrix-like node at the bounds, 0 for all others.

    mm 2mkn, bmm 2bmkn; attention 4bhqkd forward (two products), 10bhqkd backward (five), both halved when causal; convolution
    2 x output elements x kernel elements per output channel.
    """
    name = getattr(getattr(node.target, "_schema", None), "name", "").split("::")[-1]
    shapes = [[bounds.of(d) for d in v.shape] for o in operands(node) for v in tensors_in(o.meta.get("val"))]
    if name in ("mm", "_int_mm") and len(shapes) >= 2:
        return 2 * shapes[0][0] * shapes[0][1] * shapes[1][1]
    if name == "mm" and shapes:
        return 2 * shapes[0][0] * shapes[0][1] * shapes[0][1]
    if name == "addmm" and len(shapes) >= 3:
        return 2 * shapes[1][0] * shapes[1][1] * shapes[2][1]
    if name in ("bmm", "baddbmm") and len(shapes) >= 2:
        a, b = shapes[-2], shapes[-1]
        return 2 * a[0] * a[1] * a[2] * b[2]
    if "attention" in name and len(shapes) >= 3:
        return _attention_flops(name, shapes, node)
    if name.startswith("convolution") and len(shapes) >= 2:
        return _convolution_flops(name, node, bounds)
    return 0


def _attention_flops(name: str, shapes: list[list[int]], node: fx.Node) -> int:
    backward = "backward" in name
    query, key = (shapes[1], shapes[2]) if backward else (shapes[0], shapes[1])
    total = (10 if backward else 4) * query[0] * query[1] * query[2] * key[2] * query[3]
    return total // 2 if any(a is True for a in node.args) else total


def _convolution_flops(name: str, node: fx.Node, bounds: Bounds) -> int:
    backward = "backward" in name
    arguments = [a for a in node.args[:3] if isinstance(a, fx.Node)]
    out = arguments[0].meta["val"] if backward else node.meta["val"]
    weight = arguments[2 if backward else 1].meta["val"]
    n_out = 1
    for d in out.shape:
        n_out *= bounds.of(d)
    per_output = 1
    for d in weight.shape[1:]:
        per_output *= bounds.of(d)
    return (4 if backward else 2) * n_out * per_output


def touched_bytes(node: fx.Node, bounds: Bounds) -> int:
    """Bytes the node reads and writes, each operand and result once."""
    values = [v for o in operands(node) for v in tensors_in(o.meta.get("val"))] + tensors_in(node.meta.get("val"))
    return sum(tensor_bytes(v, bounds) for v in values)


def node_s(node: fx.Node, bounds: Bounds, machine: Machine) -> tuple[Channel, float]:
    """The channel the node runs on and its seconds there. Views, waits, releases and symbols take none."""
    spec = ops.spec_of(node)
    if node.op != "call_function" or (spec is None and is_view(node)):
        return Channel.COMPUTE, 0.0
    if spec is not None and spec.channel in (Channel.H2D, Channel.D2H):
        source = tensors_in(node.args[0].meta.get("val"))  # type: ignore[union-attr]
        return spec.channel, machine.transfer_s(sum(tensor_bytes(v, bounds) for v in source), spec.channel)
    if spec is not None or not tensors_in(node.meta.get("val")):
        return Channel.COMPUTE, 0.0
    n_flops = flops(node, bounds)
    memory_s = touched_bytes(node, bounds) / machine.device_bytes_per_s
    if not n_flops:
        return Channel.COMPUTE, machine.op_latency_s + memory_s
    value = tensors_in(node.meta["val"])[0]
    rate = machine.flops_per_s.get(_DTYPE_WORDS.get(value.dtype, "fp32"), machine.flops_per_s["fp32"])
    return Channel.COMPUTE, machine.op_latency_s + max(n_flops / rate, memory_s)
