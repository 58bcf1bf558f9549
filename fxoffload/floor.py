"""Seconds that no plan of one schedule can beat, whatever it keeps, lets reside, and whenever its copies start.

A bound may be too low and never too high: `schedule_s` of every scan that fits the capacity is at least as long. No copy is under way
at the border, so forward and backward are bounded one by one, each by what compute takes and by what each channel must move. What
must move is what crosses the border, and inputs that may reside, less what fits at the border: a fractional knapsack. Two terms are
of the whole step: what the host takes to issue it, and the longest way through first copies of inputs before an event that reads
them, compute from there to a gradient, and the copies of it and those behind it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch.fx as fx

from .graph import name_of
from .liveness import Storage, base_nodes, owner_of
from .machine import COPY_ISSUES
from .numbers import Longs, Numbers, mask
from .overlap import Rates
from .spill import Ground, Schedule


_Items = np.ndarray[Any, np.dtype[np.bool_]]


class Kept(NamedTuple):
    """Something that is either on the device over the border or takes seconds of the channels: in forward, and in backward.

    `name`: its canonical name.
    """

    name: str
    n_bytes: int
    load_s: float = 0.0
    spill_s: float = 0.0
    again_s: float = 0.0


class Making(NamedTuple):
    """How forward makes a value: in `seconds`, at event number `at`, from the values of those names."""

    at: int
    seconds: float
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Half:
    """What forward or backward takes: compute, copies of inputs that cannot reside, copies of gradients."""

    compute_s: float
    loads_s: float
    sinks_s: float


@dataclass(frozen=True)
class Needs:
    """What a schedule's seconds are bounded by. `ahead_s`: the longest way through first copies, compute and the gradients' copies.
    `schedule`, `ground`, `rates`: what it is of."""

    forward: Half
    backward: Half
    issue_s: float
    ahead_s: float
    kept: tuple[Kept, ...]
    schedule: Schedule
    ground: Ground
    rates: Rates

    @staticmethod
    def of(schedule: Schedule, ground: Ground, rates: Rates, may_reside: frozenset[str] = frozenset()) -> Needs:
        """The needs of `schedule` with the ground's inputs resident, and any of `may_reside` besides."""
        rates = rates.with_residents(may_reside | {storage.name for storage in ground.fixed})
        numbers, reads = schedule.numbers, _Reads.of(schedule, ground)
        first, border = _first_loads(numbers, reads, rates, may_reside), numbers.border_event
        sinks = {schedule.position[index]: seconds for index, seconds in rates.sink_s.items()}
        issued = sum(1 for seconds in rates.event_s if seconds) + COPY_ISSUES * len(sinks)
        forward, backward = (
            Half(sum(rates.event_s[part]), sum(first[part]), sum([seconds for at, seconds in sinks.items() if (at < border) is is_forward], 0.0))
            for part, is_forward in ((slice(0, border), True), (slice(border, None), False)))
        return Needs(
            forward, backward, issued * rates.dispatch_s, _ahead_s(first, rates, sinks),
            tuple(_kept(numbers, reads, base_nodes(schedule.forward.live), rates, may_reside)), schedule, ground, rates)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the values, inputs apart, that forward makes and backward reads."""
        return sum(one.n_bytes for one in self.kept if one.name not in self.schedule.inputs)

    @functools.cached_property
    def makings(self) -> Mapping[str, Making]:
        """How forward makes each value, by name: asked for only where something is made again that the schedule keeps."""
        return dict(_makings(self.schedule.forward, self.ground, self.rates))

    def least_s(self, capacity_bytes: int, again: frozenset[str] = frozenset()) -> float:
        """The bound under `capacity_bytes` beside the ground's inputs. `again`: names of values that are made again where backward needs
        them."""
        left, made_s = self._without(again) if again else (None, 0.0)
        f, b = self.forward, self.backward
        if not self.rates.overlaps:
            moved_s = self._worths[-1].left_s(capacity_bytes, left)
            return f.compute_s + f.loads_s + f.sinks_s + b.compute_s + b.loads_s + b.sinks_s + made_s + moved_s
        loads_s, spills_s, again_s = (worth.left_s(capacity_bytes, left) for worth in self._worths[:3])
        forward_s = max(f.compute_s, f.loads_s + loads_s, f.sinks_s + spills_s)
        backward_s = max(b.compute_s + made_s, b.loads_s + again_s, b.sinks_s)
        return max(forward_s + backward_s, self.issue_s, self.ahead_s)

    @functools.cached_property
    def _names(self) -> list[str]:
        return [one.name for one in self.kept]

    @functools.cached_property
    def _worths(self) -> tuple[_Worth, ...]:
        """Of loads, of spills, of returns, and of all of them."""
        columns = zip(*((k.load_s, k.spill_s, k.again_s, k.load_s + k.spill_s + k.again_s) for k in self.kept)) if self.kept else ((),) * 4
        return tuple(_Worth.of([k.n_bytes for k in self.kept], seconds) for seconds in columns)

    def _without(self, again: frozenset[str]) -> tuple[_Items, float]:
        """What is left beside what is made again, and the seconds of that, found out once."""
        if again not in self._known:
            self._known[again] = np.array([name not in again for name in self._names], dtype=np.bool_), self._made_s(again)
        return self._known[again]

    @functools.cached_property
    def _known(self) -> dict[frozenset[str], tuple[_Items, float]]:
        return {}

    def _made_s(self, again: frozenset[str]) -> float:
        """Seconds of making again what backward reads of those values, and what that is made from."""
        needed = [one.name for one in self.kept if one.name in again]
        seen, ran = set(needed), dict[int, float]()
        while needed:
            making = self.makings.get(needed.pop())
            if making is not None:
                ran[making.at] = making.seconds
                more = [name for name in making.reads if name in again and name not in seen]
                seen.update(more)
                needed += more
        return sum(ran.values())


@dataclass(frozen=True, slots=True)
class _Worth:
    """Items by seconds per byte, the most first: their numbers, bytes and seconds."""

    order: np.ndarray[Any, np.dtype[np.int64]]
    n_bytes: np.ndarray[Any, np.dtype[np.int64]]
    seconds: np.ndarray[Any, np.dtype[np.float64]]

    @staticmethod
    def of(n_bytes: Sequence[int], seconds: Sequence[float]) -> _Worth:
        """Of items of so many bytes and seconds."""
        sizes, times = np.array(n_bytes, dtype=np.int64), np.array(seconds, dtype=np.float64)
        order = np.argsort(-times / np.maximum(sizes, 1), kind="stable")
        return _Worth(order, sizes[order], times[order])

    def left_s(self, capacity_bytes: int, items: _Items | None) -> float:
        """Seconds of those of the `items`, less the most that a part of them, items cut where need be, can hold in `capacity_bytes`."""
        sizes, times = self.n_bytes, self.seconds
        if items is not None:
            chosen = items[self.order]
            sizes, times = sizes[chosen], times[chosen]
        room, held = max(capacity_bytes, 0), np.cumsum(sizes)
        first = int(np.searchsorted(held, room, side="right"))
        if first == len(sizes):
            return 0.0
        part = (room - (int(held[first - 1]) if first else 0)) / int(sizes[first])
        return max(float(times[first:].sum() - times[first] * part), 0.0)


@dataclass(frozen=True, slots=True)
class _Reads:
    """What events read beside the inputs that a Ground has fixed, by event: numbers of Storages, and of the events."""

    storages: Longs
    events: Longs

    @staticmethod
    def of(schedule: Schedule, ground: Ground) -> _Reads:
        """Those of the Ground."""
        numbers, more = schedule.numbers, ground.fixed - schedule.fixed
        fixed = mask(storage in more for storage in numbers.storages) if more else np.zeros(len(numbers.storages), dtype=np.uint8)
        is_read = fixed[numbers.reads.of] == 0
        return _Reads(numbers.reads.of[is_read].astype(np.int64), numbers.reads.row_of()[is_read])


def _first_loads(numbers: Numbers, reads: _Reads, rates: Rates, may_reside: frozenset[str]) -> list[float]:
    """Seconds of first copies of inputs that cannot reside, at the event that needs them first."""
    found = [0.0] * len(numbers.index)
    storages, first = np.unique(reads.storages, return_index=True)
    for at in np.sort(first[(numbers.is_input[storages] != 0) & (numbers.is_tangent[storages] == 0)]).tolist():
        storage = numbers.storages[reads.storages[at]]
        if storage.name not in may_reside:
            found[reads.events[at]] += rates.least_load_s(storage)
    return found


def _ahead_s(first_loads: list[float], rates: Rates, sinks: Mapping[int, float]) -> float:
    """The longest way: first copies up to an event, compute from there to a later one, the gradients' copies from that one on. `sinks`: seconds of
    these by event."""
    before = np.array([0.0, *accumulate(rates.event_s)])
    starts = np.maximum.accumulate(np.cumsum(first_loads) - before[:-1])
    ahead_s, sunk_s = float((starts + before[-1]).max(initial=0.0)), 0.0
    for at in sorted(sinks, reverse=True):
        sunk_s += sinks[at]
        ahead_s = max(ahead_s, float(starts[at] + before[at + 1] + sunk_s))
    return ahead_s


def _kept(numbers: Numbers, reads: _Reads, base: Mapping[Storage, fx.Node], rates: Rates, may_reside: frozenset[str]) -> Iterator[Kept]:
    """In the order in which events read them last, the last first."""
    _, last = np.unique(reads.storages[::-1], return_index=True)
    last = len(reads.storages) - 1 - last
    last = last[np.lexsort((last, -reads.events[last]))]
    storages, border = reads.storages[last], numbers.border_event
    begins = np.where(numbers.is_input[storages] != 0, _first_events(reads)[storages], numbers.made_by[storages])
    is_again = (reads.events[last] > border) & (numbers.returned[storages] == 0)
    for number, began, again in zip(storages.tolist(), begins.tolist(), is_again.tolist(), strict=True):
        storage = numbers.storages[number]
        again_s = rates.least_load_s(storage) if again else 0.0
        if storage.is_input and storage.name in may_reside:
            load_s = rates.least_load_s(storage) if began < border else 0.0
            yield Kept(storage.name, storage.n_bytes, load_s, 0.0, again_s)
        elif not again_s or began >= border:
            continue
        elif storage.is_input:
            yield Kept(storage.name, storage.n_bytes, 0.0, 0.0, again_s)
        elif storage in base:
            yield Kept(name_of(base[storage]), storage.n_bytes, 0.0, rates.spill_s(storage), again_s)


def _first_events(reads: _Reads) -> Longs:
    """The event that reads each Storage first; 0 where none does."""
    found = np.zeros(int(reads.storages.max(initial=-1)) + 1, dtype=np.int64)
    found[reads.storages[::-1]] = reads.events[::-1]
    return found


def _makings(schedule: Schedule, ground: Ground, rates: Rates) -> Iterator[tuple[str, Making]]:
    live, base = schedule.live, base_nodes(schedule.live)
    for storage, node in base.items():
        at = schedule.position.get(live.first[storage])
        if storage.is_input or at is None or live.first[storage] >= ground.border:
            continue
        read = dict.fromkeys(s for operand in owner_of(node).all_input_nodes for s in live.of.get(operand, ()))
        yield name_of(node), Making(at, rates.event_s[at], tuple(name_of(base[s]) for s in read if s in base and not s.is_input))
