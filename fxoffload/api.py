"""The public entry points: `compile` and `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .machine import Machine, default_machine, load_machine
from .plan import Plan
from .session import Options, Session
from .sizes import parse_bytes
from .swapped import HOME


def compile(
    model: nn.Module,
    batch: Any,
    *,
    device: str | torch.device = "cuda",
    device_budget: int | str,
    host_budget: int | str | None = None,
    disk_budget: int | str = 0,
    disk_dir: str | Path | None = None,
    pin_memory: bool = True,
    optimizer: Any = "adamw",
    outputs: str = "auto",
    max_shape: Mapping[str, int] | None = None,
    numerics: str = "bitwise",
    machine: Machine | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    replan: bool = True,
    pins: tuple[Any, ...] = (),
    executor: str = "eager",
    dump_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> nn.Module:
    """The same `model`, which from now on trains inside the budgets."""
    options = Options(
        device=torch.device(device),
        device_budget_bytes=parse_bytes(device_budget, "device_budget"),
        host_budget_bytes=None if host_budget is None else parse_bytes(host_budget, "host_budget"),
        disk_budget_bytes=parse_bytes(disk_budget, "disk_budget"),
        disk_dir=None if disk_dir is None else str(disk_dir),
        pin_memory=pin_memory, outputs=outputs, numerics=numerics, replan=replan,
        dump_dir=None if dump_dir is None else Path(dump_dir), max_shape=max_shape or {}, pins=tuple(pins),
    )
    if HOME in model.__dict__:
        raise ValueError("model: already compiled; call model.fxoffload.close() first")
    known = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    chosen = load_machine(machine) if machine is not None else default_machine(options.device.type)
    session = Session(model, options, chosen, known)
    try:
        args, kwargs = as_call(batch)
        session.capture(args, kwargs)
        session.settle()
    except BaseException:
        session.close()
        raise
    return model


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a sample batch: a mapping, a tuple or a tensor."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    return (batch,), {}
