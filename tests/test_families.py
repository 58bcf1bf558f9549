from __future__ import annotations

import pytest
import transformers
from packaging.version import Version
from runs import FRACTIONS, Row, fault, rows
from zoo import FAMILIES, _bf16, _lora, llama

from fxoffload.testing.simulated_device import SimulatedDevice

# What CI runs of each device, without a limit and at the tightest budget: one family of every mechanism that no other test shows (test_soak
# has GPT-2, BERT, experts and convolutions on the simulated device). The rest is marked slow; `make soak` runs all.
_QUICK = {
    "cpu": ("t5",),
    "fxsim": ("qlora", "autocast"),
}


# Before, Qwen3-Next on a device that is no CPU has other bits under torch.compile's own eager backend than without it.
_OLD_QWEN3_NEXT = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="eager compiled has other bits than eager")


def families(device: str) -> list[object]:
    marks = {"qwen3_next": [_OLD_QWEN3_NEXT]} if device != "cpu" else {}
    quick = [pytest.param(name, (FRACTIONS[0], FRACTIONS[-1]), id=name, marks=marks.get(name, ())) for name in _QUICK[device]]
    slow = [pytest.param(name, FRACTIONS, id=f"{name}-all", marks=[pytest.mark.slow, *marks.get(name, ())]) for name in FAMILIES]
    return quick + slow


def check(found: list[Row], fractions: tuple[float, ...]) -> None:
    assert [row.fraction for row in found] == list(fractions)
    for row in found:
        assert not fault(row, found[0]), (fault(row, found[0]), row)


@pytest.mark.integration
@pytest.mark.parametrize(("family", "fractions"), families("cpu"))
def test_five_steps_are_bit_equal_to_plain_pytorch_at_every_budget(family: str, fractions: tuple[float, ...]) -> None:
    check(list(rows(family, "cpu", fractions=fractions)), fractions)


@pytest.mark.integration
@pytest.mark.parametrize(("family", "fractions"), families("fxsim"))
def test_five_steps_on_the_simulated_device_are_bit_equal_and_measure_what_was_predicted(
        family: str, fractions: tuple[float, ...], simulated_device: SimulatedDevice) -> None:
    check(list(rows(family, "fxsim", simulated_device, fractions)), fractions)


# PEFT's other ways to train a part of a model, beside those that are families.
_ADAPTERS = {
    "rslora": {"use_rslora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "down_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "dropout_and_bias": {"lora_dropout": 0.1, "bias": "lora_only"},
    "some_layers": {"layers_to_transform": [1], "target_modules": ["q_proj", "o_proj"]},
}


@pytest.mark.integration
@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("modules_to_save", "rslora", "embedding", "dropout_and_bias", "some_layers")])
def test_other_adapters_are_bit_equal_at_a_tight_budget(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "adapters", lambda: _lora(_bf16(llama(intermediate_size=512)), **_ADAPTERS[kind]))  # type: ignore[arg-type]
    check(list(rows("adapters", "cpu", fractions=(FRACTIONS[0], FRACTIONS[1]))), (FRACTIONS[0], FRACTIONS[1]))
