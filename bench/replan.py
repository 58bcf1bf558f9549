"""A model planned for a link that is not the card's, observed, and planned anew between two steps.

    python bench/replan.py [--row 3B-lora-4x2048-10GiB] [--copies 4] [--machine h200] [--lock FILE] [--out FILE]
    python bench/replan.py --row 1B-lora-1x64-1GiB --device cpu         does it run?
    python bench/replan.py --join FILE ... --out FILE                   several as one

`--copies`: how many times as long copies take by the machine file that the first plan is made for as by the card's own; `--machine`: the
card's own, by default what compile would take. A row is a size, what is trained, a shape and a budget as in `prediction.py`. Steps train:
the same batch, AdamW, in a hard cap of the budget, eagerly and bitwise. Algorithms are not made deterministic, so losses of runs of a row need not be
equal on a card (`test_observation.py` holds a re-plan to the bit); how far apart they are is in the joined file. Seconds are of forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import prediction
from turns import alone

import torch

import fxoffload
from fxoffload.effects import Channel
from fxoffload.machine import load_machine, machine_for
from fxoffload.observation import with_slower_copies
from fxoffload.sizes import parse_bytes

STEPS = 9
# Plans that are trained with, at most.
TURNS = 2


def row_of(name: str) -> prediction.Row:
    size, trained, shape, budget = name.split("-")
    batch, length = map(int, shape.split("x"))
    return prediction.Row(size, trained, (batch, length), budget)


def steps(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[list[float], list[float]]:
    """Seconds and losses."""
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    seconds, losses = [], []
    for _ in range(STEPS):
        synchronize()
        started = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        synchronize()
        seconds.append(time.perf_counter() - started)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return seconds, losses


def measured(row: prediction.Row, copies: float, named: str | None, device: str, lock: str | None) -> dict[str, Any]:
    """The row's steps before it is planned anew and, if the new plan was taken, after, each observed."""
    budget, card = parse_bytes(row.budget), device == "cuda"
    ids = torch.randint(0, 128256, row.shape, generator=torch.Generator().manual_seed(0))
    own = load_machine(named) if named is not None else machine_for(torch.device(device))
    told = with_slower_copies(own, {Channel.H2D: copies, Channel.D2H: copies})
    with alone(lock, others=True):
        model = prediction.model_of(row) if card else small_of(row)
        if card:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
        started = time.perf_counter()
        fxoffload.compile(model, {"input_ids": ids, "labels": ids}, device=device, device_budget=budget, machine=told)
        compiled_s = time.perf_counter() - started
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    there, turns, losses, taken = ids.to(device), [], [], True
    if card:
        torch.cuda.reset_peak_memory_stats()
    while taken and len(turns) < TURNS:
        with alone(lock):
            seconds, found = steps(model, optimizer, there)
            started = time.perf_counter()
            seen = model.fxoffload.observe()
            observed_s, plan = time.perf_counter() - started, model.fxoffload.plan
        losses += found
        turns.append({
            "planned_s": plan.predicted.step_s, "measured_s": statistics.median(seconds[-5:]), "all_s": seconds, "decisions": plan.count(),
            "observed": str(seen), "observed_s": seen.step_s, "predicted_s": seen.predicted_s,
            "channel_factors": {channel.value: factor for channel, factor in seen.channel_factors.items()},
            "compute_factor": seen.compute_factor, "seconds_to_observe": observed_s,
        })
        if len(turns) < TURNS:
            with alone(lock, others=True):
                started = time.perf_counter()
                taken = model.fxoffload.replan(seen.machine)
                turns[-1] |= {"taken": taken, "seconds_to_replan": time.perf_counter() - started}
        print(json.dumps(turns[-1]), flush=True)
    result = {
        "row": row.name, "copies": copies, "machine": own.name, "budget_bytes": budget, "compile_s": compiled_s, "turns": turns, "losses": losses,
        "reserved_bytes": torch.cuda.max_memory_reserved() if card else None,
        "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"] if card else None,
    }
    model.fxoffload.close()
    return result


def small_of(row: prediction.Row) -> Any:
    """The row's kind of model, narrow."""
    import peft
    import transformers

    config = prediction.config(row.size)
    config.update({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})
    config.head_dim = 16
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return (model if row.trained == "full" else peft.get_peft_model(model, prediction.lora())).train()


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs as one file, and how far, of their size, losses of runs of one row are apart at most."""
    runs = [run for one in results for run in one["runs"]]
    apart = max(abs(a - b) / abs(b) for run in runs for other in runs if run["row"] == other["row"] for a, b in zip(run["losses"], other["losses"]))
    return results[0] | {"losses_apart": apart, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="3B-lora-4x2048-10GiB")
    parser.add_argument("--copies", type=float, default=4.0)
    parser.add_argument("--machine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lock")
    parser.add_argument("--join", nargs="*", type=Path, default=[])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.join:
        result = joined([json.loads(file.read_text()) for file in chosen.join])
    else:
        run = measured(row_of(chosen.row), chosen.copies, chosen.machine, chosen.device, chosen.lock)
        result = {"command": "python bench/replan.py", "commit": None, "torch": torch.__version__, "runs": [run]}
        result["device"] = torch.cuda.get_device_name(0) if chosen.device == "cuda" else "cpu"
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
