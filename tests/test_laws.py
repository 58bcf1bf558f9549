"""Laws that every plan keeps, whatever the model and the budget: seeded draws over captured steps. FXOFFLOAD_LAWS_SEED repeats a run."""

from __future__ import annotations

import functools
import json
import os
import random
from dataclasses import replace
from importlib import resources
from typing import Any

import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from zoo import FAMILIES

import fxoffload
from fxoffload import planner, rung
from fxoffload import recipes as prices
from fxoffload.api import captured, planning_options
from fxoffload.buckets import GROUP_BYTES
from fxoffload.candidates import Candidate, Recomputation, completed, free_names, least_s, recomputed, settled, swept
from fxoffload.donation import Donated
from fxoffload.dry import model_without_weights
from fxoffload.errors import PlanError
from fxoffload.exact import solve_exactly
from fxoffload.ladder import Search, rungs_within, step_of
from fxoffload.least_map import least_taken_bytes
from fxoffload.machine import load_machine, machine_from
from fxoffload.optimizer_states import optimizer_states
from fxoffload.planner import Problem, Searches, Solution, solve
from fxoffload.planning import Budgets
from fxoffload.plans import SwapOut
from fxoffload.recipes import Recipe, decided, recipes, recipes_of_small
from fxoffload.session import Options, Session

pytestmark = pytest.mark.full_search

SEED = int(os.environ.get("FXOFFLOAD_LAWS_SEED", "3"))
# Family, whether copies overlap with compute, and how many times slower the link is than the machine file says.
KINDS = {"llama": ("llama", True, 10.0), "serial llama": ("llama", False, 1.0), "gpt2": ("gpt2", True, 3.0), "lora": ("lora", True, 3.0)}

# Budgets that are drawn: few in every run, more in `make soak`.
DRAWS = (2, pytest.param(9, marks=pytest.mark.slow))


@functools.cache
def problem(kind: str) -> Problem:
    """A captured step with what the planner is free to choose: frozen parameters may reside where there are some."""
    family, overlaps, slower = KINDS[kind]
    raw = json.loads(resources.files("fxoffload.machines").joinpath("cpu.json").read_text()) | {"overlaps": overlaps}
    for rate in raw["transfers"].values():
        if rate is not None:
            rate["per_s"] /= slower
    case = FAMILIES[family]()
    options = Options(torch.device("cpu"), device_budget_bytes=1 << 40, planning_only=True, states=optimizer_states("adamw"))
    session = Session(case.model, options, machine_from(raw, kind), None)
    session.router.capture((), dict(case.batch))
    captured, planning = session.captured, session.planning
    found = planning.problem(captured)
    session.close()
    return found


def under(kind: str, budget: int | None) -> Problem:
    return replace(problem(kind), context=replace(problem(kind).context, device_budget_bytes=budget))


@functools.cache
def searches(kind: str) -> Searches:
    """What all plans of a kind share."""
    return Searches()


@functools.cache
def range_of(kind: str) -> tuple[int, int]:
    """The least budget that plans and what everything takes at once."""
    with pytest.raises(PlanError) as refused:
        solve(under(kind, 1), searches(kind))
    return 1 + (refused.value.shortfall_bytes or 0), solve(under(kind, None), searches(kind)).simulation.device_peak_bytes


@functools.cache
def solved(kind: str, budget: int) -> Solution:
    return solve(under(kind, budget), searches(kind))


def budgets(kind: str, n: int) -> list[int]:
    """Budgets from the least on, some of them close to each other."""
    dice, (least, most) = random.Random(f"{SEED} {kind}"), range_of(kind)
    drawn = [dice.randint(least, int(most * 1.1)) for _ in range(n)]
    return sorted({least, least + 1, *drawn, *(int(one * 1.01) for one in drawn[: n // 3])})


@pytest.mark.integration
@pytest.mark.parametrize("n", DRAWS)
@pytest.mark.parametrize("kind", KINDS)
def test_more_memory_is_never_predicted_slower_and_less_never_has_a_higher_peak(kind: str, n: int) -> None:
    found = [(budget, solved(kind, budget).simulation) for budget in budgets(kind, n)]
    for (smaller, a), (larger, b) in zip(found, found[1:]):
        assert b.step_s <= a.step_s * (1 + 1e-9), (smaller, larger)
        assert a.device_peak_bytes <= b.device_peak_bytes, (smaller, larger)
    assert found[-1][1].step_s < found[0][1].step_s, "a law about plans that are all the same says nothing"


@pytest.mark.slow
@pytest.mark.integration
def test_a_large_step_is_never_predicted_slower_with_more_memory() -> None:
    """Not every recipe is tried on each of its rungs (`rung.Effort`)."""
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=4096, dtype=torch.bfloat16)
    lora, machine = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), load_machine("rtx3090")
    model = model_without_weights(config, lora, None)
    options = planning_options(model, machine, "3GiB", None, 0, "adamw", "auto", None, "reordered", (), None)
    with captured(model, (4, 2048), options, machine) as session:
        study, found = session.study, []
        assert Search(session.planning.problem(study.captured), frozenset()).one.is_large
        for gib in (3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 8, 9, 10):
            plan = study.plan(Budgets(int(gib * 2**30)))
            assert plan.predicted.device_peak_bytes <= gib * 2**30
            found.append(plan.predicted.step_s)
    for smaller, larger in zip(found, found[1:]):
        assert larger <= smaller * (1 + 1e-9), found
    assert found[-1] < 0.99 * found[0], "a law about plans that are all the same says nothing"


@pytest.mark.integration
def test_the_laws_hold_where_values_lie_at_offsets_too() -> None:
    """On the machine file of a GPU, no GPU needed: what a plan takes is known only once its values are placed."""
    one, known = placed_problem(), Searches()

    def planned(budget: int | None) -> Solution:
        return solve(replace(one, context=replace(one.context, device_budget_bytes=budget)), known)

    with pytest.raises(PlanError) as refused:
        planned(1)
    least = 1 + (refused.value.shortfall_bytes or 0)
    most = planned(None).simulation.device_peak_bytes
    dice = random.Random(SEED)
    found = []
    for budget in sorted((least, most, *(dice.randint(least, most) for _ in range(6)))):
        try:
            found.append((budget, planned(budget).simulation))
        except PlanError as error:
            assert not found and (error.shortfall_bytes or 0) > 0, "what fits a budget fits a larger one"
    assert len(found) > 5 and found[-1][1].step_s < found[0][1].step_s
    for (smaller, a), (larger, b) in zip(found, found[1:]):
        assert b.step_s <= a.step_s * (1 + 1e-9), (smaller, larger)
        assert a.device_peak_bytes <= b.device_peak_bytes <= larger, (smaller, larger)


@pytest.mark.integration
@pytest.mark.parametrize("thorough", (False, True), ids=("quick", "thorough"))
@pytest.mark.parametrize("middling", (False, True), ids=("as the largest", "as one of middling size"))
@pytest.mark.parametrize("kind", ("at offsets", "lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "serial llama", "gpt2"))))
def test_both_laws_hold_exactly_of_steps_searched_as_large_ones_are(
    kind: str, middling: bool, thorough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rung, "_EFFORTS", (replace(rung._EFFORTS[-2 if middling else -1], most_events=1 << 60),))
    one, known = replace(placed_problem() if kind == "at offsets" else problem(kind), thorough=thorough), Searches()

    def planned(budget: int | None, known: Searches = known) -> Solution:
        return solve(replace(one, context=replace(one.context, device_budget_bytes=budget)), known)

    with pytest.raises(PlanError) as refused:
        planned(1)
    least, most = 1 + (refused.value.shortfall_bytes or 0), planned(None).simulation.device_peak_bytes
    dice = random.Random(SEED)
    found = []
    for budget in sorted((least, int(most * 1.5), *(int(least * (most / least) ** dice.random()) for _ in range(8)))):
        try:
            found.append((budget, planned(budget)))
        except PlanError as error:
            assert kind == "at offsets" and not found and (error.shortfall_bytes or 0) > 0, "what fits a budget fits a larger one"
            continue
        if len(found) == 4:
            alone = planned(budget, Searches())
            assert (alone.decisions, alone.resident, alone.tried) == (found[-1][1].decisions, found[-1][1].resident, found[-1][1].tried)
    for (smaller, a), (larger, b) in zip(found, found[1:]):
        assert b.simulation.step_s + b.after_s <= (a.simulation.step_s + a.after_s) * (1 + 1e-12), (smaller, larger)
        assert a.simulation.device_peak_bytes <= b.simulation.device_peak_bytes <= larger, (smaller, larger)
    assert found[-1][1].simulation.step_s < found[0][1].simulation.step_s, "a law about plans that are all the same says nothing"


def placed_problem(hidden: int = 512, layers: int = 3, batch: tuple[int, int] = (4, 512), slower: float = 1.0) -> Problem:
    """A step whose values are large beside what a GPU's allocator needs for itself. `slower`: so many times the seconds of a copy to the device."""
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, vocab_size=16000,
        max_position_embeddings=2048, dtype=torch.bfloat16)
    raw = json.loads(resources.files("fxoffload.machines").joinpath("h200.json").read_text()) | {"overhead_bytes": 0}
    for rate in (raw["transfers"]["h2d_pinned"], raw["transfers"]["h2d_pageable"]):
        rate["per_s"] /= slower
        rate["seconds"] = [seconds * slower for seconds in rate["seconds"]]
    model, machine = model_without_weights(config), machine_from(raw, "h200")
    options = planning_options(model, machine, 1 << 40, None, 0, "adamw", "auto", None, "bitwise", (), None)
    with captured(model, batch, options, machine) as session:
        assert session.captured is not None
        one = session.planning.problem(session.captured)
    assert one.footprint.by_offsets
    return one


def is_told(one: Problem, found: Candidate) -> float:
    """What is told of a candidate before it is lowered, of what it takes at its offsets. Its seconds are those that it is chosen for."""
    simulation = planner._complete(one, found, None).simulation
    assert simulation.step_s == pytest.approx(found.step_s, rel=1e-9)
    return least_taken_bytes(one, found) / simulation.device_peak_bytes


@pytest.mark.integration
def test_a_candidate_takes_no_less_at_its_offsets_than_is_told_before_it_is_lowered() -> None:
    one, told = placed_problem(), []
    search = Search(one, frozenset())
    for eighths in range(8, 1, -1):
        search.run(search.ample_bytes * eighths // 8)
        if search.best is not None:
            told.append(is_told(one, search.best))
    assert len(told) > 3 and max(told) <= 1
    assert min(told) > 0.8, "a bound that tells next to nothing"


@pytest.mark.integration
def test_a_candidate_whose_copies_wait_in_the_end_takes_no_less_than_is_told() -> None:
    one, told = placed_problem(1024, 6, (4, 2048), 5.0), []
    search = Search(one, frozenset())
    for sixteenths in (16, 6, 5):
        search.run(search.ample_bytes * sixteenths // 16)
        assert search.best is not None
        told.append(is_told(one, search.best))
    assert max(told) <= 1
    assert min(told) > 0.8, "a bound that tells next to nothing"


@pytest.mark.integration
def test_a_thorough_search_is_asked_for_by_name_and_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    case, searched = FAMILIES["llama"](), list[bool]()
    solving = planner.attempts
    monkeypatch.setattr(planner, "attempts", lambda problem, known=None: searched.append(problem.thorough) or solving(problem, known))
    seconds = {}
    for search in ("quick", "thorough"):
        plan = fxoffload.plan(case.model, dict(case.batch), device_budget="1MiB", machine="cpu", search=search)
        seconds[search] = plan.predicted.step_s
    assert set(searched[:1]) == {False} and set(searched[-1:]) == {True}
    assert seconds["thorough"] <= seconds["quick"]


@pytest.mark.integration
@pytest.mark.parametrize("thorough", (False, True))
def test_trained_parameters_leave_where_the_step_and_the_optimizers_take_less(thorough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "TRAINED_SHARE", 1.0)
    least, most = range_of("lora")
    known, slow, total_s = Searches(), Searches(), []
    for budget in (least * 5 // 4, least * 3 // 2, most):
        one = replace(under("lora", budget), thorough=thorough)
        assert one.optimizer is not None
        trained = frozenset(name for name, _, _ in one.optimizer.trained)
        chosen, quick = solve(one, known), solve(under("lora", budget))
        assert chosen.after_s == one.after_s(chosen.resident & trained) > 0
        assert chosen.simulation.step_s + chosen.after_s <= quick.simulation.step_s + quick.after_s
        for residing in (trained, frozenset[str]()):
            alone = known.of(one, residing)
            alone.run(budget)
            assert alone.best is None or chosen.total_s <= (alone.best.step_s + one.after_s(residing)) * (1 + 1e-9)
        total_s.append(chosen.simulation.step_s + chosen.after_s)
        rates = {"host": {"fused_fp32": 1e3}, "device": {"fused_fp32": 1e12}}
        optimizer = replace(one.optimizer, machine=replace(one.machine, optimizer_params_per_s=rates))
        if budget > least * 5 // 4:
            assert not chosen.resident & trained and trained <= solve(replace(one, optimizer=optimizer), slow).resident
    assert total_s == sorted(total_s, reverse=True)


@pytest.mark.integration
@pytest.mark.parametrize("n", DRAWS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_fits_its_budget_and_what_does_not_fit_is_refused_by_what_would(kind: str, n: int) -> None:
    least, most = range_of(kind)
    for budget in budgets(kind, n):
        assert solved(kind, budget).simulation.device_peak_bytes <= budget
    dice = random.Random(SEED)
    for budget in (least - 1, *(dice.randint(1, least - 1) for _ in range(3))):
        with pytest.raises(PlanError, match="bytes short at") as refused:
            solve(under(kind, budget), searches(kind))
        assert budget + (refused.value.shortfall_bytes or 0) == least


@pytest.mark.integration
@pytest.mark.parametrize("large", (False, True), ids=("as small", "as large"))
@pytest.mark.parametrize("kind", ("serial llama", "lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gpt2"))))
def test_a_plan_is_the_same_whatever_budgets_were_searched_before(kind: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searched as small steps are, or as large ones: there what is tried depends on what was tried before under the same budget."""
    ascending, shared = budgets(kind, 2)[:4], Searches()
    if large:
        monkeypatch.setattr(rung, "_EFFORTS", rung._EFFORTS[-1:])
    alone = [solve(under(kind, budget)) for budget in ascending]
    for budget, one in reversed(list(zip(ascending, alone))):
        other = solve(under(kind, budget), shared)
        assert (one.decisions, one.resident, one.tried) == (other.decisions, other.resident, other.tried)
        assert (one.simulation.step_s, one.simulation.device_peak_bytes) == (other.simulation.step_s, other.simulation.device_peak_bytes)
    assert len(shared.found) <= 2, "budgets that were to share their searches did not"


@pytest.mark.integration
@pytest.mark.parametrize("kind", (*KINDS, "at offsets"))
def test_what_is_said_to_bind_without_a_scan_is_no_more_than_a_scan_says(kind: str) -> None:
    search = Search(placed_problem() if kind == "at offsets" else problem(kind), frozenset())
    assert search.ample_bytes / 2 < search.one._binding_bytes <= search.ample_bytes


@pytest.mark.integration
@pytest.mark.parametrize("kind", ("llama", "lora"))
def test_a_plan_is_the_same_in_whatever_order_parameters_are_named(kind: str) -> None:
    least, most = range_of(kind)
    one = under(kind, (least + most) // 2)
    other = replace(one, parameters=dict(reversed(one.parameters.items())))
    assert solve(one).decisions == solve(other).decisions


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_no_candidate_beats_the_bound_that_spares_others_from_being_tried(kind: str) -> None:
    least, most = range_of(kind)
    tight = 0
    for budget in (least + (most - least) // 4, (least + most) // 2, most):
        one = under(kind, budget)
        trained = one.pinned_to_device
        base = recomputed(one, Recipe("all"), decided(one, Recipe("all")), trained)
        for recipe in recipes(one):
            decisions = decided(one, recipe)
            made = recomputed(one, recipe, decisions, trained)
            bounds = least_s(one, made, budget), least_s(one, base, budget, decisions)
            fit = [c for c in swept(one, made, trained, budget) if not c.found.shortfall_bytes]
            for candidate in (*fit, *(settled(one, c, budget) for c in fit)):
                assert candidate.step_s >= max(bounds) * (1 - 1e-9), (budget, recipe)
                tight += candidate.step_s <= max(bounds) * 1.1
    assert tight, "a bound that nothing comes near spares nothing"


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_completed_with_more_memory_is_no_slower_and_holds_no_less(kind: str) -> None:
    least, most = range_of(kind)
    rung = (least + most) // 2
    one, changed = under(kind, rung), 0
    made = recomputed(one, Recipe("all"), decided(one, Recipe("all")), one.pinned_to_device)
    for candidate in swept(one, made, one.pinned_to_device, rung):
        if candidate.found.shortfall_bytes:
            continue
        before = candidate
        for budget in range(rung, int(rung * 1.25), rung // 20):
            after = completed(one, candidate, budget, int(rung * 1.25))
            assert after.step_s <= before.step_s * (1 + 1e-9) and before.live_bytes <= after.live_bytes <= budget
            assert len(after.found.loads) <= len(before.found.loads)
            changed += len(after.found.loads) < len(before.found.loads)
            before = after
    assert changed


@given(st.integers(1, 1 << 45), st.integers(2, 6))
def test_every_budget_has_the_rungs_of_the_smaller_ones(n_bytes: int, bits: int) -> None:
    first, second = (rung for rung, _ in zip(rungs_within(n_bytes, bits), range(2))) if n_bytes > 1 else (1, 0)
    assert first <= n_bytes < first + step_of(first, bits)
    if second:
        assert second + step_of(second, bits) == first
    assert next(rungs_within(24 << 30, 2)) == 24 << 30


@pytest.mark.integration
@pytest.mark.parametrize("donates", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_no_recipe_needs_less_than_is_said_of_all(kind: str, donates: bool) -> None:
    one = problem(kind)
    if donates:
        one = replace(one, context=replace(one.context, workspace=Donated(one.context.bounds)))
    least = _applied(one, Recipe("all")).least_of_any(one)
    assert least > 0
    for recipe in recipes_of_small(one):
        made = _applied(one, recipe)
        assert 1 + made.schedule.scan(1, resident=made.must).shortfall_bytes >= least, recipe


def _applied(one: Problem, recipe: Recipe) -> Recomputation:
    return recomputed(one, recipe, decided(one, recipe), frozenset())


@pytest.mark.integration
def test_where_one_op_alone_has_no_room_one_recipe_is_tried_and_the_refusal_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=32000, dtype=torch.bfloat16)
    model, machine = model_without_weights(config, None, None), load_machine("rtx4090")
    options = planning_options(model, machine, "1TiB", None, 0, "adamw", "auto", None, "bitwise", (), None)
    made: list[Recipe] = []

    def counted(problem: Problem, recipe: Recipe, *rest: Any) -> Recomputation:
        made.append(recipe)
        return recomputed(problem, recipe, *rest)

    monkeypatch.setattr(rung, "recomputed", counted)
    with captured(model, (2, 64), options, machine) as session:
        def refusal() -> tuple[int | None, int]:
            made.clear()
            with pytest.raises(PlanError) as refused:
                session.study.plan(replace(session.study.planning.budgets, device_bytes=100 << 20))
            return refused.value.shortfall_bytes, len(set(made))

        short, few = refusal()
        monkeypatch.setattr(rung.OneRung, "_none_lacks_less", lambda *_: False)
        session.study.searches.found.clear()
        assert refusal()[0] == short and few == 2 < len(set(made))


def test_free_names_are_frozen_parameters_alone() -> None:
    one = problem("lora")
    assert free_names(one) and not any(one.parameters[name].trainable for name in free_names(one))


@pytest.mark.integration
@pytest.mark.parametrize("kind", ("serial llama", pytest.param("gpt2", marks=pytest.mark.slow)))
def test_no_plan_beats_the_exact_bound_and_where_nothing_overlaps_the_exact_plan_reaches_it(kind: str) -> None:
    pytest.importorskip("scipy")
    least, most = range_of(kind)
    for budget, bucket_bytes in ((least + (most - least) // 4, 0), ((least + most) // 2, 0), ((least + most) // 2, GROUP_BYTES)):
        one = replace(under(kind, budget), trained_may_reside=False, bucket_bytes=bucket_bytes)
        exact = solve_exactly(one, 20)
        assert exact.timed_out == 0 and exact.best is not None and exact.n_groups > 50
        assert exact.bound_s <= min(solve(one).simulation.step_s, exact.best.step_s) * (1 + 1e-9)
        assert exact.best.live_bytes <= budget
        # The program does not choose buckets: with them its optimum is a bound, and no plan's seconds.
        if not one.machine.overlaps and not bucket_bytes:
            assert exact.best.step_s == pytest.approx(exact.bound_s, rel=2e-3)
            assert solve(one).simulation.step_s <= exact.best.step_s * 1.05


@pytest.mark.integration
@pytest.mark.parametrize("kind", ("serial llama", pytest.param("llama", marks=pytest.mark.slow), "lora"))
def test_a_pin_does_not_beat_the_free_plan(kind: str) -> None:
    """Predicted. Not by construction: the pinned search is another one, so these draws are all that is known."""
    dice, (least, most) = random.Random(SEED), range_of(kind)
    budget = (least + most * 2) // 3
    one, free_s = under(kind, budget), solved(kind, budget).simulation.step_s
    names = sorted(free_names(one)) if one.resident is None else []
    made = sorted(d.value for d in solved(kind, least).decisions if isinstance(d, SwapOut))
    pinned = [replace(one, pinned_to_host=frozenset(dice.sample(names, 1))) for _ in range(3 if names else 0)]
    pinned += [replace(one, pinned_to_device=frozenset(dice.sample(names, 1))) for _ in range(3 if names else 0)]
    for place in ("kept_values", "swapped_values", "recomputed_values"):
        pinned += [replace(one, context=replace(one.context, **{place: frozenset((name,))})) for name in dice.sample(made, min(2, len(made)))]
    assert pinned
    for number, constrained in enumerate(pinned):
        try:
            step_s = solve(constrained).simulation.step_s
        except PlanError:
            continue
        assert step_s >= free_s * (1 - 1e-9), number


@pytest.mark.integration
def test_values_that_are_nearly_free_to_make_are_made_again_where_memory_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is much cheaper than its copies in all blocks, and what is so in a part of them, which is all there was to choose from."""
    config = transformers.LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=24, num_key_value_heads=8, vocab_size=32000,
        dtype=torch.bfloat16)
    model = model_without_weights(config, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), None)
    machine = load_machine("rtx4090")
    options = planning_options(model, machine, "1TiB", None, 0, "adamw", "auto", None, "bitwise", (), None)
    with captured(model, (4, 2048), options, machine) as session:
        def planned(gib: int) -> float:
            return session.study.plan(replace(session.study.planning.budgets, device_bytes=gib << 30)).predicted.step_s

        found = {gib: planned(gib) for gib in (6, 8)}
        monkeypatch.setattr(prices, "_PRICES", (prices.MIDDLE, 1.0))
        with_two = {gib: planned(gib) for gib in found}
    assert all(found[gib] <= with_two[gib] for gib in found)
    assert found[6] < 0.98 * with_two[6]
