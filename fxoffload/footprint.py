"""What a device's allocator reserves for live bytes: the difference between what a graph needs and what a budget must hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .machine import Machine

# A caching allocator whose segments grow in place leaves free bytes between blocks and in pages that are not full. At its limit it gives
# back whole pages and still holds some that no block can use: a step of 8B width whose logits are a peak that stands alone ran with
# 1 byte in 256 more than is live, one that is near the limit all along not with 1 in 38 (torch 2.11, bench/allocator_pages.py).
_HOLES_PER = 32
_OPEN_PAGES_BYTES = (20 << 20) + (2 << 20)
_SCRATCH_HOLES_PER = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """`overhead_bytes`: what libraries keep. `caches`: whether the allocator keeps blocks for reuse; if not, bytes are exact.

    `by_offsets`: values lie at planned offsets of one arena, and `scratch_bytes` are left to the allocator while a step runs,
    `between_steps_bytes` while none does. What lies idle between values is known of a whole plan only, and in none of these bytes.
    `recording_bytes`: what a step takes beside them when it is replayed from a recording (`replays.py`), whose scratch is in a pool of its
    own; None when it is called op by op.
    """

    overhead_bytes: int = 0
    caches: bool = False
    by_offsets: bool = False
    scratch_bytes: int = 0
    between_steps_bytes: int = 0
    recording_bytes: int | None = None

    @staticmethod
    def of(machine: Machine) -> Footprint:
        """The footprint of the allocator on `machine`."""
        return Footprint(machine.overhead_bytes, True) if machine.device_type == "cuda" else Footprint()

    @staticmethod
    def planned(machine: Machine) -> Footprint:
        """The footprint where fxoffload runs the whole step: by offsets, where an allocator would cache."""
        footprint = Footprint.of(machine)
        return replace(footprint, by_offsets=footprint.caches)

    def needed_bytes(self, live_bytes: int) -> int:
        """What the allocator must be allowed to reserve for so many live bytes."""
        if self.by_offsets:
            return live_bytes + self.beside_bytes(self.scratch_bytes) + (self.recording_bytes or 0)
        return live_bytes + (-(-live_bytes // _HOLES_PER) if self.caches else 0)

    def live_bytes(self, reserved_bytes: int) -> int:
        """The most live bytes that need no more than `reserved_bytes`."""
        if self.by_offsets:
            return max(reserved_bytes - self.needed_bytes(0), 0)
        return reserved_bytes * _HOLES_PER // (_HOLES_PER + 1) if self.caches else reserved_bytes

    def taken_bytes(self, live_bytes: int, limit_bytes: int | None) -> int:
        """The most that it reserves for so many live bytes under a limit, where values lie as it puts them."""
        if not self.caches:
            return live_bytes
        taken = live_bytes + -(-live_bytes // _HOLES_PER) + _OPEN_PAGES_BYTES
        return taken if limit_bytes is None else min(taken, limit_bytes)

    def beside_bytes(self, scratch_bytes: int) -> int:
        """What the allocator reserves for a step's scratch, and for what is done between steps."""
        if self.recording_bytes is None:
            return self.scratch_needed_bytes(max(scratch_bytes, self.between_steps_bytes))
        return self.scratch_needed_bytes(scratch_bytes) + self.scratch_needed_bytes(self.between_steps_bytes)

    def scratch_needed_bytes(self, scratch_bytes: int) -> int:
        """What the allocator reserves for so many bytes of scratch."""
        return scratch_bytes + -(-scratch_bytes // _SCRATCH_HOLES_PER) + _OPEN_PAGES_BYTES if self.caches else scratch_bytes
