"""What a step needs on the device, and what may lie there beside it: one arena is there for all steps, and so are recordings of others."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ..graph import Bounds
from ..memory_map import MemoryMap, reading_bytes


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
        return Room(arena_bytes, peak_bytes - arena_bytes + reading_bytes(lowered, bounds), budget_bytes)

    @property
    def most_arena_bytes(self) -> int:
        """The largest arena that the step leaves room for, never less than it needs itself."""
        return max(self.arena_bytes, self.budget_bytes - self.beside_bytes)

    def has(self, held_bytes: int) -> bool:
        """Whether the step may run while an arena and recordings of so many bytes are there."""
        return self.beside_bytes + held_bytes <= self.budget_bytes
