"""insert-gather: every Gather decision becomes a `gather` of the parameter before the node that first reads it.

Later uses, up to the parameter's next gather, read that copy; views of the parameter are derived from it.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import INFO, Names, NodeInfo, by_name, call, info, name_of
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Gather
from fxoffload.versions import Build, reload


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with one gather per Gather decision of the plan."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    names = Names(nodes=nodes)
    parameters = {info(n).fqn or name_of(n): n for n in graph.find_nodes(op="placeholder")}
    returns: dict[fx.Node, list[tuple[fx.Node, Build]]] = {}
    for decision in ctx.plan.decisions:
        if isinstance(decision, Gather):
            parameter = parameters[decision.value]
            returns.setdefault(parameter, []).append((nodes[decision.before], _gather(graph, parameter, names, ctx)))
    reload(graph, returns)
    return graph


def _gather(graph: fx.Graph, parameter: fx.Node, names: Names, ctx: Context) -> Build:
    def build(before: fx.Node) -> fx.Node:
        with graph.inserting_before(before):
            node = call(graph, ops.gather, parameter, ctx.device)
        node.meta = {"val": parameter.meta["val"], INFO: NodeInfo(names.fresh(name_of(parameter), "@"))}
        return node

    return build


PASS = Pass(
    "insert-gather", run, requires=frozenset({"functional"}), provides=frozenset({"resident"}),
    breaks=frozenset({"lowered", "released", "fits", "placed"}),
)
