"""`fxoffload calibrate`: what this machine does per second, as a machine file."""

from __future__ import annotations

import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from fxoffload.machine import Machine


class Device(str, Enum):
    """What is measured as the compute device."""

    cuda = "cuda"
    cpu = "cpu"


def run(
    out: Annotated[Optional[Path], typer.Option(help="The machine file to write. Default: the one that compile takes when it is given no machine.")] = None,
    device: Annotated[Optional[Device], typer.Option(help="The compute device. Default: cuda where there is one.")] = None,
    budget_s: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds to measure for, about.")] = 60.0,
    disk_dir: Annotated[Optional[Path], typer.Option(help="Measure this folder's disk too (256 MiB, removed again).")] = None,
    name: Annotated[Optional[str], typer.Option(help="The machine's name. Default: the device's.")] = None,
    date: Annotated[Optional[str], typer.Option(help="The date to record. Default: today.")] = None,
) -> int:
    """Measure this machine for `compile` and `plan --machine`."""
    import torch

    from fxoffload.calibration.run import calibrate
    from fxoffload.machine import calibrated_file, machine_from
    from fxoffload.training.files import write_json

    chosen = device.value if device is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: torch finds no CUDA device on this machine")
    if disk_dir is not None and not disk_dir.is_dir():
        raise ValueError(f"--disk-dir: {disk_dir} is not a folder")
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out: {out.parent} is not a folder")
    where = torch.device("cuda", torch.cuda.current_device()) if chosen == "cuda" else torch.device("cpu")
    measured = calibrate(where, budget_s, disk_dir, name, date or datetime.date.today().isoformat())
    file = out or calibrated_file(where)
    if out is not None:
        write_json(out, measured)
    try:
        machine = machine_from(measured, str(file))
    except ValueError as error:  # the arguments were right, the measurement was not
        told = f"{out} is written but cannot be planned with" if out is not None else "nothing is written, it could not be planned with"
        raise RuntimeError(f"{told}: {error}") from None
    if out is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, measured)
    _print(machine, file)
    return 0


def _print(machine: Machine, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("rate", "measured", title=f"{machine.name}, written to {out}", title_justify="left")
    for dtype, rate in machine.flops_per_s.items():
        table.add_row(f"matrix products, {dtype}", f"{rate / 1e12:.4g} TFLOP/s")
    for kind, curve in machine.memory.items():
        table.add_row(kind, f"{curve.per_s / 1e9:.4g} GB/s")
    for channel, bytes_per_s in machine.channel_bytes_per_s.items():
        table.add_row(channel, f"{bytes_per_s / 1e9:.4g} GB/s")
    for place, rates in machine.optimizer_params_per_s.items():
        for kind, params_per_s in rates.items():
            table.add_row(f"AdamW {kind}, {place}", f"{params_per_s / 1e9:.4g} G parameters/s")
    Console().print(table)
