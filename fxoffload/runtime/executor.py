"""The eager executor: a lowered graph becomes one Python function that drops every value at its last use.

Memory nodes become plain callables bound to the engine; `release` becomes the drop itself. Never `fx.Interpreter`: it costs four
times as much per node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from .. import ops
from ..effects import Alloc, Tier
from ..graph import root_of, tensors_in
from ..layout import part_of
from ..torch_compat import boxed_codegen
from .transfers import SynchronousEngine, StreamEngine

Boxed = Callable[[list[object]], Sequence[object]]


def compile_eager(
    graph: fx.Graph, engine: SynchronousEngine | StreamEngine, finishes: bool, observe: Callable[..., None] | None = None
) -> Boxed:
    """A function of one list (which it empties) that runs `graph`.

    `finishes`: host results are readable when it returns. `observe` is called with every operator's result on the device and,
    to keep them, its operands.
    """
    lowered = _lower(graph, engine, observe)
    lowered.set_codegen(boxed_codegen())
    module = fx.GraphModule(root_of(graph), lowered)
    forward = module.forward

    def run(arguments: list[object]) -> Sequence[object]:
        with torch.no_grad():
            results = forward(arguments)
        if finishes:
            engine.finish()
        return results  # type: ignore[no-any-return]

    return boxed(run)


def boxed(run: Boxed) -> Boxed:
    """Marks `run` as one that takes its arguments as a list and empties it."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _lower(graph: fx.Graph, engine: SynchronousEngine | StreamEngine, observe: Callable[..., None] | None) -> fx.Graph:
    lowered = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target in (ops.release, ops.backward):
            continue
        if node.target is ops.wait and not engine.overlaps:
            new[node] = new[node.args[0]]  # type: ignore[index]
            continue
        new[node] = lowered.node_copy(node, lambda n: new[n])
        new[node].meta = {}
        _bind(new[node], engine)
        if observe is not None and _gives_device_bytes(node):
            # The operands too: they must live until their operator's result is counted, as they do while it runs.
            lowered.call_function(observe, (new[node], *(new[o] for o in node.all_input_nodes if isinstance(o.meta.get("val"), torch.Tensor))))
    return lowered


def _gives_device_bytes(node: fx.Node) -> bool:
    """False for what makes host memory, such as a generator's saved state: on plain "cpu" only the graph can tell them apart."""
    spec = ops.spec_of(node)
    tiers = [e.tier for e in spec.effects if isinstance(e, Alloc)] if spec is not None else []
    return node.op == "call_function" and bool(tensors_in(node.meta.get("val"))) and all(tier is Tier.DEVICE for tier in tiers)


def _bind(node: fx.Node, engine: SynchronousEngine | StreamEngine) -> None:
    if node.target is ops.swap_in:
        node.target, node.args = engine.swap_in, node.args[:1]
    elif node.target is ops.swap_in_many:
        node.target, node.args = engine.swap_in_many, node.args[:1]
    elif node.target is ops.part:
        node.target = part_of
    elif node.target is ops.swap_out:
        node.target, node.args = engine.swap_out, (node.args[0], node.args[2])
    elif node.target is ops.wait:
        node.target = engine.wait
    elif node.target is ops.rng_state:
        device = node.args[0]
        node.target, node.args = _Bound(ops.get_rng_state, device), ()
    elif node.target is ops.swap_rng_state:
        node.target, node.args = _Bound(_swap_rng_state, node.args[1]), node.args[:1]


class _Bound:
    """A callable with its device, under a name that generated code can print."""

    def __init__(self, function: Callable[..., object], device: object) -> None:
        self.function, self.device = function, device
        self.__name__, self.__module__ = function.__name__.strip("_"), __name__
        self.__qualname__ = self.__name__

    def __call__(self, *args: object) -> object:
        return self.function(*args, self.device)


def _swap_rng_state(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    before = ops.get_rng_state(device)
    ops.set_rng_state(state, device)
    return before
