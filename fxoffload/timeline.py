"""When each node of a lowered Step runs on its channel: stalls included, so its end is never before a channel's busy seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from . import ops
from .cost import node_s
from .effects import Channel
from .graph import Bounds, name_of
from .machine import COPY_ISSUES, Machine


@dataclass(frozen=True, slots=True)
class Span:
    """A node at work: node index, channel, start and end in seconds of the step."""

    index: int
    name: str
    channel: Channel
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`spans`: nodes that take time, in order of start per channel. `issued_s[i]`: when compute reaches node i.

    `stalled_s`: seconds that compute waits for transfers; `waits`: for how long at which node index.
    """

    spans: tuple[Span, ...]
    issued_s: tuple[float, ...]
    end_s: float
    stalled_s: float
    waits: Mapping[int, float]

    def busy_s(self, channel: Channel) -> float:
        """Seconds the channel works."""
        return sum(span.end_s - span.start_s for span in self.spans if span.channel is channel)


def timeline(graph: fx.Graph, bounds: Bounds, machine: Machine) -> Timeline:
    """The schedule of `graph`: every channel runs in order, a transfer starts when compute reaches it and its channel is free, and
    compute stops at a `wait` until that transfer's end. A device that overlaps starts nothing before the host has issued it, op by
    op; without overlap everything runs one after the other."""
    now = issued_s = 0.0
    dispatch_s = machine.dispatch_s or 0.0 if machine.overlaps else 0.0
    free: dict[Channel, float] = {}
    done: dict[fx.Node, float] = {}
    spans: list[Span] = []
    issued: list[float] = []
    waits: dict[int, float] = {}
    for i, node in enumerate(graph.nodes):
        issued.append(now)
        channel, seconds = node_s(node, bounds, machine)
        if node.target is ops.wait and node.args[0] in done:
            ready = done[node.args[0]]  # type: ignore[index]
            if ready > now:
                waits[i], now = ready - now, ready
            continue
        if not seconds:
            continue
        issued_s += dispatch_s * (COPY_ISSUES if channel in (Channel.H2D, Channel.D2H) else 1)
        now = max(now, issued_s)
        start = max(now, free.get(channel, 0.0))
        end = start + seconds
        spans.append(Span(i, name_of(node), channel, start, end))
        free[channel] = done[node] = end
        if channel is Channel.COMPUTE or not machine.overlaps:
            now = end
    end_s = max([now, *free.values()])
    return Timeline(tuple(spans), tuple(issued), end_s, sum(waits.values()), waits)
