"""A scan's loads and spills in the words of a Plan, and what a value is on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import ops
from .buckets import transfers_of
from .effects import Tier
from .graph import Bounds, info, name_of
from .liveness import Liveness, base_nodes
from .plans import Bucket, Decision, Gather, Sink, SwapIn, SwapOut
from .spill import Load, Scan


def decisions_of(live: Liveness, scan: Scan, tier: Tier, overlaps: bool = True) -> tuple[Decision, ...]:
    """The scan's loads, spills and buckets as decisions by canonical name. Without overlap a copy to the host ends where it starts."""
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
    return (*(decision for _, decision in made), *_buckets(scan))


def _buckets(scan: Scan) -> tuple[Bucket, ...]:
    numbers: dict[str, int] = {}
    copies: dict[Load, tuple[str, str]] = {}
    for load in sorted(scan.loads, key=lambda load: load.before):
        name = load.storage.name
        copies[load] = name, f"{name}@{numbers.setdefault(name, 0)}"
        numbers[name] += 1
    channel = transfers_of(sorted(scan.loads, key=lambda load: (load.start, load.before)))
    return as_buckets([[copies[load] for load in members] for members in channel if len(members) > 1])


def as_buckets(groups: Sequence[Sequence[tuple[str, str]]]) -> tuple[Bucket, ...]:
    """A Bucket for each group of copies, given by the names of their source and of themselves.

    One order for all: what backward reads in another order than forward lies side by side on the host as forward reads it.
    """
    rank = {source: i for i, source in enumerate(dict.fromkeys(source for group in groups for source, _ in group))}
    return tuple(Bucket(tuple(copy for _, copy in sorted(group, key=lambda one: rank[one[0]]))) for group in groups)


def host_value(fake: Any, bounds: Bounds, host: torch.device) -> object:
    """The fake value of a copy of `fake` on the `host`, one for all copies: a search makes the same ones again and again."""
    def copied() -> object:
        with fake.fake_mode:
            return ops.swap_out(fake, host, "pinned")

    return bounds.once(copied, ops.swap_out, fake, host)
