"""How long a start takes until its first step's gradients are there, with an empty compile cache and with a filled one.

    python bench/compile_cache.py [--rows full,lora,lora-tight] [--layers 16] [--starts 3] [--shared] [--out FILE]

A start is a process of its own that builds a narrow Llama of random weights, compiles it for "cpu" and runs one forward and backward.
`process_s` are processor seconds of the process from its first line to the gradients, imports and model included; `compile_s` those of
`fxoffload.compile` and the step alone. `bits` is a digest of the loss and all gradients: equal for every start of a row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plan_time import ROOT, header

_BUDGETS = {"full": "64MiB", "lora": "64MiB", "lora-tight": "2MiB"}


def start(row: str, layers: int, folder: Path) -> dict[str, Any]:
    """One start here: seconds, whether the cache was used, what came of it."""
    import torch
    import transformers

    import fxoffload

    notes = _Notes()
    logging.getLogger("fxoffload").addHandler(notes)
    logging.getLogger("fxoffload").setLevel(logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, vocab_size=256))
    if row != "full":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.randint(0, 256, (2, 32))
    batch = {"input_ids": ids, "labels": ids}
    built_s = time.process_time()
    model = fxoffload.compile(model.train(), batch, device="cpu", device_budget=_BUDGETS[row], cache_dir=folder)
    loss = model(**batch).loss
    loss.backward()
    ended_s = time.process_time()
    plan = model.fxoffload.plan
    assert plan.decisions, "an inert plan says nothing"
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(b"" if parameter.grad is None else parameter.grad.numpy().tobytes())
    return {
        "process_s": round(ended_s, 2), "compile_s": round(ended_s - built_s, 2), "hits": notes.hits, "plan": plan.id,
        "bits": digest.hexdigest()[:16], "decisions": len(plan.decisions),
    }


class _Notes(logging.Handler):
    """Counts the graphs that came from the cache."""

    hits = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.hits += "was not traced and not planned again" in record.getMessage()


def started(row: str, layers: int, folder: Path) -> dict[str, Any]:
    """One start in a fresh process."""
    command = [sys.executable, str(Path(__file__)), "--one", row, "--layers", str(layers), "--cache-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measured(row: str, layers: int, n: int) -> dict[str, Any]:
    """`n` pairs of starts, each with a folder of its own. Raises AssertionError when the second is not the first's training."""
    pairs = []
    for _ in range(n):
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = started(row, layers, Path(folder)), started(row, layers, Path(folder))
            assert (cold["hits"], warm["hits"]) == (0, 1), "the cache was not used as it should be"
            assert all(cold[name] == warm[name] for name in ("plan", "bits", "decisions")), "another training"
            entry_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        pairs.append((cold, warm))
    found: dict[str, Any] = {"row": row, "layers": layers, "n": n, "budget": _BUDGETS[row], "entry_bytes": entry_bytes, **pairs[0][1]}
    for name in ("process_s", "compile_s"):
        colds, warms = ([start[name] for start in starts] for starts in zip(*pairs))
        found |= {f"cold_{name}": colds, f"warm_{name}": warms}
        found[f"{name.removesuffix('_s')}_ratio"] = round(statistics.median(w / c for c, w in zip(colds, warms)), 3)
        del found[name]
    return found


def main() -> int:
    arguments = parsed()
    if arguments.one:
        print(json.dumps(start(arguments.one, arguments.layers, arguments.cache_dir)))
        return 0
    result = header(arguments)
    result["command"] = f"python bench/compile_cache.py {' '.join(sys.argv[1:])}".strip()  # type: ignore[assignment]
    for row in arguments.rows.split(","):
        found = measured(row, arguments.layers, arguments.starts)
        print(f"{row:10s} cold {found['cold_process_s']} s, warm {found['warm_process_s']} s: {found['process_ratio']}", flush=True)
        result["rows"].append(found)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(_BUDGETS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--shared", action="store_true", help="other work ran on the same cores; it is noted in the file")
    parser.add_argument("--machine", default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "compile_cache.json")
    parser.add_argument("--one", choices=_BUDGETS, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
