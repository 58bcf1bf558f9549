"""What is reserved for live bytes, and budgets against what is free."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxoffload
from fxoffload.footprint import Footprint
from fxoffload.free import host_bytes
from fxoffload.machine import load_machine

CUDA = Footprint.of(load_machine("h200"))


@given(st.integers(0, 1 << 45))
def test_the_most_live_bytes_of_a_budget_need_no_more_and_one_byte_more_does(budget: int) -> None:
    live = CUDA.live_bytes(budget)
    assert CUDA.needed_bytes(live) <= budget < CUDA.needed_bytes(live + 1)


@given(st.integers(1, 1 << 45), st.integers(0, 1 << 40))
def test_what_is_taken_lies_between_need_and_limit(live: int, room: int) -> None:
    limit = CUDA.needed_bytes(live) + room
    assert CUDA.needed_bytes(live) <= CUDA.taken_bytes(live, limit) <= limit
    assert CUDA.taken_bytes(live, limit) <= -(-live * 21 // 20) + (22 << 20)


def test_bytes_are_exact_where_nothing_caches() -> None:
    exact = Footprint.of(load_machine("cpu"))
    assert (exact.needed_bytes(1001), exact.live_bytes(1001), exact.taken_bytes(1001, None)) == (1001, 1001, 1001)


def test_a_host_budget_above_what_is_free_is_refused_with_both_numbers() -> None:
    with pytest.raises(fxoffload.PlanError, match=r"host_budget of \d+ bytes .* is more than the \d+ bytes") as refusal:
        fxoffload.compile(nn.Linear(4, 4), torch.ones(2, 4), device="cpu", device_budget="1MiB", host_budget=1 << 60)
    assert refusal.value.shortfall_bytes is not None and refusal.value.shortfall_bytes > 0


def test_without_a_host_budget_a_reserve_stays_free() -> None:
    model = nn.Linear(1024, 1024)
    free_all = host_bytes(None, model)
    assert 0 < free_all
    assert host_bytes(free_all, model) == free_all
