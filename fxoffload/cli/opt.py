"""`fxoffload opt`: passes on a graph in text, text out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from fxoffload.errors import PlanError

if TYPE_CHECKING:
    import torch.fx as fx

    from fxoffload.plans import GraphPlan


def run(
    graph: Annotated[Path, typer.Argument(metavar="IN.ir", help="A graph as text.")],
    passes: Annotated[str, typer.Option("-p", "--passes", help='"pass,pass{option=1,other=2}".')],
    plan: Annotated[Optional[Path], typer.Option(help="The plan that the rewrites apply.")] = None,
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="Write the graph here instead of printing it.")] = None,
    dump_dir: Annotated[Optional[Path], typer.Option(help="Write the graph after every pass, with diffs and a table.")] = None,
) -> int:
    """Run passes over a graph in text and print the result."""
    from fxoffload import text
    from fxoffload.pipeline import Context, parse_pipeline

    if not graph.is_file():
        raise ValueError(f"{graph}: no such graph")
    pipeline = parse_pipeline(passes)
    content = graph.read_text(encoding="utf-8")
    parsed, bounds = text.parse(content), text.parse_bounds(content)
    context = Context(bounds, plan=None if plan is None else _decisions_for(parsed, plan))
    rendered = text.render(pipeline.run(parsed, context, dump_dir), bounds)
    if out is None:
        print(rendered)
    else:
        out.write_text(rendered.rstrip("\n") + "\n", encoding="utf-8")
    return 0


def _decisions_for(graph: fx.Graph, path: Path) -> GraphPlan:
    """The part of the plan in `path` that was made for `graph`. Raises PlanError if there is none."""
    from fxoffload import text
    from fxoffload.plans import Plan

    plan, fingerprint = Plan.load(path), text.fingerprint(graph)
    if fingerprint not in plan.graphs:
        known = ", ".join(sorted(plan.graphs)) or "none"
        raise PlanError(f"{path}: has no decisions for this graph, whose fingerprint is {fingerprint}; it has {known}")
    return plan.graphs[fingerprint]
