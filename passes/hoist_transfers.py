"""hoist-transfers: starts every transfer to the device where the plan says, ahead of its wait."""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import by_name, info
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Gather, SwapIn


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with each swap_in before its decision's `start`; the waits stay."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    starts = {(d.value, d.before): d.start for d in ctx.plan.decisions if isinstance(d, (Gather, SwapIn)) and d.start != d.before}
    if not starts:
        return graph
    for node in graph.find_nodes(op="call_function", target=ops.swap_in):
        key = (_value_of(node), _reader(node))
        if key in starts:
            nodes[starts[key]].prepend(node)
    return graph


def _value_of(node: fx.Node) -> str:
    """The decision's value: the parameter's fqn, or the swapped value's name."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.op == "placeholder":
        return info(source).fqn or info(source).name
    return info(source).name.rsplit("^", 1)[0]


def _reader(node: fx.Node) -> str:
    """The node the wait stands before, other memory nodes apart."""
    following = next(iter(node.users)).next
    while ops.spec_of(following) is not None or info(following).origin is not None:
        following = following.next
    return info(following).name


PASS = Pass("hoist-transfers", run, requires=frozenset({"lowered", "awaited"}), breaks=frozenset({"fits"}))
