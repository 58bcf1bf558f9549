"""What a scan loads again is kept instead, and what lookups read on the host, as far as memory is left: never slower, and with more memory
never less of it.

Every stretch of time between two stays of a value is an item. In one order, which no budget changes, each item's threshold is the
capacity from which on it and all items before it fit. By threshold, items are kept as long as what is kept fits. So what a
larger capacity keeps includes what a smaller one does, and what needs no more than a smaller capacity is what that capacity gives.
Dropping a copy delays nothing: channels keep their order, and a bucket starts where it did.
What came in a bucket cannot stay until its next use, because all of the bucket would; it can reside, in none. What is left of the bucket is taken to
need what all of it did, so the bytes of a scan are what it needs only where nothing leaves a bucket.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .liveness import Storage
from .overlap import Rates
from .spill import Bytes, Load, Scan, Schedule, Spill, Stay

# Events by number, from one up to, not including, another.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Item:
    """Keeping `storage` on the device during the `spans`, which lie apart, saves `loads` and `spills`, `seconds` of the channels, or of lookups
    that read it on the host.

    `resides`: with the `n_before` other items of this storage it is there for the whole step, so no copy of it is left.
    """

    storage: Storage
    spans: tuple[Span, ...]
    loads: tuple[Load, ...]
    spills: tuple[Spill, ...]
    seconds: float
    resides: bool = False
    n_before: int = 0

    def key(self, n_events: int) -> tuple[float, int, str]:
        """Most seconds per byte first, then the shortest time on the device; residence after what it builds on."""
        during = n_events if self.resides else sum(end - first for first, end in self.spans)
        return (-self.seconds / max(self.storage.n_bytes, 1), during, self.storage.name)

    def most_bytes(self, used: Bytes) -> int:
        """The most that is `used` at an event of its spans."""
        return max([0, *[int(np.maximum.reduce(used[first:end])) for first, end in self.spans]])

    def keep(self, used: Bytes) -> None:
        """Adds its bytes to what is `used`."""
        for first, end in self.spans:
            used[first:end] += self.storage.n_bytes


@dataclass(frozen=True, slots=True)
class Filled:
    """A scan with items kept, the same one where there are none. `resident`: names of inputs that need no copy any more."""

    found: Scan
    resident: frozenset[str]
    used_bytes: int


def filled(schedule: Schedule, found: Scan, used: Bytes, rates: Rates, capacity_bytes: int, most_bytes: int,
           may_reside: frozenset[str] = frozenset(), must_leave: frozenset[str] = frozenset(), from_buckets: bool = True) -> Filled:
    """`found` with what fits `capacity_bytes`, beside the fixed inputs, of what would fit `most_bytes`, the largest capacity it is asked for.

    `used`: the `used_bytes` of `found`. `may_reside`: names of inputs that do not reside and may; `must_leave`: of values that are to be swapped.
    `from_buckets`: whether something may leave a bucket.
    """
    if (table := schedule.table) is not None:
        kept, resident, taken_bytes = table.filled(
            found.evaluated(table), used, rates, capacity_bytes, most_bytes, may_reside, must_leave, list(_tables(schedule, rates, may_reside)), from_buckets)
        return Filled(found if kept is None else Scan(evaluated=kept, numbers=found), resident, taken_bytes)
    with_all, used, n_events = used.copy(), used.copy(), len(schedule.events)
    fitting: list[tuple[int, Item]] = []
    thresholds: dict[Storage, list[int]] = defaultdict(list)
    for item in sorted(_items(schedule, found, rates, may_reside, must_leave, from_buckets), key=lambda one: one.key(n_events)):
        reached = thresholds[item.storage]
        room_for = max([item.most_bytes(with_all) + item.storage.n_bytes, *(reached if item.resides else ())])
        if room_for > most_bytes or (item.resides and len(reached) < item.n_before):
            continue
        reached.append(room_for)
        item.keep(with_all)
        fitting.append((room_for, item))
    taken: list[Item] = []
    for _, item in sorted(fitting, key=operator.itemgetter(0)):
        if item.most_bytes(used) + item.storage.n_bytes > capacity_bytes:
            break
        item.keep(used)
        taken.append(item)
    resident = frozenset(item.storage.name for item in taken if item.resides)
    return Filled(_without(found, taken) if taken else found, resident, int(used.max(initial=0)))


def _items(schedule: Schedule, found: Scan, rates: Rates, may_reside: frozenset[str], must_leave: frozenset[str], from_buckets: bool) -> Iterator[Item]:
    position, n_events = schedule.position, len(schedule.events)
    there = _there(found, position)
    loads: dict[Storage, list[Load]] = {}
    for load in found.loads:
        loads.setdefault(load.storage, []).append(load)
    spills = {spill.storage: spill for spill in found.spills}
    for storage, copies in loads.items():
        if storage.name in must_leave:
            continue
        if storage.is_input:
            yield from _inputs(storage, copies, there[storage], position, n_events, rates, storage.name in may_reside, from_buckets)
        elif len(copies) == 1:
            spans = _before(there[storage], position[copies[0].start])
            yield Item(storage, spans, tuple(copies), (spills[storage],), rates.load_s(storage) + rates.spill_s(storage))
    for storage, saved_s in _tables(schedule, rates, may_reside):
        yield Item(storage, ((0, n_events),), (), (), saved_s, resides=True)


def _tables(schedule: Schedule, rates: Rates, may_reside: frozenset[str]) -> Iterator[tuple[Storage, float]]:
    """Tables that lookups read on the host and that may reside, with the seconds of lookups that saves."""
    for name, reads in rates.looked_up.items():
        if name in may_reside:
            yield schedule.inputs[name], sum(rates.event_s[at] - seconds for at, seconds in reads)


def _inputs(storage: Storage, copies: list[Load], there: list[Span], position: dict[int, int], n_events: int, rates: Rates,
            may_reside: bool, from_buckets: bool) -> Iterator[Item]:
    """Each return of an input, and then its first copy, without which it resides; all at once where some come in buckets."""
    load_s, spans = rates.load_s(storage), list(there)
    first, *others = copies = sorted(copies, key=lambda one: one.before)
    if any(copy.bucket is not None for copy in (copies[:-1] if from_buckets else copies)):
        if may_reside and from_buckets:
            yield Item(storage, _beside(spans, n_events), tuple(copies), (), load_s * len(copies), resides=True)
        return
    for copy in others:
        ahead = _before(there, position[copy.start])
        spans += ahead
        yield Item(storage, ahead, (copy,), (), load_s)
    if may_reside:
        yield Item(storage, _beside(spans, n_events), (first,), (), load_s, resides=True, n_before=len(others))


def _there(found: Scan, position: dict[int, int]) -> dict[Storage, list[Span]]:
    """Of every storage that is loaded, the events at which it, or its copy under way, takes room."""
    there: dict[Storage, list[Span]] = {load.storage: [] for load in found.loads}
    for stay in found.stays:
        if stay.storage in there:
            there[stay.storage].append((stay.first, stay.last + 1))
    for load in found.loads:
        there[load.storage].append((position[load.start], position[load.before]))
    return there


def _before(there: list[Span], end: int) -> tuple[Span, ...]:
    """The events before number `end` back to the last at which the storage is there."""
    last = max((min(until, end) for first, until in there if first < min(until, end)), default=0)
    return ((last, end),) if last < end else ()


def _beside(spans: list[Span], n_events: int) -> tuple[Span, ...]:
    """The events in none of the spans."""
    found, at = [], 0
    for first, end in sorted(spans):
        if first > at:
            found.append((at, first))
        at = max(at, end)
    return (*found, (at, n_events)) if at < n_events else tuple(found)


def _without(found: Scan, items: list[Item]) -> Scan:
    """The scan without the copies that the items save; what was apart is one stay."""
    loads = {load for item in items for load in item.loads}
    spills = {spill for item in items for spill in item.spills}
    resident = {item.storage for item in items if item.resides}
    joined = {(item.storage, load.before) for item in items for load in item.loads}
    return found.having(
        loads=[load for load in found.loads if load not in loads], spills=[spill for spill in found.spills if spill not in spills],
        stays=[stay for stay in _joined(found, joined) if stay.storage not in resident])


def _joined(found: Scan, joined: set[tuple[Storage, int]]) -> Iterator[Stay]:
    """The stays, each merged into the one before it where the copy between them is gone."""
    n_loads: dict[Storage, list[int]] = {storage: [] for storage, _ in joined}
    for load in found.loads:
        if load.storage in n_loads:
            n_loads[load.storage].append(load.before)
    stays: dict[Storage, list[Stay]] = {storage: [] for storage in n_loads}
    for stay in found.stays:
        if stay.storage in stays:
            stays[stay.storage].append(stay)
        else:
            yield stay
    for storage, parts in stays.items():
        befores = sorted(n_loads[storage])
        parts.sort(key=lambda one: one.first)
        # An input's first stay starts with its first copy; any other value's is where it was made.
        befores = befores[1:] if storage.is_input else befores
        merged = [parts[0]]
        for before, part in zip(befores, parts[1:], strict=True):
            if (storage, before) in joined:
                merged[-1] = Stay(storage, merged[-1].first, part.last)
            else:
                merged.append(part)
        yield from merged
