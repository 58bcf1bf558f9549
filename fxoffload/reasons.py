"""Why a plan is what it is: what its search tried, what its seconds are made of, and what one more of anything would give.

Data beside the decisions, which no rewrite reads: a plan without it replays the same. `explain` puts it into words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

VERSION = 1
# What a critical path calls the seconds that the host takes to issue ops one by one.
ISSUE = "issue"


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate of the search. `recipe`: what it computes again, in words; `resident_bytes`: parameters that stay on the device.

    `step_s`: estimated seconds, None where it does not fit; then `shortfall_bytes` are missing, on the device, or on the host where it
    `lacks_host`. `peak_bytes`: live device bytes, None
    for a recipe that was not scanned, because what it takes at least, which `step_s` then is, is longer than the best plan.
    """

    recipe: str
    resident_bytes: int
    step_s: float | None
    peak_bytes: int | None
    shortfall_bytes: int = 0
    lacks_host: bool = False


@dataclass(frozen=True, slots=True)
class Gain:
    """What one more `of` (in words) makes of the predicted seconds of a step."""

    of: str
    step_s: float


@dataclass(frozen=True, slots=True)
class Reasons:
    """One lowered graph, accounted for.

    `busy_s`: seconds that each channel works. `critical_s`: seconds per channel on the path that ends the step; "issue" is the host's
    issuing of ops. `stalled_s`: compute waiting for copies, the longest time, `longest_stall_s`, at `stall_node`. `limit_s`: the terms
    of the physical limit (`account.limits`). `optimizer_s`: of a step after backward, None where unknown. `largest`: values alive at
    the peak.
    """

    busy_s: Mapping[str, float]
    critical_s: Mapping[str, float]
    stalled_s: float
    stall_node: str
    longest_stall_s: float
    limit_s: Mapping[str, float | None]
    optimizer_s: float | None
    largest: tuple[tuple[str, int], ...]
    tried: tuple[Tried, ...]

    @property
    def physical_limit_s(self) -> float:
        """The longest of the limit's terms that are known."""
        return max((seconds for seconds in self.limit_s.values() if seconds is not None), default=0.0)

    def to_dict(self) -> dict[str, object]:
        """JSON values, with the version of their form."""
        return {"version": VERSION, **asdict(self)}


def reasons_from(raw: object) -> Reasons | None:
    """Reasons from parsed JSON; None where there are none, or those of another version. Raises KeyError or TypeError for damage."""
    if not isinstance(raw, dict) or raw.get("version") != VERSION:
        return None
    fields = {name: value for name, value in raw.items() if name != "version"}
    largest = tuple((str(name), int(n_bytes)) for name, n_bytes in fields.pop("largest"))
    return Reasons(**fields | {"largest": largest, "tried": tuple(Tried(**one) for one in fields["tried"])})
