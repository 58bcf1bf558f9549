"""Where the seconds of one training step of 8B shape go on a CUDA card: kernels, copies, and the compute stream's idle time by cause.

    python bench/where.py [--layers N] [--budget 24GiB] [--numerics bitwise] [--executor eager] [--plain] [--out FILE]

One step is traced by torch's profiler. A gap is time in which no kernel runs. Its cause is read from the launch of the kernel that ends
it: launched after the gap began, the host was late ("host"); launched before, the kernel waited for an event of another stream ("copy").
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_core import batch, forget, lora_model, write  # sets the allocator's environment before torch is imported

import torch
from torch.profiler import ProfilerActivity, profile

import fxoffload
from fxoffload.sizes import parse_bytes

# A kernel that starts this soon after the one before it left no gap, only the card's own pause between kernels.
PAUSE_US = 3.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget", default="24GiB")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--numerics", choices=("bitwise", "reordered"), default="bitwise")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch, everything on the card, no limit")
    parser.add_argument("--limited", action="store_true", help="cap the allocator at the budget, as compile does")
    parser.add_argument("--trace", help="a folder for the trace itself")
    parser.add_argument("--out")
    chosen = parser.parse_args()
    model = lora_model(chosen.layers, "cuda" if chosen.plain else "cpu", torch.bfloat16)
    forget()
    if not chosen.plain:
        fxoffload.compile(model, batch(chosen.batch, chosen.length, "cpu"), device="cuda", device_budget=chosen.budget, numerics=chosen.numerics,
                          executor=chosen.executor)
    if not chosen.limited:
        torch.cuda.set_per_process_memory_fraction(1.0)
    data = batch(chosen.batch, chosen.length, "cuda")
    for _ in range(3):
        step(model, data)
    seconds = min(step(model, data) for _ in range(4))
    budget = None if chosen.plain else parse_bytes(chosen.budget)
    row = {"budget_bytes": budget, "numerics": None if chosen.plain else chosen.numerics, "executor": chosen.executor, "limited": chosen.limited, "step_s": seconds,
           "reserved_bytes": torch.cuda.max_memory_reserved(), **traced(model, data, chosen.trace)}
    print(json.dumps(row, indent=1))
    if chosen.out:
        write(chosen.out, [row])


def step(model: Any, data: Any) -> float:
    """Seconds of one forward and backward."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    model(**data).loss.backward()
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def traced(model: Any, data: Any, folder: str | None) -> dict[str, Any]:
    """What one traced step says."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        wall = step(model, data)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(folder or scratch) / "step.json"
        recorded.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    return {"traced_wall_s": wall, **causes(events)}


def causes(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Busy seconds per kind of work, and the gaps between kernels by cause and by the kernel that ends them."""
    launched = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    busy = {"kernels_s": _sum(kernels), "n_kernels": len(kernels)}
    for direction in ("HtoD", "DtoH"):
        busy[f"{direction}_s"] = _sum([c for c in copies if direction in c["name"]])
    gaps: Counter[str] = Counter()
    longest: list[tuple[float, str, str, float]] = []
    end = kernels[0]["ts"]
    first = kernels[0]["ts"]
    for kernel in kernels:
        gap = kernel["ts"] - end
        if gap > PAUSE_US:
            launch = launched.get(kernel["args"].get("correlation"))
            late = launch is None or launch["ts"] + launch["dur"] > end
            cause = "host" if late else "copy"
            gaps[cause] += gap
            longest.append((round(gap), cause, kernel["name"][:80], round((end - first) / 1e3, 2)))
        elif gap > 0:
            gaps["pause"] += gap
        end = max(end, kernel["ts"] + kernel["dur"])
    host = Counter[str]()
    starts = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    for call in starts:
        host[call["name"]] += call["dur"]
    return {**busy, "gaps_s": {k: v / 1e6 for k, v in gaps.items()}, "longest_gaps_us": sorted(longest, reverse=True)[:40],
            "runtime_calls_s": {k: round(v / 1e6, 4) for k, v in host.most_common(12)},
            "kernels_by_name_s": [(k, round(v / 1e6, 4)) for k, v in _by_name(kernels).most_common(30)]}


def _by_name(kernels: list[dict[str, Any]]) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for kernel in kernels:
        seconds[kernel["name"][:100]] += kernel["dur"]
    return seconds


def _sum(events: list[dict[str, Any]]) -> float:
    return sum(e["dur"] for e in events) / 1e6


if __name__ == "__main__":
    main()
