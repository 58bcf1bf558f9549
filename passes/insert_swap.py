"""insert-swap: SwapOut and SwapIn decisions become `swap_out` + `wait` after, and `swap_in` + `wait` before, the named nodes.

Both waits sit right behind their start; `sink-waits` and `hoist-transfers` pull the pairs apart as far as the plan says.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import INFO, Names, NodeInfo, by_name, call, name_of
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import SwapIn, SwapOut
from fxoffload.swaps import host_value
from fxoffload.versions import Build, last_element, reload


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with the plan's swaps."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    names = Names(nodes=nodes)
    on_host: dict[str, fx.Node] = {}
    for decision in ctx.plan.decisions:
        if isinstance(decision, SwapOut):
            on_host[decision.value] = _swap_out(graph, nodes, names, decision, ctx)
    returns: dict[fx.Node, list[tuple[fx.Node, Build]]] = {}
    for decision in ctx.plan.decisions:
        if isinstance(decision, SwapIn):
            value = nodes[decision.value]
            build = _swap_in(graph, on_host[decision.value], value, names, ctx)
            returns.setdefault(value, []).append((nodes[decision.before], build))
    reload(graph, returns)
    return graph


def _swap_out(graph: fx.Graph, nodes: dict[str, fx.Node], names: Names, decision: SwapOut, ctx: Context) -> fx.Node:
    value = nodes[decision.value]
    with graph.inserting_after(last_element(nodes[decision.after])):
        start = call(graph, ops.swap_out, value, ctx.host, decision.tier.value)
    with graph.inserting_after(start):
        ready = call(graph, ops.wait, start)
    name = names.fresh(decision.value, "^")
    start.meta = {"val": host_value(value.meta["val"], ctx.bounds, ctx.host), INFO: NodeInfo(f"{name}/out")}
    ready.meta = {"val": start.meta["val"], INFO: NodeInfo(name)}
    return ready


def _swap_in(graph: fx.Graph, host: fx.Node, value: fx.Node, names: Names, ctx: Context) -> Build:
    def build(before: fx.Node) -> fx.Node:
        name = names.fresh(name_of(value), "@")
        with graph.inserting_before(before):
            start = call(graph, ops.swap_in, host, ctx.device)
            ready = call(graph, ops.wait, start)
        start.meta = {"val": value.meta["val"], INFO: NodeInfo(f"{name}/in")}
        ready.meta = {"val": value.meta["val"], INFO: NodeInfo(name)}
        return ready

    return build


PASS = Pass(
    "insert-swap", run, requires=frozenset({"functional", "lowered"}), provides=frozenset({"awaited"}),
    breaks=frozenset({"released", "fits", "placed"}),
)
