"""One model over many budgets, shapes and machines: which card it needs, and what each step then takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from .api import captured, planning_options
from .dry import model_without_weights
from .errors import PlanError
from .machine import Machine, load_machine
from .pins import Pin
from .planning import Budgets
from .sizes import format_bytes, parse_budget
from .study import Study

# The budget that stands for all of a machine's device memory.
CARD = "card"


@dataclass(frozen=True, slots=True)
class Row:
    """One point of a sweep. Where it does not fit, `reason` says why and the predictions are None; `shortfall_bytes`: what the budget
    lacks, None where bytes are not the reason."""

    machine: str
    batch: int
    sequence: int
    device_budget_bytes: int
    fits: bool
    device_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    shortfall_bytes: int | None = None
    reason: str = ""


def sweep(
    model_or_config: Any,
    *,
    batch: int | Sequence[int],
    sequence: int | Sequence[int],
    device_budget: int | str | Sequence[int | str],
    machine: Machine | str | Path | Sequence[Machine | str | Path] = "h200",
    host_budget: int | str | None = None,
    disk_budget: int | str = 0,
    lora: Any = None,
    quantization: Any = None,
    optimizer: Any = "adamw",
    outputs: str = "auto",
    numerics: str = "bitwise",
    executor: str = "eager",
    search: str = "quick",
    pins: Sequence[Pin] = (),
    on_row: Callable[[Row, int], None] | None = None,
) -> list[Row]:
    """A Row for every batch x sequence x machine x device budget, in that order: what `plan` would predict, or why it would refuse.

    Each (batch, sequence) is captured once; every machine and budget costs a search on what was captured. The budget "card" is all of a
    machine's device memory. `on_row` is told each Row when it is there, and how many there will be. Raises ValueError for a bad argument.
    """
    machines = [load_machine(one) for one in _several(machine)]
    budgets = [one if one == CARD else parse_budget(one, "device_budget") for one in _several(device_budget)]
    shapes = list(product(_sizes(batch, "batch"), _sizes(sequence, "sequence")))
    points = [(one, _on(one, budget)) for one in machines for budget in budgets]
    if not points or not shapes:
        raise ValueError("sweep: needs at least one batch, sequence, machine and device_budget")
    model = model_without_weights(model_or_config, lora, quantization)
    options = planning_options(
        model, machines[0], points[0][1], host_budget, disk_budget, optimizer, outputs, None, numerics, pins,
        executor=executor, search=search)
    rows: list[Row] = []
    for shape in shapes:
        with captured(model, shape, options, machines[0]) as session:
            for row in _rows(session.study, shape, points):
                rows.append(row)
                if on_row is not None:
                    on_row(row, len(shapes) * len(points))
    return rows


def _several(one_or_more: Any) -> list[Any]:
    """The elements of a list or tuple, else the one value."""
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]


def _sizes(one_or_more: int | Sequence[int], name: str) -> list[int]:
    sizes = _several(one_or_more)
    wrong = [n for n in sizes if type(n) is not int or n < 1]
    if wrong:
        raise ValueError(f"{name}: must be positive numbers, got {wrong[0]!r}")
    return sizes


def _on(machine: Machine, budget: int | str) -> int:
    """The budget in bytes on a machine; "card" is what its driver leaves of the device's memory, as far as the machine file knows."""
    if isinstance(budget, int):
        return budget
    if machine.device_capacity_bytes is None:
        raise ValueError(f"device_budget: {CARD!r} needs device_capacity_bytes, which machine {machine.name!r} does not have")
    return machine.device_capacity_bytes - (machine.context_bytes or 0)


def _rows(study: Study, shape: tuple[int, int], points: Iterable[tuple[Machine, int]]) -> Iterator[Row]:
    for machine, budget in points:
        yield _row(study, shape, machine, budget)


def _row(study: Study, shape: tuple[int, int], machine: Machine, budget: int) -> Row:
    where = (machine.name, *shape, budget)
    capacity = machine.device_capacity_bytes
    if capacity is not None and budget > capacity:
        return Row(*where, False, reason=f"{machine.name} has {format_bytes(capacity)} of device memory")
    asked = study.planning.budgets
    try:
        plan = study.plan(Budgets(budget, asked.host_bytes, asked.disk_bytes, machine.device_type == "cuda"), machine)
    except PlanError as error:
        return Row(*where, False, shortfall_bytes=error.shortfall_bytes, reason=" ".join(str(error).split()))
    found = plan.predicted
    rate = shape[0] * shape[1] / found.step_s if found.step_s else None
    return Row(*where, True, found.device_peak_bytes, found.host_peak_bytes, found.step_s, rate)
