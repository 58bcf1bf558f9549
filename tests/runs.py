"""Training runs to compare: a family by plain PyTorch and by fxoffload at fractions of the free plan's peak, on one device."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from zoo import FAMILIES, Case

import fxoffload
from fxoffload import text
from fxoffload.effects import Tier
from fxoffload.graph import by_name, operands
from fxoffload.liveness import liveness
from fxoffload.places import Places
from fxoffload.planner import USER_SCALAR_BYTES
from fxoffload.session import Session
from fxoffload.swapped import ClassSwap, Home
from fxoffload.testing.simulated_device import SimulatedDevice
from fxoffload.workspace import Workspace

FRACTIONS = (1.0, 0.6, 0.35)
STEPS = 5
NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Run:
    """Five AdamW steps: the losses, every gradient of every step and the final parameters."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor | None]]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """One family at one budget. `refused`: the PlanError's text, "" when it ran; `op_alone_bytes`: what the op it names needs at least.

    `measured_bytes`: the device's own peak; on "cpu" the graphs' values alone, without what one op needs inside.
    """

    family: str
    device: str
    fraction: float
    budget_bytes: int
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    moved_bytes: Mapping[str, int] | None = None
    decisions: Mapping[str, int] | None = None
    losses_equal: bool = False
    gradients_equal: bool = False
    parameters_equal: bool = False
    refused: str = ""
    op_alone_bytes: int | None = None


def fault(row: Row, free: Row) -> str:
    """Why `row` shows nothing, or shows something wrong; "" when it counts. `free`: the family's row without a limit."""
    if row.refused:
        return "" if (row.op_alone_bytes or 0) > row.budget_bytes else "refused, although the op it names fits alone"
    assert row.predicted_bytes is not None and row.measured_bytes is not None
    if not (row.losses_equal and row.gradients_equal and row.parameters_equal):
        return "other bits than plain PyTorch"
    if row is not free and (row.decisions, row.moved_bytes) == (free.decisions, free.moved_bytes):
        return "nothing done for the budget"
    if not row.measured_bytes <= row.predicted_bytes <= row.budget_bytes:
        return "measured above predicted, or predicted above the budget"
    if row.device != "cpu" and row.predicted_bytes > 1.05 * row.measured_bytes:
        return "predicted more than 5 % above measured"
    return ""


def rows(
    family: str, device: str, simulated: SimulatedDevice | None = None, fractions: tuple[float, ...] = FRACTIONS, **options: str,
) -> Iterator[Row]:
    """One Row per fraction, the first of them 1.0 and without a limit, captured for all sizes, the others for that of the batch. On the
    simulated device each capacity is the budget. `options`: of `fxoffload.compile`."""
    make = FAMILIES[family]
    _start(simulated, None)
    expected = plain_run(make, torch.device(device))
    free: Row | None = None
    alone: Callable[[str], int] | None = None
    for i, fraction in enumerate(fractions):
        torch._dynamo.reset()
        gc.collect()
        case = make()
        budget = NO_LIMIT if free is None else int((free.predicted_bytes or 0) * fraction)
        base = _start(simulated, None if free is None else budget)
        try:
            with _autocast(case, device):
                model = fxoffload.compile(case.model, case.batch, device=device, device_budget=budget, dynamic=not i, **options)  # type: ignore[arg-type]
        except fxoffload.PlanError as refusal:
            assert alone is not None, refusal
            yield Row(family, device, fraction, budget, refused=str(refusal), op_alone_bytes=alone(_named_op(refusal)))
            continue
        run = train(model, case, torch.device(device))
        session: Session = model.fxoffload  # type: ignore[assignment]
        measured = session.meter.peak_bytes if simulated is None else simulated.max_memory_allocated() - base  # type: ignore[union-attr]
        row = _row(family, device, fraction, budget, session, measured, run, expected)
        if free is None:
            free, alone = row, op_alone_bytes(session)
        yield row
        session.close()
        del model, case, session


def _start(simulated: SimulatedDevice | None, budget: int | None) -> int:
    """Sets the capacity; bytes on the device that belong to nobody here."""
    if simulated is None:
        return 0
    base = simulated.memory_allocated()
    simulated.set_capacity(None if budget is None else base + budget)
    simulated.reset_peak_memory_stats()
    return base


def _row(family: str, device: str, fraction: float, budget: int, session: Session, measured: int, run: Run, expected: Run) -> Row:
    plan = session.plan
    assert plan is not None
    return Row(
        family, device, fraction, budget, plan.predicted.device_peak_bytes, measured, dict(plan.predicted.moved_bytes), plan.count(),
        run.losses == expected.losses, len(run.gradients) == STEPS and all(map(_equal, run.gradients, expected.gradients)),
        _equal(run.parameters, expected.parameters),
    )


def _equal(a: Mapping[str, torch.Tensor | None], b: Mapping[str, torch.Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def plain_run(make: Callable[[], Case], device: torch.device) -> Run:
    """The family by PyTorch alone, all of it on the device.

    Packed weights cannot be moved to the simulated device; there each is copied to it where eager PyTorch reads it.
    """
    case = make()
    if any(getattr(p, "quant_state", None) is not None for p in case.model.parameters()) and device.type != "cpu":
        home = Home(device)
        ClassSwap(case.model, home)
        Places(case.model, device).settle_constants()
        with home.entered():
            return train(case.model, case, device)
    model = case.model.to(device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # `.to` of an out-of-tree device unties
    return train(model, case, device)


def train(model: nn.Module, case: Case, device: torch.device) -> Run:
    """The contract's loop on one batch, from a fixed seed."""
    torch.manual_seed(7)
    # foreach would take other kernels for parameters on an accelerator than for the same on the host
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    batch = {name: tensor.to(device) for name, tensor in case.batch.items()}
    losses, gradients = [], []
    for _ in range(STEPS):
        with _autocast(case, device.type):
            out = model(**batch)
        out.loss.backward()
        gradients.append({n: None if p.grad is None else p.grad.cpu().clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return Run(losses, gradients, {n: p.detach().cpu().clone() for n, p in model.named_parameters()})


def _autocast(case: Case, device: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device, dtype=case.autocast) if case.autocast else contextlib.nullcontext()


def _named_op(refusal: fxoffload.PlanError) -> str:
    return str(refusal).split(" bytes short at ", 1)[1].split(": ", 1)[0]


def op_alone_bytes(session: Session) -> Callable[[str], int]:
    """A function of an op's name: what its operands, results and workspace take beside what always is on the device."""
    graph = session.graphs["train"]
    bounds = graph.output_node().meta[text.BOUNDS]
    live = liveness(graph, bounds)
    nodes, workspace = by_name(graph), Workspace(bounds, session.options.device.type, session.planning.machine.multiprocessors)
    inputs = {s for s in live.first if s.is_input and s.tier is Tier.DEVICE}

    def alone(name: str) -> int:
        node = nodes[name]
        touched = {s for operand in operands(node) for s in live.of.get(operand, ())} | set(live.defined_at(node))
        return sum(s.n_bytes for s in touched | inputs) + workspace(node) + USER_SCALAR_BYTES

    return alone
