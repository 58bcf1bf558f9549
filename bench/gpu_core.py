"""The core on a CUDA card: gradients of a model of 8B width against plain PyTorch, and the 8B LoRA step inside 24 and 12 GiB.

    python bench/gpu_core.py exactness|8b [--layers N] [--budgets 24GiB,12GiB] [--numerics bitwise] [--executor eager]
        [--lock FILE] [--out FILE]

With --lock several processes may share a card: they compile beside each other and measure one after the other, alone. Weights are random in
real shapes. Every figure is measured in this process: reserved bytes by the caching allocator under a hard cap of the budget, seconds
by the wall clock between synchronizations.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import peft
import torch
import transformers
from models import batch, config_of, drawn, with_lora
from torch import nn
from turns import alone

import fxoffload
from fxoffload.sizes import parse_bytes

GIB = 2**30


def lora_model(layers: int, device: str, adapters: torch.dtype = torch.float32) -> nn.Module:
    """A bf16 Llama of 8B width with LoRA r=16 on all linears, random weights."""
    return with_lora(drawn(config_of("8B", num_hidden_layers=layers, max_position_embeddings=8192), device), adapters)


def steps(model: nn.Module, data: dict[str, torch.Tensor], n: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, seconds per step, and the last step's gradients on the CPU."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses, seconds, gradients = [], [], {}
    for i in range(n):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(**data).loss
        loss.backward()
        if i == n - 1:
            gradients = {k: p.grad.detach().float().cpu().clone() for k, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    return losses, seconds, gradients


def cosines(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[float]:
    assert a.keys() == b.keys() and a, "the two runs trained different parameters"
    return [nn.functional.cosine_similarity(a[k].flatten().double(), b[k].flatten().double(), dim=0).item() for k in a]


def forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def exactness(budget: str) -> dict[str, Any]:
    """Adapter gradients after five steps under deterministic algorithms: two plain runs, and one under a budget that streams."""
    torch.use_deterministic_algorithms(True)
    runs = []
    for _ in range(2):
        model = lora_model(2, "cuda")
        # PEFT starts B at zero, where A's gradient is zero and a cosine says nothing.
        jolt(model)
        runs.append(steps(model, batch(2, 1024, "cuda"), 5))
        plain_peak = torch.cuda.max_memory_reserved()
        del model
        forget()
    model = lora_model(2, "cpu")
    jolt(model)
    forget()
    fxoffload.compile(model, batch(2, 1024, "cpu"), device="cuda", device_budget=budget)
    losses, _, gradients = steps(model, batch(2, 1024, "cuda"), 5)
    plan = model.fxoffload.plan
    spread, ours = cosines(runs[0][2], runs[1][2]), cosines(runs[0][2], gradients)
    result = {
        "losses_plain": runs[0][0], "losses": losses, "n_gradients": len(ours), "min_cosine_two_plain_runs": min(spread),
        "min_cosine": min(ours), "plain_reserved_bytes": plain_peak, "reserved_bytes": torch.cuda.max_memory_reserved(),
        "budget_bytes": plan.device_budget_bytes, "predicted_bytes": plan.predicted.device_peak_bytes, "decisions": plan.count(),
        "moved_bytes": dict(model.fxoffload.engine.moved_bytes),
    }
    assert plan.count()["gather"] > 0, "nothing was streamed: the run shows nothing"
    model.fxoffload.close()
    torch.use_deterministic_algorithms(False)
    return result


def jolt(model: nn.Module) -> None:
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape) * 0.01)


def eight_b(arguments: argparse.Namespace, budget: str) -> dict[str, Any]:
    """One run of the LoRA step of 8B shape inside `budget`."""
    layers, size, length = arguments.layers, arguments.batch, arguments.length
    with alone(arguments.lock, others=True):
        model = lora_model(layers, "cpu", {"bf16": torch.bfloat16, "fp32": torch.float32}[arguments.adapters])
        forget()
        total = torch.cuda.get_device_properties(0).total_memory
        context = total - torch.cuda.mem_get_info()[0] if arguments.lock is None else None
        torch.cuda.set_per_process_memory_fraction(parse_bytes(budget) / total)
        started = time.perf_counter()
        fxoffload.compile(model, batch(size, length, "cpu"), device="cuda", device_budget=budget, numerics=arguments.numerics,
                          executor=arguments.executor)
        compile_s = time.perf_counter() - started
    with alone(arguments.lock):
        return measured(model, arguments, budget) | {"compile_s": compile_s, "context_bytes": context}


def measured(model: Any, arguments: argparse.Namespace, budget: str) -> dict[str, Any]:
    """Steps within the cap, one of them profiled, and steps without it; closes the model."""
    n, size, length = arguments.steps, arguments.batch, arguments.length
    engine = model.fxoffload.engine
    losses, seconds, _ = steps(model, batch(size, length, "cuda"), n)
    before, copies = dict(engine.moved_bytes), dict(engine.copies)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    busy = profiled(model, batch(size, length, "cuda"))
    # What the allocator's retries at its limit cost: the same plan where nothing limits what is cached.
    torch.cuda.set_per_process_memory_fraction(1.0)
    _, unlimited, _ = steps(model, batch(size, length, "cuda"), 4)
    plan = model.fxoffload.plan
    result = {
        "step_s_without_limit": statistics.median(unlimited[1:]), "layers": arguments.layers, "adapters": arguments.adapters,
        "numerics": arguments.numerics, "executor": arguments.executor, "allocator_retries": retries,
        "budget_bytes": parse_bytes(budget), "reserved_bytes": reserved,
        "allocated_bytes": allocated, "predicted_bytes": plan.predicted.device_peak_bytes,
        "predicted_step_s": plan.predicted.step_s, "first_step_s": seconds[0],
        "step_s": statistics.median(seconds[6:]), "step_s_all": seconds, "tokens_per_s": size * length / statistics.median(seconds[6:]),
        "moved_bytes_per_step": {k: v / n for k, v in before.items()}, "copies_per_step": {k: v / n for k, v in copies.items()},
        "decisions": plan.count(), "losses": losses,
        "plan_id": plan.id, "busy_s": busy, "machine": plan.machine,
        "parameters_on_device_bytes": sum(r.n_bytes for r in plan.residency if r.tier.value == "device"),
    }
    model.fxoffload.close()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return result


def profiled(model: nn.Module, data: dict[str, torch.Tensor]) -> dict[str, float]:
    """Seconds that kernels and copies of one forward and backward are at work on the device, and its wall time (while profiled)."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        started = time.perf_counter()
        model(**data).loss.backward()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    found = {"wall": wall, "h2d": 0.0, "d2h": 0.0, "kernels": 0.0, "n_kernels": 0.0}
    for average in sorted(trace.key_averages(), key=lambda a: -a.device_time_total)[:25]:
        print(f"{average.device_time_total / 1e6:.4f} s {average.count:6d} {average.key[:110]}", file=sys.stderr)
    for event in trace.events():
        kind = "h2d" if "HtoD" in event.name else "d2h" if "DtoH" in event.name else "kernels"
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[kind] += event.device_time_total / 1e6
            found["n_kernels"] += kind == "kernels"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("exactness", "8b"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budgets", default="24GiB,12GiB")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--adapters", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--numerics", choices=("bitwise", "reordered"), default="bitwise")
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--lock")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rows = []
    for budget in arguments.budgets.split(","):
        if arguments.what == "exactness":
            with alone(arguments.lock):
                rows.append(exactness(budget))
        else:
            rows.append(eight_b(arguments, budget))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out:
            write(arguments.out, rows)
        forget()


def write(out: str, rows: list[dict[str, Any]]) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = head.stdout.strip() if head.returncode == 0 else None
    report = {
        "command": " ".join(["python", *(a for i, a in enumerate(sys.argv) if "--out" not in sys.argv[max(i - 1, 0) : i + 1])]), "commit": commit, "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__, "rows": rows,
    }
    Path(out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
