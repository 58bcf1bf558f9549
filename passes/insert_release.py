"""insert-release: every device Storage that the graph makes and does not return ends in one `release`, right after its last use.

The end of a borrow is a use: a Storage that a Transfer reads is released after the wait, not after the start. A tuple's elements
are released one by one; an element that no getitem takes has no name and dies with the tuple, at its last getitem.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.effects import Tier
from fxoffload.graph import INFO, NodeInfo, call, name_of
from fxoffload.liveness import base_nodes, liveness
from fxoffload.pipeline import Context, Pass


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with its releases."""
    live = ctx.live or liveness(graph, ctx.bounds)
    ends: dict[int, list[fx.Node]] = {}
    for storage, node in base_nodes(live).items():
        if storage.tier is Tier.DEVICE and storage not in live.escapes:
            ends.setdefault(live.last[storage], []).append(_awaited(node))
    for index, values in ends.items():
        for value in reversed(values):
            with graph.inserting_after(live.nodes[index]):
                release = call(graph, ops.release, value)
            release.meta[INFO] = NodeInfo(f"{name_of(value)}/release")
    return graph


def _awaited(node: fx.Node) -> fx.Node:
    """What a transfer gives once it is over: the transfer itself must not be read across the border."""
    waits = [user for user in node.users if user.target is ops.wait]
    return waits[0] if waits else node


PASS = Pass(
    "insert-release",
    run,
    requires=frozenset({"functional", "lowered", "awaited"}),
    provides=frozenset({"released"}),
)
