"""Which rungs a search visits, whose plan it takes, and which recipes it tries and refines on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload import ladder, planner, rung
from fxoffload.errors import PlanError
from fxoffload.ladder import Search, rungs_within, step_of
from fxoffload.planner import Chosen
from fxoffload.recipes import Recipe
from fxoffload.rung import Alone, OfRung, OneRung

pytestmark = pytest.mark.full_search
GIB = 1 << 30
RUNGS = sorted(one for one in rungs_within(64 * GIB, 4) if one >= GIB)
# Seconds of a rung's candidate, and the bytes that it takes.
Curve = Callable[[int], "tuple[float, int] | None"]


def searched(curve: Curve, floor: Callable[[int], float] = lambda _: 0.0, **named: Any) -> tuple[Any, list[int]]:
    """A search whose rungs give what the curve says, none faster than the floor of its budget, and the rungs that it searches."""
    search: Any = Search(mock.Mock(), frozenset(), **named)
    visited: list[int] = []
    one, problem = search.one, search.problem
    one.__dict__["_effort"], one.__dict__["ample_bytes"], one.__dict__["largest_bytes"] = rung._EFFORTS[-1], 64 * GIB, 2 * GIB
    problem.thorough, problem.footprint.live_bytes, problem.footprint.by_offsets = False, lambda n_bytes: n_bytes, False
    one.limit, one.none_faster = lambda budget: budget, lambda budget, than_s: floor(budget) >= than_s

    def alone(at: int) -> Alone:
        visited.append(at)
        given, above = curve(at), at + step_of(at, 4)
        candidate: Any = None if given is None else SimpleNamespace(step_s=given[0], live_bytes=given[1], host_short_bytes=lambda _: 0)
        least = None if given is not None else next((n for n in range(at, 64 * GIB, GIB // 16) if curve(n) is not None), None)
        return Alone(at, above, () if candidate is None else ((Recipe("all"), candidate),), (), (), least)

    one.alone = alone
    return search, visited


@pytest.fixture(autouse=True)
def uncompleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more fits than what a rung gives."""
    monkeypatch.setattr(ladder, "completed", lambda _problem, candidate, _budget, _above: candidate)
    monkeypatch.setattr(ladder, "taken_bytes", lambda candidate: candidate.live_bytes)
    monkeypatch.setattr(ladder, "told", lambda *_: None)


def planned(budget: int, curve: Curve, floor: Callable[[int], float] = lambda _: 0.0, **named: Any) -> tuple[float | None, list[int]]:
    """The seconds of the plan under the budget, and the rungs that were searched for it."""
    search, visited = searched(curve, floor, **named)
    search.run(budget)
    return None if search.best is None else search.best.step_s, visited


def full(seconds: Callable[[int], float | None]) -> Curve:
    """Rungs whose candidates take all of them."""
    return lambda at: None if (found := seconds(at)) is None else (found, at)


def test_every_rung_is_searched_that_no_bound_says_is_slower() -> None:
    given = {16: 1.0, 15: 1.0007, 14: 0.995, 13: 0.9957, 12: 0.997, 11: 0.5}
    taken, visited = planned(16 * GIB, full(lambda at: given.get(at // GIB, 3.0)), lambda budget: 0.6 if budget <= 11 * GIB else 0.0)
    assert taken == 0.5
    assert [at for at in visited if at <= 16 * GIB] == [n * GIB for n in (16, 15, 14, 13, 12, 11)]
    # A bound of what is completed up to the rung above.
    visited = planned(16 * GIB, full(lambda _: 1.0), lambda above: 1.0 if above <= 15 * GIB else 0.9)[1]
    assert [at for at in visited if at <= 16 * GIB] == [16 * GIB, 15 * GIB]


def test_below_the_last_rung_that_works_the_least_budget_is_searched() -> None:
    taken, visited = planned(12 * GIB, full(lambda at: 100.0 / at if at >= 9.5 * GIB else None))
    assert taken == 100.0 / (12 * GIB)
    assert [at for at in visited if at <= 12 * GIB] == [12 * GIB, 11 * GIB, 10 * GIB, 9 * GIB, int(9.5 * GIB)]
    assert planned(8 * GIB, full(lambda at: 1.0 if at >= 9 * GIB else None)) == (None, [8 * GIB])


def test_rungs_between_a_first_one_and_one_that_all_are_below() -> None:
    curve = full(lambda at: 100.0 / at)
    assert min(planned(16 * GIB, curve, first=12 * GIB)[1]) == 12 * GIB
    assert min(planned(16 * GIB, curve, first=12 * GIB + 1)[1]) == 12 * GIB
    taken, visited = planned(16 * GIB, curve, below=12 * GIB)
    assert taken == 100.0 / (11 * GIB) and max(visited) == 11 * GIB
    assert planned(8 * GIB, curve, first=12 * GIB) == (None, [])


def test_of_equals_that_of_the_largest_rung_within_the_budget_is_taken() -> None:
    search, _ = searched(lambda at: (1.0, at))
    search.run(16 * GIB)
    assert search.best.live_bytes == 16 * GIB


def test_a_candidate_of_a_larger_rung_that_takes_no_more_is_this_budgets_too() -> None:
    """Else a larger budget's plan would have the lower peak."""
    search, _ = searched(lambda at: (1.0, int(11.5 * GIB)) if at >= 13 * GIB else (2.0, at))
    search.run(12 * GIB)
    assert (search.best.step_s, search.best.live_bytes) == (1.0, int(11.5 * GIB))


def test_a_candidate_that_leaves_room_for_the_largest_that_could_stay_is_no_budgets() -> None:
    """A budget that it fits does not look for it so far up: a larger budget's plan would have the lower peak."""
    curve: Curve = lambda at: (1.0, 10 * GIB) if at >= 13 * GIB else (2.0, at)
    for budget in (10, 12, 13, 16, 30):
        assert planned(budget * GIB, curve)[0] == 2.0
    assert planned(12 * GIB, lambda at: (1.0, 10 * GIB) if at >= 11 * GIB else (2.0, at))[0] == 1.0


OF_RUNGS = {"min_size": len(RUNGS), "max_size": len(RUNGS)}


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from([1.0, 1.0, 0.999, 0.99, 0.9, 0.7]), **OF_RUNGS), st.lists(st.integers(0, GIB // 16) | st.integers(0, 4 * GIB), **OF_RUNGS),
    st.lists(st.sampled_from([1.0, 0.99, 0.5]), **OF_RUNGS), st.integers(0, 12), st.lists(st.integers(GIB, 64 * GIB), max_size=6))
def test_both_laws_hold_whatever_the_rungs_give(
    seconds: list[float], left: list[int], tightness: list[float], least: int, between: list[int]
) -> None:
    """And whatever true bound leaves out rungs. Some of what rungs give leaves room for things that they could have held."""
    taken = [at - less for at, less in zip(RUNGS, left, strict=True)]

    def curve(at: int) -> tuple[float, int] | None:
        number = sum(one <= at for one in RUNGS) - 1
        return (seconds[number], min(taken[number], at)) if number >= least else None

    # True: nothing that takes no more than a budget is faster.
    fastest = [min([s for s, n_bytes in zip(seconds, taken) if n_bytes <= budget], default=1.0) for budget in RUNGS]
    floors = [one * share for one, share in zip(fastest, tightness, strict=True)]

    def floor(budget: int) -> float:
        return min([one for one, at in zip(floors, RUNGS) if at < budget] + [floors[min(sum(at < budget for at in RUNGS), len(RUNGS) - 1)]])

    found = []
    for budget in sorted({*RUNGS, *between}):
        search, _ = searched(curve, floor)
        search.run(budget)
        if search.best is not None:
            found.append(search.best)
    for smaller, larger in zip(found, found[1:]):
        assert larger.step_s <= smaller.step_s
        assert larger.live_bytes >= smaller.live_bytes


def climbed(ways: list[list[float]], n_events: int) -> tuple[list[float], list[float]]:
    """The seconds of the recipes that one rung is searched with, and of those that are refined; a recipe stands for its seconds."""
    search: Any = OneRung(mock.Mock(), frozenset())
    search.__dict__["_effort"] = next(one for one in rung._EFFORTS if n_events <= one.most_events)
    recipes = [[Recipe("blocks", price=seconds) for seconds in way] for way in ways]
    tried, refined = list[float](), list[float]()

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
        search._climb(8 * GIB, 9 * GIB, 9 * GIB)
    return tried, refined


def test_the_fastest_recipes_of_a_rung_are_refined_where_they_come_within_a_fiftieth() -> None:
    """Three of a step of middling size, two of a larger one; the fastest whatever it gave."""
    ways = [[1.0], [1.01], [1.015], [1.019], [1.03]]
    assert climbed(ways, 5000)[1] == [1.0, 1.01, 1.015]
    assert climbed(ways, 7000)[1] == [1.0, 1.01]
    assert climbed([[1.0], [1.03]], 7000)[1] == [1.0]


def test_a_way_of_recipes_goes_on_behind_one_that_is_hardly_slower_in_a_step_of_middling_size() -> None:
    way = [1.0, 1.005, 0.99, 1.2, 0.9]
    assert climbed([way], 5000)[0] == [1.0, 1.005, 0.99, 1.2]
    assert climbed([way], 7000)[0] == [1.0, 1.005]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 32), st.integers(-16, 4)), min_size=2, max_size=16),
    st.lists(st.integers(0, 40), min_size=8, max_size=24))
def test_both_laws_hold_of_plans_at_offsets_whatever_they_take_there(plans: list[tuple[int, int]], budgets: list[int]) -> None:
    """Of plans that were estimated at more and more bytes, each faster than the one before, and take seven eighths of them or more."""
    estimated = [(15 * GIB + at * GIB // 4, more * GIB // 4) for at, more in sorted(plans)]
    of_plan = [
        SimpleNamespace(live_bytes=n_bytes, step_s=-i, taken=max(n_bytes + GIB + more, n_bytes - n_bytes // 8)) for i, (n_bytes, more) in enumerate(estimated)]

    def of(problem: Any, _searches: Any, budget: int) -> Chosen:
        fitting: list[Any] = [one for one in of_plan if one.live_bytes + GIB <= budget]
        if not fitting:
            raise PlanError("too little", of_plan[0].live_bytes + GIB - problem.context.device_budget_bytes)
        return Chosen(fitting[-1], budget, (), 0.0)

    found: list[Any] = []
    with (mock.patch.object(Chosen, "of", of), mock.patch.object(planner, "least_taken_bytes", lambda _, one: one.taken),
          mock.patch.object(Chosen, "lowered", lambda one, _: SimpleNamespace(simulation=SimpleNamespace(device_peak_bytes=one.candidate.taken)))):
        for budget in (16 * GIB + at * GIB // 4 for at in sorted(budgets)):
            footprint, context = SimpleNamespace(needed_bytes=lambda n_bytes: n_bytes + GIB, by_offsets=True, recording_bytes=None), SimpleNamespace(device_budget_bytes=budget)
            problem: Any = SimpleNamespace(footprint=footprint, context=context, than_s=float("inf"))
            searches: Any = [SimpleNamespace(ample_bytes=64 * GIB)]
            with contextlib.suppress(PlanError):
                chosen = planner._placed_within(problem, searches, budget)
                found.append(next(one.candidate for one in chosen if one.completed(problem) is not None))
    for smaller, larger in zip(found, found[1:]):
        assert larger.step_s <= smaller.step_s
        assert larger.taken >= smaller.taken

