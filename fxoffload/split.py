"""Cutting a lowered Step at its border into the forward and backward graphs that autograd runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.fx.node import Argument

from .graph import Role, border_of, info, name_of, returned, set_info
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
    cut = _Cut.of(graph)
    live = liveness(graph, hint_bounds(graph))

    forward, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*cut.primals, *cut.before):
        new[node] = _copy(forward, node, new)
    for value in cut.values:
        new[value].meta.pop(STASHED, None)
    forward.output(tuple(new[v] if isinstance(v, fx.Node) else v for v in (*cut.outputs, *cut.values, *cut.symbols)))

    backward, new = fx.Graph(), {}
    for node in (*cut.symbols, *cut.values, *cut.late_inputs):
        made = backward.placeholder(node.name)
        made.meta = dict(node.meta)
        new[node] = made
        if live.of.get(node):
            set_info(made, tier=live.of[node][0].tier)  # a saved value may be on the host: swapped out, or a generator's state
    for node in (*cut.constants, *cut.after):
        new[node] = _copy(backward, node, new)
    backward.output(tuple(new[v] if isinstance(v, fx.Node) else v for v in cut.gradients))
    return Halves(forward, backward, tuple(map(name_of, cut.values)))


def saved_names(graph: fx.Graph) -> tuple[str, ...]:
    """What `split` says is saved, without making the halves."""
    return tuple(map(name_of, _Cut.of(graph).values))


@dataclass(frozen=True, slots=True)
class _Cut:
    """The nodes of each half in order, and what backward reads of forward and its inputs: values, symbols, constants.

    `late_inputs`: tangents, and symbols that follow them. Symbols never are tangents: what is not before the first tangent belongs to
    backward.
    """

    primals: tuple[fx.Node, ...]
    late_inputs: tuple[fx.Node, ...]
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    outputs: tuple[Argument, ...]
    gradients: tuple[Argument, ...]
    values: tuple[fx.Node, ...]
    symbols: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]

    @staticmethod
    def of(graph: fx.Graph) -> _Cut:
        """The cut at the border, which `graph` must have."""
        border = border_of(graph)
        assert border is not None, "a graph without a backward has nothing to cut"
        outputs, gradients = returned(graph)
        nodes = tuple(graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        first_tangent = next((i for i, n in enumerate(inputs) if info(n).role is Role.TANGENT), len(inputs))
        at = nodes.index(border)
        before, after = (tuple(n for n in half if n.op not in ("placeholder", "output")) for half in (nodes[:at], nodes[at + 1 :]))
        crossing = _crossing({*inputs[:first_tangent], *before}, after, gradients)
        tensors = [n for n in crossing if isinstance(n.meta.get("val"), torch.Tensor)]
        return _Cut(
            tuple(inputs[:first_tangent]), tuple(inputs[first_tangent:]), before, after, outputs, gradients,
            values=tuple(n for n in tensors if n.op != "get_attr"),
            symbols=tuple(n for n in crossing if not isinstance(n.meta.get("val"), torch.Tensor)),
            constants=tuple(n for n in before if n.op == "get_attr" and n in crossing))


def _crossing(available: set[fx.Node], after: tuple[fx.Node, ...], gradients: tuple[Argument, ...]) -> dict[fx.Node, None]:
    """What backward reads of forward and of the inputs, in the order it is first read."""
    read = dict.fromkeys(o for n in after for o in n.all_input_nodes if o in available)
    return read | dict.fromkeys(g for g in gradients if isinstance(g, fx.Node) and g in available)


def _copy(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    made = graph.node_copy(node, lambda n: new[n])
    made.meta = dict(node.meta)
    return made
