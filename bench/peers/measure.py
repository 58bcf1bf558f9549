"""One peer on one row, in this process: `run.py` starts it. What it measured, or the message of what stopped it, is a JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile
from traces import causes, events_of, overlap, write_compact

from peers.rows import ROWS
from peers.table import PEERS
from peers.task import Peer, Task, Training
from turns import alone

# Warm-up steps that are taken as the timed ones are, beside nobody.
_ALONE = 2
_PACKAGES = ("torch", "transformers", "peft", "fxoffload", "liger-kernel", "deepspeed", "triton")


def main() -> None:
    """Writes the row; an error is in it, and raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", required=True, choices=tuple(ROWS))
    parser.add_argument("--peer", required=True, choices=tuple(PEERS))
    parser.add_argument("--uncapped", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--trace", type=Path, help="traces one step more, on CUDA: a file for a compact form of it")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    row = ROWS[chosen.row].tiny if chosen.tiny else ROWS[chosen.row]
    task = Task(row, chosen.device, None if chosen.uncapped else row.cap_bytes)
    said: dict[str, Any] = {}
    try:
        said = measured(PEERS[chosen.peer], task, chosen.lock, chosen.trace)
    except BaseException as error:
        said = {"error": message(error)}
        raise
    finally:
        chosen.out.write_text(json.dumps(said))


def message(error: BaseException) -> str:
    """The error's type and text, and of what it was raised from, in a line."""
    told = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    return told if error.__cause__ is None else f"{told} From {message(error.__cause__)}"


def measured(peer: Peer, task: Task, lock: Path | None = None, trace: Path | None = None) -> dict[str, Any]:
    """The fields of the row. Memory is counted from the first step on: what loading needed is not in it. `trace`: where the trace of one
    step more goes, when all else is measured."""
    started = time.perf_counter()
    os.environ.update(peer.environment)
    with alone(lock, others=True):
        card = Card(task)
        training = peer.prepare(task)
        card.forget()
        prepare_s = time.perf_counter() - started
        say(f"prepared in {prepare_s:.1f} s")
        warm = max(task.row.warm, peer.warm)
        seconds, losses = taken(training.step, warm - _ALONE, card.synchronize)  # which may compile
    with alone(lock):
        more = taken(training.step, _ALONE + task.row.timed, card.synchronize)
        seconds, losses = seconds + more[0], losses + more[1]
        facts = dict(training.facts())
        last = task.row.warm + task.row.timed - 1  # of the steps that all peers take
        row = {
            "precision": training.precision, "warm": warm, "timed": task.row.timed,
            "step_s": statistics.median(seconds[warm:]), "step_s_all": seconds,
            "tokens_per_s": task.row.tokens / statistics.median(seconds[warm:]), "loss_first": losses[0], "loss_last": losses[last],
            "losses": losses, **card.peaks(facts.pop("pinned_bytes", 0)), "prepare_s": prepare_s, "facts": facts, "versions": versions(),
            "device": torch.cuda.get_device_name(0) if task.device == "cuda" else "cpu"}
        row |= traced(training.step, trace) if trace is not None and card.there else {}
        training.close()
    return row


def traced(step: Callable[[], torch.Tensor], compact: Path) -> dict[str, Any]:
    """Where the seconds of a traced step go, its optimizer's among them, and how much of the copies lies under kernels (`traces.py`)."""
    from fxoffload.machine import machine_for  # no peer has us in its process while it is measured

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "step.json"
        recorded.export_chrome_trace(str(path))
        events = events_of(path)
    write_compact(events, compact)
    return {"traced": causes(events) | {"overlap": overlap(events, machine_for(torch.device("cuda", 0)).channel_bytes_per_s)}}


def taken(step: Callable[[], torch.Tensor], n: int, synchronize: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Seconds and loss of every step."""
    seconds, losses = [], []
    for i in range(n):
        synchronize()
        started = time.perf_counter()
        loss = step()
        synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        say(f"step {i + 1} of {n}: {seconds[-1]:.4f} s, loss {losses[-1]:.4f}")
    return seconds, losses


class Card:
    """The device's memory: capped before anything is on it, and counted."""

    def __init__(self, task: Task) -> None:
        self.there = task.device == "cuda"
        if self.there and task.cap_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(task.cap_bytes / torch.cuda.get_device_properties(0).total_memory)

    def synchronize(self) -> None:
        if self.there:
            torch.cuda.synchronize()

    def forget(self) -> None:
        if self.there:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self, pinned_bytes: int) -> dict[str, int | None]:
        """Highest bytes on the device and in the host's memory; `pinned_bytes` beside what torch's own allocator page-locked."""
        host = {
            "host_rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # ru_maxrss: KiB on Linux
            "host_rss_bytes": psutil.Process().memory_info().rss}
        if not self.there:
            return {"reserved_bytes": None, "allocated_bytes": None, "allocator_retries": None, **host, "pinned_bytes": None}
        return {
            "reserved_bytes": torch.cuda.max_memory_reserved(), "allocated_bytes": torch.cuda.max_memory_allocated(),
            "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"], **host,
            "pinned_bytes": pinned_bytes + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)}


def versions() -> dict[str, str]:
    """Of the packages that are there."""
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return {name: found[name] for name in _PACKAGES if name in found} | {"torch": torch.__version__}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
