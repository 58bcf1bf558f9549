"""plan-chunks: in how many chunks of rows each cross-entropy is computed.

As few, in powers of two, as keep a chunk's log-probabilities within option `limit_bytes`; a loss within it is left alone, and so is one
that cannot be computed apart (`fxoffload.losses`), and one with a value that the caller has pinned: in chunks there is no such value.
"""

from __future__ import annotations

import torch.fx as fx

from fxoffload.graph import name_of
from fxoffload.losses import Loss, find_losses
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Chunk, Decision


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """One Chunk decision per loss, in graph order. Raises ValueError for a limit below 1."""
    limit = int(ctx.options["limit_bytes"])
    if limit < 1:
        raise ValueError(f"plan-chunks: limit_bytes must be positive, got {limit}")
    found = [_decision(one, ctx, limit) for one in find_losses(graph) if isinstance(one, Loss) and not _is_pinned(one, ctx)]
    return tuple(decision for decision in found if decision.chunks > 1)


def _is_pinned(loss: Loss, ctx: Context) -> bool:
    pinned = ctx.kept_values | ctx.swapped_values | ctx.recomputed_values
    return any(name_of(node) in pinned for node in loss.nodes)


def _decision(loss: Loss, ctx: Context, limit: int) -> Chunk:
    rows, classes, hidden = loss.shape(ctx.bounds)
    chunks = 1
    while loss.logits_bytes(ctx.bounds) > limit * chunks and chunks < rows:
        chunks *= 2
    # So that a block of the head's gradient is no larger than a chunk: a sum and its next are both there for one block only.
    blocks = min(classes, -(-hidden * chunks // max(rows, 1))) if loss.weight_gradients else 1
    return Chunk(name_of(loss.nll), chunks, max(blocks, 1))


# A chunk of this size is far beyond where kernels get their full rate, and far below what else is alive in a step of this kind.
PASS = Pass("plan-chunks", run, requires=frozenset({"functional"}), options={"limit_bytes": 256 << 20})
