"""What keeps planning fast: nothing is made that will not run, the collector does not walk what stays, no walk per byte."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import FAMILIES

import fxoffload
from fxoffload.heap import heap_at_rest
from fxoffload.overlap import _first_with_room, _last_with_room

pytestmark = pytest.mark.unit


def test_a_plan_makes_no_code_and_a_compile_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("code was made")

    monkeypatch.setattr("fxoffload.session.compile_eager", refuse)
    case = FAMILIES["llama"]()
    assert fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="cpu").decisions
    with pytest.raises(AssertionError, match="code was made"):
        fxoffload.compile(case.model, case.batch, device="cpu", device_budget="1GiB")


def test_without_gradients_a_plan_makes_no_code_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.session.compile_eager", None)
    case = FAMILIES["llama"]()
    with torch.no_grad():
        plan = fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="cpu")
    assert [g.label for g in plan.graphs.values()] == ["forward"]


def test_a_full_collection_leaves_what_survives_out_of_the_next_one() -> None:
    frozen, callbacks = gc.get_freeze_count(), list(gc.callbacks)
    with heap_at_rest():
        gc.collect()
        before, kept = gc.get_freeze_count(), [[i] for i in range(1000)]
        gc.collect()
        assert gc.get_freeze_count() >= before + len(kept)
        with heap_at_rest():
            pass
        assert gc.callbacks != callbacks
    assert (gc.get_freeze_count(), gc.callbacks) == (frozen, callbacks)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_a_transfer_reaches_as_far_as_a_walk_event_by_event(free: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(free) - 1))
    end, n_bytes = data.draw(st.integers(first, len(free) - 1)), data.draw(st.integers(0, 3))
    start = end
    while start > first and free[start - 1] >= n_bytes:
        start -= 1
    until = first
    while until < end and free[until + 1] >= n_bytes:
        until += 1
    assert (_first_with_room(np.array(free), first, end, n_bytes), _last_with_room(np.array(free), first, end, n_bytes)) == (start, until)
