"""Writes one node of a Graph as one line of text (the form is described in `text`)."""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from enum import Enum

import sympy
import torch
import torch.fx as fx

from . import ops
from .effects import Alloc, Tier
from .graph import OUTPUT, NodeInfo, info, name_of, tensors_in
from .liveness import Liveness
from .text_words import DTYPES, FORMATS, LAYOUTS, MODULES, contiguous_strides, expr_of, is_void, void_name

_PLAIN_NAME = re.compile(r'[^\s,()\[\]{}"=:|<>]+')


class Writer:
    """Writes the lines of one graph. `offsets`: types say, too, at which element of its memory a tensor begins where that is not the first."""

    def __init__(self, graph: fx.Graph, live: Liveness | None, offsets: bool = False) -> None:
        self._offsets = offsets
        self._of = live.of if live is not None else {}
        self._device = _compute_device(graph)
        self._types: dict[object, str] = {}
        self._targets: dict[object, str] = {}
        self._names: dict[fx.Node, str] = {}

    def line(self, node: fx.Node) -> str:
        entry = info(node)
        if node.op == "output":
            return f"return {self._value(node, node.args[0])}" + _attributes(node, entry, entry.name != OUTPUT)
        if node.op == "call_function" and is_void(node.target):
            return self._call(node) + _attributes(node, entry, entry.name != void_name(node))
        return self._name(node) + self._annotation(node) + " = " + self._body(node) + _attributes(node, entry, False)

    def _body(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr" and node.meta.get("val") is not None:
            return f"attr {json.dumps(node.target)}"
        if node.op == "call_function":
            return self._call(node)
        raise ValueError(f"{name_of(node)}: a {node.op} of {node.target} has no text")

    def _call(self, node: fx.Node) -> str:
        target = self._target(node)
        arguments = [self._value(node, value) for value in node.args]
        arguments += [f"{key}={self._value(node, value)}" for key, value in node.kwargs.items()]
        return f"{target} {', '.join(arguments)}" if arguments else target

    def _target(self, node: fx.Node) -> str:
        known = self._targets.get(node.target)
        if known is None:
            known = self._targets[node.target] = _target_word(node)
        return known

    def _name(self, node: fx.Node) -> str:
        known = self._names.get(node)
        if known is None:
            name = name_of(node)
            known = self._names[node] = "%" + (name if _PLAIN_NAME.fullmatch(name) else json.dumps(name))
        return known

    def _annotation(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if value is None:
            return ""
        storages = self._of.get(node, ())
        tier = storages[0].tier if storages else info(node).tier
        return f": {self._type(node, value)}" + (f"@{tier.value}" if tier is not Tier.DEVICE else "")

    def _type(self, node: fx.Node, value: object) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor_type(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{_SYM_WORDS[type(value)]}({self._expr(value.node.expr)})"
        if isinstance(value, (bool, int, float)):
            return f"{type(value).__name__}({_literal(value)})"
        if isinstance(value, (tuple, list)):
            items = ",".join("none" if item is None else self._type(node, item) for item in value)
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        raise ValueError(f"{name_of(node)}: a value of {type(value).__name__} has no text")

    def _tensor_type(self, tensor: torch.Tensor) -> str:
        shape = tuple(expr_of(size) for size in tensor.shape)
        stride = tuple(expr_of(size) for size in tensor.stride())
        offset = expr_of(tensor.storage_offset()) if self._offsets else 0
        key = (tensor.dtype, shape, stride, offset)
        if key not in self._types:
            sizes = ",".join(map(self._expr, shape))
            strides = "" if stride == contiguous_strides(shape) else ";" + ",".join(map(self._expr, stride))
            begin = "" if offset == 0 else f"{'' if strides else ';'};{self._expr(offset)}"
            self._types[key] = f"{self._dtype(tensor)}[{sizes}{strides}{begin}]"
        return self._types[key]

    @staticmethod
    def _dtype(tensor: torch.Tensor) -> str:
        return _dtype_word(tensor.dtype)

    @staticmethod
    def _expr(expr: int | sympy.Basic) -> str:
        return str(expr).replace(" ", "")

    def _value(self, node: fx.Node, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, (list, tuple)):
            items = ", ".join([self._value(node, item) for item in value])
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, torch.device):
            return self._device_value(node, value)
        if isinstance(value, slice):
            return "slice" + self._value(node, (value.start, value.stop, value.step))
        if isinstance(value, torch.SymInt):
            return f"int({json.dumps(self._expr(value.node.expr))})"
        return _constant(node, value)

    def _device_value(self, node: fx.Node, device: torch.device) -> str:
        spec = ops.spec_of(node)
        word = _device_word(spec) if spec is not None else None
        if word is not None:
            return word
        # A 0-dim tensor may be on either side; tracing on an accelerator leaves some on the host, tracing on the CPU cannot.
        value = node.meta.get("val")
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
        same = self._device is None or is_scalar or _same_device(device, self._device)
        return "device" if same else "host"


_SYM_WORDS = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a == b or (a.type == b.type and a.type != "cpu")


def _dtype_word(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def _target_word(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::", 1)
        overload = target._overloadname
        return f"{namespace}.{name}" + ("" if overload == "default" else f".{overload}")
    if target is operator.getitem:
        return "getitem"
    name = getattr(target, "__name__", "")
    for word, module in MODULES.items():
        if name and getattr(module, name, None) is target:
            return f"{word}.{name}"
    raise ValueError(f"{name_of(node)}: a call of {target} has no text")


def _constant(node: fx.Node, value: object) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return _literal(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, torch.dtype):
        return _dtype_word(value)
    if isinstance(value, torch.memory_format):
        return FORMATS[value]
    if isinstance(value, torch.layout) and value in LAYOUTS:
        return LAYOUTS[value]
    if isinstance(value, complex):
        return f"complex({_literal(value.real)}, {_literal(value.imag)})"
    if value is Ellipsis:
        return "..."
    raise ValueError(f"{name_of(node)}: an argument of {type(value).__name__} has no text: {value!r}")


def _literal(value: bool | int | float | None) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _attributes(node: fx.Node, entry: NodeInfo, with_name: bool) -> str:
    shown = {"name": entry.name} if with_name else {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        # an input's tier is part of its type
        if field.name == "name" or (field.name == "tier" and node.op == "placeholder"):
            continue
        if value != field.default:
            shown[field.name] = value
    if not shown:
        return ""
    return " {" + ", ".join(f"{k}={_attribute(v)}" for k, v in shown.items()) + "}"


def _attribute(value: object) -> str:
    return value.value if isinstance(value, Enum) else json.dumps(value)


def _compute_device(graph: fx.Graph) -> torch.device | None:
    """Where the graph computes: what its copies to the device name, else the device of its first fake tensor that is on it."""
    for node in graph.nodes:
        spec = ops.spec_of(node)
        if spec is not None and _device_word(spec) == "device":
            device = spec.argument(node, "device")
            assert isinstance(device, (str, torch.device))
            return torch.device(device)
    for node in graph.nodes:
        tensors = tensors_in(node.meta.get("val"))
        if tensors and info(node).tier is Tier.DEVICE:
            return tensors[0].device
    return None


def _device_word(spec: ops.Spec) -> str | None:
    """What a memory op's device argument stands for; None for an op without one."""
    if all(argument.name != "device" for argument in spec.op._schema.arguments):
        return None
    to_host = any(isinstance(e, Alloc) and e.tier is not Tier.DEVICE for e in spec.effects)
    # The generator's state lives on the host, the generator it names on the device.
    return "host" if to_host and "rng_state" not in spec.name else "device"
