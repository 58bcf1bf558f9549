"""The evaluator in C++ beside the functions that state its rules: the same bits."""

from __future__ import annotations

import functools
import json
import logging
import random
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zoo import FAMILIES, problem_of

from fxoffload import native
from fxoffload.buckets import bucketed
from fxoffload.candidates import Recomputation, free_names, packed_first, recomputed, residencies
from fxoffload.fill import filled
from fxoffload.liveness import liveness
from fxoffload.machine import machine_from
from fxoffload.overlap import just_in_time, overlapped, schedule_s, stalls_s, used_bytes
from fxoffload.problem import Problem
from fxoffload.recipes import Recipe, decided
from fxoffload.spill import Scan, Schedule

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")

KINDS = {"llama": 10.0, "gpt2": 3.0, "lora": 30.0, "mixtral": 3.0}
RECIPES = (Recipe("all"), Recipe("costly"), Recipe("blocks", 2))


@functools.cache
def problem(kind: str, dispatch_s: float) -> Problem:
    """A captured step on a machine that issues ops in so many seconds, with a link so many times slower than the machine file's."""
    raw = json.loads(resources.files("fxoffload.machines").joinpath("cpu.json").read_text()) | {"overlaps": True, "dispatch_s": dispatch_s or None}
    for rate in raw["transfers"].values():
        if rate is not None:
            rate["per_s"] /= KINDS[kind]
    return problem_of(FAMILIES[kind](), machine_from(raw, kind))


@functools.cache
def made(kind: str, recipe: Recipe, dispatch_s: float) -> tuple[Problem, Recomputation]:
    one = problem(kind, dispatch_s)
    return one, recomputed(one, recipe, decided(one, recipe, liveness(one.graph, one.context.bounds)), frozenset())


def in_python(schedule: Schedule) -> Schedule:
    """The Schedule of the same Storages without the evaluator's table."""
    other = replace(schedule)
    other.__dict__["table"] = None
    return other


def told(scan: Scan) -> tuple[Any, ...]:
    """All that a scan says. In which order stays are listed says nothing."""
    stays = sorted(scan.stays, key=lambda stay: (stay.first, stay.last, stay.storage.name))
    return (*(tuple(one) for one in (scan.loads, scan.spills, scan.sinks, stays)), scan.peak_bytes, scan.peak_index, scan.shortfall_bytes,
            scan.worst, scan.live_at_worst)


@pytest.mark.integration
@pytest.mark.parametrize("dispatch_s", (0.0, 2e-6))
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_both_evaluators_say_the_same_of_every_step_of_the_way(kind: str, recipe: Recipe, dispatch_s: float) -> None:
    one, recomputation = made(kind, recipe, dispatch_s)
    schedule, plain, dice = recomputation.schedule, in_python(recomputation.schedule), random.Random(f"{kind} {recipe}")
    assert schedule.table is not None and plain.table is None
    most = schedule.scan(None).peak_bytes
    names = sorted(storage.name for storage in schedule.live.first if not storage.is_input)
    crossing = [n for n in names if dice.random() < 0.02]
    n_short = n_full = n_buckets = n_filled = 0
    for resident in (*residencies(one, frozenset()), frozenset(dice.sample(sorted(free_names(one)), len(free_names(one)) // 3))):
        ground, rates = recomputation.ground(resident), recomputation.rates_with(resident)
        for share, kept, swapped in ((1.0, (), ()), (0.6, names[:3], ()), (0.45, (), crossing), (0.3, (), ()), (0.2, (), ())):
            budget = ground.fixed_bytes + int(max(most - ground.fixed_bytes, 0) * share)
            arguments = budget, frozenset(kept), frozenset(swapped), resident
            fast, slow = schedule.scan(*arguments), plain.scan(*arguments)
            assert told(fast) == told(slow)
            assert told(schedule.scan(*arguments, to_the_end=False)) == told(plain.scan(*arguments, to_the_end=False))
            if fast.shortfall_bytes:
                n_short += 1
                continue
            n_full += 1
            room = budget - ground.fixed_bytes
            (fast, fast_used), (slow, slow_used) = overlapped(schedule, fast, room, rates), overlapped(plain, slow, room, rates)
            assert told(fast) == told(slow) and np.array_equal(fast_used, slow_used)
            for limit in (1 << 12, 1 << 16):
                (grouped, fast_taken), (other, slow_taken) = bucketed(schedule, fast, fast_used, limit), bucketed(plain, slow, slow_used, limit)
                n_buckets += len({load.bucket for load in other.loads} - {None})
                assert told(grouped) == told(other) and np.array_equal(fast_taken, slow_taken)
                assert np.array_equal(used_bytes(schedule, grouped), used_bytes(plain, other))
                assert schedule_s(schedule, grouped, rates) == schedule_s(plain, other, rates)
                assert list(stalls_s(schedule, grouped, rates).items()) == list(stalls_s(plain, other, rates).items())
                assert told(just_in_time(schedule, grouped, rates)) == told(just_in_time(plain, other, rates))
                for more in (room, room + most // 8, 2 * most):
                    given = rates, more, max(more, room + most // 4), free_names(one) - resident, frozenset(swapped)
                    for from_buckets in (True, False):
                        kept_fast, kept_slow = filled(schedule, grouped, fast_taken, *given, from_buckets), filled(plain, other, slow_taken, *given, from_buckets)
                        n_filled += kept_slow.found is not other
                        assert told(kept_fast.found) == told(kept_slow.found)
                        assert (kept_fast.resident, kept_fast.used_bytes) == (kept_slow.resident, kept_slow.used_bytes)
                        assert schedule_s(schedule, kept_fast.found, rates) == schedule_s(plain, kept_slow.found, rates)
                        taken = used_bytes(plain, kept_slow.found)
                        assert np.array_equal(used_bytes(schedule, kept_fast.found), taken)
                        n_bytes = int(taken.max()) + sum(plain.inputs[name].n_bytes for name in kept_slow.resident)
                        assert n_bytes <= kept_slow.used_bytes and (from_buckets or n_bytes == kept_slow.used_bytes)
    assert n_short and n_full and n_buckets and n_filled, "what does not happen is not compared"


@pytest.mark.integration
def test_a_scan_is_the_same_when_it_goes_through_lists() -> None:
    _, recomputation = made("llama", RECIPES[1], 0.0)
    schedule = recomputation.schedule
    found = schedule.scan(schedule.scan(None).peak_bytes // 2)
    assert schedule.table is not None and found.loads and found.spills
    again = Scan(found.lists)
    assert told(Scan(evaluated=again.evaluated(schedule.table)))[:4] == told(found)[:4]
    assert found.spilled_bytes == sum(spill.storage.n_bytes for spill in found.spills)


@pytest.mark.unit
def test_without_a_compiler_plans_are_made_in_python_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    monkeypatch.setattr(native.Path, "home", lambda: tmp_path)
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "fxoffload"):
            assert native.library() is None and native.library() is None
    finally:
        native._library.cache_clear()
    assert [record.message for record in caplog.records] == [
        "plans of large models take several times as long, and are the same: the evaluator in C++ cannot be built (no C++ compiler was found)"]


@pytest.mark.unit
def test_a_build_that_fails_says_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no program\n")
    monkeypatch.setattr(native, "_SOURCES", (broken,))
    monkeypatch.setattr(native.Path, "home", lambda: tmp_path)
    native._library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "fxoffload"):
            assert native.library() is None
    finally:
        native._library.cache_clear()
    assert "broken.cpp" in caplog.text
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.unit
def test_the_switch_leaves_the_evaluator_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library() is not None
    monkeypatch.setenv(native.SWITCH, "1")
    assert native.library() is None


@pytest.mark.unit
def test_the_evaluator_compiles_without_a_warning(tmp_path: Path) -> None:
    options = [*native._OPTIONS, "-Wall", "-Wextra", "-Werror", *map(str, native._SOURCES), "-o", str(tmp_path / "out.so")]
    compiler = native._compiler()
    assert compiler is not None
    done = subprocess.run([compiler, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_both_evaluators_pack_alike(kind: str, recipe: Recipe) -> None:
    one, fast = made(kind, recipe, 0.0)
    names = sorted(storage.name for storage in fast.schedule.live.first if not storage.is_input)
    crossing = frozenset(random.Random(kind).sample(names, len(names) // 20))
    most, n_found, n_kept = one.footprint.needed_bytes(fast.schedule.scan(None).peak_bytes) + one.fixed_bytes, 0, 0
    for context in (one.context, replace(one.context, kept_values=frozenset(names[:3])), replace(one.context, swapped_values=crossing)):
        problem = replace(one, context=context)
        for share in (0.1, 0.3, 0.5, 0.8, 1.2):
            slow = replace(fast, schedule=in_python(fast.schedule), grounds=fast.grounds.copy(), gaps={})
            pairs = zip(packed_first(problem, fast, int(most * share)), packed_first(problem, slow, int(most * share)), strict=True)
            for a, b in pairs:
                n_found, n_kept = n_found + 1, n_kept + len(a.single.spills)
                assert a.resident == b.resident and told(a.single) == told(b.single) and told(a.found) == told(b.found)
                assert (a.step_s, a.live_bytes) == (b.step_s, b.live_bytes)
    assert n_found > 5 and n_kept


@pytest.mark.integration
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_both_evaluators_need_as_much_at_least(kind: str, recipe: Recipe) -> None:
    one, recomputation = made(kind, recipe, 0.0)
    schedule, names = recomputation.schedule, sorted(storage.name for storage in recomputation.schedule.live.first)
    found = set()
    for resident in residencies(one, frozenset()):
        for kept in (frozenset[str](), frozenset(names[::7])):
            for spared in (None, schedule.donable_bytes):
                ground = schedule.ground(resident)
                found.add(schedule.least_bytes(ground, kept, spared))
                assert schedule.least_bytes(ground, kept, spared) == in_python(schedule).least_bytes(ground, kept, spared)
    assert len(found) > 1
