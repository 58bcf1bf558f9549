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
    return int(_profile(*_columns(lifetimes)).max())


def pack(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each lifetime, and the bytes of the arena that holds them all: the smallest arena found.

    First fit in several orders, then the best orders are climbed: what reaches highest is placed earlier. Orders by size alone (Pisarchyk
    and Lee, Efficient Memory Management for Deep Neural Net Inference, 2020) leave up to a quarter idle where large values are there for a
    moment amid many that last: what is there when memory is fullest goes first (contention: Maas et al., TelaMalloc, ASPLOS 2023), and of
    it what lasts. The search ends early with an arena that leaves little more idle than is live at once. The last answers are remembered:
    a plan is lowered when it is chosen and when it is applied.
    """
    offsets, n_bytes = _packed(tuple(lifetimes))
    return list(offsets), n_bytes


@functools.lru_cache(maxsize=2)
def _packed(lifetimes: tuple[Lifetime, ...]) -> tuple[tuple[int, ...], int]:
    if not lifetimes:
        return (), 0
    begin, end, size = _columns(lifetimes)
    beside = _most_beside(begin, end, size)
    least = int(beside.max())
    enough = least + least // _IDLE_PER
    found: list[_Packing] = []  # the smallest, which will be climbed
    for n_levels, key in _ORDERS:
        levels = -(beside * n_levels // least)
        most = found[-1].n_bytes - 1 if len(found) == _CLIMBS else None
        packing = _first_fit(np.lexsort((begin, *key(begin, end, size), levels)), begin, end, size, most)
        if packing is not None:
            found = _smallest([*found, packing])
        if found[0].n_bytes <= enough:
            break
    for start in tuple(found):
        if found[0].n_bytes > enough:
            found = _smallest([*found, _climbed(start, enough, begin, end, size)])
    return tuple(found[0].offsets.tolist()), found[0].n_bytes


def _most_beside(begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Of each lifetime the most bytes that are there at once while it lasts, its own among them."""
    longest = [_profile(begin, end, size)]  # of as many nodes as the power of two says: the most from each node on
    for i in range(int((end - begin).max()).bit_length() - 1):
        longest.append(np.maximum(longest[-1][: -(1 << i)], longest[-1][1 << i :]))
    power = np.log2(end - begin).astype(np.int64)
    most = np.empty_like(size)
    for i, table in enumerate(longest):
        of = power == i
        most[of] = np.maximum(table[begin[of]], table[end[of] - (1 << i)])
    return most


def _profile(begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The bytes that are there at each node."""
    deltas = np.zeros(int(end.max()) + 1, dtype=np.int64)
    np.add.at(deltas, begin, size)
    np.add.at(deltas, end, -size)
    return deltas.cumsum()


@dataclass(frozen=True, slots=True)
class _Packing:
    """Lifetimes placed in an `order`: their offsets, and where the highest of them ends."""

    order: np.ndarray
    offsets: np.ndarray
    n_bytes: int


def _smallest(packings: list[_Packing]) -> list[_Packing]:
    """As many of them as are climbed, the smallest first, of equals the earlier."""
    return sorted(packings, key=lambda packing: packing.n_bytes)[:_CLIMBS]


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
        found = _first_fit(np.array(order), begin, end, size, now.n_bytes)
        if found is not None:
            now = found
        if now.n_bytes < best.n_bytes:
            best = now
    return best


Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


def _columns(lifetimes: Sequence[Lifetime]) -> Columns:
    begin, end, size = np.array([(one.begin, one.end, aligned(one.n_bytes)) for one in lifetimes], dtype=np.int64).T
    return begin, end, size


# Levels of what is there at most beside it, the highest first, and keys to sort each by, the last one first: largest power of two; latest
# end; longest; largest, of equals the longest; largest power of two, of equals the longest.
_ORDERS: tuple[tuple[int, Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, ...]]], ...] = (
    (1000, lambda begin, end, size: (-np.floor(np.log2(size)),)),
    (4, lambda begin, end, size: (-end,)),
    (8, lambda begin, end, size: (begin - end,)),
    (8, lambda begin, end, size: (-end,)),
    (1000, lambda begin, end, size: (begin - end, -size)),
    (1, lambda begin, end, size: (-np.floor(np.log2(size)),)),
    (1, lambda begin, end, size: (-size, begin - end, -np.floor(np.log2(size)))),
)


def _first_fit(order: np.ndarray, begin: np.ndarray, end: np.ndarray, size: np.ndarray, most_bytes: int | None = None) -> _Packing | None:
    """Each lifetime in turn at the lowest offset where it overlaps none that was placed before it; None as soon as one ends above
    `most_bytes`."""
    offsets = np.empty_like(size)
    begins, ends, lows, highs = placed = np.empty((4, len(order)), dtype=np.int64)  # sorted by `lows`
    for n, (i, first, last, n_bytes) in enumerate(zip(order.tolist(), begin[order].tolist(), end[order].tolist(), size[order].tolist())):
        beside = ((begins[:n] < last) & (ends[:n] > first)).nonzero()[0]
        low = _lowest(lows[beside], highs[beside], n_bytes)
        if most_bytes is not None and low + n_bytes > most_bytes:
            return None
        at = int(lows[:n].searchsorted(low))
        placed[:, at + 1 : n + 1] = placed[:, at:n]
        placed[:, at] = first, last, low, low + n_bytes
        offsets[i] = low
    return _Packing(order, offsets, int(highs.max()))


def _lowest(lows: np.ndarray, highs: np.ndarray, n_bytes: int) -> int:
    """The lowest offset with `n_bytes` free between blocks that are sorted by where they begin."""
    if not len(lows) or lows[0] >= n_bytes:
        return 0
    reached = np.maximum.accumulate(highs)
    free = lows[1:] - reached[:-1] >= n_bytes
    gap = int(free.argmax()) if len(free) else 0
    return int(reached[gap if len(free) and free[gap] else -1])
