"""`fxoffload train` and `fxoffload plan` with nothing replaced: a process of their own, the real compiler, budgets below the need."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from test_inspect import page_data
from test_resume import weights

import fxoffload
from fxoffload import cli
from fxoffload.training.config import LoraOptions, QuantizationOptions, TrainConfig
from fxoffload.training.loop import train
from fxoffload.training.model import lora_config, quantization_config

pytestmark = pytest.mark.integration
Settings = Callable[..., dict[str, object]]
Configure = Callable[..., TrainConfig]

ADAPTERS = {"method": "lora", "lora": {"r": 2, "targets": ["q_proj", "down_proj"]}}
RUNS: dict[str, dict[str, object]] = {
    "full, padded jsonl": {"device_budget": "240KiB"},
    "lora, packed text": {"device_budget": "240KiB", **ADAPTERS},
    "qlora, packed text": {"device_budget": "250KiB", **ADAPTERS, "method": "qlora", "precision": "bf16"},
}


def changes_of(name: str, assets: Path) -> dict[str, object]:
    padded = {"data": {"paths": str(assets / "text.jsonl"), "packing": False}}
    return {**RUNS[name], "max_steps": 4, "save_every": None} | (padded if "jsonl" in name else {})


def command(settings: dict[str, object], folder: Path) -> list[str]:
    """The command line that trains as `settings` say and writes out.json."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "fxoffload", "train", str(config), "--json", str(folder / "out.json")]


def needed_bytes(assets: Path, name: str) -> int:
    """The predicted peak where nothing has to move."""
    lora = None if "full" in name else lora_config(LoraOptions(r=2, targets=("q_proj", "down_proj")))
    packed = quantization_config(QuantizationOptions(), "bf16") if "qlora" in name else None
    free = fxoffload.plan(assets / "llama", (2, 32), device_budget="1GiB", machine="cpu", lora=lora, quantization=packed)
    return free.predicted.device_peak_bytes


@pytest.mark.slow  # The killed run below shows the same bits, of adapters alone; the others' budgets are kept in test_families.py.
@pytest.mark.parametrize("name", RUNS)
def test_training_under_half_the_needed_memory_gives_plain_pytorchs_losses(
        settings: Settings, configure: Configure, assets: Path, tmp_path: Path, name: str) -> None:
    changes = changes_of(name, assets)
    done = subprocess.run(command(settings(**changes), tmp_path), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    plain = train(configure(**changes | {"device_budget": None, "output_dir": str(tmp_path / "plain")}))
    assert result["losses"] == list(plain.losses)
    assert weights(result) == weights(plain)
    assert 0 < result["device_peak_bytes"] <= result["predicted_device_peak_bytes"] <= result["device_budget_bytes"]
    assert result["device_budget_bytes"] < 0.5 * needed_bytes(assets, name)
    assert len(result["step_s"]) == 4 and min(result["step_s"]) > 0 and result["tokens_per_s"] > 0


def test_a_killed_run_under_a_budget_continues_to_the_bits_of_an_uninterrupted_one(
        settings: Settings, configure: Configure, assets: Path, tmp_path: Path) -> None:
    changes = changes_of("lora, packed text", assets) | {"max_steps": 60, "save_every": 1}
    words = command(settings(**changes), tmp_path)
    first = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while first.poll() is None and not (tmp_path / "run" / "checkpoint-000002").exists():
            time.sleep(0.01)
    finally:
        first.kill()
    assert first.wait() == -signal.SIGKILL
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    result = json.loads((tmp_path / "out.json").read_text())
    assert 0 < len(result["step_s"]) < 60 and "checkpoint-0000" in result["resumed_from"]
    plain = train(configure(**changes | {"device_budget": None, "save_every": None, "output_dir": str(tmp_path / "plain")}))
    assert result["losses"] == list(plain.losses)
    assert weights(result) == weights(plain)


def plan_words(assets: Path, tmp_path: Path, budget: str, *more: str) -> list[str]:
    return ["plan", "--model", str(assets / "llama"), "--batch", "2", "--seq", "32", "--device-budget", budget, "--machine", "cpu",
            "--json", str(tmp_path / "plan.json"), *more]


def test_a_quantized_plan_has_the_contracts_numbers_and_a_page_with_a_timeline(
        assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, saved = tmp_path / "plan.html", tmp_path / "saved.json"
    more = ["--load-in", "4bit", "--lora", "r=16", "--html", str(page), "--save", str(saved)]
    assert cli.main(plan_words(assets, tmp_path, "300KiB", *more)) == 0, capsys.readouterr().err
    numbers = json.loads((tmp_path / "plan.json").read_text())
    predicted = fxoffload.Plan.load(saved).predicted
    assert numbers["fits"] is True and numbers["plan_s"] > 0
    assert 0 < numbers["device_peak_bytes"] == predicted.device_peak_bytes <= 300 * 1024
    assert (numbers["host_peak_bytes"], numbers["step_s"]) == (predicted.host_peak_bytes, predicted.step_s)
    assert numbers["tokens_per_s"] == 64 / numbers["step_s"] and numbers["n_decisions"] > 0
    (view,) = page_data(page)["views"]  # type: ignore[misc]
    assert view["peak_bytes"] == numbers["device_peak_bytes"] and len(view["points"]) > 100


def test_what_a_refused_plan_lacks_is_what_it_needs(assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(plan_words(assets, tmp_path, "100KiB", "--lora", "r=2")) == 1
    refused = json.loads((tmp_path / "plan.json").read_text())
    assert refused["fits"] is False and refused["shortfall_bytes"] > 0
    assert capsys.readouterr().err == f"fxoffload: {refused['reason']}\n"
    assert cli.main(plan_words(assets, tmp_path, str(100 * 1024 + refused["shortfall_bytes"]), "--lora", "r=2")) == 0
