"""Moving bytes: one engine per kind of device. It obeys the graph's order and decides nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import torch

from ..effects import Tier
from .host_memory import HostMemory


class Engine(Protocol):
    """What lowered graphs call. `moved_bytes`: bytes per channel since the engine was made."""

    moved_bytes: Counter[str]

    def swap_in(self, src: torch.Tensor) -> object: ...

    def swap_out(self, src: torch.Tensor, tier: str) -> object: ...

    def wait(self, transfer: object) -> torch.Tensor: ...

    def finish(self) -> None:
        """Returns when every byte sent to the host is readable there, and what went to the device may be written."""


class SynchronousEngine:
    """Devices without streams ("cpu", a simulated device): a transfer is done when its start returns."""

    overlaps = False

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self.device, self.memory = device, memory
        self.moved_bytes: Counter[str] = Counter()

    def swap_in(self, src: torch.Tensor) -> torch.Tensor:
        out = torch.empty_strided(src.shape, src.stride(), dtype=src.dtype, device=self.device)
        out.copy_(src)
        self.moved_bytes["h2d"] += out.nbytes
        return out

    def swap_out(self, src: torch.Tensor, tier: str) -> torch.Tensor:
        out = self.memory.empty_like(src, Tier(tier))
        out.copy_(src)
        self.moved_bytes["d2h"] += out.nbytes
        return out

    @staticmethod
    def wait(transfer: torch.Tensor) -> torch.Tensor:
        return transfer

    def finish(self) -> None:
        pass


@dataclass(slots=True)
class Transfer:
    """A copy in flight: where it goes, the event that ends it, and the source it borrows."""

    out: torch.Tensor
    done: torch.Event
    borrowed: torch.Tensor | None


class StreamEngine:
    """Devices with streams: one side stream per direction.

    The destination is allocated on the compute stream and the side stream waits for it, so the caching allocator never hands the
    bytes out while a copy uses them; the source is held until the wait for the same reason. No record_stream.
    """

    overlaps = True

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self.device, self.memory = device, memory
        self.module = torch.get_device_module(device)
        self.h2d, self.d2h = self.module.Stream(device), self.module.Stream(device)
        self.moved_bytes: Counter[str] = Counter()
        self._last_in: torch.Event | None = None
        self._to_host: list[Transfer] = []

    def swap_in(self, src: torch.Tensor) -> Transfer:
        out = torch.empty_strided(src.shape, src.stride(), dtype=src.dtype, device=self.device)
        self.moved_bytes["h2d"] += out.nbytes
        transfer = self._copy(out, src, self.h2d)
        self._last_in = transfer.done
        return transfer

    def swap_out(self, src: torch.Tensor, tier: str) -> Transfer:
        out = self.memory.empty_like(src, Tier(tier))
        self.moved_bytes["d2h"] += out.nbytes
        # The host block may be one that a copy to the device read before: its wait is behind us on the compute stream, which the
        # side stream waits for.
        transfer = self._copy(out, src, self.d2h)
        self._to_host.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> torch.Tensor:
        self.module.current_stream(self.device).wait_event(transfer.done)
        transfer.borrowed = None
        return transfer.out

    def finish(self) -> None:
        if self._to_host:
            # In order on one stream: the last one ends them all.
            self._to_host[-1].done.synchronize()
            self._to_host.clear()
        if self._last_in is not None:
            # The caller may write what the copies to the device read.
            self._last_in.synchronize()
            self._last_in = None

    def _copy(self, out: torch.Tensor, src: torch.Tensor, stream: torch.Stream) -> Transfer:
        stream.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(stream):
            out.copy_(src, non_blocking=True)
            done = self.module.Event()
            done.record(stream)
        return Transfer(out, done, src)


def engine_for(device: torch.device, memory: HostMemory) -> SynchronousEngine | StreamEngine:
    """The engine of a device type: streams where its module has them."""
    if device.type == "cpu":
        return SynchronousEngine(device, memory)
    module = torch.get_device_module(device)
    return StreamEngine(device, memory) if hasattr(module, "Stream") else SynchronousEngine(device, memory)
