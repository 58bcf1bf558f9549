"""bucket-transfers: the copies of every Bucket decision become one `swap_in_many`, one `wait`, and a `part` for each.

The start stands where the first member started, the wait where the first was awaited. Each part takes the place of its member's own
wait, and its name: what reads the parameter is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import INFO, Names, NodeInfo, by_name, call
from fxoffload.layout import extent_bytes, side_by_side
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Bucket


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with the plan's buckets. Raises ValueError for a member that is no copy of an input to the device."""
    if ctx.plan is None:
        return graph
    nodes = by_name(graph)
    names = Names(nodes=nodes)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for decision in ctx.plan.decisions:
        if isinstance(decision, Bucket):
            members = [_awaited(nodes, name) for name in decision.values]
            _merge(graph, members, names.fresh("bucket"), place)
    return graph


def _awaited(nodes: dict[str, fx.Node], name: str) -> fx.Node:
    """The wait of that name, which must end a copy of an input."""
    node = nodes.get(name)
    start = node.args[0] if node is not None and node.target is ops.wait else None
    if node is None or not isinstance(start, fx.Node) or start.target is not ops.swap_in or start.args[0].op != "placeholder":  # type: ignore[union-attr]
        raise ValueError(f"bucket: {name!r} is no copy of an input to the device")
    return node


def _merge(graph: fx.Graph, waits: Sequence[fx.Node], name: str, place: dict[fx.Node, int]) -> None:
    starts = [wait.all_input_nodes[0] for wait in waits]
    sources = [start.all_input_nodes[0] for start in starts]
    values = [source.meta["val"] for source in sources]
    offsets, n_bytes = side_by_side(map(extent_bytes, values))
    with graph.inserting_before(min(starts, key=place.__getitem__)):
        flat = call(graph, ops.swap_in_many, sources, starts[0].args[1])
    with graph.inserting_before(min(waits, key=place.__getitem__)):
        ready = call(graph, ops.wait, flat)
    with values[0].fake_mode:
        value = torch.empty(n_bytes, dtype=torch.uint8, device=values[0].device)
    flat.meta = {"val": value, INFO: NodeInfo(f"{name}/in")}
    ready.meta = {"val": value, INFO: NodeInfo(name)}
    _release_once(graph, [*starts, *waits], ready, place)
    for wait, start, source, offset in zip(waits, starts, values, offsets):
        wait.target, wait.args = ops.part, (ready, offset, list(source.shape), list(source.stride()), source.dtype)
        graph.erase_node(start)


def _release_once(graph: fx.Graph, members: Sequence[fx.Node], ready: fx.Node, place: dict[fx.Node, int]) -> None:
    """Where members have releases of their own, the last one becomes the bucket's."""
    releases = sorted({user for node in members for user in node.users if user.target is ops.release}, key=place.__getitem__)
    if not releases:
        return
    with graph.inserting_after(releases[-1]):
        release = call(graph, ops.release, ready)
    release.meta[INFO] = NodeInfo(f"{ready.meta[INFO].name}/release")
    for one in releases:
        graph.erase_node(one)


PASS = Pass("bucket-transfers", run, requires=frozenset({"lowered", "awaited"}), breaks=frozenset({"fits", "placed"}))
