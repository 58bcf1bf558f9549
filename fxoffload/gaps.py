"""A scan from a choice of what stays: the gaps between events that touch a value, and where it is in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from .liveness import Storage
from .overlap import Bytes, Rates
from .spill import Ground, Load, Scan, Schedule, Spill, Stay


@dataclass(frozen=True, slots=True)
class Gap:
    """`storage` is touched by events number `after` and `before` and by none between: there it stays or has left."""

    storage: Storage
    after: int
    before: int
    must_stay: bool = False
    must_leave: bool = False


def touches_of(schedule: Schedule, ground: Ground) -> dict[Storage, list[int]]:
    """The events, by number, that make or read each Storage beside the fixed ones."""
    touches: dict[Storage, list[int]] = {}
    for i, event in enumerate(schedule.events):
        for storage in dict.fromkeys((*ground.reads[i], *event.makes)):
            touches.setdefault(storage, []).append(i)
    return touches


def gaps_of(schedule: Schedule, ground: Ground, kept: Collection[str] = (), swapped: Collection[str] = ()) -> Iterator[Gap]:
    """Every gap in which another event runs. What is pinned, and in backward what the graph returns, must stay or leave."""
    for storage, touches in touches_of(schedule, ground).items():
        for after, before in pairwise(touches):
            if before == after + 1:
                continue
            behind = schedule.events[after].index >= ground.border
            crosses = schedule.events[after].index < ground.border < schedule.events[before].index
            must_stay = storage.is_tangent or storage.name in kept or (behind and storage in ground.returned)
            yield Gap(storage, after, before, must_stay, storage.name in swapped and crosses)


def packed(schedule: Schedule, ground: Ground, gaps: Collection[Gap], capacity_bytes: int, rates: Rates, power: float) -> frozenset[Gap]:
    """Gaps to stay in, taken one by one as long as they fit: those first that save most seconds per byte, and per event to the `power`.
    Those alone that must be stayed in, when not even they fit."""
    room = capacity_bytes - _needed(schedule, ground)
    n_gaps = Counter(gap.storage for gap in gaps)

    def worth(gap: Gap) -> tuple[bool, float, int, str]:
        saved_s = rates.load_s(gap.storage) + (0.0 if gap.storage.is_input else rates.spill_s(gap.storage) / n_gaps[gap.storage])
        taken = max(gap.storage.n_bytes, 1) * (gap.before - gap.after) ** power
        return (not gap.must_stay, -saved_s / taken, gap.after, gap.storage.name)

    kept = set()
    for gap in sorted((gap for gap in gaps if not gap.must_leave), key=worth):
        during = room[gap.after + 1 : gap.before]
        if gap.must_stay or int(during.min()) >= gap.storage.n_bytes:
            during -= gap.storage.n_bytes
            kept.add(gap)
    return frozenset(kept) if int(room.min()) >= 0 else frozenset(gap for gap in gaps if gap.must_stay)


def _needed(schedule: Schedule, ground: Ground) -> Bytes:
    """Bytes that each event needs whatever stays: what it touches, its workspace, and what is returned and touched no more."""
    needed = np.array([event.workspace_bytes for event in schedule.events], dtype=np.int64)
    for storage, touches in touches_of(schedule, ground).items():
        needed[touches] += storage.n_bytes
        if storage in ground.returned:
            needed[touches[-1] + 1 :] += storage.n_bytes
    return needed


def laid_out(schedule: Schedule, ground: Ground, gaps: Collection[Gap], kept: Collection[Gap], capacity_bytes: int, rates: Rates) -> Scan:
    """The Scan in which exactly the `kept` gaps are stayed in. A copy to the host ends when its channel has time, and before its room
    is needed."""
    left = sorted((gap for gap in gaps if gap not in kept), key=lambda gap: (gap.after, gap.storage.name))
    leaves = {(gap.storage, gap.after) for gap in left}
    scan = Scan()
    for storage, touches in touches_of(schedule, ground).items():
        last = len(schedule.events) - 1 if storage in ground.returned else touches[-1]
        first = touches[0]
        if storage.is_input and not storage.is_tangent:
            scan.loads.append(Load(storage, schedule.events[first].index, schedule.events[first].index))
        for after, before in pairwise(touches):
            if (storage, after) in leaves:
                scan.stays.append(Stay(storage, first, after))
                index = schedule.events[before].index
                scan.loads.append(Load(storage, index, index))
                first = before
        scan.stays.append(Stay(storage, first, last))
    scan.loads.sort(key=lambda load: load.before)
    _send(schedule, ground, scan, left, capacity_bytes, rates)
    return scan


def _send(schedule: Schedule, ground: Ground, scan: Scan, left: list[Gap], capacity_bytes: int, rates: Rates) -> None:
    """Adds the copies to the host, in the order of their start, and lets what is sent stay until its copy has ended."""
    used = [event.workspace_bytes for event in schedule.events]
    for stay in scan.stays:
        for at in range(stay.first, stay.last + 1):
            used[at] += stay.storage.n_bytes
    before_s = [0.0, *accumulate(rates.event_s)]
    border = sum(1 for event in schedule.events if event.index < ground.border)
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
        scan.spills.append(Spill(gap.storage, schedule.events[gap.after].index, schedule.events[until].index))
        at = ends[gap.storage, gap.after]
        scan.stays[at] = Stay(gap.storage, scan.stays[at].first, until)
