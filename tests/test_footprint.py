"""What is reserved for live bytes, and budgets against what is free."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxoffload
from fxoffload.footprint import Footprint
from fxoffload.free import host_bytes
from fxoffload.machine import load_machine
from fxoffload.testing.simulated_device import SimulatedDevice

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


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def test_an_automatic_device_budget_is_what_is_free_less_what_libraries_keep_and_is_logged(
    simulated_device: SimulatedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    machine = dataclasses.replace(load_machine("cpu"), overhead_bytes=5000)
    simulated_device.set_capacity(simulated_device.memory_allocated() + 200_000)
    with caplog.at_level(logging.INFO, "fxoffload"):
        model = fxoffload.compile(small(), torch.ones(2, 64), device="fxsim", device_budget="auto", machine=machine)
    (line,) = [r.getMessage() for r in caplog.records if "auto" in r.getMessage()]
    assert "195000 bytes" in line and "200000 bytes" in line and "less 5000" in line
    assert model.fxoffload.plan.device_budget_bytes == 195_000
    model(torch.ones(2, 64).to("fxsim")).sum().backward()
    model.fxoffload.close()


def test_an_automatic_device_budget_of_nothing_is_refused(simulated_device: SimulatedDevice) -> None:
    machine = dataclasses.replace(load_machine("cpu"), overhead_bytes=5000)
    simulated_device.set_capacity(simulated_device.memory_allocated() + 5000)
    with pytest.raises(fxoffload.PlanError, match="'auto' leaves nothing: 5000 bytes .* less 5000"):
        fxoffload.compile(small(), torch.ones(2, 64), device="fxsim", device_budget="auto", machine=machine)


def test_a_device_budget_above_what_is_free_is_refused_with_both_numbers(simulated_device: SimulatedDevice) -> None:
    simulated_device.set_capacity(simulated_device.memory_allocated() + 200_000)
    with pytest.raises(fxoffload.PlanError, match="device_budget of 200001 bytes .* more than the 200000 bytes") as refusal:
        fxoffload.compile(small(), torch.ones(2, 64), device="fxsim", device_budget=200_001)
    assert refusal.value.shortfall_bytes == 1
    fxoffload.compile(small(), torch.ones(2, 64), device="fxsim", device_budget=200_000).fxoffload.close()
