"""Host tensors that lie side by side, and the runs of bytes that one copy each moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..layout import bytes_of, extent_bytes, side_by_side
from .slabs import Slab


@dataclass(frozen=True, slots=True)
class Arena:
    """A block of a slab whose tensors lie as the parts of a bucket do: `n_bytes` at `offset` of `slab`, first byte at `address`."""

    slab: Slab
    offset: int
    n_bytes: int
    address: int

    def holds(self, address: int, n_bytes: int) -> bool:
        """True when all of so many bytes from `address` on are in the arena."""
        return self.address <= address and address + n_bytes <= self.address + self.n_bytes

    def bytes(self, address: int, n_bytes: int) -> torch.Tensor:
        """So many bytes from `address` on."""
        return self.slab.bytes(self.offset + address - self.address, n_bytes)


@dataclass(slots=True)
class Run:
    """Members of a bucket that follow each other there, from `offset` on, as they do in `arena`, from `address` on.

    One member alone, `first`, may lie anywhere: then `arena` is None.
    """

    offset: int
    n_bytes: int
    address: int
    first: torch.Tensor
    arena: Arena | None

    def takes(self, offset: int, n_bytes: int, address: int) -> bool:
        """True when a member at `offset` of the bucket belongs to the run, which then ends with it."""
        length = offset - self.offset + n_bytes
        if self.arena is None or address - self.address != offset - self.offset or not self.arena.holds(self.address, length):
            return False
        self.n_bytes = length
        return True

    def bytes(self) -> torch.Tensor:
        """What the one copy reads."""
        return bytes_of(self.first) if self.arena is None else self.arena.bytes(self.address, self.n_bytes)


def runs_of(sources: Sequence[torch.Tensor], arenas: Iterable[Arena]) -> tuple[int, list[Run]]:
    """The bytes of a bucket of `sources`, and its longest runs. Where a source lies is looked up each time: its owner may move it."""
    sizes = [extent_bytes(source) for source in sources]
    offsets, n_bytes = side_by_side(sizes)
    known, runs = tuple(arenas), list[Run]()
    for source, size, offset in zip(sources, sizes, offsets):
        address = source.data_ptr()
        if not (runs and runs[-1].takes(offset, size, address)):
            arena = next((a for a in known if a.holds(address, size)), None)
            runs.append(Run(offset, size, address, source, arena))
    return n_bytes, runs
