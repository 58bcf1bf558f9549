"""What more device memory is predicted to give: a step planned for one budget after the other, and where a law does not hold.

    python bench/laws.py [--rows 8B-lora,80-full] [--machine h200] [--search quick|thorough] [--bits 4] [--least 5] [--most 80] [--out FILE]
    python bench/laws.py --rows smaller --bits 5 --least 2.5 --most 40 --out bench/results/laws_smaller.json
    python bench/laws.py --rows others --bits 5 --least 2.5 --most 40 --out bench/results/laws_others.json

Budgets, in GiB, are the rungs of the quick search's own ladder, numbers of 4 significant bits; of more bits, budgets between them too. `slower`:
budgets predicted slower than a smaller one, the optimizer's step included, by which share of the step without it; `higher`: smaller budgets with a higher predicted peak
than a larger one, by how many bytes. Steps are those of `bench/plan_time.py`, smaller ones and others, each for a machine of its own.
A search takes the processor seconds that are told for each budget; what they share is made once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from plan_time import BATCH, ROWS, Row, captured_step, commit  # noqa: E402

from fxoffload.errors import PlanError  # noqa: E402
from fxoffload.ladder import rungs_within  # noqa: E402

_LORA = "lora r=16 all-linear"
# Steps of 600 to 6,000 events: the row, the machine it is planned for, its batch, and its numerics.
SMALLER: dict[str, tuple[Row, str, tuple[int, int], str]] = {
    "1B-lora": (Row(16, _LORA, "bf16", "3GiB"), "rtx3090", (4, 2048), "reordered"),
    "1B-full": (Row(16, "all", "bf16", "3GiB"), "rtx3090", (4, 2048), "bitwise"),
    "22-full": (Row(22, "all", "bf16", "3GiB"), "rtx4090", (8, 1024), "bitwise"),
    "22-lora": (Row(22, _LORA, "bf16", "3GiB"), "rtx5090", (8, 1024), "bitwise"),
    "3B-full": (Row(28, "all", "bf16", "3GiB"), "h200", (2, 2048), "bitwise"),
    "3B-4bit": (Row(28, _LORA, "nf4, double quantization", "3GiB"), "l40s", (1, 4096), "bitwise"),
    "quarter-lora": (Row(8, _LORA, "bf16", "5GiB"), "h100", (4, 2048), "reordered"),
    "quarter-full": (Row(8, "all", "bf16", "5GiB"), "a100-40", (4, 2048), "bitwise"),
}
# Steps that the search was not looked at with when its rules were chosen, but for what some of them showed later.
OTHERS: dict[str, tuple[Row, str, tuple[int, int], str]] = {
    "8B-lora-a100": (Row(32, _LORA, "bf16", "3GiB"), "a100-80", (2, 4096), "bitwise"),
    "8B-4bit-4090": (Row(32, _LORA, "nf4, double quantization", "3GiB"), "rtx4090", (2, 2048), "reordered"),
    "40-4bit-5090": (Row(40, _LORA, "nf4, double quantization", "3GiB"), "rtx5090", (1, 4096), "bitwise"),
    "half-full-b200": (Row(17, "all", "bf16", "3GiB"), "b200", (4, 2048), "bitwise"),
    "36-full-h100": (Row(36, "all", "bf16", "3GiB"), "h100", (2, 4096), "reordered"),
    "3B-lora-4090": (Row(28, _LORA, "bf16", "3GiB"), "rtx4090", (4, 2048), "reordered"),
    "3B-4bit-a100": (Row(28, _LORA, "nf4, double quantization", "3GiB"), "a100-40", (8, 1024), "bitwise"),
    "24-lora-3090": (Row(24, _LORA, "bf16", "3GiB"), "rtx3090", (1, 4096), "bitwise"),
    "12-full-l40s": (Row(12, "all", "bf16", "3GiB"), "l40s", (2, 2048), "reordered"),
    "1B-full-h200": (Row(16, "all", "bf16", "3GiB"), "h200", (1, 4096), "bitwise"),
}
_STEPS = SMALLER | OTHERS
# Numbers that rounding alone tells apart.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Planned:
    """What a budget is predicted to give. `after_s`: of the optimizer's step after `step_s`."""

    budget_bytes: int
    step_s: float
    after_s: float
    peak_bytes: int
    cpu_s: float

    @property
    def total_s(self) -> float:
        return self.step_s + self.after_s


def planned(name: str, machine: str, search: str, bits: int, least_bytes: int, most_bytes: int) -> list[Planned]:
    """The step at every rung within the bytes that has a plan, the smallest first."""
    found = []
    row, machine, batch, numerics = _STEPS.get(name) or (ROWS[name], machine, BATCH, "bitwise")
    with captured_step(row, machine, search, batch, numerics) as session:
        study = session.study
        for budget in sorted(set(rungs_within(most_bytes, bits))):
            started_s = time.process_time()
            if budget < least_bytes:
                continue
            try:
                plan = study.plan(replace(study.planning.budgets, device_bytes=budget))
            except PlanError:
                continue
            reasons = plan.longest.reasons
            assert reasons is not None
            cpu_s, told = round(time.process_time() - started_s, 1), plan.predicted
            one = Planned(budget, told.step_s, reasons.optimizer_s or 0.0, told.device_peak_bytes, cpu_s)
            print(f"{name} {budget / 2**30:6.2f} GiB {one.step_s:.6f} + {one.after_s:.6f} s, peak {one.peak_bytes / 2**30:.2f} GiB, {cpu_s} cpu s", flush=True)
            found.append(one)
    return found


def slower(found: list[Planned]) -> list[dict[str, float]]:
    """Every budget that is predicted slower than the fastest smaller one."""
    exceptions, fastest = [], found[0]
    for one in found[1:]:
        if one.total_s > fastest.total_s * (1 + _ROUNDING):
            share = (one.total_s - fastest.total_s) / fastest.step_s
            exceptions.append({"budget_bytes": one.budget_bytes, "than_bytes": fastest.budget_bytes, "share": share})
        else:
            fastest = one
    return exceptions


def higher(found: list[Planned]) -> list[dict[str, int]]:
    """Every budget with a higher predicted peak than the lowest of the larger ones."""
    exceptions, lowest = [], found[-1]
    for one in found[-2::-1]:
        if one.peak_bytes > lowest.peak_bytes:
            exceptions.append({"budget_bytes": one.budget_bytes, "than_bytes": lowest.budget_bytes, "n_bytes": one.peak_bytes - lowest.peak_bytes})
        else:
            lowest = one
    return exceptions


def _told(name: str) -> dict[str, object]:
    """What is special about a step that is no row of plan_time."""
    if name not in _STEPS:
        return {}
    row, machine, batch, numerics = _STEPS[name]
    return {"layers": row.layers, "trained": row.trained, "weights": row.weights, "planned_for": machine, "batch": batch, "numerics": numerics}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8B-full,8B-lora,8B-4bit,80-full,80-lora")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--search", default="quick", choices=("quick", "thorough"))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--least", type=float, default=5, help="GiB")
    parser.add_argument("--most", type=float, default=80, help="GiB")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "laws.json")
    chosen = parser.parse_args()
    result = {"command": " ".join(["python bench/laws.py", *sys.argv[1:]]), "commit": commit(), "planned_for": chosen.machine, "batch": BATCH, "rows": []}
    names = list({"smaller": SMALLER, "others": OTHERS}.get(chosen.rows, chosen.rows.split(",")))
    for name in names:
        found = planned(name, chosen.machine, chosen.search, chosen.bits, int(chosen.least * 2**30), int(chosen.most * 2**30))
        result["rows"].append({"row": name, **_told(name), "slower": slower(found), "higher": higher(found), "budgets": [asdict(one) for one in found]})
        print(f"{name}: {len(found)} budgets, slower than a smaller one {result['rows'][-1]['slower']}, higher peaks {result['rows'][-1]['higher']}", flush=True)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
