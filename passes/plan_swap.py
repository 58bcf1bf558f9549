"""plan-swap: when each parameter is gathered and which values leave the device and return, under the device budget.

Runs on a graph whose recomputation is already decided. Belady's rule over the schedule (fxoffload/spill.py) chooses, in what
option `slack_bytes` leaves of the budget. On a machine whose transfers overlap with compute, copies start earlier and are awaited
later (fxoffload/overlap.py), as far as the slack and what else is free allow.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.effects import Tier
from fxoffload.errors import PlanError
from fxoffload.graph import info, name_of
from fxoffload.liveness import Liveness, base_nodes
from fxoffload.overlap import Rates, overlapped
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Decision, Gather, Sink, SwapIn, SwapOut
from fxoffload.spill import Scan, Schedule


def decisions_of(live: Liveness, scan: Scan, tier: Tier, overlaps: bool = True) -> tuple[Decision, ...]:
    """The scan's loads and spills as decisions by canonical name. Without overlap a copy to the host ends where it starts."""
    bases, nodes = base_nodes(live), live.nodes
    made: list[tuple[int, Decision]] = []
    for spill in scan.spills:
        base = bases[spill.storage]
        until = max(spill.until, live.index[base])
        after = max(spill.after, live.index[base])
        if not overlaps:
            until = after
        made.append((until, SwapOut(name_of(base), tier, name_of(nodes[after]), name_of(nodes[until]))))
    for load in scan.loads:
        start, before = name_of(nodes[load.start]), name_of(nodes[load.before])
        base = bases[load.storage]
        if load.storage.is_input:
            made.append((load.before, Gather(info(base).fqn or name_of(base), start, before)))
        else:
            made.append((load.before, SwapIn(name_of(base), start, before)))
    for sunk in scan.sinks:
        made.append((sunk.until, Sink(name_of(nodes[sunk.start]).removesuffix("/out"), name_of(nodes[sunk.until]))))
    made.sort(key=lambda pair: pair[0])
    return tuple(decision for _, decision in made)


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
        found = overlapped(schedule, found, None if budget is None else budget - fixed_bytes, Rates.of(schedule, ctx.bounds, ctx.machine))
    overlaps = ctx.machine is None or ctx.machine.overlaps
    return decisions_of(live, found, ctx.swap_tier, overlaps)


PASS = Pass("plan-swap", run, options={"slack_bytes": 0})
