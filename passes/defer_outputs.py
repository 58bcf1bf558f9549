"""defer-outputs: the outputs of Defer decisions are not made; the graph returns the rows that they can be made of later."""

from __future__ import annotations

import torch.fx as fx

from fxoffload.errors import PlanError
from fxoffload.graph import erase_unread, name_of, output_of, returned
from fxoffload.heads import Head, find_heads
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Defer


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with rows in the place of every output of a Defer decision. Raises PlanError for one that is no rows of a product."""
    names = [d.value for d in (ctx.plan.decisions if ctx.plan is not None else ()) if isinstance(d, Defer)]
    heads = [head for head in find_heads(graph) if name_of(head.output) in names] if names else []
    missing = [name for name in names if name not in {name_of(head.output) for head in heads}]
    if missing:
        raise PlanError(f"the plan returns the rows of {missing[0]}, which is no output that can be made of rows")
    _return_rows(graph, heads)
    for head in heads:
        erase_unread(graph, head.output)
    return graph


def _return_rows(graph: fx.Graph, heads: list[Head]) -> None:
    outputs, gradients = returned(graph)
    rows = {head.position: head.rows for head in heads}
    output_of(graph).args = ((tuple(rows.get(i, value) for i, value in enumerate(outputs)), gradients),)


PASS = Pass("defer-outputs", run, requires=frozenset({"functional"}), breaks=frozenset({"released", "fits", "placed"}))
