"""Candidates near a good one: what stays is exchanged gap by gap, what resides parameter by parameter, as long as the step gets faster.

A hill is climbed by the evaluator of the search itself. Each try keeps a value in a gap that it had left, one that compute waited for
more often than others, lets others leave where memory is short then, and fills what is free but for a share left to copies under way.
Choices are drawn, the same ones every time: a climb depends on its start and its budget alone.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from .candidates import Candidate, free_names, gaps_of, packed_as, room_of
from .gaps import Gap
from .liveness import Storage
from .overlap import stalls_s
from .problem import Problem
from .spill import Bytes

# Shares of the memory left to copies under way: what a try draws from.
_SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8)
# How much a copy that nobody waits for counts beside one that compute waits for as long as it takes.
_HIDDEN = 0.05
# One try in so many changes what resides.
_RESIDENTS_PER = 3


def climbed(problem: Problem, start: Candidate, budget_bytes: int, n_tries: int) -> Candidate:
    """The fastest candidate met in so many tries from `start` under the device budget; `start` where none is faster, or where copies do
    not overlap with compute: there packing by worth is what there is (up to 8 % behind the optimum on the steps drawn so far)."""
    if not start.found.has_loads or not problem.machine.overlaps:
        return start
    climb = _Climb(problem, start, budget_bytes)
    for _ in range(n_tries):
        climb.attempt()
    return min(start, climb.now, key=lambda one: one.step_s)


@dataclass
class _Climb:
    """`now`: the fastest candidate so far, which stays in the gaps `kept`."""

    problem: Problem
    now: Candidate
    budget_bytes: int

    def __post_init__(self) -> None:
        self.dice = random.Random(0)
        self.free = free_names(self.problem)
        self._stand(self.now, None)

    def _stand(self, candidate: Candidate, kept: frozenset[Gap] | None) -> None:
        """The climb goes on from `candidate`."""
        self.now = candidate
        self.gaps = gaps_of(self.problem, candidate.recomputation, candidate.resident)
        self.kept = kept if kept is not None else frozenset(_stayed(candidate, self.gaps.every))
        self.stalls = stalls_s(candidate.schedule, candidate.found, candidate.recomputation.rates_with(candidate.resident))

    def attempt(self) -> None:
        """One try; where it is faster, or as fast, it is what the next one starts from."""
        resident = self.now.resident
        if self.free and self.dice.randrange(_RESIDENTS_PER) == 0:
            resident = self._other_residents()
        room = room_of(self.problem, self.now.recomputation, resident, self.budget_bytes)
        gaps = gaps_of(self.problem, self.now.recomputation, resident)
        kept = self._exchanged(gaps.every, room - gaps.needed, resident)
        if kept is None:
            return
        for found in packed_as(self.problem, self.now.recomputation, resident, self.budget_bytes, kept):
            if found.step_s <= self.now.step_s:
                self._stand(found, kept)

    def _other_residents(self) -> frozenset[str]:
        """With one parameter more that compute waits for, with one less, or both."""
        resident, drawn = set(self.now.resident), self.dice.randrange(3)
        may_go = sorted(resident & self.free - self.problem.pinned_to_device)
        may_come = [s for s in self.stalls if s.name in self.free and s.name not in resident]
        if may_come and drawn != 0:
            (come,) = self.dice.choices(may_come, [self.stalls[s] for s in may_come])
            resident.add(come.name)
        if may_go and drawn != 1:
            resident.remove(self.dice.choice(may_go))
        return frozenset(resident)

    def _exchanged(self, every: Sequence[Gap], room: Bytes, resident: frozenset[str]) -> frozenset[Gap] | None:
        """Other gaps to stay in, within `room`; None where nothing can be exchanged."""
        kept = {gap: None for gap in every if gap.must_stay or gap in self.kept}
        for gap in kept:
            room[gap.after + 1 : gap.before] -= gap.storage.n_bytes
        left = [gap for gap in every if gap not in kept and not gap.must_leave]
        chosen: Gap | None = None
        if left and resident == self.now.resident:
            (chosen,) = self.dice.choices(left, [self._counts(gap.storage) for gap in left])
            kept[chosen] = None
            room[chosen.after + 1 : chosen.before] -= chosen.storage.n_bytes
        gone = self._made_room(kept, room, chosen)
        if gone is None:
            return None
        spare = room - int(self.dice.choice(_SHARES) * int(room.max() + sum(gap.storage.n_bytes for gap in kept)))
        for gap in sorted((gap for gap in (*left, *gone) if gap not in kept), key=self._order):
            during = slice(gap.after + 1, gap.before)
            if gap not in gone and int(spare[during].min()) >= gap.storage.n_bytes:
                spare[during] -= gap.storage.n_bytes
                kept[gap] = None
        return frozenset(kept)

    def _made_room(self, kept: dict[Gap, None], room: Bytes, chosen: Gap | None) -> set[Gap] | None:
        """Gaps that are left because memory is short, drawn where it is shortest; None where none can be."""
        gone: set[Gap] = set()
        while int(room.min()) < 0:
            worst = int(np.argmin(room))
            others = [g for g in kept if g.after < worst < g.before and g is not chosen and not g.must_stay]
            if not others:
                return None
            (goes,) = self.dice.choices(others, [1 / self._worth(g) for g in others])
            del kept[goes]
            gone.add(goes)
            room[goes.after + 1 : goes.before] += goes.storage.n_bytes
        return gone

    def _order(self, gap: Gap) -> tuple[float, int, str]:
        return (-self._worth(gap) * self.dice.uniform(0.5, 1.0), gap.after, gap.storage.name)

    def _worth(self, gap: Gap) -> float:
        return self._counts(gap.storage) / (max(gap.storage.n_bytes, 1) * (gap.before - gap.after) ** 0.5)

    def _counts(self, storage: Storage) -> float:
        return self.stalls.get(storage, 0.0) + _HIDDEN * self.now.recomputation.rates.load_s(storage) + 1e-12


def _stayed(candidate: Candidate, every: Collection[Gap]) -> list[Gap]:
    """The gaps in which the candidate's values stay."""
    stays: dict[Storage, list[tuple[int, int]]] = {}
    for stay in candidate.single.stays:
        stays.setdefault(stay.storage, []).append((stay.first, stay.last))
    return [gap for gap in every if any(first <= gap.after and gap.before <= last for first, last in stays.get(gap.storage, ()))]
