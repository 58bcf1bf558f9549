"""The training loop: a budgeted model, resumable to the bit."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

import fxoffload
from fxoffload.sizes import parse_bytes
from fxoffload.training import checkpoint
from fxoffload.training.checkpoint import Progress, Trained
from fxoffload.training.config import TrainConfig
from fxoffload.training.data import Batches, hold_out, load_batches
from fxoffload.training.measure import PeakReader, measure_device_peak
from fxoffload.training.model import build_model, build_optimizer, build_scheduler, load_tokenizer

log = logging.getLogger(__name__)

CompileFunction = Callable[..., torch.nn.Module]  # fxoffload.compile's contract


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished optimizer step, for whoever shows progress. `n_tokens` counts the real tokens, padding left out."""

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    step_s: float
    n_tokens: int
    device_peak_bytes: int | None
    eval_loss: float | None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run. `losses` has every step since step 1; `step_s` and `tokens_per_s` only this process's steps."""

    losses: tuple[float, ...]
    eval_losses: tuple[tuple[int, float], ...]
    resumed_from: str | None
    step_s: tuple[float, ...]
    tokens_per_s: float | None  # over the steps after this process's first, which also compiles
    device_peak_bytes: int | None
    predicted_device_peak_bytes: int | None
    device_budget_bytes: int | None
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class _Run:
    """What stays the same over all steps of one process."""

    config: TrainConfig
    trained: Trained
    batches: Batches
    held_out: Batches | None
    total_steps: int
    peak: PeakReader


def train(
    config: TrainConfig,
    *,
    max_steps: int | None = None,
    on_step: Callable[[StepReport], None] | None = None,
    compile_fn: CompileFunction | None = None,
) -> TrainResult:
    """Trains as `config` says, continuing from its newest checkpoint; `max_steps` replaces the number of steps at which to stop.

    A run stopped and continued any number of times gives the bits of an uninterrupted one. Raises PlanError if the budget
    cannot be met, FloatingPointError at a loss that is not finite, OSError if a checkpoint cannot be written, ValueError for
    anything wrong with the configuration, its files or an explicitly named checkpoint. `compile_fn`: default fxoffload.compile.
    """
    with ExitStack() as stack:
        if config.output_dir is not None:
            stack.enter_context(checkpoint.exclusive(config.output_dir))
        resume = select_checkpoint(config)
        run, progress = _prepare(config, max_steps, resume, compile_fn, stack)
        return _train_steps(run, progress, resume, on_step)


def select_checkpoint(config: TrainConfig) -> Path | None:
    """The checkpoint that `config.resume` means, verified. Raises ValueError if it names a damaged one, or is "none" though
    `output_dir` has checkpoints, which a later "auto" would mix with the new run's."""
    if config.resume not in ("auto", "none"):
        path = Path(config.resume)
        problem = checkpoint.find_damage(path)
        if problem is not None:
            raise ValueError(f"resume: {problem}; choose another checkpoint or use resume: auto")
        return path
    newest = None if config.output_dir is None else checkpoint.find_newest(config.output_dir)
    if config.resume == "none" and newest is not None:
        raise ValueError(f"resume: none, but {newest} exists; use resume: auto, another output_dir, or remove the checkpoints")
    return newest


def _prepare(
    config: TrainConfig, max_steps: int | None, resume: Path | None, compile_fn: CompileFunction | None, stack: ExitStack
) -> tuple[_Run, Progress]:
    batches, held_out = _load_data(config)
    progress = _initial_progress(config, batches, resume)
    configured_steps = _configured_steps(config, batches)
    total_steps = max_steps or configured_steps
    device = _device(config.device)
    transformers.set_seed(config.seed)
    model = build_model(config, resume)
    _check_vocabulary(model, (batches, held_out))
    peak = stack.enter_context(measure_device_peak(device))
    if config.device_budget is None:
        model.to(device)
    optimizer = build_optimizer((p for p in model.parameters() if p.requires_grad), config.optimizer)
    if config.device_budget is not None:
        model = _compile(compile_fn or fxoffload.compile, model, optimizer, batches, config, device)
        stack.callback(model.fxoffload.close)  # type: ignore[union-attr, arg-type]
    schedule_steps = max(total_steps, configured_steps)  # stopping early must not bend the schedule
    trained = Trained(model, optimizer, build_scheduler(optimizer, config.schedule, schedule_steps), device)
    transformers.set_seed(config.seed)
    if resume is not None:
        checkpoint.restore(resume, trained)
        log.info("continuing from %s at step %d", resume, progress.step)
    return _Run(config, trained, batches, held_out, total_steps, peak), progress


def _compile(
    compile_fn: CompileFunction, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, config: TrainConfig,
    device: torch.device,
) -> torch.nn.Module:
    with _autocast(config, device):  # the mode of the first step, so that the first plan is the one it runs
        return compile_fn(
            model, batches.largest_batch(), device=str(device), device_budget=config.device_budget,
            host_budget=config.host_budget, disk_budget=config.disk_budget, disk_dir=config.disk_dir, optimizer=optimizer,
            numerics=config.numerics, executor=config.executor, search=config.search, machine=config.machine, dump_dir=config.dump_dir,
            cache_dir=config.cache_dir,
        )


def _train_steps(run: _Run, progress: Progress, resume: Path | None, on_step: Callable[[StepReport], None] | None) -> TrainResult:
    reports: list[StepReport] = []
    saved = resume
    while progress.step < run.total_steps:
        progress, report = _train_step(run, progress)
        reports.append(report)
        if on_step is not None:
            on_step(report)
        if _is_save_due(run, progress.step):
            saved = _save(run, progress)
    return _result(run, progress, resume, reports, saved)


def _train_step(run: _Run, progress: Progress) -> tuple[Progress, StepReport]:
    started = time.perf_counter()
    step = progress.step + 1
    loss, n_tokens = _accumulate_gradients(run, progress.batches_seen)
    if not math.isfinite(loss):
        cause = f"lower optimizer.lr or look at the data of batch {progress.batches_seen}"
        raise FloatingPointError(f"step {step}: the loss is {loss}; {cause}")
    learning_rate = float(run.trained.optimizer.param_groups[0]["lr"])
    _update(run)
    step_s = time.perf_counter() - started
    eval_loss = _evaluate(run) if run.config.eval is not None and step % run.config.eval.every == 0 else None
    seen = progress.batches_seen + run.config.gradient_accumulation
    evals = progress.eval_losses if eval_loss is None else (*progress.eval_losses, (step, eval_loss))
    progress = dataclasses.replace(
        progress, step=step, batches_seen=seen, losses=(*progress.losses, loss), eval_losses=evals
    )
    report = StepReport(step, run.total_steps, loss, learning_rate, step_s, n_tokens, run.peak(run.trained.model), eval_loss)
    return progress, report


def _accumulate_gradients(run: _Run, first_batch: int) -> tuple[float, int]:
    """(mean loss of the micro-batches, their real tokens)."""
    n = run.config.gradient_accumulation
    total, n_tokens = 0.0, 0
    for number in range(first_batch, first_batch + n):
        batch = run.batches.batch(number)
        n_tokens += int((batch["labels"] >= 0).sum())
        loss = _loss(run, batch)
        (loss / n).backward()
        total += loss.item()
    return total / n, n_tokens


def _update(run: _Run) -> None:
    optimizer = run.trained.optimizer
    if run.config.max_grad_norm is not None:
        trainable = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trainable, run.config.max_grad_norm)
    optimizer.step()
    run.trained.scheduler.step()
    optimizer.zero_grad()


def _evaluate(run: _Run) -> float:
    """The mean loss per batch on the held-out rows; leaves the model in train mode."""
    assert run.held_out is not None  # EvalConfig names files or a fraction
    model = run.trained.model.eval()
    with torch.no_grad():
        losses = [_loss(run, run.held_out.batch(i)).item() for i in range(run.held_out.per_epoch)]
    model.train()
    return sum(losses) / len(losses)


def _loss(run: _Run, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    device = run.trained.device
    if run.config.device_budget is None:  # a compiled model takes the batch from the host, as its parameters are there
        batch = {name: value.to(device) for name, value in batch.items()}
    with _autocast(run.config, device):
        loss: torch.Tensor = run.trained.model(**batch).loss
    return loss


def _is_save_due(run: _Run, step: int) -> bool:
    if run.config.output_dir is None:
        return False
    every = run.config.save_every
    return step == run.total_steps or (every is not None and step % every == 0)


def _save(run: _Run, progress: Progress) -> Path:
    root = run.config.output_dir
    assert root is not None  # _is_save_due
    path = checkpoint.save(root, run.trained, progress)
    checkpoint.prune(root, run.config.keep_last)
    return path


def _result(run: _Run, progress: Progress, resume: Path | None, reports: list[StepReport], saved: Path | None) -> TrainResult:
    steady = reports[1:] or reports
    seconds = sum(report.step_s for report in steady)
    budget, predicted = _budget_bytes(run), None
    if run.config.device_budget is not None:
        predicted = int(run.trained.model.fxoffload.plan.predicted.device_peak_bytes)  # type: ignore[union-attr, arg-type]
    return TrainResult(
        losses=progress.losses, eval_losses=progress.eval_losses, resumed_from=None if resume is None else str(resume),
        step_s=tuple(report.step_s for report in reports),
        tokens_per_s=sum(report.n_tokens for report in steady) / seconds if seconds > 0 else None,
        device_peak_bytes=run.peak(run.trained.model), predicted_device_peak_bytes=predicted, device_budget_bytes=budget,
        checkpoint=None if saved is None else str(saved),
    )


def _budget_bytes(run: _Run) -> int | None:
    budget = run.config.device_budget
    if budget == "auto":
        return int(run.trained.model.fxoffload.plan.device_budget_bytes)  # type: ignore[union-attr, arg-type]
    return None if budget is None else parse_bytes(budget, "device_budget")


def _load_data(config: TrainConfig) -> tuple[Batches, Batches | None]:
    tokenizer = load_tokenizer(config)
    batches, held_out = load_batches(config.data.paths, tokenizer, config.data), None
    if config.eval is not None:
        in_order = dataclasses.replace(config.data, shuffle=False, drop_last=False)
        if config.eval.fraction is not None:
            batches, held_out = hold_out(batches, config.eval.fraction)
            held_out = dataclasses.replace(held_out, config=in_order)
        else:
            held_out = load_batches(config.eval.paths, tokenizer, in_order)
    log.info("%d rows, %d batches per epoch", len(batches.rows), batches.per_epoch)
    return batches, held_out


def _initial_progress(config: TrainConfig, batches: Batches, resume: Path | None) -> Progress:
    start = Progress(0, 0, batches.fingerprint(), config.optimizer.name, ())
    if resume is None:
        return start
    progress = checkpoint.load_progress(resume)
    if progress.data != start.data:
        raise ValueError(f"resume: {resume} was made with other data or data settings, so its position means nothing here; "
                         "restore them or choose another output_dir")
    if progress.optimizer != start.optimizer:
        raise ValueError(f"resume: {resume} holds states of optimizer {progress.optimizer}, not {start.optimizer}")
    return progress


def _configured_steps(config: TrainConfig, batches: Batches) -> int:
    if config.max_steps is not None:
        return config.max_steps
    return math.ceil((config.epochs or 1) * batches.per_epoch / config.gradient_accumulation)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: {name!r} is not a torch device: {str(error).splitlines()[0]}") from error


def _check_vocabulary(model: torch.nn.Module, parts: tuple[Batches | None, ...]) -> None:
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    largest = max(part.largest_token() for part in parts if part is not None)
    if largest >= size:
        raise ValueError(f"tokenizer: its token {largest} is outside the model's vocabulary of {size}; use the model's own tokenizer")


def _autocast(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "autocast")
