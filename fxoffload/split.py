"""Cutting a lowered Step at its border into the forward and backward graphs that autograd runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from . import ops
from .graph import Role, border_of, info, name_of, output_of, set_info
from .liveness import liveness
from .text import hint_bounds
from .torch_compat import STASHED


@dataclass(frozen=True, slots=True)
class Halves:
    """`forward` returns its outputs, then the saved values, then the saved symbols; `backward` takes symbols, values, tangents.

    Constants that both read are in both.
    """

    forward: fx.Graph
    backward: fx.Graph
    saved: tuple[str, ...]


def split(graph: fx.Graph) -> Halves:
    """Forward and backward of `graph` in AOTAutograd's calling convention, and the canonical names of what is saved."""
    border = border_of(graph)
    assert border is not None, "a graph without a backward has nothing to cut"
    outputs, gradients = output_of(graph).args[0]  # type: ignore[misc]
    placeholders = graph.find_nodes(op="placeholder")
    tangents = [p for p in placeholders if info(p).role is Role.TANGENT]
    first_tangent = placeholders.index(tangents[0]) if tangents else len(placeholders)
    # Symbols never are tangents, but they may follow them: what is not before the first tangent belongs to backward.
    primals = placeholders[:first_tangent]
    before, after = _halves(graph, border)
    crossing = _crossing(before | set(primals), after, gradients)
    constants = {n for n in crossing if n.op == "get_attr"}
    values = [n for n in crossing if isinstance(n.meta.get("val"), torch.Tensor) and n not in constants]
    symbols = [n for n in crossing if not isinstance(n.meta.get("val"), torch.Tensor)]
    live = liveness(graph, hint_bounds(graph))

    forward, new = fx.Graph(), {}
    for node in [*primals, *(n for n in graph.nodes if n in before)]:
        new[node] = _copy(forward, node, new)
    for value in values:
        new[value].meta.pop(STASHED, None)
    forward.output(tuple(new[v] if isinstance(v, fx.Node) else v for v in (*outputs, *values, *symbols)))

    backward, new = fx.Graph(), {}
    for node in [*symbols, *values, *placeholders[first_tangent:]]:
        made = backward.placeholder(node.name)
        made.meta = dict(node.meta)
        new[node] = made
        if live.of.get(node):
            set_info(made, tier=live.of[node][0].tier)  # a saved value may be on the host: swapped out, or a generator's state
    for node in graph.nodes:
        if node in after or node in constants:
            new[node] = _copy(backward, node, new)
    backward.output(tuple(new[v] if isinstance(v, fx.Node) else v for v in gradients))
    return Halves(forward, backward, tuple(name_of(v) for v in values))


def _halves(graph: fx.Graph, border: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    before: set[fx.Node] = set()
    after: set[fx.Node] = set()
    current = before
    for node in graph.nodes:
        if node is border:
            current = after
        elif node.op not in ("placeholder", "output"):
            current.add(node)
    return before, after


def _crossing(available: set[fx.Node], after: set[fx.Node], gradients: tuple[object, ...]) -> list[fx.Node]:
    """What backward reads of forward and of the inputs, in the order it is first read."""
    read = dict.fromkeys(o for n in sorted(after, key=_order(after)) for o in n.all_input_nodes if o in available)
    read.update(dict.fromkeys(g for g in gradients if isinstance(g, fx.Node) and g in available))
    return list(read)


def _order(nodes: set[fx.Node]):  # type: ignore[no-untyped-def]
    graph = next(iter(nodes)).graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    return position.__getitem__


def _copy(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    made = graph.node_copy(node, lambda n: new[n])
    made.meta = dict(node.meta)
    return made
