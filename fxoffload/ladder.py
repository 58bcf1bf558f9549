"""The search: candidates under a ladder of budgets that depends on the problem alone, so that laws hold for any two budgets.

Rungs are device budgets of few significant bits (24 GiB is one), and the least budget that works. The largest rung within a budget is
searched with every recipe, then the smaller ones, until nothing they could give is faster (`floor.py`), of large steps with the recipes
that are hardly slower than the best. From its rung on up to the next one a candidate is completed with what else the
budget has room for (`fill.py`), which never makes it slower. So the candidates of a smaller budget are candidates of a larger one, which
takes theirs where they are the fastest: more memory is never predicted slower, but by what is left out of large steps
(docs/planning.md). Of equals the first stays: it has the most memory and recomputes least.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .candidates import (
    NEAR, Candidate, Recomputation, completed, free_names, least_s, packed_first, recomputed, refined, settled, swept, swept_near, unlimited_bytes,
)
from .climb import climbed
from .liveness import Liveness, liveness
from .overlap import Costs
from .plans import Decision
from .problem import Problem
from .reasons import Tried
from .recipes import MIDDLE, Recipe, beside, decided, every_recipe, in_parts, recipes, recipes_of_small


@dataclass(frozen=True, slots=True)
class Effort:
    """How a step of up to `most_events` is searched: on rungs of so many significant `bits`.

    `n_refined`: recipes of a rung that are refined, the fastest, and of large steps the others only where they came near the best. `n_tries`: where
    there are any, values that stay by their worth are tried too, and the fastest is climbed from in so many tries. `every`: every recipe is tried on
    every rung unless it is proven to give nothing faster, with every resident set; else those of a way until one is `slower` than the one before by
    more than that share (`Search._ways`), with resident sets near that of the recipe before, and on smaller rungs those that came near the best on
    the one before. `packs`: then values that stay by their worth are tried of every recipe, and on the second rung, if one came near, the recipes
    that no way came to on the first. `near`: the share of the best one's seconds that is near, behind the second rung.
    """

    most_events: int
    bits: int
    n_refined: int
    n_tries: int
    every: bool
    packs: bool = False
    near: float = 0.0
    slower: float = 0.0


# A scan takes milliseconds where all rungs are searched, steps of 1/64 to 1/32 or 1/16 to 1/8, and up to a tenth of a second on the others.
_EFFORTS = (
    Effort(250, 6, 2, 30, True), Effort(600, 4, 2, 30, True), Effort(6000, 4, 3, 0, False, True, 1 / 100, 1 / 100),
    Effort(1 << 60, 4, 2, 0, False, False, 1 / 1000))
# What a climb goes through at least, over all its tries.
_TRIED_EVENTS = 4000
# Candidates of a recipe on a rung, the fastest, that are completed, because what more memory gives them is not alike.
_COMPLETED = 3
# Above this many times what all parameters and values take nothing binds, slack included.
_AMPLE = 5 / 4
# The share of the best one's seconds that a recipe may take more on the first two rungs, and is tried on the one below.
_FIRST_NEAR = 1 / 50
# The share of them that a candidate may take more and is as good.
_ALIKE = 1e-4
# Candidates that are lowered at most when the best one does not fit at its offsets.
_INSTEAD = 2
# Numbers that rounding alone tells apart are equal.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class OfRung:
    """Candidates on a rung: all that were `tried`, those that fit, the fastest first, and the first few of these with all the rung has room for."""

    tried: list[Candidate]
    fitting: list[Candidate]
    settled: list[Candidate]


@dataclass
class Search:
    """`best`: the fastest candidate so far; `short`: those that do not fit, with the budget that each was tried under; `host_short_bytes`:
    what the host lacks at least for what else was tried; `near`: what resides in the fastest scan of the recipe before, which a large step's next
    recipe is tried with first; `given`: the fastest candidate of each recipe on this rung; `own_s`: the fewest seconds within the rung itself;
    `offered`: all that could be the best; `near_share`: the share of the best seconds that counts as hardly more; `again`: the recipes
    that came near the best on the rung before, None on the largest one; `is_tight`: nothing fits the largest rung within the budget, or the next.

    `made`, `decisions`, `rungs`, `costs`: what every budget that is searched shares. What a budget gives does not depend on those before it.
    """

    problem: Problem
    trained: frozenset[str]
    best: Candidate | None = None
    short: list[tuple[Candidate, int]] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    made: dict[Recipe, Recomputation] = field(default_factory=dict)
    decisions: dict[Recipe, tuple[Decision, ...]] = field(default_factory=dict)
    rungs: dict[tuple[Recipe, int, tuple[frozenset[str], ...], bool], OfRung] = field(default_factory=dict)
    near: frozenset[str] | None = None
    costs: Costs = field(default_factory=dict)
    host_short_bytes: int = 0
    given: dict[Recipe, Candidate] = field(default_factory=dict)
    offered: list[Candidate] = field(default_factory=list)
    own_s: float = math.inf
    near_share: float = NEAR
    again: frozenset[Recipe] | None = None
    is_tight: bool = False

    def run(self, budget: int | None, than_s: float | None = None) -> None:
        """The search under `budget`, unlimited when None, for what is faster than so many seconds: where it is known that nothing is, nothing."""
        self.begin()
        if budget is None:
            self._accept(Recipe("all"), min(swept(self.problem, self._made(Recipe("all")), self.trained, None), key=_seconds))
            return
        limit = self.limit(budget)
        if than_s is not None and self.none_faster(limit, than_s):
            return
        self._descend(list(rungs_within(limit, self.bits)), limit)

    def _descend(self, rungs: Sequence[int], limit: int) -> None:
        """Searches the largest of the rungs, then the next, as long as one is faster, or what it gives within itself hardly slower than the best. Where it
        is as good, twice as many are left out each time, and those between are searched only around the smallest that is still as good. That one's plan is
        taken: whatever the budget above it, it is the same."""
        found: list[Candidate] = []
        # `near_share` first says whether a rung counts, then which of its recipes the next one is searched with.
        # The number of the last rung that counts, of the first that does not, and of the first known not to be as good as the best.
        last, end, worse, step = -1, len(rungs), len(rungs), 1
        short, far = set[int](), frozenset[Recipe]()
        while last + 1 < end:
            at = min(last + step, worse - 1) if last + 1 < worse else last + 1
            above = rungs[at] + step_of(rungs[at], self.bits)
            before, self.given, self.own_s = self.best, {}, math.inf
            slower = before is not None and self._all_slower(min(limit, above))
            self.near_share = _FIRST_NEAR if last <= 0 else self._effort.near
            probes = last == 0 and self._effort.packs
            if not slower and not self._climb(rungs[at], min(limit, above), above, refines=not probes):
                short.add(at)
            if probes and any(map(self._nears_best, self.given.values())):
                self.again = None
                self._climb(rungs[at], min(limit, above), above, without=far)
            fastest = min(self.given.values(), key=_seconds, default=None)
            alike = self._is_within(self.own_s, _ALIKE) and self._is_alike(before)
            if slower or at in short or last >= 0 and not self._nears_best(fastest):
                end, worse, step = at, min(worse, at), max(1, step // 2)
            elif not alike and at > last + 1:
                worse, step = at, max(1, step // 2)
            else:
                found += [fastest] if fastest is not None else []
                self.near_share = self._effort.near if last >= 0 and self._is_alike(before) else _FIRST_NEAR
                far = frozenset(recipe for recipe, one in self.given.items() if not self._nears_best(one))
                self.again = frozenset(self.given) - far
                if last >= 0 and not self._effort.every and self._is_alike(before) and not self._is_within(self.own_s, self._effort.near):
                    end = at + 1
                step, worse = (2 * step, worse) if alike else (1, end)
                last = at
        self.is_tight = end in short and end <= 1
        if end in short:
            self._climb_least(rungs[end], limit)
        self.best = next(filter(self._is_alike, reversed(found)), self.best)

    def begin(self) -> None:
        """Forgets what was found under another budget."""
        self.best, self.short, self.tried, self.host_short_bytes, self.near = None, [], [], 0, None
        self.given, self.offered, self.again, self.is_tight = {}, [], None, False

    @property
    def suffices(self) -> bool:
        """Whether the few trained parameters are tried nowhere but where this large step's search has them."""
        return not self._effort.every and not self.is_tight

    @property
    def instead(self) -> tuple[Candidate, ...]:
        """The next ones that are as good as a large step's best candidate, none faster: they may fit at their offsets where that does not. (A faster one
        would make a budget faster than larger ones, where that best candidate fits.)"""
        if self.best is None:
            return ()
        others = {(one.step_s, one.live_bytes): one for one in self.offered if self._is_alike(one) and one.step_s >= self.best.step_s}
        others.pop((self.best.step_s, self.best.live_bytes), None)
        return tuple(sorted(others.values(), key=lambda one: (one.step_s, one.live_bytes)))[:_INSTEAD]

    def limit(self, budget: int) -> int:
        """The budget, or one above which nothing binds where that is less."""
        return budget if budget <= self._binding_bytes else min(budget, self.ample_bytes)

    def _climb(self, rung: int, budget: int, above: int, refines: bool = True, without: frozenset[Recipe] = frozenset()) -> bool:
        """Searches one rung for what to complete under `budget`, within the rung above; False when nothing fits it. Where it does not `refine`, only
        what is as good as the best is refined, whose plan may be taken; recipes `without` which it does are passed over."""
        start: Candidate | None = None
        self.near = None
        found: list[tuple[Recipe, list[Candidate]]] = []
        decisions: list[tuple[Decision, ...]] = []
        for way in self._ways(budget):
            before = start
            for recipe in way:
                if recipe in without or self._decided(recipe) in decisions:
                    continue
                decisions.append(self._decided(recipe))
                slower_s = self._slower_s(recipe, budget)
                if slower_s is not None:
                    self.tried.append(Tried(str(recipe), 0, slower_s, None))
                    continue
                fit = self._first(recipe, rung)
                if not fit.fitting:
                    if self._none_lacks_less(fit.tried, rung):
                        return bool(found)
                    continue
                self._complete(recipe, fit, budget, above)
                found.append((recipe, fit.fitting))
                if not self._effort.every:
                    self.near = fit.fitting[0].resident
                given = self.given.get(recipe)
                if not self._effort.every and before is not None and given is not None and given.step_s >= before.step_s * (1 + self._effort.slower):
                    break
                before = given or before
                start = start or given
        fastest = sorted(found, key=lambda one: (one[1][0].host_short_bytes(self.problem), one[1][0].step_s))[: self._effort.n_refined]
        for i, (recipe, fitting) in enumerate(fastest):
            given = self.given.get(recipe)
            is_first = self.again is None and i == 0  # of the largest rung, whatever it gave: refined, it may be the best
            nears = refines and (is_first or self._nears_best(given)) and self._slower_s(recipe, budget) is None
            if nears or self.again is not None and self._is_alike(given):
                self._complete(recipe, self._others(recipe, rung, fitting), budget, above)
        return bool(found)

    def _none_lacks_less(self, tried: Sequence[Candidate], rung: int) -> bool:
        """Whether one of these, which do not fit a rung, lacks no more there than every recipe does."""
        everything = self._made(Recipe("all"))
        room = self.problem.footprint.live_bytes(rung) - everything.outside_bytes(self.problem, everything.must)
        lacks = everything.least_of_any(self.problem) - room
        return any(0 < one.found.shortfall_bytes <= lacks for one in tried)

    def _first(self, recipe: Recipe, rung: int) -> OfRung:
        """What the recipe gives on a rung; all candidates are told."""
        made, of = self._made(recipe), (recipe, rung, () if self.near is None else (self.near,), False)
        if of not in self.rungs:
            small = self._effort.every
            tried = list(swept(self.problem, made, self.trained, rung) if small else swept_near(self.problem, made, self.trained, rung, self.near))
            # What is packed has filled its memory: what it could be completed with is no measure of it, nor of the others.
            packed = list(packed_first(self.problem, made, rung)) if self._effort.packs else []
            first = self._fitting(tried)[:1] if small else self._first_few(self._fitting(tried))
            first += self._fitting(packed)[:1]
            self.rungs[of] = OfRung(tried + packed, self._fitting(tried + packed), self._settled(first, rung))
        return self._tell(recipe, rung, self.rungs[of])

    def _others(self, recipe: Recipe, rung: int, first: list[Candidate]) -> OfRung:
        """What refining the fastest of `first` gives, and the others of it."""
        of = recipe, rung, tuple(one.resident for one in first), True
        if of not in self.rungs:
            tried = list(refined(self.problem, first[0], self.trained, rung, bool(self._effort.n_tries)))
            fitting = self._fitting((*first[1:], *tried))
            if self._effort.n_tries:
                starts = _apart(sorted((first[0], *fitting), key=_seconds))
                tops = [climbed(self.problem, start, rung, self._n_tries) for start in starts]
                fitting = self._fitting((*(top for top, start in zip(tops, starts, strict=True) if top is not start), *fitting))
            self.rungs[of] = OfRung(tried, fitting, self._settled(self._first_few(fitting), rung))
        return self._tell(recipe, rung, self.rungs[of])

    def _first_few(self, fitting: Sequence[Candidate]) -> list[Candidate]:
        """Those of a recipe that are completed. Of a large step only what takes hardly longer than the fastest."""
        first = fitting[:_COMPLETED]
        return [one for one in first if self._effort.every or one.step_s <= first[0].step_s * (1 + _FIRST_NEAR)]

    def _settled(self, candidates: Sequence[Candidate], rung: int) -> list[Candidate]:
        return [settled(self.problem, one, rung) for one in candidates]

    def _tell(self, recipe: Recipe, rung: int, found: OfRung) -> OfRung:
        self.tried += [told(self.problem, recipe, one) for one in found.tried]
        self.short += [(one, rung) for one in found.tried if one.found.shortfall_bytes]
        return found

    def _complete(self, recipe: Recipe, found: OfRung, budget: int, above: int) -> None:
        """Accepts candidates of a rung with what else there is room for."""
        for one in found.settled:
            candidate = completed(self.problem, one, budget, above)
            if not candidate.host_short_bytes(self.problem):
                self.own_s = min(self.own_s, one.step_s)
                self.given[recipe] = min(self.given.get(recipe, candidate), candidate, key=_seconds)
                self.offered.append(candidate)
            self._accept(recipe, candidate)

    def _ways(self, budget: int) -> Iterator[list[Recipe]]:
        """The recipes in the orders in which they are tried. Where not all are, on the largest rung: the one of the middle price; from the one that recomputes
        most down to it, from it down to none, it in fewer and fewer blocks, each way as long as that is faster than all before; and where
        the best one is in fewer blocks, it in some more and in some less. Where little but recomputing is waited for, far fewer blocks are
        likely: a quarter comes first, since what it takes is mostly less than a half of them must, and three quarters last, if at all."""
        if self._effort.every:
            ordered = recipes_of_small(self.problem)
            binds = self._least_s(ordered[0], budget) > self._least_s(ordered[-1], budget)
            yield ordered[::-1] if binds else ordered
        elif self.again is not None:
            yield from ([one] for one in every_recipe(self.problem)[::-1] if one in self.again)
            if self.best is not None and self.given.get(self.best.recomputation.recipe) is self.best:
                yield from ([one] for one in beside(self.best.recomputation.recipe, recipes(self.problem)))
        else:
            ordered = recipes(self.problem)
            middle = next((i for i, one in enumerate(ordered) if one.keep == "blocks" and one.price == MIDDLE), len(ordered) - 1)
            yield [ordered[middle]]
            yield ordered[middle + 1 :][::-1]
            yield ordered[:middle][::-1]
            parts = in_parts(ordered)[::-1]
            if self._nears_its_bound(budget):
                yield from ([one] for one in parts[:0:-1])
                if self.best is not None and self.best.recomputation.recipe not in parts[2:]:
                    yield parts[:1]
            else:
                yield parts
            if self.best is not None:
                yield from ([one] for one in beside(self.best.recomputation.recipe, ordered))

    def _nears_best(self, candidate: Candidate | None) -> bool:
        """Whether a large step's candidate takes hardly longer than the best one. Small steps are searched whatever a rung gave."""
        return self._effort.every or self.best is None or candidate is not None and self._is_within(candidate.step_s, self.near_share)

    def _is_alike(self, candidate: Candidate | None) -> bool:
        """Whether a large step's candidate is as good as the best one."""
        return candidate is not None and self._is_within(candidate.step_s, _ALIKE)

    def _is_within(self, seconds: float, share: float) -> bool:
        """Whether a large step's seconds are more than those of the best candidate by at most a share of them."""
        return not self._effort.every and self.best is not None and seconds <= self.best.step_s * (1 + share)

    def _nears_its_bound(self, budget: int) -> bool:
        """Whether the best candidate takes hardly longer than any of its recipe must."""
        return self.best is not None and self.best.step_s <= least_s(self.problem, self.best.recomputation, budget) * (1 + NEAR)

    def _climb_least(self, rung: int, limit: int) -> None:
        """Where nothing fits a rung, the least budget that works is one."""
        least = self.least_of(rung)
        if least is not None and least <= limit:
            above = self.above(least)
            self._climb(least, min(limit, above), above)

    def least_of(self, rung: int) -> int | None:
        """The least budget that works for something that does not fit the rung; None where nothing was tried."""
        return min((least_bytes(self.problem, *one) for one in self.short if one[1] == rung), default=None)

    def above(self, budget: int) -> int:
        """The first rung of the search's own that is above a budget."""
        bits = self._effort.bits
        return next(rungs_within(budget, bits)) + step_of(budget, bits)

    def _accept(self, recipe: Recipe, candidate: Candidate) -> None:
        """Makes a faster candidate the best one, if the host has room for it."""
        lacks = candidate.host_short_bytes(self.problem)
        if lacks:
            self.host_short_bytes = min(self.host_short_bytes or lacks, lacks)
        elif self.best is None or candidate.step_s < self.best.step_s:
            self.best = candidate
            self.tried.append(told(self.problem, recipe, candidate))

    def _all_slower(self, budget: int) -> bool:
        return all(self._slower_s(recipe, budget) is not None for way in self._ways(budget) for recipe in way)

    def _slower_s(self, recipe: Recipe, budget: int) -> float | None:
        """A bound that says nothing the recipe gives under `budget` can be faster than the best candidate, by what is worth a search;
        None where no bound does. It does not matter whether the recipe's own graph was made before, for another budget."""
        if self.best is None:
            return None
        limit_s = self.best.step_s * (1 - _ROUNDING)
        step_s = self._bound_s(recipe, budget, limit_s)
        return step_s if step_s >= limit_s else None

    def none_faster(self, budget: int, than_s: float) -> bool:
        """Whether bounds say that nothing any recipe gives under `budget` is faster."""
        every = recipes_of_small(self.problem) if self._effort.every else every_recipe(self.problem)
        return all(self._bound_s(recipe, budget, than_s) >= than_s for recipe in every)

    def _bound_s(self, recipe: Recipe, budget: int, enough_s: float) -> float:
        """Seconds that nothing the recipe gives under `budget` can beat; its own graph is made only where they are not `enough_s` without."""
        step_s = self._least_s(recipe, budget)
        return step_s if step_s >= enough_s else least_s(self.problem, self._made(recipe), budget)

    def _least_s(self, recipe: Recipe, budget: int) -> float:
        """A bound of what the recipe can give, by the graph that saves everything: its own need not be made."""
        return least_s(self.problem, self._made(Recipe("all")), budget, self._decided(recipe))

    def _fitting(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that fit the device, first those that the host lacks least for, the fastest first."""
        fitting = (one for one in candidates if not one.found.shortfall_bytes)
        return sorted(fitting, key=lambda one: (one.host_short_bytes(self.problem), one.step_s))

    @functools.cached_property
    def _live(self) -> Liveness:
        return liveness(self.problem.graph, self.problem.context.bounds)

    def _decided(self, recipe: Recipe) -> tuple[Decision, ...]:
        if recipe not in self.decisions:
            self.decisions[recipe] = decided(self.problem, recipe, self._live)
        return self.decisions[recipe]

    def _made(self, recipe: Recipe) -> Recomputation:
        if recipe not in self.made:
            self.made[recipe] = recomputed(self.problem, recipe, self._decided(recipe), self.trained, self.costs)
        return self.made[recipe]

    @functools.cached_property
    def _effort(self) -> Effort:
        n_events = len(self._made(Recipe("all")).schedule.events)
        return next(effort for effort in _EFFORTS if n_events <= effort.most_events)

    @property
    def bits(self) -> int:
        """The significant bits of a rung."""
        return self._effort.bits

    @functools.cached_property
    def _n_tries(self) -> int:
        """The tries of a climb: more of them where they take less."""
        n_events = len(self._made(Recipe("all")).schedule.events)
        return max(self._effort.n_tries, _TRIED_EVENTS // n_events)

    @functools.cached_property
    def ample_bytes(self) -> int:
        """A budget above which nothing binds."""
        everything = self._made(Recipe("all"))
        return int(self.problem.footprint.needed_bytes(unlimited_bytes(self.problem, everything, self._all_residents)) * _AMPLE)

    @functools.cached_property
    def _binding_bytes(self) -> int:
        """A budget that is no larger, by what is there at the border when nothing has left the device: no scan is needed to tell."""
        everything = self._made(Recipe("all"))
        fixed_bytes = everything.outside_bytes(self.problem, self._all_residents) + everything.ground(self._all_residents).fixed_bytes
        return int(self.problem.footprint.needed_bytes(fixed_bytes + everything.needs.saved_bytes) * _AMPLE)

    @property
    def _all_residents(self) -> frozenset[str]:
        return self._made(Recipe("all")).must | free_names(self.problem)


def rungs_within(n_bytes: int, bits: int) -> Iterator[int]:
    """The rungs of the ladder up to `n_bytes`, the largest first: numbers with that many significant bits."""
    while n_bytes > 0:
        step = step_of(n_bytes, bits)
        yield n_bytes // step * step
        n_bytes = n_bytes // step * step - 1


def step_of(n_bytes: int, bits: int) -> int:
    """How far apart rungs are from the one at or below `n_bytes` to the next."""
    return 1 << max(0, n_bytes.bit_length() - bits)


def least_bytes(problem: Problem, candidate: Candidate, budget: int) -> int:
    """The device budget that a candidate, which is short under `budget`, fits."""
    return problem.footprint.needed_bytes(problem.footprint.live_bytes(budget) + candidate.found.shortfall_bytes)


def _apart(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first of them, and the first with other residents: what is climbed from."""
    return [*candidates[:1], *[one for one in candidates if one.resident != candidates[0].resident][:1]]


def _seconds(candidate: Candidate) -> float:
    return candidate.step_s


def told(problem: Problem, recipe: Recipe, candidate: Candidate) -> Tried:
    """The candidate as the plan's reasons tell it."""
    resident_bytes = sum(problem.parameters[fqn].n_bytes for fqn in sorted(candidate.resident))
    if candidate.found.shortfall_bytes:
        return Tried(str(recipe), resident_bytes, None, None, candidate.found.shortfall_bytes)
    lacks = candidate.host_short_bytes(problem)
    if lacks:
        return Tried(str(recipe), resident_bytes, None, None, lacks, lacks_host=True)
    return Tried(str(recipe), resident_bytes, candidate.step_s, candidate.live_bytes)
