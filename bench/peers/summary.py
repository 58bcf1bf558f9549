"""What `run.py` wrote, as tables and one picture for a README.

    python bench/peers/summary.py FILE ... [--table peers.md] [--picture peers.svg]

Of a row that is in several files the last file's counts. The picture: step seconds by cap, a panel per workload; a cross says that a peer
did not run there.
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
_HEAD = ("peer", "cap", "step s (fastest to slowest)", "share of the limit", "tokens/s", "reserved GiB", "allocated GiB", "host RSS GiB", "pinned GiB", "loss first, last",
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
    """With what the group was measured, how far the first losses lie apart, and what no step can go below."""
    ran = [row for row in group if "error" not in row]
    if not ran:
        return "No peer ran."
    versions = {name: version for row in ran for name, version in row["versions"].items()}
    apart = max(row["loss_first"] for row in ran) - min(row["loss_first"] for row in ran)
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return f"{', '.join(sorted({row['device'] for row in ran}))}; {told}. First losses lie {apart:.2g} apart.{''.join(map(_limit, _limited(ran)))}"


def _limited(ran: Sequence[Row]) -> list[Row]:
    """A row for each cap whose physical limit is known."""
    return list({row["cap_bytes"]: row for row in ran if "physical_limit_s" in row}.values())


def _limit(row: Row) -> str:
    terms = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["limit_s"].items() if seconds)
    return f" Physical limit ({row['limit_machine']}, cap {cap(row)}): {row['physical_limit_s']:.3f} s ({terms})."


def _line(row: Row) -> str:
    if "error" in row:
        return _cells([row["peer"], cap(row), f"did not run: {row['error'][:_WORDS]}", *[""] * (len(_HEAD) - 3)])
    timed = row["step_s_all"][row["warm"] :]
    return _cells([
        _name(row), cap(row), f"**{row['step_s']:.3f}** ({min(timed):.3f} to {max(timed):.3f})",
        f"{row['limit_share']:.0%}" if "limit_share" in row else "", f"{row['tokens_per_s']:,.0f}",
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

_WIDTH, _NAMES, _RIGHT, _TOP, _LINE = 960, 236, 12, 62, 22
# Beside a bar stands its number.
_NUMBER = 62
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#5c616b}.t{font-size:15px;font-weight:600;fill:#16181d}
.bg{fill:#fff}.grid{stroke:#e4e2db}.ours{fill:#2a78d6}.peer{fill:#c9c6bc}
@media (prefers-color-scheme:dark){text{fill:#a8adb8}.t{fill:#eceef2}.bg{fill:#1c1e22}.grid{stroke:#2f3238}.ours{fill:#4a92ea}.peer{fill:#55565a}}
"""


@dataclass(frozen=True)
class _Panel:
    """One workload: a line for each who ran it, a column for each cap, in it bars as long as their seconds."""

    rows: Sequence[Row]

    @property
    def caps(self) -> list[int | None]:
        """Ascending, no cap last."""
        return sorted({row["cap_bytes"] for row in self.rows}, key=lambda n: float("inf") if n is None else n)

    @property
    def peers(self) -> list[str]:
        """Ours first, then by their fastest; those that ran nowhere last."""
        best = {peer: min(row.get("step_s", float("inf")) for row in self.rows if row["peer"] == peer) for peer in {r["peer"] for r in self.rows}}
        return sorted(best, key=lambda peer: (not _is_ours(peer), best[peer], peer))

    @property
    def height(self) -> int:
        return _TOP + _LINE * len(self.peers) + 24

    def parts(self) -> Iterator[str]:
        """Title, caps, names and bars."""
        column = (_WIDTH - _NAMES - _RIGHT) / len(self.caps)
        s_per_pixel = (max((row.get("step_s", 0.0) for row in self.rows), default=0.0) or 1.0) / (column - _NUMBER)
        yield f'<text class="t" x="12" y="24">{escape(title(self.rows[0]))}: seconds per step</text>'
        for i, limit in enumerate(self.caps):
            left, words = _NAMES + column * i, "no cap" if limit is None else f"cap {limit / GIB:g} GiB"
            yield f'<text x="{left:.1f}" y="50">{words}</text>'
            yield f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP - 4}" y2="{self.height - 20}"/>'
        for i, peer in enumerate(self.peers):
            yield f'<text x="{_NAMES - 10}" y="{_TOP + _LINE * i + 14}" text-anchor="end">{escape(peer)}</text>'
        for row in self.rows:
            yield _bar(row, _NAMES + column * self.caps.index(row["cap_bytes"]), _TOP + _LINE * self.peers.index(row["peer"]), s_per_pixel)


def _bar(row: Row, left: float, top: float, s_per_pixel: float) -> str:
    """Seconds as a bar and a number; of a peer that did not run a cross, whose tooltip says why."""
    if "error" in row:
        return f'<text x="{left + 6:.1f}" y="{top + 14}">\u00d7<title>{escape(row["error"][:_WORDS])}</title></text>'
    length, kind = row["step_s"] / s_per_pixel, "ours" if _is_ours(row["peer"]) else "peer"
    bar = f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{length:.1f}" height="{_LINE - 5}"/>'
    return f'{bar}<text x="{left + length + 6:.1f}" y="{top + 14}">{row["step_s"]:.3f} s</text>'


def _is_ours(peer: str) -> bool:
    return peer.startswith("fxoffload")


def svg(rows: Sequence[Row]) -> str:
    """The picture, one self-contained text, both colour schemes."""
    total, drawings = 0, ""
    for panel in map(_Panel, groups(rows, "shape", "trained", "batch", "length")):
        drawings += f'<g transform="translate(0,{total})">{"".join(panel.parts())}</g>'
        total += panel.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}" role="img"'
    background = f'<rect class="bg" width="{_WIDTH}" height="{total}"/>'
    return f'{head} aria-label="Step seconds by cap"><style>{_STYLE}</style>{background}{drawings}</svg>\n'


if __name__ == "__main__":
    main()
