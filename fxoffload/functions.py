"""Autograd Functions that launch Triton kernels, each call one op of a graph: `fxo.function`, and `fxo.function_backward` for its gradients.

What such a Function does between its kernels no graph can follow: they write memory by its address. So Dynamo leaves the call whole, and the
op runs the Function's own `forward` or `backward`, on copies of what these write in place. The ops take tensors and give tensors; all else
that a call says (other arguments, what it keeps on `ctx`, which operands are copied) is text in the graph, and sizes that are symbols.

It is found out by running the Function on fake tensors, its launches only noted (`triton_kernels.py`): without a card too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import PlanError
from .function_words import Code, Counted, decoded, share_memory, tensors_of
from .integrations import liger
from .torch_compat import fake_tensor, is_left_whole, is_tracing, leave_whole, trace_again, tracing_mode, without_modes
from .triton_kernels import launches, launches_noted

Tensor = torch.Tensor
T = TypeVar("T")
AutogradFunction = type[torch.autograd.Function]
_LIBRARY = torch.library.Library("fxo", "FRAGMENT")


# While a graph is captured --------------------------------------------------------------------------------------------


class _Capture:
    """One that is at it: of the Functions that are ops for it, until it ends. A thread that was interrupted before it could say so ends it
    all the same: nothing but its own frame holds this.

    `opens`: a Function whose result torch's ops give too is these ops; `opened`: those that were.
    """

    def __init__(self, whole: list[Any], opens: bool) -> None:
        self.whole, self.opens = whole, opens
        self.opened: dict[str, None] = {}


_lock = threading.Lock()
_running = threading.local()  # `capture`: that the thread is at; `is_on`: a Function of ours runs
_captures: weakref.WeakSet[_Capture] = weakref.WeakSet()
_replaced: set[Any] = set()  # whose `apply` is ours
_ours: set[Any] = set()  # that we, not the user, have told Dynamo to leave whole


@functools.cache
def _launching(function: AutogradFunction) -> bool:
    return launches(function.forward) or launches(function.backward)


def launching_functions() -> tuple[AutogradFunction, ...]:
    """Every autograd Function there is that launches a Triton kernel, its own `apply` the one of torch."""
    found, work = [], [torch.autograd.Function]
    while work:
        for one in work.pop().__subclasses__():
            work.append(one)
            if not one.__module__.startswith("torch.") and ("apply" not in vars(one) or one in _replaced) and _launching(one):
                found.append(one)
    return tuple(found)


@contextlib.contextmanager
def as_ops(functions: Sequence[AutogradFunction], opens: bool = False) -> Iterator[None]:
    """Calls of these Functions that are captured meanwhile become ops: each one of its own or, where it `opens` them and it is known how, torch's,
    which Inductor fuses with what is beside them. Several may be at it at once."""
    if not functions:
        yield
        return
    capture, outer = _Capture([*functions, *liger.choosing()], opens), getattr(_running, "capture", None)
    try:
        _settle(_captures.add, capture)
        _running.capture = weakref.ref(capture)
        yield
    finally:
        _running.capture = outer
        _settle(_captures.discard, capture)


def _here() -> _Capture | None:
    """The capture that this thread is at."""
    capture = getattr(_running, "capture", None)
    return None if capture is None else capture()  # type: ignore[no-any-return]


def opened() -> tuple[str, ...]:
    """Names of the Functions that the capture at hand has as torch's ops, in the order in which it met them."""
    capture = _here()
    return () if capture is None else tuple(capture.opened)


def _settle(change: Callable[[_Capture], None], capture: _Capture) -> None:
    """What is replaced is what the captures need that are at it once this one comes or goes. It may be interrupted anywhere: the next one
    does what was left."""
    with _lock:
        change(capture)
        needed = {one for present in _captures for one in present.whole}
        for one in needed:
            if not is_left_whole(one):
                _ours.add(one)
                leave_whole(one)
            if isinstance(one, type) and "apply" not in vars(one):
                _replaced.add(one)
                one.apply = functools.partial(_applied, one)  # type: ignore[attr-defined]
        for one in _ours - needed:
            trace_again(one)
            _ours.discard(one)
        for one in _replaced - needed:
            if "apply" in vars(one):
                del one.apply  # what torch's Function has, again
            _replaced.discard(one)


def _applied(function: AutogradFunction, *arguments: Any) -> Any:
    """What `function.apply` gives, by the ops where a graph is captured. Raises PlanError naming what no graph can hold."""
    if not is_tracing() or getattr(_running, "is_on", False):
        return torch.autograd.Function.apply.__func__(function, *arguments)  # type: ignore[attr-defined]
    capture = _here()
    if capture is not None and capture.opens:
        found = liger.by_torch(_name_of(function), arguments)
        if found is not NotImplemented:
            capture.opened[function.__qualname__] = None
            return found
    call = _Traced.of(function, arguments)
    results = _Applied.apply(call, *tensors_of(arguments))
    return decoded(call.returned, results, call.sizes)


class _Applied(torch.autograd.Function):
    """The two ops as one differentiable call: of its results only what the Function returns has gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Traced, *operands: Tensor) -> tuple[Tensor, ...]:
        results = tuple(forward_op(list(operands), call.text, call.sizes))
        ctx.call, ctx.forms = call, [(r.shape, r.dtype, r.device) for r in results]
        ctx.save_for_backward(*(operands[i] if is_operand else results[i] for is_operand, i in call.bases))
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in call.differentiable))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Traced = ctx.call
        given = {i: grads[i] for i in call.differentiable}
        if call.materializes:
            given = {i: g if g is not None else torch.zeros(ctx.forms[i][0], dtype=ctx.forms[i][1], device=ctx.forms[i][2]) for i, g in given.items()}
        present = {i: g for i, g in given.items() if g is not None}
        operands = [*ctx.saved_tensors, *present.values()]
        text, wanted = call.backward_text(operands, list(present))
        made = dict(zip(wanted, backward_op(operands, text, call.sizes)))
        return (None, *(made.get(i) for i in range(call.n_operands)))


@dataclass(frozen=True, slots=True)
class _Traced:
    """A call as it was found out. `returned`: the Function's value, its tensors by their places among the op's results; `bases`: the operands
    (True) and results of which `kept`, what `ctx` holds in backward, is made; `differentiable`: results that have gradients."""

    name: str
    text: str
    sizes: list[int | torch.SymInt]
    returned: Any
    bases: list[tuple[bool, int]]
    kept: Any
    needed: list[bool]
    places: list[int | None]
    differentiable: list[int]
    materializes: bool
    n_operands: int

    @staticmethod
    def of(function: AutogradFunction, arguments: Sequence[Any]) -> _Traced:
        """Runs `forward` once, on fake tensors."""
        name, operands = _name_of(function), tensors_of(arguments)
        sizes: list[int | torch.SymInt] = []
        counted = Code(sizes, name, Counted())
        said: dict[str, Any] = {
            "forward": name, "arguments": [counted.word(a) for a in arguments], "autocast": _autocast_of(operands),
            # Of tensors inside lists torch asks for no gradients.
            "needed": [isinstance(a, Tensor) and a.requires_grad and torch.is_grad_enabled() for a in arguments]}
        ran, copied, reads = _watched(lambda fakes: _Forward.run(said, fakes, sizes), operands)
        said |= {"copied": sorted(copied), "reads": reads}
        with without_modes(), tracing_mode():
            made = _Results(ran, copied, sizes, name)
        places = [word["tensor"] if isinstance(a, Tensor) else None for a, word in zip(arguments, said["arguments"])]
        return _Traced(name, _text(said), sizes, made.returned, made.bases, made.kept, said["needed"], places, made.differentiable, ran.context.materializes, len(operands))

    def backward_text(self, operands: Sequence[Tensor], gradients: Sequence[int]) -> tuple[str, list[int]]:
        """The text of the op for gradients, and the operands of the call that it makes them of. `operands`: the bases, then the gradients that
        are there, of these results. Runs `backward` once, on fake tensors."""
        of_result = {result: len(self.bases) + i for i, result in enumerate(gradients)}
        entries = [self.returned] if isinstance(self.returned, Mapping) and "tensor" in self.returned else self.returned["tuple"]
        given = [of_result.get(e["tensor"]) if isinstance(e, Mapping) and "tensor" in e else None for e in entries]
        said: dict[str, Any] = {
            "backward": self.name, "kept": self.kept, "needed": self.needed, "autocast": _autocast_of(operands),
            "gradients": [None if place is None else {"tensor": place} for place in given]}
        found, copied, reads = _watched(lambda fakes: _backward(said, fakes, self.sizes), operands)
        said |= {"copied": sorted(copied), "reads": reads}
        wanted = [i for i, gradient in enumerate(found) if self.needed[i] and isinstance(gradient, Tensor)]
        return _text(said | {"wanted": wanted}), [self.places[i] for i in wanted]  # type: ignore[misc]


def _name_of(function: AutogradFunction) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    if _function(name) is not function:
        raise PlanError(f"{name} cannot be imported by its name, so no graph can hold a call of it: define it at the top of a module")
    return name


@functools.cache
def _function(name: str) -> Any:
    module, path = name.split(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def _text(said: Mapping[str, Any]) -> str:
    return json.dumps(said, separators=(",", ":"))


@functools.cache
def _said(text: str) -> dict[str, Any]:
    return json.loads(text)  # type: ignore[no-any-return]


# Running --------------------------------------------------------------------------------------------------------------


class Context:
    """What a Function gets as `ctx`."""

    def __init__(self, needed: Sequence[bool], saved: Sequence[Any] = (), attributes: Mapping[str, Any] | None = None) -> None:
        self.needs_input_grad = tuple(needed)
        self.saved_tensors = tuple(saved)
        self.materializes = True
        self.not_differentiable: tuple[Tensor, ...] = ()
        self._own = {*vars(self), "_own"}
        vars(self).update(attributes or {})
        if vars(self).get("_fwd_used_autocast") is False:  # torch.amp.custom_fwd; the dtype of an autocast that is off is the device's
            self._dtype = torch.bfloat16

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.not_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise PlanError("an autograd Function that launches a Triton kernel returns what it was given, written over (mark_dirty): no graph can hold it")

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value

    @property
    def attributes(self) -> dict[str, Any]:
        """What `forward` set."""
        unsaid = {"_dtype"} if vars(self).get("_fwd_used_autocast") is False else set()
        return {k: v for k, v in vars(self).items() if k not in self._own | unsaid}


@dataclass(frozen=True, slots=True)
class _Forward:
    """A run of `forward`: its operands, what it was given in their places and what it returned."""

    operands: list[Tensor]
    context: Context
    value: Any

    @staticmethod
    def run(said: Mapping[str, Any], operands: list[Tensor], sizes: Sequence[int | torch.SymInt]) -> _Forward:
        function = _function(said["forward"])
        own = _own(operands, said)
        trained = [word["tensor"] for word, needed in zip(said["arguments"], said["needed"]) if needed]
        with _alone(said, operands):
            given = [t.detach().requires_grad_(i in trained) for i, t in enumerate(own)]
            arguments = [decoded(word, given, sizes) for word in said["arguments"]]
            context = Context(said["needed"])
            if function.setup_context is torch.autograd.Function.setup_context:
                value = function.forward(context, *arguments)
            else:
                value = function.forward(*arguments)
                function.setup_context(context, tuple(arguments), value)
        return _Forward(given, context, value)



class _Results:
    """The results of a forward op, each in memory of its own: what the Function returns, then what it keeps and is neither of these nor an
    operand. `returned` and `kept` are what it returns and keeps, in words; `bases` what `kept` is made of: operands (True) and results."""

    def __init__(self, ran: _Forward, copied: Collection[int], sizes: list[int | torch.SymInt], name: str) -> None:
        self.tensors: list[Tensor] = []
        self.bases: list[tuple[bool, int]] = []
        self._there = [(True, i, t) for i, t in enumerate(ran.operands) if i not in copied]
        self._places: dict[int, int] = {}
        self.returned = Code(sizes, name, self._returned).word(ran.value)
        kept = {"saved": list(ran.context.saved_tensors), "attributes": ran.context.attributes}
        self.kept = Code(sizes, name, self._kept).word(kept)
        self.differentiable = [
            i for t, i in self._places.items() if self._is_float(i) and t not in map(id, ran.context.not_differentiable)]

    def _is_float(self, place: int) -> bool:
        return self.tensors[place].dtype.is_floating_point or self.tensors[place].dtype.is_complex

    def _returned(self, tensor: Tensor) -> tuple[int, Tensor]:
        """A result for a tensor that is returned: a copy where it lies in an operand's memory, or in another result's."""
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.tensors)
            if any(share_memory(tensor, t) for *_, t in self._there):
                self.tensors.append(tensor.detach().clone())
            else:
                self._add(tensor)
        return self._places[id(tensor)], tensor

    def _kept(self, tensor: Tensor) -> tuple[int, Tensor]:
        found = next((one for one in self._there if share_memory(tensor, one[2])), None)
        is_operand, i, base = found if found is not None else self._add(tensor)
        if (is_operand, i) not in self.bases:
            self.bases.append((is_operand, i))
        return self.bases.index((is_operand, i)), base

    def _add(self, tensor: Tensor) -> tuple[bool, int, Tensor]:
        n_bytes = tensor.untyped_storage().nbytes()
        if isinstance(n_bytes, int) and n_bytes != tensor.numel() * tensor.element_size():
            raise PlanError("an autograd Function that launches a Triton kernel gives a part of what it made, which no graph can hold")
        self._there.append((False, len(self.tensors), tensor))
        self.tensors.append(tensor.detach())
        return self._there[-1]


def _backward(said: Mapping[str, Any], operands: Sequence[Tensor], sizes: Sequence[int | torch.SymInt]) -> tuple[Any, ...]:
    """What the Function's `backward` returns, one gradient or None for each argument."""
    own = _own(operands, said)
    with _alone(said, operands):
        kept = decoded(said["kept"], own, sizes)
        context = Context(said["needed"], kept["saved"], kept["attributes"])
        found = _function(said["backward"]).backward(context, *(decoded(word, own, sizes) for word in said["gradients"]))
    return found if isinstance(found, tuple) else (found,)


@contextlib.contextmanager
def _alone(said: Mapping[str, Any], operands: Sequence[Tensor]) -> Iterator[None]:
    """As torch runs a Function's methods: without gradients, under the autocast of the call. Functions that it calls run as they are."""
    outer, _running.is_on = getattr(_running, "is_on", False), True
    try:
        with torch.no_grad(), _autocast(said, operands):
            yield
    finally:
        _running.is_on = outer


def _own(operands: Sequence[Tensor], said: Mapping[str, Any]) -> list[Tensor]:
    """The operands, those that will be written as copies."""
    return [_copy(t) if i in said.get("copied", ()) else t for i, t in enumerate(operands)]


def _copy(tensor: Tensor) -> Tensor:
    """A copy that lies as the tensor does, where no two of its elements lie in one place."""
    if any(isinstance(step, int) and step == 0 for step in tensor.stride()):
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _kind(operands: Sequence[Tensor]) -> str:
    return next((t.device.type for t in operands), "cpu")


def _autocast_of(operands: Sequence[Tensor]) -> str | None:
    """The dtype of the autocast that is on."""
    kind = _kind(operands)
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.") if is_on else None


def _autocast(said: Mapping[str, Any], operands: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    kind, dtype = _kind(operands), said["autocast"]
    if not torch.amp.is_autocast_available(kind) or dtype is None and not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=dtype is not None, dtype=getattr(torch, dtype or "bfloat16"))


# Finding out ----------------------------------------------------------------------------------------------------------


def _watched(run: Callable[[list[Tensor]], T], operands: Sequence[Tensor]) -> tuple[T, set[int], bool]:
    """What `run` gives for stand-ins of the operands, with the sizes of the capture that is going on; the operands it writes; and whether it
    reads a value. If so it runs a second time, as if values were others: it may write what it has not."""
    copied: set[int] = set()
    result, reads = _once(run, operands, False, copied)
    if reads:
        with contextlib.suppress(AssertionError, ArithmeticError, IndexError, RuntimeError, TypeError, ValueError):
            _once(run, operands, True, copied)
    return result, copied, reads


def _once(run: Callable[[list[Tensor]], T], operands: Sequence[Tensor], otherwise: bool, copied: set[int]) -> tuple[T, bool]:
    """What `run` gives, and whether it reads a value; to `copied` is added what it writes, as far as it comes."""
    mode = tracing_mode()
    with without_modes():
        fakes = [fake_tensor(mode, t.shape, t.stride(), 0, t.dtype, t.device) for t in operands]
        with mode, Watch(otherwise) as watch, launches_noted() as launched:
            try:
                return run(fakes), watch.reads
            finally:
                watch.written += [t for launch in launched for t in launch.written]
                copied |= watch.copied(fakes)


class Watch(TorchDispatchMode):
    """Notes what ops write, and whether a value is read on the host. A fake one says yes and 1, two are not equal; `otherwise`: the contrary."""

    def __init__(self, otherwise: bool = False) -> None:
        super().__init__()
        self.written: list[Tensor] = []
        self.reads, self.otherwise = False, otherwise

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _READ:
            self.reads = True
            return _READ[func](args[0], self.otherwise)
        given = dict(zip((a.name for a in func._schema.arguments), args)) | dict(kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.extend(tensors_of(given.get(argument.name)))
        return func(*args, **(kwargs or {}))

    def copied(self, operands: Sequence[Tensor]) -> set[int]:
        """The operands that were written."""
        return {i for i, t in enumerate(operands) if any(share_memory(t, w) for w in self.written)}


def _number(tensor: Tensor, otherwise: bool) -> bool | float | int:
    kind = bool if tensor.dtype == torch.bool else float if tensor.dtype.is_floating_point else int
    return kind(not otherwise)


_aten = torch.ops.aten
_READ: Mapping[object, Callable[[Tensor, bool], Any]] = {
    _aten.item.default: _number, _aten._local_scalar_dense.default: _number,
    _aten.is_nonzero.default: lambda _, otherwise: not otherwise, _aten.equal.default: lambda _, otherwise: otherwise}


# The ops --------------------------------------------------------------------------------------------------------------


def _forward_kernel(operands: list[Tensor], call: str, sizes: list[int]) -> list[Tensor]:
    said = _said(call)
    return _Results(_Forward.run(said, operands, sizes), said["copied"], [*sizes], said["forward"]).tensors


def _backward_kernel(operands: list[Tensor], call: str, sizes: list[int]) -> list[Tensor]:
    said = _said(call)
    gradients = _backward(said, operands, sizes)
    there = [t for i, t in enumerate(operands) if i not in said["copied"]]
    made: list[Tensor] = []
    for i in said["wanted"]:
        # Nothing that an op gives lies in an operand's memory, or in that of another result.
        made.append(gradients[i].clone() if any(share_memory(gradients[i], t) for t in [*there, *made]) else gradients[i])
    return made


def noted(kernel: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """The kernel as it runs on fake tensors."""

    @functools.wraps(kernel)
    def fake(operands: list[Tensor], call: str, sizes: list[int]) -> list[Tensor]:
        with Watch(), launches_noted():
            return kernel(operands, call, sizes)

    return fake


def _define(name: str, kernel: Callable[..., Any]) -> torch._ops.OpOverload:
    _LIBRARY.define(f"{name}(Tensor[] operands, str call, SymInt[] sizes) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxo::{name}", noted(kernel), lib=_LIBRARY)
    return getattr(torch.ops.fxo, name).default  # type: ignore[no-any-return]


forward_op = _define("function", _forward_kernel)
backward_op = _define("function_backward", _backward_kernel)
OPS = (forward_op, backward_op)
KERNELS: Mapping[object, Callable[..., list[Tensor]]] = {forward_op: _forward_kernel, backward_op: _backward_kernel}
FAKES = {op: noted(kernel) for op, kernel in KERNELS.items()}


def reads_a_value(call: str) -> bool:
    """Whether a Function reads a value on the host while it runs (`Tensor.item`)."""
    return bool(_said(call)["reads"])
