"""fold-zeros: a product that is added to zeros is the product alone, and what zeros are added to is that value.

Functions that sum a gradient in place begin with zeros, and to fill and read those takes as long as half of a small product does. For
`numerics="reordered"` only: a library may have another kernel for a product than for one that is added, which sums in another order, and
a sum of -0.0 and 0.0 is 0.0.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fxoffload.graph import erase_unread, is_returned, same_form
from fxoffload.joint import name_nodes
from fxoffload.liveness import is_view, view_source
from fxoffload.pipeline import Context, Pass

_aten = torch.ops.aten
# What is added to their first operand, alone.
_PRODUCTS = {_aten.addmm.default: _aten.mm.default, _aten.baddbmm.default: _aten.bmm.default}
_ZEROS = frozenset({_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default})
# The position of the number that they are full of.
_FILLED = {_aten.full.default: 1, _aten.full_like.default: 1, _aten.new_full.default: 2}


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` without zeros that something is added to; where that changes it, all is named anew."""
    found = [node for node in list(graph.nodes) if node.op == "call_function" and _folds(graph, node)]
    if found:
        name_nodes(graph)
    return graph


def _folds(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether the node was a sum with zeros; it no longer is."""
    if node.target in _PRODUCTS:
        zeros, *factors = node.args
        if not _is_zero(zeros) or node.kwargs.get("alpha", 1) != 1:
            return False
        node.target, node.args, node.kwargs = _PRODUCTS[node.target], tuple(factors), {}
        erase_unread(graph, zeros)
        return True
    if node.target is not _aten.add.Tensor or node.kwargs.get("alpha", 1) != 1 or is_returned(node):
        return False
    pair = node.args[:2]
    for zeros, value in (pair, pair[::-1]):
        if _is_zero(zeros) and isinstance(value, fx.Node) and same_form(value, node):
            node.replace_all_uses_with(value)
            erase_unread(graph, node)
            return True
    return False


def _is_zero(value: object) -> bool:
    """Whether a value is a tensor of zeros, whatever its view."""
    while isinstance(value, fx.Node) and is_view(value):
        value = view_source(value)
    if not isinstance(value, fx.Node):
        return False
    return value.target in _ZEROS or (value.target in _FILLED and bool(value.args[_FILLED[value.target]] == 0))  # type: ignore[index]


PASS = Pass("fold-zeros", run, requires=frozenset({"functional"}), provides=frozenset({"functional"}))
