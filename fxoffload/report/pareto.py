"""A sweep as one self-contained page: step seconds against device budget as a picture, and every point as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from ..sizes import format_bytes
from ..sweeps import Row

WIDTH, PANEL_HEIGHT, COLUMNS = 960, 300, 2
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 62, 44
# Where what does not fit is marked: above all seconds, a line for each machine.
_MARK_STEP = 11
_COLOURS = ("#2a78d6", "#1baf7a", "#eda100", "#c2417c", "#8c7fc4", "#d0653b", "#3aa7a0", "#6b7280")
_DASHES = ("", "7 4", "2 3")


def write(rows: Sequence[Row], path: str | Path, title: str) -> None:
    """Writes the page to `path`; it loads nothing from anywhere."""
    template = resources.files(__package__).joinpath("pareto.html").read_text(encoding="utf-8")
    words = {"TITLE": escape(title), "PICTURE": svg(rows), "ROWS": "".join(map(_table_row, rows))}
    for name, word in words.items():
        template = template.replace(f"<!--{name}-->", word)
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(template, encoding="utf-8")
    partial.replace(target)


def svg(rows: Sequence[Row]) -> str:
    """The picture: a panel per (batch, sequence), a line per machine; a cross above stands where it does not fit."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    shapes = list(dict.fromkeys((row.batch, row.sequence) for row in rows))
    n_columns = min(COLUMNS, len(shapes))
    width, height = WIDTH // n_columns, PANEL_HEIGHT + _MARK_STEP * len(machines)
    total = 30 + height * -(-len(shapes) // n_columns)
    parts = list(_legend(machines))
    for i, shape in enumerate(shapes):
        mine = tuple(row for row in rows if (row.batch, row.sequence) == shape)
        panel = "".join(_Panel(width, height, tuple(machines), mine, _budget_range(rows)).parts())
        parts.append(f'<g transform="translate({i % n_columns * width},{30 + i // n_columns * height})">{panel}</g>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img"'
    return f'{head} aria-label="Step seconds against device budget">{"".join(parts)}</svg>'


def _budget_range(rows: Sequence[Row]) -> tuple[float, float]:
    """log2 of the smallest and the largest budget, apart also where there is one."""
    logs = [math.log2(row.device_budget_bytes) for row in rows]
    return min(logs) - 0.2, max(logs) + 0.2


def _legend(machines: Sequence[str]) -> Iterator[str]:
    left = 20.0
    for number, name in enumerate(machines):
        yield f'<line x1="{left:.0f}" x2="{left + 22:.0f}" y1="16" y2="16" {_stroke(number)}/>'
        yield f'<text x="{left + 28:.0f}" y="20">{escape(name)}</text>'
        left += 52 + 7.5 * len(name)


def _stroke(number: int) -> str:
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return f'stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2" fill="none"' + (f' stroke-dasharray="{dash}"' if dash else "")


@dataclass(frozen=True)
class _Panel:
    width: int
    height: int
    machines: tuple[str, ...]
    rows: tuple[Row, ...]
    budgets: tuple[float, float]

    @property
    def top(self) -> float:
        return TOP + _MARK_STEP * len(self.machines)

    @property
    def top_s(self) -> float:
        """Seconds at the upper edge."""
        return max((row.step_s or 0.0 for row in self.rows), default=0.0) * 1.08 or 1.0

    def x(self, budget_bytes: int) -> float:
        lowest, highest = self.budgets
        return LEFT + (math.log2(budget_bytes) - lowest) / (highest - lowest) * (self.width - LEFT - RIGHT)

    def y(self, seconds: float) -> float:
        return self.height - BOTTOM - seconds / self.top_s * (self.height - BOTTOM - self.top)

    def parts(self) -> Iterator[str]:
        """Grid, marks and lines."""
        one = self.rows[0]
        yield f'<text class="t" x="{LEFT}" y="24">batch {one.batch} x sequence {one.sequence}</text>'
        yield from self._grid()
        for number, machine in enumerate(self.machines):
            mine = [row for row in self.rows if row.machine == machine]
            yield from self._line(number, sorted(mine, key=lambda row: row.device_budget_bytes))

    def _grid(self) -> Iterator[str]:
        for seconds in _levels(self.top_s):
            at = f"{self.y(seconds):.1f}"
            yield f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{at}" y2="{at}"/>'
            yield f'<text x="{LEFT - 8}" y="{self.y(seconds) + 4:.1f}" text-anchor="end">{seconds:g} s</text>'
        if any(not row.fits for row in self.rows):
            yield f'<text x="{LEFT}" y="{TOP - 16}">\u00d7 does not fit</text>'
        last = -math.inf
        for budget in sorted({row.device_budget_bytes for row in self.rows}):
            if self.x(budget) - last >= 62:  # a label is about so wide
                last = self.x(budget)
                yield f'<text x="{last:.1f}" y="{self.height - 22}" text-anchor="middle">{format_bytes(budget).replace(".00", "")}</text>'
        yield f'<text x="{self.width - RIGHT}" y="{self.height - 4}" text-anchor="end">device budget</text>'

    def _line(self, number: int, rows: Sequence[Row]) -> Iterator[str]:
        fits = [row for row in rows if row.fits and row.step_s is not None]
        if len(fits) > 1:
            points = " ".join(f"{self.x(row.device_budget_bytes):.1f},{self.y(row.step_s or 0.0):.1f}" for row in fits)
            yield f'<polyline points="{points}" {_stroke(number)}/>'
        for row in rows:
            x, told = self.x(row.device_budget_bytes), f"<title>{escape(_words(row))}</title>"
            if row in fits:
                fill = _COLOURS[number % len(_COLOURS)]
                yield f'<circle cx="{x:.1f}" cy="{self.y(row.step_s or 0.0):.1f}" r="4" fill="{fill}">{told}</circle>'
            else:
                y = TOP + _MARK_STEP * number
                yield f'<path d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8" {_stroke(number)}>{told}</path>'


def _levels(top: float) -> list[float]:
    """About five round steps from 0 to `top`."""
    raw = top / 5
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 5, 10) if m * base >= raw)
    return [round(i * step, 12) for i in range(int(top / step) + 1)]


def _words(row: Row) -> str:
    at = f"{row.machine}, {format_bytes(row.device_budget_bytes)}: "
    return at + (f"{row.step_s:.4f} s" if row.fits and row.step_s is not None else row.reason)


def _table_row(row: Row) -> str:
    cells = [row.machine, str(row.batch), str(row.sequence), format_bytes(row.device_budget_bytes), *numbers(row)]
    kind = "" if row.fits else ' class="no"'
    reason = "" if row.fits else f'<tr class="why"><td colspan="{len(cells)}">{escape(row.reason)}</td></tr>'
    return f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + f"</tr>{reason}\n"


def numbers(row: Row) -> list[str]:
    """Device peak, host peak, step and tokens per second of a row in words; of one that does not fit what it lacks."""
    if not row.fits:
        return ["does not fit" if row.shortfall_bytes is None else f"{format_bytes(row.shortfall_bytes)} short", "", "", ""]
    step = "?" if row.step_s is None else f"{row.step_s:.4f} s"
    rate = "?" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}"
    return [format_bytes(row.device_peak_bytes), format_bytes(row.host_peak_bytes), step, rate]
