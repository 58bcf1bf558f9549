"""Host memory by tier: pinned slabs, pageable memory and one preallocated file, with counters that tests read."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from ..effects import Tier
from ..errors import PlanError
from ..sizes import format_bytes

# Blocks of a slab start at multiples of a page, so that no two blocks share one.
ALIGNMENT = mmap.PAGESIZE
# Pinning is paid per call and per page: a slab is never smaller than this (64 MiB pin in about 20 ms).
SLAB_BYTES = 64 << 20


class HostMemory:
    """Gives out host tensors per tier and counts their live bytes; a tensor's bytes end when its storage dies.

    `pin`: the pinned tier is page-locked for the device (CUDA); elsewhere it is ordinary memory. Raises PlanError when a tier cannot
    give what is asked, ValueError for a disk tier without a folder.
    """

    def __init__(self, pin: bool = False, disk_dir: str | None = None, disk_bytes: int = 0) -> None:
        if disk_bytes and disk_dir is None:
            raise ValueError("disk_dir: a folder is needed with disk_budget")
        self.pin = pin
        self.live_bytes: Counter[Tier] = Counter()
        self.peak_bytes: Counter[Tier] = Counter()
        self._pinned: list[Slab] = []
        self._given: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._disk: list[Slab] = []
        self._disk_dir, self._disk_limit = disk_dir, disk_bytes

    def empty_like(self, src: torch.Tensor, tier: Tier) -> torch.Tensor:
        """An uninitialized host tensor of `src`'s shape, stride and dtype in `tier`."""
        n_bytes = extent_bytes(src)
        storage = self._take(tier, n_bytes)
        weakref.finalize(storage, self._ended, tier, n_bytes).atexit = False
        self._given.add(storage)
        self.live_bytes[tier] += n_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.live_bytes[tier])
        return torch.empty(0, dtype=src.dtype).set_(storage, 0, src.shape, src.stride())  # type: ignore[call-overload]

    def owns(self, tensor: torch.Tensor) -> bool:
        """True when the tensor's bytes were given out here."""
        return tensor.untyped_storage() in self._given

    def reserve_pinned(self, n_bytes: int) -> None:
        """Page-locks one slab large enough for `n_bytes` at once."""
        if self.pin and n_bytes:
            self._pinned.append(pinned_slab(n_bytes))

    def reserve_disk(self, n_bytes: int) -> None:
        """Preallocates what the disk tier lacks of `n_bytes`. Raises PlanError when the folder cannot hold it."""
        missing = whole_pages(n_bytes) - sum(slab.n_bytes for slab in self._disk)
        if missing > 0:
            self._disk.append(disk_slab(self._disk_dir, missing))

    def close(self) -> None:
        """Gives back the files and the page locks; tensors that still live keep their bytes."""
        for slab in [*self._disk, *self._pinned]:
            slab.close()
        self._disk.clear()
        self._pinned.clear()

    def _take(self, tier: Tier, n_bytes: int) -> torch.UntypedStorage:
        if tier is Tier.DISK:
            return self._take_disk(n_bytes)
        if tier is Tier.PINNED and self.pin:
            return self._take_pinned(n_bytes)
        return torch.UntypedStorage(n_bytes)

    def _take_disk(self, n_bytes: int) -> torch.UntypedStorage:
        for slab in self._disk:
            storage = slab.take(n_bytes)
            if storage is not None:
                return storage
        # What is reserved has room for everything planned, but holes between what lives may all be too small.
        held = sum(slab.n_bytes for slab in self._disk)
        if held + whole_pages(n_bytes) > whole_pages(self._disk_limit):
            raise PlanError(f"disk_budget of {format_bytes(self._disk_limit)} is used up: {format_bytes(n_bytes)} more are needed")
        self.reserve_disk(held + n_bytes)
        storage = self._disk[-1].take(n_bytes)
        assert storage is not None
        return storage

    def _take_pinned(self, n_bytes: int) -> torch.UntypedStorage:
        for slab in self._pinned:
            storage = slab.take(n_bytes)
            if storage is not None:
                return storage
        self._pinned.append(pinned_slab(max(SLAB_BYTES, n_bytes)))
        storage = self._pinned[-1].take(n_bytes)
        assert storage is not None
        return storage

    def _ended(self, tier: Tier, n_bytes: int) -> None:
        self.live_bytes[tier] -= n_bytes


class Slab:
    """Blocks of one mapped region, first fit; a block returns when its storage dies."""

    def __init__(self, region: mmap.mmap, on_close: Callable[[], None]) -> None:
        self.n_bytes = len(region)
        # Also when a Session ends without close(): no file and no page lock outlives its slab.
        self._region, self._end = region, weakref.finalize(self, on_close)
        self._free: list[tuple[int, int]] = [(0, self.n_bytes)]

    def take(self, n_bytes: int) -> torch.UntypedStorage | None:
        """A Storage over a free block of `n_bytes`, None when no block is large enough."""
        size = whole_pages(max(n_bytes, 1))
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[i] = (offset + size, free - size)
                block = torch.frombuffer(self._region, dtype=torch.uint8, count=max(n_bytes, 1), offset=offset)
                storage = block.untyped_storage()
                weakref.finalize(storage, self._give_back, offset, size).atexit = False
                return storage
        return None

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
        raise PlanError(f"cannot pin {format_bytes(n_bytes)} of host memory: {error}. Pass pin_memory=False, or raise `ulimit -l`.")
    return Slab(region, lambda: runtime.cudaHostUnregister(address) and None)


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


def extent_bytes(src: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    extent = 1
    for size, stride in zip(src.shape, src.stride()):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent * src.element_size()


def slab_bytes(src: torch.Tensor) -> int:
    """Bytes that a block for `src` takes in a slab: whole pages."""
    return whole_pages(max(extent_bytes(src), 1))


def whole_pages(n_bytes: int) -> int:
    """Bytes that a block of `n_bytes` takes in a slab."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT
