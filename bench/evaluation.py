"""Training that is interrupted by evaluations, whose metrics are read off `out.logits`, in a hard cap: what it costs and whether it is right.

    python bench/evaluation.py [--shape 3B] [--batch 4] [--length 2048] [--budget 14GiB] [--rounds 4] [--steps 6] [--executor eager|inductor]
        [--lock FILE] [--out FILE]
    python bench/evaluation.py --shape tiny-llama --batch 2 --length 32 --budget 64MiB --device cpu         does it run?

A round is some training steps, then two batches of an evaluation without labels (`model.eval()`, no gradient), which read the likeliest
token, its probability and every token's log-probability. The same two batches are first evaluated by the plain model, uncapped, before
training: the first evaluation of ours, which captures and plans, comes before training too and is held to it. `numerics="reordered"`, so the logits are chunked
where the plan says so. Seconds are by the clock between synchronizations; each step's, so that those after an evaluation can be told from
the others. Weights are random in real shapes, LoRA r=16 on all linears.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from gpu_core import forget, write
from models import SHAPES, config_of, draw_adapters, drawn, with_lora
from turns import alone

import torch

import fxoffload
from fxoffload.sizes import parse_bytes

# A step is called twice before it is recorded; an evaluation may have its recording forgotten.
_RECORDED_AT = 3


def metrics(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a person reads of an evaluation, on the CPU: (batch, length), log-probabilities (batch, length - 1)."""
    logits = model(input_ids=ids).logits
    probability, token = logits.float().softmax(-1).max(-1)
    told = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return {"token": token.cpu(), "probability": probability.cpu(), "log_probability": told.cpu()}


def evaluated(model: Any, batches: list[torch.Tensor]) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """The metrics of the batches and the seconds of each."""
    found, seconds = [], []
    model.eval()
    with torch.no_grad():
        for ids in batches:
            synchronize()
            started = time.perf_counter()
            found.append(metrics(model, ids))
            synchronize()
            seconds.append(time.perf_counter() - started)
    model.train()
    return found, seconds


def differences(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """How many of the likeliest tokens are the same, and the largest and the mean difference of log-probabilities."""
    same = torch.cat([(a["token"] == b["token"]).flatten() for a, b in zip(ours, theirs, strict=True)]).double().mean().item()
    off = torch.cat([(a["log_probability"] - b["log_probability"]).abs().flatten() for a, b in zip(ours, theirs, strict=True)]).double()
    return {"same_tokens": same, "log_probability_off_at_most": off.max().item(), "log_probability_off_on_average": off.mean().item()}


def tokens(shape: str, size: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, SHAPES[shape]["vocab_size"], (size, length), generator=torch.Generator().manual_seed(seed))


def model_of(shape: str, device: str) -> Any:
    model = with_lora(drawn(config_of(shape), device), torch.bfloat16)
    draw_adapters(model)
    return model


def trained(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, n: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of n steps."""
    seconds, losses = [], []
    for _ in range(n):
        synchronize()
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    return seconds, losses


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="3B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--budget", default="14GiB")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help=f"of a round, more than {_RECORDED_AT}")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lock")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.steps <= _RECORDED_AT:
        parser.error(f"--steps: {_RECORDED_AT} steps after an evaluation are called and recorded; of those behind them the median is told")
    budget, card = parse_bytes(chosen.budget), chosen.device == "cuda"
    batches = [tokens(chosen.shape, chosen.batch, chosen.length, seed) for seed in (0, 1, 2)]
    there = [ids.to(chosen.device) for ids in batches]
    with alone(chosen.lock, others=True):
        plain, _ = evaluated(model_of(chosen.shape, chosen.device), there[1:])
        model = model_of(chosen.shape, "cpu")
        if card:
            forget()
            torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
        fxoffload.compile(model, {"input_ids": batches[0], "labels": batches[0]}, device=chosen.device, device_budget=budget,
                          numerics="reordered", executor=chosen.executor)
        if card:
            torch.cuda.reset_peak_memory_stats()
        first, compiling_s = evaluated(model, there[1:])  # which captures and plans what it calls, beside other processes
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    with alone(chosen.lock):
        evaluations, steps, losses = [], [], []
        for _ in range(chosen.rounds):
            took, said = trained(model, optimizer, there[0], chosen.steps)
            steps.append(took)
            losses += said
            evaluations.append(evaluated(model, there[1:])[1])
        took, said = trained(model, optimizer, there[0], chosen.steps)
        steps.append(took)
        session = model.fxoffload
        row = {
            "name": f"{chosen.shape} LoRA, {chosen.batch} x {chosen.length}, {chosen.executor}", "budget_bytes": budget,
            "reserved_bytes": torch.cuda.max_memory_reserved() if card else None,
            "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"] if card else None,
            "predicted_bytes": session.plan.predicted.device_peak_bytes, "predicted_s": session.plan.predicted.step_s,
            "against_plain": differences(first, plain), "step_s": statistics.median(steps[-1][_RECORDED_AT:]), "steps_s": steps,
            "first_evaluation_s": compiling_s, "evaluations_s": evaluations, "losses": losses + said, "captures": session.router.captures,
            "decisions": {label: graph for label, graph in session.plan.count().items() if graph}}
        model.fxoffload.close()
    print(json.dumps(row), flush=True)
    if chosen.out is not None:
        write(str(chosen.out), [row])


if __name__ == "__main__":
    main()
