"""The vocabulary of the text form: what its writer and its reader must agree on."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence

import sympy
import torch
import torch.fx as fx

from .graph import name_of, op_name

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.complex64: "c64", torch.complex128: "c128", torch.bool: "b8",
}  # fmt: skip
LAYOUTS = {torch.strided: "strided", torch.sparse_coo: "sparse_coo", torch.sparse_csr: "sparse_csr"}
FORMATS = {
    torch.contiguous_format: "contiguous_format", torch.preserve_format: "preserve_format",
    torch.channels_last: "channels_last", torch.channels_last_3d: "channels_last_3d",
}  # fmt: skip
CONSTANTS = {"none": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan, "-inf": -math.inf}
MODULES = {"operator": operator, "math": math, "torch": torch}
HEADER = re.compile(r'graph ("(?:[^"\\]|\\.)*")(?: \(([^)]*)\))?')


def is_void(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns


def void_name(node: fx.Node) -> str:
    operand = node.args[0] if node.args else None
    return f"{name_of(operand)}/{op_name(node)}" if isinstance(operand, fx.Node) else f"/{op_name(node)}"


def expr_of(size: int | torch.SymInt) -> int | sympy.Basic:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def contiguous_strides(shape: Sequence[int | sympy.Basic]) -> tuple[int | sympy.Basic, ...]:
    strides: list[int | sympy.Basic] = []
    step: int | sympy.Basic = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (1 if size == 0 else size)
    return tuple(reversed(strides))
