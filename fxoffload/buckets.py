"""Which small copies to the device come as one, under the peak that is there without: one rule for lowered graphs and for scans.

Every copy costs an allocation, an event, a stream's wait and the host's time to issue it, and a bus reaches 97 % of its rate at 4 MiB
but 31 % at 64 KiB (machines/h200.json). So copies of parameters, each smaller than a limit, that follow each other on the channel
are grouped until a group has that many bytes.

A group's members are on one host tier, and start, end and are last read on one side of the border: the saved set stays what it is.
All of it is on the device from its first member's start to its last member's last use; where that is more than the peak, the
group ends. A later member overtakes the copies between its start and the first member's, larger ones or swapped values that
return; no such copy is held up by more than `_HELD_UP` of its own seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .effects import Tier
from .layout import padded
from .liveness import Storage
from .spill import Bytes, Load, Scan, Schedule, Stay

# Where the rate of pinned copies levels off: 54.9 of 55.3 GB/s (machines/h200.json).
GROUP_BYTES = 16 << 20
# A quarter of what overlap.py plans the seconds of every copy too long by.
_HELD_UP = 1 / 8
# The largest of some bytes: what `max` of an array calls, which takes half the time by itself for the few that a copy lasts.
_most = np.maximum.reduce


class Copy(NamedTuple):
    """A copy to the device of `n_bytes`, which count from place `start` up to, not including, place `end`.

    `kind`: what members of one group have in common, host tier and half of the step; None for what can be in no group.
    """

    start: int
    end: int
    n_bytes: int
    kind: tuple[Tier, bool] | None


def groups_of(copies: Iterable[Copy], alive: Bytes, limit_bytes: int) -> list[list[int]]:
    """The groups of two and more of `copies`, which are in the order of the channel, by their numbers.

    `alive`: bytes on the device at every place, each copy's own included. `limit_bytes`: a group's size, and what a copy in it is
    smaller than.
    """
    return _Search(_Room(alive), limit_bytes).run(copies).found


class _Search:
    """The groups `found` so far, the one that is open, and the `room` that they leave."""

    def __init__(self, room: _Room, limit_bytes: int) -> None:
        self.found: list[list[int]] = []
        self.room, self._limit_bytes = room, limit_bytes
        self._numbers: list[int] = []
        self._group: list[Copy] = []
        self._group_bytes = 0
        # What may still join: it would go ahead of the copies that the group has passed.
        self._ahead_bytes = 0.0

    def run(self, copies: Iterable[Copy]) -> _Search:
        """Itself, once it has been through all copies."""
        for number, copy in enumerate(copies):
            self.take(number, copy)
        self.end()
        return self

    def take(self, number: int, copy: Copy) -> None:
        """The next copy on the channel joins the group, is passed by it, or begins another."""
        if copy.kind is None or copy.n_bytes >= self._limit_bytes:
            self._ahead_bytes = min(self._ahead_bytes, copy.n_bytes * _HELD_UP)
            return
        if not self._has_place(copy):
            self.end()
            self._ahead_bytes = float("inf")
        self._numbers.append(number)
        self._group.append(copy)
        self.room.join(copy)
        self._group_bytes += copy.n_bytes
        self._ahead_bytes -= copy.n_bytes

    def end(self) -> None:
        """The open group is one of those found, if it is more than one copy."""
        if len(self._group) > 1:
            self.found.append(self._numbers)
            self.room.take()
        else:
            self.room.part(self._group)
        self.room.open()
        self._numbers, self._group, self._group_bytes = [], [], 0

    def _has_place(self, copy: Copy) -> bool:
        if not self._group or self._group[0].kind != copy.kind:
            return False
        fits = self._group_bytes < self._limit_bytes and copy.n_bytes <= self._ahead_bytes
        return fits and self.room.holds(copy)


class _Room:
    """Device bytes `alive` at every place, and whether a group as one Storage stays below their peak. Of the open group's members
    none counts by itself: as a group they take `_group_bytes` from `_first` up to `_end`."""

    def __init__(self, alive: Bytes) -> None:
        self.alive = alive.copy()
        self._peak_bytes = int(alive.max(initial=0))
        self.open()

    def open(self) -> None:
        """Another group is open, without members."""
        self._first, self._end, self._group_bytes = len(self.alive), 0, 0

    def holds(self, copy: Copy) -> bool:
        """True when the open group and this copy fit at every place from their first start to their last end."""
        first, end = min(self._first, copy.start), max(self._end, copy.end)
        room = self._peak_bytes - self._group_bytes - padded(copy.n_bytes)
        during, ahead, behind = self.alive[copy.start : copy.end], self.alive[first : copy.start], self.alive[copy.end : end]
        if during.size and _most(during) - copy.n_bytes > room:
            return False
        return room >= 0 and not (ahead.size and _most(ahead) > room) and not (behind.size and _most(behind) > room)

    def join(self, copy: Copy) -> None:
        """The copy is a member of the open group."""
        self.alive[copy.start : copy.end] -= copy.n_bytes
        self._first, self._end = min(self._first, copy.start), max(self._end, copy.end)
        self._group_bytes += padded(copy.n_bytes)

    def take(self) -> None:
        """The group's bytes are there from now on."""
        self.alive[self._first : self._end] += self._group_bytes

    def part(self, members: Sequence[Copy]) -> None:
        """The members count by themselves again."""
        for copy in members:
            self.alive[copy.start : copy.end] += copy.n_bytes


def bucketed(schedule: Schedule, found: Scan, used: Bytes, limit_bytes: int = GROUP_BYTES) -> tuple[Scan, Bytes]:
    """The scan with its small copies of parameters in buckets, those of one `bucket` start with the first of them, and its `used_bytes`.

    `used`: bytes taken at each event, `overlap.used_bytes` of `found`.
    """
    if (table := schedule.table) is not None:
        grouped, taken = table.bucketed(found.evaluated(table), used, limit_bytes, _HELD_UP)
        return Scan(evaluated=grouped, numbers=found), taken
    position, border = schedule.position, schedule.live.border
    ends = {load: stay.last for load, stay in _with_stays(schedule, found)}
    loads = sorted(found.loads, key=lambda load: (load.start, load.before))
    copies = []
    for load in loads:
        last, in_backward, kind = ends.get(load), load.start > border, None
        if last is not None and in_backward == (load.before > border) == (schedule.events[last].index > border) and load.storage.n_bytes:
            kind = load.storage.tier, in_backward
        copies.append(Copy(position[load.start], (last or 0) + 1, load.storage.n_bytes, kind))
    merged: dict[Load, Load] = {}
    search = _Search(_Room(used), limit_bytes).run(copies)
    for bucket, group in enumerate(search.found):
        start = loads[group[0]].start
        merged.update((loads[i], Load(loads[i].storage, loads[i].before, start, bucket)) for i in group)
    return found.having(loads=[merged.get(load, load) for load in found.loads]), search.room.alive


def transfers_of(loads: Iterable[Load]) -> list[list[Load]]:
    """The loads in their order, those of one bucket together where the first of them is."""
    found: list[list[Load]] = []
    buckets: dict[int, list[Load]] = {}
    for load in loads:
        if load.bucket is None:
            found.append([load])
        elif load.bucket in buckets:
            buckets[load.bucket].append(load)
        else:
            found.append(buckets.setdefault(load.bucket, [load]))
    return found


def held_bytes(schedule: Schedule, found: Scan) -> Bytes:
    """Bytes by which the scan's buckets take more at each event than their members would one by one."""
    held = np.zeros(len(schedule.events), dtype=np.int64)
    buckets = [members for members in transfers_of(found.loads) if len(members) > 1]
    if not buckets:
        return held
    position = schedule.position
    ends = {load: stay.last + 1 for load, stay in _with_stays(schedule, found)}
    for members in buckets:
        start = position[members[0].start]
        held[start : max(ends[load] for load in members)] += sum(padded(load.storage.n_bytes) for load in members)
        for load in members:
            held[start : ends[load]] -= load.storage.n_bytes
    return held


def _with_stays(schedule: Schedule, found: Scan) -> Iterator[tuple[Load, Stay]]:
    """Each load of an input that may be in a bucket, with the stay that it begins."""
    loads: dict[Storage, list[Load]] = {}
    for load in found.loads:
        if load.storage in schedule.mergeable:
            loads.setdefault(load.storage, []).append(load)
    stays: dict[Storage, list[Stay]] = {storage: [] for storage in loads}
    for stay in found.stays:
        if stay.storage in loads:
            stays[stay.storage].append(stay)
    for storage, copies in loads.items():
        yield from zip(sorted(copies, key=lambda load: load.before), sorted(stays[storage], key=lambda stay: stay.first), strict=True)
