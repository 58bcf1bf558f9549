"""Rates of optimizers, on either side, and of the disk."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from .bench import DTYPES, Bench
from .timing import Clock, HostClock, sweep

_N_PARAMS = [1 << 20, 1 << 24, 1 << 26]  # the last outgrows every cache: 1 GiB of fp32 parameter, gradient and states
_N_TENSORS = 16
_MIB = 1 << 20


def optimizer(bench: Bench, place: str, implementation: str, dtype: str) -> float:
    """Parameters per second of torch's AdamW ("fused" or "foreach"), states in the parameters' dtype."""
    device = bench.device if place == "device" else torch.device("cpu")
    clock: Clock = bench.clock if place == "device" else HostClock()

    def seconds(n_params: int, limit_s: float) -> float:
        parameters = [torch.ones(n_params // _N_TENSORS, dtype=DTYPES[dtype], device=device, requires_grad=True) for _ in range(_N_TENSORS)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        adamw = torch.optim.AdamW(parameters, fused=implementation == "fused", foreach=implementation == "foreach")
        return clock.seconds(adamw.step, limit_s)

    n_params, s = sweep(_N_PARAMS, seconds, bench.deadline)[-1]
    return n_params / s


def disk(folder: Path, n_bytes: int) -> tuple[float, float]:
    """Bytes per second (written, read) of a file in `folder` that is removed again. Raises ValueError if that is no folder."""
    if not folder.is_dir():
        raise ValueError(f"--disk-dir: {folder} is not a folder")
    block = os.urandom(_MIB)  # incompressible
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(n_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache answers
        file.seek(0)
        started = time.perf_counter()
        while file.read(len(block)):
            pass
        read_s = time.perf_counter() - started
    return n_bytes / write_s, n_bytes / read_s


def disk_rates(bench: Bench) -> dict[str, float] | None:
    """Both rates of the disk that calibration was given, None without one."""
    if bench.disk_dir is None:
        return None
    written, read = disk(bench.disk_dir, 256 * _MIB)
    return {"disk_write_bytes_per_s": written, "disk_read_bytes_per_s": read}
