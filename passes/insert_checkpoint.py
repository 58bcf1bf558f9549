"""insert-checkpoint: every value the plan recomputes is read in backward through a `checkpoint` node.

The node is logical: it marks the border of a recomputed region in the dump, and `recompute` lowers it.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import Names, NodeInfo, border_of, by_name, call, name_of
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Recompute


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with one checkpoint per Recompute decision, at the start of backward."""
    border = border_of(graph)
    decisions = [one for one in (ctx.plan.decisions if ctx.plan is not None else ()) if isinstance(one, Recompute)]
    if border is None or not decisions:
        return graph
    nodes = by_name(graph)
    names = Names(nodes=nodes)
    in_backward = _after(graph, border)
    for decision in decisions:
        value = nodes[decision.value]
        with graph.inserting_after(border):
            marker = call(graph, ops.checkpoint, value)
        marker.meta = {"val": value.meta["val"], "fxo": NodeInfo(names.fresh(name_of(value), "!"))}
        value.replace_all_uses_with(marker, lambda user: user in in_backward)
    return graph


def _after(graph: fx.Graph, border: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    node = border.next
    while node.op != "root":
        if node.op != "output":
            found.add(node)
        node = node.next
    return found


PASS = Pass("insert-checkpoint", run, requires=frozenset({"functional"}), breaks=frozenset({"lowered"}))
