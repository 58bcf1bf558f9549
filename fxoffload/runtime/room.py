"""What a step needs on the device, and what may lie there beside it: one arena is there for all steps, and so are recordings of others."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ..graph import Bounds, border_of, operands, output_of, tensors_in
from ..memory_map import MemoryMap

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Room:
    """`arena_bytes`: of the arena; `beside_bytes`: of all else that is there with it, until what the step returns has been read;
    `budget_bytes`: of the device."""

    arena_bytes: int
    beside_bytes: int
    budget_bytes: int

    @staticmethod
    def of(lowered: fx.Graph, bounds: Bounds, peak_bytes: int, budget_bytes: int) -> Room:
        """The room of a lowered graph. `peak_bytes`: what is predicted for it, the arena included."""
        arena_bytes = MemoryMap.of(lowered, bounds).arena_bytes
        reading_bytes = _reading_bytes(lowered, bounds) if border_of(lowered) is None else 0
        return Room(arena_bytes, peak_bytes - arena_bytes + reading_bytes, budget_bytes)

    @property
    def most_arena_bytes(self) -> int:
        """The largest arena that the step leaves room for, never less than it needs itself."""
        return max(self.arena_bytes, self.budget_bytes - self.beside_bytes)

    def has(self, held_bytes: int) -> bool:
        """Whether the step may run while an arena and recordings of so many bytes are there."""
        return self.beside_bytes + held_bytes <= self.budget_bytes


def _reading_bytes(lowered: fx.Graph, bounds: Bounds) -> int:
    """What metrics make of what a forward returns, before another step: it in fp32, and its log-probabilities (as
    `reorder` counts them for logits)."""
    values = [v for node in operands(output_of(lowered)) if node.op != "placeholder" for v in tensors_in(node.meta.get("val"))]
    read = [v for v in values if v.dtype.is_floating_point and v.device.type != "cpu"]
    return sum(2 * _FP32_BYTES * (bounds.bytes_of(v) // v.element_size()) for v in read)
