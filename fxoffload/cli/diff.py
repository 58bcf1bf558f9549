"""`fxoffload diff`: what two plans, two graphs as text, or two dump folders do differently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    a: Annotated[Path, typer.Argument(help="A plan, a graph as text (.ir) or a dump folder.")],
    b: Annotated[Path, typer.Argument(help="The other of the same kind.")],
) -> int:
    """Show what differs between two plans, two graphs (byte columns aside) or the plans and lowered graphs of two dump folders."""
    for path in (a, b):
        if not path.exists():
            raise ValueError(f"{path}: no such plan or graph")
    if _kind(a) != _kind(b):
        raise ValueError(f"{a} and {b}: one is a {_kind(a)} and the other a {_kind(b)}; give two of the same kind")
    difference = {"plan": _of_plans, "graph": _of_graphs, "dump folder": _of_folders}[_kind(a)](a, b)
    print(difference.rstrip("\n") or "equal")
    return 0


def _kind(path: Path) -> str:
    if path.is_dir():
        return "dump folder"
    return "graph" if path.suffix == ".ir" else "plan"


def _of_plans(a: Path, b: Path) -> str:
    from fxoffload.plans import Plan

    return Plan.load(a).diff(Plan.load(b))


def _of_graphs(a: Path, b: Path) -> str:
    from fxoffload import text

    lines = text.diff(a.read_text(encoding="utf-8"), b.read_text(encoding="utf-8"))
    return f"--- {a}\n+++ {b}\n{lines}" if lines else ""


def _of_folders(a: Path, b: Path) -> str:
    """The plans, then the last graph of every pipeline run, by the run's folder."""
    from fxoffload.report.views import PLAN_FILE, last_dumps

    parts = [_of_plans(a / PLAN_FILE, b / PLAN_FILE)] if all((folder / PLAN_FILE).is_file() for folder in (a, b)) else []
    mine, theirs = ({path.parent.relative_to(folder): path for path in last_dumps(folder)} for folder in (a, b))
    for run_of, others, sign in ((mine, theirs, "-"), (theirs, mine, "+")):
        parts += [f"{sign} graphs of {run}" for run in sorted(run_of.keys() - others.keys())]
    parts += [_of_graphs(mine[run], theirs[run]) for run in sorted(mine.keys() & theirs.keys())]
    return "\n".join(filter(None, parts))
