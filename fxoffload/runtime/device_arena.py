"""The device's arena: one allocation in which a lowered graph's values lie at the offsets, or in the pages, it says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, cast

import torch

from ..machine import Machine
from ..pages import Place
from .cuda_pages import CudaPages, page_bytes_of
from .room import Room

log = logging.getLogger("fxoffload")

# Behind so many bytes from an arena's first address its pages have their other addresses.
_WINDOW_BYTES = 1 << 40


class Mapped(Protocol):
    """Memory with several addresses, counted and limited like any other of the device: at `address`, and from `window_bytes` behind it each
    alias, the pieces that it says side by side; `n_bytes` addresses in all."""

    address: int
    n_bytes: int

    def close(self) -> None: ...


def for_device(machine: Machine, device: torch.device) -> Machine:
    """The machine; without `page_bytes`, and with a line in the log, where the device that is there cannot map such pages."""
    wanted = machine.page_bytes
    if wanted is None or hasattr(torch.get_device_module(device), "map_pages"):
        return machine
    smallest = page_bytes_of(device)
    if smallest is not None and wanted % smallest == 0:
        return machine
    if device.type != "cpu":  # whose memory has no arena
        log.warning("%s cannot map pages of %d bytes at several addresses: each value is planned to lie in one piece", device, wanted)
    return replace(machine, page_bytes=None)


def _nothing() -> None:
    """Nobody has the arena's addresses."""


def _inside(place: Place, n_bytes: int) -> Place:
    """The place; one that reaches beyond `n_bytes`, which no step reads or writes now, shows their first page, over and over, so that the
    addresses behind it stay what they are."""
    if all(offset + n <= n_bytes for offset, n in place):
        return place
    page = math.gcd(*(number for piece in place for number in piece))
    return ((0, page),) * (sum(n for _, n in place) // page)


def _map_pages(device: torch.device, n_bytes: int, aliases: Sequence[Place]) -> Mapped:
    module: Any = torch.get_device_module(device)
    if hasattr(module, "map_pages"):
        return cast(Mapped, module.map_pages(n_bytes, _WINDOW_BYTES, aliases))
    return CudaPages(device, n_bytes, _WINDOW_BYTES, aliases)


class DeviceArena:
    """Bytes that one step at a time has for itself, from its forward until nothing looks into them any more.

    It is allocated when it is first used, as large as the largest graph needs. A step beside which so much has no place has a smaller one,
    the next a larger one again. A value in several pieces has an address range of its own, in which they are side by side; its offset is
    behind all others. `moves`: called before what lies in the arena, or its address, is no more.
    """

    # Memory without an arena that something still looks into.
    _left: ClassVar[list[tuple[torch.UntypedStorage, Mapped]]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_bytes = 0
        self._storage: torch.UntypedStorage | None = None
        self._held_bytes = 0
        self._aliases: dict[Place, int] = {}
        self._mapped: Mapped | None = None
        self._n_mapped = 0
        self._stream: Any = None
        self._lasting: dict[tuple[object, ...], torch.Tensor] = {}
        self.moves: Callable[[], None] = _nothing

    @property
    def held_bytes(self) -> int:
        """Of the memory that it has now."""
        return self._held_bytes

    def reserve(self, n_bytes: int) -> None:
        """From its next use on the arena has at least `n_bytes`."""
        self.n_bytes = max(self.n_bytes, n_bytes)

    def offset_of(self, offset: int, pages: Place) -> int:
        """Where a value begins that lies at `offset`, or, if there are any, in these pages."""
        if not pages:
            return offset
        if pages not in self._aliases:
            self._aliases[pages] = _WINDOW_BYTES + sum(n_bytes for place in self._aliases for _, n_bytes in place)
        return self._aliases[pages]

    def take(self, room: Room | None = None) -> bool:
        """True when a step may begin to use the arena: nothing looks into it. It has what `room` says then, without one what the largest
        graph needs."""
        if self.is_used:
            return False
        if not self.suits(room):
            self._move(self.n_bytes if room is None else min(self.n_bytes, room.most_arena_bytes))
        self._follow()
        return True

    def suits(self, room: Room | None) -> bool:
        """Whether a step of that room can begin in the arena as it is."""
        if self._storage is None or self._n_mapped < len(self._aliases) or self.is_used:
            return False
        if room is None:
            return self._held_bytes >= self.n_bytes
        return room.arena_bytes <= self._held_bytes <= room.most_arena_bytes

    @property
    def is_used(self) -> bool:
        """Whether something looks into it."""
        return self._storage is not None and torch._C._storage_Use_Count(self._storage._cdata) > 1 + len(self._lasting)

    def _move(self, n_bytes: int) -> None:
        if self._storage is not None:
            self.moves()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._forget()
            if self.device.type == "cuda":  # what lies behind it would be in the way of a larger one
                torch.cuda.empty_cache()
        self._allocate(n_bytes)

    def holds(self, values: Sequence[object]) -> bool:
        """Whether one of the values lies in the arena."""
        begin, end = self.extent()
        return any(isinstance(v, torch.Tensor) and v.device == self.device and begin <= v.data_ptr() < end for v in values)

    def extent(self) -> tuple[int, int]:
        """The addresses of its first byte and of the one behind its last; (0, 0) before it is first used."""
        if self._storage is None:
            return 0, 0
        begin = self._storage.data_ptr()
        return begin, begin + self._storage.nbytes()

    def empty(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements that begins at `offset` bytes: what an out variant resizes to its result."""
        return self.strided(offset, (0,), (1,), dtype)

    def strided(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape and stride that begins at `offset` bytes. It is no view of another: its versions are its own."""
        out = torch.empty(0, dtype=dtype, device=self.device)
        out.set_(self._storage, offset // dtype.itemsize, shape, stride)  # type: ignore[arg-type]
        return out

    def lasting(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, made once for all steps. It does not tell that a step has the arena."""
        key = offset, tuple(shape), tuple(stride), dtype
        known = self._lasting.get(key)
        if known is None:
            known = self._lasting[key] = self.strided(*key)
        return known

    def release(self) -> None:
        """Gives the bytes back once nothing looks into them."""
        self._forget()
        self.n_bytes = 0

    def _allocate(self, n_bytes: int) -> None:
        if not self._aliases:
            self._storage = torch.empty(n_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        else:
            self._mapped = mapped = _map_pages(self.device, n_bytes, [_inside(place, n_bytes) for place in self._aliases])
            storage: Any = torch._C._construct_storage_from_data_pointer(mapped.address, self.device, mapped.n_bytes)
            self._storage = storage
        self._held_bytes, self._n_mapped = n_bytes, len(self._aliases)

    def _forget(self) -> None:
        self._lasting.clear()
        if self._storage is not None and self._mapped is not None:
            self._left.append((self._storage, self._mapped))
        self._storage, self._mapped = None, None
        self._held_bytes = self._n_mapped = 0
        self._close_left()

    @classmethod
    def _close_left(cls) -> None:
        """Unmaps what nothing looks into any more: such memory is not its Storages' own."""
        unused = [one for one in cls._left if torch._C._storage_Use_Count(one[0]._cdata) == 1]
        cls._left[:] = [one for one in cls._left if one not in unused]
        for _, mapped in unused:
            mapped.close()

    def _follow(self) -> None:
        """A step on another stream than the last one waits for it: it writes where the last one wrote."""
        if self.device.type == "cpu" or not hasattr(module := torch.get_device_module(self.device), "current_stream"):
            return
        stream = module.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
