"""A Schedule as arrays of numbers: what the evaluator reads, and what bounds of its seconds are made of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from .liveness import Storage

if TYPE_CHECKING:
    from .spill import Ground, Schedule

Ints = np.ndarray[Any, np.dtype[np.int32]]
Longs = np.ndarray[Any, np.dtype[np.int64]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of numbers, end to end: those of row i are `of[at[i]:at[i + 1]]`."""

    at: Ints
    of: Ints

    @staticmethod
    def told(rows: Sequence[Sequence[Any]], number: Callable[[Any], int]) -> Rows:
        """The numbers of what is in each row."""
        at = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([len(row) for row in rows], out=at[1:])
        return Rows(at, np.fromiter(map(number, chain.from_iterable(rows)), dtype=np.int32, count=int(at[-1])))

    def row_of(self) -> Longs:
        """The row of each number."""
        return np.repeat(np.arange(len(self.at) - 1), np.diff(self.at))


@dataclass(frozen=True, slots=True)
class Numbers:
    """A Schedule with its least Ground. Events are told by their place in the list of events, Storages by theirs in the order of definition.

    `index`, `next_use`: node indices, the second beside `touches`; `uses`: events that read each Storage; `made_by`: the event that makes a Storage,
    -1 for inputs; `rank`: of its name among the names; `read_bytes`: of all that an event reads; `border`: node index of the Ground's, `graph_border` of
    the graph's; `before_border`, `border_event`: events.
    """

    storages: tuple[Storage, ...]
    border: int
    graph_border: int
    before_border: int
    border_event: int
    index: Longs
    own_bytes: Longs
    workspace_bytes: Longs
    read_bytes: Longs
    next_use: Longs
    n_bytes: Longs
    rank: Ints
    tier: Ints
    made_by: Ints
    is_input: Mask
    is_tangent: Mask
    returned: Mask
    mergeable: Mask
    makes: Rows
    reads: Rows
    touches: Rows
    leaves: Rows
    uses: Rows

    @staticmethod
    def of(schedule: Schedule, ground: Ground) -> Numbers:
        """Those of a Schedule that is made of a graph, with its least Ground."""
        live, events, position = schedule.live, schedule.events, schedule.position
        storages = tuple(live.first)
        number = {storage: i for i, storage in enumerate(storages)}
        rank = {name: i for i, name in enumerate(sorted({storage.name for storage in storages}))}
        tiers = {tier: i for i, tier in enumerate(dict.fromkeys(storage.tier for storage in storages))}
        border_event, border = (bisect_left(events, index, key=lambda event: event.index) for index in (live.border, ground.border))
        return Numbers(
            storages, ground.border, live.border, max(border - 1, 0), border_event, longs(event.index for event in events),
            longs(event.own_bytes for event in events), schedule.workspace, longs(sum(s.n_bytes for s in event.reads) for event in events),
            longs(next_use for touched in ground.touches for _, next_use in touched), longs(storage.n_bytes for storage in storages),
            ints(rank[s.name] for s in storages), ints(tiers[s.tier] for s in storages),
            ints(-1 if s.is_input else position.get(live.first[s], -1) for s in storages),
            mask(s.is_input for s in storages), mask(s.is_tangent for s in storages), mask(s in ground.returned for s in storages),
            mask(s in schedule.mergeable for s in storages),
            Rows.told([event.makes for event in events], number.__getitem__), Rows.told(ground.reads, number.__getitem__),
            Rows.told(ground.touches, lambda touch: number[touch[0]]), Rows.told(ground.leaves, number.__getitem__),
            Rows.told([ground.uses.get(storage, ()) for storage in storages], position.__getitem__))


def ints(numbers: Iterable[int]) -> Ints:
    """An array of 32 bits each."""
    return np.array(list(numbers), dtype=np.int32)


def longs(numbers: Iterable[int]) -> Longs:
    """An array of 64 bits each."""
    return np.array(list(numbers), dtype=np.int64)


def mask(flags: Iterable[bool]) -> Mask:
    """An array of ones and zeros."""
    return np.array(list(flags), dtype=np.uint8)
