"""The class swap: modules that own parameters get a subclass whose attribute returns the parameter's device copy.

While a call of the compiled model is at work, reading `module.weight` gives `gather(parameter)`; outside it gives the parameter
itself, so edits persist. Name, qualname, module and the signature of `forward` stay those of the class.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import ops
from .integrations import bitsandbytes, transformers

HOME = "_fxoffload_home"
_PLAIN = "_fxoffload_plain_class"


@dataclass
class Activity:
    """Whether a call is at work. What classes hold is this and not the Home, whose Session must be able to end: Dynamo keeps classes longer."""

    on: bool = False


class Home:
    """What every swapped module of one compiled model shares: the compute device, and whether a call is at work.

    `forward`: a forward that was set on the instance before compile (Accelerate does), None when the class's own is meant.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # With the CPU as compute device host and device are told apart by copies, not by torch.device.
        self.is_host = device.type == "cpu"
        self.activity = Activity()
        self.session: Any = None
        self.forward: Callable[..., Any] | None = None

    @property
    def active(self) -> bool:
        """Whether a call is at work."""
        return self.activity.on

    def settle(self) -> None:
        """Outside a call: copies of an earlier one that still read host memory have ended, and it may be written."""
        if not self.active and self.session is not None:
            self.session.engine.settle()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Parameters are read as their device copies inside."""
        activity = self.activity
        before, activity.on = activity.on, True
        try:
            yield
        finally:
            activity.on = before


def _gather_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
    return (torch.ops.fxo.sink(gradient, ctx.home_device) if ctx.needs_input_grad[0] else None), None


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.home_device = inputs[0].device


torch.library.register_autograd("fxo::gather", _gather_backward, setup_context=_gather_setup)


def plain_class(cls: type) -> type:
    """The class a swapped class stands for; any other class itself."""
    return cls.__dict__.get(_PLAIN, cls)


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that `module` had before the swap, bound."""
    home = module.__dict__.get(HOME)
    if home is not None and home.forward is not None and home.session.model is module:
        return home.forward  # type: ignore[no-any-return]
    return plain_class(type(module)).forward.__get__(module)  # type: ignore[attr-defined, no-any-return]


def swapped_class(
    cls: type[nn.Module], names: tuple[str, ...], root: bool, home: Home, overrides: Mapping[str, Any] | None = None,
) -> type[nn.Module]:
    """The subclass of `cls`, for the modules of `home`, whose attributes `names` are gathered; `root` also routes `forward`, `overrides` replace
    others."""
    namespace: dict[str, Any] = {name: _parameter_property(name, home) for name in names}
    namespace.update({
        _PLAIN: cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce_to_plain,
        "_apply": _apply_in_place,
        "_named_members": _settled("_named_members"),
        "_load_from_state_dict": _settled("_load_from_state_dict"),
        "_replicate_for_data_parallel": _refuse_replicas,
    })
    namespace.update(overrides or {})
    if root:
        namespace["forward"] = _routed(cls)
        namespace["fxoffload"] = property(lambda self: self.__dict__[HOME].session)
    if _has_device(cls):
        namespace["device"] = property(lambda self: self.__dict__[HOME].device)
        namespace.setdefault("forward", _entering(cls))
    return type(cls.__name__, (cls,), namespace)


def _has_device(cls: type) -> bool:
    return isinstance(getattr(cls, "device", None), property)


def _parameter_property(name: str, home: Home) -> property:
    # A capture traces `get` once per parameter, and whatever it looks up is traced and guarded each time: so it finds all but the parameter
    # beside it, where modules of a class share it, and asks only for what is there.
    gather, is_host, device, activity = ops.gather, home.is_host, home.device, home.activity

    def get(self: nn.Module) -> Any:
        try:
            value = self._parameters[name]
        except KeyError:
            if name not in self._parameters:  # to Dynamo this question is a guard, the error is none
                return self.__dict__[name] if name in self.__dict__ else nn.Module.__getattr__(self, name)
            raise
        if not activity.on:
            self.__dict__[HOME].settle()
            return value
        if value is None or not is_host and value.device == device:
            return value
        return gather(value, device)

    def put(self: nn.Module, value: object) -> None:
        self.__dict__[name] = value

    def delete(self: nn.Module) -> None:
        del self.__dict__[name]

    return property(get, put, delete)


def _settled(name: str) -> Callable[..., Any]:
    """The class's own method, which gives the module's parameters to the caller, or writes them, behind the copies that still read them."""

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        home = self.__dict__.get(HOME)
        if home is not None:
            home.settle()
        return getattr(super(type(self), self), name)(*args, **kwargs)

    method.__name__ = name
    return method


def _routed(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        home = self.__dict__.get(HOME)
        if home is None:  # a client kept this function beyond close(), as Accelerate does on the instance
            return cls.forward(self, *args, **kwargs)
        if not home.active:
            return _call(home.session.router.call, args, kwargs)
        return cls.forward(self, *args, **kwargs) if home.forward is None else home.forward(*args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return forward


def _entering(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward of an inner model that can be called by itself (`generate` of a PEFT model calls the base model)."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        home = self.__dict__.get(HOME)
        if home is None or home.active:
            return cls.forward(self, *args, **kwargs)
        return _call(home.session.router.free_form, (self, args, kwargs), {})

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return forward


@torch.compiler.disable
def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A user's own torch.compile around the model ends here: the model has its own."""
    if function.__name__ == "free_form":
        return function(*args)
    return function(args, kwargs)


def _reduce_to_plain(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    cls = plain_class(type(self))
    reduced: tuple[Any, ...] = super(type(self), self).__reduce_ex__(max(2, int(protocol)))  # type: ignore[assignment, misc]
    _, _, state, *_ = reduced
    if isinstance(state, dict):
        home = state.get(HOME)
        state = {k: v for k, v in state.items() if k != HOME}
        if home is not None and home.forward is not None and home.session.model is self:
            state["forward"] = home.forward
    # Not __newobj__: pickle insists that its class is the object's own.
    return copyreg._reconstructor, (cls, object, None), state  # type: ignore[attr-defined]


def _apply_in_place(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`module.to` and the like: a change of dtype passes; a move between devices does not concern what the plan has placed."""

    home = self.__dict__.get(HOME)
    if home is not None:
        home.settle()

    def staying(tensor: torch.Tensor) -> torch.Tensor:
        probe = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        if probe.device.type == "meta":
            raise ValueError("a compiled model cannot become meta; call model.fxoffload.close() first")
        return fn(tensor) if probe.device == tensor.device else tensor.to(probe.dtype)

    return super(type(self), self)._apply(staying, recurse)  # type: ignore[misc, no-any-return]


def _refuse_replicas(self: nn.Module) -> nn.Module:
    raise ValueError("a compiled model cannot be replicated by DataParallel: one process per device (DistributedDataParallel) can")


class ClassSwap:
    """Swaps the classes of a model's modules in place and can put them back."""

    def __init__(self, model: nn.Module, home: Home) -> None:
        self.model, self.home = model, home
        self.originals: dict[nn.Module, type[nn.Module]] = {}
        self._made: dict[tuple[type, tuple[str, ...], bool], type[nn.Module]] = {}
        home.forward = model.__dict__.pop("forward", None)
        self.update()

    def update(self) -> bool:
        """Swaps what is not swapped yet: modules and parameters that came after compile. True when there were any."""
        found = False
        for module in self.model.modules():
            names = tuple(n for n, p in module._parameters.items() if p is not None)
            plain = plain_class(type(module))
            owns = bool(names) or any(b is not None for b in module._buffers.values())
            if not owns and module is not self.model and not _has_device(plain):
                continue
            key = (plain, names, module is self.model)
            if self._made.get(key) is type(module):
                continue
            if HOME in module.__dict__ and module.__dict__[HOME] is not self.home:
                raise ValueError("model: a part of it belongs to another compiled model; close that one first")
            found = True
            overrides = transformers.overrides(module, HOME) | bitsandbytes.overrides(module, HOME)
            self._made.setdefault(key, swapped_class(*key, self.home, overrides))
            self.originals[module] = plain
            module.__class__ = self._made[key]
            module.__dict__[HOME] = self.home
        return found

    def undo(self) -> None:
        """Every module has its own class again."""
        for module, cls in self.originals.items():
            module.__class__ = cls
            module.__dict__.pop(HOME, None)
        if self.home.forward is not None:
            self.model.__dict__.setdefault("forward", self.home.forward)
