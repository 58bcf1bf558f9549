"""`fxoffload inspect`: what is in a plan or a dump folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from rich.table import Table

_FXO_NODE = re.compile(r"(?:^|= |\| )fxo\.([a-z_]+)", re.MULTILINE)


def run(
    source: Annotated[Path, typer.Argument(metavar="PLAN_OR_DUMP_DIR", help="A plan file or the dump_dir of a compile.")],
    html: Annotated[Optional[Path], typer.Option(help="Write the memory timeline as a page.")] = None,
    trace: Annotated[Optional[Path], typer.Option(help="Write the simulated step for Perfetto; needs a dump folder.")] = None,
) -> int:
    """Explain a plan, or list what a dump folder's passes did."""
    from fxoffload.plans import Plan

    if not source.exists():
        raise ValueError(f"{source}: no such plan or dump folder")
    if source.is_dir():
        _print_folder(source)
    else:
        print(Plan.load(source).explain())
    if html is not None:
        from fxoffload.report import html as page

        page.write(source, html)
    if trace is not None:
        from fxoffload.report import trace as perfetto

        perfetto.write(source, trace)
    return 0


def count_memory_nodes(text: str) -> Counter[str]:
    """How often each memory node (gather, wait, release, ...) occurs in a rendered graph."""
    from fxoffload import ops

    known = {spec.name for spec in ops.SPECS.values()}
    return Counter(word for word in _FXO_NODE.findall(text) if word in known)


def _print_folder(folder: Path) -> None:
    from rich.console import Console

    from fxoffload.plans import Plan
    from fxoffload.report.views import PLAN_FILE

    table = _dump_table(folder)
    if (folder / PLAN_FILE).is_file():
        plan = Plan.load(folder / PLAN_FILE)
        print(f"plan {plan.id}\n{plan.explain()}\n")
    for path in sorted(folder.rglob("table.txt")):  # one per pipeline run: nodes, peak, seconds after each pass
        print(f"{path.parent.relative_to(folder)}\n{path.read_text(encoding='utf-8').rstrip()}\n")
    Console().print(table)


def _dump_table(folder: Path) -> Table:
    from rich.table import Table

    dumps = sorted(folder.rglob("*.ir"))
    if not dumps:
        raise ValueError(f"{folder}: holds no graph dumps (*.ir); it should be the dump_dir of a compile")
    contents = {path: path.read_text(encoding="utf-8") for path in dumps}
    counts = {path: count_memory_nodes(content) for path, content in contents.items()}
    ops = sorted({op for count in counts.values() for op in count})
    table = Table("dump", "lines", *ops)
    for path in dumps:
        n_lines = len(contents[path].splitlines())
        table.add_row(str(path.relative_to(folder)), str(n_lines), *(str(counts[path][op]) for op in ops))
    return table
