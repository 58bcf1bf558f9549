"""How several tensors lie side by side: in a bucket's Storage on the device, and in the host block that one copy moves there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

# Where torch's caching allocators put a tensor of its own: kernels that choose by alignment choose the same for a part of a bucket.
ALIGNMENT = 512


def padded(n_bytes: int) -> int:
    """Bytes that a part of `n_bytes` takes."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def side_by_side(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """The offset of each part of so many bytes, in order, and the bytes of them all."""
    offsets, end = [], 0
    for n_bytes in sizes:
        offsets.append(end)
        end += padded(n_bytes)
    return tuple(offsets), end


def part_of(flat: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A view of `flat`, a whole bucket's bytes wherever they lie, as the tensor that lies at `offset` in it."""
    typed = flat.view(dtype)
    return typed.as_strided(size, stride, typed.storage_offset() + offset // dtype.itemsize)


def bytes_of(src: torch.Tensor) -> torch.Tensor:
    """A view of a tensor's memory as bytes, from its first to its last element."""
    flat = torch.empty(0, dtype=torch.uint8, device=src.device)
    return flat.set_(src.untyped_storage(), src.storage_offset() * src.element_size(), (extent_bytes(src),))  # type: ignore[call-overload]


def extent_bytes(src: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    if src.is_contiguous():
        return src.nbytes
    extent = 1
    for size, stride in zip(src.shape, src.stride()):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent * src.element_size()
