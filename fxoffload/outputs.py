"""What a planned training forward returns: only a scalar `loss` takes part in backward, the rest computes itself when read.

An output that the graph returns drags a full-size tangent into backward and lives into the next forward (the logits of an 8B
model at 4 x 2048 tokens: 2 + 2 GiB). So the graph returns, in place of every larger output, an empty tensor whose shape carries the
output's; the caller gets a `LazyTensor` (`lazy`) that runs one planned forward without gradients on its first use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.optim.optimizer import register_optimizer_step_post_hook

from .graph import returned
from .lazy import LazyTensor, Rows
from .walk import Walks


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


def with_lazy_outputs(out: Any, compute: Callable[[], Mapping[str, Any]], by_rows: bool) -> Any:
    """`out` whose shadows are LazyTensors; the first one read calls `compute`, once for all of them. `by_rows`: what it gives may be rows."""
    results: list[Mapping[str, Any]] = []
    pending = [compute]

    def read(key: str, path: tuple[int, ...]) -> torch.Tensor:
        if not results:
            results.append(pending[0]())
            pending.clear()  # what it holds of the call lives no longer than it must
        value = results[0][key]
        for position in path:
            value = value[position]
        return value.detach()  # type: ignore[no-any-return]

    for key in list(out.keys()):
        if key != "loss":
            out[key] = _lazy(out[key], by_rows, functools.partial(read, key), ())
    return out


def _lazy(value: Any, by_rows: bool, read: Callable[[tuple[int, ...]], torch.Tensor], path: tuple[int, ...]) -> Any:
    if _is_shadow(value):
        return LazyTensor.of(LeftOutOfTraining(by_rows, lambda: read(path)), value.shape[1:], value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return type(value)([_lazy(item, by_rows, read, (*path, i)) for i, item in enumerate(value)])
    return value


class LeftOutOfTraining:
    """The Source of an output that a training graph has left out: what a forward alone returns in its place, which may be rows again."""

    def __init__(self, by_rows: bool, read: Callable[[], torch.Tensor]) -> None:
        self.by_rows, self._read = by_rows, read

    def whole(self) -> torch.Tensor:
        """The output."""
        value = self._read()
        return value.materialize() if isinstance(value, LazyTensor) else value

    def rows(self) -> Rows | None:
        """Of the output, None where it is there."""
        value = self._read()
        return value._root.source.rows() if isinstance(value, LazyTensor) else None


class Writes:
    """Tells whether a model's parameters were written: `state()` differs after a write in place and after an optimizer's step.

    The steps are counted apart because fused and 8-bit optimizers write without a trace in the parameters' versions. `walks`: over the model.
    """

    def __init__(self, walks: Walks) -> None:
        self._walks, self._n_steps = weakref.ref(walks), 0
        _watch_optimizers()
        _OPEN.add(self)

    def close(self) -> None:
        """Notes no more steps."""
        _OPEN.discard(self)

    def state(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Compare two of them, with the model's `parameters`."""
        return [self._n_steps, *(p._version for p in parameters)]

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        walks = self._walks()
        # Not model.parameters(): who asks for those may write them, and waits for the copies that read them.
        ours = set(map(id, walks.now().parameters)) if walks is not None else set()
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
