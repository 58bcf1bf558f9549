"""executor="inductor" beside executor="eager": losses over many steps, and how long a start takes with empty and with filled caches.

    python bench/executors.py [--runs eager,again,cold,warm] [--shape 8B] [--layers 32] [--steps 100] [--budget 24GiB] [--rate 1e-4]
        [--device cuda] [--out FILE]

Each run is a process of its own: the same weights, the same batches (a new one every step), the same AdamW. "eager" is the bitwise
numerics of the eager executor, whose losses count as right, "again" the same once more: on a card sums of attention's backward come in any
order, and the losses of the two lie as far apart as rounding takes them. "cold" is the Inductor executor with an empty compile cache and no
kernel on disk, "warm" the same again with what "cold" left, five steps of it. `ready_s` are seconds from the call of `fxoffload.compile` to the end of
the first step (forward, backward, optimizer), `compile_s` and `first_step_s` its parts; imports and building the model come before.
`kernels`: fused kernels that had to be compiled or loaded, `kernel_calls`: how often a step calls one.

Tokens follow one another by a fixed random table of four successors each: there is something to learn, and no loss of zero, of which no
relative difference could be told. Exit status 1 where losses differ by more than --most-apart, relative, at any step, and by more than those of
"eager" and "again"; where a warm start has another plan than the cold one, or other losses than as far as that; where it found no entry; and
where a start takes more than --cold-s or --warm-s. `cache_notes`: what the compile cache said.
Runs joined by "+" share the card and the host: their losses count, their seconds do not (`beside` names the others).
The file keeps the runs that are in it already with the same settings: they can be made by several calls, with --folder.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("eager", "again", "cold", "warm")
EAGER = RUNS[:2]
WARM_STEPS = 5
# Of the tokens that are drawn.
_VOCABULARY, _SUCCESSORS = 512, 4


def main() -> int:
    chosen = parsed()
    if chosen.one is not None:
        print(json.dumps(measured(chosen, chosen.one)))
        return 0
    settings = {name: getattr(chosen, name) for name in ("shape", "layers", "batch", "length", "steps", "budget", "rate", "device")}
    runs = earlier(chosen.out, settings)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        for together in chosen.runs.split(","):
            names = together.split("+")
            with ThreadPoolExecutor(len(names)) as pool:
                made = dict(zip(names, pool.map(lambda name: started(chosen, name, folder), names)))
            runs |= {name: run | {"beside": [other for other in names if other != name]} for name, run in made.items()}
            report = {"command": f"python bench/executors.py {' '.join(shown_arguments())}".strip(), "commit": commit(), "settings": settings, "runs": runs,
                      **verdict(runs, chosen.most_apart, {"cold": chosen.cold_s, "warm": chosen.warm_s})}
            for name in names:
                print(json.dumps({k: v for k, v in runs[name].items() if k not in ("losses", "step_s_all")}), flush=True)
            if chosen.out is not None:
                chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    for fault in report["faults"]:
        print(f"executors.py: {fault}", file=sys.stderr)
    print(json.dumps({k: v for k, v in report.items() if k != "runs"}), flush=True)
    return int(bool(report["faults"]))


def earlier(out: Path | None, settings: Mapping[str, object]) -> dict[str, Any]:
    """The runs that a file has with the same settings."""
    if out is None or not out.exists():
        return {}
    report = json.loads(out.read_text())
    return dict(report["runs"]) if report["settings"] == settings else {}


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", default="24GiB")
    parser.add_argument("--rate", type=float, default=1e-4, help="AdamW's learning rate")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--most-apart", type=float, default=1e-3)
    parser.add_argument("--cold-s", type=float, default=240)
    parser.add_argument("--warm-s", type=float, default=60)
    parser.add_argument("--folder", type=Path, help="where caches lie between calls; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)
    return parser.parse_args()


def started(chosen: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """One run in a process of its own. What a cold start is to make must not be there."""
    kept = folder / (name if name in EAGER else "inductor")
    if name == "cold" and kept.exists():
        raise SystemExit(f"executors.py: {kept} is there already: no cold start")
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--one", name, "--folder", str(kept)]
    environment = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(kept / "kernels"), "TRITON_CACHE_DIR": str(kept / "triton"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])])}
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_s": time.perf_counter() - began}


def measured(chosen: argparse.Namespace, name: str) -> dict[str, Any]:
    """The run, in this process."""
    began = time.perf_counter()
    import torch
    from models import config_of, draw_adapters, drawn, with_lora

    import fxoffload
    from fxoffload.runtime.fused import kernel_calls

    notes = Notes()
    logging.getLogger("fxoffload").addHandler(notes)
    logging.getLogger("fxoffload").setLevel(logging.INFO)
    imported = time.perf_counter()
    config = config_of(chosen.shape, use_cache=False, **({} if chosen.layers is None else {"num_hidden_layers": chosen.layers}))
    model: Any = with_lora(drawn(config, "cpu").train(), torch.bfloat16)
    draw_adapters(model)
    if chosen.device == "cuda":
        torch.cuda.empty_cache()  # the weights were drawn there
    n_steps = min(chosen.steps, WARM_STEPS) if name == "warm" else chosen.steps
    data = batches(n_steps, chosen.batch, chosen.length)
    built = time.perf_counter()
    fused = {} if name in EAGER else {"numerics": "reordered", "executor": "inductor"}
    fxoffload.compile(
        model, data[0], device=chosen.device, device_budget=chosen.budget, optimizer="adamw_torch_fused",
        cache_dir=chosen.folder / "compiled", **fused)
    compile_s = time.perf_counter() - built
    losses, seconds = trained(model, [{k: v.to(chosen.device) for k, v in one.items()} for one in data], chosen.rate)
    plan, calls = model.fxoffload.plan, kernel_calls(model.fxoffload.graphs.values())
    assert plan.decisions, "an inert plan shows nothing"
    return {
        "ready_s": compile_s + seconds[0], "compile_s": compile_s, "first_step_s": seconds[0], "imports_s": imported - began,
        "model_s": built - imported, "step_s": sorted(seconds)[len(seconds) // 2], "step_s_all": seconds, "losses": losses,
        "cache_hits": notes.hits, "cache_notes": notes.told, "kernels": len(calls), "kernel_calls": sum(calls.values()), "plan_id": plan.id, "decisions": plan.count(),
        "replays": plan.longest.replays, "layers": config.num_hidden_layers, "budget_bytes": plan.device_budget_bytes,
        "predicted_bytes": plan.predicted.device_peak_bytes, "torch": torch.__version__,
        "reserved_bytes": torch.cuda.max_memory_reserved() if chosen.device == "cuda" else None,
        "device": torch.cuda.get_device_name(0) if chosen.device == "cuda" else "cpu"}


def trained(model: Any, data: Sequence[Mapping[str, Any]], rate: float) -> tuple[list[float], list[float]]:
    """Loss and seconds of a step with each batch."""
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, fused=True)
    losses, seconds = [], []
    for one in data:
        began = time.perf_counter()
        loss = model(**one).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the step's forward; the clock of the next step has what is left
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def batches(n: int, size: int, length: int) -> list[dict[str, Any]]:
    """Sequences that walk through the table, each batch others."""
    import torch

    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, _VOCABULARY, (_VOCABULARY, _SUCCESSORS), generator=generator)
    found = []
    for _ in range(n):
        tokens = [torch.randint(0, _VOCABULARY, (size,), generator=generator)]
        choices = torch.randint(0, _SUCCESSORS, (length - 1, size), generator=generator)
        for choice in choices:
            tokens.append(table[tokens[-1], choice])
        ids = torch.stack(tokens, 1)
        found.append({"input_ids": ids, "labels": ids})
    return found


def verdict(runs: Mapping[str, Mapping[str, Any]], most_apart: float, most_s: Mapping[str, float]) -> dict[str, Any]:
    """How far losses lie apart, and all that is not as it should be."""
    faults = [f"{name}: ready after {runs[name]['ready_s']:.0f} s, not {most:.0f}" for name, most in most_s.items()
              if name in runs and runs[name]["ready_s"] > most]
    found: dict[str, Any] = {}
    spread = apart(runs["eager"], runs["again"]) if "eager" in runs and "again" in runs else []
    if spread:
        found |= {"eager_apart": max(spread), "eager_apart_at_step": spread.index(max(spread)) + 1}
    if "eager" in runs and "cold" in runs:
        between = apart(runs["eager"], runs["cold"])
        found |= {"most_apart": max(between), "most_apart_at_step": between.index(max(between)) + 1, "steps": len(between)}
        if max(between) > max(most_apart, *spread, 0.0):
            faults.append(f"losses lie up to {max(between):.2e} apart, relative: more than {most_apart:.0e}" + ", and than two eager runs" * bool(spread))
    if "cold" in runs and "warm" in runs:
        cold, warm = runs["cold"], runs["warm"]
        found |= {"warm_apart": max(apart(warm, cold))}
        if found["warm_apart"] > max(most_apart, *spread, 0.0) or warm["plan_id"] != cold["plan_id"]:
            faults.append("warm: another training than the cold start's")
    if "warm" in runs and not runs["warm"]["cache_hits"]:
        faults.append("warm: no entry of the compile cache was used")
    return {**found, "faults": faults}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """Relative differences of two runs' losses, as far as both go."""
    return [abs(a - b) / abs(a) for a, b in zip(one["losses"], other["losses"])]


class Notes(logging.Handler):
    """What the compile cache says, and how many graphs came from it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    @property
    def hits(self) -> int:
        return sum("was not traced and not planned again" in line for line in self.told)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("compile cache"):
            self.told.append(record.getMessage())


def shown_arguments() -> list[str]:
    """The arguments but where things are written."""
    hidden = ("--out", "--folder")
    return [a for i, a in enumerate(sys.argv[1:]) if a not in hidden and sys.argv[i] not in hidden]


def commit() -> str | None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return head.stdout.strip() if head.returncode == 0 else None


if __name__ == "__main__":
    raise SystemExit(main())
