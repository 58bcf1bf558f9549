"""Checkpoints: whole or absent, verified, and exact."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_llama
from transformers import LlamaForCausalLM, get_scheduler

from fxoffload.training import checkpoint, tree
from fxoffload.training.checkpoint import Progress, Trained

CPU = torch.device("cpu")


def make_trained(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, dtype: torch.dtype = torch.float32) -> Trained:
    """A tiny model after two optimizer steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama()).to(dtype)
    chosen = optimizer(model.parameters(), lr=1e-2)
    schedule = get_scheduler("cosine", chosen, 1, 10)
    for _ in range(2):
        ids = torch.randint(0, 300, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        chosen.step()
        schedule.step()
        chosen.zero_grad()
    return Trained(model, chosen, schedule, CPU)


def progress(step: int = 2) -> Progress:
    return Progress(step, 2 * step, "data", "adamw", tuple(0.1 * i for i in range(step)), ((1, 0.3),))


def flat(value: object) -> dict[str, object]:
    tensors: tree.Tensors = {}
    return {"json": json.dumps(tree.encode(value, tensors, "x")), **{name: t.tolist() for name, t in tensors.items()}}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_optimizer_schedule_and_progress_come_back_exactly(tmp_path: Path, optimizer: type[torch.optim.Optimizer]) -> None:
    trained = make_trained(optimizer)
    path = checkpoint.save(tmp_path, trained, progress())
    fresh_optimizer = optimizer(trained.model.parameters(), lr=0.5)
    fresh = Trained(trained.model, fresh_optimizer, get_scheduler("cosine", fresh_optimizer, 1, 10), CPU)
    checkpoint.restore(path, fresh)
    assert flat(fresh.optimizer.state_dict()) == flat(trained.optimizer.state_dict())
    assert flat(fresh.scheduler.state_dict()) == flat(trained.scheduler.state_dict())
    assert checkpoint.load_progress(path) == progress()


def test_float32_moments_of_bf16_weights_keep_their_bits(tmp_path: Path) -> None:
    trained = make_trained(dtype=torch.bfloat16)
    first = trained.optimizer.param_groups[0]["params"][0]
    exact = torch.rand_like(first, dtype=torch.float32)
    trained.optimizer.state[first]["exp_avg"] = exact
    path = checkpoint.save(tmp_path, trained, progress())
    trained.optimizer.state[first]["exp_avg"] = torch.zeros_like(first)
    checkpoint.restore(path, trained)
    assert torch.equal(trained.optimizer.state[first]["exp_avg"], exact)


def test_every_random_generator_continues_where_it_was(tmp_path: Path) -> None:
    trained = make_trained()
    path = checkpoint.save(tmp_path, trained, progress())
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    checkpoint.restore(path, trained)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_saving_draws_no_random_number(tmp_path: Path) -> None:
    trained = make_trained()
    before = torch.get_rng_state()
    checkpoint.save(tmp_path, trained, progress())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_is_a_plain_model_folder_without_pickle(tmp_path: Path) -> None:
    trained = make_trained()
    path = checkpoint.save(tmp_path, trained, progress())
    assert not [file for file in path.iterdir() if file.suffix not in (".json", ".safetensors")]
    loaded = LlamaForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), trained.model.state_dict().values(), strict=True))


def damage(path: Path, how: str) -> None:
    if how == "truncate":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "flip":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncate", "flip", "remove"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    if (name, how) == ("manifest.json", "flip"):
        how = "truncate"  # its last byte is a line end
    trained = make_trained()
    older = checkpoint.save(tmp_path, trained, progress(2))
    newer = checkpoint.save(tmp_path, trained, progress(3))
    damage(newer / name, how)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.find_newest(tmp_path) == older
    assert f"{newer / name}" in caplog.text


def test_pruning_keeps_the_newest_complete_one_even_behind_damaged_ones(tmp_path: Path) -> None:
    trained = make_trained()
    paths = [checkpoint.save(tmp_path, trained, progress(step)) for step in (1, 2, 3)]
    damage(paths[2] / "state.json", "truncate")
    checkpoint.prune(tmp_path, 1)
    assert not paths[0].exists()
    assert checkpoint.find_newest(tmp_path) == paths[1]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    trained = make_trained()
    path = checkpoint.save(tmp_path, trained, progress())
    damage(path / "state.json", "truncate")
    assert checkpoint.save(tmp_path, trained, progress()) == path
    assert checkpoint.find_damage(path) is None
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with checkpoint.exclusive(tmp_path):
        with pytest.raises(ValueError, match="another process is training in"), checkpoint.exclusive(tmp_path):
            pass


def test_what_a_killed_save_left_is_cleared_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-000007.1").mkdir()
    (tmp_path / ".checkpoint-000007.1" / "model.safetensors").write_bytes(b"half")
    with checkpoint.exclusive(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_full_disk_is_one_error_and_leaves_nothing_behind(small_disk: Path) -> None:
    trained = make_trained()
    saved = []
    with pytest.raises(OSError, match="the checkpoint cannot be written: No space left on device; free some space") as caught:
        for step in range(1, 9):
            saved.append(checkpoint.save(small_disk, trained, progress(step)))
    assert caught.value.errno == errno.ENOSPC
    assert sorted(small_disk.iterdir()) == saved
    assert checkpoint.find_newest(small_disk) == saved[-1]


def test_a_read_only_folder_is_one_error(small_disk: Path) -> None:
    os.system(f"mount -o remount,ro {small_disk}")
    with pytest.raises(OSError, match="Read-only file system; choose another output_dir"):
        checkpoint.save(small_disk, make_trained(), progress())
    with pytest.raises(OSError, match="Read-only"), checkpoint.exclusive(small_disk / "new"):
        pass


def test_state_that_only_pickle_could_hold_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"optimizer\.state\.3\.fn: a function cannot be saved"):
        tree.encode({"state": {3: {"fn": damage}}}, {}, "optimizer")


def test_nested_state_survives_json() -> None:
    shared = torch.arange(3.0)
    value = {"a": (1, 2.5, None, True), 3: [shared, {"b": shared, "__x": float("inf")}], "n": 0.1 + 0.2}
    tensors: tree.Tensors = {}
    encoded = json.loads(json.dumps(tree.encode(value, tensors, "v")))
    assert flat(tree.decode(encoded, tree.for_safetensors(tensors))) == flat(value)
