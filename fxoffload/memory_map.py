"""What a lowered graph takes on the device where its values lie at planned offsets of one arena.

Beside the arena there are the inputs, what the graph returns (it outlives the step), and scratch: what ops that make their results
themselves hold until those are copied to their offsets, workspaces, and values too small to be placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.fx as fx

from . import ops
from .effects import Tier
from .footprint import Footprint
from .graph import Bounds, info
from .liveness import Liveness, Storage, base_nodes, liveness, no_workspace, owner_of
from .offsets import ALIGNMENT, Lifetime, aligned
from .out_variants import out_variant

# Ops that copy their first argument: the copy goes where it is to lie.
COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Bytes on the device by where they lie. What is there at once is never more than their sum."""

    inputs_bytes: int
    returned_bytes: int
    arena_bytes: int
    scratch_bytes: int

    @staticmethod
    def of(graph: fx.Graph, bounds: Bounds, workspace: Callable[[fx.Node], int] = no_workspace) -> MemoryMap:
        """The map of a lowered graph; before it went through assign-offsets its arena has no bytes."""
        live = liveness(graph, bounds)
        placed = placeable(live)
        ends = [offset + aligned(s.n_bytes) for s, node in placed.items() if (offset := info(node).offset) is not None]
        on_device = [s for s in live.first if s.tier is Tier.DEVICE]
        return MemoryMap(
            sum(aligned(s.n_bytes) for s in on_device if s.is_input),
            sum(aligned(s.n_bytes) for s in on_device if s in live.escapes and not s.is_input),
            max(ends, default=0), scratch_bytes(live, placed, workspace))

    def taken_bytes(self, footprint: Footprint, outside_bytes: int) -> int:
        """What the allocator reserves, `outside_bytes` that are no value of the graph among it."""
        scratch = footprint.scratch_needed_bytes(self.scratch_bytes)
        return outside_bytes + self.inputs_bytes + self.returned_bytes + self.arena_bytes + scratch


def placeable(live: Liveness) -> dict[Storage, fx.Node]:
    """The Storages that an arena can hold, and the node that names each: made on the device, not returned, and no scalars.

    A list inside a tuple has no place, nor has what is viewed at an offset that counts from the beginning of its memory.
    """
    from_start = {s for node in live.nodes if node.target is torch.ops.aten.as_strided.default for s in live.of.get(node, ())}
    return {
        s: node for s, node in base_nodes(live).items()
        if s.tier is Tier.DEVICE and not s.is_input and s not in live.escapes and s.n_bytes >= ALIGNMENT
        and live.index[owner_of(node)] == live.first[s] and s not in from_start
    }


def lifetime(live: Liveness, storage: Storage) -> Lifetime:
    """When a Storage's bytes are there: from its producer to its release, or to its last use where nothing releases it."""
    last = live.last[storage]
    end = last if live.nodes[last].target is ops.release else last + 1
    return Lifetime(live.first[storage], end, storage.n_bytes)


def makes_its_results(node: fx.Node) -> bool:
    """True for an op that cannot write where its results are to lie: it makes them elsewhere, and they are copied."""
    return ops.spec_of(node) is None and node.target not in COPIES and out_variant(node.target) is None


def scratch_bytes(live: Liveness, placed: Mapping[Storage, object], workspace: Callable[[fx.Node], int]) -> int:
    """The most bytes at once that are neither in the arena nor inputs nor returned."""
    n = len(live.nodes)
    deltas = [0] * (n + 1)

    def count(begin: int, end: int, n_bytes: int) -> None:
        deltas[begin] += n_bytes
        deltas[end] -= n_bytes

    for storage, first in live.first.items():
        if storage.tier is not Tier.DEVICE or storage.is_input:
            continue
        elsewhere = storage in live.escapes
        if storage in placed or elsewhere:
            if not elsewhere and makes_its_results(live.nodes[first]):
                count(first, first + 1, aligned(storage.n_bytes))
        else:
            one = lifetime(live, storage)
            count(one.begin, one.end, aligned(storage.n_bytes))
    for i, node in enumerate(live.nodes):
        count(i, i + 1, workspace(node))
    return max(accumulate(deltas[:n]), default=0)
