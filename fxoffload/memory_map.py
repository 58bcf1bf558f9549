"""What a lowered graph takes on the device where its values lie at planned offsets of one arena.

Beside the arena there are the inputs, what the graph returns (it outlives the step), and scratch: what ops that make their results
themselves hold until those are copied to their offsets, workspaces, and values too small to be placed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
import torch.fx as fx

from . import ops
from .effects import Tier
from .footprint import Footprint
from .fusion import fused
from .graph import Bounds, border_of, info, operands, output_of, tensors_in
from .liveness import Liveness, Storage, base_nodes, liveness, no_workspace, owner_of
from .offsets import ALIGNMENT, Lifetime, aligned
from .out_variants import out_variant
from .pages import Place
from .replays import anew_bytes

# In a Llama's step what an attention's backward makes lives for 61 nodes at most, what a layer saves for its own backward for 96 at least.
SOON_NODES = 64
# Ops that copy their first argument: the copy goes where it is to lie.
COPIES = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """Bytes on the device by where they lie. What is there at once is never more than their sum.

    `anew_bytes`: of the inputs, those that come anew in every step.
    """

    inputs_bytes: int
    returned_bytes: int
    arena_bytes: int
    scratch_bytes: int
    anew_bytes: int = 0

    @staticmethod
    def of(graph: fx.Graph, bounds: Bounds, workspace: Callable[[fx.Node], int] = no_workspace, live: Liveness | None = None) -> MemoryMap:
        """The map of a lowered graph; before it went through assign-offsets its arena has no bytes. `live`: its Liveness, where it is
        known."""
        live = live or liveness(graph, bounds)
        found = placeable(live)
        with_offset = {s for s, node in found.items() if info(node).offset is not None}
        placed = with_offset or set(found)
        ends = [offset + aligned(n_bytes) for s in with_offset for offset, n_bytes in place_of(found[s], s)]
        on_device = [s for s in live.first if s.tier is Tier.DEVICE]
        return MemoryMap(
            sum(aligned(s.n_bytes) for s in on_device if s.is_input),
            sum(aligned(s.n_bytes) for s in on_device if s in live.escapes and not s.is_input),
            max(ends, default=0), scratch_bytes(live, placed, workspace), anew_bytes(graph, bounds))

    def taken_bytes(self, footprint: Footprint, outside_bytes: int) -> int:
        """What the allocator reserves, `outside_bytes` that are no value of the graph among it."""
        beside = footprint.beside_bytes(self.scratch_bytes)
        if footprint.recording_bytes is not None:
            beside += footprint.overhead_bytes + self.anew_bytes + max(self.returned_bytes - footprint.handed_out_bytes, 0)
        return outside_bytes + self.inputs_bytes + self.returned_bytes + self.arena_bytes + beside


def reading_bytes(graph: fx.Graph, bounds: Bounds) -> int:
    """What metrics make of what a graph returns, before another step: it in fp32, and its log-probabilities. Of a graph with a backward, whose
    outputs are detached, nothing."""
    if border_of(graph) is not None:
        return 0
    values = [v for node in operands(output_of(graph)) if node.op != "placeholder" for v in tensors_in(node.meta.get("val"))]
    return sum(2 * _FP32_BYTES * (bounds.bytes_of(v) // v.element_size()) for v in values if v.dtype.is_floating_point)


def place_of(node: fx.Node, storage: Storage) -> Place:
    """Where in the arena the Storage lies that a node with an offset names."""
    entry = info(node)
    assert entry.offset is not None
    return entry.pages or ((entry.offset, storage.n_bytes),)


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
    return ops.spec_of(node) is None and node.target not in COPIES and node.target is not fused and out_variant(node.target) is None


def scratch_bytes(live: Liveness, placed: Collection[Storage], workspace: Callable[[fx.Node], int]) -> int:
    """The most bytes at once that are neither in the arena nor inputs nor returned."""
    return int(_scratch(live, placed, workspace).max(initial=0))


def worth_moving(live: Liveness, found: Collection[Storage], workspace: Callable[[fx.Node], int]) -> set[Storage]:
    """Those of the `found` Storages that are to have a place: all but results that an op makes itself, that are soon read for the last
    time, and that, left where they are until then, need no more scratch than if all were moved. What stayed for long would leave holes
    that the largest scratch cannot use."""
    scratch = _scratch(live, found, workspace)
    most = scratch.max(initial=0)
    stay: set[Storage] = set()
    for storage in found:
        one = lifetime(live, storage)
        if makes_its_results(live.nodes[one.begin]) and one.end - one.begin <= SOON_NODES:
            after = scratch[one.begin + 1 : one.end]
            n_bytes = aligned(storage.n_bytes)
            if after.max(initial=0) + n_bytes <= most:
                after += n_bytes
                stay.add(storage)
    return set(found) - stay


def _scratch(live: Liveness, placed: Collection[Storage], workspace: Callable[[fx.Node], int]) -> np.ndarray:
    """Bytes at each node that are neither in the arena nor inputs nor returned."""
    deltas = np.zeros(len(live.nodes) + 1, dtype=np.int64)
    for storage, first in live.first.items():
        if storage.tier is not Tier.DEVICE or storage.is_input or storage in live.escapes:
            continue
        if storage not in placed:
            end = lifetime(live, storage).end
        elif makes_its_results(live.nodes[first]):
            end = first + 1
        else:
            continue
        deltas[first] += aligned(storage.n_bytes)
        deltas[end] -= aligned(storage.n_bytes)
    return deltas[:-1].cumsum() + np.array([workspace(node) for node in live.nodes], dtype=np.int64)
