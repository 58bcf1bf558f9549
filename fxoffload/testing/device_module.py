"""The functions under `torch.fxsim`: what `torch.<accelerator>` offers for any accelerator, less streams and events."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from .mapped_pages import MappedPages


class DeviceCounters(Protocol):
    """What the module needs to know about the device's memory."""

    def capacity(self) -> int | None: ...
    def memory_allocated(self) -> int: ...
    def max_memory_allocated(self) -> int: ...
    def allocation_count(self) -> int: ...
    def reset_peak_memory_stats(self) -> None: ...


_Device = torch.device | str | int | None


class _CountedPages(MappedPages):
    """Pages that the device counts, and has no more of than its capacity."""

    def __init__(self, n_bytes: int, window_bytes: int, aliases: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._counted: torch.Tensor | None = torch.empty(n_bytes, dtype=torch.uint8, device="fxsim")
        super().__init__(n_bytes, window_bytes, aliases)

    def close(self) -> None:
        super().close()
        self._counted = None


class DeviceModule(types.ModuleType):
    """`torch.fxsim`. The device is number 0, always current; its random numbers come from the default CPU generator."""

    def __init__(self, counters: DeviceCounters) -> None:
        super().__init__("torch.fxsim", self.__doc__)
        self._counters = counters

    def map_pages(self, n_bytes: int, window_bytes: int, aliases: Sequence[Sequence[tuple[int, int]]]) -> _CountedPages:
        """`n_bytes` of the device's memory, and the aliases behind the window: see `runtime/device_arena.py`."""
        return _CountedPages(n_bytes, window_bytes, aliases)

    # ------------------------------------------------------------------------------------------------ the device

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: _Device) -> None:
        """Does nothing; ValueError for any device but 0."""
        if _index(device) != 0:
            raise ValueError(f"there is one simulated device, number 0, got {device!r}")

    def device(self, device: _Device) -> contextlib.AbstractContextManager[None]:
        """A context in which the device is current, as `torch.cuda.device`."""
        self.set_device(device)
        return contextlib.nullcontext()

    def synchronize(self, device: _Device = None) -> None:
        """Does nothing: every kernel has finished when its call returns."""

    def _lazy_init(self) -> None:
        """torch calls it before the first use of a device."""

    def _is_in_bad_fork(self) -> bool:
        """torch asks before it seeds: a forked process may use this device."""
        return False

    # ------------------------------------------------------------------------------------------------ the memory

    def memory_allocated(self, device: _Device = None) -> int:
        return self._counters.memory_allocated()

    def max_memory_allocated(self, device: _Device = None) -> int:
        return self._counters.max_memory_allocated()

    def memory_reserved(self, device: _Device = None) -> int:
        """Equal to `memory_allocated`: nothing is cached."""
        return self._counters.memory_allocated()

    def max_memory_reserved(self, device: _Device = None) -> int:
        return self._counters.max_memory_allocated()

    def memory_stats(self, device: _Device = None) -> dict[str, int]:
        """Bytes and counts under the names `torch.cuda.memory_stats` uses."""
        return {
            "allocated_bytes.all.current": self._counters.memory_allocated(),
            "allocated_bytes.all.peak": self._counters.max_memory_allocated(),
            "allocation.all.allocated": self._counters.allocation_count(),
        }

    def reset_peak_memory_stats(self, device: _Device = None) -> None:
        self._counters.reset_peak_memory_stats()

    def mem_get_info(self, device: _Device = None) -> tuple[int, int]:
        """Free and total bytes: of the capacity, or of the host's memory while no capacity is set."""
        capacity = self._counters.capacity()
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if capacity is None else capacity
        return max(total - self._counters.memory_allocated(), 0), total

    def empty_cache(self) -> None:
        """Does nothing: freed memory is free at once."""

    # ------------------------------------------------------------------------------------------------ random numbers

    def get_rng_state(self, device: _Device = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: _Device = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        for state in new_states:
            self.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seeds the default CPU generator, from which the device draws."""
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    # ------------------------------------------------------------------------------------------------ autocast

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _index(device: _Device) -> int:
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0
