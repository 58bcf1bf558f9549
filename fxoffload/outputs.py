"""What a planned training forward returns: only a scalar `loss` takes part in backward, the rest computes itself when read.

An output that the graph returns drags a full-size tangent into backward and lives into the next forward (the logits of an 8B
model at 4 x 2048 tokens: 2 + 2 GiB). So the graph returns, in place of every larger output, an empty tensor whose shape carries the
output's; the caller gets a `LazyTensor` that runs one planned forward without gradients on its first use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from .graph import returned


def only_loss(out: Any) -> Any:
    """`out` with every tensor besides the scalar `loss` detached: scalars as they are, larger ones as shadows. Traced by Dynamo.

    An `out` without a scalar loss is returned as it is.
    """
    if isinstance(out, dict):
        loss = out.get("loss")
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            for key in list(out.keys()):
                if key != "loss":
                    out[key] = _shadow(out[key])
    return out


def detached(out: Any) -> Any:
    """As `only_loss`, with the larger outputs computed in the graph. Traced by Dynamo."""
    if isinstance(out, dict):
        loss = out.get("loss")
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            for key in list(out.keys()):
                if key != "loss":
                    out[key] = _detach(out[key])
    return out


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)([_detach(item) for item in value])
    return value


def _shadow(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach() if value.ndim == 0 else value.detach().new_empty((0, *value.shape))
    if isinstance(value, (tuple, list)):
        return type(value)([_shadow(item) for item in value])
    return value


def returns_shadows(graph: fx.Graph) -> bool:
    """True when the captured Step `graph` returns a shadow."""
    outputs, _ = returned(graph)
    return any(isinstance(n, fx.Node) and _is_shadow(n.meta.get("val")) for n in outputs)


def has_shadows(out: Any) -> bool:
    """True when `only_loss` replaced something in `out`."""
    return isinstance(out, dict) and any(_is_shadow(leaf) for key, value in out.items() if key != "loss" for leaf in _leaves(value))


def _is_shadow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 0


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def with_lazy_outputs(out: Any, compute: Callable[[], Mapping[str, Any]]) -> Any:
    """`out` whose shadows are LazyTensors; the first one read calls `compute`, once for all of them."""
    results: list[Mapping[str, Any]] = []

    def read(key: str, path: tuple[int, ...]) -> torch.Tensor:
        if not results:
            results.append(compute())
        value = results[0][key]
        for position in path:
            value = value[position]
        return value.detach()  # type: ignore[no-any-return]

    for key in list(out.keys()):
        if key != "loss":
            out[key] = _lazy(out[key], key, (), read)
    return out


def _lazy(value: Any, key: str, path: tuple[int, ...], read: Callable[[str, tuple[int, ...]], torch.Tensor]) -> Any:
    if _is_shadow(value):
        return LazyTensor(value, lambda: read(key, path))
    if isinstance(value, (tuple, list)):
        return type(value)([_lazy(item, key, (*path, i), read) for i, item in enumerate(value)])
    return value


class Writes:
    """Tells whether a model's parameters were written: `state()` differs after a write in place and after an optimizer's step.

    The steps are counted apart because fused and 8-bit optimizers write without a trace in the parameters' versions.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._n_steps = weakref.ref(model), 0
        _watch_optimizers()
        _OPEN.add(self)

    def close(self) -> None:
        """Notes no more steps."""
        _OPEN.discard(self)

    def state(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Compare two of them, with the model's `parameters`."""
        return [self._n_steps, *(p._version for p in parameters)]

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        ours = {id(p) for p in model.parameters()} if model is not None else set()
        self._n_steps += any(id(p) in ours for group in optimizer.param_groups for p in group["params"])


_OPEN: weakref.WeakSet[Writes] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """One hook for the process, for good: torch walks its table of hooks, and a hook that ends with its owner, whenever the garbage
    collector comes by, would change the table under it."""

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for writes in list(_OPEN):
            writes._note(optimizer)

    register_optimizer_step_post_hook(stepped)


class LazyTensor(torch.Tensor):
    """A detached tensor that is computed when an operation first reads it. Shape, dtype and device are known before."""

    _compute: Callable[[], torch.Tensor] | None
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, shadow: torch.Tensor, compute: Callable[[], torch.Tensor]) -> LazyTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape[1:], dtype=shadow.dtype, device=shadow.device, requires_grad=False
        )
        made._compute, made._value = compute, None
        return made  # type: ignore[no-any-return]

    def materialize(self) -> torch.Tensor:
        """The plain tensor, computed on the first call."""
        if self._value is None:
            assert self._compute is not None
            self._value = self._compute()
            self._compute = None
        return self._value

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.materialize())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _DEFERRED and isinstance(args[0], LazyTensor):
            return _defer(func, args, kwargs or {})
        plain_args, plain_kwargs = pytree.tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain_args, plain_kwargs = pytree.tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def _defer(func: Any, args: Any, kwargs: Any) -> LazyTensor:
    """`func` of a LazyTensor as another one: a dtype conversion nobody reads costs nothing."""
    source = args[0]
    with torch._C.DisableTorchFunctionSubclass():
        meta = func(torch.empty((0, *source.shape), dtype=source.dtype, device=source.device), *args[1:], **kwargs)
    return LazyTensor(meta, lambda: func(source.materialize(), *args[1:], **kwargs))


_FREE = frozenset({
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__, torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.element_size, torch.Tensor.__len__, torch.Tensor.ndimension,
})
_DEFERRED = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.detach})
