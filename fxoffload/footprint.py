"""What a device's allocator reserves for live bytes: the difference between what a graph needs and what a budget must hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .machine import Machine

# Whole pages, and what is small in a part of its own, take more than is live: 1 byte in 1700 or less in plans of 8B in bf16, 1 in 176 or
# less in all but one of 8B in 4 bits, whose memory is full all along. Where they take more than this leaves, the next plan has less.
_PAGES_PER = 128
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
    `page_bytes`: of the pages that an arena is made of, which can be mapped at several addresses; 0 where it has one address: only there
    does much lie idle.
    `recording_bytes`: what a step takes beside them when it is replayed from a recording (`replays.py`), whose scratch is in a pool of its
    own; None when it is called op by op. `handed_out_bytes`: of the gradients that a recording copies for the caller. He adds them to his
    before an optimizer steps, so they and what the optimizer needs between steps are never there at once.
    """

    overhead_bytes: int = 0
    caches: bool = False
    by_offsets: bool = False
    scratch_bytes: int = 0
    between_steps_bytes: int = 0
    recording_bytes: int | None = None
    handed_out_bytes: int = 0
    page_bytes: int = 0

    @staticmethod
    def of(machine: Machine) -> Footprint:
        """The footprint of the allocator on `machine`."""
        return Footprint(machine.overhead_bytes, True) if machine.device_type == "cuda" else Footprint()

    @staticmethod
    def planned(machine: Machine) -> Footprint:
        """The footprint where fxoffload runs the whole step: by offsets, where an allocator would cache."""
        footprint = Footprint.of(machine)
        return replace(footprint, by_offsets=footprint.caches, page_bytes=machine.page_bytes or 0)

    def needed_bytes(self, live_bytes: int) -> int:
        """What the allocator must be allowed to reserve for so many live bytes."""
        if self.by_offsets:
            live_bytes += -(-live_bytes // _PAGES_PER) if self.page_bytes else 0
            return live_bytes + self.beside_bytes(self.scratch_bytes) + (self.recording_bytes or 0)
        return live_bytes + (-(-live_bytes // _HOLES_PER) if self.caches else 0)

    def live_bytes(self, reserved_bytes: int) -> int:
        """The most live bytes that need no more than `reserved_bytes`."""
        if self.by_offsets:
            left = max(reserved_bytes - self.needed_bytes(0), 0)
            return left * _PAGES_PER // (_PAGES_PER + 1) if self.page_bytes else left
        return reserved_bytes * _HOLES_PER // (_HOLES_PER + 1) if self.caches else reserved_bytes

    def taken_bytes(self, live_bytes: int, limit_bytes: int | None) -> int:
        """The most that it reserves for so many live bytes under a limit, where values lie as it puts them."""
        if not self.caches:
            return live_bytes
        taken = live_bytes + -(-live_bytes // _HOLES_PER) + _OPEN_PAGES_BYTES
        return taken if limit_bytes is None else min(taken, limit_bytes)

    def beside_bytes(self, scratch_bytes: int) -> int:
        """What the allocator reserves for a step's scratch, and for what is done after it."""
        if self.recording_bytes is None:
            return self.scratch_needed_bytes(max(scratch_bytes, self.between_steps_bytes))
        return self.scratch_needed_bytes(scratch_bytes) + self.scratch_needed_bytes(max(self.between_steps_bytes, self.handed_out_bytes))

    def scratch_needed_bytes(self, scratch_bytes: int) -> int:
        """What the allocator reserves for so many bytes of scratch."""
        return scratch_bytes + -(-scratch_bytes // _SCRATCH_HOLES_PER) + _OPEN_PAGES_BYTES if self.caches else scratch_bytes
