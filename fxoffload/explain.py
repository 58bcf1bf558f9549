"""A Plan in words: what binds, what the step's seconds are made of, what was tried, what more of anything would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from .effects import Tier
from .reasons import ISSUE, Gain, Reasons, Tried
from .sizes import format_bytes

if TYPE_CHECKING:
    from .plans import GraphPlan, Plan, Prediction

_N_LARGEST = 3
# Smaller shares of the step are rounded to 0 %.
_SHOWN_SHARE = 0.005


def explanation(plan: Plan) -> str:
    """The plan in lines for people. Of several graphs the one with the longest step is accounted for."""
    predicted = plan.predicted
    told = [_summary(plan, predicted), _binding(plan, predicted), _account(plan.longest), _gains(plan.gains, predicted.step_s)]
    return "\n".join([*chain.from_iterable(told), *plan.notes])


def _summary(plan: Plan, predicted: Prediction) -> Iterator[str]:
    tiers = {tier: sum(r.n_bytes for r in plan.residency if r.tier is tier) for tier in Tier}
    yield f"device peak {format_bytes(predicted.device_peak_bytes)} of {format_bytes(plan.device_budget_bytes)} at {predicted.peak_node}"
    host = "" if plan.host_budget_bytes is None else f" of {format_bytes(plan.host_budget_bytes)}"
    yield f"host peak {format_bytes(predicted.host_peak_bytes)}{host}, disk {format_bytes(predicted.disk_bytes)}"
    yield "parameters: " + ", ".join(f"{tier} {format_bytes(n)}" for tier, n in tiers.items() if n)
    yield "decisions: " + ", ".join(f"{kind} {n}" for kind, n in plan.count().items())
    yield "moved per step: " + (", ".join(f"{c} {format_bytes(n)}" for c, n in predicted.moved_bytes.items()) or "nothing")
    told = ", told to the device once and replayed" if plan.longest.replays else ""
    yield f"step {_seconds(predicted.step_s)} on {plan.machine}{told}"
    for one in plan.longest.kernels or ():
        yield (f"attention of {one.layers}: {one.kernel}, {len(one.names)} calls, each saves {format_bytes(one.saved_bytes)} for backward "
               f"and holds {format_bytes(one.scratch_bytes)} while it runs")


def _binding(plan: Plan, predicted: Prediction) -> Iterator[str]:
    """Which budgets made the plan do more than keep everything where it is used."""
    peak = max(plan.graphs.values(), key=lambda graph: graph.predicted.device_peak_bytes)
    counts = plan.count()
    if predicted.disk_bytes:
        yield f"host memory binds: {format_bytes(predicted.disk_bytes)} had to go to disk"
    off_bytes = sum(r.n_bytes for r in plan.residency if r.tier is not Tier.DEVICE)
    if not counts["recompute"] and not counts["swapout"] and predicted.device_peak_bytes + off_bytes <= plan.device_budget_bytes:
        yield "device memory does not bind: all parameters and saved values fit at once, trained parameters are where the optimizer runs"
        return
    largest = peak.reasons.largest[:_N_LARGEST] if peak.reasons is not None else ()
    listing = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in largest)
    yield f"device memory binds at {predicted.peak_node}" + (f"; largest there: {listing}" if listing else "")


def _account(graph: GraphPlan) -> Iterator[str]:
    reasons, step_s = graph.reasons, graph.predicted.step_s
    if reasons is None or not step_s:
        yield "no reasons are stored in this plan; make it anew to have them"
        return
    yield from _channels(reasons, step_s)
    yield from _limit(reasons, step_s)
    yield from _search(reasons.tried)


def _channels(reasons: Reasons, step_s: float) -> Iterator[str]:
    if not reasons.critical_s:
        return
    first, *others = sorted(reasons.critical_s, key=lambda name: (-reasons.critical_s[name], name))
    shares = {name: reasons.critical_s[name] / step_s for name in (first, *others)}
    shown = [f"{name} {shares[name]:.0%}" for name in others if shares[name] >= _SHOWN_SHARE]
    yield ", ".join([f"critical: {_CHANNELS.get(first, first)}, {shares[first]:.0%} of the step", *shown])
    idle = ", ".join(f"{name} {max(0.0, 1 - busy / step_s):.0%}" for name, busy in reasons.busy_s.items())
    yield f"idle: {idle}"
    if reasons.stalled_s:
        yield (f"compute waits {_seconds(reasons.stalled_s)} for copies, the longest time, {_seconds(reasons.longest_stall_s)}, "
               f"at {reasons.stall_node}")


_CHANNELS = {ISSUE: "the host's issuing of ops"}


def _limit(reasons: Reasons, step_s: float) -> Iterator[str]:
    known = {name: seconds for name, seconds in reasons.limit_s.items() if seconds is not None}
    unknown = sorted(reasons.limit_s.keys() - known.keys())
    limit_s, terms = reasons.physical_limit_s, ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in known.items())
    yield (f"physical limit {_seconds(limit_s)}: the prediction is {step_s / limit_s:.2f} times that ({terms}"
           + (f"; not known: {', '.join(unknown)})" if unknown else ")"))
    if reasons.optimizer_s is not None:
        yield f"optimizer: {_seconds(reasons.optimizer_s)} after backward, not in the step's seconds"


def _search(tried: Sequence[Tried]) -> Iterator[str]:
    """One line per recipe: its best candidate, or why it was refused."""
    if not tried:
        return
    yield f"the search tried {len(tried)} candidates; the best of each kind:"
    fits = [one for one in tried if one.peak_bytes is not None and one.step_s is not None]
    best = min(fits, key=lambda one: one.step_s or 0.0, default=None)
    for recipe in dict.fromkeys(one.recipe for one in tried):
        yield "  " + _told([one for one in tried if one.recipe == recipe], best)


def _told(group: Sequence[Tried], best: Tried | None) -> str:
    fits = [one for one in group if one.peak_bytes is not None]
    recipe = group[0].recipe
    if fits:
        one = min(fits, key=lambda one: one.step_s or 0.0)
        mark = " (chosen)" if one is best else ""
        what = f"{recipe}, {format_bytes(one.resident_bytes)} resident"
        return f"{what}: {_seconds(one.step_s)}, live peak {format_bytes(one.peak_bytes)}{mark}"
    nearest = min(group, key=lambda one: one.shortfall_bytes)
    if nearest.shortfall_bytes:
        short = f"{format_bytes(nearest.shortfall_bytes)} short{' on the host' if nearest.lacks_host else ''}"
        return f"{recipe}: refused, {short} with {format_bytes(nearest.resident_bytes)} resident"
    return f"{recipe}: refused, it takes at least {_seconds(nearest.step_s)}"


def _gains(gains: Sequence[Gain], step_s: float | None) -> Iterator[str]:
    for gain in gains:
        saved = 0.0 if step_s is None else step_s - gain.step_s
        told = f"{_seconds(gain.step_s)}, {saved / step_s:.1%} less" if step_s and saved > 0 else "nothing faster found"
        yield f"one more {gain.of}: {told}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.4f} s" if seconds >= 1e-2 else f"{seconds * 1e3:.4f} ms"


def in_one_line(graph_plan: GraphPlan) -> str:
    """One line: nodes to be inserted by kind and predicted peaks; an identity rewrite says so."""
    counts: dict[str, int] = {}
    for decision in graph_plan.decisions:
        kind = type(decision).__name__.lower()
        counts[kind] = counts.get(kind, 0) + 1
    inserted = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "nothing inserted: an identity rewrite"
    p = graph_plan.predicted
    step = f", {p.step_s:.4f} s" if p.step_s is not None else ""
    step += ", replayed" if graph_plan.replays else ""
    kernels = "".join(f"; attention {words}" for words in [_kernel_words(graph_plan)] if words)
    return f"{inserted}{kernels}; predicted device {format_bytes(p.device_peak_bytes)}, host {format_bytes(p.host_peak_bytes)}{step}"


def _kernel_words(graph_plan: GraphPlan) -> str:
    """"32 flash, 1 math": how many calls each kernel computes."""
    counts: dict[str, int] = {}
    for one in graph_plan.kernels or ():
        counts[one.kernel] = counts.get(one.kernel, 0) + len(one.names)
    return ", ".join(f"{n} {kernel}" for kernel, n in sorted(counts.items()))
