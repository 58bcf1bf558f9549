"""Values as JSON that differs wherever they do. What has no such form raises: a key never leaves out what it cannot tell."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType

import torch
import torch.fx as fx

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]

# Whose functions are told by their name: their versions and sources are part of every key.
_KNOWN_ROOTS = frozenset({"torch", "operator", "_operator", "math", "builtins", "fxoffload", "transformers", "logging"})
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", "fxo", "bitsandbytes", "transformers"})
_BY_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unstored(Exception):
    """Why a step is not in the compile cache, in words."""


def canonical(document: Json) -> str:
    """The one text of a JSON value, a single line."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def described(value: object) -> Json:
    """`value` as JSON. Raises Unstored for a value of a kind that is not known."""
    if value is None or isinstance(value, (bool, int, str)) and not isinstance(value, Enum):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, Enum):
        return {type(value).__qualname__: described(value.value)}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {type(value).__name__: str(value.node.expr)}
    if isinstance(value, _BY_TEXT):
        return {type(value).__name__: str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if value is Ellipsis:
        return {"ellipsis": None}
    return _collected(value)


def _collected(value: object) -> Json:
    if isinstance(value, list):
        return [described(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [described(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted((described(item) for item in value), key=canonical)}
    if isinstance(value, Mapping):
        return {"mapping": sorted(([described(k), described(v)] for k, v in value.items()), key=canonical)}
    if isinstance(value, slice):
        return {"slice": [described(value.start), described(value.stop), described(value.step)]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
        return {f"{type(value).__module__}.{type(value).__qualname__}": shown}
    return {"function": _function_name(value)}


def _function_name(value: object) -> str:
    """Where a function or class is found again, as "module.name". Raises Unstored when it is not there, or anyone could put it there."""
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        if str(value).split(".", 1)[0] not in _KNOWN_NAMESPACES:
            raise Unstored(f"the op {value} is of an unknown library")
        return f"op {value}"
    if isinstance(value, torch._ops.HigherOrderOperator):
        return f"higher-order op {value.name()}"
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodDescriptorType)):
        raise Unstored(f"a value of {type(value).__name__} has no description")
    owner = getattr(value, "__objclass__", None)
    module = str(getattr(owner or value, "__module__", None) or "")
    found: object = sys.modules.get(module)
    for word in value.__qualname__.split("."):
        found = getattr(found, word, None)
    found = found if found is value else getattr(sys.modules.get(module), value.__name__, None)
    if found is not value or module.split(".", 1)[0] not in _KNOWN_ROOTS:
        raise Unstored(f"the function {module}.{value.__qualname__} is not of a known library")
    return f"{module}.{value.__qualname__}"

