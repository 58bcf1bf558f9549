"""The page: one self-contained HTML file with the memory timeline, the channels' lanes and every decision of a plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..effects import Channel, Tier
from ..graph import module_path
from ..liveness import largest_live
from ..plans import Bucket, Decision, Plan, Recompute, Reside
from ..timeline import Span
from .views import Report, View, memory_nodes, report_of

if TYPE_CHECKING:
    from .views import Source

# Points of the drawn curve: above the pixels of a wide screen nothing more shows, and the file of a 10k-node graph stays below 1 MiB.
N_POINTS = 1200
N_BARS = 600
N_LARGEST = 10
N_TOOLTIP = 4


def write(source: Source, path: str | Path) -> None:
    """Writes the page of a Session (`model.fxoffload`), a Plan, a plan file or a dump folder to `path`.

    A plan alone holds no graph: its page has the decisions and predictions but no timeline. Raises ValueError for another path.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(render(report_of(source)), encoding="utf-8")
    partial.replace(target)


def render(report: Report) -> str:
    """The page as text. It loads nothing from anywhere."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(page_data(report), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("/*DATA*/null", data)


def page_data(report: Report) -> dict[str, object]:
    """What the page draws, as JSON values; bytes and seconds are numbers."""
    return {
        "title": report.title,
        "machine": {"name": report.machine.name, "source": report.machine.source, "overlaps": report.machine.overlaps},
        "plan": None if report.plan is None else _plan_data(report.plan),
        "views": [_view_data(view) for view in report.views],
    }


def _plan_data(plan: Plan) -> dict[str, object]:
    graphs = [
        {"label": g.label, "predicted": asdict(g.predicted) | {"moved_bytes": dict(g.predicted.moved_bytes)}, "saved": len(g.saved),
         "limit_s": None if g.reasons is None else g.reasons.physical_limit_s,
         "decisions": [_decision_row(d) for d in g.decisions]}
        for g in plan.graphs.values()
    ]
    tiers: Counter[Tier] = Counter()
    counts: Counter[Tier] = Counter()
    for reside in plan.residency:
        tiers[reside.tier] += reside.n_bytes
        counts[reside.tier] += 1
    return {
        "id": plan.id, "numerics": plan.numerics, "device_budget_bytes": plan.device_budget_bytes,
        "host_budget_bytes": plan.host_budget_bytes, "notes": list(plan.notes), "graphs": graphs,
        "residency": [_decision_row(r) for r in plan.residency],
        "tiers": [{"tier": str(t), "count": counts[t], "n_bytes": tiers[t]} for t in Tier if counts[t]],
    }


def _decision_row(decision: Decision) -> list[str]:
    """Kind, value and what is decided, in words."""
    if isinstance(decision, Bucket):
        first, *others = decision.values
        return ["bucket", first, "in one copy with " + ", ".join(others)]
    fields = asdict(decision)
    value = fields.pop("value")
    if isinstance(decision, Reside):
        return ["reside", value, str(decision.tier), str(decision.n_bytes)]
    if isinstance(decision, Recompute):
        return ["recompute", value, "computed again in backward"]
    words = ", ".join(f"{key} {item}" for key, item in fields.items())
    return [type(decision).__name__.lower(), value, words]


def _view_data(view: View) -> dict[str, object]:
    indices = sample(view.totals, N_POINTS, [view.peak_index, *([view.border] if view.border is not None else [])])
    live = largest_live(view.live, indices, N_TOOLTIP)
    peak = largest_live(view.live, [view.peak_index], N_LARGEST)[view.peak_index]
    names = _Names()
    simulation = view.simulation
    return {
        "label": view.label,
        "n_nodes": len(view.live.nodes),
        "fixed_bytes": simulation.fixed_bytes,
        "peak_bytes": simulation.device_peak_bytes,
        "peak": view.peak_index,
        "peak_node": simulation.names[view.peak_index],
        "border": view.border,
        "step_s": view.timeline.end_s,
        "stalled_s": view.timeline.stalled_s,
        "moved_bytes": simulation.moved_bytes,
        "memory_nodes": dict(sorted(memory_nodes(view.graph).items())),
        "points": [
            [i, view.timeline.issued_s[i], *simulation.curve[i], names.of(simulation.names[i]),
             [[names.of(s.name), s.n_bytes] for s in live[i]]]
            for i in indices
        ],
        "lanes": [_lane(view, channel) for channel in (Channel.COMPUTE, Channel.H2D, Channel.D2H)],
        "largest": [[s.name, str(s.kind.value), s.n_bytes, module_path(view.live.nodes[view.live.first[s]])] for s in peak],
        "names": names.known,
    }


def _lane(view: View, channel: Channel) -> dict[str, object]:
    spans = tuple(span for span in view.timeline.spans if span.channel is channel)
    bars = [[longest.name, longest.end_s - longest.start_s, start, end] for longest, start, end in merged(spans, view.timeline.end_s, N_BARS)]
    return {"channel": str(channel), "busy_s": view.timeline.busy_s(channel), "count": len(spans), "bars": bars}


def sample(totals: Sequence[int], n_max: int, always: Sequence[int] = ()) -> list[int]:
    """At most about `n_max` indices that keep every group's lowest and highest point, so that no peak is lost; `always` are among
    them. All indices when there are few."""
    if len(totals) <= n_max:
        return list(range(len(totals)))
    size = -(-2 * len(totals) // n_max)
    chosen = {0, len(totals) - 1, *always}
    for start in range(0, len(totals), size):
        group = range(start, min(start + size, len(totals)))
        chosen |= {max(group, key=totals.__getitem__), min(group, key=totals.__getitem__)}
    return sorted(chosen)


def merged(spans: tuple[Span, ...], end_s: float, n_max: int) -> list[tuple[Span, float, float]]:
    """At most about `n_max` (longest span, start, end) groups of one channel's spans, for drawing; what is closer than a
    `n_max`th of the step becomes one group unless the step has few spans anyway."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    gap = end_s / n_max if len(ordered) > n_max else -1.0
    groups: list[tuple[Span, float, float]] = []
    for span in ordered:
        if groups and span.end_s - groups[-1][1] <= gap:
            longest, start, end = groups[-1]
            longer = span if span.end_s - span.start_s > longest.end_s - longest.start_s else longest
            groups[-1] = (longer, start, max(end, span.end_s))
        else:
            groups.append((span, span.start_s, span.end_s))
    return groups


class _Names:
    """Each name once; the page refers to it by number."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._index: dict[str, int] = {}

    def of(self, name: str) -> int:
        if name not in self._index:
            self._index[name] = len(self.known)
            self.known.append(name)
        return self._index[name]
