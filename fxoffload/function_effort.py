"""What a call of an autograd Function around Triton kernels takes: bytes and products of matrices, counted in a run on fake tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .function_words import share_memory, tensors_of
from .functions import KERNELS, Watch
from .torch_compat import without_modes
from .triton_kernels import launches_noted

Tensor = torch.Tensor
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Effort:
    """What a call does: the bytes that its ops and kernels read and write, and the products of matrices among its ops, (m, k, n) each."""

    n_bytes: int
    products: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(op: object, operands: Sequence[Tensor], call: str, sizes: Sequence[int]) -> Effort:
        """Of operands of these sizes, whatever their values and device."""
        return _effort(op, tuple((tuple(t.shape), t.stride(), t.dtype) for t in operands), call, tuple(sizes))


@functools.cache
def _effort(op: object, forms: tuple[tuple[Any, ...], ...], call: str, sizes: tuple[int, ...]) -> Effort:
    with without_modes(), FakeTensorMode():
        fakes = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in forms]
        with Watch(), _Counting() as counted, launches_noted() as launched:
            KERNELS[op](fakes, call, list(sizes))
    # What a kernel reads and writes over was copied before: it counts twice here, and twice among the ops.
    again = sum(_n_bytes(t) for launch in launched for t in launch.written if any(share_memory(t, c) for c in counted.copies))
    return Effort(counted.n_bytes + again + sum(_n_bytes(t) for launch in launched for t in launch.tensors), tuple(counted.products))


class _Counting(TorchDispatchMode):
    """Counts what ops read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0
        self.products: list[tuple[int, int, int]] = []
        self.copies: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = tensors_of((args, kwargs)), tensors_of(result)
        if func.overloadpacket in _PRODUCTS:
            *rows, k = read[_PRODUCTS[func.overloadpacket]].shape
            self.products.append((math.prod(rows), k, made[0].shape[-1]))
        if func.overloadpacket is _aten.copy_:
            self.copies += made
        is_view = not func._schema.is_mutable and any(share_memory(t, r) for t in made for r in read)
        if made and not is_view and func.overloadpacket not in _CREATING:
            self.n_bytes += sum(map(_n_bytes, {t.untyped_storage()._cdata: t for t in (*read, *made)}.values()))  # type: ignore[attr-defined]
        return result


# Where the first matrix is among the tensors.
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
_CREATING = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.detach})


def _n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
