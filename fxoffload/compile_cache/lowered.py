"""A lowered graph as JSON and back. What does not come back node for node as it was is not stored."""

from __future__ import annotations

import base64
import operator
from typing import Any, cast

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import text
from ..graph import Bounds, constant_of, info, module_path, output_of, set_constant, tensors_in
from ..text_words import DTYPES
from ..torch_compat import without_modes
from .describe import Json, Unstored, described

_MOST_CONSTANT_BYTES = 1 << 20
_SYMBOL_FUNCTIONS = (torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_ite, torch.sym_not)


def written(graph: fx.Graph, device: torch.device, mode: FakeTensorMode) -> dict[str, Json]:
    """The graph as JSON. Raises Unstored when `restored` would make another one of it."""
    try:
        with without_modes():
            stored: dict[str, Json] = {
                "text": text.render(graph, _bounds(graph), columns=False, offsets=True),
                "modules": [module_path(node) for node in graph.nodes],
                "constants": {str(n.target): _constant(constant_of(n)) for n in graph.find_nodes(op="get_attr")},
            }
        again = restored(stored, device, mode)
    except (ValueError, KeyError) as error:
        raise Unstored(f"a graph without a text: {error}") from None
    for a, b in zip(graph.nodes, again.nodes, strict=True):
        if _told(a) != _told(b):
            raise Unstored(f"{info(a).name} reads back as another node")
    return stored


def restored(stored: dict[str, Json], device: torch.device, mode: FakeTensorMode) -> fx.Graph:
    """The graph, its values in `mode`. Raises ValueError, KeyError or TypeError for what `written` cannot have made."""
    raw = cast("dict[str, Any]", stored)
    graph = text.parse(raw["text"], device, mode)
    output_of(graph).meta[text.BOUNDS] = text.parse_bounds(raw["text"])
    with without_modes():
        for node, path in zip(graph.nodes, raw["modules"], strict=True):
            if path:
                node.meta["nn_module_stack"] = {"": (f"L['module'].{path}", None)}
            if node.op == "get_attr":
                set_constant(node, _tensor(raw["constants"][node.target]))
            if node.op == "call_function":
                _check_target(node)
    return graph


def _bounds(graph: fx.Graph) -> Bounds:
    bounds = output_of(graph).meta[text.BOUNDS]
    assert isinstance(bounds, Bounds)
    return bounds


def _check_target(node: fx.Node) -> None:
    """A file may not call what no capture calls: ops, and arithmetic of sizes."""
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) or target in _SYMBOL_FUNCTIONS
    if not known and getattr(target, "__module__", None) not in (operator.add.__module__, "math"):
        raise ValueError(f"{node.name} calls {target}")


def _told(node: fx.Node) -> Json:
    """All of a node that anything after the lowering looks at, but for its own fx name."""
    target = None if node.op == "placeholder" else str(node.target)
    return described((
        node.op, target, _operands(node.args), _operands(dict(node.kwargs)), info(node), module_path(node), _type(node.meta.get("val"))))


def _operands(value: object) -> object:
    if isinstance(value, fx.Node):
        return ("node", info(value).name)
    if isinstance(value, (list, tuple)):
        items = [_operands(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: _operands(item) for key, item in value.items()}
    return value


def _type(value: object) -> object:
    """Dtype, sizes, strides and where it begins; a number as itself. The device is the tier's; scalars may be on either side."""
    tensors = tensors_in(value)
    if not tensors:
        return value
    return [(t.dtype, [described(n) for n in (*t.shape, *t.stride(), t.storage_offset())]) for t in tensors]


def _constant(tensor: torch.Tensor) -> Json:
    if tensor.nbytes > _MOST_CONSTANT_BYTES or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise Unstored(f"the graph holds a constant of {tensor.nbytes} bytes, {tensor.dtype}")
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "device": str(tensor.device), "bytes": base64.b64encode(content).decode()}


def _tensor(stored: dict[str, Any]) -> torch.Tensor:
    dtypes = {word: dtype for dtype, word in DTYPES.items()}
    content = bytearray(base64.b64decode(stored["bytes"]))
    flat = torch.frombuffer(content, dtype=dtypes[stored["dtype"]]) if content else torch.empty(0, dtype=dtypes[stored["dtype"]])
    return flat.reshape(stored["shape"]).to(stored["device"])
