"""`fxoffload train`: a causal-LM fine-tune under a budget, with a progress bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from fxoffload.errors import PlanError
from fxoffload.sizes import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

    from fxoffload.training.loop import StepReport, TrainResult


def run(
    config: Annotated[Path, typer.Argument(help="The run's YAML file; docs: fxoffload/training/config.py.")],
    max_steps: Annotated[Optional[int], typer.Option(min=1, help="Stop at this step instead of the file's.")] = None,
    json: Annotated[Optional[Path], typer.Option(help="Write losses, peaks and step times as JSON.")] = None,
) -> int:
    """Fine-tune on text or jsonl under a budget; resumes by itself."""
    from fxoffload.training.config import load_config
    from fxoffload.training.files import write_json

    settings = load_config(config)
    import transformers  # after the file is known to be good: loading it takes seconds

    from fxoffload.training.loop import train

    transformers.utils.logging.disable_progress_bar()  # one bar is enough
    try:
        with _bar() as bar:
            result = train(settings, max_steps=max_steps, on_step=_reporter(bar))
    except PlanError as error:
        if json is not None:
            write_json(json, {"fits": False, "shortfall_bytes": error.shortfall_bytes, "reason": " ".join(str(error).split())})
        raise
    if json is not None:
        write_json(json, dataclasses.asdict(result))
    _print(result)
    return 0


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("loss {task.fields[loss]} | {task.fields[rate]} tok/s | device {task.fields[device]}")
    console = Console(stderr=True)
    return Progress(MofNCompleteColumn(), BarColumn(), text, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


def _reporter(bar: Progress) -> Callable[[StepReport], None]:
    task = bar.add_task("train", total=None, loss="-", rate="-", device="-")

    def show(report: StepReport) -> None:
        bar.update(
            task, total=report.total_steps, completed=report.step, loss=f"{report.loss:.4f}",
            rate=f"{report.n_tokens / report.step_s:.0f}", device=format_bytes(report.device_peak_bytes),
        )
        if report.eval_loss is not None:
            bar.console.print(f"step {report.step}: held-out loss {report.eval_loss:.4f}")

    return show


def _print(result: TrainResult) -> None:
    last = f"{result.losses[-1]:.4f}" if result.losses else "-"
    rate = "?" if result.tokens_per_s is None else f"{result.tokens_per_s:.0f}"
    print(
        f"{len(result.losses)} steps, last loss {last}, {rate} tokens/s, device peak {format_bytes(result.device_peak_bytes)} "
        f"(predicted {format_bytes(result.predicted_device_peak_bytes)}, budget {format_bytes(result.device_budget_bytes)})"
    )
    if result.checkpoint is not None:
        print(f"checkpoint: {result.checkpoint}")
