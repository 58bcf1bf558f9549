"""The eager executor: a lowered graph becomes one Python function that drops every value at its last use.

Memory nodes become plain callables bound to the engine; `release` becomes the drop itself. Never `fx.Interpreter`: it costs four
times as much per node.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.fx as fx

from .. import ops
from ..effects import Alloc, Tier
from ..fusion import fused
from ..graph import info, operands, root_of, tensors_in
from ..layout import part_of
from ..torch_compat import boxed_codegen, keeps_graph
from .begun import Pair
from .device_arena import DeviceArena
from .fused import fused_call
from .placed import ALONE, LoadedThere, placed_call, places
from .recordings import Boxed, Recordings
from .replay import End, Replay
from .room import Room
from .scatters import SCATTERS
from .transfers import SynchronousEngine, StreamEngine

log = logging.getLogger("fxoffload")


def compile_eager(
    graph: fx.Graph, engine: SynchronousEngine | StreamEngine, end: End | None, observe: Callable[..., None] | None = None,
    arena: DeviceArena | None = None,
) -> Boxed:
    """A function of one list (which it empties) that runs `graph`.

    `end` is called when all is issued: the engine's wait for what the caller may do then (`gradients_end`, `Engine.settle`). `observe` is called with every operator's result on the device and,
    to keep them, its operands. `arena`: values with an offset lie there; without one all lie where the allocator puts them.
    """
    lowered = _lower(graph, engine, observe, arena)
    lowered.set_codegen(boxed_codegen())
    module = fx.GraphModule(root_of(graph), lowered)
    forward = module.forward

    def run(arguments: list[object]) -> Sequence[object]:
        with torch.no_grad():
            results = forward(arguments)
        if end is not None:
            end()
        return results  # type: ignore[no-any-return]

    return boxed(run)


def gradients_end(graph: fx.Graph, engine: SynchronousEngine | StreamEngine) -> End | None:
    """How the run of a backward ends: where it returns something in host memory the caller can read it then. Else nobody waits."""
    on_device = all(v.device == engine.device for node in operands(graph.output_node()) if node.op != "placeholder" for v in tensors_in(node.meta.get("val")))
    return None if on_device else engine.finish


def compile_placed(
    graph: fx.Graph, engine: SynchronousEngine | StreamEngine, end: End | None, arena: DeviceArena, continues: bool,
    room: Room, recordings: Recordings | None = None, replays: bool = False, pair: Pair | None = None,
) -> Boxed:
    """A function like `compile_eager`'s whose values lie in the arena, as long as the step has it for itself.

    A step that begins while another has not ended, and a backward that may be run again, get their memory from the allocator: what lies
    in the arena stays. `continues`: the graph is a backward, which has the arena if its forward had. `room`: what the step needs. `replays`:
    the step is to be replayed from a recording, one of `recordings`. `pair`: what the graph shares with the other half of its step.
    """
    if recordings is None or not replays:
        placed: Callable[[list[object]], Sequence[object]] = compile_eager(graph, engine, end, arena=arena)
    else:
        placed = Replay(graph, compile_eager(graph, engine, None, arena=arena), arena, room, recordings, end, not continues, pair)

    @functools.cache
    def apart() -> Boxed:
        log.info("a step runs beside an open one, or will run again: its values are not at their planned offsets")
        return compile_eager(graph, engine, end)

    def run(arguments: list[object]) -> Sequence[object]:
        if continues:
            holds = arena.holds(arguments)
            if holds and recordings is not None and recordings.is_spoiled:
                raise RuntimeError("a backward of this step was interrupted and has overwritten what it reads: call the model again")
            has_arena = not keeps_graph() and (holds or arena.take(room))
        else:
            has_arena = arena.take(room)
            if recordings is not None:
                recordings.expected = None
                recordings.is_spoiled = recordings.is_spoiled and not has_arena
            if recordings is not None and not (replays and has_arena):
                recordings.early.drop()
                if has_arena:
                    recordings.make_room(room)
        return (placed if has_arena else apart())(arguments)

    return boxed(run)


def boxed(run: Boxed) -> Boxed:
    """Marks `run` as one that takes its arguments as a list and empties it."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _lower(
    graph: fx.Graph, engine: SynchronousEngine | StreamEngine, observe: Callable[..., None] | None, arena: DeviceArena | None
) -> fx.Graph:
    lowered = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    offsets = places(graph, arena) if arena is not None else {}
    for node in graph.nodes:
        if node.target in (ops.release, ops.backward):
            continue
        if node.target is ops.wait and not engine.overlaps:
            new[node] = new[node.args[0]]  # type: ignore[index]
            continue
        new[node] = lowered.node_copy(node, lambda n: new[n])
        new[node].meta = {}
        _bind(new[node], engine, node.target is ops.lookup and info(node.args[0]).tier.on_host)  # type: ignore[arg-type]
        if node.target is fused and node not in offsets:
            new[node].target = fused_call(node)
        if node in offsets and arena is not None:
            new[node].target = _placed(node, new[node].target, offsets[node], arena)
        if observe is not None and _gives_device_bytes(node):
            # The operands too: they must live until their operator's result is counted, as they do while it runs.
            lowered.call_function(observe, (new[node], *(new[o] for o in node.all_input_nodes if isinstance(o.meta.get("val"), torch.Tensor))))
    return lowered


def _gives_device_bytes(node: fx.Node) -> bool:
    """False for what makes host memory, such as a generator's saved state: on plain "cpu" only the graph can tell them apart."""
    spec = ops.spec_of(node)
    tiers = [e.tier for e in spec.effects if isinstance(e, Alloc)] if spec is not None else []
    return node.op == "call_function" and bool(tensors_in(node.meta.get("val"))) and all(tier is Tier.DEVICE for tier in tiers)


def _bind(node: fx.Node, engine: SynchronousEngine | StreamEngine, on_host: bool) -> None:
    """Calls the engine where the node moves bytes, and a function of ours where ATen's would copy a whole storage. `on_host`: what it looks up is there."""
    if node.target is ops.swap_in:
        node.target, node.args = engine.swap_in, node.args[:1]
    elif node.target is ops.swap_in_many:
        node.target, node.args = engine.swap_in_many, node.args[:1]
    elif node.target is ops.lookup:
        node.target, node.args = engine.lookup, (*node.args[:2], on_host)
    elif node.target is ops.part:
        node.target = part_of
    elif node.target is ops.swap_out:
        node.target, node.args = engine.swap_out, (node.args[0], node.args[2])
    elif node.target is ops.wait:
        node.target = engine.wait
    elif node.target in SCATTERS:
        node.target = SCATTERS[node.target]
    elif node.target is ops.rng_state:
        device = node.args[0]
        node.target, node.args = _Bound(ops.get_rng_state, device), ()
    elif node.target is ops.swap_rng_state:
        node.target, node.args = _Bound(_swap_rng_state, node.args[1]), node.args[:1]


def _placed(node: fx.Node, target: object, offsets: Mapping[int, int], arena: DeviceArena) -> Callable[..., object]:
    spec = ops.spec_of(node)
    if spec is not None and (spec.starts_transfer or node.target is ops.lookup):
        return LoadedThere(target, offsets[ALONE], arena)  # type: ignore[arg-type]
    return placed_call(node, offsets, arena)


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
