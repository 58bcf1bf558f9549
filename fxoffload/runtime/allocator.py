"""The device's own counters and limits: a hard cap where an allocator caches, a meter where there is no allocator to ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ..effects import Tier
from ..graph import info
from ..testing.meter import DeviceMeter
from ..torch_compat import use_expandable_segments
from .host_memory import HostMemory


class Cap:
    """Keeps a caching allocator's reserved bytes within a budget: what it caches for reuse counts like what is in use.

    Segments grow in place (expandable), so that a full budget is not lost between blocks, unless the process has said otherwise in
    PYTORCH_ALLOC_CONF. A process that has set a memory fraction itself keeps it. On devices without such a limit nothing is set.
    """

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self.device = device
        self._is_set = False
        if device.type != "cuda":
            return
        use_expandable_segments()
        if torch.cuda.get_per_process_memory_fraction(device) < 1.0:
            return
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        limit = min(1.0, (torch.cuda.memory_reserved(device) + budget_bytes) / total)
        torch.cuda.set_per_process_memory_fraction(limit, device)
        self._is_set = True

    def lift(self) -> None:
        """The device's whole memory again."""
        if self._is_set:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            self._is_set = False


class StorageMeter:
    """Counts the device tier on plain "cpu", where host and device share one allocator: what a graph's operators return and the
    inputs it says lie on the device, each storage until its last tensor is gone. What an operator needs only inside is not seen."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory, self._meter = memory, DeviceMeter()

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the start."""
        return self._meter.peak_bytes

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""
        return self._meter.current_bytes

    def observe(self, value: Any, *_operands: Any) -> None:
        """Counts the storages of an operator's result from now on, host memory apart."""
        if isinstance(value, torch.Tensor):
            if not self._memory.owns(value):
                self._meter.include(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.observe(item)

    def watched(self, run: Callable[[list[Any]], Sequence[Any]], graph: fx.Graph) -> Callable[[list[Any]], Sequence[Any]]:
        """`run` that counts its inputs on the device too."""
        on_device = [info(node).tier is Tier.DEVICE for node in graph.find_nodes(op="placeholder")]

        def counted(arguments: list[Any]) -> Sequence[Any]:
            for argument, counts in zip(arguments, on_device, strict=True):
                if counts:
                    self.observe(argument)
            return run(arguments)

        return counted


def meter_for(device: torch.device, memory: HostMemory) -> StorageMeter | None:
    """A meter on plain "cpu"; None where the device counts by itself."""
    return StorageMeter(memory) if device.type == "cpu" else None
