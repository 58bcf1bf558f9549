"""One rung of memory, searched as if it were the only one: what it gives depends on the problem and the rung alone.

Recipes of recomputation are tried with resident sets, each scanned and priced; the fastest of them are refined. What that leaves is a set of
candidates, each to be completed with what else a budget has room for, up to the rung above (`fill.py`), which never makes it slower.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .candidates import (
    NEAR, Candidate, Recomputation, based, completed, free_names, least_s, packed_first, recomputed, refined, scanned, scheduled, settled, swept,
    swept_near, unlimited_bytes,
)
from .climb import climbed
from .derived import Base
from .liveness import Liveness, liveness
from .overlap import Costs
from .plans import Decision
from .problem import Problem
from .reasons import Tried
from .recipes import MIDDLE, Recipe, beside, decided, every_recipe, in_parts, recipes, recipes_of_small
from .spill import Schedule


@dataclass(frozen=True, slots=True)
class Effort:
    """How a step of up to `most_events` is searched: on rungs of so many significant `bits`.

    `n_refined`: recipes of a rung that are refined, the fastest, and of large steps the others only where they came near the best. `n_tries`: where
    there are any, values that stay by their worth are tried too, and the fastest is climbed from in so many tries. `every`: every recipe is tried on
    every rung unless it is proven to give nothing faster, with every resident set; else those of a way until one is `slower` than the one before by
    more than that share (`OneRung._ways`), with resident sets near that of the recipe before. `packs`: then values that stay by their worth are tried
    of every recipe.
    """

    most_events: int
    bits: int
    n_refined: int
    n_tries: int
    every: bool
    packs: bool = False
    slower: float = 0.0


# Rungs are 1/64 to 1/32 apart, or 1/16 to 1/8. The larger a step, the longer a candidate takes, and the graph of a recipe.
_EFFORTS = (
    Effort(250, 6, 3, 30, True), Effort(600, 4, 2, 30, True), Effort(6000, 4, 3, 0, False, True, 1 / 100), Effort(1 << 60, 4, 2, 0, False))
# The bits of a thorough search at least.
_THOROUGH_BITS = 5
# What a climb goes through at least, over all its tries.
_TRIED_EVENTS = 4000
# Candidates of a recipe on a rung, the fastest, that are completed, because what more memory gives them is not alike.
_COMPLETED = 3
# Above this many times what all parameters and values take nothing binds, slack included.
_AMPLE = 5 / 4
# The share of the best one's seconds that a large step's recipe may take more and is refined.
_NEAR_BEST = 1 / 50
# Numbers that rounding alone tells apart are equal.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class OfRung:
    """Candidates on a rung: all that were `tried`, those that fit, the fastest first, and the first few of these with all the rung has room for."""

    tried: list[Candidate]
    fitting: list[Candidate]
    settled: list[Candidate]


@dataclass(frozen=True, slots=True)
class Schedules:
    """Those that were made, and what they are derived from, each with what bytes ops need for themselves, by whose identity it is known."""

    made: dict[Hashable, tuple[object, Schedule]] = field(default_factory=dict)
    bases: dict[Hashable, tuple[object, Base | None]] = field(default_factory=dict)


@dataclass
class Shared:
    """What searches of one problem share, whatever resides: what each recipe decides, and what nodes cost. `schedules`: of graphs that they
    recompute alike, which problems that differ in what nothing of a graph depends on share too."""

    decisions: dict[Recipe, tuple[Decision, ...]] = field(default_factory=dict)
    costs: Costs = field(default_factory=dict)
    live: Liveness | None = None
    schedules: Schedules = field(default_factory=Schedules)

    def schedule_of(self, problem: Problem, decisions: tuple[Decision, ...], trained: frozenset[str]) -> Schedule:
        """The problem's Schedule with those decisions, made once."""
        context, homes = problem.context, tuple([(p.fqn, p.home) for p in problem.parameters.values()])
        key = problem.graph, id(context.workspace), context.swap_tier, context.device, context.host, homes, trained
        known = self.schedules
        if key not in known.bases:
            known.bases[key] = context.workspace, based(problem, trained)
        if (key, decisions) not in known.made:
            known.made[key, decisions] = context.workspace, scheduled(problem, decisions, trained, known.bases[key][1])
        return known.made[key, decisions][1]

    def live_of(self, problem: Problem) -> Liveness:
        """The Liveness of the problem's graph."""
        if self.live is None:
            self.live = liveness(problem.graph, problem.context.bounds)
        return self.live


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


@dataclass
class OneRung:
    """The search of one rung after the other. `best`: the fastest candidate so far; `short`: those that do not fit, with the budget that each was
    tried under; `near`: what resides in the fastest scan of the recipe before, which a large step's next recipe is tried with first; `given`: the
    fastest candidate of each recipe; `collected`: all that was completed, as it was before.

    `made`, `rungs`, and `shared`: what every rung shares. What a rung gives does not depend on those before it.
    """

    problem: Problem
    trained: frozenset[str]
    best: Candidate | None = None
    short: list[tuple[Candidate, int]] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    made: dict[Recipe, Recomputation] = field(default_factory=dict)
    shared: Shared = field(default_factory=Shared)
    rungs: dict[tuple[Recipe, int, tuple[frozenset[str], ...], bool], OfRung] = field(default_factory=dict)
    near: frozenset[str] | None = None
    given: dict[Recipe, Candidate] = field(default_factory=dict)
    collected: dict[int, tuple[Recipe, Candidate]] = field(default_factory=dict)

    def unlimited(self) -> Candidate:
        """The fastest candidate with all the memory there is."""
        return min(swept(self.problem, self._made(Recipe("all")), self.trained, None), key=_seconds)

    def alone(self, rung: int) -> Alone:
        """A rung, or a budget, searched for what is the fastest under it, and what is right below the rung above."""
        self.collected = {}
        tried, above = dict[Tried, None](), self.above(rung)
        for budget in (above, rung):
            self.best, self.short, self.tried, self.near, self.given = None, [], [], None, {}
            self._climb(rung, budget, above)
            tried |= dict.fromkeys(self.tried)
        candidates = tuple(self.collected.values())
        self.rungs.clear()  # a rung is asked for once
        within = [one for one in tried if one.peak_bytes is None or one.peak_bytes <= self.problem.footprint.live_bytes(rung)]
        return Alone(rung, above, candidates, tuple(within), tuple(self.short), None if candidates else self.least_of(rung))

    @functools.cached_property
    def tight_bytes(self) -> int:
        """A large step's budget from which on memory is not tight: the recipe of the middle price fits two rungs below."""
        recipe = next((one for one in recipes(self.problem) if one.keep == "blocks" and one.price == MIDDLE), Recipe("costly"))
        made = self._made(recipe)
        return self.above(self.above(least_bytes(self.problem, scanned(self.problem, made, made.must, 0, 0.0), 0)))

    def limit(self, budget: int) -> int:
        """The budget, or one above which nothing binds where that is less."""
        return budget if budget <= self._binding_bytes else min(budget, self.ample_bytes)

    def _climb(self, rung: int, budget: int, above: int) -> None:
        """Searches the rung for what to complete under `budget`, within the rung above."""
        start: Candidate | None = None
        found: list[tuple[Recipe, list[Candidate]]] = []
        decisions: list[tuple[Decision, ...]] = []
        for way in self._ways(budget):
            before = start
            for recipe in way:
                if self._decided(recipe) in decisions:
                    continue
                decisions.append(self._decided(recipe))
                slower_s = self._slower_s(recipe, budget)
                if slower_s is not None:
                    self.tried.append(Tried(str(recipe), 0, slower_s, None))
                    continue
                fit = self._first(recipe, rung)
                if not fit.fitting:
                    if self._none_lacks_less(fit.tried, rung):
                        return
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
            # Refined, the fastest may be the best whatever it gave.
            if (i == 0 or self._nears_best(self.given.get(recipe))) and self._slower_s(recipe, budget) is None:
                self._complete(recipe, self._others(recipe, rung, fitting), budget, above)

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
        return [one for one in first if self._effort.every or one.step_s <= first[0].step_s * (1 + _NEAR_BEST)]

    def _settled(self, candidates: Sequence[Candidate], rung: int) -> list[Candidate]:
        return [settled(self.problem, one, rung) for one in candidates]

    def _tell(self, recipe: Recipe, rung: int, found: OfRung) -> OfRung:
        self.tried += [told(self.problem, recipe, one) for one in found.tried]
        self.short += [(one, rung) for one in found.tried if one.found.shortfall_bytes]
        return found

    def _complete(self, recipe: Recipe, found: OfRung, budget: int, above: int) -> None:
        """Accepts candidates of a rung with what else there is room for."""
        for one in found.settled:
            self.collected.setdefault(id(one), (recipe, one))
            candidate = completed(self.problem, one, budget, above)
            if candidate.host_short_bytes(self.problem):
                continue
            self.given[recipe] = min(self.given.get(recipe, candidate), candidate, key=_seconds)
            if self.best is None or candidate.step_s < self.best.step_s:
                self.best = candidate
                self.tried.append(told(self.problem, recipe, candidate))

    def _ways(self, budget: int) -> Iterator[list[Recipe]]:
        """The recipes in the orders in which they are tried. Where not all are: the one of the middle price; from the one that recomputes
        most down to it, from it down to none, it in fewer and fewer blocks, each way as long as that is faster than all before; and where
        the best one is in fewer blocks, it in some more and in some less. Where little but recomputing is waited for, far fewer blocks are
        likely: a quarter comes first, since what it takes is mostly less than a half of them must, and three quarters last, if at all."""
        if self._effort.every:
            ordered = recipes_of_small(self.problem)
            binds = self._least_s(ordered[0], budget) > self._least_s(ordered[-1], budget)
            yield ordered[::-1] if binds else ordered
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
        """Whether a large step's candidate takes hardly longer than the best one. Small steps are searched whatever it is."""
        return self._effort.every or self.best is None or candidate is not None and candidate.step_s <= self.best.step_s * (1 + _NEAR_BEST)

    def _nears_its_bound(self, budget: int) -> bool:
        """Whether the best candidate takes hardly longer than any of its recipe must."""
        return self.best is not None and self.best.step_s <= least_s(self.problem, self.best.recomputation, budget) * (1 + NEAR)

    def least_of(self, rung: int) -> int | None:
        """The least budget that works for something that does not fit the rung; None where nothing was tried."""
        return min((least_bytes(self.problem, *one) for one in self.short if one[1] == rung), default=None)

    def above(self, budget: int) -> int:
        """The first rung of the search's own that is above a budget."""
        bits = self.bits
        return next(rungs_within(budget, bits)) + step_of(budget, bits)

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

    def _decided(self, recipe: Recipe) -> tuple[Decision, ...]:
        if recipe not in self.shared.decisions:
            self.shared.decisions[recipe] = decided(self.problem, recipe, self.shared.live_of(self.problem))
        return self.shared.decisions[recipe]

    def _made(self, recipe: Recipe) -> Recomputation:
        if recipe not in self.made:
            decisions, shared = self._decided(recipe), self.shared
            schedule = shared.schedule_of(self.problem, decisions, self.trained)
            self.made[recipe] = recomputed(self.problem, recipe, decisions, self.trained, shared.costs, schedule)
        return self.made[recipe]

    @functools.cached_property
    def _effort(self) -> Effort:
        n_events = self._made(Recipe("all")).schedule.n_events
        return next(effort for effort in _EFFORTS if n_events <= effort.most_events)

    @property
    def bits(self) -> int:
        """The significant bits of a rung."""
        return max(self._effort.bits, _THOROUGH_BITS) if self.problem.thorough else self._effort.bits

    @property
    def is_large(self) -> bool:
        """Whether not every recipe is tried on every rung."""
        return not self._effort.every

    @functools.cached_property
    def largest_bytes(self) -> int:
        """Of the largest thing that could stay."""
        return max((storage.n_bytes for storage in self.shared.live_of(self.problem).first), default=0)

    @functools.cached_property
    def _n_tries(self) -> int:
        """The tries of a climb: more of them where they take less."""
        n_events = self._made(Recipe("all")).schedule.n_events
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
