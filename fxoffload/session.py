"""A Session is one compiled model at work: it plans what its Router meets for the first time, and owns the runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import nn

from . import text
from .capture import input_refs
from .captured_step import CapturedStep
from .compile_cache.files import Files
from .compile_cache.store import CompileCache, Restoring, Storing
from .dispatch import settle_order
from .errors import PlanError
from .footprint import Footprint
from .functions import opened
from .graph import Role, border_of, name_of, output_of, returned, root_of
from .heads import find_heads
from .heap import Litter, heap_at_rest
from .integrations import transformers
from .joint import InputRef, step_graph
from .machine import Machine
from .neutral import neutralize
from .optimizer_states import States
from .pins import Pin
from .planning import Budgets, Planning
from .plans import Defer, Plan
from .outputs import Writes, returns_shadows
from .places import Places, moves_in_place
from .reads import LeftOut, Reads
from .router import Call, CaptureComplete, Recapture, Router, Sample
from .runtime.allocator import Cap, meter_for
from .runtime.begun import Pair
from .runtime.device_arena import DeviceArena, for_device
from .runtime.executor import boxed, compile_eager, compile_placed, gradients_end
from .runtime.host_memory import HostMemory
from .runtime.recordings import recordings_for
from .runtime.replay import End
from .runtime.room import Room
from .runtime.transfers import engine_for
from .split import split
from .step_clock import StepClock
from .study import Study
from .swapped import ClassSwap, Home
from .torch_compat import Half, WeakBackend, allow_second_backward, aot_backend, written_inputs

if TYPE_CHECKING:
    from .observation import Observation

log = logging.getLogger("fxoffload")

# On the output node of a lowered graph: whether it is to be replayed from a recording, and the Room it needs; on those of its halves: that
# node, and what they share.
_REPLAYS, _ROOM, _WHOLE, _PAIR = "fxoffload_replays", "fxoffload_room", "fxoffload_whole", "fxoffload_pair"
# On the output node of a lowered graph: the outputs it leaves out, as LeftOut.
_LEFT_OUT = "fxoffload_left_out"


@dataclass(frozen=True, slots=True)
class Options:
    """The byte budgets and choices of one compile, already parsed."""

    device: torch.device
    device_budget_bytes: int
    host_budget_bytes: int | None = None
    host_budget_named: bool = True
    disk_budget_bytes: int = 0
    disk_dir: str | None = None
    pin_memory: bool = True
    outputs: str = "auto"
    numerics: str = "bitwise"
    executor: str = "eager"
    dynamic: bool = True
    replan: bool = True
    dump_dir: Path | None = None
    cache_dir: Path | None = None
    max_shape: Mapping[str, int] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    states: States | None = None
    search: str = "quick"
    planning_only: bool = False

    @property
    def pinned(self) -> bool:
        """Whether the pinned tier is page-locked memory."""
        return self.pin_memory and (self.device.type == "cuda" or self.planning_only)


class Session:
    """See `fxoffload.compile`. `plan`: the Plan so far; `graphs`: lowered graphs by label.

    A Session that only plans lowers nothing by itself: `captured` is what it was shown last, for `lower_captured` and `study.Study`.
    """

    def __init__(self, model: nn.Module, options: Options, machine: Machine, plan: Plan | None) -> None:
        machine = machine if options.planning_only else for_device(machine, options.device)
        self.model, self.options, self.machine = model, options, machine
        self.graphs: dict[str, fx.Graph] = {}
        self.captured: CapturedStep | None = None
        # By label of the graphs that train, a call that runs each; the graph that has none yet.
        self.samples: dict[str, Sample] = {}
        self._unsampled: str | None = None
        self._captures_only = options.planning_only
        self.closed = False
        self.litter = Litter()
        settle_order(options.device)
        self.router = Router(self)
        self.reads = Reads(self)
        self.places = Places(model, options.device)
        self.writes = Writes(self.router.walks)
        self._trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
        self._refs: list[InputRef] = []
        # A graph that is not lowered anew writes no dumps.
        self.cache = CompileCache(Files(options.cache_dir)) if options.cache_dir is not None and options.dump_dir is None else None
        self.storing: Storing | None = None
        self.restoring: Restoring | None = None
        self.planning = Planning(
            model, options.device,
            Budgets(options.device_budget_bytes, options.host_budget_bytes, options.disk_budget_bytes, options.pinned,
                    options.host_budget_named),
            machine, plan, options.pins, options.numerics, options.replan, moves_in_place(options.device), options.states,
            options.dump_dir, thorough=options.search == "thorough")
        self.memory = (
            HostMemory() if options.planning_only else HostMemory(options.pinned, options.disk_dir, options.disk_budget_bytes))
        self.engine = engine_for(options.device, self.memory)
        self.meter = None if options.planning_only else meter_for(options.device, self.memory)
        self.arena = DeviceArena(options.device) if Footprint.planned(machine).by_offsets and self.meter is None else None
        self.recordings = recordings_for(options.device, self.engine, self.arena)
        self.clock = StepClock(options.device)
        self.cap = Cap(options.device, options.device_budget_bytes)
        # Last: what can be refused is refused above, before the model is touched.
        if hasattr(model, "config"):
            transformers.register()
        self.recorders = transformers.Recorders(model)
        self.recorders.install({})
        self.home = Home(options.device)
        self.home.session = self
        self.input_hooks = transformers.InputHooks(model)
        self.swap = ClassSwap(model, self.home)

    def structure_changed(self) -> bool:
        """Lets the swap, the hooks put aside and the places follow the model as it is now. True when something had changed."""
        changed = [self.swap.update(), self.input_hooks.strip()]
        if self.places.settled:
            thawed = frozenset(n for n, p in self.model.named_parameters() if p.requires_grad) - self._trainable
            self.planning.resident = (self.planning.resident or frozenset()) - thawed
            changed.append(self.places.settle(self.planning.resident))
        return any(changed)

    # What Dynamo hands us ---------------------------------------------------------------------------------------------

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend: plans and lowers the graph it captured."""
        if self.structure_changed():
            raise Recapture
        self.router.captures += 1
        self.litter.lies = True
        self._refs = input_refs(gm, self.router.scope, self.model)
        neutralize(gm.graph)
        gm.recompile()
        through = self._through_autograd
        run = through(gm, example_inputs) if self.cache is None or self._captures_only else self.cache.compiled(self, gm, example_inputs, through)
        self.places.reside(self.planning.resident or frozenset())
        return run

    def _through_autograd(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        methods: tuple[Callable[..., Any], ...] = (
            self._compile_half, self._compile_backward, self._compile_inference, self._partition)
        return aot_backend(*map(WeakBackend, methods))(gm, inputs)  # type: ignore[no-any-return]

    def _partition(self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        lowered = self._lowered_step(joint.graph, num_fwd_outputs) if self.restoring is None else self.restoring.lowered(joint.graph)
        halves = split(lowered)
        pair = Pair(len(returned(lowered)[0]))
        for half in (halves.forward, halves.backward):
            output_of(half).meta |= {_WHOLE: output_of(lowered), _PAIR: pair}
        return Half(root_of(halves.forward), halves.forward), Half(root_of(halves.backward), halves.backward)

    def _lowered_step(self, joint: fx.Graph, n_outputs: int) -> fx.Graph:
        step = step_graph(joint, self._refs, n_outputs)
        if returns_shadows(step) and any(self._refs[i].role is Role.BUFFER for i in written_inputs(joint)):
            self.router.leave_out_nothing()
        return self._lower(step)

    def _compile_half(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        allow_second_backward()
        self._note_wrappers()
        return self._executable(gm.graph, None)

    def _compile_backward(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        run = self._compiled(gm.graph, gradients_end(gm.graph, self.engine), continues=True)
        planning = weakref.ref(self.planning)
        trained = [weakref.ref(p) for p in self.model.parameters() if p.requires_grad]

        def notice() -> None:
            """Gradients that are still there when the next come are accumulated: a mode of its own, planned before it runs."""
            known = planning()
            if known is not None and not known.accumulates and any(p is not None and p.grad is not None for p in (r() for r in trained)):
                known.accumulate()

        clock, whole = self.clock, output_of(gm.graph).meta[_WHOLE].meta

        def noticing(arguments: list[Any]) -> Any:
            notice()
            gradients = run(arguments)
            clock.end(whole[text.LABEL])
            return gradients

        output_of(gm.graph).meta[_PAIR].notice = notice

        return boxed(noticing)

    def _compile_inference(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if self.restoring is None:
            n_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
            lowered = self._lower(step_graph(gm.graph, self._refs, n_outputs))
        else:
            lowered = self.restoring.lowered(gm.graph)
        self._note_wrappers()
        output = lowered.output_node()
        output.args = (output.args[0][0],)  # type: ignore[index]
        run = self._executable(lowered, self.engine.settle)
        left_out: tuple[LeftOut, ...] = output.meta.get(_LEFT_OUT, ())
        return self._with_lazy(run, left_out) if left_out else run

    def _with_lazy(self, run: Callable[..., Any], left_out: tuple[LeftOut, ...]) -> Callable[..., Any]:
        """`run` with what makes them in the place of rows of outputs that the graph has left out."""
        here = weakref.ref(self)

        def lazily(arguments: list[Any]) -> Any:
            results, session = list(run(arguments)), here()
            assert session is not None, "a compiled function outlived its Session"
            for one in left_out:
                results[one.position] = one.lazy(session, results[one.position])
            return results

        return boxed(lazily)

    def _note_wrappers(self) -> None:
        for noting in (self.storing, self.restoring):
            if noting is not None:
                noting.wrapped()

    def adopt(self, label: str, lowered: fx.Graph, state: Mapping[str, Any]) -> None:
        """Takes a graph that an earlier start has planned and lowered, with its plan."""
        self.planning.resume(state)
        output_of(lowered).meta[text.LABEL] = label
        self._keep(label, lowered)

    def _executable(self, graph: fx.Graph, end: End | None) -> Callable[..., Any]:
        run, dry = self.litter.swept_before(self._compiled(graph, end)), self.router.dry

        def guarded(arguments: list[Any]) -> Any:
            if dry.on:
                raise CaptureComplete
            return run(arguments)

        return boxed(guarded)

    def _compiled(self, graph: fx.Graph, end: End | None, continues: bool = False) -> Callable[..., Any]:
        if self.arena is not None:
            whole = output_of(graph).meta.get(_WHOLE, output_of(graph))
            pair = output_of(graph).meta.get(_PAIR)
            return compile_placed(
                graph, self.engine, end, self.arena, continues, whole.meta[_ROOM], self.recordings, whole.meta[_REPLAYS], pair)
        if self.meter is None:
            return compile_eager(graph, self.engine, end)
        return self.meter.watched(compile_eager(graph, self.engine, end, self.meter.observe), graph)

    def _lower(self, graph: fx.Graph) -> fx.Graph:
        if self._captures_only:
            self.captured = CapturedStep.of(graph, self.router.maxima, opened())
            raise CaptureComplete  # nothing will run: neither code nor guards are made
        with heap_at_rest():
            captured = CapturedStep.of(graph, self.router.maxima, opened()).to_run(self.options.executor, self.options.numerics)
            label, lowered = self.planning.lower(captured)
            left_out = output_of(lowered).meta[_LEFT_OUT] = self._left_out(captured)
            if self.storing is not None and not left_out:
                self.storing.lowered(label, lowered)
            elif self.storing is not None:
                self.storing.missing = "it leaves out outputs"
        self._keep(label, lowered)
        return lowered

    def _left_out(self, captured: CapturedStep) -> tuple[LeftOut, ...]:
        """The outputs of a graph that its plan leaves out."""
        assert self.plan is not None
        names = {d.value for d in self.plan.graphs[captured.fingerprint].decisions if isinstance(d, Defer)}
        heads = find_heads(captured.graph) if names else []
        return tuple(LeftOut.of(head, captured.bounds, self.model) for head in heads if name_of(head.output) in names)

    def _keep(self, label: str, lowered: fx.Graph) -> None:
        self.graphs[label] = lowered
        if border_of(lowered) is not None and self.options.replan:
            self._unsampled = label
        assert self.plan is not None
        known = next(one for one in self.plan.graphs.values() if one.label == label)
        meta = output_of(lowered).meta
        meta[_REPLAYS] = known.replays
        if self.arena is not None:
            room = meta[_ROOM] = Room.of(lowered, meta[text.BOUNDS], known.predicted.device_peak_bytes, self.plan.device_budget_bytes)
            self.arena.reserve(room.arena_bytes)
        if self.places.settled:
            self.memory.reserve_disk(self.planning.disk_file_bytes)

    def lower_captured(self) -> None:
        """Plans and lowers what was captured. Raises PlanError when no budget or plan covers it."""
        assert self.captured is not None, "nothing was captured"
        with heap_at_rest():
            label, lowered = self.planning.lower(self.captured)
        self.graphs[label] = lowered

    def note_sample(self, call: Call) -> None:
        """A call has been made: if a graph that trains was captured of it, it is kept to be captured again."""
        if self._unsampled is not None:
            self.samples[self._unsampled] = Sample.of(call, self.options.device)
            self._unsampled = None

    @property
    def trained(self) -> str:
        """The label of the graph that trained last; before the first step, of the one that will. Raises PlanError where there is none."""
        label = self.clock.label or next(reversed(self.samples), None)
        if label is None:
            raise PlanError("no training step was planned")
        return label

    def captured_again(self, label: str) -> CapturedStep:
        """The step that the graph `label` was lowered from, at the largest shapes met. Once lowered it is no longer what it was, so it is
        captured anew. Raises PlanError where the model has changed since."""
        assert self.plan is not None
        self._captures_only = True
        try:
            with torch.enable_grad():
                self.router.capture_again(self.samples[label])
            self.litter.sweep()
            captured = self.captured
        finally:
            self._captures_only, self.captured = self.options.planning_only, None
        assert captured is not None, "nothing was captured"
        captured = captured.to_run(self.options.executor, self.options.numerics)
        if captured.fingerprint not in self.plan.graphs or self.plan.graphs[captured.fingerprint].label != label:
            raise PlanError(f"{label}: the model has changed since its step was planned")
        return captured

    @property
    def study(self) -> Study:
        """What was captured, to be planned again."""
        assert self.captured is not None, "nothing was captured"
        return Study(self.planning, self.captured)

    @property
    def transferred(self) -> dict[str, int]:
        """Bytes moved so far, by channel."""
        return dict(self.engine.moved_bytes)

    @property
    def plan(self) -> Plan | None:
        """The Plan so far: one GraphPlan per graph met."""
        return self.planning.plan

    def observe(self) -> Observation:
        """What the last training steps and copies of the model's own memory took, beside what was predicted, and the machine that says so: for
        `replan`, or to be looked at. Call it between two steps. Raises PlanError where fewer than five of the last steps were
        of one shape."""
        from .observation import observe

        return observe(self)

    def replan(self, machine: Machine | None = None) -> bool:
        """Plans the training step anew on a machine, by default the observed one, and compiles the model by the new plan where that is predicted
        to be at least 5 % faster there than the plan it has: True then, and `model.fxoffload` is another Session.

        To be called between two steps. Results stay what they are: logits are in as many chunks, and trained parameters where they
        were, with the states of their optimizer. Raises PlanError with replan=False, and where `observe` does.
        """
        from .observation import replan

        return replan(self, machine)

    def report(self, path: str | Path) -> None:
        """Writes the page of every graph so far: memory timeline, channels, decisions."""
        from .report import html

        html.write(self, path)

    def trace(self, path: str | Path) -> None:
        """Writes the simulated steps for Perfetto."""
        from .report import trace

        trace.write(self, path)

    # Begin and end ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Moves buffers and resident parameters to the device, all other parameters to their host tiers."""
        resident = self.planning.resident or frozenset()
        self.places.settle(resident)
        self.memory.reserve_disk(self.planning.disk_file_bytes)
        homes = {n: t for n, t in self.planning.homes.items() if n not in resident}
        self.places.house(homes, self.memory, self.planning.neighbours or ())

    def close(self) -> None:
        """The plain model again: classes, places and memory as before compile. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.engine.settle()
        self.router.close()
        self.writes.close()
        self.swap.undo()
        self.input_hooks.restore()
        self.recorders.remove()
        self.places.restore()
        self.cap.lift()
        self.graphs.clear()
        self.samples.clear()
        if self.recordings is not None:
            self.recordings.release()
        if self.arena is not None:
            self.arena.release()
        self.memory.close()

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.close()
