"""Places in pages: where a device can map the same pages of memory at several addresses, a value needs no contiguous place.

Lifetimes are intervals of one order, so that pages free at a value's beginning are free until its end unless a later one takes them:
whoever takes any free pages, in the order of beginnings, never needs more of them than are full at the worst moment. Nothing is packed, and
no plan fails for what lies idle between values. A value lies in one run of neighbouring pages where there is one that is free, the smallest
that does; else in several, and gets an address range of its own, in which they are neighbours (`runtime/device_arena.py`). What is small
beside a page lies packed at offsets below all pages.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Sequence

from .offsets import Lifetime, live_bytes, pack

# The bytes of an arena that a value lies in, in its own order: the offset of each run, and its bytes.
Run = tuple[int, int]
Place = tuple[Run, ...]

# A value lies in pages where the last of them leaves no more than one byte in so many of its own idle.
_IDLE_PER = 8


def place(lifetimes: Sequence[Lifetime], page_bytes: int) -> tuple[list[Place], int]:
    """A Place for each lifetime, and the bytes of the arena that holds them all; those in pages are whole pages."""
    in_pages = [i for i, one in enumerate(lifetimes) if -one.n_bytes % page_bytes * _IDLE_PER <= one.n_bytes]
    small = sorted(set(range(len(lifetimes))) - set(in_pages))
    offsets, packed_bytes = pack([lifetimes[i] for i in small])
    first = -(-packed_bytes // page_bytes)
    whole = [Lifetime(lifetimes[i].begin, lifetimes[i].end, -(-lifetimes[i].n_bytes // page_bytes) * page_bytes) for i in in_pages]
    n_pages = live_bytes(whole) // page_bytes
    found: list[Place] = [()] * len(lifetimes)
    for i, offset in zip(small, offsets, strict=True):
        found[i] = ((offset, lifetimes[i].n_bytes),)
    free = _Free(first, n_pages)
    given: list[tuple[int, int]] = []  # the end of each lifetime in pages, and its number
    for i, one in sorted(zip(in_pages, whole, strict=True), key=lambda each: (each[1].begin, -each[1].n_bytes)):
        while given and given[0][0] <= one.begin:
            free.give_back(found[heapq.heappop(given)[1]], page_bytes)
        found[i] = free.take(one.n_bytes // page_bytes, page_bytes)
        heapq.heappush(given, (one.end, i))
    return found, (first + n_pages) * page_bytes


class _Free:
    """The free runs of an arena's pages, by their first page."""

    def __init__(self, first: int, n_pages: int) -> None:
        self._runs = [(first, n_pages)] if n_pages else []

    def take(self, n_pages: int, page_bytes: int) -> Place:
        """So many pages, as a Place."""
        fitting = [(n, first) for first, n in self._runs if n >= n_pages]
        chosen = [min(fitting)[::-1]] if fitting else sorted(self._runs, key=lambda run: -run[1])
        taken: list[Run] = []
        for first, n in chosen:
            used = min(n, n_pages)
            at = bisect(self._runs, (first, 0))
            self._runs[at : at + 1] = [(first + used, n - used)] if n > used else []
            taken.append((first * page_bytes, used * page_bytes))
            n_pages -= used
            if not n_pages:
                break
        assert not n_pages, "more pages are taken than are there at once"
        return tuple(sorted(taken))

    def give_back(self, place: Place, page_bytes: int) -> None:
        """Makes a Place's pages free."""
        for offset, n_bytes in place:
            first, n = offset // page_bytes, n_bytes // page_bytes
            at = bisect(self._runs, (first, 0))
            if at < len(self._runs) and self._runs[at][0] == first + n:
                n += self._runs.pop(at)[1]
            if at and sum(self._runs[at - 1]) == first:
                at -= 1
                before = self._runs.pop(at)
                first, n = before[0], before[1] + n
            self._runs.insert(at, (first, n))
