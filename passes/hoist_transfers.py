"""hoist-transfers: starts every transfer to the device where the plan says, ahead of its wait.

A value's copies in graph order are its decisions in the order of their readers.
"""

from __future__ import annotations

from collections import defaultdict

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import by_name, info
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Gather, SwapIn


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with each swap_in before its decision's `start`; the waits stay. Raises ValueError where loads and decisions differ."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    copies: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=ops.swap_in):
        copies[_value_of(node)].append(node)
    decisions: dict[str, list[Gather | SwapIn]] = defaultdict(list)
    for decision in ctx.plan.decisions:
        if isinstance(decision, (Gather, SwapIn)):
            decisions[decision.value].append(decision)
    starts: list[tuple[fx.Node, str]] = []
    for value, loads in decisions.items():
        loads.sort(key=lambda load: place[nodes[load.before]])
        starts += [(copy, load.start) for load, copy in zip(loads, copies[value], strict=True) if load.start != load.before]
    # Copies that start before the same node keep the order in which they are awaited: it is the order on their channel.
    for copy, start in sorted(starts, key=lambda pair: place[pair[0]]):
        nodes[start].prepend(copy)
    return graph


def _value_of(node: fx.Node) -> str:
    """What the copy's decision calls its value: the parameter's fqn, or the swapped value's name."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.op == "placeholder":
        return info(source).fqn or info(source).name
    return info(source).name.rsplit("^", 1)[0]


PASS = Pass("hoist-transfers", run, requires=frozenset({"lowered", "awaited"}), breaks=frozenset({"fits", "placed"}))
