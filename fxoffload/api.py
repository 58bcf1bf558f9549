"""The public entry points: `compile` and `plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .capture import batch_tensors
from .captured_step import CapturedStep
from .depth import from_shallow_captures
from .dry import is_shape, model_without_weights, sample_batch
from .errors import PlanError
from .free import device_bytes, host_bytes
from .heap import heap_at_rest
from .integrations.synthetic import with_images
from .machine import Machine, load_machine, machine_for, shipped_machines
from .optimizer_states import optimizer_states
from .pins import Pin
from .plans import Plan
from .router import DIMENSIONS, Sample
from .session import Options, Session
from .sharing import shared_outside
from .sizes import parse_budget, parse_bytes
from .start import start
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
    pins: Sequence[Pin] = (),
    executor: str = "eager",
    dynamic: bool = True,
    search: str = "quick",
    dump_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
) -> nn.Module:
    """The same `model`, which from now on trains inside the budgets with the caller's own loop.

    `batch` is one sample (mapping, tuple or tensor); its sizes, or `max_shape` ({"batch": n, "sequence": n}), are the largest the
    plan is made for; smaller batches run on the same capture. `dynamic` False, as in torch.compile: a capture is for one shape, and made
    in about half the time; each other shape is captured anew, under the same plan where it has room. `search`: "thorough" searches
    rungs of memory half as far apart (`docs/planning.md`). `device_budget` is bytes, text like "24GiB", or "auto" (what is free now, less what libraries keep);
    `host_budget` None is what the machine has free less a sixteenth of its memory. `optimizer` is transformers' name of one, a class, an
    instance or None: its states are planned. Of a model with a vision tower that is given text alone, a step with synthetic images is planned too,
    with a warning. `model.fxoffload` then has the plan, the lowered graphs, the report and `close()`. Raises ValueError for a bad argument and PlanError when a budget cannot be met, before
    anything runs; the model is then as it was.
    """
    target = with_index(device)
    _check_choices(outputs=outputs, numerics=numerics, executor=executor, search=search)
    if max_shape and not dynamic:
        raise ValueError("max_shape: with dynamic=False every capture is for one shape; give one of the two")
    _check_model(model)
    given = _given_plan(plan)
    chosen = _machine(machine, given, target)
    options = Options(
        device=target,
        device_budget_bytes=device_bytes(device_budget, target, chosen.overhead_bytes),
        host_budget_bytes=host_bytes(host_budget, model), host_budget_named=host_budget is not None,
        disk_budget_bytes=parse_bytes(disk_budget, "disk_budget"),
        disk_dir=None if disk_dir is None else _folder(disk_dir),
        pin_memory=pin_memory, outputs=outputs, numerics=numerics, executor=executor, dynamic=dynamic, replan=replan,
        dump_dir=None if dump_dir is None else Path(dump_dir), cache_dir=None if cache_dir is None else Path(cache_dir),
        max_shape=_shape_maxima(max_shape), pins=_pins(pins), states=optimizer_states(optimizer), search=search,
    )
    start(model, _samples(model, batch, replan), options, chosen, given)
    return model


def plan(
    model_or_config: Any,
    batch_or_spec: Any,
    *,
    device_budget: int | str,
    host_budget: int | str | None = None,
    disk_budget: int | str = 0,
    machine: Machine | str | Path | None = None,
    lora: Any = None,
    quantization: Any = None,
    optimizer: Any = "adamw",
    outputs: str = "auto",
    max_shape: Mapping[str, int] | None = None,
    numerics: str = "bitwise",
    executor: str = "eager",
    search: str = "quick",
    pins: Sequence[Pin] = (),
    dump_dir: str | Path | None = None,
    report: str | Path | None = None,
    explain: bool = False,
) -> Plan:
    """The Plan of one training step, made with no accelerator and no weights.

    `model_or_config`: a module (left equal in every attribute), a transformers config, a model folder or a bare config.json.
    `batch_or_spec`: a sample batch, a mapping of name to (shape, dtype), or (batch, sequence). `lora` and `quantization` are PEFT's and
    transformers' own configs; of the latter, bitsandbytes in 4 and 8 bits. `search` as in `compile`. `report`: a file for
    the page with the memory timeline. `explain` also plans with one more GiB of device and host memory and one more GB/s to the device,
    for `Plan.explain`, and what does not fit with the changes that its PlanError then names (`remedies`): some searches more, a capture more for each smaller batch. Raises
    PlanError when it does not fit and ValueError for a bad argument.
    """
    chosen = load_machine(machine) if machine is not None else load_machine("h200")
    model = model_without_weights(model_or_config, lora, quantization)
    options = planning_options(
        model, chosen, device_budget, host_budget, disk_budget, optimizer, outputs, max_shape, numerics, pins, dump_dir, executor, search)
    with captured(model, batch_or_spec, options, chosen) as session:
        try:
            session.lower_captured()
        except PlanError as error:
            if not explain or error.shortfall_bytes is None:
                raise
            raise _with_remedies(error, session, batch_or_spec) from None
        assert session.plan is not None
        if report is not None:
            session.report(report)
        return replace(session.plan, gains=session.study.gains(session.plan)) if explain else session.plan


def planning_options(
    model: Any, machine: Machine, device_budget: int | str, host_budget: int | str | None, disk_budget: int | str, optimizer: Any,
    outputs: str, max_shape: Mapping[str, int] | None, numerics: str, pins: Sequence[Pin], dump_dir: str | Path | None = None,
    executor: str = "eager", search: str = "quick",
) -> Options:
    """The Options of a Session that only plans. Raises ValueError for a bad argument."""
    _check_choices(outputs=outputs, numerics=numerics, executor=executor, search=search)
    _check_model(model, planning=True)
    return Options(
        device=torch.device("cpu"),
        device_budget_bytes=parse_budget(device_budget, "device_budget"),
        host_budget_bytes=None if host_budget is None else parse_bytes(host_budget, "host_budget"),
        disk_budget_bytes=parse_bytes(disk_budget, "disk_budget"),
        pin_memory=machine.device_type == "cuda", outputs=outputs, numerics=numerics, executor=executor,
        dump_dir=None if dump_dir is None else Path(dump_dir), max_shape=_shape_maxima(max_shape), pins=_pins(pins),
        states=optimizer_states(optimizer), search=search, planning_only=True,
    )


@contextmanager
def captured(model: nn.Module, batch_or_spec: Any, options: Options, machine: Machine) -> Iterator[Session]:
    """A Session that has captured the step of a batch and planned nothing yet; the model is as it was afterwards.

    A deep model of equal blocks is not traced whole (`depth`).
    """
    args, kwargs = as_call(sample_batch(batch_or_spec, model))

    def capture() -> CapturedStep:
        # Pins and dumps are of the whole model.
        with closing(Session(model, replace(options, pins=(), dump_dir=None), machine, None)) as session, heap_at_rest():
            session.router.capture(args, kwargs)
            assert session.captured is not None, "nothing was captured"
            return session.captured

    with heap_at_rest():
        step = from_shallow_captures(model, capture)
    with closing(Session(model, options, machine, None)) as session:
        if step is None:
            with heap_at_rest():
                session.router.capture(args, kwargs)
        else:
            session.captured = step
        assert session.captured is not None, "nothing was captured"
        with heap_at_rest():
            session.captured = session.captured.to_run(options.executor, options.numerics)
        yield session


def _with_remedies(error: PlanError, session: Session, batch_or_spec: Any) -> PlanError:
    """The refusal with what would make it a plan: larger budgets, and of a (batch, sequence) the largest half of it that fits."""
    remedies = session.study.remedies(error)
    session.close()
    for shape in halves(batch_or_spec):
        try:
            with captured(session.model, shape, session.options, session.machine) as smaller:
                plan = smaller.study.plan()
        except (PlanError, ValueError):  # it does not fit either, or is no shape that this model takes
            continue
        remedies.append(f"batch {shape[0]} x {shape[1]} (step {plan.predicted.step_s or 0.0:.4f} s)")
        break
    told = "; or ".join(remedies) if remedies else "nothing that was tried"
    return PlanError(f"{error} What would do: {told}.", error.shortfall_bytes, tuple(remedies))


def halves(shape: Any) -> list[tuple[int, int]]:
    """Smaller shapes of a (batch, sequence) to try, the largest first: the batch in halves, then the sequence; none of anything else."""
    if not is_shape(shape):
        return []
    batch, sequence = shape
    found = []
    while batch > 1 or sequence > 1:
        batch, sequence = (batch // 2, sequence) if batch > 1 else (1, sequence // 2)
        found.append((batch, sequence))
    return found


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a sample batch: a mapping, a tuple or a tensor. Raises ValueError for anything else."""
    empty = [name or "the tensor" for name, tensor in batch_tensors(batch) if tensor.numel() == 0]
    if empty:
        raise ValueError(f"batch: {empty[0]} is empty; the sample must be as large as the largest batch to come")
    if isinstance(batch, Mapping) and batch:
        return (), dict(batch)
    if isinstance(batch, tuple) and batch:
        return batch, {}
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    raise ValueError(f"batch: expected a non-empty mapping or tuple, or a tensor; got {type(batch).__name__} {batch!r:.60}")


def with_index(name: str | torch.device) -> torch.device:
    """The device with its index, as its tensors report it. Raises ValueError for a device this process does not have."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: {str(error).splitlines()[0]}") from None
    if device.type in ("cpu", "meta"):
        if device.type == "meta":
            raise ValueError("device: 'meta' cannot compute; use fxoffload.plan to plan without a device")
        return torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device: {str(device)!r} is not available: {str(error).splitlines()[0]}") from None


def _samples(model: nn.Module, batch: Any, replan: bool) -> list[Sample]:
    """The calls to be captured: of text alone for a model with a vision tower, one with synthetic images before it. It needs more, and
    where parameters reside is decided once."""
    given = Sample(*as_call(batch))
    pictured = with_images(model, batch)
    return [Sample(*as_call(pictured)), given] if pictured is not batch and replan else [given]


def _machine(machine: Machine | str | Path | None, plan: Plan | None, device: torch.device) -> Machine:
    """The machine that is asked for, or the one a given plan was made for, where that ships and is such a device, or the device's
    (`machine_for`): a plan counts its machine's bytes."""
    if machine is not None:
        return load_machine(machine)
    planned = load_machine(plan.machine) if plan is not None and plan.machine in shipped_machines() else None
    return planned if planned is not None and planned.device_type == device.type else machine_for(device)


def _given_plan(plan: Plan | str | Path | None) -> Plan | None:
    known = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if known is not None and not isinstance(known, Plan):
        raise ValueError(f"plan: expected a Plan or a path, got {type(known).__name__}")
    return known


def _folder(disk_dir: str | Path) -> str:
    if not Path(disk_dir).is_dir():
        raise ValueError(f"disk_dir: {str(disk_dir)!r} is not a folder")
    return str(disk_dir)


def _shape_maxima(max_shape: Mapping[str, int] | None) -> dict[str, int]:
    maxima = {"sequence" if name == "seq" else name: n for name, n in (max_shape or {}).items()}
    for name, n in maxima.items():
        if name not in DIMENSIONS:
            raise ValueError(f"max_shape: unknown dimension {name!r}; known are {', '.join(DIMENSIONS)}")
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(f"max_shape: {name} must be a positive number, got {n!r}")
    return maxima


def _pins(pins: Sequence[Pin]) -> tuple[Pin, ...]:
    wrong = [p for p in pins if not isinstance(p, Pin)]
    if wrong:
        raise ValueError(f"pins: expected what fxoffload.pin returns, got {wrong[0]!r}")
    return tuple(pins)


_CHOICES = {
    "outputs": ("auto", "all"), "numerics": ("bitwise", "reordered"), "executor": ("eager", "inductor"), "search": ("quick", "thorough")}


def _check_choices(**chosen: str) -> None:
    for name, value in chosen.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}: must be one of {', '.join(_CHOICES[name])}; got {value!r}")
    if chosen.get("executor") == "inductor" and chosen.get("numerics") == "bitwise":
        raise ValueError('executor: "inductor" rounds once where PyTorch rounds after every op; it needs numerics="reordered"')


def _check_model(model: Any, planning: bool = False) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"model: {type(model).__name__} cannot be compiled; compile the module inside it")
    if HOME in model.__dict__:
        raise ValueError("model: already compiled; call model.fxoffload.close() first")
    shared = shared_outside(model)
    if shared is not None and not planning:
        raise ValueError(f"model: parameter {shared.name!r} is also a parameter of {shared.owner}, which is not part of the model")
    meta = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if meta and not planning:
        raise ValueError(f"model: {len(meta)} parameters have no weights (meta device), the first is {meta[0]!r}; load them first")
