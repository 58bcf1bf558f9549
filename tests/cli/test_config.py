"""The YAML of `fxoffload train`: every mistake is one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxoffload.training import schema
from fxoffload.training.config import DataConfig, TrainConfig, load_config

MINIMAL = {"model": {"path": "m"}, "data": {"paths": "t.txt", "seq_len": 8, "batch_size": 2}, "device_budget": None}


def refusal(**changes: object) -> str:
    with pytest.raises(ValueError) as caught:
        schema.read(TrainConfig, MINIMAL | changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_minimal_file_has_the_documented_defaults() -> None:
    config = schema.read(TrainConfig, MINIMAL)
    assert config.data.paths == (Path("t.txt"),)
    assert (config.method, config.weight_dtype, config.resume, config.optimizer.name) == ("full", "fp32", "auto", "adamw")


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    assert refusal(optimiser={}) == "optimiser: unknown key; did you mean 'optimizer'?"
    assert refusal(optimizer={"weigth_decay": 1}) == "optimizer.weigth_decay: unknown key; did you mean 'weight_decay'?"


def test_a_missing_budget_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="device_budget: missing; write bytes, text like '24GiB', 'auto', or null"):
        schema.read(TrainConfig, {key: value for key, value in MINIMAL.items() if key != "device_budget"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_budget": "24 gigs"}, "device_budget: cannot read '24 gigs' as a size"),
        ({"device_budget": -1}, "device_budget: must not be negative"),
        ({"max_steps": 0}, "max_steps: must be at least 1"),
        ({"max_steps": True}, "max_steps: expected a whole number, got True"),
        ({"method": "lorra"}, "method: 'lorra' is not a choice; did you mean 'lora'?"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas: expected 2 values"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: expected a number, got 'fast'"),
        ({"model": {}}, "model: give exactly one of 'path'"),
        ({"data": {"paths": "t.txt", "seq_len": 8}}, "data.batch_size: missing"),
        ({"precision": "bf16", "dtype": "fp32"}, "dtype: fp32 contradicts precision bf16"),
        ({"save_every": 2}, "save_every: needs output_dir"),
        ({"eval": {"every": 2}}, "eval: give exactly one of 'paths' and 'fraction'"),
        ({"method": "qlora", "model": {"config": "c.json"}, "tokenizer": "t"}, "model.path: method qlora"),
        ({"data": 3}, "data: expected a mapping of keys, got 3"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(changes: dict[str, object], message: str) -> None:
    assert refusal(**changes).startswith(message)


def test_a_number_that_yaml_reads_as_text_is_a_number() -> None:
    assert schema.read(TrainConfig, MINIMAL | {"optimizer": {"lr": "1e-4"}}).optimizer.lr == 1e-4


def test_one_path_and_a_list_of_paths_are_both_accepted() -> None:
    data = schema.read(DataConfig, {"paths": ["a.txt", "b.jsonl"], "seq_len": 8, "batch_size": 1})
    assert data.paths == (Path("a.txt"), Path("b.jsonl"))


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2", ""])
def test_a_file_that_is_no_mapping_is_one_line_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="c.yaml: ") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
