"""How much more than is live a caching allocator at its limit must have where values lie as it puts them, and what its retries cost.

    PYTORCH_ALLOC_CONF=expandable_segments:True,large_segment_size_mb:N python bench/allocator_pages.py [--runs 24GiB:reordered,12GiB:bitwise]
        [--layers N] [--per N] [--lock FILE] [--out FILE]

Each run compiles the 8B LoRA step for a budget with plans that leave one byte in `--per` for holes, times it within the budget, and then
lowers the limit towards the bytes that are live at the peak until a step runs out of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from gpu_core import alone, batch, forget, lora_model, steps, write  # sets the allocator's environment before torch is imported

import torch

import fxoffload
from fxoffload import footprint
from fxoffload.sizes import parse_bytes

SHARES = (32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="24GiB:reordered,12GiB:bitwise")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--per", type=int, default=80)
    parser.add_argument("--lock")
    parser.add_argument("--out")
    chosen = parser.parse_args()
    footprint._HOLES_PER = chosen.per
    footprint.Footprint.planned = staticmethod(footprint.Footprint.of)  # type: ignore[method-assign]  # not by offsets
    rows = []
    for run in chosen.runs.split(","):
        budget, numerics = run.split(":")
        rows.append({"budget": budget, "numerics": numerics, "per": chosen.per, "allocator": os.environ.get("PYTORCH_ALLOC_CONF")})
        try:
            rows[-1] |= measured(chosen, budget, numerics)
        except fxoffload.PlanError as refusal:
            rows[-1]["refused"] = str(refusal)
        print(json.dumps(rows[-1]), flush=True)
        if chosen.out:
            write(chosen.out, rows)
        forget()


def measured(chosen: argparse.Namespace, budget: str, numerics: str) -> dict[str, Any]:
    model: Any = lora_model(chosen.layers, "cpu", torch.bfloat16)
    forget()
    fxoffload.compile(model, batch(4, 2048, "cpu"), device="cuda", device_budget=budget, numerics=numerics)
    total = torch.cuda.get_device_properties(0).total_memory
    data = batch(4, 2048, "cuda")
    found: dict[str, Any] = {"predicted_bytes": model.fxoffload.plan.predicted.device_peak_bytes, "limits": []}
    with alone(chosen.lock):
        try:
            steps(model, data, 2)
        except torch.OutOfMemoryError as error:
            return found | {"out_of_memory": str(error)[:400]}
        live = torch.cuda.max_memory_allocated()
        limits = [("budget", parse_bytes(budget))] + [(f"1 in {n}", live + live // n) for n in SHARES if live + live // n < parse_bytes(budget)]
        for name, limit in limits:
            torch.cuda.set_per_process_memory_fraction(limit / total)
            torch.cuda.empty_cache()
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            try:
                _, seconds, _ = steps(model, data, 5)
            except torch.OutOfMemoryError as error:
                found["limits"].append({"limit": name, "out_of_memory": str(error)[:400]})
                break
            retries = torch.cuda.memory_stats()["num_alloc_retries"] - before
            found["limits"].append({"limit": name, "bytes": limit, "step_s": statistics.median(seconds[1:]), "retries_per_step": retries / 5})
        torch.cuda.set_per_process_memory_fraction(1.0)
        _, seconds, _ = steps(model, data, 5)
        found |= {"live_bytes": live, "step_s_without_limit": statistics.median(seconds[1:])}
    model.fxoffload.close()
    return found


if __name__ == "__main__":
    main()
