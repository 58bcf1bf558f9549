"""ATen's ops that put a value into a copy or a part of it, by a copy of the tensor alone: they copy the whole storage that it is a view of,
as large as the arena where memory is planned by offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

_aten = torch.ops.aten


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the tensor's strides; of one that holds an element in several places, a copy of its own."""
    return tensor.clone() if _holds_twice(tensor) else _like(tensor).copy_(tensor)


def _holds_twice(tensor: torch.Tensor) -> bool:
    return any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride()))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def copy(tensor: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten.copy: what `tensor` is once `src` is copied to it."""
    made = torch.empty_like(tensor) if _holds_twice(tensor) else _like(tensor)
    return made.copy_(src, non_blocking)


def slice_scatter(
    tensor: torch.Tensor, src: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1,
) -> torch.Tensor:
    """aten.slice_scatter."""
    made = copied(tensor)
    _aten.slice.Tensor(made, dim, start, end, step).copy_(src)
    return made


def select_scatter(tensor: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """aten.select_scatter."""
    made = copied(tensor)
    made.select(dim, index).copy_(src)
    return made


def diagonal_scatter(tensor: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """aten.diagonal_scatter."""
    made = copied(tensor)
    made.diagonal(offset, dim1, dim2).copy_(src)
    return made


SCATTERS: Mapping[object, Callable[..., torch.Tensor]] = {
    _aten.copy.default: copy, _aten.slice_scatter.default: slice_scatter, _aten.select_scatter.default: select_scatter,
    _aten.diagonal_scatter.default: diagonal_scatter}
