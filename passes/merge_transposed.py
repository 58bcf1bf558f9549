"""merge-transposed: of two products that are each other's transpose the later one is the transpose of the first.

Functions that compute gradients by hand make (grad B) for their operand and (B' grad') for an adapter, and read the whole gradient for each.
For `numerics="reordered"` only: a library may have another kernel for the one than for the other, which sums in another order.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from fxoffload.graph import erase_unread
from fxoffload.joint import name_nodes
from fxoffload.pipeline import Context, Pass

_aten = torch.ops.aten
# Their results lie the same however their operands do.
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
# What a factor is, or is the transpose of, and whether it is.
Factor = tuple[object, bool]


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with fewer products; where that changes it, all is named anew."""
    products: dict[tuple[Factor, Factor], fx.Node] = {}
    found = False
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        a, b = map(_factor, node.args)
        first = products.get(((b[0], not b[1]), (a[0], not a[1])))
        if first is not None and first is not node and all(user.target in _PRODUCTS for user in node.users):
            _replace(graph, node, first)
            found = True
        else:
            products.setdefault((a, b), node)
    if found:
        name_nodes(graph)
    return graph


def _factor(value: object) -> Factor:
    if isinstance(value, fx.Node) and value.target is _aten.t.default:
        return value.args[0], True
    return value, False


def _replace(graph: fx.Graph, node: fx.Node, first: fx.Node) -> None:
    """Puts the transpose of `first` in the place of `node`."""
    with graph.inserting_before(node):
        turned = graph.call_function(_aten.t.default, (first,))
        turned.meta = {**node.meta, "val": first.meta["val"].t()}
    node.replace_all_uses_with(turned)
    erase_unread(graph, node)


PASS = Pass("merge-transposed", run, requires=frozenset({"functional"}), provides=frozenset({"functional"}))
