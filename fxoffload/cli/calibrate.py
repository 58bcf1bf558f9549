"""`fxoffload calibrate`: measures this machine for the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer


def run(
    out: Annotated[Optional[Path], typer.Option(help="The machine file. Default: the one that compile and plan read.")] = None,
    device: Annotated[Optional[str], typer.Option(help="The device to measure. Default: this machine's accelerator.")] = None,
) -> int:
    """Measure this machine for the planner."""
    from fxoffload import calibration

    machine = calibration.calibrate(device=device)
    print(f"wrote {calibration.save(machine, out)}")
    return 0
