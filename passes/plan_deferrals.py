"""plan-deferrals: which outputs the graph does not make, but returns the rows they are made of.

Those beyond option `limit_bytes` that are rows of a product with the head (`fxoffload.heads`), unless the caller has pinned a value that
would be no more.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.graph import name_of
from fxoffload.heads import Head, find_heads
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Decision, Defer


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """One Defer decision per such output, in order. Raises ValueError for a limit below 1."""
    limit = int(ctx.options["limit_bytes"])
    if limit < 1:
        raise ValueError(f"plan-deferrals: limit_bytes must be positive, got {limit}")
    heads = [head for head in find_heads(graph) if head.n_bytes(ctx.bounds) > limit and not _is_pinned(head, ctx)]
    return tuple(Defer(name) for name in dict.fromkeys(name_of(head.output) for head in heads))


def _is_pinned(head: Head, ctx: Context) -> bool:
    pinned = ctx.kept_values | ctx.swapped_values | ctx.recomputed_values
    return any(name_of(node) in pinned for node in (head.product, *head.chain, head.output))


# As of plan-chunks.
PASS = Pass("plan-deferrals", run, requires=frozenset({"functional"}), options={"limit_bytes": 256 << 20})
