"""Schedules that are derived by numbers beside those of the graphs themselves: the same bits."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import fields
from importlib import resources
from typing import Any

import numpy as np
import pytest
from zoo import FAMILIES, lora, problem_of

from fxoffload import native
from fxoffload.candidates import Recomputation, based, recomputed, residencies, scanned, scheduled
from fxoffload.derived import Base, Derived
from fxoffload.donation import Donated
from fxoffload.effects import Tier
from fxoffload.errors import VerifyError
from fxoffload.graph import is_random, name_of
from fxoffload.liveness import is_view, liveness, owner_of
from fxoffload.machine import machine_from
from fxoffload.numbers import Numbers, Rows
from fxoffload.planner import _complete
from fxoffload.plans import Recompute
from fxoffload.problem import Problem
from fxoffload.recipes import Recipe, decided, every_recipe, recipes_of_small
from fxoffload.spill import Scan

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler")

# Tuples (t5, mixtral, qwen3_next), views of views, adapters; on a GPU's machine file results take the place of operands.
CASES = {**{kind: FAMILIES[kind] for kind in ("llama", "gpt2", "lora", "mixtral", "qlora", "t5", "mamba")}, "dropout": lambda: lora(dropout=0.1)}
DRAW = ("gpt2", "t5")
KINDS = [
    *((kind, "cpu") for kind in ("llama", "gpt2", "lora", "mixtral", "t5")), *((kind, "h200") for kind in ("mamba", "lora", "qlora", "mixtral"))]


@functools.cache
def problem(kind: str, machine: str) -> Problem:
    """A captured step on that machine, with a link that is ten times slower than the machine file's."""
    raw = json.loads(resources.files("fxoffload.machines").joinpath(f"{machine}.json").read_text()) | {"overlaps": True}
    for rate in raw["transfers"].values():
        if isinstance(rate, dict):
            rate["per_s"] /= 10.0
    return problem_of(CASES[kind](), machine_from(raw, kind))


@functools.cache
def base(kind: str, machine: str, trained: frozenset[str]) -> Base:
    found = based(problem(kind, machine), trained)
    assert found is not None
    return found


def trained_of(one: Problem) -> frozenset[str]:
    return frozenset(name for name, p in one.parameters.items() if p.trainable)


def every(one: Problem) -> list[Recipe]:
    return list(dict.fromkeys([*every_recipe(one), *recipes_of_small(one), Recipe("costly"), Recipe("inputs")]))


def both(kind: str, machine: str, recipe: Recipe, trained: frozenset[str]) -> tuple[Recomputation, Recomputation] | None:
    """The recipe derived, and by its graph; None where it computes again what draws."""
    one = problem(kind, machine)
    decisions = decided(one, recipe, liveness(one.graph, one.context.bounds))
    derived = scheduled(one, decisions, trained, base(kind, machine, trained))
    if not isinstance(derived, Derived):
        drawing = {name_of(node) for node in one.graph.nodes if is_random(owner_of(node))}
        assert any(decision.value in drawing for decision in decisions if isinstance(decision, Recompute))
        return None
    return recomputed(one, recipe, decisions, trained, {}, derived), recomputed(one, recipe, decisions, trained, {})


def told(numbers: Numbers) -> dict[str, Any]:
    """All that they are, Storages by what they say."""
    found: dict[str, Any] = {"storages": [(s.name, s.n_bytes, s.tier, s.kind, s.is_input) for s in numbers.storages]}
    for one in fields(numbers)[1:]:
        value = getattr(numbers, one.name)
        found |= {f"{one.name}.at": value.at.tolist(), one.name: value.of.tolist()} if isinstance(value, Rows) else {
            one.name: value if isinstance(value, int) else (str(value.dtype), value.tolist())}
    return found


def named(found: object) -> object:
    """A list of what a scan decided, with names for Storages."""
    return [tuple(getattr(part, "name", part) for part in one) for one in found]  # type: ignore[attr-defined]


@pytest.mark.integration
@pytest.mark.parametrize("where", ("host", "device"))
@pytest.mark.parametrize("kind, machine", KINDS)
def test_every_recipe_derived_is_the_one_of_its_graph(kind: str, machine: str, where: str) -> None:
    one = problem(kind, machine)
    trained = trained_of(one) if where == "device" else frozenset[str]()
    n_nodes = len(base(kind, machine, trained).schedule.live.nodes)
    n_clones = set()
    for recipe in every(one):
        pair = both(kind, machine, recipe, trained)
        if pair is None:
            continue
        fast, slow = pair
        assert told(fast.schedule.numbers) == told(slow.schedule.numbers)
        assert (fast.rates.event_s, fast.rates.sink_s, fast.rates.looked_up) == (slow.rates.event_s, slow.rates.sink_s, slow.rates.looked_up)
        a, b = fast.needs, slow.needs
        assert (a.forward, a.backward, a.issue_s, a.ahead_s, a.kept, a.makings, a.saved_bytes) == (
            b.forward, b.backward, b.issue_s, b.ahead_s, b.kept, b.makings, b.saved_bytes)
        again = frozenset(kept.name for kept in b.kept[::2])
        most = slow.schedule.scan(None).peak_bytes
        assert [a.least_s(most * i // 10, more) for i in range(12) for more in (frozenset(), again)] == [
            b.least_s(most * i // 10, more) for i in range(12) for more in (frozenset(), again)]
        x, y = fast.schedule, slow.schedule
        assert np.array_equal(x.donable_bytes, y.donable_bytes) and np.array_equal(x.workspace, y.workspace)
        assert (x.position, x.n_events, x.inputs.keys()) == (y.position, y.n_events, y.inputs.keys())
        assert {s.name for s in x.mergeable} == {s.name for s in y.mergeable}
        for resident in residencies(one, trained):
            assert x.ground(resident).fixed_bytes == y.ground(resident).fixed_bytes
            assert x.least_bytes(x.ground(resident)) == y.least_bytes(y.ground(resident))
        n_clones.add(len(y.live.nodes) - n_nodes)
    assert len(n_clones) > (0 if kind in DRAW else 2), "recipes that are all alike prove little"


@pytest.mark.integration
@pytest.mark.parametrize("kind, machine", KINDS)
def test_what_is_made_when_it_is_asked_for_is_the_graphs(kind: str, machine: str) -> None:
    one, pair = problem(kind, machine), both(kind, machine, Recipe("all" if kind in DRAW else "costly"), frozenset())
    assert pair is not None
    fast, slow = (each.schedule for each in pair)
    name = {s: i for x in (fast, slow) for i, s in enumerate(x.numbers.storages)}

    def by_number(value: Any) -> Any:
        if isinstance(value, dict):
            return {by_number(k): by_number(v) for k, v in value.items()}
        return [by_number(item) for item in value] if isinstance(value, (list, tuple)) else name.get(value, value)

    for x, y in zip(fast.events, slow.events, strict=True):
        assert by_number([x.index, x.reads, x.makes, x.workspace_bytes, x.own_bytes]) == by_number([y.index, y.reads, y.makes, y.workspace_bytes, y.own_bytes])
    for resident in residencies(one, frozenset()):
        x, y = fast.ground(resident), slow.ground(resident)
        assert by_number([*x._read]) == by_number([*y._read])
        assert {name[s] for s in x.returned} == {name[s] for s in y.returned} and x.border == y.border
    assert tuple(fast.live.first) == fast.numbers.storages and fast.live.border == slow.live.border
    assert by_number([fast.live.reads, fast.live.makes, fast.live.uses]) == by_number([slow.live.reads, slow.live.makes, slow.live.uses])


@pytest.mark.integration
@pytest.mark.parametrize("kind, machine", KINDS)
def test_what_is_found_on_numbers_is_lowered_as_what_is_found_on_the_graph(kind: str, machine: str) -> None:
    one, n_full = problem(kind, machine), 0
    for recipe in (Recipe("all"), Recipe("costly"), recipes_of_small(one)[-1]):
        pair = both(kind, machine, recipe, frozenset())
        if pair is None:
            continue
        fast, slow = pair
        most = one.footprint.needed_bytes(slow.schedule.scan(None).peak_bytes) + one.fixed_bytes
        ends = residencies(one, frozenset())[0], residencies(one, frozenset())[-1]
        for resident, share in itertools.product(ends, (0.5, 0.8, 1.5, 3.0)):
            found = [scanned(one, each, resident, int(most * share), 0.0) for each in (fast, slow)]
            a, b = found
            assert (a.step_s, a.live_bytes, a.found.shortfall_bytes, a.found.worst) == (b.step_s, b.live_bytes, b.found.shortfall_bytes, b.found.worst)
            assert [s.name for s in a.found.live_at_worst] == [s.name for s in b.found.live_at_worst]
            if a.found.shortfall_bytes:
                continue
            n_full += 1
            for x, y in zip(a.found.lists, b.found.lists, strict=True):
                assert named(x) == named(y)
            again = Scan(evaluated=Scan(a.found.lists).evaluated(fast.schedule.table), numbers=a.found)  # type: ignore[arg-type]
            assert named(again.loads) == named(b.found.loads)
            x, y = (_complete(one, each, None) for each in found)
            assert (x.decisions, x.simulation.device_peak_bytes, x.simulation.step_s, x.estimated_s) == (
                y.decisions, y.simulation.device_peak_bytes, y.simulation.step_s, y.estimated_s)
            assert [str(node.target) for node in x.lowered.nodes] == [str(node.target) for node in y.lowered.nodes]
    assert n_full > (0 if kind in DRAW else 2)


@pytest.mark.integration
def test_a_graph_that_is_not_what_was_derived_is_refused() -> None:
    one = problem("llama", "cpu")
    decisions = [decided(one, recipe, liveness(one.graph, one.context.bounds)) for recipe in (Recipe("all"), Recipe("costly"))]
    other = scheduled(one, decisions[1], frozenset())
    schedule = base("llama", "cpu", frozenset()).derived(decisions[0], lambda: other.graph, one.context.bounds)
    with pytest.raises(VerifyError, match="derived by numbers"):
        assert schedule is not None and schedule.live


@pytest.mark.integration
def test_the_steps_compared_have_what_is_hard_to_derive() -> None:
    seen = {"views": 0, "tuples": 0, "given": 0, "spared": 0, "lookups": 0}
    for kind, machine in KINDS:
        one = problem(kind, machine)
        nodes = one.graph.nodes
        seen["views"] += sum(is_view(node) for node in nodes)
        seen["tuples"] += sum(isinstance(node.meta.get("val"), (tuple, list)) for node in nodes)
        workspace = one.context.workspace
        if isinstance(workspace, Donated):
            pairs = [pair for recipe in (Recipe("all"), Recipe("costly")) if (pair := both(kind, machine, recipe, frozenset())) is not None]
            given = [derived.schedule.workspace for derived, _ in pairs]
            seen["given"] += sum(int((one < 0).sum()) for one in given)
            seen["spared"] += len({int(one.sum()) for one in given}) > 1
        seen["lookups"] += any(p.home is not Tier.DEVICE for p in one.parameters.values())
    assert all(seen.values()), seen


@pytest.mark.integration
def test_what_draws_is_computed_again_by_the_graph_alone() -> None:
    one = problem("dropout", "cpu")
    assert any(is_random(node) for node in one.graph.nodes)
    found = based(one, frozenset())
    assert found is not None
    live, drawn = liveness(one.graph, one.context.bounds), set()
    for recipe in every(one):
        decisions = decided(one, recipe, live)
        schedule, by_graph = scheduled(one, decisions, frozenset(), found), scheduled(one, decisions, frozenset())
        drawn.add(isinstance(schedule, Derived))
        assert told(schedule.numbers) == told(by_graph.numbers)
    assert drawn == {True, False}
