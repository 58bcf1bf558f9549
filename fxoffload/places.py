"""Where a compiled model's parameters and buffers lie: residents and buffers on the device, everything else on the host."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from .effects import Tier
from .integrations import bitsandbytes
from .layout import extent_bytes
from .runtime.host_memory import HostMemory

HOST = torch.device("cpu")


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What is gathered when it is off the device: parameters, and the scales of packed ones."""
    parameters = list(model.named_parameters())
    yield from parameters
    yield from ((state.name, state.tensor) for state in bitsandbytes.scales(model, parameters))


def named_constants(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What stays on the device: buffers, and the tables of packed parameters; each tensor once."""
    yield from model.named_buffers()
    yield from {id(state.tensor): (state.name, state.tensor) for state in bitsandbytes.tables(model)}.values()


class Places:
    """Moves a model's tensors in place: parameters and buffers stay the objects they are."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.settled = False
        # Parameters whose memory is given back at the end; pinned memory stays theirs without the lock.
        self._lent: list[torch.Tensor] = []

    def settle(self, resident: frozenset[str]) -> bool:
        """Puts the parameters named `resident` and all buffers on the device, other parameters on the host. True when any moved."""
        self.settled = True
        moved = [_move(p, self.device if name in resident else HOST) for name, p in named_weights(self.model)]
        bitsandbytes.follow_weights(self.model)
        return any([*moved, *self._move_buffers(self.device)])

    def reside(self, resident: frozenset[str]) -> None:
        """Puts the parameters named `resident` on the device. Dynamo's guards say where tensors are: this comes before they are made."""
        for name, parameter in named_weights(self.model):
            if name in resident:
                _move(parameter, self.device)
        bitsandbytes.follow_weights(self.model)

    def settle_constants(self) -> None:
        """Puts all buffers on the device: capture must see them where they will be."""
        self._move_buffers(self.device)

    def house(self, homes: Mapping[str, Tier], memory: HostMemory, neighbours: Iterable[str] = ()) -> None:
        """Puts every named parameter's bytes into its host tier: page-locked slabs, the disk file, or where they are. The `neighbours`
        of one tier lie side by side in that order, in ordinary memory too. Never more than a few slabs are there twice."""
        weights = {n: p for n, p in named_weights(self.model) if n in homes}
        alone = _alone(weights)
        together: dict[Tier, dict[str, torch.Tensor]] = {}
        for name in neighbours:
            if name in alone:
                together.setdefault(homes[name], {})[name] = weights.pop(name)
        for tier, members in together.items():
            for parameter, housed in zip(members.values(), memory.empty_together(list(members.values()), tier)):
                self._move_into(housed, parameter, tier)
        to_pinned = [p for n, p in weights.items() if homes[n] is Tier.PINNED and memory.pin]
        for housed, parameter in zip(memory.pinned_ahead(to_pinned), to_pinned, strict=True):
            self._move_into(housed, parameter, Tier.PINNED)
        for parameter in (p for n, p in weights.items() if homes[n] is Tier.DISK):
            self._move_into(memory.empty_like(parameter, Tier.DISK), parameter, Tier.DISK)
        bitsandbytes.follow_weights(self.model)

    def _move_into(self, housed: torch.Tensor, parameter: torch.Tensor, tier: Tier) -> None:
        parameter.data = housed.copy_(parameter.data)
        if tier is not Tier.PINNED:
            self._lent.append(parameter)

    def restore(self) -> None:
        """Everything is on the host again, nothing in the disk file or in memory that others lie in."""
        for parameter in self._lent:
            parameter.data = parameter.data.clone()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._lent.clear()
        for _, weight in named_weights(self.model):
            _move(weight, HOST)
        bitsandbytes.follow_weights(self.model)
        self._move_buffers(HOST)

    def _move_buffers(self, device: torch.device) -> list[bool]:
        """Buffers keep their identity where torch can give a tensor new memory on `device`; elsewhere the module gets a new one."""
        in_place = moves_in_place(device) and moves_in_place(self.device)
        moved = [
            _move(buffer, device) if in_place else _replace(module, name, buffer, device)
            for module in self.model.modules() for name, buffer in module._buffers.items() if buffer is not None
        ]
        return [*moved, bitsandbytes.move_tables(self.model, device)]


def _alone(weights: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of the weights whose memory is their own, all of it: others that look into it would not follow."""
    users = Counter(p.untyped_storage().data_ptr() for p in weights.values())
    return frozenset(
        name for name, p in weights.items()
        if p.numel() and users[p.untyped_storage().data_ptr()] == 1 and not p.is_shared()  # type: ignore[no-untyped-call]
        and p.untyped_storage().nbytes() == extent_bytes(p))


@functools.lru_cache(maxsize=None)
def moves_in_place(device: torch.device) -> bool:
    """True when a CPU tensor object can be given memory on `device` (`tensor.data = ...`); torch refuses it for PrivateUse1."""
    probe = torch.empty(0)
    try:
        probe.data = torch.empty(0, device=device)
    except RuntimeError:
        return False
    return True


def _replace(module: nn.Module, name: str, buffer: torch.Tensor, device: torch.device) -> bool:
    if buffer.device == device or buffer.device.type == "meta":
        return False
    module._buffers[name] = buffer.to(device)
    return True


def _move(tensor: torch.Tensor, device: torch.device) -> bool:
    if tensor.device == device or tensor.device.type == "meta":
        return False
    gradient, tensor.grad = tensor.grad, None
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        tensor.grad = gradient.to(device)
    return True
