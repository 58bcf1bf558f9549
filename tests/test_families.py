from __future__ import annotations

import pytest
from runs import Row, rows
from zoo import FAMILIES

from fxoffload.testing.simulated_device import SimulatedDevice

# What CI runs of each device; the rest is marked slow. `make soak` runs all.
_QUICK = {"cpu": ("llama", "gpt2", "bert", "qwen3_moe", "lora_bf16", "qlora"), "fxsim": ("llama", "gpt2", "bert")}


def families(device: str) -> list[object]:
    return [pytest.param(name, marks=[] if name in _QUICK[device] else [pytest.mark.slow]) for name in FAMILIES]


def check(found: list[Row]) -> None:
    free = found[0]
    for row in found:
        if row.refused:
            assert row.op_alone_bytes is not None and row.op_alone_bytes > row.budget_bytes, row
            continue
        assert (row.losses_equal, row.gradients_equal, row.parameters_equal) == (True, True, True), row
        assert row.predicted_bytes is not None and row.predicted_bytes <= row.budget_bytes, row
        assert row is free or (row.decisions, row.moved_bytes) != (free.decisions, free.moved_bytes), f"nothing done for the budget: {row}"


@pytest.mark.integration
@pytest.mark.parametrize("family", families("cpu"))
def test_five_steps_are_bit_equal_to_plain_pytorch_at_every_budget(family: str) -> None:
    check(list(rows(family, "cpu")))


@pytest.mark.integration
@pytest.mark.parametrize("family", families("fxsim"))
def test_five_steps_on_the_simulated_device_are_bit_equal_and_measure_what_was_predicted(
        family: str, simulated_device: SimulatedDevice) -> None:
    found = list(rows(family, "fxsim", simulated_device))
    check(found)
    for row in found:
        if not row.refused:
            assert row.measured_bytes is not None and row.predicted_bytes is not None
            assert row.measured_bytes <= row.predicted_bytes <= 1.05 * row.measured_bytes, row
