"""Outputs that are computed when an operation first reads them, and of which operations read rows.

A `LazyTensor` knows its shape, dtype and device. Where its Source can make single rows, ops that treat every row (the last dimension) by
itself and selections of rows are noted (`recorded`); an op that makes something small of every row is then computed of the rows, and the
whole is never there. Everything else gets the plain tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from . import recorded
from .recorded import LOGITS, Expression


class Rows(Protocol):
    """The rows of a deferred output."""

    def read(self, expression: Expression, index: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """What the expression gives of all rows, or of those that `index` names, in order; each result has a row of its own for each."""


class Source(Protocol):
    """What an output is made of. `by_rows`: whether ops on rows are worth noting."""

    by_rows: bool

    def whole(self) -> torch.Tensor:
        """The plain tensor."""

    def rows(self) -> Rows | None:
        """What makes single rows, None where the whole is there."""


@dataclass(slots=True)
class Root:
    """What all LazyTensors of one output share: its Source and, in order, who they are. `is_real`: one was written into, so that from now
    on all of them are plain tensors that share memory as PyTorch's would."""

    source: Source
    members: list[weakref.ref[LazyTensor]] = field(default_factory=list)
    is_real: bool = False

    def make_real(self) -> None:
        """Gives every member its plain tensor: views look into what they are views of."""
        if not self.is_real:
            self.is_real = True
            for member in [ref() for ref in self.members]:
                if member is not None:
                    member._value = member._compute()


@dataclass(frozen=True, slots=True)
class View:
    """Which rows of an output, and what of each: `index` has the leading shape; None: all, in order."""

    expression: Expression = LOGITS
    index: torch.Tensor | None = None

    @property
    def is_all(self) -> bool:
        """Whether it is the output itself."""
        return self.expression is LOGITS and self.index is None


class LazyTensor(torch.Tensor):
    """See the module. `_compute` makes the plain tensor of the whole output."""

    _root: Root
    _view: View
    _compute: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, root: Root, view: View, compute: Callable[[], torch.Tensor],
    ) -> LazyTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=False)
        made._root, made._view, made._compute, made._value = root, view, compute, None
        root.members.append(weakref.ref(made))
        return made  # type: ignore[no-any-return]

    @staticmethod
    def of(source: Source, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> LazyTensor:
        """The output that `source` makes."""
        return LazyTensor(shape, dtype, device, Root(source), View(), source.whole)

    def derived(self, shape: Sequence[int], dtype: torch.dtype, view: View, compute: Callable[[], torch.Tensor]) -> LazyTensor:
        """What an op makes of this one, to be computed when it is read."""
        return LazyTensor(shape, dtype, self.device, self._root, view, compute)

    def materialize(self) -> torch.Tensor:
        """The plain tensor, computed on the first call."""
        if self._value is None:
            rows = None if self._view.is_all or not self._root.source.by_rows else self._root.source.rows()
            self._value = self._compute() if rows is None else rows.read(self._view.expression, self._view.index)[0].reshape(self.shape)
        return self._value

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.materialize())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], LazyTensor) else None
        if recorded.writes(func, kwargs):
            for lazy in _lazy_in((args, kwargs)):
                lazy._root.make_real()
        elif first is not None and not first._root.is_real:
            noted = _noted(func, first, args, kwargs)
            if noted is not None:
                return noted
        plain_args, plain_kwargs = pytree.tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain_args, plain_kwargs = pytree.tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def _lazy_in(value: Any) -> list[LazyTensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, LazyTensor)]


def _noted(func: Any, first: LazyTensor, args: Any, kwargs: Any) -> Any:
    """What an op gives that need not read the output, or only its rows; None for any other op."""
    if not first._root.source.by_rows:
        return _converted(func, first, args, kwargs) if func in _CONVERSIONS else None
    # Autocast would have ops of rows computed in another dtype now than when they are read.
    under_autocast = torch.is_autocast_enabled(first.device.type)
    for note in (_selected, _kept) if not under_autocast or func in _CONVERSIONS else (_selected,):
        noted = note(func, first, args, kwargs)
        if noted is not None:
            return noted
    return None if under_autocast else _reduced(func, first, args, kwargs)


def _converted(func: Any, first: LazyTensor, args: Any, kwargs: Any) -> LazyTensor:
    meta = recorded.on_meta(func, args, kwargs)
    return first.derived(meta.shape, meta.dtype, View(), lambda: func(first.materialize(), *args[1:], **kwargs))


def _selected(func: Any, first: LazyTensor, args: Any, kwargs: Any) -> LazyTensor | None:
    """Rows of `first`, or `first` with other leading sizes."""
    lead = recorded.Lead(tuple(first.shape), first._view.index, first.device)
    index = recorded.selection(func, lead, args, kwargs)
    if index is recorded.NOT_ROWS:
        return None
    shape = recorded.selected_shape(func, first.shape, index, args, kwargs)
    view = View(first._view.expression, index)  # type: ignore[arg-type]
    return first.derived(shape, first.dtype, view, lambda: func(first.materialize(), *args[1:], **kwargs))


def _kept(func: Any, first: LazyTensor, args: Any, kwargs: Any) -> LazyTensor | None:
    """A value as large, computed of each row alone."""
    lazies = _lazy_in((args, kwargs))
    alike = all(
        lazy._root is first._root and lazy._view.index is first._view.index and lazy.shape == first.shape for lazy in lazies)
    operands = pytree.tree_map_only(LazyTensor, lambda lazy: lazy._view.expression, (args, kwargs))
    expression = recorded.kept(func, first.ndim, *operands) if alike else None
    if expression is None:
        return None
    meta = recorded.on_meta(func, args, kwargs)

    def compute() -> torch.Tensor:
        plain_args, plain_kwargs = pytree.tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs))
        return func(*plain_args, **plain_kwargs)  # type: ignore[no-any-return]

    return first.derived(meta.shape, meta.dtype, View(expression, first._view.index), compute)


def _reduced(func: Any, first: LazyTensor, args: Any, kwargs: Any) -> Any:
    """What an op makes of every row, computed of the rows; None for another op, and where there are none."""
    if len(_lazy_in((args, kwargs))) > 1:
        return None
    found = recorded.reduced(func, tuple(first.shape), first.device, (first._view.expression, *args[1:]), kwargs)
    if found is None:
        return None
    rows = first._root.source.rows()
    if rows is None:
        return None
    meta, index = recorded.on_meta(func, args, kwargs), first._view.index
    if found.lead_key is not None:
        index = recorded.Lead(tuple(first.shape), index, first.device).numbers()[found.lead_key]
    values = rows.read(found.expression, index)
    if isinstance(meta, torch.Tensor):
        return values[0].reshape(meta.shape)
    return type(meta)([value.reshape(like.shape) for value, like in zip(values, meta)])


_FREE = frozenset({
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__, torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.element_size, torch.Tensor.__len__, torch.Tensor.ndimension, torch.Tensor.is_nested.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__, torch.Tensor.is_quantized.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
})
_CONVERSIONS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.detach})
