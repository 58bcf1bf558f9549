"""A tiny model folder, tokenizer and text, shared by all tests of the command line and of training."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pydoc_data.topics import topics
from tiny import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from fxoffload.training import schema
from fxoffload.training.config import TrainConfig

TEXT = "\n\n".join(topics[name] for name in sorted(topics))[:30_000]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt, text.jsonl, tokenizer/ and llama/ (random weights, dropout on)."""
    folder = tmp_path_factory.mktemp("assets")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    lines = (json.dumps({"text": part}) for part in TEXT.split("\n\n"))
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_llama()).save_pretrained(folder / "llama")
    return folder


@pytest.fixture
def settings(assets: Path, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """settings(key=value, ...): the mapping of a small plain-PyTorch run; data=... is merged, everything else replaced."""

    def build(**changes: object) -> dict[str, object]:
        data = {"paths": str(assets / "text.txt"), "seq_len": 32, "batch_size": 2} | dict(changes.pop("data", {}))
        base = {
            "model": {"path": str(assets / "llama")}, "tokenizer": str(assets / "tokenizer"), "data": data, "device": "cpu",
            "device_budget": None, "optimizer": {"lr": 1e-2}, "max_steps": 6, "save_every": 1,
            "output_dir": str(tmp_path / "run"),
        }
        return base | changes

    return build


@pytest.fixture
def configure(settings: Callable[..., dict[str, object]]) -> Callable[..., TrainConfig]:
    """configure(key=value, ...): the same as a TrainConfig."""
    return lambda **changes: schema.read(TrainConfig, settings(**changes))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 600 KiB: two checkpoints of the tiny model fit, not three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root; test_a_file_size_limit_leaves_no_half_written_checkpoint covers the path")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads on a busy machine wait for each other at every operator of a model this small."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
