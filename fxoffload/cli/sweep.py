"""`fxoffload plan --sweep`: many plans of one model as one table, one page, one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers
    from rich.progress import Progress

    from fxoffload.sweeps import Row


def run_sweep(
    config: transformers.PretrainedConfig, axes: Mapping[str, Any], options: Mapping[str, Any], json: Path | None, html: Path | None,
) -> int:
    """Prints the table of `fxoffload.sweep` over `axes` and writes it where asked. 0, or 1 when no point fits."""
    import fxoffload
    from fxoffload.training.files import write_json

    with _bar() as bar:
        rows = fxoffload.sweep(config, **axes, **options, on_row=_counter(bar))
    _print(rows)
    if json is not None:
        write_json(json, {"rows": [dataclasses.asdict(row) for row in rows]})
    if html is not None:
        from fxoffload.report import pareto

        pareto.write(rows, html, f"{config.model_type}: step seconds against device budget")
    return 0 if any(row.fits for row in rows) else 1


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    return Progress(MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), console=console, disable=not console.is_terminal)


def _counter(bar: Progress) -> Callable[[Row, int], None]:
    task = bar.add_task("capturing", total=None)

    def count(row: Row, total: int) -> None:
        bar.update(task, total=total, advance=1, description=f"{row.machine}, batch {row.batch} x {row.sequence}")

    return count


def _print(rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fxoffload.report.pareto import numbers
    from fxoffload.sizes import format_bytes

    table = Table("machine", "batch", "seq", "budget", "device peak", "host peak", "step", "tokens/s", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(row.machine, str(row.batch), str(row.sequence), format_bytes(row.device_budget_bytes), *numbers(row))
    Console().print(table)
