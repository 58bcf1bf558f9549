"""assign-offsets: every value that the graph makes on the device and does not return gets a place in one arena.

Values that are there at the same time lie apart, so fragmentation cannot decide whether a plan fits: the arena's size is known before
anything runs. With the option `page_bytes`, of a device that can map the same page at several addresses, a large value lies in whole pages,
if need be in several pieces, and the arena is no larger than what is there at once. What an op makes itself and is soon read stays where it is. A result of an elementwise op takes the place of an operand that
is read there for the last time. Offsets are in bytes, for the largest sizes; a view lies where its source does.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.donation import donations
from fxoffload.graph import set_info
from fxoffload.liveness import liveness
from fxoffload.memory_map import lifetime, placeable, worth_moving
from fxoffload.offsets import Lifetime, pack
from fxoffload.pages import place
from fxoffload.pipeline import Context, Pass


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with its offsets noted."""
    live = ctx.live or liveness(graph, ctx.bounds)
    found = placeable(live)
    moved = worth_moving(live, found, ctx.workspace)
    placed = {storage: node for storage, node in found.items() if storage in moved}
    given = donations(live, placed)
    ends = {storage: lifetime(live, storage).end for storage in placed}
    first = {storage: storage for storage in placed}
    for taker in given:  # in the order they are made: a chain of donations is one block, from the first that lies there to the last
        first[taker] = first[given[taker]]
        ends[first[taker]] = max(ends[first[taker]], ends[taker])
    blocks = [storage for storage in placed if first[storage] is storage]
    lifetimes = [Lifetime(live.first[one], ends[one], one.n_bytes) for one in blocks]
    page_bytes = int(ctx.options.get("page_bytes", 0))
    places = place(lifetimes, page_bytes)[0] if page_bytes else [((offset, 0),) for offset in pack(lifetimes)[0]]
    place_of = dict(zip(blocks, places, strict=True))
    for storage, node in placed.items():
        runs = place_of[first[storage]]
        set_info(node, offset=runs[0][0], pages=runs if len(runs) > 1 else ())
    return graph


PASS = Pass(
    "assign-offsets",
    run,
    requires=frozenset({"functional", "lowered", "awaited", "released"}),
    provides=frozenset({"placed"}),
    options={"page_bytes": 0},
)
