"""Which ATen ops can write their results into memory that they are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .graph import remembered


# Their kernels for CUDA do not resize: what they give an empty tensor is the transposed result (seen with torch 2.11).
_TRANSPOSED = frozenset({torch.ops.aten.nonzero_static.default})


@dataclass(frozen=True, slots=True)
class OutVariant:
    """`op` called with the functional op's arguments and, by keyword, one tensor per name in `results`."""

    op: torch._ops.OpOverload
    results: tuple[str, ...]


@remembered
def out_variant(target: object) -> OutVariant | None:
    """The out variant of an ATen op; None where it has none with a kernel of its own.

    Those that PyTorch generates call the functional op and copy its result: they are no variants here. Kernels of the CPU speak for all
    devices, so that a plan is the same where no accelerator is. An out variant resizes an empty tensor to its result's sizes and strides,
    and gives the functional op's bits: both are one kernel.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or target in _TRANSPOSED:
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet = target.overloadpacket
    for overload in packet.overloads():
        op = getattr(packet, overload)
        outs = [a for a in op._schema.arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
        if not outs or rest != wanted or len(outs) != len(target._schema.returns) or any(str(a.type) != "Tensor" for a in outs):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name + "." + overload, "CPU"):
            return OutVariant(op, tuple(a.name for a in outs))
    return None
