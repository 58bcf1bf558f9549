"""plan-buckets: which small parameter copies come to the device as one, by the rule of fxoffload/buckets.py.

Runs on a lowered graph whose starts and waits are where they will stay.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch.fx as fx

from fxoffload import ops
from fxoffload.buckets import GROUP_BYTES, Copy, groups_of
from fxoffload.graph import has_fixed_layout, info, name_of
from fxoffload.liveness import Liveness, live_curve, liveness
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Bucket
from fxoffload.swaps import as_buckets


def run(graph: fx.Graph, ctx: Context) -> tuple[Bucket, ...]:
    """A Bucket for every group of two and more. Option `bytes`: a group's size, and what a copy in it is smaller than."""
    live = liveness(graph, ctx.bounds)
    copies = dict(_copies(live))
    starts = list(copies)
    alive = np.array(live_curve(live, workspace=ctx.workspace).total_bytes, dtype=np.int64)
    groups = groups_of(copies.values(), alive, int(ctx.options.get("bytes", GROUP_BYTES)))
    return as_buckets([[(name_of(starts[i].all_input_nodes[0]), name_of(_ready(starts[i]))) for i in group] for group in groups])


def _copies(live: Liveness) -> Iterator[tuple[fx.Node, Copy]]:
    """Every copy to the device in the order of their starts, which is their order on the channel."""
    for start, node in enumerate(live.nodes):
        if node.target is not ops.swap_in:
            continue
        (storage,) = live.defined_at(node)
        last = live.last[storage]
        end = last if live.nodes[last].target is ops.release else last + 1
        source = node.args[0]
        assert isinstance(source, fx.Node)
        halves = {i > live.border for i in (start, live.index[_ready(node)], last)}
        joins = source.op == "placeholder" and has_fixed_layout(source) and storage not in live.escapes and len(halves) == 1
        kind = (info(source).tier, halves.pop()) if joins and storage.n_bytes else None
        yield node, Copy(start, end, storage.n_bytes, kind)


def _ready(start: fx.Node) -> fx.Node:
    (ready,) = (user for user in start.users if user.target is ops.wait)
    return ready


PASS = Pass("plan-buckets", run, requires=frozenset({"lowered", "awaited"}), options={"bytes": GROUP_BYTES})
