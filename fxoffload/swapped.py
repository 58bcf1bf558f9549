"""The class swap: modules that own parameters get a subclass whose attribute returns the parameter's device copy.

While a planned forward is traced, or a free-form forward runs, reading `module.weight` gives `gather(parameter)`; outside it
gives the parameter itself, so edits persist. Name, qualname, module and the signature of `forward` stay those of the class.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import ops

HOME = "_fxoffload_home"


class Home:
    """What every swapped module of one compiled model shares: the compute device, and whether a free-form forward is active."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.active = False
        self.session: Any = None




def _gather_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
    return (torch.ops.fxo.sink(gradient, ctx.home_device) if ctx.needs_input_grad[0] else None), None


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.home_device = inputs[0].device


torch.library.register_autograd("fxo::gather", _gather_backward, setup_context=_gather_setup)


def _parameter_property(name: str) -> property:
    def get(self: nn.Module) -> torch.Tensor | None:
        value = self._parameters[name]
        if value is None:
            return None
        home = self.__dict__.get(HOME)
        if home is None or not (torch.compiler.is_dynamo_compiling() or home.active):
            return value
        if value.device == home.device and home.device.type != "cpu":
            return value
        return torch.ops.fxo.gather(value, home.device)

    return property(get)


def _reduce_to_plain(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    state = {k: v for k, v in self.__dict__.items() if k != HOME}
    return copyreg.__newobj__, (plain_class(type(self)),), state  # type: ignore[attr-defined]


def _apply_in_place(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """A change of dtype passes; a move between devices does not concern parameters whose place the plan decides."""
    guarded = {k: p for k, p in self._parameters.items() if p is not None}
    probes = {k: fn(torch.empty(0, dtype=p.dtype, device=p.device)) for k, p in guarded.items()}
    for k, p in guarded.items():
        if probes[k].dtype != p.dtype:
            p.data = p.data.to(probes[k].dtype)
            if p.grad is not None:
                p.grad.data = p.grad.data.to(probes[k].dtype)
    buffers = {k: b for k, b in self._buffers.items() if b is not None}
    for k, b in buffers.items():
        probe = fn(torch.empty(0, dtype=b.dtype, device=b.device))
        if probe.dtype != b.dtype:
            self._buffers[k] = b.to(probe.dtype)
    if recurse:
        for child in self.children():
            child._apply(fn)
    return self


_PLAIN = "_fxoffload_plain_class"


def plain_class(cls: type) -> type:
    """The class a swapped class stands for; any other class itself."""
    return cls.__dict__.get(_PLAIN, cls)


def swapped_class(cls: type[nn.Module], names: tuple[str, ...], root: bool) -> type[nn.Module]:
    """The subclass of `cls` whose attributes `names` are gathered; `root` also routes `forward`."""
    namespace: dict[str, Any] = {name: _parameter_property(name) for name in names}
    namespace.update({
        _PLAIN: cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduce_to_plain,
        "_apply": _apply_in_place,
    })
    if root:
        namespace["forward"] = _routed(cls)
        namespace["fxoffload"] = property(lambda self: self.__dict__[HOME].session)
    if isinstance(getattr(cls, "device", None), property):
        namespace["device"] = property(lambda self: self.__dict__[HOME].device)
    return type(cls.__name__, (cls,), namespace)


def _routed(cls: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return cls.forward(self, *args, **kwargs)
        return self.__dict__[HOME].session.call(args, kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return forward


class ClassSwap:
    """Swaps the classes of a model's modules in place and can put them back."""

    def __init__(self, model: nn.Module, home: Home) -> None:
        self.home = home
        self.originals: list[tuple[nn.Module, type[nn.Module]]] = []
        made: dict[tuple[type, tuple[str, ...], bool], type[nn.Module]] = {}
        for module in model.modules():
            names = tuple(n for n, p in module._parameters.items() if p is not None)
            owns = bool(names) or any(b is not None for b in module._buffers.values())
            if not owns and module is not model:
                continue
            key = (type(module), names, module is model)
            if key not in made:
                made[key] = swapped_class(*key)
            self.originals.append((module, type(module)))
            module.__class__ = made[key]
            module.__dict__[HOME] = home

    def undo(self) -> None:
        """Every module has its own class again."""
        for module, cls in self.originals:
            module.__class__ = cls
            module.__dict__.pop(HOME, None)
