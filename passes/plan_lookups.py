"""plan-lookups: which embeddings read the rows they need of a table on the host where it lies, instead of a copy of all of it.

Every one whose table is a parameter that the device can reach there and that is larger than what is read of it (`fxoffload.lookups`).
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.graph import name_of
from fxoffload.lookups import reads_rows_of_host
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Decision, Lookup


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """One Lookup decision per such embedding, in graph order."""
    return tuple(Lookup(name_of(node)) for node in graph.nodes if reads_rows_of_host(node, ctx.bounds, ctx.machine))


PASS = Pass("plan-lookups", run, requires=frozenset({"functional"}))
