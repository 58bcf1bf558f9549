"""Outputs that are rows of one product with the head: what a Graph without a backward need not make, as it can be made from the rows later.

Between the product and the output stand only ops that treat every row by itself. Where the head's weight is more than parameters make
(an adapter beside it, a quantized one), or the rows are not laid out as the output is, the output stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from .graph import Bounds, Role, border_of, info, is_random, is_step, returned
from .losses import ROW_WISE
from .text_words import expr_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Head:
    """One such output.

    `position`: among forward's outputs. `output`: its node. `rows`: what the graph can return in its place, a value with the output's
    leading sizes whose last one is as long as a row. `product`: rows times weight; `chain`: the row-wise ops after it, to the output.
    `weight`: what makes the weight of parameters, its inputs first.
    """

    position: int
    output: fx.Node
    rows: fx.Node
    product: fx.Node
    chain: tuple[fx.Node, ...]
    weight: tuple[fx.Node, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the weight is made of."""
        return tuple(str(info(node).fqn) for node in self.weight if node.op == "placeholder")

    def n_rows(self, bounds: Bounds) -> int:
        """Rows at the bounds."""
        return bounds.shape_of(self.product.meta["val"])[0]

    def n_bytes(self, bounds: Bounds) -> int:
        """Bytes of the output at the bounds."""
        return bounds.bytes_of(self.output.meta["val"])

    def program(self) -> fx.Graph:
        """A graph of rows [n, length] and the parameters, in order, that returns what the output has of these rows, [n, classes]."""
        graph = fx.Graph()
        made: dict[object, fx.Node] = {self.product.args[0]: graph.placeholder("rows")}
        for node in self.weight:
            made[node] = graph.placeholder(f"weight_{len(made)}") if node.op == "placeholder" else _copied(graph, node, made)
        made[self.product] = _copied(graph, self.product, made)
        last = made[self.product]
        for node in self.chain:
            last = graph.call_function(node.target, (last, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
        graph.output(last)
        return graph


def find_heads(graph: fx.Graph) -> list[Head]:
    """Every such output of a canonical Step, in order; none where a backward follows, and none of another graph."""
    if border_of(graph) is not None or not is_step(graph):
        return []
    found = [_head(i, node) for i, node in enumerate(returned(graph)[0]) if isinstance(node, fx.Node)]
    return [head for head in found if head is not None]


def _head(position: int, output: fx.Node) -> Head | None:
    value, node, chain = output.meta.get("val"), output, []
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    while node.target in ROW_WISE and node.args[:1] == tuple(node.all_input_nodes) or _keeps_rows(node):
        if node.target in ROW_WISE:
            chain.append(node)
        node = node.all_input_nodes[0]
    if node.target is not _aten.mm.default or node.meta["val"].shape[-1] != value.shape[-1]:
        return None
    rows, weight = _like(node.args[0], value), _of_parameters(node.args[1])
    if rows is None or not weight or not isinstance(value.shape[-1], int):
        return None
    return Head(position, output, rows, node, tuple(reversed(chain)), weight)


def _keeps_rows(node: fx.Node) -> bool:
    """Whether the node shows its operand with other leading sizes."""
    if node.target is not _aten.reshape.default:
        return False
    value, source = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(value.dim()) and bool(source.dim()) and expr_of(value.shape[-1]) == expr_of(source.shape[-1])


def _like(rows: object, value: torch.Tensor) -> fx.Node | None:
    """The rows, or what they are a reshape of, with the leading sizes of `value`; None where the caller could write into it."""
    while isinstance(rows, fx.Node) and not _same_sizes(rows.meta["val"].shape[:-1], value.shape[:-1]):
        rows = rows.args[0] if _keeps_rows(rows) else None
    if not isinstance(rows, fx.Node) or not rows.meta["val"].is_contiguous():
        return None
    looks_into = [rows]
    while looks_into[-1].target is _aten.reshape.default:
        looks_into.append(looks_into[-1].all_input_nodes[0])
    callers = looks_into[-1].op == "placeholder" or any(user.op == "output" for node in looks_into for user in node.users)
    return None if callers else rows


def _same_sizes(one: torch.Size, other: torch.Size) -> bool:
    return [expr_of(n) for n in one] == [expr_of(n) for n in other]


def _of_parameters(weight: object) -> tuple[fx.Node, ...]:
    """The nodes that make the weight, in graph order; () where one is no parameter, or no function of parameters alone."""
    found: dict[fx.Node, None] = {}
    work = [weight]
    while work:
        node = work.pop()
        if not isinstance(node, fx.Node) or is_random(node) or node.op != "call_function" and info(node).role is not Role.PARAMETER:
            return ()
        found[node] = None
        work.extend(node.all_input_nodes)
    return tuple(node for node in next(iter(found)).graph.nodes if node in found)


def _copied(graph: fx.Graph, node: fx.Node, made: dict[object, fx.Node]) -> fx.Node:
    return graph.node_copy(node, made.__getitem__)

