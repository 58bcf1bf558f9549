"""Which rungs the search of a large step visits below its own, whose plan it takes, and which recipes it tries and refines on one."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload import ladder
from fxoffload.ladder import OfRung, Search, rungs_within
from fxoffload.recipes import Recipe

pytestmark = pytest.mark.full_search
GIB = 1 << 30
RUNGS = sorted(rung for rung in rungs_within(64 * GIB, 4) if rung >= GIB)


def descended(budget: int, seconds: Callable[[int], float | None], floor: Callable[[int], float] = lambda _: 0.0) -> tuple[float | None, list[int]]:
    """The seconds of the plan taken under the budget, and the rungs that were searched, where a rung gives so many, or nothing."""
    search, visited = searched(budget, seconds, floor)
    return None if search.best is None else search.best.step_s, visited


def searched(budget: int, seconds: Callable[[int], float | None], floor: Callable[[int], float] = lambda _: 0.0) -> tuple[Any, list[int]]:
    """As `descended`, with the search itself."""
    search: Any = Search(mock.Mock(), frozenset())
    visited: list[int] = []
    search.__dict__["_effort"] = ladder._EFFORTS[-1]

    def climb(rung: int, *_: int, **_named: object) -> bool:
        if rung not in visited[-1:]:
            visited.append(rung)
        found = seconds(rung)
        search.given, search.own_s = ({}, math.inf) if found is None else ({Recipe("all"): SimpleNamespace(step_s=found)}, found)
        for one in search.given.values():
            search.best = one if search.best is None or one.step_s < search.best.step_s else search.best
        return found is not None

    def slower(above: int) -> bool:
        return search.best is not None and (search.again == frozenset() or floor(above) >= search.best.step_s)

    with (mock.patch.object(search, "_climb", climb), mock.patch.object(search, "_all_slower", slower),
          mock.patch.object(search, "_climb_least", lambda rung, _: visited.append(-rung))):
        search._descend([rung for rung in RUNGS[::-1] if rung <= budget], budget)
    return search, visited


def test_memory_is_tight_where_nothing_fits_one_of_the_two_largest_rungs() -> None:
    tight = {gib: searched(gib * GIB, lambda rung: 1.0 / rung if rung >= 10 * GIB else None)[0].is_tight for gib in (8, 9, 10, 11, 12)}
    assert tight == {8: True, 9: True, 10: True, 11: False, 12: False}


def test_few_rungs_of_a_plateau_are_searched_and_its_least_one_gives_the_plan() -> None:
    """As good as the best from 8 GiB on: each rung by a little that says nothing."""
    def seconds(rung: int) -> float:
        return 1.0 + 1e-6 * (RUNGS.index(rung) % 7) if rung >= 8 * GIB else 1.5

    found = {gib: descended(gib * GIB, seconds) for gib in (9, 10, 13, 24, 40, 64)}
    assert {taken for taken, _ in found.values()} == {seconds(8 * GIB)}
    n_rungs = sum(8 * GIB <= rung <= 64 * GIB for rung in RUNGS)
    assert len(set(found[64][1])) <= 12 < n_rungs


def test_every_rung_near_the_best_is_searched_where_none_is_as_good() -> None:
    """A smaller rung may give a faster plan."""
    given = {16: 1.0, 15: 1.0007, 14: 0.995, 13: 0.9957, 12: 0.997, 11: 0.5}
    taken, visited = descended(16 * GIB, lambda rung: given.get(rung // GIB, 3.0))
    assert taken == 0.995
    assert visited == [n * GIB for n in (16, 15, 14, 13, 12)]  # what follows 12 GiB is not looked at
    assert descended(16 * GIB, lambda rung: 1.0 if rung >= 16 * GIB else 1.002) == (1.0, [16 * GIB, 15 * GIB])


def test_nothing_is_searched_that_a_bound_says_is_slower() -> None:
    assert descended(16 * GIB, lambda _: 1.0, lambda above: 1.0 if above <= 15 * GIB else 0.9) == (1.0, [16 * GIB, 15 * GIB])


def test_below_the_last_rung_that_works_the_least_budget_is_searched() -> None:
    """Also where larger steps had gone past it."""
    taken, visited = descended(64 * GIB, lambda rung: 1.0 if rung >= 10 * GIB else None)
    assert taken == 1.0
    assert visited[-1] == -9 * GIB
    assert descended(8 * GIB, lambda _: None) == (None, [8 * GIB, -8 * GIB])


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.3]), min_size=len(RUNGS), max_size=len(RUNGS)))
def test_more_memory_is_never_slower_whatever_plateaus_there_are(seed: int, drops: list[float]) -> None:
    """Steps down with more memory, or none but for less than what counts as alike."""
    curve, level = dict[int, float](), 100.0
    for i, (rung, drop) in enumerate(zip(RUNGS, drops, strict=True)):
        level *= 1 - drop
        curve[rung] = level * (1 + 4e-5 * ((seed >> i % 30) & 1))
    taken = [descended(rung, curve.__getitem__)[0] for rung in RUNGS]
    for smaller, larger in zip(taken, taken[1:]):
        assert smaller is not None and larger is not None and larger <= smaller


def climbed(ways: list[list[float]], n_events: int, best_s: float | None = None) -> tuple[list[float], list[float]]:
    """The seconds of the recipes that one rung is searched with, and of those that are refined; a recipe stands for its seconds. `best_s`: of a
    larger rung's best."""
    search: Any = Search(mock.Mock(), frozenset())
    search.__dict__["_effort"] = next(one for one in ladder._EFFORTS if n_events <= one.most_events)
    recipes = [[Recipe("blocks", price=seconds) for seconds in way] for way in ways]
    tried, refined = list[float](), list[float]()
    search.near_share = ladder._FIRST_NEAR
    if best_s is not None:
        search.best, search.again = SimpleNamespace(step_s=best_s), frozenset(one for way in recipes for one in way)
        search.near_share = search._effort.near

    def first(recipe: Recipe, _rung: int) -> OfRung:
        tried.append(recipe.price)
        one: Any = SimpleNamespace(step_s=recipe.price, resident=frozenset(), host_short_bytes=lambda _: 0)
        return OfRung([one], [one], [one])

    def complete(recipe: Recipe, found: OfRung, _budget: int, _above: int) -> None:
        search.given.setdefault(recipe, found.settled[0])
        if search.best is None or recipe.price < search.best.step_s:
            search.best = found.settled[0]

    def others(recipe: Recipe, _rung: int, fitting: list[Any]) -> OfRung:
        refined.append(recipe.price)
        return OfRung([], fitting, fitting)

    with (mock.patch.object(search, "_ways", lambda _: recipes), mock.patch.object(search, "_decided", lambda recipe: (recipe,)),
          mock.patch.object(search, "_slower_s", lambda *_: None), mock.patch.object(search, "_first", first),
          mock.patch.object(search, "_complete", complete), mock.patch.object(search, "_others", others)):
        assert search._climb(8 * GIB, 9 * GIB, 9 * GIB)
    return tried, refined


def test_the_fastest_recipes_of_a_rung_are_refined_where_they_come_within_a_fiftieth() -> None:
    """Three of a step of middling size, two of a larger one; the fastest of the largest rung whatever it gave."""
    ways = [[1.0], [1.01], [1.015], [1.019], [1.03]]
    assert climbed(ways, 5000)[1] == [1.0, 1.01, 1.015]
    assert climbed(ways, 7000)[1] == [1.0, 1.01]
    assert climbed([[1.0], [1.03]], 7000)[1] == [1.0]


def test_on_smaller_rungs_what_comes_near_the_best_is_refined() -> None:
    """Near is a fiftieth on the first two rungs and less on those below, here a thousandth."""
    assert climbed([[1.0005], [1.018], [1.03]], 7000, best_s=1.0)[1] == [1.0005]
    assert climbed([[1.0005], [1.0008], [1.03]], 7000, best_s=1.0)[1] == [1.0005, 1.0008]
    assert climbed([[1.018], [1.03]], 7000, best_s=1.0)[1] == []


def test_a_way_of_recipes_goes_on_behind_one_that_is_hardly_slower_in_a_step_of_middling_size() -> None:
    way = [1.0, 1.005, 0.99, 1.2, 0.9]
    assert climbed([way], 5000)[0] == [1.0, 1.005, 0.99, 1.2]
    assert climbed([way], 7000)[0] == [1.0, 1.005]
