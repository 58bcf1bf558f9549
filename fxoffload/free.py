"""What a machine has free, and budgets against it."""

from __future__ import annotations

import logging

import torch
from torch import nn

from .errors import PlanError
from .sizes import format_bytes, parse_bytes

log = logging.getLogger("fxoffload")

# The share of the host's memory that a budget nobody named leaves to everything else.
_HOST_RESERVE_PER = 16


def device_bytes(budget: int | str, device: torch.device, overhead_bytes: int = 0) -> int:
    """The device budget in bytes; "auto" is what is free now less `overhead_bytes` that libraries keep, and is logged.

    The device's context is no longer free by then. Raises PlanError with both numbers for a budget above what is free, and where
    "auto" leaves nothing.
    """
    free = free_bytes(device)
    if budget == "auto":
        return _automatic(free, device, overhead_bytes)
    wanted = parse_bytes(budget, "device_budget")
    if wanted == 0:
        raise ValueError("device_budget: must be more than 0 bytes")
    if free is not None and wanted > free:
        raise PlanError(
            f"device_budget of {wanted} bytes ({format_bytes(wanted)}) is more than the {free} bytes ({format_bytes(free)}) that are free "
            f"on {device}", wanted - free)
    return wanted


def _automatic(free: int | None, device: torch.device, overhead_bytes: int) -> int:
    if free is None:
        raise ValueError(f"device_budget: 'auto' needs a device that reports its free memory; {device.type} does not")
    budget = free - overhead_bytes
    numbers = f"{free} bytes ({format_bytes(free)}) free on {device} less {overhead_bytes} that libraries keep"
    if budget <= 0:
        raise PlanError(f"device_budget of 'auto' leaves nothing: {numbers}", 1 - budget)
    log.info("device_budget auto: %d bytes (%s): %s", budget, format_bytes(budget), numbers)
    return budget


def free_bytes(device: torch.device) -> int | None:
    """Bytes free on the device, those its caching allocator holds unused included; None where the device does not say."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    unused = 0
    if hasattr(module, "memory_reserved"):
        unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def host_bytes(budget: int | str | None, model: nn.Module) -> int:
    """The host budget in bytes; None is what is free now, with what `model` itself takes, less the reserve.

    Raises PlanError with both numbers when it is more than what is free.
    """
    import psutil

    memory = psutil.virtual_memory()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters() if t.device.type == "cpu"}
    free = memory.available + sum(storages.values())
    if budget is None:
        return max(free - memory.total // _HOST_RESERVE_PER, 0)
    wanted = parse_bytes(budget, "host_budget")
    if wanted > free:
        raise PlanError(
            f"host_budget of {wanted} bytes ({format_bytes(wanted)}) is more than the {free} bytes ({format_bytes(free)}) that are free",
            wanted - free)
    return wanted
