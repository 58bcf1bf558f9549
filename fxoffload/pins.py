"""Pins: what the caller has decided, as constraints on every plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .errors import PlanError

PARAMETER_PLACES = ("device", "host", "pinned", "pageable", "disk")
_HOST_TIERS = ("pinned", "pageable", "disk")
VALUE_PLACES = ("keep", "swap", "checkpoint")


@dataclass(frozen=True, slots=True)
class Pin:
    """`pattern` (shell style) over parameter names or canonical value names, and where or how what it matches is to live."""

    pattern: str
    place: str

    def matches(self, name: str) -> bool:
        """Whether `name` is meant. "/" of a canonical value name also reads as ".": "*.mlp.*" takes all that is inside an mlp module."""
        return fnmatchcase(name, self.pattern) or fnmatchcase(name.replace("/", "."), self.pattern)


def pin(pattern: str, place: str) -> Pin:
    """A constraint for `compile(pins=...)` and `plan(pins=...)`.

    For parameters `place` is "device", "host" (any host tier), "pinned", "pageable" or "disk"; for activations "keep" (stay on the
    device), "swap" (leave for the host until backward) or "checkpoint" (recompute in backward). Raises ValueError for another place.
    """
    if place not in PARAMETER_PLACES + VALUE_PLACES:
        raise ValueError(f"pin {pattern!r}: place must be one of {', '.join(PARAMETER_PLACES + VALUE_PLACES)}; got {place!r}")
    return Pin(pattern, place)


def pinned_names(pins: Iterable[Pin], names: Iterable[str], places: tuple[str, ...]) -> dict[str, str]:
    """Name -> place for every name a pin on one of `places` matches; a named host tier goes before "host". Raises PlanError naming
    both when two pins disagree on a name."""
    found: dict[str, Pin] = {}
    wanted = [p for p in pins if p.place in places]
    for name in names:
        for one in wanted:
            if one.matches(name):
                found[name] = _narrower(found.get(name, one), one, name)
    return {name: one.place for name, one in found.items()}


def _narrower(a: Pin, b: Pin, name: str) -> Pin:
    """The pin that says more. Raises PlanError when both cannot be kept."""
    if a.place == b.place or (b.place == "host" and a.place in _HOST_TIERS):
        return a
    if a.place == "host" and b.place in _HOST_TIERS:
        return b
    raise PlanError(f"pins disagree on {name}: pin {a.pattern!r} says {a.place}, pin {b.pattern!r} says {b.place}")


def idle_pins(pins: Iterable[Pin], names: Iterable[str], places: tuple[str, ...]) -> list[Pin]:
    """Pins on one of `places` that match none of the names."""
    known = list(names)
    return [p for p in pins if p.place in places and not any(map(p.matches, known))]
