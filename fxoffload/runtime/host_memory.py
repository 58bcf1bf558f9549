"""Host memory by tier: pinned blocks, pageable memory and memory-mapped files, with counters that tests read."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import Counter
from pathlib import Path

import torch

from ..effects import Tier
from ..errors import PlanError
from ..sizes import format_bytes

# Blocks of the disk file start at multiples of a page, so that no two blocks share one.
_ALIGNMENT = mmap.PAGESIZE


class HostMemory:
    """Gives out host tensors per tier and counts their live bytes; a tensor's bytes end when its storage dies.

    `pin`: pinned memory really is pinned (a CUDA host); elsewhere the tier is ordinary memory. `disk_dir`: where the disk tier's
    one preallocated file lies. Raises PlanError when a tier cannot give what is asked.
    """

    def __init__(self, pin: bool = False, disk_dir: str | None = None, disk_bytes: int = 0) -> None:
        self.pin = pin
        self.live_bytes: Counter[Tier] = Counter()
        self.peak_bytes: Counter[Tier] = Counter()
        self._disk = DiskFile(disk_dir, disk_bytes) if disk_bytes else None

    def empty_like(self, src: torch.Tensor, tier: Tier) -> torch.Tensor:
        """An uninitialized host tensor of `src`'s shape, stride and dtype in `tier`."""
        n_bytes = _extent_bytes(src)
        storage = self._take(tier, n_bytes)
        out = torch.empty(0, dtype=src.dtype).set_(storage, 0, src.shape, src.stride())  # type: ignore[call-overload]
        self.live_bytes[tier] += n_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.live_bytes[tier])
        return out

    def _take(self, tier: Tier, n_bytes: int) -> torch.UntypedStorage:
        if tier is Tier.DISK:
            if self._disk is None:
                raise PlanError("the plan uses the disk tier but no disk budget was given; pass disk_budget= and disk_dir=")
            storage = self._disk.take(n_bytes)
        elif tier is Tier.PINNED and self.pin:
            storage = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
        else:
            storage = torch.UntypedStorage(n_bytes)
        weakref.finalize(storage, self._ended, tier, n_bytes)
        return storage

    def _ended(self, tier: Tier, n_bytes: int) -> None:
        self.live_bytes[tier] -= n_bytes

    def close(self) -> None:
        """Ends the disk file; its bytes stay readable through tensors that still map it."""
        if self._disk is not None:
            self._disk.close()


class DiskFile:
    """Blocks of one preallocated file, memory-mapped; the name is gone from the folder while the bytes are in use."""

    def __init__(self, folder: str | None, n_bytes: int) -> None:
        if folder is None:
            raise ValueError("disk_dir: a folder is needed with disk_budget")
        self.path = Path(folder) / f"fxoffload-{os.getpid()}-{id(self):x}.swap"
        try:
            with open(self.path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise PlanError(f"disk_dir {folder}: cannot preallocate {format_bytes(n_bytes)}: {error.strerror}") from None
        with open(self.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), n_bytes)
        self.n_bytes = n_bytes
        self._free: list[tuple[int, int]] = [(0, n_bytes)]

    def take(self, n_bytes: int) -> torch.UntypedStorage:
        """A Storage mapped onto a free block, given back when it dies. Raises PlanError when no block is large enough."""
        size = max(_ALIGNMENT, -(-n_bytes // _ALIGNMENT) * _ALIGNMENT)
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[i] = (offset + size, free - size)
                block = torch.frombuffer(self._map, dtype=torch.uint8, count=max(n_bytes, 1), offset=offset)
                storage = block.untyped_storage()
                weakref.finalize(storage, self._give_back, offset, size)
                return storage
        raise PlanError(f"the disk file of {format_bytes(self.n_bytes)} is full: {format_bytes(n_bytes)} more are needed")

    def _give_back(self, offset: int, size: int) -> None:
        blocks = sorted([*self._free, (offset, size)])
        merged: list[tuple[int, int]] = []
        for start, length in blocks:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            elif length:
                merged.append((start, length))
        self._free = merged

    def close(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)


def _extent_bytes(src: torch.Tensor) -> int:
    extent = 1
    for size, stride in zip(src.shape, src.stride()):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent * src.element_size()
