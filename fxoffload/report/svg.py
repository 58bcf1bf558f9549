"""The memory timeline as a static picture, for a README: the same numbers as the page, no script, both colour schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from ..sizes import format_bytes
from .html import sample
from .views import View, report_of

if TYPE_CHECKING:
    from .views import Source

WIDTH, HEIGHT = 960, 340
LEFT, RIGHT, TOP, BOTTOM = 84, 18, 66, 34
N_POINTS = 400
_LAYERS = ("fixed", "parameters", "activations", "gradients", "batch and buffers")
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#5c616b}.t{font-size:15px;font-weight:600;fill:#16181d}
.bg{fill:#fff}.grid{stroke:#e4e2db}.b{stroke:#d03b3b;stroke-width:1.6;stroke-dasharray:6 4}.ink{stroke:#16181d}
.c0{fill:#c9c6bc}.c1{fill:#2a78d6}.c2{fill:#1baf7a}.c3{fill:#eda100}.c4{fill:#8c7fc4}
@media (prefers-color-scheme:dark){text{fill:#a8adb8}.t{fill:#eceef2}.bg{fill:#1c1e22}.grid{stroke:#2f3238}.b{stroke:#f06464}
.ink{stroke:#eceef2}.c0{fill:#55565a}.c1{fill:#4a92ea}.c2{fill:#22a878}.c3{fill:#d69314}.c4{fill:#9385cf}}
"""


def svg(source: Source, label: str | None = None) -> str:
    """The timeline of the graph called `label` (default: the first) of a Session or a dump folder, as SVG text.

    Raises ValueError when the source has no such graph.
    """
    report = report_of(source)
    found = [view for view in report.views if label in (None, view.label)]
    if not found:
        raise ValueError(f"svg: there is no graph {label!r}" if label else "svg: a plan alone holds no graph")
    budget = report.plan.device_budget_bytes if report.plan is not None else None
    view = found[0]
    parts = "".join(_parts(view, budget, f"{report.title}: device memory over one step"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f"<style>{_STYLE}</style>{parts}</svg>\n"
    )


def _parts(view: View, budget: int | None, title: str) -> Iterator[str]:
    peak = view.simulation.device_peak_bytes
    shown = budget if budget is not None and budget <= 3 * peak else None
    top = max(peak, shown or 0) * 1.06 or 1.0
    x_scale = (WIDTH - LEFT - RIGHT) / max(1, len(view.live.nodes))
    y_scale = (HEIGHT - TOP - BOTTOM) / top
    indices = sample(view.totals, N_POINTS, [view.peak_index])
    layers = _layers(view, indices)

    def x(index: float) -> float:
        return LEFT + index * x_scale

    def y(n_bytes: float) -> float:
        return HEIGHT - BOTTOM - n_bytes * y_scale

    yield f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}" rx="12"/><text class="t" x="20" y="28">{escape(title)}</text>'
    for level in _levels(top):
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}"/>'
        yield f'<text x="{LEFT - 9}" y="{y(level) + 4:.1f}" text-anchor="end">{format_bytes(level)}</text>'
    edges = [x(i) for i in (*indices, len(view.live.nodes))]
    base = [0] * len(indices)
    for number, values in enumerate(layers):
        above = [a + b for a, b in zip(base, values)]
        if any(values):
            yield f'<path class="c{number}" d="{_area(edges, [y(b) for b in above], [y(b) for b in base])}"/>'
        base = above
    yield from _marks(view, x, y, shown)
    yield from _legend([name for name, values in zip(_LAYERS, layers) if any(values)], shown, peak)


def _marks(view: View, x: Callable[[float], float], y: Callable[[float], float], budget: int | None) -> Iterator[str]:
    if budget is not None:
        yield f'<line class="b" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(budget):.1f}" y2="{y(budget):.1f}"/>'
    at, peak = x(view.peak_index), y(view.simulation.device_peak_bytes)
    yield f'<circle class="bg ink" cx="{at:.1f}" cy="{peak:.1f}" r="4" stroke-width="2"/>'
    if view.border is not None:
        border = x(view.border)
        yield f'<line class="ink" x1="{border:.1f}" x2="{border:.1f}" y1="{TOP - 8}" y2="{HEIGHT - BOTTOM}" stroke-dasharray="1 3"/>'
        yield f'<text x="{border - 8:.1f}" y="{HEIGHT - 12}" text-anchor="end">forward</text><text x="{border + 8:.1f}" y="{HEIGHT - 12}">backward</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 12}">node 0</text><text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{len(view.live.nodes)}</text>'


def _legend(names: Sequence[str], budget: int | None, peak: int) -> Iterator[str]:
    left = 20.0
    for name in names:
        yield f'<rect class="c{_LAYERS.index(name)}" x="{left:.0f}" y="40" width="10" height="10" rx="3"/><text x="{left + 16:.0f}" y="50">{name}</text>'
        left += 36 + 7 * len(name)
    if budget is not None:
        yield f'<line class="b" x1="{left:.0f}" x2="{left + 18:.0f}" y1="46" y2="46"/><text x="{left + 25:.0f}" y="50">budget {format_bytes(budget)}</text>'
        left += 60 + 7 * len(f"budget {format_bytes(budget)}")
    yield f'<circle class="bg ink" cx="{left:.0f}" cy="46" r="4" stroke-width="2"/><text x="{left + 11:.0f}" y="50">peak {format_bytes(peak)}</text>'


def _layers(view: View, indices: Sequence[int]) -> list[list[int]]:
    """Bytes of every layer at the indices, bottom layer first."""
    rows = [view.simulation.curve[i] for i in indices]
    return [[view.simulation.fixed_bytes] * len(rows), *([row[k] for row in rows] for k in range(4))]


def _area(edges: Sequence[float], above: Sequence[float], below: Sequence[float]) -> str:
    """Steps along `above` and back along `below`; value i holds from edge i to edge i + 1."""
    forth = "".join(f"V{top:.1f}H{right:.1f}" for top, right in zip(above, edges[1:]))
    back = "".join(f"V{bottom:.1f}H{left:.1f}" for bottom, left in reversed(list(zip(below, edges))))
    return f"M{edges[0]:.1f} {below[0]:.1f}{forth}{back}Z"


def _levels(top: float) -> list[int]:
    """About five powers-of-two multiples from 0 to `top`."""
    step = 1
    while step * 6 < top:
        step *= 2
    return list(range(0, int(top) + 1, step))
