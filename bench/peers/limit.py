"""Seconds that no peer's step of a row can go below on a machine: forward and backward, however they are planned (`account.least_limits`).

    python bench/peers/limit.py --row L1 [--machine h200] [--tiny]     prints it as JSON
    python bench/peers/limit.py --into FILE [--machine h200]           adds it to the rows of a file that has none

The same for every peer of a row with the same cap: FLOPs of the step's products at the machine's best rate, nothing computed again; over
the link what of the weights cannot be on the device already, and what that takes from compute. The optimizer's step counts nothing. No
accelerator is needed and no weights: the step is captured on fake tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: the folder of this file is on the path, the one of its package is not
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch  # noqa: E402
from models import config_of, with_lora  # noqa: E402
from peers.rows import ROWS, Row, limit_fields  # noqa: E402

from fxoffload.account import least_limits  # noqa: E402
from fxoffload.api import captured, planning_options  # noqa: E402
from fxoffload.dry import model_without_weights  # noqa: E402
from fxoffload.machine import Machine, load_machine  # noqa: E402

# Of a machine whose memory nobody gave: everything fits.
_NO_LIMIT = 1 << 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=tuple(ROWS))
    parser.add_argument("--machine", default="h200", help="shipped name or file")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--into", type=Path)
    parser.add_argument("--out", type=Path, help="where --row writes; default: standard output")
    chosen = parser.parse_args()
    if (chosen.row is None) is (chosen.into is None):
        parser.error("one of --row and --into")
    if chosen.into is not None:
        add(chosen.into, load_machine(chosen.machine))
        return
    row = ROWS[chosen.row].tiny if chosen.tiny else ROWS[chosen.row]
    text = json.dumps(limits_of(row, load_machine(chosen.machine)))
    if chosen.out is None:
        print(text)
    else:
        chosen.out.write_text(text)


def limits_of(row: Row, machine: Machine) -> dict[str, dict[str, Any]]:
    """For "capped" and "uncapped" runs of the row, the fields that its peers' rows have in common."""
    model: Any = model_without_weights(config_of(row.shape, use_cache=False))
    if row.trained == "lora":
        model = with_lora(model, torch.bfloat16)
    options = planning_options(model, machine, 1, None, 0, "adamw", "auto", None, "bitwise", ())
    with captured(model, (row.batch, row.length), options, machine) as session:
        step = session.captured
        assert step is not None
        whole = machine.device_capacity_bytes or _NO_LIMIT
        budgets = {"capped": row.cap_bytes or whole, "uncapped": whole}
        return {name: _fields(least_limits(step.graph, step.bounds, machine, n_bytes), machine) for name, n_bytes in budgets.items()}


def _fields(terms: dict[str, float | None], machine: Machine) -> dict[str, Any]:
    return {"physical_limit_s": max(s for s in terms.values() if s is not None), "limit_s": terms, "limit_machine": machine.name}


def add(path: Path, machine: Machine) -> None:
    """Adds the limits to the rows of a file of `run.py`, which are of real sizes."""
    report = json.loads(path.read_text())
    known = {name: limits_of(ROWS[name], machine) for name in dict.fromkeys(row["row"] for row in report["rows"])}
    report["rows"] = [row | limit_fields(known[row["row"]], row) for row in report["rows"]]
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
