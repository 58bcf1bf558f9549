"""The measured device peak: an allocator's own counters over everything between two calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PeakReader = Callable[[], int | None]


@contextmanager
def measure_device_peak(device: torch.device) -> Iterator[PeakReader]:
    """A function that reads the largest number of bytes held on `device` since entering; None where nothing counts them.

    max_memory_reserved where the device module has it (cuda), else max_memory_allocated; on plain "cpu" the bytes of
    device-tier storages.
    """
    if device.type == "cpu":
        with _cpu_peak() as peak:
            yield peak
        return
    module = torch.get_device_module(device)
    reset = getattr(module, "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)
    read = getattr(module, "max_memory_reserved", None) or getattr(module, "max_memory_allocated", None)
    yield (lambda: None) if read is None else (lambda: int(read(device)))


@contextmanager
def _cpu_peak() -> Iterator[PeakReader]:
    if importlib.util.find_spec("fxoffload.testing.meter") is None:
        yield lambda: None
        return
    from fxoffload.testing.meter import DeviceMeter  # test equipment: a wheel may leave it out

    with DeviceMeter() as meter:
        yield lambda: int(meter.peak_bytes)
