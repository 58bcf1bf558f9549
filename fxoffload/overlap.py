"""Overlap: how far a scan's transfers are pulled apart from their waits, and the seconds its events then take.

A copy to the device starts early enough to end before its use, a copy to the host is awaited when it has ended, as far as the
memory that is left allows. `just_in_time` then lets those copies wait that would only stand behind others on their channel.
`schedule_s` is the list schedule of events and copies on their channels: what `timeline` says of the lowered graph, without lowering it.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

import numpy as np
import torch.fx as fx

from . import ops
from .buckets import GROUP_BYTES, held_bytes, transfers_of
from .cost import lookup_s, node_s
from .effects import Channel, Tier
from .graph import Bounds, info
from .liveness import Storage
from .machine import COPY_ISSUES, Machine
from .spill import NEVER, Bytes, Event, Load, Scan, Schedule, Spill, Sunk

# Copies are planned as if they took this many times as long: the estimate of compute is not exact, and copies slow each other.
_SLACK = 1.5
# What is told of copies ahead of their channel, in seconds of it, and how much faster than the estimate copies may turn out to be: a
# channel that has nothing to do because it was told too late would be worse than one that was told too much.
_AHEAD_S = 0.004
_FASTER = 0.8
# Sums of the same seconds in another order.
_SAME = 1e-12
# Channel and seconds of nodes by canonical name.
Costs = dict[str, tuple[Channel, float]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of every event of a Schedule, of a copy of a Storage to and from the device, and of issuing one op.

    `event_s`: with every lookup reading its table where the graph has it; `looked_up`: of each table on the host, by name, the numbers of the
    events that read it and their seconds when it resides (`with_residents`). `merged_s`: seconds of so many bytes of several
    inputs' copies as one, the first of them that Storage.
    `least_load_s`: what a copy adds to whatever copy it comes with, at least. `sink_s`: seconds of the copies that are events themselves, the
    gradients', by node index.
    """

    event_s: Sequence[float]
    load_s: Callable[[Storage], float]
    merged_s: Callable[[int, Storage], float]
    least_load_s: Callable[[Storage], float]
    spill_s: Callable[[Storage], float]
    sink_s: Mapping[int, float]
    overlaps: bool
    dispatch_s: float = 0.0
    looked_up: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)

    @staticmethod
    def of(schedule: Schedule, bounds: Bounds, machine: Machine, swap_tier: Tier = Tier.PINNED, bucket_bytes: int = GROUP_BYTES,
           known: Costs | None = None) -> Rates:
        """The rates of `schedule` on `machine`; values go to `swap_tier`, inputs come from where they are at home, alone or, smaller
        than `bucket_bytes`, in buckets. `known`: what nodes of these names cost, in other recipes of the same graph; it grows."""
        costs = _costs(schedule, bounds, machine, known if known is not None else {})
        event_s = [seconds if channel is Channel.COMPUTE else 0.0 for channel, seconds in costs]
        sinks = {event.index: seconds for event, (channel, seconds) in zip(schedule.events, costs) if channel is Channel.D2H}
        transfer_s, least_s_per_byte = functools.cache(machine.transfer_s), functools.cache(machine.least_s_per_byte)

        def home(storage: Storage) -> Tier:
            return swap_tier if not storage.is_input else storage.tier if storage.tier.on_host else Tier.PINNED

        @functools.cache
        def load_s(storage: Storage) -> float:
            return transfer_s(storage.n_bytes, Channel.H2D, home(storage))

        def merged_s(n_bytes: int, first: Storage) -> float:
            return transfer_s(n_bytes, Channel.H2D, home(first))

        @functools.cache
        def least_load_s(storage: Storage) -> float:
            if storage.n_bytes >= bucket_bytes or storage not in schedule.mergeable:
                return load_s(storage)
            # A bucket grows until it has `bucket_bytes`, by copies that are smaller.
            return storage.n_bytes * least_s_per_byte(2 * bucket_bytes, Channel.H2D, home(storage))

        @functools.cache
        def spill_s(storage: Storage) -> float:
            return transfer_s(storage.n_bytes, Channel.D2H, swap_tier)

        return Rates(
            event_s, load_s, merged_s, least_load_s, spill_s, sinks, machine.overlaps, machine.dispatch_s or 0.0 if machine.overlaps else 0.0,
            _looked_up(schedule, bounds, machine))

    def with_residents(self, resident: frozenset[str]) -> Rates:
        """The rates when the inputs of these names lie on the device."""
        there = [at for name in sorted(resident & self.looked_up.keys()) for at in self.looked_up[name]]
        if not there:
            return self
        event_s = list(self.event_s)
        for position, seconds in there:
            event_s[position] = seconds
        return replace(self, event_s=event_s)


def _costs(schedule: Schedule, bounds: Bounds, machine: Machine, known: Costs) -> list[tuple[Channel, float]]:
    """What every event costs. A clone costs what its origin does: what both read and make is alike."""
    costs = []
    for event in schedule.events:
        node = schedule.live.nodes[event.index]
        entry = info(node)
        name = entry.origin or entry.name
        cost = known.get(name)
        if cost is None:
            cost = known[name] = node_s(node, bounds, machine)
        costs.append(cost)
    return costs


def _looked_up(schedule: Schedule, bounds: Bounds, machine: Machine) -> dict[str, list[tuple[int, float]]]:
    """Of each table on the host that lookups read: the numbers of these events, and their seconds when it is on the device."""
    found: dict[str, list[tuple[int, float]]] = {}
    for i, event in enumerate(schedule.events):
        node = schedule.live.nodes[event.index]
        if node.target is ops.lookup:
            (table,) = schedule.live.of[node.args[0]]  # type: ignore[index]
            if table.tier.on_host:
                found.setdefault(table.name, []).append((i, lookup_s(node, bounds, machine, Tier.DEVICE)))
    return found


def overlapped(schedule: Schedule, found: Scan, capacity_bytes: int | None, rates: Rates) -> tuple[Scan, Bytes]:
    """The same scan with every load started earlier and every gradient awaited later, and its `used_bytes`.

    `capacity_bytes`: device bytes beside the fixed inputs, None without a limit. Loads keep their order on the channel.
    """
    if not rates.overlaps:
        return found, used_bytes(schedule, found)
    capacity = NEVER if capacity_bytes is None else capacity_bytes
    if (table := schedule.table) is not None:
        apart, used = table.overlapped(found.evaluated(table), capacity, rates, _SLACK)
        return Scan(evaluated=apart, numbers=found), used
    # Bytes free during each event, once every value is dropped at its last use; what is under way is taken from them.
    free = capacity - stayed_bytes(schedule, found) - schedule.workspace
    before_use = list(accumulate(rates.event_s, initial=0.0))
    loads = _earlier(schedule, found, free, before_use, rates)
    sinks = _later(schedule, found, free, before_use, rates)
    return found.having(loads=loads, sinks=sinks), capacity - free


def _earlier(schedule: Schedule, found: Scan, free: Bytes, before_use: list[float], rates: Rates) -> list[Load]:
    position = schedule.position
    gone: dict[Storage, int] = {spill.storage: position[spill.until] for spill in found.spills}
    border = _border_position(schedule)
    in_order = sorted(found.loads, key=lambda one: one.before)
    # A copy must end before its use and before the next copy on the channel has to start.
    in_time, deadline_s = [0] * len(in_order), float("inf")
    for i in reversed(range(len(in_order))):
        load = in_order[i]
        deadline_s = min(deadline_s, before_use[position[load.before]]) - rates.load_s(load.storage) * _SLACK
        in_time[i] = bisect_right(before_use, deadline_s) - 1
    # What is used first has memory first, and is copied first.
    loads, start = [], 0
    for load, wanted in zip(in_order, in_time, strict=True):
        at = position[load.before]
        # A copy that is under way cannot be handed from forward to backward.
        lowest = max(gone.get(load.storage, -1) + 1, border + 1 if at > border else 0)
        start = _first_with_room(free, min(at, max(lowest, wanted, start)), at, load.storage.n_bytes)
        free[start:at] -= load.storage.n_bytes
        loads.append(Load(load.storage, load.before, schedule.events[start].index))
    return sorted(loads, key=lambda one: (one.before, one.start))


def _first_with_room(free: Bytes, first: int, end: int, n_bytes: int) -> int:
    """The first event from which on `n_bytes` are free until before `end`."""
    (short,) = (free[first:end] < n_bytes).nonzero()
    return first + int(short[-1]) + 1 if short.size else first


def _last_with_room(free: Bytes, start: int, last: int, n_bytes: int) -> int:
    """The last event up to which `n_bytes` are free after `start`."""
    (short,) = (free[start + 1 : last + 1] < n_bytes).nonzero()
    return start + int(short[0]) if short.size else last


def _later(schedule: Schedule, found: Scan, free: Bytes, before_use: list[float], rates: Rates) -> list[Sunk]:
    """Where each gradient's copy is awaited: at the first event that starts after its end, or earlier for want of memory."""
    sent: dict[int, float] = defaultdict(float)
    for spill in found.spills:
        sent[spill.after] += rates.spill_s(spill.storage)
    d2h_s, sinks, last = 0.0, [], len(schedule.events) - 2
    for i in sorted({schedule.position[index] for index in chain(sent, rates.sink_s)}):
        event = schedule.events[i]
        if event.index in sent:
            d2h_s = max(d2h_s, before_use[i + 1]) + sent[event.index] * _SLACK
        if event.index not in rates.sink_s:
            continue
        n_bytes = _bytes(event)
        d2h_s = max(d2h_s, before_use[i + 1]) + rates.sink_s[event.index] * _SLACK
        ended = bisect_left(before_use, d2h_s) - 1
        until = _last_with_room(free, i, max(i, min(last, ended)), n_bytes)
        free[i + 1 : until + 1] -= n_bytes
        sinks.append(Sunk(event.index, schedule.events[until].index))
    return sinks


def schedule_s(schedule: Schedule, found: Scan, rates: Rates) -> float:
    """Seconds from the first event to the end of the last event or copy: what `timeline` says of the lowered graph."""
    if not rates.overlaps:
        loads_s = sum(_transfer_s(members, rates) for members in transfers_of(found.loads))
        return sum(rates.event_s) + loads_s + sum(rates.spill_s(spill.storage) for spill in found.spills) + sum(rates.sink_s.values())
    if (table := schedule.table) is not None:
        return table.seconds(found.evaluated(table), rates)
    return _Run(schedule, found, rates).end_s()


def stalls_s(schedule: Schedule, found: Scan, rates: Rates) -> dict[Storage, float]:
    """Seconds that compute waits for copies of each Storage to the device, of those it waits for."""
    if (table := schedule.table) is not None:
        return table.stalls_s(found.evaluated(table), rates)
    run = _Run(schedule, found, rates)
    run.end_s()
    return run.stalls


def _transfer_s(members: Sequence[Load], rates: Rates) -> float:
    """Seconds of a load, or of a bucket of them."""
    if len(members) == 1:
        return rates.load_s(members[0].storage)
    return rates.merged_s(sum([load.storage.n_bytes for load in members]), members[0].storage)


class _Run:
    """One pass over the events with the clocks of the three channels, in the order that the rewrites give."""

    def __init__(self, schedule: Schedule, found: Scan, rates: Rates) -> None:
        self.schedule, self.rates = schedule, rates
        self.now = self.issued = self.h2d = self.d2h = 0.0
        self.gone: dict[Storage, float] = {}
        # By node index: seconds of the copies that start there, each by its number, and the copies that are awaited there.
        self.arrived: dict[int, float] = {}
        self.starting: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.awaited: dict[int, list[tuple[int, Storage]]] = defaultdict(list)
        for number, members in enumerate(transfers_of(found.loads)):
            self.starting[members[0].start].append((number, _transfer_s(members, rates)))
            first = min(members, key=lambda load: load.before)
            self.awaited[first.before].append((number, first.storage))
        self.leaving: dict[int, list[Spill]] = defaultdict(list)
        self.left: dict[int, list[Spill]] = defaultdict(list)
        for spill in sorted(found.spills, key=lambda one: one.until):
            self.leaving[spill.after].append(spill)
            if spill.until != spill.after:
                self.left[spill.until].append(spill)
        self.until = {sunk.start: sunk.until for sunk in found.sinks}
        self.sunk: dict[int, float] = defaultdict(float)
        self.stalls: dict[Storage, float] = defaultdict(float)

    def end_s(self) -> float:
        begins = self.starting.keys() | self.awaited.keys()
        ends = self.rates.sink_s.keys() | self.until.values() | self.left.keys() | self.leaving.keys()
        touched, issues = begins | ends, self.rates.dispatch_s > 0
        for event, seconds in zip(self.schedule.events, self.rates.event_s):
            index = event.index
            if index in touched or issues:
                if index in begins:
                    self._begin(index)
                if seconds:
                    if issues:
                        self._issue()
                    self.now += seconds
                if index in ends:
                    self._end(index)
            else:
                self.now += seconds
        return max(self.now, self.h2d, self.d2h)

    def _begin(self, index: int) -> None:
        """Copies to the device start before the event, and are awaited."""
        for number, copy_s in self.starting.get(index, ()):
            self._issue(COPY_ISSUES)
            self.h2d = self.arrived[number] = max(self.now, self.h2d) + copy_s
        for number, storage in self.awaited.get(index, ()):
            if self.arrived[number] > self.now:
                self.stalls[storage] += self.arrived[number] - self.now
                self.now = self.arrived[number]

    def _end(self, index: int) -> None:
        """Copies to the host are awaited behind the event, and start."""
        if index in self.rates.sink_s:
            at = self.until.get(index, index)
            self.sunk[at] = max(self.sunk[at], self._send(self.rates.sink_s[index]))
        self.now = max([self.now, self.sunk.get(index, 0.0), *(self.gone[spill.storage] for spill in self.left.get(index, ()))])
        # Each is put right behind the event, before those that were put there earlier.
        for spill in reversed(self.leaving.get(index, ())):
            self.gone[spill.storage] = self._send(self.rates.spill_s(spill.storage))
            if spill.until == spill.after:
                self.now = max(self.now, self.gone[spill.storage])

    def _issue(self, ops: int = 1) -> None:
        self.issued += ops * self.rates.dispatch_s
        if self.issued > self.now:
            self.now = self.issued

    def _send(self, seconds: float) -> float:
        self._issue(COPY_ISSUES)
        self.d2h = max(self.now, self.d2h) + seconds
        return self.d2h


def just_in_time(schedule: Schedule, found: Scan, rates: Rates) -> Scan:
    """The same scan with no copy to the device started while its channel has enough to do: it takes no less time, but the host issues
    what computes before copies that would stand in a queue, and their memory is free until then. Never slower: the scan as it was where
    this one is."""
    if not rates.overlaps:
        return found
    if (table := schedule.table) is not None:
        later = Scan(evaluated=table.just_in_time(found.evaluated(table), rates, _AHEAD_S, _FASTER), numbers=found)
    else:
        run = _JustInTime(schedule, found, rates)
        run.end_s()
        later = found.having(loads=run.loads(found.loads))
    return later if schedule_s(schedule, later, rates) <= schedule_s(schedule, found, rates) * (1 + _SAME) else found


class _JustInTime(_Run):
    """A pass in which copies to the device, in the order of their channel, start as soon as they may and are soon to be needed there."""

    def __init__(self, schedule: Schedule, found: Scan, rates: Rates) -> None:
        super().__init__(schedule, found, rates)
        self.transfers = transfers_of(found.loads)
        self.queue: deque[tuple[int, float]] = deque()
        self.start: dict[int, int] = {}

    def end_s(self) -> float:
        begins = self.starting.keys() | self.awaited.keys()
        ends = self.rates.sink_s.keys() | self.until.values() | self.left.keys() | self.leaving.keys()
        queue, issues = self.queue, self.rates.dispatch_s > 0
        for event, seconds in zip(self.schedule.events, self.rates.event_s):
            index, reached = event.index, self.now
            if index in begins:
                queue.extend(self.starting.get(index, ()))
                awaited = [number for number, _ in self.awaited.get(index, ())]
                while any([number not in self.arrived for number in awaited]):
                    self._start(index, reached)
                self.now = max([self.now, *[self.arrived[number] for number in awaited]])
            if seconds:
                if issues:
                    self._issue()
                self.now += seconds
            if index in ends:
                self._end(index)
            # Until the next event is reached, the channel has this much to do.
            while queue and self.h2d < self.now + _AHEAD_S:
                self._start(index, reached)
        return max(self.now, self.h2d, self.d2h)

    def loads(self, planned: Iterable[Load]) -> list[Load]:
        """Those loads with the starts that were found."""
        start = {load: self.start[number] for number, members in enumerate(self.transfers) for load in members}
        return [load._replace(start=start[load]) for load in planned]

    def _start(self, index: int, reached: float) -> None:
        """The next copy starts before the event of that index, which compute had `reached` by then."""
        number, copy_s = self.queue.popleft()
        self._issue(COPY_ISSUES)
        self.start[number] = index
        self.h2d = self.arrived[number] = max(reached, self.h2d) + copy_s * _FASTER


def _bytes(event: Event) -> int:
    return sum(s.n_bytes for s in event.reads)


def _border_position(schedule: Schedule) -> int:
    """Where the border stands in the event list; beyond its end in a graph without a backward."""
    return bisect_left(schedule.events, schedule.live.border, key=lambda event: event.index)


def stayed_bytes(schedule: Schedule, found: Scan) -> Bytes:
    """Bytes of what stays during each event."""
    return bytes_during(schedule, ((first, last + 1, storage.n_bytes) for storage, first, last in found.stays))


def used_bytes(schedule: Schedule, found: Scan) -> Bytes:
    """Bytes beside the fixed inputs that each event finds taken, copies under way and what buckets take more included."""
    if (table := schedule.table) is not None:
        return table.used_bytes(found.evaluated(table))
    position, events = schedule.position, schedule.events
    loads = ((position[load.start], position[load.before], load.storage.n_bytes) for load in found.loads)
    sinks = ((position[start] + 1, position[until] + 1, _bytes(events[position[start]])) for start, until in found.sinks)
    under_way = bytes_during(schedule, chain(loads, sinks))
    return stayed_bytes(schedule, found) + under_way + schedule.workspace + held_bytes(schedule, found)


def bytes_during(schedule: Schedule, spans: Iterable[tuple[int, int, int]]) -> Bytes:
    """The sum of bytes at each event, of spans from an event's number up to, not including, another's."""
    change = [0] * (len(schedule.events) + 1)
    for first, end, n_bytes in spans:
        change[first] += n_bytes
        change[end] -= n_bytes
    return np.cumsum(np.array(change[:-1], dtype=np.int64))
