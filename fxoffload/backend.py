"""`torch.compile(model, backend="fxoffload", options={"device_budget": "24GiB"})`: activations planned around fixed residents.

Parameters, their gradients and the optimizer's states stay where the user has them: parameters are inputs of the graph that lie on
the device, gradients its outputs there. What forward saves for backward is kept, recomputed or swapped to the host so that a step
fits. The budget counts the parameters and buffers that the graph reads, the batch, every value of forward and backward, one set of
gradients, the optimizer's states (option `optimizer`), one more set of gradients with `accumulate`, and `resident_bytes`.

Each graph that Dynamo captures is planned by itself, in what the fixed residents leave. Where a model breaks into several graphs,
the values that one of them saves are not counted in the others; the break is logged. Sizes that Dynamo made symbolic are planned at
`max_shape`, else at what they were when captured; a guard has larger ones captured, and planned, anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from . import text
from .attention_calls import bind, kernels_in
from .captured_step import bounds_of, pinned_values
from .dispatch import Dispatch
from .effects import Tier
from .errors import PlanError
from .explain import in_one_line
from .footprint import Footprint
from .graph import Bounds, Role, info, output_of, root_of
from .heap import Litter
from .joint import InputRef, step_graph
from .liveness import Kind, liveness
from .lowered import rewrites, saved_of
from .machine import Machine, load_machine, machine_for
from .neutral import neutralize
from .optimizer_states import States, optimizer_states
from .pins import PARAMETER_PLACES, Pin
from .pipeline import Context, get_pass
from .planner import USER_SCALAR_BYTES, Parameter, Problem, Solution, outside_bytes, place_parameters, solve
from .plans import GraphPlan, Plan, Prediction, Reside, versions_here
from .router import DIMENSIONS
from .runtime.executor import boxed, compile_eager, gradients_end
from .runtime.host_memory import HostMemory
from .runtime.transfers import engine_for
from .sizes import format_bytes, parse_bytes
from .split import split
from .torch_compat import aot_backend, backward_without_autocast, compile_id, graph_break, source_names
from .workspace import Workspace

log = logging.getLogger("fxoffload")

OPTIONS = ("accumulate", "device_budget", "dump_dir", "machine", "max_shape", "optimizer", "pin_memory", "pins", "resident_bytes")


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Dynamo's backend "fxoffload"; see the module for what the budget counts.

    `options`: `device_budget` (required), `machine`, `pins` (on values), `max_shape`, `dump_dir`, `pin_memory` and `optimizer` as in
    `fxoffload.compile`; `accumulate` (False): gradients of earlier micro-batches are on the device during a step; `resident_bytes`
    (0): what else lies there. The compiled call raises ValueError for a wrong option and PlanError when the budget is too small.
    """
    try:
        return _Step(gm, example_inputs, _Options.of(kwargs)).compiled()
    except (PlanError, ValueError) as error:
        # Raised here it would come out as Dynamo's BackendCompilerFailed.
        return _refusing(error)


def _refusing(error: PlanError | ValueError) -> Callable[..., Any]:
    message, short = str(error), getattr(error, "shortfall_bytes", None)

    def refuse(*_: object) -> Any:
        # A new one each time: a kept one would keep the frames it passed, and with them the model.
        raise ValueError(message) if isinstance(error, ValueError) else PlanError(message, short)

    error.__traceback__ = None
    return refuse


@dataclass(frozen=True, slots=True)
class _Options:
    """The parsed options; `machine` None: the shipped one of the device."""

    device_budget_bytes: int
    machine: Machine | None
    pins: tuple[Pin, ...]
    max_shape: Mapping[str, int]
    dump_dir: Path | None
    states: States | None
    accumulate: bool
    resident_bytes: int
    pin_memory: bool

    @staticmethod
    def of(kwargs: Mapping[str, Any]) -> _Options:
        """Raises ValueError naming what is missing, unknown or unreadable."""
        given = {**kwargs.get("options", {}), **{k: v for k, v in kwargs.items() if k != "options"}}
        unknown = sorted(set(given) - set(OPTIONS))
        if unknown:
            raise ValueError(f'backend "fxoffload" has no option {", ".join(map(repr, unknown))}; it has {", ".join(OPTIONS)}')
        if "device_budget" not in given:
            raise ValueError('backend "fxoffload" needs options={"device_budget": ...}')
        pins = tuple(given.get("pins", ()))
        moved = [p.pattern for p in pins if p.place in PARAMETER_PLACES]
        if moved:
            raise ValueError(f'pin {moved[0]!r}: parameters stay where they are in backend "fxoffload"; fxoffload.compile moves them')
        return _Options(
            parse_bytes(given["device_budget"], "device_budget"), load_machine(given["machine"]) if given.get("machine") else None, pins,
            given.get("max_shape") or {}, Path(given["dump_dir"]) if given.get("dump_dir") else None,
            optimizer_states(given.get("optimizer", "adamw")), bool(given.get("accumulate", False)),
            parse_bytes(given.get("resident_bytes", 0), "resident_bytes"), bool(given.get("pin_memory", True)),
        )


_HINT = 'Parameters, gradients and optimizer states stay on the device in backend "fxoffload"; fxoffload.compile moves them.'


class _Step:
    """One Dynamo graph on its way through AOTAutograd: planned and lowered when its joint graph is there."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], options: _Options) -> None:
        self.gm, self.inputs, self.options = gm, inputs, options
        self.refs = [_input_ref(source, i, value) for i, (source, value) in enumerate(zip(source_names(gm), inputs))]
        self.device = _one_device(inputs)
        self.machine = options.machine or machine_for(self.device)
        self.pinned = options.pin_memory and self.device.type == "cuda"
        self.engine = engine_for(self.device, HostMemory(self.pinned))
        self.id = compile_id()

    def compiled(self) -> Callable[..., Any]:
        """The function Dynamo calls."""
        broken = graph_break(self.gm)
        if broken is not None:
            log.warning("graph %s ends in a graph break (%s): it is planned without what the other graphs save", self.id, broken)
        neutralize(self.gm.graph)
        self.gm.recompile()
        compiler = aot_backend(self._forward, self._backward, self._inference, self._partition)
        with backward_without_autocast():
            return compiler(self.gm, self.inputs)  # type: ignore[no-any-return]

    def _partition(self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = split(self._lowered(step_graph(joint.graph, self.refs, num_fwd_outputs), "train"))
        return fx.GraphModule(root_of(halves.forward), halves.forward), fx.GraphModule(root_of(halves.backward), halves.backward)

    def _forward(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return boxed(Litter(lies=True).swept_before(compile_eager(gm.graph, self.engine, None)))

    def _backward(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return compile_eager(gm.graph, self.engine, gradients_end(gm.graph, self.engine))

    def _inference(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        n_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        lowered = self._lowered(step_graph(gm.graph, self.refs, n_outputs), "forward")
        output = lowered.output_node()
        output.args = (output.args[0][0],)  # type: ignore[index]
        return boxed(Litter(lies=True).swept_before(compile_eager(lowered, self.engine, None)))

    def _lowered(self, graph: fx.Graph, kind: str) -> fx.Graph:
        bounds = self._bounds(graph)
        workspace = Workspace(bounds, self.device.type, self.machine.multiprocessors, Dispatch(self.device))
        context = Context(
            bounds=bounds, device_budget_bytes=self.options.device_budget_bytes, device=self.device,
            swap_tier=Tier.PINNED if self.pinned else Tier.PAGEABLE, workspace=workspace,
        )
        graph = get_pass("canonicalize").run(graph, context)  # type: ignore[assignment]
        bind(graph, workspace)
        parameters = self._parameters(graph, context.bounds)
        problem = Problem(
            graph, pinned_values(self.options.pins, graph, context), parameters, self.machine, self._fixed_bytes(),
            frozenset(parameters), footprint=Footprint.of(self.machine))
        solution = self._solved(problem)
        label = f"{kind}-{self.id}"
        known = GraphPlan(
            label, solution.decisions, saved_of(solution.lowered), _prediction(solution), kernels=kernels_in(graph, bounds, workspace))
        log.info("graph %s: %s", label, in_one_line(known))
        place_parameters(graph, parameters, frozenset(parameters))
        output_of(graph).meta |= {text.LABEL: label, text.BOUNDS: context.bounds}
        dumps = self.options.dump_dir / label if self.options.dump_dir is not None else None
        lowered = rewrites().run(graph, replace(context, plan=known), dumps)
        if dumps is not None:
            residency = tuple(Reside(p.fqn, Tier.DEVICE, p.n_bytes) for p in parameters.values())
            plan = Plan(
                self.options.device_budget_bytes, None, self.machine.name, "bitwise", residency, {text.fingerprint(graph): known},
                made_with=versions_here())
            plan.save(dumps / "plan.json")
        return lowered

    def _bounds(self, graph: fx.Graph) -> Bounds:
        """The sizes to plan at, each with a guard: a larger one is captured anew."""
        maxima = {}
        for node in graph.find_nodes(op="placeholder"):
            if info(node).role is Role.BATCH and isinstance(node.meta.get("val"), torch.Tensor):
                declared = [self.options.max_shape.get(name, 0) for name in DIMENSIONS]
                sizes = [n if isinstance(n, int) else int(n.node.hint) for n in node.meta["val"].shape]
                maxima[info(node).name.removeprefix("batch.")] = tuple(
                    max(n, declared[i] if i < len(declared) else 0) for i, n in enumerate(sizes))
        bounds = bounds_of(graph, maxima)
        for node in graph.find_nodes(op="placeholder"):
            for size in getattr(node.meta.get("val"), "shape", ()):
                assert size <= bounds.of(size)
        return bounds

    def _parameters(self, graph: fx.Graph, bounds: Bounds) -> dict[str, Parameter]:
        found = {}
        for node in graph.find_nodes(op="placeholder"):
            entry = info(node)
            if entry.role is Role.PARAMETER and entry.fqn is not None:
                found[entry.fqn] = self._parameter(entry.fqn, node, entry.trainable, bounds)
        return found

    def _parameter(self, fqn: str, node: fx.Node, trainable: bool, bounds: Bounds) -> Parameter:
        value, states, state_bytes = node.meta["val"], self.options.states, 0
        n_bytes = bounds.bytes_of(value)
        if trainable and states is not None:
            is_embedding = any(user.target is torch.ops.aten.embedding.default for user in node.users)
            state_bytes = states.bytes_of([bounds.of(size) for size in value.shape], value.element_size(), is_embedding)
        return Parameter(fqn, n_bytes, trainable, Tier.PAGEABLE, n_bytes * (trainable and self.options.accumulate), state_bytes)

    def _fixed_bytes(self) -> int:
        overhead = Footprint.of(self.machine).overhead_bytes
        return self.options.resident_bytes + USER_SCALAR_BYTES + overhead

    def _solved(self, problem: Problem) -> Solution:
        budget = self.options.device_budget_bytes
        # The larger of the two refusals: the budget plus it must do for both.
        short = max(problem.footprint.needed_bytes(self._optimizer_step_bytes(problem)) - budget, 0)
        reason = f"device_budget of {budget} bytes ({format_bytes(budget)}) is {short} bytes short for the optimizer's step."
        try:
            solution = solve(problem)
        except PlanError as error:
            if (error.shortfall_bytes or 0) > short:
                reason, short = str(error), error.shortfall_bytes or 0
        if short:
            raise PlanError(f"{reason} {_HINT}", short)
        return solution

    def _optimizer_step_bytes(self, problem: Problem) -> int:
        """What is on the device while the optimizer steps: all that outlives the graph, and temporaries.

        torch's foreach optimizers, which accelerators take by default, hold one temporary per gradient at once (the square roots of
        Adam's second moments), those on the CPU one at a time.
        """
        live = liveness(problem.graph, problem.context.bounds)
        stays = sum(s.n_bytes for s in live.escapes if not (s.is_input and s.kind is Kind.GRADIENT))
        trained = [p.n_bytes for p in problem.parameters.values() if p.trainable]
        temporary = max(trained, default=0) if self.device.type == "cpu" else sum(trained)
        beside = problem.fixed_bytes + outside_bytes(problem, frozenset(problem.parameters))
        return beside + stays + (temporary if self.options.states is not None else 0)


def _prediction(solution: Solution) -> Prediction:
    s = solution.simulation
    return Prediction(s.device_peak_bytes, s.host_peak_bytes, s.disk_peak_bytes, s.step_s, s.peak_node, s.moved_bytes)


def _input_ref(source: str | None, position: int, value: object) -> InputRef:
    name = _path(source) or f"input#{position}"
    if isinstance(value, nn.Parameter):
        return InputRef(Role.PARAMETER, name, name, value.requires_grad)
    if source is not None and "_buffers" in source:
        return InputRef(Role.BUFFER, name, name)
    return InputRef(Role.BATCH, f"batch.{name}")


def _path(source: str | None) -> str:
    """ "L['self']._modules['a']._parameters['w']" as "a.w"."""
    words = [a or b for a, b in re.findall(r"\['?([^'\]]+)'?\]|\.(\w+)", source or "")]
    words = [w for w in words if w not in ("_modules", "_parameters", "_buffers", "__dict__")]
    return ".".join(words[1:] if len(words) > 1 and words[0] == "self" else words)


def _one_device(inputs: Sequence[Any]) -> torch.device:
    devices = sorted({str(t.device) for t in inputs if isinstance(t, torch.Tensor) and t.ndim})
    if len(devices) > 1:
        raise PlanError(f'backend "fxoffload": the graph reads tensors on {" and ".join(devices)}; move model and batch to one device')
    return torch.device(devices[0] if devices else "cpu")
