"""A scan from a choice of what stays: the gaps between events that touch a value, and where it is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from .liveness import Storage
from .overlap import Rates, stayed_bytes
from .spill import Bytes, Ground, Load, Scan, Schedule, Spill, Stay


Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Gap:
    """`storage` is touched by events number `after` and `before` and by none between: there it stays or has left."""

    storage: Storage
    after: int
    before: int
    must_stay: bool = False
    must_leave: bool = False


@dataclass(frozen=True, slots=True)
class Gaps:
    """Every gap in which another event runs, and what all choices among them share.

    `touches`: the events, by number, that make or read each Storage beside the fixed ones; `needed`: bytes that each event needs
    whatever stays: what it touches, its workspace, and what is returned and touched no more.
    """

    schedule: Schedule
    ground: Ground
    rates: Rates
    touches: dict[Storage, list[int]]
    every: tuple[Gap, ...]
    needed: Bytes
    _orders: dict[float, list[Gap]] = field(default_factory=dict)

    @staticmethod
    def of(schedule: Schedule, ground: Ground, rates: Rates, kept: Collection[str] = (), swapped: Collection[str] = ()) -> Gaps:
        """The gaps of `schedule` on its `ground`. What is pinned, and in backward what the graph returns, must stay or leave."""
        touches: dict[Storage, list[int]] = {}
        for i, touched in enumerate(ground.touches):
            for storage in dict.fromkeys(storage for storage, _ in touched):
                touches.setdefault(storage, []).append(i)
        needed = schedule.workspace.copy()
        for storage, events in touches.items():
            for i in events:
                needed[i] += storage.n_bytes
            if storage in ground.returned:
                needed[events[-1] + 1 :] += storage.n_bytes
        return Gaps(schedule, ground, rates, touches, tuple(_gaps(schedule, ground, touches, kept, swapped)), needed)

    def packed(self, capacity_bytes: int, power: float) -> frozenset[Gap]:
        """Gaps to stay in, taken one by one as long as they fit: those first that save most seconds per byte, and per event to the
        `power`. Those alone that must be stayed in, when not even they fit."""
        room, kept = capacity_bytes - self.needed, []
        for gap in self._in_order(power):
            during = room[gap.after + 1 : gap.before]
            if gap.must_stay or int(during.min()) >= gap.storage.n_bytes:
                during -= gap.storage.n_bytes
                kept.append(gap)
        return frozenset(kept) if int(room.min()) >= 0 else frozenset(gap for gap in self.every if gap.must_stay)

    def packed_jointly(self, capacity_bytes: int, power: float, free: frozenset[str]) -> tuple[frozenset[str], frozenset[Gap]]:
        """Names of `free` inputs to let reside, and gaps to stay in, taken in one order of worth as long as they fit: residing saves every
        copy of an input and takes its bytes at all events. No gap of what resides is named. Residents give way to gaps that must be stayed in."""
        room = capacity_bytes - self.needed
        kept: dict[Gap, None] = {}
        resident: set[str] = set()
        for gap in self.every:
            if gap.must_stay:
                room[gap.after + 1 : gap.before] -= gap.storage.n_bytes
                kept[gap] = None
        for item in self._jointly_in_order(power, free):
            if isinstance(item, Gap):
                during = room[item.after + 1 : item.before]
                if item.storage.name not in resident and int(during.min()) >= item.storage.n_bytes:
                    during -= item.storage.n_bytes
                    kept[item] = None
                continue
            beside = self._beside(item)
            for gap in kept:
                if gap.storage is item:
                    beside[gap.after + 1 : gap.before] = False
            if int(room[beside].min(initial=capacity_bytes)) >= item.n_bytes:
                room[beside] -= item.n_bytes
                resident.add(item.name)
        return frozenset(resident), frozenset(gap for gap in kept if gap.storage.name not in resident)

    def _beside(self, storage: Storage) -> Mask:
        """The events that do not touch the Storage."""
        beside = np.ones(len(self.schedule.events), dtype=np.bool_)
        beside[self.touches[storage]] = False
        return beside

    def _jointly_in_order(self, power: float, free: frozenset[str]) -> list[Gap | Storage]:
        n_gaps, n_events = Counter(gap.storage for gap in self.every), len(self.schedule.events)

        def per_byte(storage: Storage, saved_s: float, during: int) -> float:
            return -saved_s / (max(storage.n_bytes, 1) * during**power)

        worths: list[tuple[float, int, str, Gap | Storage]] = []
        for gap in self.every:
            if not gap.must_leave and not gap.must_stay:
                saved_s = self.rates.load_s(gap.storage)
                saved_s += 0.0 if gap.storage.is_input else self.rates.spill_s(gap.storage) / n_gaps[gap.storage]
                worths.append((per_byte(gap.storage, saved_s, gap.before - gap.after), gap.after, gap.storage.name, gap))
        for storage in self.touches:
            if storage.is_input and storage.name in free:
                saved_s = self.rates.load_s(storage) * (1 + n_gaps[storage])
                worths.append((per_byte(storage, saved_s, n_events), -1, storage.name, storage))
        return [item for *_, item in sorted(worths, key=lambda one: one[:3])]

    def _in_order(self, power: float) -> list[Gap]:
        if power not in self._orders:
            n_gaps, rates = Counter(gap.storage for gap in self.every), self.rates

            def worth(gap: Gap) -> tuple[bool, float, int, str]:
                saved_s = rates.load_s(gap.storage) + (0.0 if gap.storage.is_input else rates.spill_s(gap.storage) / n_gaps[gap.storage])
                taken = max(gap.storage.n_bytes, 1) * (gap.before - gap.after) ** power
                return (not gap.must_stay, -saved_s / taken, gap.after, gap.storage.name)

            self._orders[power] = sorted((gap for gap in self.every if not gap.must_leave), key=worth)
        return self._orders[power]

    def laid_out(self, kept: Collection[Gap], capacity_bytes: int) -> Scan:
        """The Scan in which exactly the `kept` gaps are stayed in. A copy to the host ends when its channel has time, and before its
        room is needed."""
        events, ground = self.schedule.events, self.ground
        left = sorted((gap for gap in self.every if gap not in kept), key=lambda gap: (gap.after, gap.storage.name))
        leaves = {(gap.storage, gap.after) for gap in left}
        leave = {gap.storage for gap in left}
        scan = Scan()
        for storage, touches in self.touches.items():
            last = len(events) - 1 if storage in ground.returned else touches[-1]
            first = touches[0]
            if storage.is_input and not storage.is_tangent:
                scan.loads.append(Load(storage, events[first].index, events[first].index))
            for after, before in pairwise(touches) if storage in leave else ():
                if (storage, after) in leaves:
                    scan.stays.append(Stay(storage, first, after))
                    index = events[before].index
                    scan.loads.append(Load(storage, index, index))
                    first = before
            scan.stays.append(Stay(storage, first, last))
        scan.loads.sort(key=lambda load: load.before)
        self._send(scan, left, capacity_bytes)
        return scan

    def _send(self, scan: Scan, left: list[Gap], capacity_bytes: int) -> None:
        """Adds the copies to the host, in the order of their start, and lets what is sent stay until its copy has ended."""
        events, rates = self.schedule.events, self.rates
        used = (stayed_bytes(self.schedule, scan) + self.schedule.workspace).tolist()
        before_s = [0.0, *accumulate(rates.event_s)]
        border = sum(1 for event in events if event.index < self.ground.border)
        ends = {(stay.storage, stay.last): i for i, stay in enumerate(scan.stays)}
        d2h_s, sent = 0.0, set()
        for gap in left:
            if gap.storage.is_input or gap.storage in sent:
                continue
            sent.add(gap.storage)
            d2h_s = max(d2h_s, before_s[gap.after + 1]) + rates.spill_s(gap.storage)
            last = min(gap.before, border if gap.after < border else len(used)) - 1
            until = gap.after
            while until < last and before_s[until + 1] < d2h_s and used[until + 1] + gap.storage.n_bytes <= capacity_bytes:
                until += 1
                used[until] += gap.storage.n_bytes
            scan.spills.append(Spill(gap.storage, events[gap.after].index, events[until].index))
            at = ends[gap.storage, gap.after]
            scan.stays[at] = Stay(gap.storage, scan.stays[at].first, until)


def _gaps(schedule: Schedule, ground: Ground, touches: dict[Storage, list[int]], kept: Collection[str], swapped: Collection[str]) -> Iterator[Gap]:
    for storage, events in touches.items():
        for after, before in pairwise(events):
            if before == after + 1:
                continue
            behind = schedule.events[after].index >= ground.border
            crosses = schedule.events[after].index < ground.border < schedule.events[before].index
            must_stay = storage.is_tangent or storage.name in kept or (behind and storage in ground.returned)
            yield Gap(storage, after, before, must_stay, storage.name in swapped and crosses)
