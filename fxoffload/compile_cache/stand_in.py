"""One node in place of a model: the same inputs, outputs of the same types, and nothing between them.

AOTAutograd makes its guards and run-time wrappers from what goes in and what comes out. Given this graph it makes the same ones,
without tracing what the entry of the cache has already; that they are the same is checked (`torch_compat.wrapper_facts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx as fx

from ..text_words import DTYPES, expr_of
from ..torch_compat import copy_origin
from .describe import Json, Unstored

_DTYPES = {word: dtype for dtype, word in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Output:
    """One output: sizes are numbers or names of symbols; contiguous."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | str, ...]
    differentiable: bool


def outputs_of(gm: fx.GraphModule, differentiable: Sequence[bool]) -> list[Json]:
    """What a Dynamo graph returns, as JSON. Raises Unstored for anything but contiguous tensors of simple sizes."""
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    if len(returned) != len(differentiable):
        raise Unstored("the graph returns something else than tensors")
    return [_output(node, trained) for node, trained in zip(returned, differentiable)]


def _output(node: object, differentiable: bool) -> Json:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or not value.is_contiguous():
        raise Unstored("an output is not a contiguous tensor")
    shape: list[Json] = []
    for size in map(expr_of, value.shape):
        if not isinstance(size, int) and not size.is_Symbol:
            raise Unstored(f"an output has a size of {size}")
        shape.append(size if isinstance(size, int) else str(size))
    return {"dtype": DTYPES[value.dtype], "device": str(value.device), "shape": shape, "differentiable": differentiable}


def stand_in(gm: fx.GraphModule, outputs: Sequence[Json]) -> fx.GraphModule:
    """A graph with the inputs of the Dynamo graph `gm` and outputs as told. Raises KeyError when a symbol of them is no input's size."""
    told = [_read(cast("dict[str, Any]", one)) for one in outputs]
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.find_nodes(op="placeholder"):
        new[node] = graph.node_copy(node)
        new[node].meta = dict(node.meta)
    sizes = _Sizes(graph, new)
    shapes = [tuple(size if isinstance(size, int) else sizes.of(size) for size in one.shape) for one in told]
    tensors = [made for node, made in new.items() if isinstance(node.meta.get("example_value"), torch.Tensor)]
    made = graph.call_function(_caller(told), (shapes, *tensors))
    graph.output(tuple(graph.call_function(_item, (made, i)) for i in range(len(told))))
    one_node = fx.GraphModule(torch.nn.Module(), graph)
    copy_origin(one_node, gm)
    return one_node


def _read(one: dict[str, Any]) -> Output:
    return Output(_DTYPES[one["dtype"]], torch.device(one["device"]), tuple(one["shape"]), bool(one["differentiable"]))


def _item(values: Sequence[torch.Tensor], position: int) -> torch.Tensor:
    return values[position]


def _caller(outputs: Sequence[Output]) -> Callable[..., tuple[torch.Tensor, ...]]:
    def stands_in(shapes: Sequence[Sequence[int]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return cast("tuple[torch.Tensor, ...]", _StandIn.apply(outputs, shapes, *tensors))

    return stands_in


class _Sizes:
    """Where in a graph the value of a symbol is: an input that is the symbol, else a dimension of one."""

    def __init__(self, graph: fx.Graph, inputs: dict[fx.Node, fx.Node]) -> None:
        self._graph = graph
        self._found: dict[str, fx.Node] = {}
        self._dimensions: dict[str, tuple[fx.Node, int]] = {}
        for node, made in inputs.items():
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt):
                self._found.setdefault(str(value.node.expr), made)
            elif isinstance(value, torch.Tensor):
                for i, size in enumerate(value.shape):
                    self._dimensions.setdefault(str(expr_of(size)), (made, i))

    def of(self, symbol: str) -> fx.Node:
        if symbol not in self._found:
            self._found[symbol] = self._graph.call_function(torch.ops.aten.sym_size.int, self._dimensions[symbol])
        return self._found[symbol]


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Sequence[Output], shapes: Sequence[Sequence[int]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.tensors = tensors
        made = tuple(torch.empty(shape, dtype=one.dtype, device=one.device) for one, shape in zip(outputs, shapes))
        ctx.mark_non_differentiable(*(value for one, value in zip(outputs, made) if not one.differentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        return (None, None, *(torch.empty_like(t) if needed else None for t, needed in zip(ctx.tensors, ctx.needs_input_grad[2:])))
