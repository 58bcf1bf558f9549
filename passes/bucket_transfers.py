"""bucket-transfers: small parameter copies that follow each other start together, so that the runtime may move them as one.

A copy of 4 MiB reaches 96 % of a bus's rate and one of 16 KiB a few percent (DESIGN.md 4). Copies of parameters, each smaller than
`bytes`, that are neighbours in the order of h2d are grouped until a group has `bytes`: the later starts move up behind the first.
Nothing else changes, every copy keeps its own node and its own wait, so verifier, liveness and executor need no new rule.

Limits. A start moves only as far as its bytes fit below the graph's own peak at every node in between: the pass never raises the
peak, and under a tight budget it may find nothing to do. It says which copies may be one; making them one is the runtime's matter and
needs their host blocks side by side (a pinned arena laid out by first use). Values that were swapped out are left alone: they
return from blocks of their own. A group never crosses a larger copy, which would delay it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.fx as fx

from fxoffload import ops
from fxoffload.liveness import Liveness, live_curve, liveness
from fxoffload.pipeline import Context, Pass

# Where the rate of pinned copies levels off on the measured hosts: 54.8 of 55 GB/s (DESIGN.md 4, h200.json).
GROUP_BYTES = 16 << 20


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with the starts of small parameter copies next to each other where they fit. Option `bytes`: a group's size."""
    live = liveness(graph, ctx.bounds)
    room = _Room(live, ctx.workspace)
    limit = int(ctx.options.get("bytes", GROUP_BYTES))
    group: list[fx.Node] = []
    group_bytes = 0
    for node, n_bytes in _parameter_copies(live):
        if group and group_bytes < limit and n_bytes < limit and room.take(live.index[group[0]], live.index[node], n_bytes):
            group[-1].append(node)
            group.append(node)
            group_bytes += n_bytes
            continue
        group, group_bytes = ([node], n_bytes) if n_bytes < limit else ([], 0)
    return graph


def _parameter_copies(live: Liveness) -> Iterator[tuple[fx.Node, int]]:
    """Every start of a copy to the device with its bytes; one that is no parameter's counts as too large to join a group."""
    for node in live.nodes:
        if node.target is ops.swap_in:
            is_input = node.args[0].op == "placeholder"  # type: ignore[union-attr]
            yield node, sum(s.n_bytes for s in live.defined_at(node)) if is_input else 1 << 62


class _Room:
    """Device bytes alive at every node, and whether more fit below their peak."""

    def __init__(self, live: Liveness, workspace: Callable[[fx.Node], int]) -> None:
        self._alive = list(live_curve(live, workspace=workspace).total_bytes)
        self._peak = max(self._alive, default=0)

    def take(self, first: int, end: int, n_bytes: int) -> bool:
        """True, and the bytes are taken, when they fit at every node from `first` up to `end`."""
        if max(self._alive[first:end], default=0) + n_bytes > self._peak:
            return False
        for i in range(first, end):
            self._alive[i] += n_bytes
        return True


PASS = Pass("bucket-transfers", run, requires=frozenset({"lowered", "awaited"}), options={"bytes": GROUP_BYTES})
