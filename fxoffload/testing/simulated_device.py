"""A second device for tests without an accelerator: `fxsim`, computed on the CPU, with a memory of its own.

A tensor on `fxsim` behaves as one on an accelerator: mixing it with a CPU tensor raises, copies in either direction are
counted in bytes, every allocation is counted to the byte, and above the capacity `torch.OutOfMemoryError` is raised.
The numbers are the CPU kernels' own, bit for bit. `simulated_device.cpp` holds the device, `device_module.py` the
functions under `torch.fxsim`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from fxoffload.testing.device_module import DeviceModule

DEVICE_TYPE = "fxsim"
_SOURCE = Path(__file__).with_name("simulated_device.cpp")
_UNNAMED_BACKEND = "privateuseone"  # torch's name for the out-of-tree device until somebody claims it
_NO_CAPACITY = -1


class NoCompilerError(RuntimeError):
    """The device is C++ that is built on first use, and this machine has no C++ compiler."""


@dataclass(frozen=True, slots=True)
class Transferred:
    """Bytes copied between host and device since the last reset, in the dtype of the device tensor."""

    h2d_bytes: int
    d2h_bytes: int


class _Counters(ctypes.Structure):
    """One consistent reading of the device; the layout of `fxsim::Counters`."""

    _fields_ = [(name, ctypes.c_int64) for name in ("current", "peak", "allocations", "h2d", "d2h", "capacity")]

    current: int
    peak: int
    allocations: int
    h2d: int
    d2h: int
    capacity: int


class SimulatedDevice:
    """Counters and knobs of the one `fxsim` device of this process. Get it from `install`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def set_capacity(self, n_bytes: int | None) -> None:
        """Limits the device to n_bytes (None: no limit). What is allocated already stays, even above the limit."""
        if n_bytes is not None and n_bytes < 0:
            raise ValueError(f"the capacity cannot be negative, got {n_bytes}")
        self._library.fxsim_set_capacity(ctypes.c_int64(_NO_CAPACITY if n_bytes is None else n_bytes))

    def capacity(self) -> int | None:
        """The limit in bytes, None without one."""
        n_bytes = self._read().capacity
        return None if n_bytes == _NO_CAPACITY else n_bytes

    def memory_allocated(self) -> int:
        """Bytes of all live allocations, as requested: no rounding, no cache."""
        return self._read().current

    def max_memory_allocated(self) -> int:
        """Most bytes that were live at once since `reset_peak_memory_stats`."""
        return self._read().peak

    def allocation_count(self) -> int:
        """Allocations of at least one byte since `reset_peak_memory_stats`."""
        return self._read().allocations

    def reset_peak_memory_stats(self) -> None:
        """The peak restarts at the bytes that are live now, the allocation count at 0."""
        self._library.fxsim_reset_peak()

    def transferred(self) -> Transferred:
        """Bytes copied since `reset_transfer_stats`. `.item()` copies one element to the host."""
        counters = self._read()
        return Transferred(h2d_bytes=counters.h2d, d2h_bytes=counters.d2h)

    def reset_transfer_stats(self) -> None:
        self._library.fxsim_reset_transfers()

    def _read(self) -> _Counters:
        counters = _Counters()
        self._library.fxsim_read(ctypes.byref(counters))
        return counters


@functools.cache
def install() -> SimulatedDevice:
    """The device, registered with torch as "fxsim" and as the module `torch.fxsim`; the first call ever builds it.

    Raises NoCompilerError (a RuntimeError) without a C++ compiler; RuntimeError when the build fails, when another
    out-of-tree device is registered in this process (torch has room for one), or when a backward has already run.
    """
    claimed = torch._C._get_privateuse1_backend_name()
    if claimed != _UNNAMED_BACKEND:
        raise RuntimeError(f"cannot install the simulated device: the out-of-tree device {claimed!r} is registered")
    device = SimulatedDevice(ctypes.CDLL(str(_built_library())))
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, DeviceModule(device))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _check_backward()
    device.reset_peak_memory_stats()
    return device


def _check_backward() -> None:
    leaf = torch.ones(1, device=DEVICE_TYPE, requires_grad=True)
    try:
        leaf.sum().backward()
    except RuntimeError as cause:
        raise RuntimeError(
            "install the simulated device before the first backward of the process: autograd starts one thread per "
            "device then, and none later"
        ) from cause


def _built_library() -> Path:
    key = hashlib.sha256(f"{torch.__version__}\0{_SOURCE.read_text()}".encode()).hexdigest()[:16]
    library = Path.home() / ".cache" / DEVICE_TYPE / f"torch-{torch.__version__}-{key}" / f"{DEVICE_TYPE}.so"
    if not library.exists():
        _build(library)
    return library


def _build(library: Path) -> None:
    # Imported late: it costs 0.3 s and is not needed once the library is in the cache.
    from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

    compiler = shutil.which(get_cxx_compiler())
    if compiler is None:
        raise NoCompilerError(f"the simulated device is C++ built on first use; no {get_cxx_compiler()!r} was found")
    library.parent.mkdir(parents=True, exist_ok=True)
    # One command without ninja, which is often in the environment but not on the PATH of a bare `.venv/bin/python`.
    # In a folder of its own, then moved: a build that is killed or runs twice at once never leaves half a library.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        paths = [f"-isystem{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        # The C++ runtime is the one torch has loaded: an exception thrown by a second one, which some compilers link in, crashes torch.
        options = ["-shared", "-fPIC", "-std=c++20", "-O1", "-nodefaultlibs"]
        command = [compiler, *options, *paths, str(_SOURCE), "-o", str(built), "-lc10", "-ltorch_cpu", "-ltorch", "-lc"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"building the simulated device failed: {' '.join(command)}\n{done.stderr}")
        os.replace(built, library)
