"""A program steps through its elements in one way: sizes that a view makes of several others are taken apart wherever they occur.

[b, s, h*d] and [b, s, h, d] are the same elements in the same order, but Inductor makes its loops of the sizes that an op is written with, and
a loop over h*d is none over h and d, which something else of the program may need: rows of d that are summed, heads in another order. Such a
program is two kernels. So its elementwise ops and sums are written in the finest sizes that its views show, and its results to views of them:
each number is computed of the same numbers as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx

from ..fusion import write
from ..text_words import expr_of

_aten, _prims = torch.ops.aten, torch.ops.prims
_RESHAPES = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})
_ROW_SUMS = frozenset({_aten.sum.dim_IntList, _aten.mean.dim})

# The sizes that a size is the product of, without ones, the last one stepping through neighbours.
Parts = tuple[sympy.Expr, ...]


def in_finest_sizes(graph: fx.Graph) -> fx.Graph:
    """The traced program (values in `meta["val"]`; it writes its results to inputs) with its loops alike; itself where they are.

    An input that a result is written to has the finer sizes, in its `meta["val"]`: it is to be given memory that lies as before.
    """
    if any(_expr(n) == 0 for node in graph.nodes if isinstance(v := node.meta.get("val"), torch.Tensor) for n in v.shape):
        return graph  # nothing is stepped through
    parts = _finest(graph)
    if all(len(p) <= 1 for dims in parts.values() for p in dims):
        return graph
    try:
        return _Emission(graph, parts).result
    except _UnknownSize:
        return graph


def common_parts(a: Parts, b: Parts) -> Parts | None:
    """The coarsest parts that both are made of; None where there are none, as of (4, 6) and (6, 4).

    >>> n = sympy.Integer
    >>> common_parts((n(6), n(4)), (n(2), n(12)))
    (2, 3, 4)
    """
    left, right, found = list(a), list(b), list[sympy.Expr]()
    while left and right:
        small, large = (left, right) if _divides(left[-1], right[-1]) else (right, left)
        if not _divides(small[-1], large[-1]):
            return None
        part = small.pop()
        found.append(part)
        rest = sympy.cancel(large.pop() / part)
        if rest != 1:
            large.append(rest)
    return None if left or right else tuple(reversed(found))


def _divides(a: sympy.Expr, b: sympy.Expr) -> bool:
    return bool(sympy.fraction(sympy.cancel(b / a))[1] == 1)


# Which sizes ----------------------------------------------------------------------------------------------------------


def _finest(graph: fx.Graph) -> dict[fx.Node, list[Parts]]:
    """Per tensor of the graph the parts of each of its sizes."""
    parts = {
        node: [_whole(n) for n in node.meta["val"].shape]
        for node in graph.nodes if node.op != "output" and isinstance(node.meta.get("val"), torch.Tensor)}
    changed = True
    while changed:
        changed = any([_agree(node, parts) for node in parts if node.op == "call_function"])
    return parts


def _whole(size: object) -> Parts:
    expr = _expr(size)
    return () if expr == 1 else (expr,)


def _agree(node: fx.Node, parts: dict[fx.Node, list[Parts]]) -> bool:
    """Gives sizes that are stepped through together the same parts; whether that changed any."""
    changed = False
    if node.target in _RESHAPES:
        source = node.all_input_nodes[0]
        both = common_parts(*(tuple(n for p in parts[one] for n in p) for one in (source, node)))
        if both is not None:
            for one in (source, node):
                dealt = _dealt(both, parts[one])
                changed |= dealt != parts[one]
                parts[one] = dealt
        return changed
    for operand, pairs in _pairs(node):
        for i, j in pairs:
            both = common_parts(parts[operand][i], parts[node][j])
            if both is not None:
                changed |= both != parts[operand][i] or both != parts[node][j]
                parts[operand][i] = parts[node][j] = both
    return changed


def _dealt(flat: Parts, dims: Sequence[Parts]) -> list[Parts]:
    """`flat`, which is finer than `dims`, as parts of each of these."""
    rest, found = list(flat), []
    for dim in dims:
        left, own = sympy.Mul(*dim), list[sympy.Expr]()
        while left != 1:
            own.append(rest.pop(0))
            left = sympy.cancel(left / own[-1])
        found.append(tuple(own))
    return found


def _pairs(node: fx.Node) -> Iterator[tuple[fx.Node, Iterable[tuple[int, int]]]]:
    """Operands, each with pairs of its sizes and the op's that are one loop."""
    dim = node.meta["val"].dim()
    for operand in _tensors(node):
        own = operand.meta["val"].dim()
        if _is_elementwise(node):
            shapes = operand.meta["val"].shape, node.meta["val"].shape
            yield operand, [(own - k, dim - k) for k in range(1, min(own, dim) + 1) if expr_of(shapes[0][-k]) == expr_of(shapes[1][-k])]
        elif node.target in _ROW_SUMS:
            yield operand, [(i, i) for i in range(own - 1)]


def _is_elementwise(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    target = node.target
    return target in (write, _prims.convert_element_type.default) or torch.Tag.pointwise in target.tags and not target._schema.is_mutable


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [o for o in node.all_input_nodes if isinstance(o.meta.get("val"), torch.Tensor)]


# The program in them --------------------------------------------------------------------------------------------------


class _UnknownSize(Exception):
    """A part that depends on symbols and is no size that the program has."""


class _Emission:
    """Copies a program: elementwise ops and sums in parts, anything else in its own sizes, with views between them.

    What the program stores to is an input that has its parts for sizes.
    """

    def __init__(self, graph: fx.Graph, parts: dict[fx.Node, list[Parts]]) -> None:
        self._parts, self.result = parts, fx.Graph()
        self._own: dict[fx.Node, fx.Node] = {}
        self._fine: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[sympy.Expr, fx.Node] = {}
        self._sizes_there = {_expr(n): n for node in parts for n in node.meta["val"].shape}
        stored = {node.args[0] for node in graph.nodes if node.target is write}
        for node in graph.nodes:
            if node in stored:
                self._fine[node] = self.result.node_copy(node)
                self._fine[node].meta = {"val": self._in_parts(node)}
            elif node.op == "call_function" and node in parts and (_is_elementwise(node) or node.target in _ROW_SUMS):
                self._fine[node] = self._elementwise(node) if _is_elementwise(node) else self._sum(node)
            elif node.target in _RESHAPES and _without_ones(self._sizes(node)) == _without_ones(self._sizes(node.all_input_nodes[0])):
                source = node.all_input_nodes[0]
                self._fine[node] = self._viewed(self._in_fine_sizes(source), self._sizes(source), self._sizes(node))
            else:
                self._own[node] = self.result.node_copy(node, self._in_own_sizes)
                if isinstance(node.meta.get("val"), torch.SymInt):
                    self._numbers.setdefault(_expr(node.meta["val"]), self._own[node])
        self.result.eliminate_dead_code()
        self.result.lint()

    def _in_parts(self, node: fx.Node) -> torch.Tensor:
        """The fake value in its parts."""
        value, shape, stride = node.meta["val"], list[Any](), list[Any]()
        for own, step, dim in zip(value.shape, value.stride(), self._parts[node], strict=True):
            sizes = [own] if len(dim) < 2 else [self._size(n) for n in dim]
            steps = [step]
            for n in reversed(sizes[1:]):
                steps.insert(0, steps[0] * n)
            shape += sizes
            stride += steps
        return torch.as_strided(value, shape, stride, value.storage_offset())

    def _size(self, part: sympy.Expr) -> Any:
        """A part as a size of fake values."""
        if part.is_Integer:
            return int(part)
        if part not in self._sizes_there:
            raise _UnknownSize(part)
        return self._sizes_there[part]

    def _sizes(self, node: fx.Node) -> list[sympy.Expr]:
        """The value's sizes in parts."""
        return [n for dim in self._parts[node] for n in dim or (sympy.Integer(1),)]

    def _in_own_sizes(self, node: fx.Node) -> fx.Node:
        if node not in self._own:
            self._own[node] = self._viewed(self._fine[node], self._sizes(node), [_expr(n) for n in node.meta["val"].shape])
        return self._own[node]

    def _in_fine_sizes(self, node: fx.Node) -> fx.Node:
        if node not in self._fine:
            self._fine[node] = self._viewed(self._own[node], [_expr(n) for n in node.meta["val"].shape], self._sizes(node))
        return self._fine[node]

    def _viewed(self, node: fx.Node, known: Sequence[sympy.Expr], wanted: Sequence[sympy.Expr]) -> fx.Node:
        if list(known) == list(wanted):
            return node
        symbolic = [n for n in wanted if not n.is_Integer]
        if len(symbolic) > 1 and not self._numbers.keys() >= set(symbolic):
            raise _UnknownSize(symbolic)
        sizes = [int(n) if n.is_Integer else -1 if len(symbolic) == 1 else self._numbers[n] for n in wanted]
        return self.result.call_function(_aten.reshape.default, (node, sizes))  # type: ignore[arg-type]

    def _elementwise(self, node: fx.Node) -> fx.Node:
        dims = self._parts[node]

        def operand(one: fx.Node) -> fx.Node:
            if one not in self._parts:
                return self._own[one]
            wanted, first = list[sympy.Expr](), len(dims) - one.meta["val"].dim()
            for own, size, dim in zip(one.meta["val"].shape, node.meta["val"].shape[first:], dims[first:], strict=True):
                wanted += (dim or (sympy.Integer(1),)) if _expr(own) == _expr(size) else [sympy.Integer(1)] * max(1, len(dim))
            fine = self._sizes(one)
            if _without_ones(fine) == _without_ones(wanted):
                return self._viewed(self._in_fine_sizes(one), fine, wanted)
            return self._viewed(self._in_own_sizes(one), [_expr(n) for n in one.meta["val"].shape], wanted)

        new = self.result.node_copy(node, operand)
        new.meta = {}
        return new

    def _sum(self, node: fx.Node) -> fx.Node:
        source = node.all_input_nodes[0]
        last = max(1, len(self._parts[source][-1]))
        new = self.result.node_copy(node, self._in_fine_sizes)
        new.args = (new.args[0], list(range(-last, 0)), *new.args[2:])
        new.meta = {}
        kept = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim"))
        leading = self._sizes(node)[:-1] if kept else self._sizes(node)
        return self._viewed(new, [*leading, *[sympy.Integer(1)] * last] if kept else leading, self._sizes(node))


def _expr(size: Any) -> sympy.Expr:
    return sympy.sympify(expr_of(size))


def _without_ones(sizes: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    return [n for n in sizes if n != 1]
