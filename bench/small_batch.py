"""Steps whose kernels take less than issuing them does: 8B shape with LoRA, 1 x 512 tokens, everything on the card.

    python bench/small_batch.py [--layers 32] [--batch 1] [--length 512] [--budget 100GiB] [--no-inductor] [--out FILE]

Plain PyTorch, torch.compile and fxoffload in one process, one after the other: forward, backward and AdamW's step, by the clock between
synchronizations, median of the steps after those that compile, load and record. `called_s`: the same plan with its recordings put off, so
that the host issues op by op. Weights are random in real shapes. A peer that cannot run is a row with its message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_core import batch, forget, lora_model, write

import torch

import fxoffload
from fxoffload.runtime import replay

WARM, TIMED = 6, 10


def timed(model: Any, data: dict[str, torch.Tensor], n: int = WARM + TIMED) -> dict[str, Any]:
    """Seconds per step, of its forward and backward alone, the losses and the reserved peak."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    torch.cuda.reset_peak_memory_stats()
    whole, passes, losses = [], [], []
    for _ in range(n):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(**data).loss
        loss.backward()
        torch.cuda.synchronize()
        passes.append(time.perf_counter() - started)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - started)
        losses.append(loss.item())
    last = min(TIMED, n // 2)
    return {
        "step_s": statistics.median(whole[-last:]), "passes_s": statistics.median(passes[-last:]), "all_s": whole, "losses": losses,
        "reserved_bytes": torch.cuda.max_memory_reserved()}


def peer(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a peer measured, or its message: that it fails, out of memory too, is its row. Ours must not."""
    try:
        return run()
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def told(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, which is printed."""
    forget()
    row = {"name": name, **run()}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--budget", default="100GiB")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    data = batch(chosen.batch, chosen.length, "cuda")

    def eager() -> dict[str, Any]:
        return timed(lora_model(chosen.layers, "cuda", torch.bfloat16), data)

    def inductor() -> dict[str, Any]:
        return timed(torch.compile(lora_model(chosen.layers, "cuda", torch.bfloat16)), data)

    def ours() -> dict[str, Any]:
        model = lora_model(chosen.layers, "cpu", torch.bfloat16)
        started = time.perf_counter()
        fxoffload.compile(model, batch(chosen.batch, chosen.length, "cpu"), device="cuda", device_budget=chosen.budget)
        compiled_s = time.perf_counter() - started
        plan = model.fxoffload.plan
        put_off, replay.WARM_CALLS = replay.WARM_CALLS, 1 << 30
        called = timed(model, data, 8)
        replay.WARM_CALLS = put_off
        row = timed(model, data)
        row |= {
            "called_s": called["step_s"], "called_passes_s": called["passes_s"], "called_reserved_bytes": called["reserved_bytes"],
            "predicted_s": plan.predicted.step_s, "predicted_bytes": plan.predicted.device_peak_bytes, "compile_s": compiled_s,
            "decisions": plan.count(), "replays": [graph.replays for graph in plan.graphs.values()]}
        model.fxoffload.close()
        return row

    rows = [told("plain PyTorch", lambda: peer(eager))]
    if not chosen.no_inductor:
        rows.append(told("torch.compile", lambda: peer(inductor)))
    rows.append(told("fxoffload, eager executor", ours))
    if chosen.out is not None:
        write(str(chosen.out), rows)


if __name__ == "__main__":
    main()
