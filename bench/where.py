"""Where the seconds of one training step of 8B shape go on a CUDA card: kernels, copies, and the compute stream's idle time by cause.

    python bench/where.py [--layers N] [--budget 24GiB] [--numerics bitwise] [--executor eager] [--adapters-on-host] [--called] [--plain]
        [--least-hidden 0.85] [--trace FILE.json.gz] [--lock FILE] [--out FILE]

One step is traced by torch's profiler. A gap is time in which no kernel runs. Its cause is read from the launch of the kernel that ends
it: launched after the gap began, the host was late ("host"); launched before, the kernel waited for an event of another stream ("copy").
A replayed step is launched whole, before any of its gaps: none of them is the host's.

`overlap` says how many of the copies' seconds lie under kernels, `host_waits` where the host waited for the device inside of forward and
backward (`traces.py`). Exit status 1 where it waited but for the gradients on the host, and where fewer than --least-hidden of the copies'
seconds are hidden although all could be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_core import batch, forget, lora_model, write  # sets the allocator's environment before torch is imported

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from traces import BACKWARD, FORWARD, causes, events_of, host_waits, overlap, write_compact
from turns import alone

import fxoffload
from fxoffload.machine import machine_for
from fxoffload.runtime import replay
from fxoffload.sizes import parse_bytes


def main() -> int:
    chosen = parsed()
    with alone(chosen.lock, others=True):
        model = compiled(chosen)
    with alone(chosen.lock):
        row = measured(model, chosen)
    print(json.dumps(row, indent=1))
    if chosen.out:
        write(chosen.out, [row])
    faults = [] if chosen.plain else [*row["host_waits"]["faults"], *unhidden(row["overlap"], chosen.least_hidden)]
    for fault in faults:
        print(f"where.py: {fault}", file=sys.stderr)
    return int(bool(faults))


def compiled(chosen: argparse.Namespace) -> Any:
    """The model that is traced, ready to step."""
    model = lora_model(chosen.layers, "cuda" if chosen.plain else "cpu", torch.bfloat16)
    forget()
    if not chosen.plain:
        pins = [fxoffload.pin("*lora_*", "pinned")] if chosen.adapters_on_host else []
        fxoffload.compile(model, batch(chosen.batch, chosen.length, "cpu"), device="cuda", device_budget=chosen.budget, numerics=chosen.numerics,
                          executor=chosen.executor, pins=pins)
    if not chosen.limited:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return model


def measured(model: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """The row of a model: its seconds, then what one traced step says."""
    if chosen.called:
        replay.WARM_CALLS = 1 << 30  # a recording that is put off for ever
    data = batch(chosen.batch, chosen.length, "cuda")
    for _ in range(3):
        step(model, data)
    seconds = min(step(model, data) for _ in range(4))
    return {**told(chosen, model), "step_s": seconds, "reserved_bytes": torch.cuda.max_memory_reserved(), **traced(model, data, chosen.trace)}


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget", default="24GiB")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--numerics", choices=("bitwise", "reordered"), default="bitwise")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch, everything on the card, no limit")
    parser.add_argument("--limited", action="store_true", help="cap the allocator at the budget, as compile does")
    parser.add_argument("--called", action="store_true", help="op by op, no step recorded and replayed")
    parser.add_argument("--adapters-on-host", action="store_true", help="trained parameters off the device: gradients go to the host")
    parser.add_argument("--least-hidden", type=float, default=0.85, help="share of the copies' seconds that must lie under kernels")
    parser.add_argument("--trace", type=Path, help="a file for a compact form of the trace (.json.gz)")
    parser.add_argument("--lock", help="a file: processes that have the same one compile beside each other and measure one by one")
    parser.add_argument("--out")
    return parser.parse_args()


def told(chosen: argparse.Namespace, model: Any) -> dict[str, Any]:
    """How the row was made."""
    if chosen.plain:
        return {"budget_bytes": None, "numerics": None, "executor": "plain PyTorch", "limited": chosen.limited}
    plan = model.fxoffload.plan
    return {
        "budget_bytes": parse_bytes(chosen.budget), "numerics": chosen.numerics, "executor": chosen.executor, "limited": chosen.limited,
        "replays": plan.longest.replays and not chosen.called, "plan_id": plan.id, "decisions": plan.count(),
        "predicted_step_s": plan.predicted.step_s, "physical_limit_s": plan.physical_limit_s}


def step(model: Any, data: Any) -> float:
    """Seconds of one forward and backward."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    with record_function(FORWARD):
        loss = model(**data).loss
    with record_function(BACKWARD):
        loss.backward()
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def traced(model: Any, data: Any, compact: Path | None) -> dict[str, Any]:
    """What one traced step says."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        wall = step(model, data)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "step.json"
        recorded.export_chrome_trace(str(path))
        events = events_of(path)
    if compact is not None:
        print(f"{compact}: {write_compact(events, compact)} bytes", file=sys.stderr)
    session = getattr(model, "fxoffload", None)
    machine = machine_for(torch.device("cuda", 0)) if session is None else session.machine
    n_sunk = 0 if session is None else sum(p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    return {
        "traced_wall_s": wall, **causes(events), "overlap": overlap(events, machine.channel_bytes_per_s),
        "host_waits": host_waits(events, n_sunk)}


def unhidden(found: dict[str, Any], least: float) -> list[str]:
    """What is wrong with the copies of a step (`traces.overlap`)."""
    share = found["hidden_share"]
    if share is None or share >= least or not found["could_hide"]:
        return []
    return [f"{share:.1%} of the copies' seconds lie under kernels, {least:.0%} should"]


if __name__ == "__main__":
    sys.exit(main())
