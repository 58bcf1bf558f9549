"""Memory of a CUDA device whose pages have several addresses, counted and limited by torch's caching allocator like any other.

The driver makes the pages and maps them; the allocator gets them as the one segment of a pool. It asks for a segment with its lock held, and
our answer is Python: a thread that frees a tensor holds the interpreter's lock and waits for the allocator's. So the answer is there before
the allocator is called, the call keeps the interpreter's lock (`torch.UntypedStorage(...)` does, `torch.empty` does not), and no other thread
gets it until the answer is given. Nothing of ours is called when a segment is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import PlanError
from ..torch_compat import has_pool_allocators, pool_allocator

Piece = tuple[int, int]
_Size, _Number = ctypes.c_size_t, ctypes.c_ulonglong

_PINNED, _ON_DEVICE, _READ_WRITE, _MINIMUM, _NO_MEMORY = 1, 1, 3, 0, 2  # cuda.h
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
# Of a segment of its own, whose bytes the allocator does not round up (kMinLargeAlloc and kLargeBuffer of CUDACachingAllocator are less).
_LEAST_BYTES = 20 << 20
# Longer than the allocator takes.
_LONG_S = 600.0


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp; what is behind `location` stays zero."""

    _fields_ = [
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def page_bytes_of(device: torch.device) -> int | None:
    """Bytes of the device's smallest page that can be mapped at several addresses; None where driver or torch cannot."""
    if device.type != "cuda" or torch.version.hip is not None or not has_pool_allocators():
        return None
    torch.cuda.init()
    found = ctypes.c_size_t()
    status = _driver().cuMemGetAllocationGranularity(ctypes.byref(found), ctypes.byref(_properties(_index_of(device))), _MINIMUM)
    return None if status else found.value


class CudaPages:
    """`n_bytes` of the device's memory at `address`, and from `window_bytes` behind it each alias: the pieces (offset, bytes) of that memory
    that it says, side by side. Its own `n_bytes` is of addresses, window and aliases.

    Raises torch.OutOfMemoryError where the device has less or the process may not have it, PlanError when the driver refuses.
    """

    def __init__(self, device: torch.device, n_bytes: int, window_bytes: int, aliases: Sequence[Sequence[Piece]]) -> None:
        if n_bytes > window_bytes:
            raise ValueError(f"{n_bytes} bytes are more than the window of {window_bytes}")
        self._device = device
        self._segment = segment = _Segment(device, window_bytes, aliases)
        self._pool: Any = None
        self._owner: torch.UntypedStorage | None = None
        try:
            self._own(max(-(-n_bytes // segment.page_bytes) * segment.page_bytes, _LEAST_BYTES))
            segment.fill(n_bytes)
        except BaseException:
            self.close()
            raise
        self.address, self.n_bytes = segment.address, segment.n_addresses

    def _own(self, n_bytes: int) -> None:
        """Lets the allocator count the segment before it has a page: at a limit it gives back what it only caches, here too."""
        self._pool = torch.cuda.MemPool(_answers().allocator)
        with torch.cuda.device(self._device), torch.cuda.use_mem_pool(self._pool, self._device):
            with _answers().given(self._segment.address, n_bytes):
                self._owner = torch.UntypedStorage(n_bytes, device=self._device)
        if self._owner.data_ptr() != self._segment.address:
            raise PlanError(f"{self._device}: torch did not take a pool's memory from the pool's allocator; use a machine without page_bytes")
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Gives the memory back when what was queued before has run."""
        torch.cuda.synchronize(self._device)
        self._segment.close()
        self._owner = None
        self._pool = None


class _Answers:
    """The allocator behind the pools: C functions that give torch the address that is there for it, and take it back."""

    def __init__(self) -> None:
        self._next: tuple[int, int] | None = None
        self._call = _ALLOCATE(self._allocate)  # as long as the allocator
        self.allocator = pool_allocator(_address_of(self._call), _address_of(ctypes.CDLL(None).getpid))  # a C function that does nothing

    @contextlib.contextmanager
    def given(self, address: int, n_bytes: int) -> Iterator[None]:
        """Where torch asks for so many bytes it gets this address. Other threads do not run meanwhile, unless something waits for them."""
        interval = sys.getswitchinterval()
        self._next = address, n_bytes
        sys.setswitchinterval(_LONG_S)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)
            self._next = None

    def _allocate(self, n_bytes: int, index: int, stream: int | None) -> int | None:
        if self._next is None or self._next[1] != n_bytes:
            return None
        return self._next[0]


class _Segment:
    """Addresses, and pages of the device that are mapped there."""

    def __init__(self, device: torch.device, window_bytes: int, aliases: Sequence[Sequence[Piece]]) -> None:
        self.page_bytes = page_bytes_of(device) or 0
        self._index = _index_of(device)
        self._window_bytes, self._pieces = window_bytes, [piece for alias in aliases for piece in alias]
        self._pages: list[ctypes.c_ulonglong] = []
        self._mapped: list[int] = []
        self.n_addresses = -(-(window_bytes + sum(n for _, n in self._pieces)) // self.page_bytes) * self.page_bytes
        address = _Number()
        _ask("cuMemAddressReserve", ctypes.byref(address), _Size(self.n_addresses), _Size(0), _Number(0), _Number(0))
        self.address = address.value

    def fill(self, n_bytes: int) -> None:
        """Makes the pages and maps them."""
        for _ in range(-(-n_bytes // self.page_bytes)):
            page = _Number()
            _ask("cuMemCreate", ctypes.byref(page), _Size(self.page_bytes), ctypes.byref(_properties(self._index)), _Number(0))
            self._pages.append(page)
        self._map(self.address, range(len(self._pages)))
        self._map(self.address + self._window_bytes, [
            k for at, n in self._pieces for k in range(at // self.page_bytes, (at + n) // self.page_bytes)])

    def _map(self, start: int, pages: Sequence[int]) -> None:
        """Maps the pages side by side from `start` on."""
        for address, page in zip(itertools.count(start, self.page_bytes), pages):
            _ask("cuMemMap", _Number(address), _Size(self.page_bytes), _Size(0), self._pages[page], _Number(0))
            self._mapped.append(address)
        if pages:
            access = _Access(_Location(_ON_DEVICE, self._index), _READ_WRITE)
            _ask("cuMemSetAccess", _Number(start), _Size(len(pages) * self.page_bytes), ctypes.byref(access), _Size(1))

    def close(self) -> None:
        """Unmaps and frees everything; at a process's end the driver may have done so itself."""
        driver = _driver()
        for address in self._mapped:
            driver.cuMemUnmap(_Number(address), _Size(self.page_bytes))
        for page in self._pages:
            driver.cuMemRelease(page)
        driver.cuMemAddressFree(_Number(self.address), _Size(self.n_addresses))
        self._mapped, self._pages = [], []


def _ask(call: str, *arguments: object) -> None:
    status = getattr(_driver(), call)(*arguments)
    if status == _NO_MEMORY:
        raise torch.OutOfMemoryError(f"{call}: the device has no memory left for pages of an arena")
    if status:
        raise PlanError(f"{call}: the driver's status is {status}; use a machine without page_bytes")


def _properties(index: int) -> _Properties:
    return _Properties(type=_PINNED, location=_Location(_ON_DEVICE, index))


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _answers() -> _Answers:
    """Made once: pools name it until the process ends."""
    return _Answers()
