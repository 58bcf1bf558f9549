"""The device's own counters and limits: a hard cap where an allocator caches, a meter where there is no allocator to ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.fx as fx

from ..effects import Tier
from ..graph import info
from ..testing.meter import DeviceMeter
from ..torch_compat import use_expandable_segments
from .host_memory import HostMemory


class Cap:
    """Keeps a caching allocator's reserved bytes within the budgets: what it caches for reuse counts like what is in use.

    The limit is what the process had reserved before, plus the budgets of all that are open; a lower limit that the process has set
    itself stays. Segments grow in place (expandable), so that a full budget is not lost between blocks, unless the process has said
    otherwise in PYTORCH_ALLOC_CONF. On devices without such a limit nothing is set.
    """

    _open: ClassVar[dict[torch.device, list[Cap]]] = {}
    _before: ClassVar[dict[torch.device, tuple[float, int]]] = {}

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self.device, self.budget_bytes = device, budget_bytes
        if device.type != "cuda":
            return
        use_expandable_segments()
        if not self._open.get(device):
            torch.cuda.empty_cache()
            self._before[device] = torch.cuda.get_per_process_memory_fraction(device), torch.cuda.memory_reserved(device)
        self._open.setdefault(device, []).append(self)
        self._apply()

    def lift(self) -> None:
        """The device without this budget; with the last one, as it was before the first."""
        if self in self._open.get(self.device, ()):
            self._open[self.device].remove(self)
            self._apply()

    def _apply(self) -> None:
        fraction, reserved = self._before[self.device]
        budgets = [cap.budget_bytes for cap in self._open[self.device]]
        if budgets:
            total = torch.cuda.get_device_properties(self.device).total_memory
            fraction = min(fraction, (reserved + sum(budgets)) / total)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)


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
