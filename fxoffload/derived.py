"""Schedules of one graph with this or that computed again, derived from that of the graph with nothing computed again.

A search wants a Schedule for every recipe, and a graph of its own for each takes most of the solver's time. What differs between them is told by
numbers (`derived.cpp`): which nodes are cloned and where (`passes/recompute.py`), what aliases what then (`liveness.py`), what events read and make
(`spill.py`), and whose place a result takes (`donation.py`). The graph itself is made only of what is chosen, or refused.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch.fx as fx

from . import ops
from .attention import FORWARD, kernel_named_in
from .donation import Donated, takes_a_place
from .effects import Tier
from .errors import VerifyError
from .graph import Bounds, Names, is_random, name_of, returned
from .liveness import Liveness, Storage, is_view, liveness, no_workspace, view_source
from .machine import Machine
from .native import SWITCH, RowsRead, library, rows_of
from .numbers import Ints, Longs, Numbers, Rows, ints, mask
from .overlap import Costs, Rates
from .plans import Decision, Recompute
from .spill import NEVER, Bytes, Event, Ground, Read, Schedule, is_event
from .workspace import Workspace

# What a node is, as derived.cpp has it.
_CALL, _ALWAYS, _VIEW, _ELEMENT, _EVENT, _DRAWS = (1 << i for i in range(6))
# Which Storages of its tuple an element looks into, where it is not the one of that place.
_ALL, _NONE = -1, -2

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


class _Read(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("n_nodes", "border", "n_storages", "n_ranks", "never", "n_results")),
        *((name, RowsRead) for name in ("operands", "seen", "makes", "givers")),
        *((name, _POINTER) for name in ("source", "element", "results", "flags", "workspace_bytes")),
        *((name, _POINTER) for name in ("n_bytes", "rank", "counts", "is_input", "is_tangent", "fixed")),
    )


class _Column(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("n_bytes", _LONG))


_COLUMNS = {
    **dict.fromkeys(("index", "own_bytes", "workspace_bytes", "read_bytes", "next_use"), np.int64),
    **dict.fromkeys(("rank", "made_by", "nodes", "storages"), np.int32), "returned": np.uint8,
    **dict.fromkeys((f"{name}{part}" for name in ("makes", "every", "reads", "touches", "leaves", "uses") for part in ("_at", "")), np.int32),
}


@dataclass(frozen=True, eq=False)
class Base:
    """A graph in which nothing is computed again, with its Schedule. `storages`: its own, by number, and their clones; `known`: numbers of nodes by
    canonical name; `rated`: rates of the Schedule, with what they are of; `held`: what the pointers of `read` point to."""

    core: ctypes.CDLL
    schedule: Schedule
    storages: tuple[Storage, ...]
    known: dict[str, int]
    read: _Read
    held: tuple[Any, ...]
    rated: list[tuple[tuple[object, ...], Rates]] = field(default_factory=list)

    @staticmethod
    def of(schedule: Schedule, workspace: Callable[[fx.Node], int]) -> Base | None:
        """None where no Schedule can be derived: without a compiler, or where more than is known here decides what an op needs for itself."""
        core, nodes, live = library(), schedule.live.nodes, schedule.live
        elements = [_element(node, live) for node in nodes]
        if core is None or live.border >= len(nodes) or nodes[-1].op != "output" or None in elements or not _is_known(nodes, workspace):
            return None
        numbers, index = schedule.numbers, live.index
        number, clones = {storage: i for i, storage in enumerate(numbers.storages)}, _clones(live)
        storages = (*numbers.storages, *(clones.get(s, s) for s in numbers.storages))
        rank = {name: i for i, name in enumerate(sorted({storage.name for storage in storages}))}
        givers = [workspace.givers(node) if isinstance(workspace, Donated) else [] for node in nodes]
        operands, seen, makes = [node.all_input_nodes for node in nodes], [_seen(node) for node in nodes], live.makes
        rows = (
            Rows.told(operands, index.__getitem__), Rows.told(seen, index.__getitem__), Rows.told(makes, number.__getitem__),
            Rows.told(givers, index.__getitem__))
        results = ints(index[value] for value in _results(nodes[-1]))
        columns = (
            ints(index[view_source(node)] if is_view(node) or _is_element(node) else -1 for node in nodes), ints(one or 0 for one in elements),
            results, np.array([_flags(node) for node in nodes], dtype=np.uint8), _workspace_bytes(schedule, workspace, givers),
            numbers.n_bytes, ints(rank[storage.name] for storage in storages),
            mask(s.is_input or s.tier is Tier.DEVICE for s in numbers.storages), numbers.is_input, numbers.is_tangent,
            mask(s in schedule.fixed for s in numbers.storages))
        read = _Read(
            len(nodes), live.border, len(number), len(rank), NEVER, len(results), *map(rows_of, rows), *(column.ctypes.data for column in columns))
        return Base(core, schedule, storages, {name_of(node): i for i, node in enumerate(nodes)}, read, (rows, columns))

    def derived(self, decisions: Sequence[Decision], graph: Callable[[], fx.Graph], bounds: Bounds) -> Derived | None:
        """The Schedule with what they decide computed again; None where something of that draws. `graph`: makes the graph."""
        again, columns = np.zeros(len(self.schedule.live.nodes), dtype=np.uint8), (_Column * len(_COLUMNS))()
        again[[self.known[one.value] for one in decisions if isinstance(one, Recompute)]] = 1
        made = self.core.fxo_derive(ctypes.addressof(self.read), again.ctypes.data, columns)
        if made is None:
            raise AssertionError(f"the evaluator: {self.core.fxo_derive_trouble().decode()}")
        try:
            if self.core.fxo_derive_draws(made):
                return None
            told = {name: _copied(one, dtype) for (name, dtype), one in zip(_COLUMNS.items(), columns, strict=True)}
        finally:
            self.core.fxo_derive_drop(made)
        return Derived(self, told, graph, bounds)

    def rates(self, bounds: Bounds, machine: Machine, swap_tier: Tier, bucket_bytes: int, known: Costs | None) -> Rates:
        """What `Rates.of` gives of the Schedule, made once."""
        of = bounds, machine, swap_tier, bucket_bytes, known
        for others, rates in self.rated:
            if all(map(operator.is_, of, others)):
                return rates
        self.rated.append((of, Rates.of(self.schedule, bounds, machine, swap_tier, bucket_bytes, known)))
        return self.rated[-1][1]


class Derived(Schedule):
    """A Schedule of which numbers are known before its graph is made. Its Storages are those of its Base, and clones of them: where the graph is made
    later, its Liveness is told in these (`live`), so that what was found on numbers is true of it.

    `nodes`: of each event the number of its node in the Base's graph, a clone's origin; `every`: all that each event reads.
    """

    base: Base
    nodes: Ints
    every: Rows
    _graph: Callable[[], fx.Graph]
    _bounds: Bounds

    def __init__(self, base: Base, told: dict[str, Any], graph: Callable[[], fx.Graph], bounds: Bounds) -> None:
        of_base = base.schedule.numbers
        at, columns = told["storages"] % len(of_base.storages), ("index", "own_bytes", "workspace_bytes", "read_bytes", "next_use")
        rows = {name: Rows(told[f"{name}_at"], told[name]) for name in ("makes", "every", "reads", "touches", "leaves", "uses")}
        numbers = Numbers(
            tuple(map(base.storages.__getitem__, told["storages"].tolist())), of_base.border, of_base.graph_border, of_base.before_border,
            of_base.border_event, n_bytes=of_base.n_bytes[at], rank=told["rank"], tier=of_base.tier[at], made_by=told["made_by"],
            is_input=of_base.is_input[at], is_tangent=of_base.is_tangent[at], returned=told["returned"], mergeable=of_base.mergeable[at],
            makes=rows["makes"], reads=rows["reads"], touches=rows["touches"], leaves=rows["leaves"], uses=rows["uses"],
            **{name: told[name] for name in columns})
        # Past the frozen dataclass that it is: what that has as fields is made here when it is asked for.
        vars(self).update(
            base=base, numbers=numbers, nodes=told["nodes"], every=rows["every"], fixed=base.schedule.fixed, inputs=base.schedule.inputs,
            mergeable=base.schedule.mergeable, workspace=numbers.workspace_bytes, _graph=graph, _bounds=bounds, _staying={})

    __eq__, __hash__ = object.__eq__, object.__hash__

    @functools.cached_property
    def graph(self) -> fx.Graph:  # type: ignore[override]
        return self._graph()

    @functools.cached_property
    def live(self) -> Liveness:  # type: ignore[override]
        """The Liveness of the graph, with the Storages of the numbers."""
        return _with_storages(liveness(self.graph, self._bounds), self.numbers.storages)

    @functools.cached_property
    def events(self) -> list[Event]:  # type: ignore[override]
        numbers = self.numbers
        columns = (one.tolist() for one in (numbers.index, numbers.workspace_bytes, numbers.own_bytes))
        return [
            Event(index, reads, makes, workspace_bytes, own_bytes)
            for index, workspace_bytes, own_bytes, reads, makes in zip(*columns, self._rows(self.every), self._rows(numbers.makes), strict=True)]

    @property
    def forward(self) -> Schedule:
        return self.base.schedule

    @property
    def n_events(self) -> int:
        return len(self.nodes)

    @functools.cached_property
    def position(self) -> dict[int, int]:
        """The number of each event by its node index."""
        return {index: i for i, index in enumerate(self.numbers.index.tolist())}

    @functools.cached_property
    def donable_bytes(self) -> Bytes:
        """See Schedule."""
        takes = np.array([takes_a_place(node) for node in self.base.schedule.live.nodes], dtype=np.bool_)
        return np.where(takes[self.nodes] & (self.workspace >= 0), self.numbers.own_bytes, 0)

    @functools.cached_property
    def _least_ground(self) -> Ground:
        numbers = self.numbers
        kept = frozenset(numbers.storages[i] for i in numbers.returned.nonzero()[0].tolist())
        return Ground(self.fixed, sum(s.n_bytes for s in self.fixed), kept, numbers.border, self._read)

    def _read(self) -> Read:
        numbers, index = self.numbers, self.numbers.index.tolist()
        uses = ([index[i] for i in row] for row in _lists(numbers.uses.at, numbers.uses.of))
        next_uses = _lists(numbers.touches.at, numbers.next_use)
        return Read(
            self._rows(numbers.reads), [tuple(zip(*row, strict=True)) for row in zip(self._rows(numbers.touches), next_uses, strict=True)],
            self._rows(numbers.leaves), {storage: row for storage, row in zip(numbers.storages, uses, strict=True) if row})

    def _rows(self, rows: Rows) -> list[tuple[Storage, ...]]:
        storage = self.numbers.storages.__getitem__
        return [tuple(map(storage, row)) for row in _lists(rows.at, rows.of)]

    def rates(self, bounds: Bounds, machine: Machine, swap_tier: Tier, bucket_bytes: int, known: Costs | None) -> Rates:
        """What `Rates.of` gives: an event costs what it does in the Base."""
        of_base, position = self.base.rates(bounds, machine, swap_tier, bucket_bytes, known), self.base.schedule.position
        events = np.full(len(self.base.schedule.live.nodes), -1)
        events[list(position)] = np.arange(len(position))
        at = events[self.nodes]
        sinks = [(int(i), of_base.sink_s[int(self.nodes[i])]) for i in np.isin(self.nodes, list(of_base.sink_s)).nonzero()[0]]
        looked_up = {
            name: sorted((int(i), seconds) for event, seconds in reads for i in (at == event).nonzero()[0]) for name, reads in of_base.looked_up.items()}
        return replace(
            of_base, event_s=np.array(of_base.event_s)[at].tolist(), sink_s={int(self.numbers.index[i]): seconds for i, seconds in sinks},
            looked_up=looked_up)


def _is_known(nodes: Iterable[fx.Node], workspace: Callable[[fx.Node], int]) -> bool:
    """Whether what nodes need for themselves does not depend on who reads them, but for what Donated says."""
    if isinstance(workspace, Workspace):
        return all(kernel_named_in(node) is not None for node in nodes if node.target in FORWARD)
    return workspace is no_workspace or isinstance(workspace, Donated)


def _is_element(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _element(node: fx.Node, live: Liveness) -> int | None:
    """Which of its tuple's Storages an element looks into, 0 for other nodes; None where their places do not tell."""
    if not _is_element(node):
        return 0
    found, every = live.of[node], live.of[view_source(node)]
    if len(node.all_input_nodes) > 1:
        return None
    if found == every:
        return _ALL
    if not found:
        return _NONE
    return every.index(found[0]) if len(found) == 1 else None


def _flags(node: fx.Node) -> int:
    if node.op != "call_function":
        return _EVENT if is_event(node) else 0
    is_free = _is_element(node) and is_view(view_source(node)) or is_view(node) or isinstance(node.meta.get("val"), (tuple, list))
    flags = (_ALWAYS, is_free), (_ELEMENT, _is_element(node)), (_VIEW, is_view(node)), (_EVENT, is_event(node)), (_DRAWS, is_random(node))
    return _CALL | sum(flag for flag, holds in flags if holds)


def _results(output: fx.Node) -> list[fx.Node]:
    return [value for side in returned(output.graph) for value in side if isinstance(value, fx.Node)]


def _seen(node: fx.Node) -> Sequence[fx.Node]:
    """What an event there reads the bytes of: see `spill.events_of`."""
    if node.target is ops.backward:
        return [value for value in returned(node.graph)[0] if isinstance(value, fx.Node)]
    if node.op == "output":
        return _results(node)
    return [value for value in node.args[1:2] if isinstance(value, fx.Node)] if node.target is ops.lookup else node.all_input_nodes


def _workspace_bytes(schedule: Schedule, workspace: Callable[[fx.Node], int], givers: Sequence[Sequence[fx.Node]]) -> Longs:
    """Of every node; with `givers` as if one of them gave its place."""
    found = np.zeros(len(givers), dtype=np.int64)
    for event in schedule.events:
        if isinstance(workspace, Donated) and givers[event.index]:
            found[event.index] = -workspace.spared_bytes(schedule.live.nodes[event.index])
        else:
            found[event.index] = event.workspace_bytes
    return found


def _clones(live: Liveness) -> dict[Storage, Storage]:
    """What a clone makes, by what its origin does in forward."""
    names = Names(live.nodes[0].graph)
    found: dict[Storage, Storage] = {}
    for node, made in zip(live.nodes[: live.border], live.makes):
        if made and node.op == "call_function":
            name = names.fresh(name_of(node), "~")
            found.update((s, Storage(name + s.name[len(name_of(node)) :], s.n_bytes, s.tier, s.kind, False)) for s in made)
    return found


def _copied(column: _Column, dtype: Any) -> Any:
    if not column.n_bytes:
        return np.zeros(0, dtype=dtype)
    return np.frombuffer((ctypes.c_char * column.n_bytes).from_address(column.data), dtype=dtype).copy()


def _lists(at: Ints, of: Ints | Longs) -> list[list[int]]:
    ends, numbers = at.tolist(), of.tolist()
    return [numbers[first:end] for first, end in pairwise(ends)]


def _with_storages(live: Liveness, storages: Sequence[Storage]) -> Liveness:
    """The Liveness with other Storages, number by number. Raises VerifyError where they are not alike."""
    carried = dict(zip(live.first, storages))
    told = ("name", "n_bytes", "tier", "kind", "is_input")
    if len(live.first) != len(storages) or any(getattr(a, one) != getattr(b, one) for a, b in carried.items() for one in told):
        raise VerifyError(f"the graph's values are not those that were derived by numbers; with {SWITCH}=1 none are derived")

    def all_of(row: Iterable[Storage]) -> tuple[Storage, ...]:
        return tuple([carried[storage] for storage in row])

    return Liveness(
        live.nodes, live.index, {node: all_of(row) for node, row in live.of.items()}, list(map(all_of, live.reads)), list(map(all_of, live.makes)),
        {carried[storage]: i for storage, i in live.first.items()}, {carried[storage]: i for storage, i in live.last.items()},
        {carried[storage]: used for storage, used in live.uses.items()}, frozenset(all_of(live.escapes)), live.border)
