"""Mapped regions of host memory that give out pieces of themselves: page-locked, of a file, or plain."""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..errors import PlanError
from ..layout import extent_bytes
from ..sizes import format_bytes

# Blocks of a slab start at multiples of a page, so that no two blocks share one.
ALIGNMENT = mmap.PAGESIZE


class Slab:
    """Blocks of one mapped region, first fit; a block returns when the storages in it die."""

    def __init__(self, region: mmap.mmap, on_close: Callable[[], None]) -> None:
        self.n_bytes = len(region)
        # Also when a Session ends without close(): no file and no page lock outlives its slab.
        self._region, self._end = region, weakref.finalize(self, on_close)
        self._free: list[tuple[int, int]] = [(0, self.n_bytes)]

    @property
    def address(self) -> int:
        """Where the region begins."""
        return torch.frombuffer(self._region, dtype=torch.uint8, count=1).data_ptr()

    def reserve(self, n_bytes: int) -> int | None:
        """The offset of a block of `n_bytes` that is free no longer; None when no block is large enough."""
        size = whole_pages(max(n_bytes, 1))
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[i] = (offset + size, free - size)
                return offset
        return None

    def bytes(self, offset: int, n_bytes: int) -> torch.Tensor:
        """The region's bytes from `offset` on, with a Storage of their own."""
        return torch.frombuffer(self._region, dtype=torch.uint8, count=max(n_bytes, 1), offset=offset)

    def return_after(
        self, storages: Sequence[torch.UntypedStorage], offset: int, n_bytes: int, then: Callable[[], object] = lambda: None
    ) -> None:
        """The block of `n_bytes` at `offset` is free again when the last of the storages is gone; `then` is called after that."""
        left = itertools.count(len(storages) - 1, -1)

        def ended() -> None:
            if next(left) == 0:
                self._give_back(offset, whole_pages(max(n_bytes, 1)))
                then()

        for storage in storages:
            weakref.finalize(storage, ended).atexit = False

    def close(self) -> None:
        """Ends what the region was registered with."""
        self._end()

    def _give_back(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            elif length:
                merged.append((start, length))
        self._free = merged


def pinned_slab(n_bytes: int) -> Slab:
    """Page-locked memory of exactly `n_bytes` (whole pages; the caching host allocator would round up to a power of two).

    Raises PlanError when the system refuses, with its memlock limit.
    """
    region = mmap.mmap(-1, whole_pages(n_bytes))
    address = torch.frombuffer(region, dtype=torch.uint8, count=1).data_ptr()
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, len(region), 0)
    if int(error) != 0:
        raise PlanError(f"cannot pin {format_bytes(n_bytes)} of host memory (CUDA error {int(error)}). Pass pin_memory=False, or raise `ulimit -l`.")
    return Slab(region, lambda: runtime.cudaHostUnregister(address) and None)


def plain_slab(n_bytes: int) -> Slab:
    """Ordinary memory; it goes with the last tensor in it."""
    return Slab(mmap.mmap(-1, whole_pages(n_bytes)), lambda: None)


def disk_slab(folder: str | None, n_bytes: int) -> Slab:
    """A preallocated file of `n_bytes` in `folder`, mapped; it goes when the slab is closed. Raises PlanError when it cannot be made."""
    if folder is None:
        raise ValueError("disk_dir: a folder is needed with disk_budget")
    path = Path(folder) / f"fxoffload-{os.getpid()}-{os.urandom(4).hex()}.swap"
    try:
        region = _mapped_file(path, whole_pages(n_bytes))
    except OSError as error:
        raise PlanError(f"disk_dir {folder}: cannot preallocate {format_bytes(n_bytes)}: {error.strerror}") from None
    return Slab(region, lambda: path.unlink(missing_ok=True))


def _mapped_file(path: Path, n_bytes: int) -> mmap.mmap:
    with open(path, "w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, n_bytes)
            return mmap.mmap(file.fileno(), n_bytes)
        except OSError:
            path.unlink()
            raise


def slab_bytes(src: torch.Tensor) -> int:
    """Bytes that a block for `src` takes in a slab: whole pages."""
    return whole_pages(max(extent_bytes(src), 1))


def whole_pages(n_bytes: int) -> int:
    """Bytes that a block of `n_bytes` takes in a slab."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
