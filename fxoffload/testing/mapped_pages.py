"""Host memory whose pages have several addresses, for tests of memory planned in pages: what `torch.fxsim.map_pages` is made of."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000  # linux/mman.h


class MappedPages:
    """`n_bytes` of memory at `address`, and from `window_bytes` behind it on every alias, one behind the other: the pieces (offset, bytes) of
    the memory that it consists of."""

    def __init__(self, n_bytes: int, window_bytes: int, aliases: Sequence[Sequence[tuple[int, int]]]) -> None:
        if n_bytes > window_bytes:
            raise ValueError(f"{n_bytes} bytes are more than the window of {window_bytes}")
        self.n_bytes = window_bytes + sum(n for pieces in aliases for _, n in pieces)
        self.address = self._map(None, self.n_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1, 0)
        memory = os.memfd_create("fxsim")
        try:
            os.ftruncate(memory, n_bytes)
            at = self.address
            for start, pieces in ((at, [(0, n_bytes)]), (at + window_bytes, [piece for pieces in aliases for piece in pieces])):
                for offset, n in pieces:
                    self._map(start, n, _READ_WRITE, mmap.MAP_SHARED | _FIXED, memory, offset)
                    start += n
        finally:
            os.close(memory)

    def close(self) -> None:
        """Unmaps all addresses."""
        _libc.munmap(self.address, self.n_bytes)

    @staticmethod
    def _map(address: int | None, n_bytes: int, protection: int, flags: int, memory: int, offset: int) -> int:
        found = _libc.mmap(address, n_bytes, protection, flags, memory, offset)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap failed")
        return int(found)
