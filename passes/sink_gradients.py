"""sink-gradients: the gradient of a parameter that lives on the host leaves the device right after its producer.

One sink per parameter, after the in-graph sum of its uses: a sink per use would change the order of the sum.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.effects import Tier
from fxoffload.graph import INFO, NodeInfo, Role, call, info, output_of, returned
from fxoffload.pipeline import Context, Pass
from fxoffload.swaps import host_value
from fxoffload.versions import last_element


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` whose host parameters' gradients are outputs on the host."""
    forward, gradients = returned(graph)
    inputs = graph.find_nodes(op="placeholder")
    order = {node: i for i, node in enumerate(graph.nodes)}
    sunk = list(gradients)
    for i, gradient in enumerate(gradients):
        owner = inputs[i]
        if isinstance(gradient, fx.Node) and info(owner).role is Role.PARAMETER and info(owner).tier is not Tier.DEVICE:
            sunk[i] = _sink(graph, gradient, owner, ctx, order)
    output_of(graph).args = ((forward, tuple(sunk)),)
    return graph


def _sink(graph: fx.Graph, gradient: fx.Node, owner: fx.Node, ctx: Context, order: dict[fx.Node, int]) -> fx.Node:
    """A swap_out of the gradient and its wait, right after the gradient (after the border when forward made it)."""
    border = graph.find_nodes(op="call_function", target=ops.backward)[0]
    anchor = last_element(gradient) if order.get(gradient, 0) > order[border] else border
    name = f"{info(owner).fqn}.grad"
    with graph.inserting_after(anchor):
        start = call(graph, ops.swap_out, gradient, ctx.host, info(owner).tier.value)
    with graph.inserting_after(start):
        ready = call(graph, ops.wait, start)
    value = host_value(gradient.meta["val"], ctx.bounds, ctx.host)
    start.meta = {"val": value, INFO: NodeInfo(f"{name}/out")}
    ready.meta = {"val": value, INFO: NodeInfo(name)}
    return ready


PASS = Pass("sink-gradients", run, requires=frozenset({"functional"}), breaks=frozenset({"released", "placed"}))
