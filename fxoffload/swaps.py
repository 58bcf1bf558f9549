"""A scan's loads and spills in the words of a Plan."""

from __future__ import annotations

from .effects import Tier
from .graph import info, name_of
from .liveness import Liveness
from .plans import Decision, Gather, Sink, SwapIn, SwapOut
from .spill import Scan, base_nodes


def decisions_of(live: Liveness, scan: Scan, tier: Tier, overlaps: bool = True) -> tuple[Decision, ...]:
    """The scan's loads and spills as decisions by canonical name. Without overlap a copy to the host ends where it starts."""
    bases, nodes = base_nodes(live), live.nodes
    made: list[tuple[int, Decision]] = []
    for spill in scan.spills:
        base = bases[spill.storage]
        until = max(spill.until, live.index[base])
        after = max(spill.after, live.index[base])
        if not overlaps:
            until = after
        made.append((until, SwapOut(name_of(base), tier, name_of(nodes[after]), name_of(nodes[until]))))
    for load in scan.loads:
        start, before = name_of(nodes[load.start]), name_of(nodes[load.before])
        base = bases[load.storage]
        if load.storage.is_input:
            made.append((load.before, Gather(info(base).fqn or name_of(base), start, before)))
        else:
            made.append((load.before, SwapIn(name_of(base), start, before)))
    for sunk in scan.sinks:
        made.append((sunk.until, Sink(name_of(nodes[sunk.start]).removesuffix("/out"), name_of(nodes[sunk.until]))))
    made.sort(key=lambda pair: pair[0])
    return tuple(decision for _, decision in made)
