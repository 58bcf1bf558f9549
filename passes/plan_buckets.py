"""plan-buckets: which small parameter copies come to the device as one, under the graph's own peak.

Every copy costs an allocation, an event, a stream's wait and the host's time to issue it, and a bus reaches 97 % of its rate at 4 MiB
but 31 % at 64 KiB (machines/h200.json). So copies of parameters, each smaller than `bytes`, that follow each other on the channel
are grouped until a group has `bytes`. Runs on a lowered graph whose starts and waits are where they will stay.

A group's members are on one host tier, and start, end and are last read on one side of the border: the saved set stays what it is.
All of it is on the device from its first member's start to its last member's last use; where that is more than the graph's own peak, the
group ends. A later member overtakes the copies between its start and the first member's, larger ones or swapped values that
return; no such copy is held up by more than `_HELD_UP` of its own seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from fxoffload import ops
from fxoffload.effects import Tier
from fxoffload.graph import info, name_of
from fxoffload.layout import padded
from fxoffload.liveness import Liveness, live_curve, liveness
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Bucket

# Where the rate of pinned copies levels off: 54.9 of 55.3 GB/s (machines/h200.json).
GROUP_BYTES = 16 << 20
# A quarter of what overlap.py plans the seconds of every copy too long by.
_HELD_UP = 1 / 8


def run(graph: fx.Graph, ctx: Context) -> tuple[Bucket, ...]:
    """A Bucket for every group of two and more. Option `bytes`: a group's size, and what a copy in it is smaller than."""
    live = liveness(graph, ctx.bounds)
    search = _Search(_Room(live, ctx.workspace), int(ctx.options.get("bytes", GROUP_BYTES)))
    for copy in _copies(live):
        search.take(copy)
    search.end()
    # One order for all: what backward reads in another order than forward lies side by side on the host as forward reads it.
    sources = dict.fromkeys(copy.source for group in search.found for copy in group)
    rank = {source: i for i, source in enumerate(sources)}
    return tuple(Bucket(tuple(name_of(one.ready) for one in sorted(group, key=lambda c: rank[c.source]))) for group in search.found)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy to the device: its source, its wait, and its Storage, which counts from node `start` up to, not including, node `end`.

    `kind`: what members of one bucket have in common, host tier and half of the step; None for what can be in no bucket.
    """

    source: fx.Node
    ready: fx.Node
    start: int
    end: int
    n_bytes: int
    kind: tuple[Tier, bool] | None


def _copies(live: Liveness) -> Iterator[_Copy]:
    """Every copy to the device in the order of their starts, which is their order on the channel."""
    for start, node in enumerate(live.nodes):
        if node.target is not ops.swap_in:
            continue
        (storage,) = live.defined_at(node)
        (ready,) = (user for user in node.users if user.target is ops.wait)
        last = live.last[storage]
        end = last if live.nodes[last].target is ops.release else last + 1
        source = node.args[0]
        assert isinstance(source, fx.Node)
        halves = {i > live.border for i in (start, live.index[ready], last)}
        joins = source.op == "placeholder" and _is_static(source) and storage not in live.escapes and len(halves) == 1
        kind = (info(source).tier, halves.pop()) if joins and storage.n_bytes else None
        yield _Copy(source, ready, start, end, storage.n_bytes, kind)


def _is_static(node: fx.Node) -> bool:
    value = node.meta["val"]
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


class _Search:
    """The groups `found` so far, and the one that is open."""

    def __init__(self, room: _Room, limit_bytes: int) -> None:
        self.found: list[list[_Copy]] = []
        self._room, self._limit_bytes = room, limit_bytes
        self._group: list[_Copy] = []
        self._group_bytes = 0
        # What may still join: it would go ahead of the copies that the group has passed.
        self._ahead_bytes = 0.0

    def take(self, copy: _Copy) -> None:
        """The next copy on the channel joins the group, is passed by it, or begins another."""
        if copy.kind is None or copy.n_bytes >= self._limit_bytes:
            self._ahead_bytes = min(self._ahead_bytes, copy.n_bytes * _HELD_UP)
            return
        if not self._has_place(copy):
            self.end()
            self._ahead_bytes = float("inf")
        self._group.append(copy)
        self._group_bytes += copy.n_bytes
        self._ahead_bytes -= copy.n_bytes

    def end(self) -> None:
        """The open group is one of those found, if it is more than one copy."""
        if len(self._group) > 1:
            self._room.take(self._group)
            self.found.append(self._group)
        self._group, self._group_bytes = [], 0

    def _has_place(self, copy: _Copy) -> bool:
        if not self._group or self._group[0].kind != copy.kind:
            return False
        fits = self._group_bytes < self._limit_bytes and copy.n_bytes <= self._ahead_bytes
        return fits and self._room.holds([*self._group, copy])


class _Room:
    """Device bytes alive at every node, and whether a group as one Storage stays below their peak."""

    def __init__(self, live: Liveness, workspace: Callable[[fx.Node], int]) -> None:
        self._alive = np.array(live_curve(live, workspace=workspace).total_bytes, dtype=np.int64)
        self._peak_bytes = int(self._alive.max(initial=0))

    def holds(self, group: Sequence[_Copy]) -> bool:
        """True when the group's bytes fit at every node from its first start to its last end."""
        first, end, more = _more_bytes(group)
        return int((self._alive[first:end] + more).max()) <= self._peak_bytes

    def take(self, group: Sequence[_Copy]) -> None:
        """The group's bytes are there from now on."""
        first, end, more = _more_bytes(group)
        self._alive[first:end] += more


def _more_bytes(group: Sequence[_Copy]) -> tuple[int, int, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """First node and end of a group, and the bytes by which one Storage is more than the members' own, node by node."""
    first, end = min(copy.start for copy in group), max(copy.end for copy in group)
    more = np.full(end - first, sum(padded(copy.n_bytes) for copy in group), dtype=np.int64)
    for copy in group:
        more[copy.start - first : copy.end - first] -= copy.n_bytes
    return first, end, more


PASS = Pass("plan-buckets", run, requires=frozenset({"lowered", "awaited"}), options={"bytes": GROUP_BYTES})
