"""Host memory by tier: pinned slabs, pageable memory and one preallocated file, with counters that tests read."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..effects import Tier
from ..errors import PlanError
from ..layout import extent_bytes, padded, side_by_side
from ..sizes import format_bytes
from .arena import Arena, Run, runs_of
from .slabs import Slab, disk_slab, pinned_slab, plain_slab, slab_bytes, whole_pages

# Pinning is paid per call and per page: a slab is never smaller than this (64 MiB pin in about 20 ms).
SLAB_BYTES = 64 << 20
# Of what moves into pinned memory one slab after the other: bytes of a slab, and how many are being locked ahead of the one that is filled.
MOVED_BYTES, _AHEAD = 256 << 20, 4


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
        self._arenas: dict[int, Arena] = {}
        self._disk_dir, self._disk_limit = disk_dir, disk_bytes

    def empty_like(self, src: torch.Tensor, tier: Tier) -> torch.Tensor:
        """An uninitialized host tensor of `src`'s shape, stride and dtype in `tier`."""
        n_bytes = extent_bytes(src)
        if self._has_slabs(tier):
            slab, offset = self._reserved(tier, n_bytes)
            storage = slab.bytes(offset, n_bytes).untyped_storage()
            slab.return_after([storage], offset, n_bytes)
        else:
            storage = torch.UntypedStorage(n_bytes)
        return self._given_out(storage, src, tier, n_bytes)

    def empty_together(self, src: Sequence[torch.Tensor], tier: Tier) -> list[torch.Tensor]:
        """Uninitialized host tensors like those of `src` in `tier`, each with a Storage of its own, side by side in one arena."""
        sizes = [extent_bytes(one) for one in src]
        offsets, n_bytes = side_by_side(sizes)
        slab, start = self._reserved(tier, n_bytes) if self._has_slabs(tier) else (plain_slab(n_bytes), 0)
        storages = [slab.bytes(start + offset, size).untyped_storage() for offset, size in zip(offsets, sizes)]
        arena = Arena(slab, start, n_bytes, slab.address + start)
        self._arenas[arena.address] = arena
        slab.return_after(storages, start, n_bytes, then=lambda: self._arenas.pop(arena.address, None))
        return [self._given_out(storage, one, tier, padded(size)) for storage, one, size in zip(storages, src, sizes)]

    def runs(self, src: Sequence[torch.Tensor]) -> tuple[int, list[Run]]:
        """The bytes of a bucket of `src`, and the runs of it that one copy each can move."""
        return runs_of(src, self._arenas.values())

    def owns(self, tensor: torch.Tensor) -> bool:
        """True when the tensor's bytes were given out here."""
        return tensor.untyped_storage() in self._given

    def pinned_ahead(self, src: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """An uninitialized pinned tensor like each of `src`, in order, slab by slab, while threads lock the next slabs.

        Who drops what he has moved before he asks for more has no more than a few slabs of it twice.
        """
        if not self.pin:
            yield from (self.empty_like(one, Tier.PINNED) for one in src)
            return
        groups = _in_slabs(src)
        with _locking(groups) as slabs:
            for group, slab in zip(groups, slabs, strict=True):
                self._pinned.append(slab.result())
                yield from (self.empty_like(one, Tier.PINNED) for one in group)

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
        self._arenas.clear()

    def _has_slabs(self, tier: Tier) -> bool:
        return tier is Tier.DISK or (tier is Tier.PINNED and self.pin)

    def _given_out(self, storage: torch.UntypedStorage, src: torch.Tensor, tier: Tier, n_bytes: int) -> torch.Tensor:
        """A tensor like `src` over the storage, which counts as `n_bytes` for as long as it lives."""
        weakref.finalize(storage, self._ended, tier, n_bytes).atexit = False
        self._given.add(storage)
        self.live_bytes[tier] += n_bytes
        self.peak_bytes[tier] = max(self.peak_bytes[tier], self.live_bytes[tier])
        return torch.empty(0, dtype=src.dtype).set_(storage, 0, src.shape, src.stride())  # type: ignore[call-overload]

    def _reserved(self, tier: Tier, n_bytes: int) -> tuple[Slab, int]:
        """A slab of the tier, and where in it so many bytes are free no longer."""
        slabs = self._disk if tier is Tier.DISK else self._pinned
        for slab in slabs:
            offset = slab.reserve(n_bytes)
            if offset is not None:
                return slab, offset
        self._grow(tier, n_bytes)
        offset = slabs[-1].reserve(n_bytes)
        assert offset is not None
        return slabs[-1], offset

    def _grow(self, tier: Tier, n_bytes: int) -> None:
        if tier is Tier.PINNED:
            # A thread whose work is being recorded may lock no pages.
            with _threads(1) as thread:
                self._pinned.append(thread.submit(pinned_slab, max(SLAB_BYTES, n_bytes)).result())
            return
        # What is reserved has room for everything planned, but holes between what lives may all be too small.
        held = sum(slab.n_bytes for slab in self._disk)
        if held + whole_pages(n_bytes) > whole_pages(self._disk_limit):
            raise PlanError(f"disk_budget of {format_bytes(self._disk_limit)} is used up: {format_bytes(n_bytes)} more are needed")
        self.reserve_disk(held + n_bytes)

    def _ended(self, tier: Tier, n_bytes: int) -> None:
        self.live_bytes[tier] -= n_bytes


def _in_slabs(src: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in groups of MOVED_BYTES or more, as far as they go."""
    groups: list[list[torch.Tensor]] = []
    n_bytes = MOVED_BYTES
    for one in src:
        if n_bytes >= MOVED_BYTES:
            groups.append([])
            n_bytes = 0
        groups[-1].append(one)
        n_bytes += slab_bytes(one)
    return groups


def _threads(n: int) -> ThreadPoolExecutor:
    """Threads that lock pages, on the device of this one."""
    return ThreadPoolExecutor(n, "fxoffload-pin", torch.cuda.set_device, (torch.cuda.current_device(),))


@contextlib.contextmanager
def _locking(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[Iterator[Future[Slab]]]:
    """A slab for each group, the next ones being locked by threads; those that nobody took are given back."""
    sizes = iter([sum(map(slab_bytes, group)) for group in groups])
    begun: deque[Future[Slab]] = deque()
    with _threads(_AHEAD) as threads:

        def begin() -> None:
            size = next(sizes, None)
            if size is not None:
                begun.append(threads.submit(pinned_slab, size))

        def taken() -> Iterator[Future[Slab]]:
            for _ in range(_AHEAD):
                begin()
            while begun:
                yield begun.popleft()
                begin()

        try:
            yield taken()
        finally:
            for slab in begun:
                if not slab.cancel() and slab.exception() is None:
                    slab.result().close()
