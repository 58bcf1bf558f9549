"""A Plan as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fxoffload.sizes import format_bytes

if TYPE_CHECKING:
    from fxoffload.plans import Plan


def plan_table(plan: Plan, title: str, n_tokens: int | None = None) -> Table:
    """Predicted peaks and speed, bytes per tier and channel, decisions by kind; `n_tokens`: of one step."""
    predicted = plan.predicted
    table = Table("", "count", "bytes or rate", title=title, title_justify="left")
    budget = format_bytes(plan.device_budget_bytes)
    table.add_row("device peak", "", f"{format_bytes(predicted.device_peak_bytes)} of {budget}")
    table.add_row("host peak", "", format_bytes(predicted.host_peak_bytes))
    table.add_row("step", "", "?" if predicted.step_s is None else f"{predicted.step_s * 1e3:.1f} ms")
    limit_s = plan.physical_limit_s
    table.add_row("physical limit", "", "?" if limit_s is None else f"{limit_s * 1e3:.1f} ms")
    rate = tokens_per_s(n_tokens, predicted.step_s)
    table.add_row("tokens per second", "", "?" if rate is None else f"{rate:.0f}", end_section=True)
    for tier, (count, n_bytes) in sorted(tier_totals(plan).items()):
        table.add_row(f"parameters: {tier}", str(count), format_bytes(n_bytes))
    table.add_section()
    for kind, count in sorted(plan.count().items()):
        table.add_row(f"decisions: {kind}", str(count), "")
    table.add_section()
    for channel, n_bytes in sorted(predicted.moved_bytes.items()):
        table.add_row(f"moved per step: {channel}", "", format_bytes(n_bytes))
    return table


def tier_totals(plan: Plan) -> dict[str, tuple[int, int]]:
    """(parameters, bytes) per tier between uses."""
    totals: dict[str, tuple[int, int]] = {}
    for reside in plan.residency:
        count, n_bytes = totals.get(str(reside.tier.value), (0, 0))
        totals[str(reside.tier.value)] = (count + 1, n_bytes + reside.n_bytes)
    return totals


def tokens_per_s(n_tokens: int | None, step_s: float | None) -> float | None:
    """None where either is unknown."""
    return n_tokens / step_s if n_tokens is not None and step_s else None
