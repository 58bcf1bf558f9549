"""`fxoffload inspect`: what is in a plan or a dump folder."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from rich.table import Table

_MEMORY_NODE = re.compile(r"\bfxo\.([a-z_]+)")


def run(
    source: Annotated[Path, typer.Argument(metavar="PLAN_OR_DUMP_DIR", help="A plan file or the dump_dir of a compile.")],
    html: Annotated[Optional[Path], typer.Option(help="Write the memory timeline as a page.")] = None,
) -> int:
    """Explain a plan, or list what a dump folder's passes did."""
    from rich.console import Console

    from fxoffload.plans import Plan

    if not source.exists():
        raise ValueError(f"{source}: no such plan or dump folder")
    if source.is_dir():
        _print_pass_tables(source)
        Console().print(_dump_table(source))
    else:
        print(Plan.load(source).explain())
    if html is not None:
        from fxoffload.report import html as page

        page.write(source if source.is_dir() else Plan.load(source), html)
    return 0


def count_memory_nodes(text: str) -> Counter[str]:
    """How often each memory node (gather, wait, release, ...) occurs in a rendered graph."""
    return Counter(_MEMORY_NODE.findall(text))


def _print_pass_tables(folder: Path) -> None:
    for path in sorted(folder.rglob("table.txt")):  # one per pipeline run: nodes, peak, seconds after each pass
        print(f"{path.parent.relative_to(folder)}\n{path.read_text(encoding='utf-8').rstrip()}\n")


def _dump_table(folder: Path) -> Table:
    from rich.table import Table

    dumps = sorted(folder.rglob("*.ir"))
    if not dumps:
        raise ValueError(f"{folder}: holds no graph dumps (*.ir); it should be the dump_dir of a compile")
    counts = {path: count_memory_nodes(path.read_text(encoding="utf-8")) for path in dumps}
    ops = sorted({op for count in counts.values() for op in count})
    table = Table("dump", "lines", *ops)
    for path in dumps:
        n_lines = len(path.read_text(encoding="utf-8").splitlines())
        table.add_row(str(path.relative_to(folder)), str(n_lines), *(str(counts[path][op]) for op in ops))
    return table
