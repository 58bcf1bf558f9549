"""Which values leave the device, when, and when they return: a linear scan over the schedule.

At every node its operands and results must be on the device. When they do not fit beside what is there, the value whose next use
is furthest goes (Belady's rule, weighed by what its way out and back costs): a parameter or a value that already has a host copy
is dropped, any other is swapped out once. So the smallest capacity that works is the largest single node plus what is fixed, and
the scan names it exactly when it is not there.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch.fx as fx
from torch.fx.node import Argument

from . import ops
from .donation import takes_a_place
from .effects import Tier
from .graph import Bounds, has_fixed_layout, operands, output_of, returned
from .liveness import Liveness, Storage, is_view, liveness, no_workspace
from .native import Evaluated, Table, library
from .numbers import Numbers

# Bytes at each event; NEVER stands for no limit, and 64 bits hold it.
Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]
NEVER = 1 << 60
# Distances beyond this are one: a value that is never used again still has a score.
_FAR = 1 << 30
# What is smaller than this part of the room that is to be made is a crumb.
_CRUMBS = 1024


# These are tuples because a search makes and looks up hundreds of thousands of them.


class Load(NamedTuple):
    """Storage comes to the device before node index `before`, started before node index `start`. Loads of one `bucket` start with the
    first of them, as one copy, and are there when the first of them is awaited."""

    storage: Storage
    before: int
    start: int
    bucket: int | None = None


class Stay(NamedTuple):
    """Storage is on the device during events number `first` to `last` (positions in the event list)."""

    storage: Storage
    first: int
    last: int


class Spill(NamedTuple):
    """Storage leaves for the host: after its last use at node index `after`, gone from the device after `until`."""

    storage: Storage
    after: int
    until: int


class Sunk(NamedTuple):
    """A gradient on its way to the host: sent by node index `start`, gone from the device after node index `until`."""

    start: int
    until: int


class Lists(NamedTuple):
    """What a scan decided, one by one."""

    loads: list[Load]
    spills: list[Spill]
    sinks: list[Sunk]
    stays: list[Stay]


class Scan:
    """What the scan decided. `shortfall_bytes` > 0: the capacity is that much too small, at node `worst`.

    Where the evaluator found it, it holds it as numbers, and the lists are made when they are asked for.
    """

    __slots__ = ("_lists", "_evaluated", "peak_bytes", "peak_index", "shortfall_bytes", "worst", "_live_at_worst")

    def __init__(self, lists: Lists | None = None, evaluated: Evaluated | None = None, numbers: Scan | None = None) -> None:
        """Of the lists, or of what the evaluator holds. The other numbers are those of `numbers`, where given."""
        self._lists = lists if lists is not None or evaluated is not None else Lists([], [], [], [])
        self._evaluated = evaluated
        self.peak_bytes = self.peak_index = self.shortfall_bytes = self.worst = 0
        self._live_at_worst: tuple[Storage, ...] | None = None if evaluated is not None else ()
        if numbers is not None:
            self.peak_bytes, self.peak_index, self.shortfall_bytes = numbers.peak_bytes, numbers.peak_index, numbers.shortfall_bytes
            self.worst, self._live_at_worst = numbers.worst, numbers._live_at_worst
        elif evaluated is not None:
            self.peak_bytes, peak, self.shortfall_bytes, worst = evaluated.numbers
            index = evaluated.table.index
            self.peak_index, self.worst = index[peak] if self.peak_bytes else 0, index[worst] if self.shortfall_bytes else 0

    @property
    def loads(self) -> list[Load]:
        return self.lists.loads

    @property
    def spills(self) -> list[Spill]:
        return self.lists.spills

    @property
    def sinks(self) -> list[Sunk]:
        return self.lists.sinks

    @property
    def stays(self) -> list[Stay]:
        return self.lists.stays

    @property
    def live_at_worst(self) -> tuple[Storage, ...]:
        """What is on the device, or should be, at `worst`."""
        if self._live_at_worst is None:
            assert self._evaluated is not None
            storages = self._evaluated.table.storages
            self._live_at_worst = tuple([storages[i] for i, in self._evaluated.columns()[-1]])
        return self._live_at_worst

    @live_at_worst.setter
    def live_at_worst(self, storages: tuple[Storage, ...]) -> None:
        self._live_at_worst = storages

    @property
    def has_loads(self) -> bool:
        """Whether anything is copied to the device."""
        return bool(self.n_loads)

    @property
    def n_loads(self) -> int:
        return self._evaluated.counts[0] if self._evaluated is not None else len(self.loads)

    @property
    def spilled_bytes(self) -> int:
        return sum([spill.storage.n_bytes for spill in self.spills])

    @property
    def lists(self) -> Lists:
        """The scan, one by one."""
        if self._lists is None:
            assert self._evaluated is not None
            table, (loads, spills, sinks, stays, _) = self._evaluated.table, self._evaluated.columns()
            storages, index = table.storages, table.index
            self._lists = Lists(
                [Load(storages[s], index[before], index[start], None if bucket < 0 else bucket) for s, before, start, bucket in loads],
                [Spill(storages[s], index[after], index[until]) for s, after, until in spills],
                [Sunk(index[start], index[until]) for start, until in sinks],
                [Stay(storages[s], first, last) for s, first, last in stays])
        return self._lists

    def evaluated(self, table: Table) -> Evaluated:
        """The scan as the evaluator holds it."""
        if self._evaluated is None:
            number, position = table.number, table.schedule.position
            loads, spills, sinks, stays = self.lists
            self._evaluated = table.made(
                [(number[s], position[before], position[start], -1 if bucket is None else bucket) for s, before, start, bucket in loads],
                [(number[s], position[after], position[until]) for s, after, until in spills],
                [(position[start], position[until]) for start, until in sinks], [(number[s], first, last) for s, first, last in stays])
        return self._evaluated

    def having(self, **lists: list[Any]) -> Scan:
        """The scan with other lists."""
        return Scan(self.lists._replace(**lists), numbers=self)


@dataclass(frozen=True, slots=True)
class Event:
    """A node that computes: what it reads and makes on the device, and bytes it needs for itself while it runs.

    `own_bytes`: these, and those of what it makes.
    """

    index: int
    reads: tuple[Storage, ...]
    makes: tuple[Storage, ...]
    workspace_bytes: int
    own_bytes: int


def is_event(node: fx.Node) -> bool:
    """True for nodes that need their operands' bytes: not views, elements of tuples, waits or the border."""
    if node.op == "output":
        return True
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not is_view(node) and node.target is not ops.release


def events_of(graph: fx.Graph, live: Liveness, workspace: Callable[[fx.Node], int] = no_workspace) -> list[Event]:
    """The events of the graph, in order. The border reads the forward's outputs; the output node reads the gradients."""
    forward, gradients = returned(graph)
    events = []
    for i, node in enumerate(live.nodes):
        if not is_event(node):
            continue
        read, makes = live.reads[i], live.makes[i]
        if node.target is ops.backward:
            read = _aliased(forward, live)
            makes = (*makes, *(s for s in live.first if s.is_tangent))
        elif node.op == "output":
            read = _aliased((*forward, *gradients), live)
        elif node.target is ops.lookup:
            read = _aliased((node.args[1],), live)
        reads = tuple([s for s in read if s.tier is Tier.DEVICE or s.is_input])
        made = tuple([s for s in makes if s.tier is Tier.DEVICE or s.is_input])
        own_bytes = workspace_bytes = workspace(node)
        for storage in made:
            own_bytes += storage.n_bytes
        events.append(Event(i, reads, made, workspace_bytes, own_bytes))
    return events


def _aliased(values: Iterable[Argument], live: Liveness) -> tuple[Storage, ...]:
    """The Storages of those of the values that are nodes, each once."""
    return tuple(dict.fromkeys([s for v in values if isinstance(v, fx.Node) for s in live.of.get(v, ())]))


class Read(NamedTuple):
    """What is read beside the fixed inputs of a Ground.

    `reads`: per event; `touches`: per event what it reads and makes, with the node index of the next use; `leaves`: per event what is used no more
    and not returned; `uses`: of every Storage the node indices that read it.
    """

    reads: list[tuple[Storage, ...]]
    touches: list[tuple[tuple[Storage, int], ...]]
    leaves: list[tuple[Storage, ...]]
    uses: dict[Storage, list[int]]

    def without(self, fixed: frozenset[Storage], position: Mapping[int, int]) -> Read:
        """The same without more inputs that are fixed."""
        reads, touches, leaves, uses = self.reads.copy(), self.touches.copy(), self.leaves.copy(), self.uses.copy()
        for at in {position[index] for storage in fixed for index in uses.pop(storage, ())}:
            reads[at] = tuple([s for s in reads[at] if s not in fixed])
            touches[at] = tuple([touch for touch in touches[at] if touch[0] not in fixed])
            leaves[at] = tuple([s for s in leaves[at] if s not in fixed])
        return Read(reads, touches, leaves, uses)


@dataclass(frozen=True)
class Ground:
    """What all scans of a Schedule with the same inputs fixed on the device share: the bytes of these, and what is read beside them, made when
    it is asked for.

    `returned`: what stays to the end; `border`: node index.
    """

    fixed: frozenset[Storage]
    fixed_bytes: int
    returned: frozenset[Storage]
    border: int
    read: Callable[[], Read]

    @functools.cached_property
    def _read(self) -> Read:
        return self.read()

    @functools.cached_property
    def touched_bytes(self) -> Bytes:
        """Bytes that each event reads and makes."""
        return np.array([sum([s.n_bytes for s, _ in touched]) for touched in self.touches], dtype=np.int64)

    @property
    def reads(self) -> list[tuple[Storage, ...]]:
        return self._read.reads

    @property
    def touches(self) -> list[tuple[tuple[Storage, int], ...]]:
        return self._read.touches

    @property
    def leaves(self) -> list[tuple[Storage, ...]]:
        return self._read.leaves

    @property
    def uses(self) -> dict[Storage, list[int]]:
        return self._read.uses


class Spiller:
    """One scan over the events under `capacity_bytes` (device bytes beside the fixed inputs of `ground`)."""

    def __init__(self, live: Liveness, events: list[Event], capacity_bytes: int, ground: Ground,
                 kept: frozenset[Storage] = frozenset(), swapped: frozenset[Storage] = frozenset()) -> None:
        self.live, self.events, self.capacity = live, events, capacity_bytes
        self.kept, self.swapped = kept, swapped
        self.reads, self.touches, self.leaves, self.uses = ground.reads, ground.touches, ground.leaves, ground.uses
        self.returned, self.border = ground.returned, ground.border
        self.before_border = max(bisect_left(events, self.border, key=lambda event: event.index) - 1, 0)
        self.there: dict[Storage, int] = {}
        # What is there and may leave: not what is kept, and in backward not what the graph returns.
        self.movable: dict[Storage, None] = {}
        self.in_backward = False
        self.touched: dict[Storage, int] = {}
        # The next use of what is there, as of the last event that read or made it: between two uses it does not change.
        self.upcoming: dict[Storage, int] = {}
        self.position = 0
        self.on_host: set[Storage] = set()
        self.used_bytes = 0
        self.result = Scan()

    def run(self, to_the_end: bool = True) -> Scan:
        """The scan; unless `to_the_end`, one that finds no room ends where it does."""
        for self.position, event in enumerate(self.events):
            self._step(event)
            if self.result.shortfall_bytes and not to_the_end:
                return self.result
        for storage in list(self.there):
            self.touched[storage] = self.position
            self._leave(storage)
        return self.result

    def _step(self, event: Event) -> None:
        if event.index > self.border and not self.in_backward:
            self.in_backward = True
            for storage in self.returned:
                self.movable.pop(storage, None)
        reads, there, touched, position = self.reads[self.position], self.there, self.touched, self.position
        incoming, missing = event.own_bytes, []
        for storage in reads:
            if storage in there:
                touched[storage] = position
            else:
                missing.append(storage)
                incoming += storage.n_bytes
        if self.used_bytes + incoming > self.capacity:
            self._make_room(incoming, event, reads)
        for storage in missing:
            self.result.loads.append(Load(storage, event.index, event.index))
        for storage in (*missing, *event.makes) if missing else event.makes:
            if storage not in there:
                self._enter(storage)
        live_bytes = self.used_bytes + event.workspace_bytes
        if live_bytes > self.result.peak_bytes:
            self.result.peak_bytes, self.result.peak_index = live_bytes, event.index
        self.upcoming.update(self.touches[position])
        for storage in self.leaves[position] if not self.swapped else ():
            self._leave(storage)
        if self.swapped:
            self._swap_out(event)

    def _swap_out(self, event: Event) -> None:
        """What is touched no more leaves, and what must leave until backward reads it."""
        for storage, next_use in self.touches[self.position]:
            if next_use == NEVER and storage not in self.returned:
                self._leave(storage)
            elif storage in self.swapped and storage in self.there and event.index < self.border < next_use:
                self._evict(storage, event.index + 1, self.position)

    def _make_room(self, incoming: int, event: Event, reads: tuple[Storage, ...]) -> None:
        over = self.used_bytes + incoming - self.capacity
        candidates = [s for s in self.movable if s not in reads]
        queue = self._queue(candidates, event.index, over)
        while queue and over > 0:
            storage = candidates[heappop(queue)[-1]]
            over -= storage.n_bytes
            self._evict(storage, event.index, self.position - 1)
        if over > self.result.shortfall_bytes:
            self.result.shortfall_bytes, self.result.worst = over, event.index
            self.result.live_at_worst = tuple(dict.fromkeys((*self.there, *(s for s in event.reads if s in reads), *event.makes)))

    def _queue(self, candidates: list[Storage], index: int, over: int) -> list[tuple[float, str, int]]:
        """A heap of (urgency, name, position). First goes what is used furthest ahead and has a cheap way out and back; crumbs only
        when nothing larger is left."""
        upcoming, on_host = self.upcoming, self.on_host
        queue = [
            (-(ahead if (ahead := upcoming[s] - index) < _FAR else _FAR) * (1.0 if s.is_input or s in on_host else 0.5) * (1e-3 if s.n_bytes * _CRUMBS < over else 1.0),
             s.name, position)
            for position, s in enumerate(candidates)
        ]
        heapify(queue)
        return queue

    def _last_touch(self, storage: Storage, index: int) -> int:
        uses = self.uses.get(storage, [])
        position = bisect_right(uses, index - 1)
        return uses[position - 1] if position else self.live.first[storage]

    def _evict(self, storage: Storage, index: int, until: int) -> None:
        """Storage leaves before node `index`; a copy to the host may take until after event number `until`."""
        if storage.is_input or storage in self.on_host:
            self._leave(storage)
            return
        after = self._last_touch(storage, index)
        if after < self.border <= self.events[until].index:
            # A copy that is under way cannot be handed from forward to backward: it ends in forward, long before its room is needed.
            until = self.before_border
        self.touched[storage] = max(self.touched[storage], until)
        self._leave(storage)
        self.on_host.add(storage)
        self.result.spills.append(Spill(storage, after, max(self.events[until].index, after)))

    def _enter(self, storage: Storage) -> None:
        self.there[storage] = self.touched[storage] = self.position
        self.used_bytes += storage.n_bytes
        if storage not in self.kept and not (self.in_backward and storage in self.returned):
            self.movable[storage] = None

    def _leave(self, storage: Storage) -> None:
        first = self.there.pop(storage, None)
        if first is not None:
            self.result.stays.append(Stay(storage, first, self.touched[storage]))
            self.movable.pop(storage, None)
            self.used_bytes -= storage.n_bytes


@dataclass(frozen=True)
class Schedule:
    """A graph with what every scan of it shares: its Liveness, its events, and the device bytes of its inputs."""

    graph: fx.Graph
    live: Liveness
    events: list[Event]
    fixed: frozenset[Storage]
    _staying: dict[frozenset[str], dict[Storage, list[int]]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @staticmethod
    def of(graph: fx.Graph, bounds: Bounds, workspace: Callable[[fx.Node], int] = no_workspace) -> Schedule:
        """The Schedule of `graph` at the bounds."""
        live = liveness(graph, bounds)
        fixed = frozenset(s for s in live.first if s.is_input and s.tier is Tier.DEVICE and not s.is_tangent)
        return Schedule(graph, live, events_of(graph, live, workspace), fixed)

    @functools.cached_property
    def mergeable(self) -> frozenset[Storage]:
        """Inputs on the host whose copies may come in a bucket: of a layout that no symbol decides, and not returned."""
        returned = {s for operand in operands(output_of(self.graph)) for s in self.live.of.get(operand, ())}
        inputs = (node for node in self.graph.find_nodes(op="placeholder") if self.live.of.get(node) and has_fixed_layout(node))
        return frozenset(s for node in inputs for s in self.live.of[node] if s.tier.on_host and s not in returned)

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The Schedule with its least Ground, as arrays."""
        return Numbers.of(self, self._least_ground)

    @functools.cached_property
    def table(self) -> Table | None:
        """The Schedule as the evaluator reads it; None where that is not built."""
        core = library()
        return None if core is None else Table(core, self, self.numbers, never=NEVER, far=_FAR, crumbs=_CRUMBS)

    @property
    def forward(self) -> Schedule:
        """A Schedule of a graph whose forward half is this one's, with the same Storages."""
        return self

    @property
    def n_events(self) -> int:
        return len(self.events)

    def fixed_bytes(self, resident: frozenset[str] = frozenset()) -> int:
        """Device bytes of inputs, with those of `resident` there too."""
        return sum(s.n_bytes for s in self._fixed_with(resident))

    def _fixed_with(self, resident: frozenset[str]) -> frozenset[Storage]:
        return self.fixed | frozenset(self.inputs[name] for name in resident if name in self.inputs)

    @functools.cached_property
    def inputs(self) -> dict[str, Storage]:
        """The inputs by name."""
        return {s.name: s for s in self.live.first if s.is_input}

    @functools.cached_property
    def position(self) -> dict[int, int]:
        """The number of each event by its node index."""
        return {event.index: i for i, event in enumerate(self.events)}

    @functools.cached_property
    def workspace(self) -> Bytes:
        """Bytes that each event needs for itself."""
        return np.array([event.workspace_bytes for event in self.events], dtype=np.int64)

    def scan(self, budget_bytes: int | None, kept: frozenset[str] = frozenset(), swapped: frozenset[str] = frozenset(),
             resident: frozenset[str] = frozenset(), to_the_end: bool = True, ground: Ground | None = None) -> Scan:
        """The scan under `budget_bytes` of device memory, the inputs that lie there included; unlimited when None.

        `kept`: names of values that must not leave the device; `swapped`: of values that must, until backward reads them; `resident`:
        of inputs that lie on the device besides those the graph has there. The result's peak counts the device inputs too. Unless
        `to_the_end`, a scan that finds no room is cut short there. `ground`: that of `resident`, where it is known.
        """
        ground = ground or self.ground(resident)
        capacity = NEVER if budget_bytes is None else budget_bytes - ground.fixed_bytes
        if self.table is not None:
            found = Scan(evaluated=self.table.scan(ground, capacity, kept, swapped, to_the_end))
        else:
            stay, leave = (frozenset(s for s in self.live.first if s.name in names) if names else frozenset() for names in (kept, swapped))
            found = Spiller(self.live, self.events, capacity, ground, stay, leave).run(to_the_end)
        found.peak_bytes += ground.fixed_bytes
        return found

    def least_bytes(self, ground: Ground, kept: frozenset[str] = frozenset(), spared: Bytes | None = None) -> int:
        """A bound: under less device memory, the inputs fixed there included, no scan finds room, with the values named `kept` staying.

        That is at each event what it touches and needs itself, what is kept, and in backward what is returned and was there since. `spared`: what
        an event may need less after all.
        """
        if self.table is not None:
            return ground.fixed_bytes + self.table.least_bytes(ground, kept, spared)
        beside = np.zeros(len(self.events) + 1, dtype=np.int64)
        border = bisect_left(self.events, ground.border, key=lambda event: event.index)
        for storage, at in self._touches_of_staying(kept).items():
            if storage in ground.fixed:
                continue
            at = at if storage.name in kept else at[bisect_left(at, border) :]
            for after, before in pairwise((*at, len(self.events)) if storage in ground.returned else at):
                beside[after + 1] += storage.n_bytes
                beside[before] -= storage.n_bytes
        needed = ground.touched_bytes + self.workspace + np.cumsum(beside[:-1]) - (0 if spared is None else spared)
        return ground.fixed_bytes + (int(needed.max()) if self.events else 0)

    @functools.cached_property
    def donable_bytes(self) -> Bytes:
        """Bytes that each event would need less if its result took the place of an operand, and does not: of one that others read too."""
        return np.array([event.own_bytes if self._could_take_a_place(event) else 0 for event in self.events], dtype=np.int64)

    def _could_take_a_place(self, event: Event) -> bool:
        return event.workspace_bytes >= 0 and takes_a_place(self.live.nodes[event.index])

    def _touches_of_staying(self, kept: frozenset[str]) -> dict[Storage, list[int]]:
        """The numbers of the events that touch each Storage that is returned or named in `kept`."""
        if kept not in self._staying:
            touches: dict[Storage, list[int]] = {}
            for i, touched in enumerate(self._least_ground.touches):
                for storage, _ in touched:
                    if storage in self._least_ground.returned or storage.name in kept:
                        touches.setdefault(storage, []).append(i)
            self._staying[kept] = touches
        return self._staying[kept]

    def ground(self, resident: frozenset[str] = frozenset()) -> Ground:
        """The Ground with those inputs fixed on the device besides the ones the graph has there."""
        fixed, least = self._fixed_with(resident), self._least_ground
        more = fixed - least.fixed
        return replace(
            least, fixed=fixed, fixed_bytes=sum([s.n_bytes for s in fixed]), read=lambda: least._read.without(more, self.position))

    @functools.cached_property
    def _least_ground(self) -> Ground:
        reads = [tuple([s for s in event.reads if s not in self.fixed]) for event in self.events]
        uses: dict[Storage, list[int]] = {}
        touches = []
        upcoming: dict[Storage, int] = {}
        for event, storages in zip(reversed(self.events), reversed(reads)):
            touches.append(tuple([(s, upcoming.get(s, NEVER)) for s in (*storages, *event.makes)]))
            for storage in storages:
                uses.setdefault(storage, []).append(event.index)
                upcoming[storage] = event.index
        for indices in uses.values():
            indices.reverse()
        touches.reverse()
        results = [v for side in returned(self.graph) for v in side if isinstance(v, fx.Node)]
        # Tangents are the caller's: like what is returned, they stay to the end.
        kept = {s for v in results for s in self.live.of.get(v, ()) if not s.is_input} | {s for s in self.live.first if s.is_tangent}
        border = self.graph.find_nodes(op="call_function", target=ops.backward)
        at_border = self.live.index[border[0]] if border else NEVER
        leaves = [tuple([s for s, next_use in touched if next_use == NEVER and s not in kept]) for touched in touches]
        fixed_bytes = sum(s.n_bytes for s in self.fixed)
        read = Read(reads, touches, leaves, uses)
        return Ground(self.fixed, fixed_bytes, frozenset(kept), at_border, lambda: read)
