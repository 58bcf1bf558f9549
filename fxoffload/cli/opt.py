"""`fxoffload opt`: passes on a graph in text, text out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from fxoffload.errors import PlanError
from fxoffload.sizes import parse_bytes

if TYPE_CHECKING:
    import torch.fx as fx

    from fxoffload.plans import GraphPlan


def run(
    graph: Annotated[Path, typer.Argument(metavar="IN.ir", help="A graph as text.")],
    passes: Annotated[str, typer.Option("-p", "--passes", help='"pass,pass{option=1,other=2}".')],
    plan: Annotated[Optional[Path], typer.Option(help="The plan that the rewrites apply.")] = None,
    device_budget: Annotated[Optional[str], typer.Option(help="Bytes that planner passes may use, for example 24GiB.")] = None,
    out: Annotated[Optional[Path], typer.Option("-o", "--out", help="Write the graph here instead of printing it.")] = None,
    dump_dir: Annotated[Optional[Path], typer.Option(help="Write the graph after every pass, with diffs and a table.")] = None,
) -> int:
    """Run passes over a graph in text and print the result. The graph is verified before and after every pass."""
    import torch

    from fxoffload import text
    from fxoffload.pipeline import Context, parse_pipeline

    if not graph.is_file():
        raise ValueError(f"{graph}: no such graph")
    pipeline = parse_pipeline(passes)
    content = graph.read_text(encoding="utf-8")
    device = torch.device("cpu", 0)  # stands for the compute device, which differs from the host's "cpu"
    parsed, bounds = text.parse(content, device), text.parse_bounds(content)
    context = Context(
        bounds, plan=None if plan is None else _decisions_for(parsed, plan), device=device,
        device_budget_bytes=None if device_budget is None else parse_bytes(device_budget, "--device-budget"),
    )
    rendered = text.render(pipeline.run(parsed, context, dump_dir), bounds)
    if out is None:
        print(rendered.rstrip("\n"))
    else:
        out.write_text(rendered.rstrip("\n") + "\n", encoding="utf-8")
    return 0


def _decisions_for(graph: fx.Graph, path: Path) -> GraphPlan:
    """The part of the plan in `path` that was made for `graph`, wherever its inputs lie. Raises PlanError if there is none."""
    from fxoffload import text
    from fxoffload.effects import Tier
    from fxoffload.graph import copy_graph, set_info
    from fxoffload.plans import Plan

    plan, everything_on_device = Plan.load(path), copy_graph(graph)
    for node in everything_on_device.find_nodes(op="placeholder"):
        set_info(node, tier=Tier.DEVICE)
    for fingerprint in (text.fingerprint(everything_on_device), text.fingerprint(graph)):
        if fingerprint in plan.graphs:
            return plan.graphs[fingerprint]
    known = ", ".join(sorted(plan.graphs)) or "none"
    raise PlanError(f"{path}: has no decisions for this graph, whose fingerprint is {fingerprint}; it has {known}")
