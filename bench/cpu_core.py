"""Every family at three budgets on the CPU and on the simulated device: writes bench/results/cpu_core.json.

    python bench/cpu_core.py [--families llama,gpt2] [--devices cpu,fxsim] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> int:
    """Exit status 0 when every row ran bit-equal or was rightly refused."""
    arguments = parsed()
    from fxoffload.testing.simulated_device import install

    simulated = install() if "fxsim" in arguments.devices.split(",") else None
    import torch
    import transformers
    from runs import rows
    from zoo import FAMILIES

    names = arguments.families.split(",") if arguments.families else list(FAMILIES)
    result: dict[str, object] = {
        "command": "python bench/cpu_core.py " + " ".join(sys.argv[1:]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": platform.platform(), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "steps": 5, "rows": [],
    }
    failed = []
    for name in names:
        for device in arguments.devices.split(","):
            try:
                found = [asdict(row) for row in rows(name, device, simulated if device == "fxsim" else None)]
            except Exception as error:  # a row that fails is a row that says so; the others still count
                found = [{"family": name, "device": device, "error": f"{type(error).__name__}: {str(error)[:400]}"}]
            for row in found:
                fine = bool(row.get("refused")) or bool(row.get("losses_equal") and row.get("gradients_equal") and row.get("parameters_equal"))
                failed += [] if fine else [row]
                print(line(row), flush=True)
            result["rows"] += found  # type: ignore[operator]
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


def line(row: dict[str, object]) -> str:
    """One row for people."""
    if "error" in row:
        return f"{row['family']:24s} {row['device']:6s} FAILED {row['error']}"
    head = f"{row['family']:24s} {row['device']:6s} {row['fraction']:.2f}"
    if row["refused"]:
        return f"{head} refused: {str(row['refused']).split(': ')[0]}"
    equal = "equal" if row["losses_equal"] and row["gradients_equal"] and row["parameters_equal"] else "DIFFERENT"
    return f"{head} {equal:9s} predicted {row['predicted_bytes']:>9} measured {row['measured_bytes'] or '-':>9} {row['decisions']} {row['moved_bytes']}"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="")
    parser.add_argument("--devices", default="cpu,fxsim")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "cpu_core.json")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
