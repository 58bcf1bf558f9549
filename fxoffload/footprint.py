"""What a device's allocator reserves for live bytes: the difference between what a graph needs and what a budget must hold."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine

# A caching allocator whose segments grow in place leaves free bytes between blocks and in pages that are not full. At its limit it gives
# back whole pages and still holds some that no block can use: steps of 8B width at 5, 12 and 24 GiB ran with 1 byte in 80 more than is
# live, where the logits are a peak that stands alone; with logits in chunks, near the limit all along, 1 in 38 was not enough (torch 2.11).
_NEEDED_PER = _TAKEN_PER = 32
_OPEN_PAGES_BYTES = (20 << 20) + (2 << 20)


@dataclass(frozen=True, slots=True)
class Footprint:
    """`overhead_bytes`: what libraries keep. `caches`: whether the allocator keeps blocks for reuse; if not, bytes are exact."""

    overhead_bytes: int = 0
    caches: bool = False

    @staticmethod
    def of(machine: Machine) -> Footprint:
        """The footprint of the allocator on `machine`."""
        return Footprint(machine.overhead_bytes, True) if machine.device_type == "cuda" else Footprint()

    def needed_bytes(self, live_bytes: int) -> int:
        """What the allocator must be allowed to reserve for so many live bytes."""
        return live_bytes + (-(-live_bytes // _NEEDED_PER) if self.caches else 0)

    def live_bytes(self, reserved_bytes: int) -> int:
        """The most live bytes that need no more than `reserved_bytes`."""
        return reserved_bytes * _NEEDED_PER // (_NEEDED_PER + 1) if self.caches else reserved_bytes

    def taken_bytes(self, live_bytes: int, limit_bytes: int | None) -> int:
        """The most that it reserves for so many live bytes under a limit."""
        if not self.caches:
            return live_bytes
        taken = live_bytes + -(-live_bytes // _TAKEN_PER) + _OPEN_PAGES_BYTES
        return taken if limit_bytes is None else min(taken, limit_bytes)
