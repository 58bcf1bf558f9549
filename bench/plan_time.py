"""How long `fxoffload.plan` takes, and what memory: Llamas of 8B and 70B shape, no weights, no accelerator.

    python bench/plan_time.py [--rows 8B-full,80-lora] [--machine h200] [--shared] [--out FILE]

Every row is one plan in a process of its own. `cpu_s` are processor seconds of that process, imports apart, and `wall_s` the time
that passed: where other work shares the cores, the first is the one to compare. Of them three parts are told apart: `extraction_cpu_s`, the
problem made of the graph, with the schedule, bounds and costs of the step as it was captured; `solve_cpu_s`, the solver, graphs of its recipes
of recomputation included; `lowering_cpu_s`, the chosen plan applied, placed and simulated. The rest is capture, and what the plan says of
itself. `search_cpu_s` is all of this but the capture again, on the captured step. `rss_bytes` is the most the process ever held.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
BATCH = (4, 2048)


@dataclass(frozen=True, slots=True)
class Row:
    """A Llama shape, what of it is trained, how its frozen weights are stored, and the budget it is planned in."""

    layers: int
    trained: str
    weights: str
    budget: str


ROWS = {
    "8B-full": Row(32, "all", "bf16", "24GiB"),
    "8B-lora": Row(32, "lora r=16 all-linear", "bf16", "24GiB"),
    "8B-4bit": Row(32, "lora r=16 all-linear", "nf4, double quantization", "12GiB"),
    # Budgets at which more recipes and resident sets are worth a search than at most others.
    "8B-lora-20": Row(32, "lora r=16 all-linear", "bf16", "20GiB"),
    "8B-4bit-16": Row(32, "lora r=16 all-linear", "nf4, double quantization", "16GiB"),
    "80-full": Row(80, "all", "bf16", "48GiB"),
    "80-lora": Row(80, "lora r=16 all-linear", "bf16", "48GiB"),
}
_WIDTHS = {
    8: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},  # a quarter of 8B
    12: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    16: {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    17: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    22: {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32},
    24: {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    28: {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24},
    32: {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    36: {"hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16},
    40: {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40},
    80: {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}


def measured(row: Row, machine: str) -> dict[str, object]:
    """The row's plan made here: seconds, memory, and what was decided."""
    import fxoffload

    config, lora, quantization = described(row)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    with phases() as clock:
        plan = fxoffload.plan(config, BATCH, device_budget=row.budget, machine=machine, lora=lora, quantization=quantization)
    cpu_s, wall_s = time.process_time() - started_cpu_s, time.perf_counter() - started_s
    assert plan.decisions, "an inert plan says nothing about planning"
    with captured_step(row, machine) as session:
        started_search_s = time.process_time()
        again = session.study.plan()
        search_cpu_s = time.process_time() - started_search_s
    assert again.predicted.step_s == plan.predicted.step_s, "the same search gave another plan"
    return {
        "cpu_s": round(cpu_s, 1), "wall_s": round(wall_s, 1), "search_cpu_s": round(search_cpu_s, 1),
        **{f"{phase}_cpu_s": round(clock.seconds[phase], 1) for phase in _PHASES},
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "decisions": len(plan.decisions), "predicted_peak_bytes": plan.predicted.device_peak_bytes, "predicted_step_s": plan.predicted.step_s,
    }


def described(row: Row) -> tuple[Any, Any, Any]:
    """The row's model, adapters and quantization, as configurations; None for what it has not."""
    import peft
    import torch
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=row.layers, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, dtype=torch.bfloat16,
        **_WIDTHS[row.layers])
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if row.trained != "all" else None
    packed = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return config, lora, packed if row.weights != "bf16" else None


def captured_step(row: Row, machine: str, search: str = "quick", batch: tuple[int, int] = BATCH, numerics: str = "bitwise") -> Any:
    """The session that captured the row's step, a context."""
    from fxoffload.api import captured, planning_options
    from fxoffload.dry import model_without_weights
    from fxoffload.machine import load_machine

    planned_for, model = load_machine(machine), model_without_weights(*described(row))
    options = planning_options(model, planned_for, row.budget, None, 0, "adamw", "auto", None, numerics, (), None, search=search)
    return captured(model, batch, options, planned_for)


_PHASES = ("extraction", "solve", "lowering")


@dataclass
class Clock:
    """Processor seconds of each phase, those of phases within it apart."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("rest", *_PHASES), 0.0))
    running: list[str] = field(default_factory=lambda: ["rest"])
    since_s: float = field(default_factory=time.process_time)

    def turn(self) -> None:
        """What has passed counts for the phase that runs."""
        now_s = time.process_time()
        self.seconds[self.running[-1]] += now_s - self.since_s
        self.since_s = now_s

    def timed(self, phase: str, function: Callable[..., Any], is_of: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        """The function, with its calls in that phase, of those that `is_of` says are."""
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_of(*args):
                return function(*args, **kwargs)
            self.turn()
            self.running.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.running.pop()
        return call


@contextmanager
def phases() -> Iterator[Clock]:
    """A Clock of the planning that is done inside."""
    from fxoffload.planner import Chosen
    from fxoffload.planning import Planning
    from fxoffload.recipes import Recipe
    from fxoffload.rung import OneRung

    clock = Clock()
    with (
        mock.patch.object(Planning, "_problem", clock.timed("extraction", Planning._problem)),
        mock.patch.object(OneRung, "_made", clock.timed("extraction", OneRung._made, lambda _, recipe: recipe == Recipe("all"))),
        mock.patch.object(Chosen, "of", staticmethod(clock.timed("solve", Chosen.of))),
        mock.patch.object(Chosen, "lowered", clock.timed("lowering", Chosen.lowered)),
    ):
        yield clock
        clock.turn()


def in_a_process(name: str, machine: str) -> dict[str, object]:
    """The row `name`, measured in a fresh process."""
    command = [sys.executable, str(Path(__file__)), "--measure", name, "--machine", machine]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    return {"row": name, **asdict(ROWS[name]), "batch": BATCH, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    arguments = parsed()
    if arguments.measure:
        print(json.dumps(measured(ROWS[arguments.measure], arguments.machine)))
        return 0
    result = header(arguments)
    for name in arguments.rows.split(","):
        row = in_a_process(name, arguments.machine)
        print(f"{name:8s} {row['budget']:>6s} {row['cpu_s']:>7} cpu s {row['wall_s']:>7} s, search {row['search_cpu_s']:>6} cpu s, of it solver {row['solve_cpu_s']:>5}, {row['rss_bytes'] / 2**30:.2f} GiB", flush=True)
        result["rows"].append(row)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def header(arguments: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    """What the rows were measured with."""
    from importlib.metadata import version

    return {  # type: ignore[dict-item]
        "command": f"python bench/plan_time.py {' '.join(sys.argv[1:])}".strip(), "commit": commit(), "machine": platform.platform(),
        "cores": os.cpu_count(), "shared": arguments.shared, "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}, "planned_for": arguments.machine, "rows": [],
    }


def commit() -> str:
    """The commit this runs from; marked when files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--shared", action="store_true", help="other work ran on the same cores; it is noted in the file")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan_time.json")
    parser.add_argument("--measure", choices=ROWS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
