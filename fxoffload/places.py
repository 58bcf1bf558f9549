"""Where a compiled model's parameters and buffers lie: residents and buffers on the device, everything else on the host."""

from __future__ import annotations

import functools

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from .effects import Tier
from .integrations import bitsandbytes
from .runtime.host_memory import HostMemory, slab_bytes

HOST = torch.device("cpu")


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What is gathered when it is off the device: parameters, and the scales of packed ones."""
    yield from model.named_parameters()
    yield from ((state.name, state.tensor) for state in bitsandbytes.scales(model))


def named_constants(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What stays on the device: buffers, and the tables of packed parameters; each tensor once."""
    yield from model.named_buffers()
    yield from {id(state.tensor): (state.name, state.tensor) for state in bitsandbytes.tables(model)}.values()


class Places:
    """Moves a model's tensors in place: parameters and buffers stay the objects they are."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.settled = False
        self._on_disk: list[torch.Tensor] = []

    def settle(self, resident: frozenset[str]) -> bool:
        """Puts the parameters named `resident` and all buffers on the device, other parameters on the host. True when any moved."""
        self.settled = True
        moved = [_move(p, self.device if name in resident else HOST) for name, p in named_weights(self.model)]
        bitsandbytes.follow_weights(self.model)
        return any([*moved, *self._move_buffers(self.device)])

    def settle_constants(self) -> None:
        """Puts all buffers on the device: capture must see them where they will be."""
        self._move_buffers(self.device)

    def house(self, homes: Mapping[str, Tier], memory: HostMemory) -> None:
        """Puts every named parameter's bytes into its host tier: page-locked slabs, the disk file, or where they are."""
        moves = {n: p for n, p in named_weights(self.model) if homes.get(n) is Tier.DISK or (homes.get(n) is Tier.PINNED and memory.pin)}
        memory.reserve_pinned(sum(slab_bytes(p) for n, p in moves.items() if homes[n] is Tier.PINNED))
        for name, parameter in moves.items():
            housed = memory.empty_like(parameter, homes[name])
            parameter.data = housed.copy_(parameter.data)
            if homes[name] is Tier.DISK:
                self._on_disk.append(parameter)
        bitsandbytes.follow_weights(self.model)

    def restore(self) -> None:
        """Everything is on the host again, nothing in the disk file."""
        for parameter in self._on_disk:
            parameter.data = parameter.data.clone()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._on_disk.clear()
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
