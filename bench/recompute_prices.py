"""What prices of recomputation between "much cheaper than its copies" and nothing are worth: predicted seconds of a step with two and with all.

    python bench/recompute_prices.py [--out FILE]

No weights, no accelerator. `two_s`: of values whose recomputation takes less than a quarter of their copies, or less than all of it, as the
planner chose from before; `all_s`: of all its prices. The other parts of the search are the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from unittest import mock

import peft

import fxoffload
from fxoffload import recipes
from fxoffload.api import captured, planning_options
from fxoffload.dry import model_without_weights
from fxoffload.machine import load_machine
from models import config_of
from plan_time import commit

# Shape, what is trained, batch, sequence, machine, device budget.
ROWS = [
    ("8B", "lora", 4, 2048, "h200", "24GiB"), ("8B", "lora", 4, 2048, "h200", "16GiB"), ("8B", "lora", 4, 2048, "h200", "12GiB"),
    ("8B", "lora", 4, 2048, "h200", "8GiB"), ("8B", "lora", 1, 16384, "h200", "24GiB"), ("3B", "all", 4, 2048, "h200", "24GiB"),
    ("3B", "all", 2, 2048, "rtx4090", "22GiB"), ("3B", "lora", 4, 2048, "rtx4090", "10GiB"), ("3B", "lora", 2, 2048, "rtx3090", "8GiB"),
]


def predicted_s(shape: str, trained: str, batch: int, sequence: int, machine: str, budget: str) -> tuple[float | None, float | None]:
    """Seconds of the step planned with two prices and with all, None where it is refused; its loss in chunks and its kernels fused."""
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if trained == "lora" else None
    model, planned_for = model_without_weights(config_of(shape), lora, None), load_machine(machine)
    options = planning_options(model, planned_for, budget, None, 0, "adamw", "auto", None, "reordered", (), None, "inductor")

    def planned() -> float | None:
        try:
            return session.study.plan().predicted.step_s
        except fxoffload.PlanError:
            return None

    with captured(model, (batch, sequence), options, planned_for) as session:
        with mock.patch.object(recipes, "_PRICES", (recipes.MIDDLE, 1.0)):
            two_s = planned()
        return two_s, planned()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recompute_prices.json")
    out = parser.parse_args().out
    result: dict[str, object] = {"command": "python bench/recompute_prices.py", "commit": commit(), "prices": recipes._PRICES}
    rows: list[dict[str, object]] = []
    for shape, trained, batch, sequence, machine, budget in ROWS:
        two_s, all_s = predicted_s(shape, trained, batch, sequence, machine, budget)
        rows.append({"model": shape, "trained": trained, "batch": batch, "sequence": sequence, "machine": machine, "device_budget": budget,
                     "two_s": two_s, "all_s": all_s})
        print(*rows[-1].values(), f"{all_s / two_s - 1:+.1%}" if two_s and all_s else "", flush=True)
        out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
