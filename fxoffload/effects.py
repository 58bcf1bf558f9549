"""The words of the memory machine: tiers, channels and the effects an op may have on a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(str, Enum):
    """Where bytes live."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"
    DISK = "disk"

    @property
    def on_host(self) -> bool:
        """True for the tiers outside the device."""
        return self is not Tier.DEVICE

    def __str__(self) -> str:
        return self.value


class Channel(str, Enum):
    """An engine that runs its work in order, beside the others."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    NET = "net"
    DISK = "disk"
    HOST = "host"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Effect:
    """Something an op does to `value`: an argument name of its schema, or "result"."""

    value: str


class Read(Effect):
    """The op reads the bytes while it runs; they must be ready."""


class Borrow(Effect):
    """A Transfer reads the bytes until the wait on this op's result; they must not be freed before."""


class Await(Effect):
    """The op makes a pending value ready and ends what its Transfer borrows."""


class Free(Effect):
    """The bytes are gone after the op; nothing may read or borrow them."""


@dataclass(frozen=True, slots=True)
class Alloc(Effect):
    """The op makes a new Storage for `value` in `tier` (an argument's name when the tier is an argument).

    `pending`: the bytes are not there until a wait on the value.
    """

    tier: Tier | str = Tier.DEVICE
    pending: bool = False
