"""Runs every measurement inside one budget of seconds and puts the results where `fxoffload.machine` reads them."""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..effects import Channel
from ..machine import SCHEMA
from ..rates import MEMORY_KINDS
from ..runtime.cuda_pages import page_bytes_of
from . import compute, copies, host
from .bench import DTYPES, Bench
from .fit import Json
from .issuing import issuing
from .timing import Deadline, DeviceClock, HostClock, SynchronousClock

log = logging.getLogger("fxoffload")

# What a measurement may fail with on a machine that lacks something: torch raises RuntimeError (out of memory and driver errors
# included), AssertionError where it was built without a device, NotImplementedError and TypeError for a dtype without a kernel.
FAILURES = (
    RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError, MemoryError, ImportError,
)
# More than libraries keep for themselves (tens of MiB each), less than any item's operands that matter.
_WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement: the dotted field it fills, its part of the time, and whether only an accelerator has it.

    A mapping that it returns is merged into the field where that is an object already (`""`: the top level).
    """

    name: str
    weight: float
    measure: Callable[[Bench], object]
    cuda_only: bool = False
    field: str | None = None


def items() -> list[Item]:
    """Every measurement, in order: workspaces while no library is loaded, then what plans depend on most."""
    result = [Item("overhead", 1, compute.overhead, cuda_only=True, field="")]
    for name, channel, pinned in (("h2d_pinned", Channel.H2D, True), ("d2h_pinned", Channel.D2H, True),
                                  ("h2d_pageable", Channel.H2D, False), ("d2h_pageable", Channel.D2H, False)):
        result.append(Item(f"transfers.{name}", 2, partial(copies.transfer, channel=channel, pinned=pinned), cuda_only=pinned))
    result.append(Item("transfers.duplex", 1, copies.duplex, cuda_only=True, field="transfers"))
    result += [Item(f"memory.{kind}", 1.5, partial(compute.memory, kind=kind)) for kind in MEMORY_KINDS]
    result += [Item(f"matrix.{dtype}", 8, partial(compute.matrix, dtype=dtype)) for dtype in ("fp32", "bf16", "fp16")]
    result.append(Item("attention", 6, compute.attention))
    result.append(Item("dispatch_s", 2, issuing, cuda_only=True))
    result += [Item(f"contention.{kind}", 1, partial(copies.contention, kind=kind), cuda_only=True) for kind in ("matrix", "memory")]
    result.append(Item("host.pin_bytes_per_s", 2, copies.pinning, cuda_only=True))
    for place in ("device", "host"):
        result += [
            Item(f"optimizer_params_per_s.{place}.{how}_{dtype}", 1.5,
                 partial(host.optimizer, place=place, implementation=how, dtype=dtype),
                 cuda_only=place == "device")
            for how in ("fused", "foreach") for dtype in ("fp32", "bf16")
        ]
    result.append(Item("host.disk", 2, host.disk_rates, field="host"))
    return result


def calibrate(device: torch.device, budget_s: float, disk_dir: Path | None = None, name: str | None = None, date: str | None = None,
              chosen: Sequence[Item] | None = None, now: Callable[[], float] = time.perf_counter) -> Json:
    """The machine file's content. What fails is null, with its error under "errors"; what the device lacks is null without one."""
    measured = _blank(device, name, date)
    errors: dict[str, str] = {}
    bench_deadline = Deadline(now() + budget_s, now)
    applicable = [item for item in (items() if chosen is None else chosen) if device.type == "cuda" or not item.cuda_only]
    left = sum(item.weight for item in applicable)
    for item in applicable:
        started = now()
        try:
            _put(measured, item, item.measure(_bench(device, bench_deadline.share(item.weight / left), disk_dir)))
        except FAILURES as error:
            errors[item.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            log.warning("%s: not measured: %s", item.name, errors[item.name])
        left -= item.weight
        _free(device)
        log.info("%s: %.1f s", item.name, now() - started)
    return measured | {"errors": errors}


def _bench(device: torch.device, deadline: Deadline, disk_dir: Path | None) -> Bench:
    if device.type == "cuda":
        return Bench(device, DeviceClock(), SynchronousClock(), deadline, disk_dir)
    return Bench(device, HostClock(), HostClock(), deadline, disk_dir)


def _free(device: torch.device) -> None:
    """Gives device memory back before the next item; what an exception or an optimizer keeps in a cycle is worth a collection."""
    if device.type == "cuda":
        if torch.cuda.memory_allocated(device) > _WORKSPACE_BYTES:
            gc.collect()
        torch.cuda.empty_cache()


def _put(measured: Json, item: Item, value: object) -> None:
    """`value` into the field that `item` names."""
    words = [word for word in (item.name if item.field is None else item.field).split(".") if word]
    target = measured
    for word in words if item.field is not None else words[:-1]:
        target = target[word]  # type: ignore[assignment]
    if item.field is None:
        target[words[-1]] = value
    elif value is not None:
        target.update(value)  # type: ignore[call-overload]


def _blank(device: torch.device, name: str | None, date: str | None) -> Json:
    """Every field, unknown."""
    is_cuda = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads"
    rates = [f"{how}_{dtype}" for how in ("fused", "foreach") for dtype in ("fp32", "bf16")]
    transfers = ("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "duplex_h2d_bytes_per_s", "duplex_d2h_bytes_per_s")
    return {
        "schema": SCHEMA, "name": name or (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") if is_cuda else "cpu"),
        "datasheet": False, "source": f"measured by fxoffload calibrate on {device_name}",
        "measured": {"torch": torch.__version__, "device": device_name, "date": date}, "device_type": device.type,
        "device_capacity_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "overlaps": is_cuda, "allocation_bytes": 512 if is_cuda else 1,  # the caching allocator's rounding (CUDACachingAllocator)
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else None,
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if is_cuda else None,
        "page_bytes": page_bytes_of(device) if is_cuda else None,
        "matrix": dict.fromkeys(DTYPES), "attention": None, "memory": dict.fromkeys(MEMORY_KINDS), "transfers": dict.fromkeys(transfers),
        "dispatch_s": None, "contention": dict.fromkeys(("matrix", "memory")),
        "optimizer_params_per_s": {"device": dict.fromkeys(rates), "host": dict.fromkeys(rates)},
        "host": dict.fromkeys(("pin_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")),
        "overhead_bytes": None if is_cuda else 0, "context_bytes": None,
        "notes": [f"fp32 products as torch's float32_matmul_precision {torch.get_float32_matmul_precision()!r} has them"],
    }
