"""What `run.py` wrote, as tables and one picture for a README.

    python bench/peers/summary.py FILE ... [--table peers.md] [--picture peers.svg]

Of a row that is in several files the last file's counts. The picture: step seconds against the cap, a panel per workload; a cross says that a
peer did not run there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
GIB = 2**30
_HEAD = ("peer", "cap", "step s (fastest to slowest)", "tokens/s", "reserved GiB", "allocated GiB", "host RSS GiB", "pinned GiB", "loss first, last",
         "class", "nodes")
# Messages are cut here in a table.
_WORDS = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, help="default: standard output")
    parser.add_argument("--picture", type=Path)
    chosen = parser.parse_args()
    rows = merged([json.loads(file.read_text()) for file in chosen.files])
    text = markdown(rows)
    if chosen.table is None:
        print(text, end="")
    else:
        chosen.table.write_text(text)
    if chosen.picture is not None:
        chosen.picture.write_text(svg(rows))


def merged(reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of all reports, each once, in the order of their first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for report in reports:
        for row in report["rows"]:
            found[row["row"], row["peer"], row["cap_bytes"]] = row
    return list(found.values())


def title(row: Row) -> str:
    return f"{row['shape']} {row['trained']}, {row['batch']} x {row['length']}"


def cap(row: Row) -> str:
    return "none" if row["cap_bytes"] is None else f"{row['cap_bytes'] / GIB:g} GiB"


def groups(rows: Sequence[Row], *keys: str) -> Iterator[list[Row]]:
    """The rows that agree in these keys, together."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from found.values()


def markdown(rows: Sequence[Row]) -> str:
    """A table per row of the benchmark, the fastest first, those that did not run last."""
    parts = []
    for group in groups(rows, "row"):
        ordered = sorted(group, key=lambda row: row.get("step_s", float("inf")))
        lines = [f"### {group[0]['row']}: {title(group[0])}", "", remark(group), "", _cells(_HEAD), _cells(["---"] * len(_HEAD))]
        parts.append("\n".join([*lines, *map(_line, ordered)]))
    return "\n\n".join(parts) + "\n"


def remark(group: Sequence[Row]) -> str:
    """With what the group was measured, and how far the first losses lie apart."""
    ran = [row for row in group if "error" not in row]
    if not ran:
        return "No peer ran."
    versions = {name: version for row in ran for name, version in row["versions"].items()}
    apart = max(row["loss_first"] for row in ran) - min(row["loss_first"] for row in ran)
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"{', '.join(sorted({row['device'] for row in ran}))}; {told}. First losses lie {apart:.2g} apart."


def _line(row: Row) -> str:
    if "error" in row:
        return _cells([row["peer"], cap(row), f"did not run: {row['error'][:_WORDS]}", *[""] * (len(_HEAD) - 3)])
    timed = row["step_s_all"][row["warm"] :]
    return _cells([
        _name(row), cap(row), f"**{row['step_s']:.3f}** ({min(timed):.3f} to {max(timed):.3f})", f"{row['tokens_per_s']:,.0f}",
        *(_gib(row[key]) for key in ("reserved_bytes", "allocated_bytes", "host_rss_peak_bytes", "pinned_bytes")),
        f"{row['loss_first']:.4f}, {row['loss_last']:.4f}", row["precision"][0], str(row["facts"].get("n_nodes", ""))])


def _name(row: Row) -> str:
    layers = row["facts"].get("layers_not_checkpointed")
    return row["peer"] if layers is None else f"{row['peer']} ({layers} layers not checkpointed)"


def _gib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / GIB:.1f}"


def _cells(words: Sequence[str]) -> str:
    return "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


# The picture ----------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 960, 340
_LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND = 66, 18, 62, 44, 300
_OURS, _PEERS = ("#2a78d6", "#1baf7a"), ("#eda100", "#c2417c", "#8c7fc4", "#d0653b", "#3aa7a0", "#6b7280", "#9b7a2f", "#b04bd0")
_SIGNS = ("M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-4-4h8v8h-8z", "M0-5l5 9h-10z")
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#5c616b}.t{font-size:15px;font-weight:600;fill:#16181d}
.bg{fill:#fff}.grid{stroke:#e4e2db}
@media (prefers-color-scheme:dark){text{fill:#a8adb8}.t{fill:#eceef2}.bg{fill:#1c1e22}.grid{stroke:#2f3238}}
"""


@dataclass(frozen=True)
class _Panel:
    """One workload: its caps side by side, the seconds upwards."""

    rows: Sequence[Row]

    @property
    def caps(self) -> list[int | None]:
        """Ascending, no cap last."""
        return sorted({row["cap_bytes"] for row in self.rows}, key=lambda n: float("inf") if n is None else n)

    @property
    def peers(self) -> list[str]:
        """Ours first, then by their fastest; those that ran nowhere last."""
        best = {peer: min(row.get("step_s", float("inf")) for row in self.rows if row["peer"] == peer) for peer in {r["peer"] for r in self.rows}}
        return sorted(best, key=lambda peer: (not peer.startswith("fxoffload"), best[peer], peer))

    @property
    def height(self) -> int:
        return max(_HEIGHT, 60 + 19 * len(self.peers))

    @property
    def top_s(self) -> float:
        return max((row.get("step_s", 0.0) for row in self.rows), default=0.0) * 1.08 or 1.0

    def x(self, row: Row) -> float:
        """Peers of one cap stand beside each other, in the order of the legend."""
        column = (_WIDTH - _LEFT - _RIGHT - _LEGEND) / len(self.caps)
        within = (self.peers.index(row["peer"]) + 1) / (len(self.peers) + 1)
        return _LEFT + column * (self.caps.index(row["cap_bytes"]) + within)

    def y(self, seconds: float) -> float:
        return self.height - _BOTTOM - seconds / self.top_s * (self.height - _BOTTOM - _TOP)

    def look(self, peer: str) -> tuple[str, str]:
        """Colour and sign of a peer."""
        if peer.startswith("fxoffload"):
            return _OURS[peer.endswith("reordered")], _SIGNS[0]
        number = [p for p in self.peers if not p.startswith("fxoffload")].index(peer)
        return _PEERS[number % len(_PEERS)], _SIGNS[1 + number // len(_PEERS) % 2]

    def parts(self) -> Iterator[str]:
        """Title, grid, signs and legend."""
        yield f'<text class="t" x="{_LEFT}" y="24">{escape(title(self.rows[0]))}</text>'
        yield f'<text x="{_LEFT}" y="44">seconds per step; \u00d7 did not run</text>'
        for i in range(6):
            seconds = self.top_s * i / 5
            at = f"{self.y(seconds):.1f}"
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT - _LEGEND}" y1="{at}" y2="{at}"/>'
            yield f'<text x="{_LEFT - 8}" y="{self.y(seconds) + 4:.1f}" text-anchor="end">{seconds:.2g} s</text>'
        column = (_WIDTH - _LEFT - _RIGHT - _LEGEND) / len(self.caps)
        for i, limit in enumerate(self.caps):
            words = "no cap" if limit is None else f"cap {limit / GIB:g} GiB"
            yield f'<text x="{_LEFT + column * (i + 0.5):.1f}" y="{self.height - 18}" text-anchor="middle">{words}</text>'
        for row in self.rows:
            yield self._sign(row)
        for i, peer in enumerate(self.peers):
            colour, sign = self.look(peer)
            left, down = _WIDTH - _LEGEND + 6, 40 + 19 * i
            yield f'<path transform="translate({left},{down})" d="{sign}" fill="{colour}"/><text x="{left + 14}" y="{down + 4}">{escape(peer)}</text>'

    def _sign(self, row: Row) -> str:
        colour, sign = self.look(row["peer"])
        if "error" in row:
            drawn, at, told = f'd="M-4-4l8 8m0-8l-8 8" stroke="{colour}" stroke-width="2" fill="none"', _TOP - 8.0, row["error"][:_WORDS]
        else:
            drawn, at, told = f'd="{sign}" fill="{colour}"', self.y(row["step_s"]), f"{row['step_s']:.4f} s"
        words = escape(f"{row['peer']}, cap {cap(row)}: {told}")
        return f'<path transform="translate({self.x(row):.1f},{at:.1f})" {drawn}><title>{words}</title></path>'


def svg(rows: Sequence[Row]) -> str:
    """The picture, one self-contained text, both colour schemes."""
    panels = [_Panel(group) for group in groups(rows, "shape", "trained", "batch", "length")]
    total, drawings = 0, ""
    for panel in panels:
        drawings += f'<g transform="translate(0,{total})">{"".join(panel.parts())}</g>'
        total += panel.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}" role="img"'
    background = f'<rect class="bg" width="{_WIDTH}" height="{total}"/>'
    return f'{head} aria-label="Step seconds against cap"><style>{_STYLE}</style>{background}{drawings}</svg>\n'


if __name__ == "__main__":
    main()
