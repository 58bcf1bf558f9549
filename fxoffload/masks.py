"""Masks as indices, where tracing knew how many of their elements are true.

ATen asks the device for that number, and the host waits; a step that waits cannot be recorded. With the number known, an index by a mask is one by
the numbers that ATen would have made of it, in its order: the bits are the same. What the graph took for granted is asserted on the device.
Measured: `bench/vision.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx

from .text_words import expr_of

_aten = torch.ops.aten
_PUTS = frozenset({_aten.index_put.default, _aten._unsafe_index_put.default})
_INDEXED = frozenset({_aten.index.Tensor, _aten._unsafe_index.Tensor}) | _PUTS
_MASKS = (torch.bool, torch.uint8)
_SAYS = "an index by a mask has as many elements as when the graph was captured"


def counts_true(node: fx.Node) -> bool:
    """Whether an op must count the true elements of a mask before its result has a size."""
    return node.target is _aten.masked_scatter_backward.default or (node.target in _INDEXED and any(_masks_of(node)))


def say_numbers(graph: fx.Graph) -> None:
    """Replaces indices by masks, as far as it is known how many elements are true."""
    known = _counts(graph)
    numbers = _Numbers(graph, set(known.items()))
    for node in list(graph.nodes):
        if node.target is _aten.masked_scatter_backward.default:
            _gather_rows(graph, node, numbers)
        elif node.target in _INDEXED and (found := _mask_of(node)) is not None:
            position, mask = found
            if mask in known:
                indices = list(node.args[1])  # type: ignore[arg-type]
                indices[position : position + 1] = numbers.of(node, mask, known[mask])
                node.update_arg(1, indices)
            elif _puts_one(node, position, mask):
                _choose(graph, node, mask)


def _counts(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many elements of each mask are true, as far as what is indexed by it says so."""
    known: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target in _INDEXED and (found := _mask_of(node)) is not None:
            n_true = _count(node, *found)
            if n_true is not None:
                known.setdefault(found[1], n_true)
    return known


def _count(node: fx.Node, position: int, mask: fx.Node) -> int | None:
    if node.target in _PUTS:
        values = _value(node.args[2])
        at = values.ndim - 1 - (_value(node.args[0]).ndim - position - _value(mask).ndim)
        n_true = values.shape[at] if at >= 0 else 1
        return n_true if isinstance(n_true, int) and n_true != 1 else None  # of one element any number may be made
    n_true = _value(node).shape[position]
    return n_true if isinstance(n_true, int) else None


class _Numbers:
    """What masks are as numbers: a column for each of their dimensions, made where they are read first."""

    def __init__(self, graph: fx.Graph, certain: set[tuple[fx.Node, int]]) -> None:
        self._graph, self._certain = graph, certain
        self._columns: dict[tuple[fx.Node, int], list[fx.Node]] = {}

    def is_certain(self, mask: fx.Node, n_true: int) -> bool:
        """Whether no other number of elements can be true."""
        return (mask, n_true) in self._certain

    def of(self, reader: fx.Node, mask: fx.Node, n_true: int) -> list[fx.Node]:
        """The columns, -1 behind the last one that is true."""
        if (mask, n_true) not in self._columns:
            with self._graph.inserting_before(reader):
                self._columns[mask, n_true] = self._made(reader, mask, n_true)
        return self._columns[mask, n_true]

    def _made(self, reader: fx.Node, mask: fx.Node, n_true: int) -> list[fx.Node]:
        value = _value(mask)
        if self.is_certain(mask, n_true):
            total = _call(reader, _aten.sum.default, (_as_bool(reader, mask),), value.new_empty((), dtype=torch.int64))
            equal = _call(reader, _aten.eq.Scalar, (total, n_true), value.new_empty((), dtype=torch.bool))
            _call(reader, _aten._assert_async.msg, (equal, _SAYS), None)
        found = _call(reader, _aten.nonzero_static.default, (mask,), value.new_empty((n_true, value.ndim), dtype=torch.int64), size=n_true)
        rows = found.meta["val"]
        return [_call(reader, _aten.select.int, (found, 1, i), rows.select(1, i)) for i in range(value.ndim)]


def _gather_rows(graph: fx.Graph, node: fx.Node, numbers: _Numbers) -> None:
    """The gradient of what masked_scatter put in: rows of the mask's own dimensions, and zeros for what was not read."""
    gradient, mask, sizes = node.args
    assert isinstance(gradient, fx.Node) and isinstance(mask, fx.Node)
    row = _row_of(gradient, mask)
    wanted = [n for n in sizes if isinstance(n, int)]  # type: ignore[union-attr]
    if row is None or len(wanted) < len(sizes):  # type: ignore[arg-type]
        return
    n_rows, rest = divmod(math.prod(wanted), math.prod(row))
    if rest or not n_rows:
        return
    value = _value(node)
    with graph.inserting_before(node):
        base = _without_last(node, _unexpanded(mask), len(row))
        columns = numbers.of(node, base, n_rows)
        if not _is_plain(_value(gradient)):  # rows would lie as the gradient does
            plain = torch.empty_like(_value(gradient), memory_format=torch.contiguous_format)
            gradient = _call(node, _aten.clone.default, (gradient,), plain, memory_format=torch.contiguous_format)
        rows = _call(node, _aten.index.Tensor, (gradient, columns), value.new_empty((n_rows, *row)))
        if not numbers.is_certain(base, n_rows):
            unread = _call(node, _aten.lt.Scalar, (columns[0], 0), value.new_empty((n_rows,), dtype=torch.bool))
            column = unread.meta["val"].view(-1, *[1] * len(row))
            unread = _call(node, _aten.reshape.default, (unread, list(column.shape)), column)
            rows = _call(node, _aten.masked_fill.Scalar, (rows, unread, 0), value.new_empty((n_rows, *row)))
    if n_rows == value.shape[0] and row == list(value.shape[1:]):
        node.replace_all_uses_with(rows)
        graph.erase_node(node)
    else:
        node.target, node.args = _aten.reshape.default, (rows, sizes)


def _row_of(gradient: fx.Node, mask: fx.Node) -> list[int] | None:
    """The sizes of the last dimensions that a mask says nothing about; None where they are symbols, or it does not lie over the gradient."""
    whole, shape = _value(gradient).shape, _value(_unexpanded(mask)).shape
    if len(whole) != len(shape):
        return None
    n_own = next((i for i in range(len(shape), 1, -1) if not _is_one(shape[i - 1])), 1)
    row = [n for n in whole[n_own:] if isinstance(n, int)]
    return row if _told(whole[:n_own]) == _told(shape[:n_own]) and len(row) == len(whole) - n_own else None


def _unexpanded(mask: fx.Node) -> fx.Node:
    source = mask.args[0] if mask.target is _aten.expand.default else mask
    assert isinstance(source, fx.Node)
    return source if _value(source).ndim == _value(mask).ndim else mask


def _without_last(reader: fx.Node, mask: fx.Node, n_last: int) -> fx.Node:
    """The mask without its last dimensions, of one element each: what was unsqueezed, or a view."""
    for _ in range(n_last):
        value = _value(mask)
        if mask.target is _aten.unsqueeze.default and mask.args[1] in (-1, value.ndim - 1):
            mask = mask.args[0]  # type: ignore[assignment]
        else:
            mask = _call(reader, _aten.select.int, (mask, value.ndim - 1, 0), value.select(-1, 0))
    return mask


def _puts_one(node: fx.Node, position: int, mask: fx.Node) -> bool:
    """Whether one element is put, to a value that lies as a choice of two does. An index may lie on the host, what a choice is made by may not."""
    values, whole, accumulates = _value(node.args[2]), _value(node.args[0]), len(node.args) > 3 and node.args[3]
    return position == 0 and values.ndim == 0 and not accumulates and _is_plain(whole) and whole.device == _value(mask).device


def _choose(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> None:
    """One element wherever the mask is true."""
    whole, _, values = node.args[:3]
    value, over = _value(mask), _value(whole).ndim
    with graph.inserting_before(node):
        mask = _as_bool(node, mask)
        for _ in range(over - value.ndim):
            mask = _call(node, _aten.unsqueeze.default, (mask, -1), _value(mask).unsqueeze(-1))
    node.target, node.args = _aten.where.self, (mask, values, whole)


def _as_bool(reader: fx.Node, mask: fx.Node) -> fx.Node:
    """The mask itself, or where a mask of bytes is no zero."""
    value = _value(mask)
    return mask if value.dtype == torch.bool else _call(reader, _aten.ne.Scalar, (mask, 0), torch.empty_like(value, dtype=torch.bool))


def _masks_of(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    for position, index in enumerate(node.args[1]):  # type: ignore[arg-type]
        if isinstance(index, fx.Node) and _value(index).dtype in _MASKS:
            yield position, index


def _mask_of(node: fx.Node) -> tuple[int, fx.Node] | None:
    """The mask of some dimensions that alone is the index, and the one that it begins at."""
    found = list(_masks_of(node))
    alone = len(found) == 1 and sum(index is not None for index in node.args[1]) == 1  # type: ignore[union-attr]
    return found[0] if alone and _value(found[0][1]).ndim else None


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1


def _told(sizes: Sequence[int | torch.SymInt]) -> list[object]:
    return [expr_of(n) for n in sizes]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous, for any size of a symbol."""
    return _told(tensor.stride()) == _told(tensor.new_empty(tensor.shape).stride())


def _value(node: object) -> torch.Tensor:
    assert isinstance(node, fx.Node)
    value: torch.Tensor = node.meta["val"]
    return value


def _call(reader: fx.Node, op: torch._ops.OpOverload, args: tuple[object, ...], value: torch.Tensor | None, **kwargs: object) -> fx.Node:
    """A call that belongs to the module of its reader."""
    node = reader.graph.call_function(op, args, kwargs)  # type: ignore[arg-type]
    node.meta.update(reader.meta)
    node.meta["val"] = value
    return node
