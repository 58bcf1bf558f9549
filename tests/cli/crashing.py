"""Training processes that die on purpose. Imported by fork server children, so it stays importable on its own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import yaml

from fxoffload.training import schema
from fxoffload.training.config import TrainConfig
from fxoffload.training.files import write_json
from fxoffload.training.loop import train

# Forked from a process that has only imported torch: a start costs milliseconds, and no thread pool is copied half.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["fxoffload.training.loop", "transformers.models.llama.modeling_llama"])
FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir")


def run_and_kill(settings: dict[str, object], draw: random.Random, longest_s: float) -> bool:
    """Whether a training process died of a SIGKILL sent after a random time of at most `longest_s`."""
    process = context.Process(target=train_quietly, args=(yaml.safe_dump(settings),))
    process.start()
    process.join(draw.uniform(0, longest_s))
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def run(target: Callable[..., None], *args: object) -> int:
    """The exit code of `target(*args)` in its own process; minus the signal's number if one ended it."""
    process = context.Process(target=target, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def train_quietly(text: str, out: str | None = None) -> None:
    """Trains as the YAML `text` says; the result goes to the file `out`."""
    torch.set_num_threads(1)
    result = train(schema.read(TrainConfig, yaml.safe_load(text)))
    if out is not None:
        write_json(Path(out), dataclasses.asdict(result))


def train_and_die_at_file_event(text: str, folder: str, number: int, count_file: str) -> None:
    """Trains and kills itself at the `number`-th file operation inside `folder`; counts them into `count_file`."""
    seen = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and any(isinstance(arg, (str, os.PathLike)) and folder in os.fspath(arg) for arg in args):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    train_quietly(text)
    Path(count_file).write_text(str(seen))


def train_with_file_limit(text: str, n_bytes: int, out: str) -> None:
    """Trains where no file may be larger than `n_bytes`; writes the OSError's text to `out`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))
    try:
        train_quietly(text)
    except OSError as error:
        Path(out).write_text(str(error))
