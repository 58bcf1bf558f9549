"""A run that is stopped, or killed at any instant, and continued gives the bits of one that was not."""

from __future__ import annotations

import hashlib
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import crashing
import pytest
import yaml

from fxoffload.training import checkpoint
from fxoffload.training.config import TrainConfig
from fxoffload.training.loop import TrainResult, train

Settings = Callable[..., dict[str, object]]
Configure = Callable[..., TrainConfig]


def weights(result: TrainResult | dict[str, object]) -> dict[str, str]:
    """sha256 of every weight file of the last checkpoint."""
    path = Path(str(result["checkpoint"] if isinstance(result, dict) else result.checkpoint))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.glob("*.safetensors"))}


VARIANTS: dict[str, dict[str, object]] = {
    "full": {"schedule": {"name": "cosine", "warmup_steps": 2}, "max_grad_norm": 1.0, "gradient_accumulation": 2},
    "padded autocast": {"precision": "autocast", "data": {"packing": False, "seq_len": 24, "drop_last": False}},
    "bf16 sgd": {"precision": "bf16", "optimizer": {"name": "sgd", "args": {"momentum": 0.9}}},
    "lora": {"method": "lora", "lora": {"r": 2, "dropout": 0.1}, "dtype": "bf16", "precision": "autocast"},
    "dora": {"method": "lora", "lora": {"r": 2, "dora": True}},
    "qlora": {"method": "qlora", "lora": {"r": 2}, "precision": "bf16"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stopped_run_continues_to_the_same_bits(configure: Configure, tmp_path: Path, name: str) -> None:
    whole = train(configure(**VARIANTS[name], output_dir=str(tmp_path / "whole")))
    parts = configure(**VARIANTS[name], output_dir=str(tmp_path / "parts"))
    assert train(parts, max_steps=1).resumed_from is None
    train(parts, max_steps=4)
    resumed = train(parts)
    assert resumed.resumed_from == str(tmp_path / "parts" / "checkpoint-000004")
    assert resumed.losses == whole.losses
    assert weights(resumed) == weights(whole)


def test_random_weights_from_a_config_resume_too(configure: Configure, assets: Path, tmp_path: Path) -> None:
    changes = {"model": {"config": str(assets / "llama" / "config.json")}, "method": "lora", "lora": {"r": 2}}
    whole = train(configure(**changes, output_dir=str(tmp_path / "whole")))
    parts = configure(**changes, output_dir=str(tmp_path / "parts"))
    train(parts, max_steps=3)
    assert train(parts).losses == whole.losses


def test_evaluation_changes_no_training_loss(configure: Configure, tmp_path: Path) -> None:
    changes = {"eval": {"every": 2, "fraction": 0.02}}
    result = train(configure(**changes))
    rarely = train(configure(eval={"every": 6, "fraction": 0.02}, output_dir=str(tmp_path / "rarely")))
    assert [step for step, _ in result.eval_losses] == [2, 4, 6]
    assert result.losses == rarely.losses
    assert result.eval_losses[-1] == rarely.eval_losses[-1]


def test_other_data_under_an_old_checkpoint_is_refused(configure: Configure) -> None:
    train(configure(), max_steps=1)
    with pytest.raises(ValueError, match="was made with other data or data settings"):
        train(configure(data={"seed": 5}))


def test_a_fresh_start_among_checkpoints_is_refused(configure: Configure) -> None:
    train(configure(), max_steps=1)
    with pytest.raises(ValueError, match="resume: none, but .*checkpoint-000001 exists"):
        train(configure(resume="none"))


def test_a_named_damaged_checkpoint_is_an_error_that_names_the_file(configure: Configure) -> None:
    path = Path(str(train(configure(), max_steps=1).checkpoint))
    (path / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"resume: .*optimizer\.safetensors: 0 bytes instead of"):
        train(configure(resume=str(path)))


def reference(settings: Settings, tmp_path: Path, **changes: object) -> dict[str, object]:
    """The uninterrupted run's result, made in the same kind of process as the killed ones."""
    return finish(settings(output_dir=str(tmp_path / "reference"), **changes), tmp_path / "reference.json")


def finish(mapping: dict[str, object], out: Path) -> dict[str, object]:
    assert crashing.run(crashing.train_quietly, yaml.safe_dump(mapping), str(out)) == 0
    return json.loads(out.read_text())


def kill_and_compare(settings: Settings, tmp_path: Path, n_kills: int, seed: int) -> None:
    changes = {"max_steps": 60, "keep_last": 2, "schedule": {"name": "linear"}}
    expected = reference(settings, tmp_path, **changes)
    draw = random.Random(seed)
    mapping = settings(**changes)
    killed = 0
    while killed < n_kills:
        if crashing.run_and_kill(mapping, draw, longest_s=1.0):
            killed += 1
        else:  # it finished first: start over with what kills are left
            mapping = settings(output_dir=str(tmp_path / f"run{killed}"), **changes)
    result = finish(mapping, tmp_path / "resumed.json")
    assert result["losses"] == expected["losses"]
    assert weights(result) == weights(expected)


@pytest.mark.slow
def test_a_run_killed_at_random_instants_ends_in_the_same_bits(settings: Settings, tmp_path: Path) -> None:
    kill_and_compare(settings, tmp_path, n_kills=4, seed=0)


@pytest.mark.slow
def test_twenty_random_kills_end_in_the_same_bits(settings: Settings, tmp_path: Path) -> None:
    kill_and_compare(settings, tmp_path, n_kills=20, seed=1)


def die_at(settings: Settings, tmp_path: Path, number: int) -> int:
    """Dies at the `number`-th file operation of a two-step run, then checks what is left; the count of operations if it lived."""
    root = tmp_path / f"at{number}"
    mapping = settings(max_steps=2, keep_last=1, output_dir=str(root))
    count_file = tmp_path / "count"
    code = crashing.run(crashing.train_and_die_at_file_event, yaml.safe_dump(mapping), str(root), number, str(count_file))
    if code == 0:
        return int(count_file.read_text())
    assert code == -signal.SIGKILL
    visible = [path for path in root.glob("checkpoint-*")] if root.exists() else []
    assert [checkpoint.find_damage(path) for path in visible] == [None] * len(visible)
    return 0


def test_a_kill_inside_a_save_leaves_only_whole_checkpoints(settings: Settings, tmp_path: Path) -> None:
    total = die_at(settings, tmp_path, -1)
    assert total > 20
    for number in range(3, total, total // 6):
        die_at(settings, tmp_path, number)


@pytest.mark.slow
def test_a_kill_at_every_file_operation_leaves_only_whole_checkpoints(settings: Settings, tmp_path: Path) -> None:
    expected = reference(settings, tmp_path, max_steps=2)
    for number in range(1, die_at(settings, tmp_path, -1) + 1):
        die_at(settings, tmp_path, number)
        mapping = settings(max_steps=2, keep_last=1, output_dir=str(tmp_path / f"at{number}"))
        assert finish(mapping, tmp_path / "resumed.json")["losses"] == expected["losses"]


def test_a_file_size_limit_leaves_no_half_written_checkpoint(settings: Settings, tmp_path: Path) -> None:
    out = tmp_path / "error.txt"
    crashing.run(crashing.train_with_file_limit, yaml.safe_dump(settings()), 20_000, str(out))
    assert "checkpoint-000001: the checkpoint cannot be written: File too large" in out.read_text()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
