"""plan-chunks: in how many chunks of rows each cross-entropy, and what else is read of a product's rows, is computed.

As few, in powers of two, as keep a chunk's log-probabilities (of what is read, its largest value) within option `limit_bytes`; what is
within it is left alone, and so is what cannot be computed apart (`fxoffload.losses`, `readings`), and what has a value that the caller has
pinned: in chunks there is no such value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from fxoffload.graph import name_of
from fxoffload.losses import Loss, find_losses
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Chunk, Decision
from fxoffload.readings import Reading, find_readings


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """One Chunk decision per loss, then one per reading, in graph order. Raises ValueError for a limit below 1."""
    limit = int(ctx.options["limit_bytes"])
    if limit < 1:
        raise ValueError(f"plan-chunks: limit_bytes must be positive, got {limit}")
    found = [_decision(one, ctx, limit) for one in find_losses(graph) if isinstance(one, Loss) and not _is_pinned(one.nodes, ctx)]
    found += [_of_reading(one, ctx, limit) for one in find_readings(graph) if not _is_pinned(one.nodes, ctx)]
    return tuple(decision for decision in found if decision.chunks > 1)


def _is_pinned(nodes: Sequence[fx.Node], ctx: Context) -> bool:
    pinned = ctx.kept_values | ctx.swapped_values | ctx.recomputed_values
    return any(name_of(node) in pinned for node in nodes)


def _decision(loss: Loss, ctx: Context, limit: int) -> Chunk:
    rows, classes, hidden = loss.shape(ctx.bounds)
    chunks = _n_chunks(loss.logits_bytes(ctx.bounds), rows, limit)
    # So that a block of the head's gradient is no larger than a chunk: a sum and its next are both there for one block only.
    blocks = min(classes, -(-hidden * chunks // max(rows, 1))) if loss.weight_gradients else 1
    return Chunk(name_of(loss.nll), chunks, max(blocks, 1))


def _of_reading(reading: Reading, ctx: Context, limit: int) -> Chunk:
    rows, _ = reading.shape(ctx.bounds)
    return Chunk(name_of(reading.product), _n_chunks(reading.widest_bytes(ctx.bounds), rows, limit), 1)


def _n_chunks(n_bytes: int, rows: int, limit: int) -> int:
    chunks = 1
    while n_bytes > limit * chunks and chunks < rows:
        chunks *= 2
    return chunks


# A chunk of this size is far beyond where kernels get their full rate, and far below what else is alive in a step of this kind.
PASS = Pass("plan-chunks", run, requires=frozenset({"functional"}), options={"limit_bytes": 256 << 20})
