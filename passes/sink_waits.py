"""sink-waits: ends every transfer to the host where the plan says, so that compute need not wait for the copy."""

from __future__ import annotations

import torch.fx as fx

from fxoffload.graph import by_name
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Sink, SwapOut
from fxoffload.versions import last_element


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with the wait of each swap_out and of each gradient right after its decision's `until`."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    for decision in ctx.plan.decisions:
        if isinstance(decision, SwapOut) and decision.until != decision.after:
            ready = nodes[f"{decision.value}^0"]
            last_element(nodes[decision.until]).append(ready)
        elif isinstance(decision, Sink):
            last_element(nodes[decision.until]).append(nodes[decision.value])
    return graph


PASS = Pass("sink-waits", run, requires=frozenset({"lowered", "awaited"}), breaks=frozenset({"fits", "placed"}))
