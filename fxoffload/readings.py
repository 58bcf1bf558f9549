"""Where a Graph reads rows of a product one by one (their argmax, the log-probability of a token) and returns what is much smaller.

Every op between the product and what is read must treat each row, the first dimension, by itself: then any split of the rows gives the
same. Only graphs without a backward are looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from .graph import Bounds, border_of, is_random, tensors_in
from .text_words import expr_of

_aten = torch.ops.aten
# Of a value with rows and one dimension or several: which argument names those. Keeping ones give a value as long.
_ALONG = {
    _aten._softmax.default: 1, _aten._log_softmax.default: 1, _aten.argmax.default: 1, _aten.argmin.default: 1, _aten.max.dim: 1,
    _aten.min.dim: 1, _aten.amax.default: 1, _aten.amin.default: 1, _aten.sum.dim_IntList: 1, _aten.mean.dim: 1, _aten.logsumexp.default: 1,
    _aten.any.dim: 1, _aten.all.dim: 1, _aten.topk.default: 2, _aten.gather.default: 1, _aten.slice.Tensor: 1, _aten.select.int: 1,
}
_LAST = -1


@dataclass(frozen=True, slots=True)
class Reading:
    """One product whose rows can be read apart.

    `product`: of rows and a weight. `nodes`: it and all that is computed of it row by row, in graph order. `results`: those of `nodes` that
    are read elsewhere, all of fewer columns than the product. `others`: values with the same rows that `nodes` read. `before`: the first
    node that reads a result.
    """

    product: fx.Node
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]
    before: fx.Node

    def shape(self, bounds: Bounds) -> tuple[int, int]:
        """Rows and columns of the product at the bounds."""
        rows, columns = bounds.shape_of(self.product.meta["val"])
        return rows, columns

    def widest_bytes(self, bounds: Bounds) -> int:
        """Bytes of the largest value made of the rows."""
        return max(bounds.bytes_of(value) for node in self.nodes for value in tensors_in(node.meta["val"]))


def find_readings(graph: fx.Graph) -> list[Reading]:
    """Every product that is read so, in graph order."""
    if border_of(graph) is not None:
        return []
    at = {node: i for i, node in enumerate(graph.nodes)}
    found = (_reading(product, at) for product in graph.find_nodes(op="call_function", target=_aten.mm.default))
    return [one for one in found if one is not None]


def _reading(product: fx.Node, at: dict[fx.Node, int]) -> Reading | None:
    inside = _closure(product)
    nodes = sorted(inside, key=at.__getitem__)
    readers = {user for node in nodes for user in node.users if user not in inside}
    results = [node for node in nodes if any(user in readers for user in node.users)]
    if len(nodes) < 2 or not readers or not all(_is_small(node, product) for node in results):
        return None
    others = {o for node in nodes[1:] for o in node.all_input_nodes if o not in inside}
    before = min(readers, key=at.__getitem__)
    if any(at[other] > at[before] for other in others):
        return None
    return Reading(product, tuple(nodes), tuple(results), tuple(sorted(others, key=at.__getitem__)), before)


def _closure(product: fx.Node) -> set[fx.Node]:
    """The product and what is computed of its rows, as far as every op treats them apart."""
    inside, work = {product}, [product]
    while work:
        for user in _row_wise_users(work.pop(), inside, product):
            inside.add(user)
            work.append(user)
    return inside


def _row_wise_users(node: fx.Node, inside: set[fx.Node], product: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user not in inside and _is_row_wise(user, product):
            yield user


def _is_row_wise(node: fx.Node, product: fx.Node) -> bool:
    """Whether the node has the product's rows and computes each of those of the operands' alone."""
    if node.op != "call_function" or is_random(node) or not all(_has_rows(value, product) for value in tensors_in(node.meta.get("val"))):
        return False
    if node.target is operator.getitem:
        return True
    operands = [value for o in node.all_input_nodes for value in tensors_in(o.meta.get("val"))]
    if not all(_has_rows(value, product) for value in operands) or len({value.dim() for value in operands}) != 1:
        return False
    if node.target is _aten._to_copy.default or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    return node.target in _ALONG and operands[0].dim() == 2 and _is_last(node, _ALONG[node.target])


def _is_last(node: fx.Node, position: int) -> bool:
    dims = node.args[position] if position < len(node.args) else node.kwargs.get("dim", _LAST if node.target is _aten.topk.default else None)
    named = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    return named in ([1], [_LAST])


def _has_rows(value: torch.Tensor, product: fx.Node) -> bool:
    return value.dim() in (1, 2) and expr_of(value.shape[0]) == expr_of(product.meta["val"].shape[0])


def _is_small(node: fx.Node, product: fx.Node) -> bool:
    columns = product.meta["val"].shape[1]
    return all(value.dim() == 1 or _is_below(value.shape[1], columns) for value in tensors_in(node.meta["val"]))


def _is_below(size: int | torch.SymInt, columns: int | torch.SymInt) -> bool:
    return isinstance(size, int) and isinstance(columns, int) and size < columns
