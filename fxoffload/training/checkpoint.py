"""Checkpoints that are complete or invisible.

A checkpoint is the folder `checkpoint-000123/`: weights as safetensors (`save_pretrained` of the model, or of its adapters),
`optimizer.safetensors`, `state.json`, and `manifest.json`, written last, with every file's size and sha256. It is written under a
hidden name, brought to the disk, and renamed, so that a process killed at any instant leaves either all of it or nothing under
the final name. Readers take only a folder whose manifest holds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fxoffload.training import files, rng, tree

log = logging.getLogger(__name__)

MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "optimizer.safetensors"
FORMAT = "fxoffload-checkpoint-1"
_NAME = re.compile(r"^checkpoint-(\d{6,})$")
_HIDDEN = ".checkpoint-"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after `step` optimizer steps; `data` is the fingerprint of the batches that `batches_seen` counts."""

    step: int
    batches_seen: int
    data: str
    optimizer: str
    losses: tuple[float, ...]
    eval_losses: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Trained:
    """What a checkpoint holds besides Progress."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    device: torch.device


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Keeps other training processes out of the folder `root`, which is created. Raises ValueError if one is in it, OSError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / ".lock").open("w")
    except OSError as error:
        raise _write_error(root, error) from error
    with lock:  # the kernel drops the lock with the process, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"output_dir: another process is training in {root}") from None
        _remove_leftovers(root)
        yield


def save(root: Path, trained: Trained, progress: Progress) -> Path:
    """The new checkpoint's folder in `root`, complete and on the disk.

    Raises OSError, one line, if it cannot be written (disk full, read-only folder); nothing of it is left then.
    """
    final = root / f"checkpoint-{progress.step:06d}"
    hidden = root / f"{_HIDDEN}{progress.step:06d}.{os.getpid()}"
    try:
        hidden.mkdir()
        _write_contents(hidden, trained, progress)
        _write_manifest(hidden)
        _publish(hidden, final)
    except (OSError, SafetensorError) as error:
        raise _write_error(final, error) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return final


def find_newest(root: Path) -> Path | None:
    """The newest complete checkpoint in `root`, its hashes verified; damaged ones are skipped with a warning."""
    for path in _listed(root):
        problem = find_damage(path)
        if problem is None:
            return path
        log.warning("skipping damaged checkpoint: %s", problem)
    return None


def find_damage(path: Path, hashes: bool = True) -> str | None:
    """What is wrong with the checkpoint `path`, naming the file; None if its manifest holds (without `hashes`: sizes only)."""
    manifest = path / MANIFEST
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
        entries = [(str(entry["name"]), int(entry["size"]), str(entry["sha256"])) for entry in recorded["files"]]
        known = recorded["format"] == FORMAT
    except OSError as error:
        return f"{manifest}: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{manifest}: not a manifest (damaged or truncated)"
    if not known:
        return f"{manifest}: format {recorded['format']!r} is not {FORMAT!r}"
    problems = (_file_damage(path / name, size, digest if hashes else None) for name, size, digest in entries)
    return next((problem for problem in problems if problem is not None), None)


def load_progress(path: Path) -> Progress:
    """The Progress in checkpoint `path`."""
    record = json.loads((path / STATE).read_text(encoding="utf-8"))["progress"]
    losses = tuple(record.pop("losses"))
    evals = tuple((int(step), float(loss)) for step, loss in record.pop("eval_losses"))
    return Progress(losses=losses, eval_losses=evals, **record)


def restore(path: Path, trained: Trained) -> None:
    """Puts optimizer, schedule and every random generator where checkpoint `path` left them (weights: `build_model`)."""
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    tensors = load_file(path / TENSORS)
    _restore_optimizer(trained.optimizer, tree.decode(state["optimizer"], tensors))
    trained.scheduler.load_state_dict(tree.decode(state["scheduler"], tensors))  # type: ignore[arg-type]
    rng.restore(state["rng"], tensors, trained.device)


def prune(root: Path, keep_last: int | None) -> None:
    """Removes the oldest complete checkpoints of `root` beyond `keep_last` (None: keeps all); never the newest complete one."""
    if keep_last is None:
        return
    complete = [path for path in _listed(root) if find_damage(path, hashes=False) is None]
    for path in complete[max(keep_last, 1) :]:
        _remove(path)


def _write_contents(folder: Path, trained: Trained, progress: Progress) -> None:
    _save_weights(trained.model, folder)
    plain_rng, tensors = rng.capture(trained.device)
    state = {
        "progress": asdict(progress),
        "optimizer": tree.encode(trained.optimizer.state_dict(), tensors, "optimizer"),
        "scheduler": tree.encode(trained.scheduler.state_dict(), tensors, "scheduler"),
        "rng": plain_rng,
    }
    save_file(tree.for_safetensors(tensors), folder / TENSORS)
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def _save_weights(model: torch.nn.Module, folder: Path) -> None:
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]  # "auto" asks the hub
    else:
        model.save_pretrained(folder)  # type: ignore[operator]


def _write_manifest(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = []
    for path in paths:
        files.sync(path)
        entries.append({"name": str(path.relative_to(folder)), "size": path.stat().st_size, "sha256": files.sha256(path)})
    files.write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
    for inner in sorted(path for path in folder.rglob("*") if path.is_dir()):
        files.sync(inner)
    files.sync(folder)


def _publish(hidden: Path, final: Path) -> None:
    if final.exists():  # a damaged one, or the same step of a run resumed from an earlier checkpoint
        _remove(final)
    os.rename(hidden, final)
    files.sync(final.parent)


def _remove(path: Path) -> None:
    # renamed first: a kill in the middle of the removal must not leave half a checkpoint under its final name
    trash = path.with_name(f"{_HIDDEN}removed.{path.name}.{os.getpid()}")
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_HIDDEN}*"):
        shutil.rmtree(path, ignore_errors=True)


def _listed(root: Path) -> list[Path]:
    """Folders with a checkpoint's name, the largest step first."""
    if not root.is_dir():
        return []
    steps = {path: int(match.group(1)) for path in root.iterdir() if (match := _NAME.match(path.name))}
    return sorted(steps, key=lambda path: -steps[path])


def _file_damage(path: Path, size: int, digest: str | None) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path}: {found} bytes instead of {size} (truncated or changed)"
        if digest is not None and files.sha256(path) != digest:
            return f"{path}: its sha256 is not the manifest's (damaged or changed)"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: object) -> None:
    assert isinstance(saved, dict)
    optimizer.load_state_dict(saved)
    # load_state_dict casts states to their parameter's dtype: 32-bit moments of bf16 weights would lose their low bits
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in saved["state"].items():
        state = optimizer.state[ordered[index]]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


def _write_error(path: Path, error: OSError | SafetensorError) -> OSError:
    if isinstance(error, OSError):
        code, reason = error.errno or errno.EIO, error.strerror or str(error)
    else:  # safetensors reports the operating system's error as text: "... (os error 28)"
        match = re.search(r"os error (\d+)", str(error))
        code = int(match.group(1)) if match else errno.EIO
        reason = os.strerror(code) if match else str(error)
    advice = {errno.ENOSPC: "; free some space or lower keep_last", errno.EROFS: "; choose another output_dir",
              errno.EACCES: "; choose another output_dir"}.get(code, "")
    return OSError(code, f"{path}: the checkpoint cannot be written: {reason}{advice}")
