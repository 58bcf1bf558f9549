"""The command line: exit status, one-line errors, JSON fields. The core is a stand-in that keeps its contract."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import fxoffload
from fxoffload import cli
from fxoffload.cli.options import parse_lora
from fxoffload.effects import Tier
from fxoffload.errors import PlanError
from fxoffload.plans import GraphPlan, Plan, Prediction, Recompute, Reside
from fxoffload.training.config import LoraOptions


def make_plan() -> Plan:
    predicted = Prediction(1000, 2000, step_s=0.5, peak_node="loss", moved_bytes={"h2d": 64})
    graph = GraphPlan("train", (Recompute("relu"),), (), predicted)
    return Plan(4096, None, "cpu", "bitwise", (Reside("w", Tier.PAGEABLE, 64),), {"f": graph})


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """The keyword arguments of every call of fxoffload.plan, which accepts any budget of at least 1000 bytes."""
    calls: list[dict[str, object]] = []

    def plan(config: object, shape: tuple[int, int], **options: object) -> Plan:
        calls.append({"config": config, "shape": shape} | options)
        shortfall = 1000 - int(str(options["device_budget"]))
        if shortfall > 0:
            raise PlanError(f"does not fit:\nshort of {shortfall} bytes", shortfall)
        return make_plan()

    monkeypatch.setattr(fxoffload, "plan", plan)
    return calls


def plan_command(assets: Path, *more: str, budget: str = "4KiB") -> list[str]:
    model = str(assets / "llama" / "config.json")
    return ["plan", "--model", model, "--batch", "2", "--seq", "8", "--device-budget", budget, *more]


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, fxoffload.cli; fxoffload.cli.main(['--help']); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_plan_writes_the_contract_fields(assets: Path, planned: list[dict[str, object]], tmp_path: Path) -> None:
    out, saved = tmp_path / "plan.json", tmp_path / "saved.json"
    assert cli.main(plan_command(assets, "--json", str(out), "--save", str(saved), "--explain")) == 0
    numbers = json.loads(out.read_text())
    assert numbers.pop("plan_s") >= 0
    assert numbers == {
        "fits": True, "device_peak_bytes": 1000, "host_peak_bytes": 2000, "step_s": 0.5, "tokens_per_s": 32.0, "n_decisions": 2,
        "physical_limit_s": None,
    }
    assert Plan.load(saved) == make_plan()
    assert planned[0]["device_budget"] == 4096


def test_plan_hands_adapters_and_quantization_on(assets: Path, planned: list[dict[str, object]]) -> None:
    assert cli.main(plan_command(assets, "--lora", "r=4,targets=q_proj+v_proj,dora=true", "--load-in", "4bit")) == 0
    lora, quantization = planned[0]["lora"], planned[0]["quantization"]
    assert (lora.r, lora.lora_alpha, lora.target_modules, lora.use_dora) == (4, 8, {"q_proj", "v_proj"}, True)
    assert (quantization.load_in_4bit, quantization.bnb_4bit_use_double_quant) == (True, True)


def test_plan_hands_numerics_on_and_is_bitwise_unless_told(assets: Path, planned: list[dict[str, object]]) -> None:
    assert cli.main(plan_command(assets)) == 0
    assert cli.main(plan_command(assets, "--numerics", "reordered")) == 0
    assert [call["numerics"] for call in planned] == ["bitwise", "reordered"]
    assert cli.main(plan_command(assets, "--numerics", "sloppy")) == 2


def test_plan_hands_the_search_on_and_is_quick_unless_told(assets: Path, planned: list[dict[str, object]]) -> None:
    assert cli.main(plan_command(assets)) == 0
    assert cli.main(plan_command(assets, "--search", "thorough")) == 0
    assert [call["search"] for call in planned] == ["quick", "thorough"]
    assert cli.main(plan_command(assets, "--search", "endless")) == 2


def test_a_budget_that_does_not_fit_is_status_1_with_the_shortfall(
    assets: Path, planned: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert cli.main(plan_command(assets, "--json", str(out), budget="900")) == 1
    numbers = json.loads(out.read_text())
    assert (numbers["fits"], numbers["shortfall_bytes"], numbers["reason"]) == (False, 100, "does not fit: short of 100 bytes")
    assert capsys.readouterr().err == "fxoffload: does not fit: short of 100 bytes\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plam"], "No such command 'plam'"),
        (["plan"], "Missing option '--model'"),
        (["plan", "--model", "x", "--batch", "two"], "Invalid value for '--batch'"),
        (["plan", "--model", "/no", "--batch", "1", "--seq", "1", "--device-budget", "1"], "/no does not exist"),
        (["plan", "--model", "/no", "--batch", "1", "--seq", "1", "--device-budget", "1 lb"], "cannot read '1 lb' as a size"),
        (["train", "/no.yaml"], "/no.yaml: no such file"),
        (["inspect", "/no"], "/no: no such plan or dump folder"),
        (["diff", "/no", "/no"], "/no: no such plan or graph"),
        (["opt", "/no", "-p", "a"], "/no: no such graph"),
        (["check", "--disk-dir", "/no"], "--disk-dir: /no is not a folder"),
    ],
)
def test_bad_arguments_are_status_2_and_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_an_unknown_model_type_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lamma"}')
    assert cli.main(plan_command(tmp_path)[:2] + [str(tmp_path)] + plan_command(tmp_path)[3:]) == 2
    assert "lamma" in capsys.readouterr().err


def test_debug_shows_the_traceback_and_keeps_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "/no.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_train_writes_the_contract_fields(settings: Callable[..., dict[str, object]], tmp_path: Path) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "out.json"
    config.write_text(yaml.safe_dump(settings(data={"seq_len": 16})))
    assert cli.main(["train", str(config), "--max-steps", "3", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert len(result["losses"]) == len(result["step_s"]) == 3
    assert result["tokens_per_s"] > 0
    assert (result["device_budget_bytes"], result["predicted_device_peak_bytes"]) == (None, None)


def test_training_on_a_loss_that_is_not_finite_is_status_1(
    settings: Callable[..., dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings(optimizer={"name": "sgd", "lr": 1e38})))
    assert cli.main(["train", str(config)]) == 1
    assert "the loss is nan; lower optimizer.lr" in capsys.readouterr().err


def test_check_reports_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    assert cli.main(["check", "--json", str(out), "--disk-dir", str(tmp_path)]) == 0
    facts = json.loads(out.read_text())
    assert facts["disk_write_bytes_per_s"] > 0
    assert {"torch", "accelerator", "driver", "pinning_works", "memlock_soft_bytes", "evaluator_in_cpp", "bitsandbytes_cpu_works"} <= facts.keys()


def test_inspect_explains_plans_and_counts_memory_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_plan().save(tmp_path / "p.json")
    assert cli.main(["inspect", str(tmp_path / "p.json")]) == 0
    assert "device peak" in capsys.readouterr().out
    (tmp_path / "01-insert-release.ir").write_text("%a = fxo.wait %b\nfxo.release %a\nfxo.release %b\n")
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "release" in capsys.readouterr().out


def test_diff_of_plans_and_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_plan().save(tmp_path / "p.json")
    assert cli.main(["diff", str(tmp_path / "p.json"), str(tmp_path / "p.json")]) == 0
    assert capsys.readouterr().out == "equal\n"
    (tmp_path / "a.ir").write_text("x\n")
    (tmp_path / "b.ir").write_text("y\n")
    assert cli.main(["diff", str(tmp_path / "a.ir"), str(tmp_path / "b.ir")]) == 0
    assert "-x\n+y" in capsys.readouterr().out


def test_lora_options_are_read_or_refused_by_name() -> None:
    assert parse_lora("r=8,alpha=32") == LoraOptions(r=8, alpha=32)
    with pytest.raises(ValueError, match="--lora.alfa: unknown key; did you mean 'alpha'"):
        parse_lora("alfa=3")
