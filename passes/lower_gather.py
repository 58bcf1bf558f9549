"""lower-gather: a gather on one device is a `swap_in` and its `wait`."""

from __future__ import annotations

import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import INFO, NodeInfo, call, name_of
from fxoffload.pipeline import Context, Pass


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` without gathers."""
    for node in graph.find_nodes(op="call_function", target=ops.gather):
        name = name_of(node)
        node.target = ops.swap_in
        node.meta[INFO] = NodeInfo(f"{name}/in")
        with graph.inserting_after(node):
            ready = call(graph, ops.wait)
        ready.meta = {"val": node.meta["val"], INFO: NodeInfo(name)}
        node.replace_all_uses_with(ready)
        ready.args = (node,)
    return graph


PASS = Pass("lower-gather", run, provides=frozenset({"lowered", "awaited"}), breaks=frozenset({"placed"}))
