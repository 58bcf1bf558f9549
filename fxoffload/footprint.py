"""What a device's allocator reserves for live bytes: the difference between what a graph needs and what a budget must hold."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine

# The last page of the pool of large blocks and of that of small ones.
_OPEN_PAGES_BYTES = (20 << 20) + (2 << 20)


@dataclass(frozen=True, slots=True)
class Footprint:
    """`overhead_bytes`: what libraries keep. One byte in `holes_per` more than is live lies in holes between blocks; 0: none does."""

    overhead_bytes: int = 0
    holes_per: int = 0

    @staticmethod
    def of(machine: Machine) -> Footprint:
        """A caching allocator's with segments that grow in place; exact bytes where nothing caches.

        Steps of 8B width at 5 to 24 GiB left 0.8 to 1.6 % in holes and part-filled pages (torch 2.11); 1 in 40 covers it, and each of
        the two pools ends in a page that is not full.
        """
        if machine.device_type != "cuda":
            return Footprint()
        return Footprint(machine.overhead_bytes + _OPEN_PAGES_BYTES, 40)

    def reserved_bytes(self, live_bytes: int) -> int:
        """What the allocator may reserve for so many live bytes, the overhead apart."""
        return live_bytes + (-(-live_bytes // self.holes_per) if self.holes_per else 0)

    def live_bytes(self, reserved_bytes: int) -> int:
        """The most live bytes for which no more than `reserved_bytes` are reserved."""
        return reserved_bytes * self.holes_per // (self.holes_per + 1) if self.holes_per else reserved_bytes
