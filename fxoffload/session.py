"""A Session is one compiled model at work: it routes calls, plans what it has not seen, and owns the runtime."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from . import ops, text
from .capture import batch_tensors, dynamic_dims, input_refs
from .effects import Tier
from .errors import PlanError
from .graph import Bounds, Role, border_of, copy_graph, info
from .integrations import transformers
from .joint import InputRef, step_graph
from .machine import Machine
from .neutral import neutralize
from .outputs import has_shadows, only_loss, with_lazy_outputs
from .pipeline import Context, get_pass
from .plan import GraphPlan, Plan, Prediction, Recompute, Reside
from .planner import NOTHING, FIRST_REWRITES, LAST_REWRITES, USER_SCALAR_BYTES, Parameter, Problem, Solution, apply, place_parameters, solve
from .runtime.executor import compile_eager
from .runtime.host_memory import HostMemory
from .runtime.transfers import engine_for
from .simulate import simulate
from .sizes import format_bytes
from .split import split
from .swapped import ClassSwap, Home
from .torch_compat import aot_backend, capture_config, mark_dynamic

log = logging.getLogger("fxoffload")


@dataclass(frozen=True, slots=True)
class Options:
    """The byte budgets and choices of one compile, already parsed."""

    device: torch.device
    device_budget_bytes: int
    host_budget_bytes: int | None = None
    disk_budget_bytes: int = 0
    disk_dir: str | None = None
    pin_memory: bool = True
    outputs: str = "auto"
    numerics: str = "bitwise"
    replan: bool = True
    dump_dir: Path | None = None
    max_shape: Mapping[str, int] = field(default_factory=dict)
    pins: tuple[Any, ...] = ()


class LazyCall:
    """A training call's other outputs: the same forward again, without gradients, on first use.

    Raises RuntimeError when a parameter changed since the call: the outputs of then cannot be computed any more.
    """

    def __init__(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], rng: dict[torch.device, torch.Tensor]) -> None:
        self.session, self.args, self.kwargs, self.rng = session, args, kwargs, rng
        self.versions = [p._version for p in session.model.parameters()]
        self.autocast = AutocastState.of(session.options.device.type)

    def __call__(self) -> Mapping[str, Any]:
        session = self.session
        if self.versions != [p._version for p in session.model.parameters()]:
            raise RuntimeError("this output was not read before the parameters changed; read it before optimizer.step()")
        now = {d: ops.get_rng_state(d) for d in self.rng}
        for device, state in self.rng.items():
            ops.set_rng_state(state, device)
        try:
            with torch.no_grad(), self.autocast.enter():
                return session.call(self.args, self.kwargs)  # type: ignore[no-any-return]
        finally:
            for device, state in now.items():
                ops.set_rng_state(state, device)


@dataclass(frozen=True, slots=True)
class AutocastState:
    """The ambient autocast of a call, to be entered again."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def of(device_type: str) -> AutocastState:
        """Autocast as it is now."""
        return AutocastState(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    def enter(self) -> torch.autocast:
        """The context that makes it so again."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)


class CaptureComplete(BaseException):
    """Raised in place of running a graph while only its capture is wanted."""


class Session:
    """See `fxoffload.compile`. `plan`: the Plan so far; `graphs`: lowered graphs by label."""

    def __init__(self, model: nn.Module, options: Options, machine: Machine, plan: Plan | None) -> None:
        self.model, self.options, self.machine = model, options, machine
        self.home = Home(options.device)
        self.home.session = self
        if hasattr(model, "config"):
            transformers.register()
        self.input_hooks = transformers.InputHooks(model)
        self.swap = ClassSwap(model, self.home)
        self.plan: Plan | None = plan
        self.resident: frozenset[str] | None = _resident_of(plan)
        self.graphs: dict[str, fx.Graph] = {}
        self.closed = False
        self._dry = False
        self._dynamo: dict[tuple[object, ...], Callable[..., Any]] = {}
        self._maxima: dict[str, tuple[int, ...]] = {}
        self._scope: dict[str, object] = {}
        self._refs: list[InputRef] = []
        self.memory = HostMemory(options.pin_memory and options.device.type == "cuda", options.disk_dir, options.disk_budget_bytes)
        self.engine = engine_for(options.device, self.memory)
        self._signature = inspect.signature(type(model).forward)

    # What a call does -------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward on this batch, planned before it runs."""
        if _is_free_form(kwargs):
            return self._free_form(args, kwargs)
        look = transformers.Look.at(kwargs)
        args, kwargs = self._to_device(args), self._to_device(kwargs)
        if "use_cache" not in kwargs and _takes_use_cache(self.model, self._signature):
            kwargs["use_cache"] = False
        batch = batch_tensors({"args": args, "kwargs": kwargs})
        self._note_shapes(batch)
        for name, tensor in batch:
            for dim in dynamic_dims(name, tensor):
                mark_dynamic(tensor, dim)
        self._scope = {"module": self.model, "args": args, "kwargs": kwargs}
        with capture_config(), look:
            try:
                rng = self._rng() if torch.is_grad_enabled() else None
                out = self._compiled()(self.model, args, kwargs)
            except torch._dynamo.exc.Unsupported as error:
                raise PlanError(f"the model cannot be captured as one graph: {error}") from error
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise error.inner_exception from None
        if rng is not None and has_shadows(out):
            return with_lazy_outputs(out, LazyCall(self, args, kwargs, rng))
        return out

    def _rng(self) -> dict[torch.device, torch.Tensor]:
        return {d: ops.get_rng_state(d) for d in {torch.device("cpu"), self.options.device}}

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures and plans the step of this call without running it."""
        self._dry = True
        try:
            self.call(args, kwargs)
        except CaptureComplete:
            return
        finally:
            self._dry = False
        raise PlanError("the sample call ran without a captured graph: the model computes nothing with its parameters")

    def _free_form(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.home.active = True
        try:
            from .swapped import plain_class

            return plain_class(type(self.model)).forward(self.model, *self._to_device(args), **self._to_device(kwargs))
        finally:
            self.home.active = False

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.options.device)
        if isinstance(value, dict):
            return {k: self._to_device(v) for k, v in value.items()}
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(self._to_device(v) for v in value)
        return value

    def _note_shapes(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in batch:
            known = self._maxima.get(name, (0,) * tensor.ndim)
            if len(known) == tensor.ndim and all(n <= m for n, m in zip(tensor.shape, known)):
                continue
            padded = known if len(known) == tensor.ndim else (0,) * tensor.ndim
            wanted = tuple(max(n, m, self._declared(i)) for i, (n, m) in enumerate(zip(tensor.shape, padded)))
            self._maxima[name] = wanted

    def _declared(self, dim: int) -> int:
        names = {0: ("batch",), 1: ("sequence", "seq")}.get(dim, ())
        return max((self.options.max_shape.get(n, 0) for n in names), default=0)

    def _compiled(self) -> Callable[..., Any]:
        key = tuple(sorted(self._maxima.items()))
        if key not in self._dynamo:
            self._dynamo[key] = torch.compile(_step_function(self.options.outputs), backend=self.backend, fullgraph=True, dynamic=None)
        return self._dynamo[key]

    # What Dynamo hands us ---------------------------------------------------------------------------------------------

    def backend(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        """Dynamo's backend: plans and lowers the graph it captured."""
        self._refs = input_refs(gm, self._scope, self.model)
        neutralize(gm.graph)
        gm.recompile()
        compiler = aot_backend(self._compile_half, self._compile_backward, self._compile_inference, self._partition)
        return compiler(gm, example_inputs)  # type: ignore[no-any-return]

    def _partition(self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        lowered = self._lower(step_graph(joint.graph, self._refs, num_fwd_outputs))
        halves = split(lowered)
        empty = torch.nn.Module()
        return fx.GraphModule(empty, halves.forward), fx.GraphModule(empty, halves.backward)

    def _compile_half(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return self._executable(gm.graph, finishes=False)

    def _compile_backward(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return compile_eager(gm.graph, self.engine, finishes=True)

    def _compile_inference(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        n_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        lowered = self._lower(step_graph(gm.graph, self._refs, n_outputs))
        output = lowered.output_node()
        output.args = (output.args[0][0],)  # type: ignore[index]
        return self._executable(lowered, finishes=False)

    def _executable(self, graph: fx.Graph, finishes: bool) -> Callable[..., Any]:
        run = compile_eager(graph, self.engine, finishes)

        def guarded(arguments: list[Any]) -> Any:
            if self._dry:
                raise CaptureComplete
            return run(arguments)

        guarded._boxed_call = True  # type: ignore[attr-defined]
        return guarded

    # Planning ---------------------------------------------------------------------------------------------------------

    def _lower(self, graph: fx.Graph) -> fx.Graph:
        context = self._context(graph)
        graph = get_pass("canonicalize").run(graph, context)
        fingerprint = text.fingerprint(graph)
        known = self.plan.graphs.get(fingerprint) if self.plan is not None else None
        if known is not None:
            lowered = self._replay(graph, context, known)
        elif self.plan is not None and not self.options.replan:
            raise PlanError(f"the plan does not cover this graph (fingerprint {fingerprint[:12]}) and replan=False")
        else:
            lowered = self._plan(graph, context, fingerprint)
        self.graphs[self.plan.graphs[fingerprint].label] = lowered  # type: ignore[union-attr]
        return lowered

    def _context(self, graph: fx.Graph) -> Context:
        return Context(
            bounds=self._bounds(graph),
            device_budget_bytes=self.options.device_budget_bytes,
            device=self.options.device,
            swap_tier=Tier.PINNED if self.memory.pin else Tier.PAGEABLE,
        )

    def _bounds(self, graph: fx.Graph) -> Bounds:
        """The largest value of every symbol: the batch's maxima where a symbol is a size of it."""
        maxima: dict[str, int] = {}
        for node in graph.find_nodes(op="placeholder"):
            value, name = node.meta.get("val"), info(node).name.removeprefix("batch.")
            known = self._maxima.get(name)
            if not isinstance(value, torch.Tensor):
                continue
            for i, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    maximum = known[i] if known is not None and i < len(known) else size.node.hint
                    symbol = str(size.node.expr)
                    maxima[symbol] = max(maxima.get(symbol, 0), maximum)
        return Bounds(maxima)

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter of the model with its bytes and host tier."""
        home = Tier.PINNED if self.memory.pin else Tier.PAGEABLE
        return {n: Parameter(n, p.untyped_storage().nbytes() or p.nbytes, p.requires_grad, home) for n, p in self.model.named_parameters()}

    def _problem(self, graph: fx.Graph, context: Context) -> Problem:
        inputs = {info(n).fqn for n in graph.find_nodes(op="placeholder")}
        buffers = sum(b.nbytes for n, b in self.model.named_buffers() if n not in inputs)
        fixed = buffers + USER_SCALAR_BYTES + self.machine.overhead_bytes * (self.options.device.type == "cuda")
        return Problem(graph, context, self.parameters(), self.machine, fixed, self.resident)

    def _plan(self, graph: fx.Graph, context: Context, fingerprint: str) -> fx.Graph:
        solution = solve(self._problem(graph, context))
        label = self._label(graph)
        graph_plan = GraphPlan(label, solution.decisions, saved_of(solution.lowered), self._prediction(solution))
        if self.plan is None:
            self.resident = solution.resident
            self.plan = Plan(
                self.options.device_budget_bytes, self.options.host_budget_bytes, self.machine.name, self.options.numerics,
                self._residency(solution.resident), {},
            )
        self.plan = self.plan.with_graph(fingerprint, graph_plan)
        log.info("plan %s %s: %s", self.plan.id, label, self.plan.explain().replace("\n", "; "))
        return solution.lowered

    def _label(self, graph: fx.Graph) -> str:
        kind = "train" if border_of(graph) is not None else "forward"
        taken = sum(1 for g in (self.plan.graphs.values() if self.plan else ()) if g.label.split("-")[0] == kind)
        return kind if not taken else f"{kind}-{taken}"

    def _prediction(self, solution: Solution) -> Prediction:
        simulation = solution.simulation
        host = sum(p.n_bytes for p in self.parameters().values() if p.fqn not in solution.resident)
        return Prediction(
            simulation.device_peak_bytes, host + simulation.host_peak_bytes, simulation.disk_peak_bytes,
            simulation.step_s, simulation.peak_node, simulation.moved_bytes,
        )

    def _residency(self, resident: frozenset[str]) -> tuple[Reside, ...]:
        return tuple(
            Reside(p.fqn, Tier.DEVICE if p.fqn in resident else p.home, p.n_bytes) for p in self.parameters().values()
        )

    def _replay(self, graph: fx.Graph, context: Context, known: GraphPlan) -> fx.Graph:
        place_parameters(graph, self.parameters(), self.resident or frozenset())
        lowered = apply(graph, replace(context, plan=known), (*FIRST_REWRITES, *LAST_REWRITES))
        saved = saved_of(lowered)
        if saved != known.saved:
            raise PlanError(f"{known.label}: the graph saves other values than the plan says: {sorted(set(saved) ^ set(known.saved))[:4]}")
        return lowered

    # The model's place ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Moves buffers and resident parameters to the device."""
        resident = self.resident or frozenset()
        for name, parameter in self.model.named_parameters():
            if name in resident:
                parameter.data = parameter.data.to(self.options.device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.options.device)

    def close(self) -> None:
        """The plain model again: classes, places and memory as before compile. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.swap.undo()
        self.input_hooks.restore()
        for parameter in self.model.parameters():
            if parameter.device == self.options.device:
                parameter.data = parameter.data.cpu()
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.cpu()
        self._dynamo.clear()
        self.graphs.clear()
        self.memory.close()


def saved_of(lowered: fx.Graph) -> tuple[str, ...]:
    """Names of what forward hands to backward, inputs and symbols apart; () without a backward."""
    if border_of(lowered) is None:
        return ()
    inputs = {info(n).name for n in lowered.find_nodes(op="placeholder")}
    return tuple(n for n in split(lowered).saved if n not in inputs)


def _resident_of(plan: Plan | None) -> frozenset[str] | None:
    if plan is None:
        return None
    return frozenset(r.value for r in plan.residency if r.tier is Tier.DEVICE)


def _is_free_form(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("past_key_values") is not None or kwargs.get("use_cache") is True


def _takes_use_cache(model: nn.Module, signature: inspect.Signature) -> bool:
    if getattr(getattr(model, "config", None), "use_cache", None) is None:
        return False
    parameters = signature.parameters.values()
    return any(p.name == "use_cache" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _step_function(outputs: str) -> Callable[..., Any]:
    def step(module: Any, args: Any, kwargs: Any) -> Any:
        out = module.forward(*args, **kwargs)
        return only_loss(out) if outputs == "auto" and torch.is_grad_enabled() else out

    return step
