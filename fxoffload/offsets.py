"""Memory planned by offsets: where in one arena each value lies, so that values which are there at the same time do not overlap."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Of the caching allocator, too: kernels choose their loads by the alignment of what they read.
ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Lifetime:
    """`n_bytes` that are there from the node index `begin` up to, but not including, `end`."""

    begin: int
    end: int
    n_bytes: int


def aligned(n_bytes: int) -> int:
    """`n_bytes` rounded up to the alignment of every offset."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def live_bytes(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes that are there at once: no arena can be smaller."""
    if not lifetimes:
        return 0
    begin, end, size = _columns(lifetimes)
    deltas = np.zeros(int(end.max()) + 1, dtype=np.int64)
    np.add.at(deltas, begin, size)
    np.add.at(deltas, end, -size)
    return int(deltas.cumsum().max())


def pack(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each lifetime, and the bytes of the arena that holds them all: the smallest arena found.

    First fit in several orders (greedy by size: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020), then
    the best orders are climbed: what reaches highest is placed earlier. The search ends early with an arena that
    leaves little more idle than is live at once. The last answers are remembered: a plan is lowered when it is chosen and when it is applied.
    """
    offsets, n_bytes = _packed(tuple(lifetimes))
    return list(offsets), n_bytes


@functools.lru_cache(maxsize=2)
def _packed(lifetimes: tuple[Lifetime, ...]) -> tuple[tuple[int, ...], int]:
    if not lifetimes:
        return (), 0
    begin, end, size = _columns(lifetimes)
    least = live_bytes(lifetimes)
    enough = least + least // _IDLE_PER
    found: list[_Packing] = []
    for key in _ORDERS:
        found.append(_first_fit(np.lexsort((begin, *key(begin, end, size))), begin, end, size))
        if found[-1].n_bytes <= enough:
            break
    found.sort(key=lambda packing: packing.n_bytes)
    for start in found[:_CLIMBS]:
        if found[0].n_bytes > enough:
            found.append(_climbed(start, enough, begin, end, size))
            found.sort(key=lambda packing: packing.n_bytes)
    return tuple(found[0].offsets.tolist()), found[0].n_bytes


@dataclass(frozen=True, slots=True)
class _Packing:
    """Lifetimes placed in an `order`: their offsets, and where the highest of them ends."""

    order: np.ndarray
    offsets: np.ndarray
    n_bytes: int


# One byte in so many may lie idle without a further try.
_IDLE_PER = 100
# Orders that are climbed, the tries of each, and of each try the random choice of what to go before; the same every time.
_CLIMBS = 2
_TRIES = 8
_CHOICES = 3


def _climbed(best: _Packing, enough: int, begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> _Packing:
    """The best packing after some tries, each of which places the highest lifetimes before some that they overlap."""
    chance = random.Random(0)
    now = best
    for _ in range(_TRIES):
        if best.n_bytes <= enough:
            break
        order = now.order.tolist()
        position = {one: i for i, one in enumerate(order)}
        for top in np.flatnonzero(now.offsets + size >= now.n_bytes - now.n_bytes // 1000).tolist():
            below = [one for one in np.flatnonzero((begin < end[top]) & (end > begin[top])).tolist() if position[one] < position[top]]
            if below:
                order.remove(top)
                order.insert(min(position[one] for one in chance.sample(below, min(len(below), _CHOICES))), top)
        found = _first_fit(np.array(order), begin, end, size)
        if found.n_bytes <= now.n_bytes:
            now = found
        if found.n_bytes < best.n_bytes:
            best = found
    return best


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def _columns(lifetimes: Sequence[Lifetime]) -> Columns:
    begin, end, size = np.array([(one.begin, one.end, aligned(one.n_bytes)) for one in lifetimes], dtype=np.int64).T
    return begin, end, size


# Keys to sort by, the last one first: largest first; largest power of two first, of equals the longest, or the earliest; largest area first.
_ORDERS: tuple[Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, ...]], ...] = (
    lambda begin, end, size: (begin - end, -size),
    lambda begin, end, size: (-size, begin - end, -np.floor(np.log2(size))),
    lambda begin, end, size: (-np.floor(np.log2(size)),),
    lambda begin, end, size: (-size, (begin - end) * size),
)


def _first_fit(order: np.ndarray, begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> _Packing:
    """Each lifetime in turn at the lowest offset where it overlaps none that was placed before it."""
    begin, end, size = begin[order], end[order], size[order]
    starts, ends = np.zeros_like(size), np.zeros_like(size)
    for i in range(len(order)):
        beside = np.flatnonzero((begin[:i] < end[i]) & (end[:i] > begin[i]))
        start = _lowest(starts[beside], ends[beside], int(size[i]))
        starts[i], ends[i] = start, start + size[i]
    offsets = np.empty_like(starts)
    offsets[order] = starts
    return _Packing(order, offsets, int(ends.max()))


def _lowest(starts: np.ndarray, ends: np.ndarray, n_bytes: int) -> int:
    """The lowest offset with `n_bytes` free between the blocks."""
    if not len(starts):
        return 0
    by_start = np.argsort(starts)
    starts = starts[by_start]
    reached = np.maximum.accumulate(ends[by_start])
    if starts[0] >= n_bytes:
        return 0
    gaps = np.flatnonzero(starts[1:] - reached[:-1] >= n_bytes)
    return int(reached[gaps[0]] if len(gaps) else reached[-1])
