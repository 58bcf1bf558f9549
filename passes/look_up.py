"""look-up: the embedding of every Lookup decision becomes a `lookup`, which reads its rows on the host."""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import by_name
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Lookup


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with the plan's lookups."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    for decision in ctx.plan.decisions:
        if isinstance(decision, Lookup):
            node = nodes[decision.value]
            node.target, node.args, node.kwargs = ops.lookup, (*node.args[:2], ctx.device), {}
    return graph


PASS = Pass("look-up", run, requires=frozenset({"functional"}), breaks=frozenset({"placed"}))
