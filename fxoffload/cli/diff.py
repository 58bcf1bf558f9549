"""`fxoffload diff`: what two plans, or two rendered graphs, do differently."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer


def run(
    a: Annotated[Path, typer.Argument(help="A plan, or a graph as text (.ir).")],
    b: Annotated[Path, typer.Argument(help="The other of the same kind.")],
) -> int:
    """Show what differs between two plans or two graphs."""
    from fxoffload.plans import Plan

    for path in (a, b):
        if not path.is_file():
            raise ValueError(f"{path}: no such plan or graph")
    if (a.suffix == ".ir") != (b.suffix == ".ir"):
        raise ValueError(f"{a} and {b}: one is a graph (.ir) and the other a plan; give two of the same kind")
    text = _diff_text(a, b) if a.suffix == ".ir" else Plan.load(a).diff(Plan.load(b))
    print(text or "equal")
    return 0


def _diff_text(a: Path, b: Path) -> str:
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in (a, b))
    return "\n".join(difflib.unified_diff(before, after, str(a), str(b), lineterm=""))
