"""assign-offsets: every value that the graph makes on the device and does not return gets a place in one arena.

Values that are there at the same time lie apart, so fragmentation cannot decide whether a plan fits: the arena's size is known before
anything runs. Offsets are in bytes, for the largest sizes; a view lies where its source does.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.graph import set_info
from fxoffload.liveness import liveness
from fxoffload.memory_map import lifetime, placeable
from fxoffload.offsets import pack
from fxoffload.pipeline import Context, Pass


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with its offsets noted."""
    live = liveness(graph, ctx.bounds)
    placed = placeable(live)
    offsets, _ = pack([lifetime(live, storage) for storage in placed])
    for node, offset in zip(placed.values(), offsets, strict=True):
        set_info(node, offset=offset)
    return graph


PASS = Pass(
    "assign-offsets",
    run,
    requires=frozenset({"functional", "lowered", "awaited", "released"}),
    provides=frozenset({"placed"}),
)
