"""Capture: what Dynamo's graph inputs are, and how large their symbolic sizes may become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
import torch.fx as fx
from torch import nn

from .graph import Role
from .joint import InputRef
from .places import named_constants, named_weights
from .torch_compat import source_names


def input_refs(gm: fx.GraphModule, scope: Mapping[str, object], model: nn.Module) -> list[InputRef]:
    """One InputRef per placeholder of a Dynamo graph. `scope`: the traced function's locals by name."""
    parameters = {id(p): (fqn, p) for fqn, p in named_weights(model)}
    buffers = {id(b): fqn for fqn, b in named_constants(model)}
    refs: list[InputRef] = []
    for position, source in enumerate(source_names(gm)):
        value = _evaluate(source, scope)
        if id(value) in parameters:
            fqn, parameter = parameters[id(value)]
            refs.append(InputRef(Role.PARAMETER, fqn, fqn, parameter.requires_grad))
        elif id(value) in buffers:
            refs.append(InputRef(Role.BUFFER, buffers[id(value)], buffers[id(value)]))
        else:
            refs.append(InputRef(Role.BATCH, _plain_name(source, position)))
    return refs


def _evaluate(source: str | None, scope: Mapping[str, object]) -> object:
    """The object a guard source names, None when it is not reachable from the call's locals."""
    if source is None or not source.startswith("L["):
        return None
    try:
        # The text is Dynamo's own source expression over the locals of our traced function, never the user's.
        return eval(source, {"__builtins__": {}}, {"L": dict(scope)})  # noqa: S307
    except (KeyError, IndexError, AttributeError, TypeError, NameError, SyntaxError):
        return None


def _plain_name(source: str | None, position: int) -> str:
    if source is None:
        return f"symbol#{position}"
    words = re.findall(r"'([^']+)'|\[(\d+)\]", source)
    name = ".".join(a or b for a, b in words)
    return f"batch.{name}" if name else f"batch#{position}"


def batch_tensors(value: object, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors of a batch with their dotted names, in order."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    items: Sequence[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    return [pair for key, item in items for pair in batch_tensors(item, f"{name}.{key}" if name else str(key))]


def dynamic_dims(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a batch tensor that may change from call to call: batch, and sequence where values are tokens."""
    if tensor.ndim == 0:
        return ()
    if tensor.ndim == 3 and name.endswith("position_ids"):
        return (1, 2)  # an axis of rotation comes first
    tokens = not tensor.is_floating_point() or name.endswith("inputs_embeds")
    return (0, 1) if tokens and tensor.ndim >= 2 else (0,)
