"""The search: every rung of a ladder of budgets that depends on the problem alone, each by itself, so that laws hold for any two budgets.

Rungs are device budgets of few significant bits (24 GiB is one), and the least budget that works. One set of candidates, which the problem alone
fixes, is all that any budget chooses from: those of every rung, searched as if it were the only one (`rung.py`). Under a budget each is completed
with what else that has room for, up to the rung above its own (`fill.py`), and counts if it takes no more than the budget then. So what counts
under a budget counts under every larger one, and is never slower there: more memory is never predicted slower. And what is the fastest under a
budget, and takes no more than a smaller one, is completed to the same under that one, where nothing else is faster: the smaller budget's peak is
no higher. Of equals that of the largest rung is taken, and of its equals the one found first, under any budget. A rung is left out only where a
bound says that it gives nothing faster (`floor.py`), or nothing as fast where of equals its own would be taken. Where values lie at offsets that is
done of live budgets, and `planner.py` chooses among what they give.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from .candidates import Candidate, completed, put_off, put_off_s, taken_bytes
from .problem import Problem
from .reasons import Tried
from .recipes import Recipe
from .rung import Alone, OneRung, Shared, least_bytes, rungs_within, step_of, told

__all__ = ["Search", "least_bytes", "rungs_within", "step_of"]

# Numbers that rounding alone tells apart are equal.
_ROUNDING = 1e-12
# How much lies idle between values at offsets is known only of a whole plan. The live budgets that are tried are numbers of so many
# significant bits, 1/64 to 1/32 apart: steps of 8B width near their limit all along need 1/45 to 1/25.
LIVE_BITS = 6


@dataclass(frozen=True, slots=True)
class Fastest:
    """The fastest candidate of a rung under some budget, and its recipe; `lacks`: bytes that the host lacks at least for others."""

    found: tuple[Recipe, Candidate] | None
    lacks: int


@dataclass
class Search:
    """`best`: the fastest candidate so far, `tried`: what was tried; `short`: what does not fit, with the budget that each was tried under;
    `host_short_bytes`: what the host lacks at least for what else was tried.

    `first`: what the rung above all that are searched is above; `below`: what they are below, None for no bound. `rungs`, `whole`: what each gives by
    itself, and the fastest of it completed up to the rung above.
    """

    problem: Problem
    trained: frozenset[str]
    first: int = 0
    below: int | None = None
    best: Candidate | None = None
    short: list[tuple[Candidate, int]] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    host_short_bytes: int = 0
    rungs: dict[int, Alone] = field(default_factory=dict)
    whole: dict[int, Fastest] = field(default_factory=dict)
    shared: Shared = field(default_factory=Shared)
    one: OneRung = field(init=False)

    def __post_init__(self) -> None:
        self.one = OneRung(self.problem, self.trained, shared=self.shared)

    @property
    def ample_bytes(self) -> int:
        """A budget above which nothing binds."""
        return self.one.ample_bytes

    def run(self, budget: int | None, than_s: float | None = None) -> None:
        """The search under `budget`, unlimited when None, for what is faster than so many seconds: what is not may be left out."""
        self.best, self.short, self.tried, self.host_short_bytes = None, [], [], 0
        if budget is None:
            self.best = self._put_off(self.one.unlimited())
            self.tried = [told(self.problem, Recipe("all"), self.best)]
            return
        limit, is_first = self.one.limit(budget), True
        for alone in self._within(limit, than_s):
            self.tried += alone.tried
            self.short += alone.short
            self._take(alone, limit, False)
            is_first = False
        if self.best is not None or is_first:
            for alone in self._beyond(limit, than_s):
                self._take(alone, limit, True)
        if self.best is not None and not self._issues:
            self.best = self._put_off(self.best)

    def none_faster(self, budget: int, than_s: float) -> bool:
        """Whether bounds say that nothing under the budget is faster, with the optimizer's step."""
        return self.one.none_faster(budget, than_s - self.problem.after_s(self.trained))

    def _within(self, limit: int, than_s: float | None) -> Iterator[Alone]:
        """The rungs within the limit, the largest first, and the least budget that works, as long as they may give anything faster."""
        for rung in rungs_within(limit, self.one.bits):
            if self.one.above(rung) <= self.first:
                return
            if self.below is not None and rung >= self.below:
                continue
            enough_s = self.best.step_s * (1 - _ROUNDING) if self.best is not None else than_s
            if enough_s is not None and self.one.none_faster(min(limit, self.one.above(rung)), enough_s):
                return
            alone = self._alone(rung)
            yield alone
            if not alone.candidates:
                if alone.least is not None and self.first < self.one.above(alone.least) and alone.least <= limit:
                    yield self._alone(alone.least)
                return

    def _beyond(self, limit: int, than_s: float | None) -> Iterator[Alone]:
        """The rungs above the limit, the smallest first, as long as what they give and takes no more than the limit may be as fast, and counts."""
        room = self.problem.footprint.live_bytes(limit)
        for rung in sorted(one for one in rungs_within(self.ample_bytes, self.one.bits) if one > limit):
            if self.one.above(rung) <= self.first:
                continue
            none_counts = self._least_bytes(rung) >= room
            is_above = self.below is not None and rung >= self.below
            enough_s = self.best.step_s * (1 + _ROUNDING) if self.best is not None else than_s
            if none_counts or is_above or enough_s is not None and self.one.none_faster(limit, enough_s):
                return
            yield self._alone(rung)

    def _alone(self, rung: int) -> Alone:
        if rung not in self.rungs:
            self.rungs[rung] = self.one.alone(rung)
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

    def _completed_one(self, candidate: Candidate, alone: Alone, limit: int, than_s: float) -> Candidate:
        """The candidate with what else the limit has room for. Where the host issues copies, that may be faster with copies put off than what more memory
        gives: of what all live budgets give the fastest then, if it is faster than so many seconds."""
        one = completed(self.problem, candidate, limit, alone.above)
        if not self._issues or one.step_s - put_off_s(candidate) >= than_s:
            return one
        fastest, taken = self._put_off(completed(self.problem, candidate, 0, alone.above)), taken_bytes(candidate)
        for budget in reversed([*takewhile(lambda n: self.problem.footprint.live_bytes(n) >= taken, rungs_within(min(limit, alone.above), LIVE_BITS))]):
            one = self._put_off(completed(self.problem, candidate, budget, alone.above))
            fastest = one if one.step_s <= fastest.step_s else fastest
        return fastest

    @functools.cached_property
    def _issues(self) -> bool:
        """Whether what the host issues takes time, and copies are put off."""
        return self.problem.footprint.by_offsets and self.problem.machine.overlaps and bool(self.problem.machine.dispatch_s)

    def _put_off(self, candidate: Candidate) -> Candidate:
        """With its copies put off, where values lie at offsets: a plan is chosen there for what it takes in the end."""
        return put_off(candidate) if self.problem.footprint.by_offsets else candidate

    def _least_bytes(self, rung: int) -> int:
        """Live bytes of which what a rung gives takes more, if it is to count: else it is for a smaller rung to find. It counts if a smaller rung has no
        room for it, or it leaves none for the largest of all that could stay."""
        smaller = next(rungs_within(rung - 1, self.one.bits), 0)
        live_bytes = self.problem.footprint.live_bytes
        return min(live_bytes(smaller), live_bytes(rung) - self.one.largest_bytes)

    def _completed(self, alone: Alone, limit: int) -> Fastest:
        """The fastest under the limit with what else it has room for."""
        fastest, lacks, room = None, 0, self.problem.footprint.live_bytes(limit)
        least = self._least_bytes(alone.rung)
        for recipe, candidate in alone.candidates:
            if taken_bytes(candidate) > room:
                continue
            one = self._completed_one(candidate, alone, limit, fastest[1].step_s if fastest is not None else math.inf)
            short = one.host_short_bytes(self.problem)
            if one.live_bytes > room:
                continue
            if short:
                lacks = min(lacks or short, short)
            elif one.live_bytes > least and (fastest is None or one.step_s < fastest[1].step_s):
                fastest = recipe, one
        return Fastest(fastest, lacks)
