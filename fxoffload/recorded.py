"""Which of PyTorch's functions treat every row (the last dimension) of a tensor by itself, and what they do to rows, noted as expressions.

A selection of rows, or other leading sizes, are a selection of row numbers. Whatever is not known to be one of these is NOT one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.utils import _pytree as pytree

Number = (int, float)


@dataclass(frozen=True, eq=False, slots=True)
class Expression:
    """What is computed of rows [n, columns]: the method `name` of the first of `args`, which are Expressions, tensors with a row for each
    row, and constants. Without a name: the rows themselves."""

    name: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def program(self) -> tuple[fx.Graph, list[torch.Tensor]]:
        """A graph of the rows and the tensors that it reads, which returns a tuple, and these tensors."""
        graph, operands = fx.Graph(), _operands(self)
        made: dict[Expression | int, fx.Node] = {LOGITS: graph.placeholder("rows")}
        for i, tensor in enumerate(operands):
            made[id(tensor)] = graph.placeholder(f"operand_{i}")
        result = _written(self, graph, made)
        graph.output(result if self.name in _SEVERAL else (result,))
        return graph, operands


LOGITS = Expression()


class NotRows:
    """No selection of rows."""


NOT_ROWS = NotRows()


def _operands(expression: Expression) -> list[torch.Tensor]:
    """The tensors that an expression reads: only the last op reads any."""
    return [leaf for leaf in pytree.tree_leaves((expression.args, dict(expression.kwargs))) if isinstance(leaf, torch.Tensor)]


def _written(expression: Expression, graph: fx.Graph, made: dict[Expression | int, fx.Node]) -> fx.Node:
    """The node of an expression, made once."""
    if expression not in made:
        place = lambda leaf: (  # noqa: E731
            _written(leaf, graph, made) if isinstance(leaf, Expression) else made[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf)
        args, kwargs = pytree.tree_map(place, (expression.args, dict(expression.kwargs)))
        made[expression] = graph.call_method(expression.name, args, kwargs)
    return made[expression]


# The functions ---------------------------------------------------------------------------------------------------------

_CASTS = ("float", "half", "bfloat16", "double", "to")
_POINTWISE = (
    *_CASTS, "neg", "exp", "exp2", "log", "log2", "log1p", "sigmoid", "tanh", "abs", "square", "sqrt", "clamp", "add", "sub", "mul", "div",
    "true_divide", "pow", "gt", "lt", "ge", "le", "eq", "ne", "isnan", "isfinite", "isinf", "__pow__",
)
# Where each has its dimension, the tensor itself being argument 0. None: the last one where nothing is said.
_ALONG = {"softmax": 1, "log_softmax": 1}
_REDUCING = {
    "argmax": 1, "argmin": 1, "max": 1, "min": 1, "amax": 1, "amin": 1, "topk": 2, "logsumexp": 1, "sum": 1, "mean": 1, "any": 1, "all": 1,
    "gather": 1, "take_along_dim": 2,
}
_SEVERAL = frozenset({"max", "min", "topk"})
_VIEWS = ("view", "reshape", "flatten")
_ALIASES = ("detach", "contiguous")


def _named(names: Sequence[str]) -> dict[Callable[..., Any], str]:
    owners = (torch.Tensor, torch, F)
    return {getattr(owner, name): name for name in names for owner in owners if hasattr(owner, name)}


_KEPT_BY, _REDUCED_BY = _named((*_POINTWISE, *_ALONG)), _named(tuple(_REDUCING))
_SELECTED_BY = _named((*_VIEWS, *_ALIASES, "__getitem__"))
_WRITERS = frozenset({"__setitem__", *(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))})


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function may write into a tensor it is given."""
    name = getattr(func, "__name__", "")
    return name in _WRITERS or name.endswith("_") and not name.endswith("__") or kwargs.get("out") is not None


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The function's result without its values: shapes and dtypes, and the errors it would raise."""
    made = lambda t: torch.empty(tuple(t.shape), dtype=t.dtype, device="meta")  # noqa: E731
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        args, kwargs = pytree.tree_map_only(torch.Tensor, made, (args, kwargs))
        return func(*args, **kwargs)


def kept(func: Any, ndim: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Expression | None:
    """The expression of a function that gives a value as large of rows, scalars and values of the same rows; None for another."""
    name = _KEPT_BY.get(func)
    if name in _ALONG:
        found = _along_last(name, _ALONG[name], ndim, args, kwargs)
        return None if found is None else _constant_but_rows(name, *found)
    if name is None or name == "to" and not all(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
        return None
    return _constant_but_rows(name, args, kwargs)


def _constant_but_rows(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Expression | None:
    allowed = (Expression, *Number, str, torch.dtype, type(None))
    kwargs = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
    return Expression(name, args, kwargs) if all(isinstance(a, allowed) for a in (*args, *kwargs.values())) else None


def _along_last(
    name: str, position: int, ndim: int, args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments for rows [n, columns], where the function works along the last dimension of `ndim`."""
    dim = args[position] if len(args) > position else kwargs.get("dim", -1 if name == "topk" else None)
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    if len(dims) != 1 or not _is_number(dims[0]) or dims[0] not in (-1, ndim - 1):
        return None
    if len(args) > position:
        return (*args[:position], -1, *args[position + 1 :]), dict(kwargs)
    return args, {**kwargs, "dim": -1}


@dataclass(frozen=True, slots=True)
class Reduced:
    """What is computed of rows; `lead_key`: of those that this key selects."""

    expression: Expression
    lead_key: tuple[Any, ...] | None = None


def reduced(
    func: Any, shape: tuple[int, ...], device: torch.device, args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> Reduced | None:
    """What a function computes that makes something of its own of every row of `shape`; None for another function."""
    if func is torch.Tensor.__getitem__:
        return _columns(shape, args)
    name = _REDUCED_BY.get(func)
    found = _along_last(name, _REDUCING[name], len(shape), args, kwargs) if name is not None else None
    if found is None:
        return None
    args, others = found
    aligned = [_aligned(leaf, shape, device) for leaf in (*args[1:], *others.values())]
    if any(leaf is NOT_ROWS for leaf in aligned):
        return None
    values = (args[0], *aligned[: len(args) - 1]), dict(zip(others, aligned[len(args) - 1 :]))
    return Reduced(Expression(str(name), *values))


def _aligned(leaf: Any, shape: tuple[int, ...], device: torch.device) -> Any:
    """A tensor with the same leading sizes as rows of its own; constants as they are."""
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, (*Number, torch.dtype, type(None))) else NOT_ROWS
    if leaf.device != device or leaf.ndim != len(shape) or tuple(leaf.shape[:-1]) != shape[:-1]:
        return NOT_ROWS
    return leaf.reshape(-1, leaf.shape[-1]).contiguous()


def _columns(shape: tuple[int, ...], args: tuple[Any, ...]) -> Reduced | None:
    """Some columns of the rows that numbers and slices select."""
    items = _expanded(args[1], len(shape))
    if items is None or not all(isinstance(i, slice) or _is_number(i) for i in items) or len(items) != len(shape):
        return None
    # A copy: a view of rows would keep them all.
    columns = Expression("clone", (Expression("__getitem__", (args[0], (slice(None), items[-1]))),))
    return Reduced(columns, tuple(items[:-1]))


# Selections ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lead:
    """Rows of a tensor of this shape: `index` numbers them, None where they are all, in order."""

    shape: tuple[int, ...]
    index: torch.Tensor | None
    device: torch.device

    def numbers(self) -> torch.Tensor:
        """The number of each row, in the leading shape."""
        if self.index is not None:
            return self.index
        lead = self.shape[:-1]
        return torch.arange(torch.Size(lead).numel(), device=self.device).view(lead)


def selection(func: Any, lead: Lead, args: Any, kwargs: Any) -> torch.Tensor | None | NotRows:
    """The row numbers of what a function gives that selects rows or gives them other leading sizes; NOT_ROWS for another."""
    name = _SELECTED_BY.get(func)
    if name in _ALIASES:
        return lead.index if len(args) == 1 and not kwargs else NOT_ROWS
    if name in _VIEWS:
        if any(isinstance(a, torch.dtype) for a in (*args[1:], *kwargs.values())):
            return NOT_ROWS
        shape = on_meta(func, (torch.empty(lead.shape, device="meta"), *args[1:]), kwargs).shape
        if not len(shape) or shape[-1] != lead.shape[-1]:
            return NOT_ROWS
        return None if lead.index is None else lead.index.reshape(shape[:-1])
    if name == "__getitem__":
        items = _expanded(args[1], len(lead.shape))
        return NOT_ROWS if items is None else _picked(lead, items)
    return NOT_ROWS


def _picked(lead: Lead, items: list[Any]) -> torch.Tensor | NotRows:
    columns = slice(None)
    if _n_dims(items) == len(lead.shape):
        *items, columns = items
    if not isinstance(columns, slice) or columns != slice(None) or _n_dims(items) >= len(lead.shape):
        return NOT_ROWS
    return lead.numbers()[tuple(items)]


def selected_shape(func: Any, shape: Sequence[int], index: object, args: Any, kwargs: Any) -> Sequence[int]:
    """The shape of what `selection` has numbered."""
    if isinstance(index, torch.Tensor):
        return (*index.shape, shape[-1])
    return on_meta(func, (torch.empty(tuple(shape), device="meta"), *args[1:]), kwargs).shape  # type: ignore[no-any-return]


def _expanded(key: Any, ndim: int) -> list[Any] | None:
    """The items of an indexing key, an ellipsis written out; None where one is none of number, slice, None and tensor."""
    items = list(key) if isinstance(key, tuple) else [key]
    if not all(item is None or item is Ellipsis or isinstance(item, slice) or _is_number(item) or _is_plain(item) for item in items):
        return None
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        return None
    for i in dots:
        items[i : i + 1] = [slice(None)] * (ndim - _n_dims(items) + 1)
    return items


def _n_dims(items: Sequence[Any]) -> int:
    """How many dimensions the items index, an ellipsis as one."""
    return sum(item.ndim if _is_mask(item) else item is not None for item in items)


def _is_number(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_plain(item: Any) -> bool:
    return type(item) is torch.Tensor and item.dtype in (torch.bool, torch.int64, torch.int32) and (item.ndim > 0 or item.dtype is not torch.bool)


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype is torch.bool
