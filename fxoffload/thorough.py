"""A search that keeps both laws, however large the step: every rung there is, each by itself.

One set of candidates, which the problem alone fixes, is all that any budget chooses from: those of every rung, searched as if it were the
only one. Under a budget each is completed with what else that has room for, up to the rung above its own (`fill.py`), and counts if it takes
no more than the budget then. So what counts under a budget counts under every larger one, and is never slower there: more memory is never
predicted slower. And what is the fastest under a budget, and takes no more than a smaller one, is completed to the same under that one, where
nothing else is faster: the smaller budget's peak is no higher. Of equals that of the largest rung is taken, and of its equals the one found
first, under any budget. A rung is left out only where a bound says that it gives nothing faster (`floor.py`), or nothing as fast where of
equals its own would be taken. Where values lie at offsets that is done of live budgets, and `planner.py` chooses among what they give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .candidates import Candidate, completed, taken_bytes
from .ladder import OfRung, Search, rungs_within, told
from .problem import Problem
from .reasons import Tried
from .recipes import Recipe

# Numbers that rounding alone tells apart are equal.
_ROUNDING = 1e-12
# Rungs are no further apart than numbers of so many significant bits, 1/32 to 1/16.
_BITS = 5


@dataclass(frozen=True, slots=True)
class Alone:
    """What a rung gives by itself: candidates, each to be completed up to the rung `above`, in the order they were found, and what was tried.

    `least`: where nothing fits, the least budget that works for something that was tried.
    """

    rung: int
    above: int
    candidates: tuple[tuple[Recipe, Candidate], ...]
    tried: tuple[Tried, ...]
    short: tuple[tuple[Candidate, int], ...]
    least: int | None


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest candidate of a rung under some budget, and its recipe; `lacks`: bytes that the host lacks at least for others."""

    found: tuple[Recipe, Candidate] | None
    lacks: int


@dataclass
class OneRung(Search):
    """A Search that keeps all that it would have completed."""

    collected: dict[int, tuple[Recipe, Candidate]] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        return max(self._effort.bits, _BITS)

    @property
    def largest_bytes(self) -> int:
        """Of the largest thing that could stay."""
        return max((storage.n_bytes for storage in self._live.first), default=0)

    def alone(self, rung: int) -> Alone:
        """A rung, or a budget, searched for what is the fastest under it, and what is right below the rung above."""
        self.collected = {}
        tried, above = dict[Tried, None](), self.above(rung)
        for budget in (above, rung):
            self.begin()
            self._climb(rung, budget, above)
            tried |= dict.fromkeys(self.tried)
        candidates = tuple(self.collected.values())
        self.rungs.clear()  # a rung is asked for once
        within = [one for one in tried if one.peak_bytes is None or one.peak_bytes <= self.problem.footprint.live_bytes(rung)]
        return Alone(rung, above, candidates, tuple(within), tuple(self.short), None if candidates else self.least_of(rung))

    def _complete(self, recipe: Recipe, found: OfRung, budget: int, above: int) -> None:
        for one in found.settled:
            self.collected.setdefault(id(one), (recipe, one))
        super()._complete(recipe, found, budget, above)


@dataclass
class ThoroughSearch:
    """What `Search` is, of every rung. `rungs`, `whole`: what each gives by itself, and the fastest of it completed up to the rung above."""

    problem: Problem
    trained: frozenset[str]
    best: Candidate | None = None
    short: list[tuple[Candidate, int]] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    host_short_bytes: int = 0
    rungs: dict[int, Alone] = field(default_factory=dict)
    whole: dict[int, Fastest] = field(default_factory=dict)
    search: OneRung = field(init=False)
    instead: tuple[Candidate, ...] = field(default=(), init=False)
    suffices: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.search = OneRung(self.problem, self.trained)

    @property
    def ample_bytes(self) -> int:
        """A budget above which nothing binds."""
        return self.search.ample_bytes

    def run(self, budget: int | None, than_s: float | None = None) -> None:
        """The search under `budget`, unlimited when None, for what is faster than so many seconds: what is not may be left out."""
        self.best, self.short, self.tried, self.host_short_bytes = None, [], [], 0
        if budget is None:
            self.search.run(None)
            self.best, self.tried = self.search.best, self.search.tried
            return
        limit = self.search.limit(budget)
        for alone in self._within(limit, than_s):
            self.tried += alone.tried
            self.short += alone.short
            self._take(alone, limit, False)
        if self.best is not None:
            for alone in self._beyond(limit):
                self._take(alone, limit, True)

    def _within(self, limit: int, than_s: float | None) -> Iterator[Alone]:
        """The rungs within the limit, the largest first, and the least budget that works, as long as they may give anything faster."""
        for rung in rungs_within(limit, self.search.bits):
            enough_s = self.best.step_s * (1 - _ROUNDING) if self.best is not None else than_s
            if enough_s is not None and self.search.none_faster(min(limit, self.search.above(rung)), enough_s):
                return
            alone = self._alone(rung)
            yield alone
            if not alone.candidates:
                if alone.least is not None and alone.least <= limit:
                    yield self._alone(alone.least)
                return

    def _beyond(self, limit: int) -> Iterator[Alone]:
        """The rungs above the limit, the smallest first, as long as what they give and takes no more than the limit may be as fast. Where that
        leaves room for the largest of all that could stay, all of it does: as much is found within the limit."""
        room = self.problem.footprint.live_bytes(limit) + self.search.largest_bytes
        for rung in sorted(one for one in rungs_within(self.ample_bytes, self.search.bits) if one > limit):
            assert self.best is not None
            nothing_leaves = self.problem.footprint.live_bytes(rung) > room
            if nothing_leaves or self.search.none_faster(limit, self.best.step_s * (1 + _ROUNDING)):
                return
            yield self._alone(rung)

    def _alone(self, rung: int) -> Alone:
        if rung not in self.rungs:
            self.rungs[rung] = self.search.alone(rung)
        return self.rungs[rung]

    def _take(self, alone: Alone, limit: int, of_equals: bool) -> None:
        """Makes what the rung gives under the limit the best, if it is faster, or as fast and to be taken `of_equals`."""
        fastest = self._fastest(alone, limit)
        if fastest.lacks:
            self.host_short_bytes = min(self.host_short_bytes or fastest.lacks, fastest.lacks)
        if fastest.found is not None:
            recipe, one = fastest.found
            if self.best is None or one.step_s < self.best.step_s or of_equals and one.step_s == self.best.step_s:
                self.best = one
                self.tried.append(told(self.problem, recipe, one))

    def _fastest(self, alone: Alone, limit: int) -> Fastest:
        if alone.above > limit:
            return self._completed(alone, limit)
        if alone.rung not in self.whole:
            self.whole[alone.rung] = self._completed(alone, alone.above)
        return self.whole[alone.rung]

    def _completed(self, alone: Alone, limit: int) -> Fastest:
        """The fastest under the limit with what else it has room for."""
        fastest, lacks, room = None, 0, self.problem.footprint.live_bytes(limit)
        for recipe, candidate in alone.candidates:
            if taken_bytes(candidate) > room:
                continue
            one = completed(self.problem, candidate, limit, alone.above)
            short = one.host_short_bytes(self.problem)
            if one.live_bytes > room:
                continue
            if short:
                lacks = min(lacks or short, short)
            elif fastest is None or one.step_s < fastest[1].step_s:
                fastest = recipe, one
        return Fastest(fastest, lacks)
