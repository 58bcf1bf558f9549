"""Which recipes of recomputation a search tries."""

from __future__ import annotations

import dataclasses
from unittest import mock

import peft
import pytest
import torch
import transformers

from fxoffload import candidates, rung
from fxoffload.api import captured, planning_options
from fxoffload.dry import model_without_weights
from fxoffload.machine import load_machine
from fxoffload.recipes import MIDDLE, Recipe, beside, in_parts
from fxoffload.study import Study


def ordered(blocks: int) -> list[Recipe]:
    return [Recipe("all"), *(Recipe("blocks", blocks, price) for price in (MIDDLE / 2, MIDDLE, 1.0))]


def test_beside_a_part_of_the_blocks_are_an_eighth_more_and_less() -> None:
    every = ordered(32)
    assert [one.blocks for one in in_parts(every)] == [8, 16, 24]
    assert [[near.blocks for near in beside(one, every)] for one in in_parts(every)] == [[12, 4], [20, 12], [28, 20]]
    assert all(near.price == MIDDLE for one in in_parts(every) for near in beside(one, every))


def test_nothing_is_beside_what_is_in_all_blocks_or_has_no_eighth() -> None:
    every = ordered(32)
    assert [beside(one, every) for one in every] == [[], [], [], []]
    assert [beside(one, ordered(4)) for one in in_parts(ordered(4))] == [[], [], []]
    assert beside(Recipe("all"), [Recipe("all"), Recipe("costly")]) == []


@pytest.mark.parametrize(("is_near", "fastest", "blocks"), [
    (False, 32, [24, 16, 8]),  # three quarters first, the others only where that is faster
    (True, 32, [8, 16, 24]),
    (True, 16, [8, 16, 24, 20, 12]),
    (True, 8, [8, 16, 12, 4]),  # three quarters lie beyond what is slower already
    (False, 24, [24, 16, 8, 28, 20]),
])
def test_parts_of_the_blocks_are_tried_from_a_quarter_up_where_the_best_step_is_near_its_bound(
    is_near: bool, fastest: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rung, "recipes", lambda _: ordered(32))
    monkeypatch.setattr(rung.OneRung, "_nears_its_bound", lambda *_: is_near)
    search = rung.OneRung(mock.Mock(), frozenset())
    search.__dict__["_effort"] = rung._EFFORTS[-1]
    tried = []
    for way in search._ways(0):
        for recipe in way:
            tried.append(recipe)
            if search.best is None or recipe == Recipe("blocks", fastest, MIDDLE):
                search.best = mock.Mock()
                search.best.recomputation.recipe = recipe
    assert tried[0] == Recipe("blocks", 32, MIDDLE)
    assert [one.blocks for one in tried if one.keep == "blocks" and one.price == MIDDLE][1:] == blocks


@pytest.mark.parametrize(("near", "seconds", "tried"), [
    (None, [5, 4, 3, 2, 3, 4], [0, 1, 2, 3, 4, 5]),
    (None, [2, 3, 4, 4, 3, 1], [0, 1, 5, 4]),  # all and none resident are faster than what lies between
    (3, [9, 9, 9, 2, 3, 4], [3, 4, 5, 2]),
    (3, [9, 9, 1, 2, 3, 2], [3, 4, 5]),
    (0, [2, 3, 9, 3, 4, 5], [0, 1, 5, 4, 3, 2]),
    (0, [None, None, 2, 3, 3, 4], [2, 3, 5, 4]),  # what does not fit is no candidate
    (0, [None, None, None, None, None, None], [5]),  # but for the one that lacks least
])
def test_a_large_step_tries_resident_sets_near_the_last_recipes_and_from_the_least(
    near: int | None, seconds: list[float | None], tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [frozenset(str(i) for i in range(at, 5)) for at in range(6)]

    def fitting(*args: object) -> mock.Mock | None:
        found = seconds[every.index(args[2])]  # type: ignore[arg-type]
        return mock.Mock(step_s=found or float("inf"), resident=args[2]) if found or args[4] else None

    monkeypatch.setattr(candidates, "residencies", lambda *_: every)
    monkeypatch.setattr(candidates, "_fitting", fitting)
    found = candidates.swept_near(mock.Mock(), mock.Mock(), frozenset(), 0, None if near is None else every[near])
    assert [every.index(one.resident) for one in found] == tried


@pytest.mark.slow
def test_a_large_step_near_its_bound_is_not_slower_with_more_memory() -> None:
    config = transformers.LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, vocab_size=128256,
        tie_word_embeddings=True, dtype=torch.bfloat16)
    machine = load_machine("h200")
    model = model_without_weights(config, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), None)
    options = planning_options(model, machine, "1TiB", None, 0, "adamw", "auto", None, "reordered", ())
    with captured(model, (4, 2048), options, machine) as session:
        budgets = (dataclasses.replace(session.study.planning.budgets, device_bytes=int(gib * 2**30)) for gib in (10.5, 14))
        small, large = (session.study.plan(one).predicted.step_s for one in budgets)
    assert small is not None and large is not None and large <= small


@pytest.mark.slow
def test_a_step_of_8b_is_faster_for_recipes_beside() -> None:
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        dtype=torch.bfloat16)
    machine = load_machine("h200")
    model = model_without_weights(config, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), None)
    options = planning_options(model, machine, "12GiB", None, 0, "adamw", "auto", None, "reordered", (), None, "inductor")
    with captured(model, (4, 2048), options, machine) as session:
        study = session.study
        with_them = study.plan().predicted
        with mock.patch.object(rung, "beside", return_value=[]):
            without = Study(study.planning, study.captured).plan().predicted
    assert with_them.device_peak_bytes <= 12 << 30
    assert with_them.step_s is not None and without.step_s is not None
    assert with_them.step_s < without.step_s * 0.99
