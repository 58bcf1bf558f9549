from __future__ import annotations

import pytest
from runs import FRACTIONS, Row, fault, rows
from zoo import FAMILIES

from fxoffload.testing.simulated_device import SimulatedDevice

# What CI runs of each device; the rest is marked slow. `make soak` runs all.
_QUICK = {"cpu": ("llama", "gpt2", "bert", "qwen3_moe", "lora_bf16", "qlora"), "fxsim": ("llama", "gpt2", "bert")}


def families(device: str) -> list[object]:
    return [pytest.param(name, marks=[] if name in _QUICK[device] else [pytest.mark.slow]) for name in FAMILIES]


def check(found: list[Row]) -> None:
    assert len(found) == len(FRACTIONS)
    for row in found:
        assert not fault(row, found[0]), (fault(row, found[0]), row)


@pytest.mark.integration
@pytest.mark.parametrize("family", families("cpu"))
def test_five_steps_are_bit_equal_to_plain_pytorch_at_every_budget(family: str) -> None:
    check(list(rows(family, "cpu")))


@pytest.mark.integration
@pytest.mark.parametrize("family", families("fxsim"))
def test_five_steps_on_the_simulated_device_are_bit_equal_and_measure_what_was_predicted(
        family: str, simulated_device: SimulatedDevice) -> None:
    check(list(rows(family, "fxsim", simulated_device)))
