"""Every family at three budgets on the CPU and on the simulated device: writes bench/results/cpu_core.json.

    python bench/cpu_core.py [--families llama,gpt2] [--devices cpu,fxsim] [--out FILE]

It takes about an hour of one core. Rows that the file already holds from the same unchanged commit are kept, so an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> int:
    """Exit status 0 when every row ran bit-equal or was rightly refused."""
    arguments = parsed()
    from fxoffload.testing.simulated_device import install

    simulated = install() if "fxsim" in arguments.devices.split(",") else None
    import torch
    import transformers
    from runs import STEPS, fault, rows
    from zoo import FAMILIES

    names = arguments.families.split(",") if arguments.families else list(FAMILIES)
    result: dict[str, Any] = {
        "command": "python bench/cpu_core.py " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "machine": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "steps": STEPS, "rows": [],
    }
    kept = rows_of(arguments.out, result["commit"])
    for name in names:
        for device in arguments.devices.split(","):
            found = [row for row in kept if (row["family"], row["device"]) == (name, device)]
            try:
                done = [] if found else list(rows(name, device, simulated if device == "fxsim" else None))
                found += [asdict(row) | {"fault": fault(row, done[0])} for row in done]
            except (RuntimeError, AssertionError) as error:  # refused, out of memory, or a wrong plan: a row that says so; the others count
                found = [{"family": name, "device": device, "fault": f"{type(error).__name__}: {str(error)[:400]}"}]
            for row in found:
                print(line(row), flush=True)
            result["rows"] += found
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row["fault"] for row in result["rows"]) else 0


def rows_of(path: Path, commit: str) -> list[dict[str, Any]]:
    """Rows of the file at `path` when that very commit made it."""
    if commit.endswith("-dirty") or not path.exists():
        return []
    before = json.loads(path.read_text())
    return before["rows"] if before["commit"] == commit else []


def commit() -> str:
    """The commit this runs from; marked when files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def line(row: dict[str, object]) -> str:
    """One row for people."""
    head = f"{row['family']:24s} {row['device']:6s} "
    if row["fault"]:
        return f"{head}FAILED {row['fault']} {row}"
    head += f"{row['fraction']:.2f} "
    if row["refused"]:
        return f"{head}refused: {str(row['refused']).split(': ')[0]}"
    return f"{head}equal, predicted {row['predicted_bytes']:>9} measured {row['measured_bytes']:>9} {row['decisions']} {row['moved_bytes']}"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="")
    parser.add_argument("--devices", default="cpu,fxsim")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "cpu_core.json")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
