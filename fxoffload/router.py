"""The Router stands before the graphs: it looks at a call once, finds or makes the compiled function for it, and runs it.

Nothing leaves the compiled route silently: what Dynamo cannot capture, what no plan covers and what runs outside Dynamo raises.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import ops
from .capture import batch_tensors, dynamic_dims
from .dispatch import switches
from .errors import PlanError
from .functions import as_ops, launching_functions
from .integrations import grids, transformers
from .outputs import detached, has_shadows, only_loss, with_lazy_outputs
from .swapped import plain_forward
from .torch_compat import CAPTURE_FAILURES, CompiledStep, capture_config, failure_text, inner_error, mark_dynamic
from .walk import Walk, Walks

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger("fxoffload")

Shape = tuple[int, ...]


class CaptureComplete(BaseException):
    """Raised in place of running a graph while only its capture is wanted."""


@dataclass(slots=True)
class DryRun:
    """Whether graphs are captured only. Compiled functions hold this and not the Session, which must be able to end."""

    on: bool = False


class Recapture(BaseException):
    """Raised by the backend when what it was given must be captured again: the model or the choice of outputs has changed."""


@dataclass(slots=True)
class Generation:
    """One compiled function and the largest shapes it is planned for, by batch name, the only ones where it `is_exact`. Inputs seen later
    join it."""

    maxima: dict[str, Shape]
    step: CompiledStep
    is_exact: bool = False

    def covers(self, batch: list[tuple[str, torch.Tensor]]) -> bool:
        """True when no tensor of the batch is larger than planned, nor, in an exact one, smaller."""
        fits = tuple.__eq__ if self.is_exact else _within
        return all(name not in self.maxima or fits(tensor.shape, self.maxima[name]) for name, tensor in batch)


@dataclass(frozen=True, slots=True)
class Call:
    """A call on the compute device: arguments under their names, the batch's tensors, and the look at their values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: list[tuple[str, torch.Tensor]]
    look: transformers.Look


@dataclass(frozen=True, slots=True)
class Sample:
    """A call that can be captured again: its arguments, and the autocast it was made under, None for that of now."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: AutocastState | None = None

    @staticmethod
    def of(call: Call, device: torch.device) -> Sample:
        """A call that is made now, with copies of its tensors on the host."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, _copied_to_host, (call.args, call.kwargs))
        return Sample(args, kwargs, AutocastState.of(device.type))

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, autocast is as it was."""
        return contextlib.nullcontext() if self.autocast is None else self.autocast.enter()


@dataclass(slots=True)
class Router:
    """See the module. `scope`: the traced function's locals of the call at work; `maxima`: the shapes it is planned for; `met`:
    those that were met before the first capture.

    `captures`: graphs captured so far; `functions`: what is captured as ops of ours.
    """

    session: Session
    scope: dict[str, object] = field(default_factory=dict)
    maxima: dict[str, Shape] = field(default_factory=dict)
    met: dict[str, Shape] = field(default_factory=dict)
    dry: DryRun = field(default_factory=DryRun)
    shadows: bool = True
    generations: list[Generation] = field(default_factory=list)
    variants: dict[object, str] = field(default_factory=dict)
    captures: int = 0
    functions: tuple[type[torch.autograd.Function], ...] = ()
    walks: Walks = field(init=False)
    _told: bool = False

    def __post_init__(self) -> None:
        self.walks = Walks(self.session.model)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward on this batch, planned before it runs. Raises PlanError when that cannot be."""
        if _is_free_form(kwargs):
            return self.free_form(self.session.model, args, kwargs)
        call = self._prepared(args, kwargs)
        if torch.is_grad_enabled() and not self.dry.on:
            self.session.clock.begin(tuple((name, tuple(tensor.shape)) for name, tensor in call.batch))
        out, lazy = self._run(call)
        by_rows = self.session.options.numerics == "reordered"
        return with_lazy_outputs(out, lazy, by_rows) if lazy is not None and has_shadows(out) else out

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captures and plans the step of this call without running it."""
        self.dry.on = True
        try:
            self.call(args, kwargs)
        except CaptureComplete:
            return
        finally:
            self.dry.on = False
        raise PlanError("the sample call ran without a captured graph: the model computes nothing with its parameters")

    def capture_again(self, sample: Sample) -> None:
        """As `capture`, whatever has been captured, for the largest shapes met."""
        known, self.generations, self.met = self.generations, [], self.largest
        try:
            with sample.entered():
                self.capture(sample.args, sample.kwargs)
        finally:
            for generation in self.generations:
                generation.step.forget()
            self.generations = known

    @property
    def largest(self) -> dict[str, Shape]:
        """The shapes that the next capture of the step is planned for at least."""
        return dict(self.generations[-1].maxima) if self.generations else dict(self.met)

    def free_form(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module`'s own forward, each parameter copied to the device where it is read: generation and calls of inner models."""
        if not self._told:
            self._told = True
            log.warning("calls with a cache or of an inner model run unplanned, outside the budget's promise")
        with self.session.home.entered():
            return plain_forward(module)(*self._to_device(args), **self._to_device(kwargs))

    def close(self) -> None:
        """Forgets every compiled function."""
        for generation in self.generations:
            generation.step.forget()
        self.generations.clear()
        self.session.reads.forget()
        self.walks.forget()
        self.scope, self.maxima = {}, {}

    def leave_out_nothing(self) -> None:
        """From now on graphs return every output: a forward that writes buffers cannot run again to compute what was left out."""
        self.shadows = False
        self.close()
        raise Recapture

    # One call ---------------------------------------------------------------------------------------------------------

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        args, kwargs = _named(inspect.signature(plain_forward(self.session.model)), args, kwargs)
        if transformers.asks_for_records(kwargs):
            self.session.recorders.install(kwargs)
        look = transformers.Look.at(self.session.model, args, kwargs)
        kwargs = grids.prepared(self.session.model, transformers.prepared(self.session.model, kwargs))
        args, kwargs = self._to_device(args), self._to_device(kwargs)
        batch, fixed = batch_tensors({"args": args, "kwargs": kwargs}), grids.n_patches(kwargs)
        for name, tensor in batch:
            for dim in dynamic_dims(name, tensor):
                if self._varies(dim, tensor.shape[dim]) and tensor.shape[dim] not in fixed:
                    mark_dynamic(tensor, dim)
        return Call(args, kwargs, batch, look)

    def _varies(self, dim: int, size: int) -> bool:
        """Whether a dimension needs a symbol: planning alone sees one batch, and symbols make its capture several times as long."""
        options = self.session.options
        if not options.planning_only:
            return options.dynamic
        return dim < len(DIMENSIONS) and options.max_shape.get(DIMENSIONS[dim], 0) > size

    def _to_device(self, value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._tensor_to_device, value)

    def _tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(self.session.options.device)
        if not torch.ops.aten.is_non_overlapping_and_dense(moved):
            # A part of a larger tensor: its strides are sizes that no other batch need have.
            moved = moved.contiguous()
        # An alias: marks of dynamic sizes must not stay on the caller's tensor.
        return moved.view_as(moved) if moved is tensor and moved.requires_grad else moved.detach() if moved is tensor else moved

    def _run(self, call: Call) -> tuple[Any, LazyCall | None]:
        """The outputs, and what computes those left out of the graph. A change of the model's structure is captured again, once."""
        for is_last in (False, True):
            try:
                return self._run_once(call)
            except Recapture:
                if is_last:
                    raise PlanError("the model changes while it is captured") from None
        raise AssertionError("unreachable")

    def _run_once(self, call: Call) -> tuple[Any, LazyCall | None]:
        lazily = torch.is_grad_enabled() and self.shadows
        # Before what is issued early moves the device's generator on.
        drawn = LazyCall.drawn(self.session.options.device) if lazily else {}
        with self._early(call), call.look.entered():
            walk = self.walks.now()
            lazy = LazyCall(self, call, drawn, walk) if lazily else None
            generation = self._generation(self.generations, call.batch, self._step_function)
            scope = {"module": self.session.model, "args": call.args, "kwargs": call.kwargs}
            try:
                return self._stepped(self.generations, generation, scope, walk), lazy
            finally:
                self.session.note_sample(call)

    def _stepped(self, generations: list[Generation], generation: Generation, scope: dict[str, object], walk: Walk) -> Any:
        """What the generation's function gives for its arguments, `scope`. A new one joins the generations when it is captured."""
        is_new = generation not in generations
        self.maxima, self.scope = generation.maxima, scope
        try:
            with self.session.home.entered(), capture_config(), as_ops(self.functions, self.session.options.executor == "inductor"):
                out = generation.step(*scope.values(), self._variant(walk))
        except CAPTURE_FAILURES as error:
            raise self._failure(error) from None
        except CaptureComplete:
            if is_new:
                generations.append(generation)
            raise
        finally:
            self.scope = {}
        if is_new:
            generations.append(generation)
        if self.session.recordings is not None:
            self.session.recordings.expect(out)
        return out

    def read(
        self, generations: list[Generation], function: Callable[[], Callable[..., Any]], batch: list[tuple[str, torch.Tensor]],
        most: Mapping[str, Shape], scope: dict[str, object],
    ) -> Any:
        """What the function of rows that `function` makes gives, planned for shapes up to `most` and those of the batch before it runs.
        `generations`: of this function."""
        for is_last in (False, True):
            generation = self._generation(generations, batch, function, most)
            try:
                return self._stepped(generations, generation, scope, self.walks.now())
            except Recapture:
                if is_last:
                    raise PlanError("the model changes while it is captured") from None
        raise AssertionError("unreachable")

    def _early(self, call: Call) -> contextlib.AbstractContextManager[None]:
        """Inside, what was replayed in the last call in this mode runs already, if it can."""
        recordings = self.session.recordings
        if recordings is None or self.dry.on:
            return contextlib.nullcontext()
        mode = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.session.model.training,
            AutocastState.of(self.session.options.device.type))
        return recordings.early.during(mode, dict(call.batch))

    def _variant(self, walk: Walk) -> str:
        """A word for what is trained in which dtype, and for the switches of attention's kernels; each is a capture of its own (a number
        would become a symbol).

        torch 2.11 looks at a frozen parameter no more once it is captured, and would not see it thawed.
        """
        now = switches(), tuple((p.requires_grad, p.dtype) for p in walk.parameters)
        return self.variants.setdefault(now, f"trained-{len(self.variants)}")

    def _failure(self, error: Exception) -> BaseException:
        """What to raise for a failed capture: our own or the model's error, Recapture where the model has changed."""
        inner = inner_error(error)
        if inner is not None:
            return inner
        if self.session.structure_changed():
            return Recapture()
        return PlanError(f"the model cannot be captured as one graph: {_hint(self.session.model)}{failure_text(error)}")

    def _generation(
        self, generations: list[Generation], batch: list[tuple[str, torch.Tensor]], function: Callable[[], Callable[..., Any]],
        most: Mapping[str, Shape] | None = None,
    ) -> Generation:
        """The first that covers the batch, else a new one of `function()`. `most`: the shapes to plan for, None: those that are met."""
        declared = self.session.options.max_shape if most is None else {}
        is_exact = most is None and not self.session.options.dynamic
        for generation in generations:
            if generation.covers(batch):
                _learn(generation.maxima, batch, declared)
                return generation
        maxima = dict(most) if most is not None else {} if is_exact else self.largest
        _learn(maxima, batch, declared)
        self.functions = launching_functions()
        return Generation(maxima, CompiledStep(function(), self.session.backend), is_exact)

    def _step_function(self) -> Callable[..., Any]:
        return _step_function(self.session.options.outputs, self.shadows)


class LazyCall:
    """A training call's other outputs: the same forward again, without gradients, on first use. `rng`: each generator before the call.

    Raises RuntimeError when a parameter changed since the call: the outputs of then cannot be computed any more.
    """

    def __init__(self, router: Router, call: Call, rng: dict[torch.device, torch.Tensor], walk: Walk) -> None:
        self.router, self.call_, self.rng = router, call, rng
        self.written = router.session.writes.state(walk.parameters)
        self.modes = [module.training for module in walk.modules]
        self.autocast = AutocastState.of(router.session.options.device.type)

    @staticmethod
    def drawn(device: torch.device) -> dict[torch.device, torch.Tensor]:
        """Where the generators stand that a forward on `device` draws from."""
        return {d: ops.get_rng_state(d) for d in sorted({torch.device("cpu"), device}, key=str)}

    def __call__(self) -> Mapping[str, Any]:
        session = self.router.session
        if session.closed:
            raise RuntimeError("this output was not read before close()")
        walk = self.router.walks.now()
        if self.written != session.writes.state(walk.parameters):
            raise RuntimeError("this output was not read before the parameters changed; read it before optimizer.step()")
        modules = walk.modules
        now = {d: ops.get_rng_state(d) for d in self.rng}, [m.training for m in modules]
        self._set(modules, self.rng, self.modes)
        try:
            with torch.inference_mode(False), torch.no_grad(), self.autocast.enter():
                return self.router._run(self.call_)[0]  # type: ignore[no-any-return]
        finally:
            self._set(modules, *now)

    @staticmethod
    def _set(modules: list[nn.Module], rng: Mapping[torch.device, torch.Tensor], modes: list[bool]) -> None:
        for device, state in rng.items():
            ops.set_rng_state(state, device)
        for module, mode in zip(modules, modes):
            if module.training != mode:
                module.training = mode


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


def _copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)


def _step_function(outputs: str, shadows: bool) -> Callable[..., Any]:
    """What Dynamo traces. Its code and its globals are its own: Dynamo keeps what it compiled there, and so it ends with them."""
    lazily = outputs == "auto"

    def step(module: Any, args: Any, kwargs: Any, variant: str) -> Any:
        if not variant or not torch.compiler.is_compiling():
            raise PlanError("capture is switched off here (torch._dynamo.disable, set_stance or a torch function mode): nothing ran")
        out = transformers.without_cache(type(module).forward(module, *args, **grids.restored(kwargs)))
        if not lazily or not torch.is_grad_enabled():
            return out
        return only_loss(out) if shadows else detached(out)

    return FunctionType(step.__code__.replace(), dict(step.__globals__), step.__name__, None, step.__closure__)


def _is_free_form(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("past_key_values") is not None or kwargs.get("use_cache") is True


def _named(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments under their names where they have one: the same call is the same graph however it is written."""
    names = [p.name for p in signature.parameters.values()][: len(args)]
    kinds = [p.kind for p in signature.parameters.values()][: len(args)]
    if len(names) < len(args) or any(k is not inspect.Parameter.POSITIONAL_OR_KEYWORD for k in kinds) or set(names) & set(kwargs):
        return args, dict(kwargs)
    return (), {**dict(zip(names, args)), **kwargs}


def _within(shape: torch.Size, maximum: Shape) -> bool:
    return len(shape) == len(maximum) and all(n <= m for n, m in zip(shape, maximum))


def _learn(maxima: dict[str, Shape], batch: list[tuple[str, torch.Tensor]], declared: Mapping[str, int]) -> None:
    """Notes the batch's shapes. An input seen for the first time gets the maxima of inputs that have its sizes now."""
    known = [(tensor.shape, maxima[name]) for name, tensor in batch if name in maxima and len(maxima[name]) == tensor.ndim]
    for name, tensor in batch:
        if name in maxima and _within(tensor.shape, maxima[name]):
            continue
        before = maxima[name] if name in maxima and len(maxima[name]) == tensor.ndim else (0,) * tensor.ndim
        maxima[name] = tuple(
            max(n, before[i], declared.get(DIMENSIONS[i], 0) if i < len(DIMENSIONS) and i in dynamic_dims(name, tensor) else 0,
                *(m[i] for shape, m in known if i < len(shape) and shape[i] == n))
            for i, n in enumerate(tensor.shape)
        )


# What `max_shape` calls the dimensions of a batch tensor, in order.
DIMENSIONS = ("batch", "sequence")


def _hint(model: nn.Module) -> str:
    hooked = [n for n, m in model.named_modules() if n and (m._backward_hooks or m._backward_pre_hooks)]
    if hooked:
        return f"module {hooked[0]!r} has a backward hook, which capture cannot follow (hooks on parameters can); "
    return ""
