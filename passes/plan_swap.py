"""plan-swap: when each parameter is gathered and which values leave the device and return, under the device budget.

Runs on a graph whose recomputation is already decided. Belady's rule over the schedule (fxoffload/spill.py) chooses, in what
option `slack_bytes` leaves of the budget. On a machine whose transfers overlap with compute, copies start earlier and are awaited
later (fxoffload/overlap.py), as far as the slack and what else is free allow.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.errors import PlanError
from fxoffload.graph import name_of
from fxoffload.overlap import Rates, just_in_time, overlapped
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Decision
from fxoffload.spill import Schedule
from fxoffload.swaps import decisions_of


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """The decisions for `graph` under `ctx.device_budget_bytes` (unlimited when None). Raises PlanError when it cannot fit."""
    schedule = Schedule.of(graph, ctx.bounds, ctx.workspace)
    budget = ctx.device_budget_bytes
    slack = int(ctx.options.get("slack_bytes", 0))
    found = schedule.scan(None if budget is None else budget - slack, ctx.kept_values, ctx.swapped_values)
    live = schedule.live
    if found.shortfall_bytes:
        raise PlanError(
            f"{found.shortfall_bytes} bytes short at {name_of(live.nodes[found.worst])}", shortfall_bytes=found.shortfall_bytes
        )
    if ctx.machine is not None:
        fixed_bytes = sum(s.n_bytes for s in schedule.fixed)
        rates = Rates.of(schedule, ctx.bounds, ctx.machine, ctx.swap_tier)
        earlier, _ = overlapped(schedule, found, None if budget is None else budget - fixed_bytes, rates)
        found = just_in_time(schedule, earlier, rates)
    overlaps = ctx.machine is None or ctx.machine.overlaps
    return decisions_of(live, found, ctx.swap_tier, overlaps)


PASS = Pass("plan-swap", run, options={"slack_bytes": 0})
