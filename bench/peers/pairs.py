"""Two peers of one row, in one process, their steps in turns: how many times as long one of them takes, within what the card does at the time.

    python bench/peers/pairs.py --row L1-quarter-8 --pairs fxoffload-functions:fxoffload-inductor[,...] [--rounds 12] [--steps 6] [--out FILE]
    python bench/peers/pairs.py --row L1 --tiny --device cpu --pairs fxoffload-reordered:plain        does it run?

Processes that measure one after the other differ by some hundredths, clocks and neighbours differ between them; rounds of a few steps in turns do not.
`seconds`: each round's median step of either peer; `ratio`: median over rounds of the first's by the second's, `ratios` all of them. The cap of
the row is both plans' budget, not the process's: two peers are in it. What the machine does beside is not known here: give it nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # started as a file: the folder of this file is on the path, the one of its package is not
    sys.path[0] = str(ROOT / "bench")

from peers.run import environment  # noqa: E402

os.environ.update(environment())  # before torch reads it

import torch  # noqa: E402

from peers.measure import Card, taken, versions  # noqa: E402
from peers.rows import ROWS  # noqa: E402
from peers.table import PEERS  # noqa: E402
from peers.task import Task, Training  # noqa: E402

# Steps before the first round: graphs are recorded in the second or third, kernels compiled in the first.
WARM = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", required=True, choices=tuple(ROWS))
    parser.add_argument("--pairs", required=True, help="first:second, by comma")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6, help="of either peer in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    row = ROWS[chosen.row].tiny if chosen.tiny else ROWS[chosen.row]
    task = Task(row, chosen.device, row.cap_bytes)
    found: dict[str, Any] = {
        "command": "python bench/peers/pairs.py " + " ".join(sys.argv[1:]), "row": chosen.row, "cap_bytes": row.cap_bytes,
        "device": torch.cuda.get_device_name(0) if chosen.device == "cuda" else "cpu", "versions": versions(), "steps": chosen.steps, "pairs": []}
    for pair in chosen.pairs.split(","):
        names = pair.split(":")
        found["pairs"].append(paired(names[0], names[1], task, chosen.rounds, chosen.steps))
        print(line(found["pairs"][-1]), flush=True)
        if chosen.out is not None:
            chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def paired(first: str, second: str, task: Task, n_rounds: int, n_steps: int) -> dict[str, Any]:
    """Both peers' seconds, round by round, and their ratio. Each round begins with the peer that the last one ended with."""
    synchronize = Card(Task(task.row, task.device, None)).synchronize
    trainings: dict[str, Training] = {name: PEERS[name].prepare(task) for name in (first, second)}
    losses = {name: taken(training.step, max(WARM, PEERS[name].warm), synchronize)[1] for name, training in trainings.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for i in range(n_rounds):
        for name in (first, second) if i % 2 == 0 else (second, first):
            seconds[name].append(round_s(trainings[name].step, n_steps, synchronize))
    facts = {name: dict(training.facts()) for name, training in trainings.items()}
    for training in trainings.values():
        training.close()
    ratios = [a / b for a, b in zip(seconds[first], seconds[second])]
    return {
        "first": first, "second": second, "ratio": statistics.median(ratios), "ratios": ratios, "seconds": seconds, "losses": losses, "facts": facts}


def round_s(step: Callable[[], torch.Tensor], n_steps: int, synchronize: Callable[[], None]) -> float:
    """The median step of a round, behind one that is not counted: it finds the other peer's data in the caches."""
    return statistics.median(taken(step, 1 + n_steps, synchronize)[0][1:])


def line(pair: dict[str, Any]) -> str:
    """Names, median seconds and ratio."""
    told = ", ".join(f"{name} {statistics.median(pair['seconds'][name]):.4f} s" for name in (pair["first"], pair["second"]))
    return f"{told}: {pair['ratio']:.4f} ({min(pair['ratios']):.4f} to {max(pair['ratios']):.4f} in {len(pair['ratios'])} rounds)"


if __name__ == "__main__":
    raise SystemExit(main())
