"""The measured device peak: an allocator's own counters over everything between two calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PeakReader = Callable[[torch.nn.Module], int | None]


@contextmanager
def measure_device_peak(device: torch.device) -> Iterator[PeakReader]:
    """A function of the trained model: the largest number of bytes held on `device` since entering, None where nothing counts them.

    max_memory_reserved where the device module has it (cuda), else max_memory_allocated; on plain "cpu" the bytes of
    device-tier storages, which only a compiled model has.
    """
    if device.type == "cpu":
        yield _cpu_peak_bytes
        return
    module = torch.get_device_module(device)
    reset = getattr(module, "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)
    read = getattr(module, "max_memory_reserved", None) or getattr(module, "max_memory_allocated", None)
    yield lambda model: None if read is None else int(read(device))


def _cpu_peak_bytes(model: torch.nn.Module) -> int | None:
    # DeviceMeter is a dispatch mode: Dynamo refuses to compile under one, so it is entered by the runtime around each graph it
    # executes, not here around the user's loop.
    meter = getattr(getattr(model, "fxoffload", None), "meter", None)
    return None if meter is None else int(meter.peak_bytes)
