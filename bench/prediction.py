"""Are predicted seconds and bytes true? Plans made with no accelerator and no weights, committed, then run unchanged on a CUDA card.

    python bench/prediction.py plan [--rows WORDS] [--machine h200]
                                                                writes bench/plans/prediction/MACHINE/ROW.json.xz; torch and
                                                                transformers must be those of the measuring machine, or graphs may differ
    python bench/prediction.py measure --rows ROW,ROW [--machine h200] [--lock FILE] [--out FILE]
    python bench/prediction.py table FILE ... [--out FILE]      one table and its medians

A row is a model, what of it is trained, a batch and a budget. `measure` prints the hashes of the plan and of the machine file before it
loads a model, compiles with `plan=` and `replan=False`, and runs under a hard cap of the budget: six steps to warm up, the first five with
the optimizer's (`optimizer_s`: the median of theirs alone), then the median of seven of forward and backward. With --lock several processes may share a card: they compile beside
each other, and when none does any more they measure one after the other. Weights are random in real shapes; the machine file was measured
on none of these models.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ROOT = Path(__file__).resolve().parent.parent
PLANS = ROOT / "bench" / "plans" / "prediction"
WARM, TIMED = 6, 7
# Seconds for the rates of each direction of the link.
_LINK_S = 2.0
# Llama 3.2's shapes of 1B and 3B, Llama 3.1's of 8B.
WIDTHS = {
    "1B": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 14336,
           "tie_word_embeddings": False},
}
# Of each the smallest is near what the step needs at least, the largest near what keeps everything.
BUDGETS = {
    ("3B", "lora", (4, 2048)): ("10GiB", "14GiB", "22GiB"),
    ("3B", "lora", (1, 4096)): ("5GiB", "8GiB", "14GiB"),
    ("3B", "4bit", (4, 2048)): ("10GiB", "14GiB", "22GiB"),
    ("3B", "4bit", (1, 4096)): ("5GiB", "8GiB", "14GiB"),
    ("1B", "full", (4, 2048)): ("10GiB", "14GiB", "20GiB"),
    ("1B", "full", (1, 4096)): ("5GiB", "8GiB", "12GiB"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A model, what is trained of it, a (batch, sequence) and a budget; `pins`, (pattern, place) each, and what they are called: a plan
    that a person made. `search`: how it is planned."""

    size: str
    trained: str
    shape: tuple[int, int]
    budget: str
    label: str = ""
    pins: tuple[tuple[str, str], ...] = ()
    search: str = "quick"

    @property
    def name(self) -> str:
        return "-".join([self.size, self.trained, f"{self.shape[0]}x{self.shape[1]}", self.budget, *([self.label] if self.label else [])])

    def path(self, machine: str) -> Path:
        """Where its plan for a shipped machine lies."""
        return PLANS / machine / f"{self.name}.json.xz"


ROWS = {row.name: row for (size, trained, shape), budgets in BUDGETS.items() for row in (Row(size, trained, shape, one) for one in budgets)}


def config(size: str) -> Any:
    """The model's shape, bf16."""
    import torch
    import transformers

    return transformers.LlamaConfig(
        **{"intermediate_size": 8192, "tie_word_embeddings": True} | WIDTHS[size], num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=8192, rope_theta=500000.0, dtype=torch.bfloat16, architectures=["LlamaForCausalLM"])


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def quantization() -> Any:
    import torch
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)


def plan(rows: list[Row], machine_name: str) -> None:
    """Writes the rows' plans for a shipped machine; budgets of one step share its capture."""
    from fxoffload import pin
    from fxoffload.api import captured, planning_options
    from fxoffload.dry import model_without_weights
    from fxoffload.errors import PlanError
    from fxoffload.machine import load_machine
    from fxoffload.sizes import parse_bytes

    machine = load_machine(machine_name)
    (PLANS / machine_name).mkdir(parents=True, exist_ok=True)
    for size, trained, shape, pins, search in dict.fromkeys((row.size, row.trained, row.shape, row.pins, row.search) for row in rows):
        model = model_without_weights(config(size), None if trained == "full" else lora(), quantization() if trained == "4bit" else None)
        options = planning_options(model, machine, "1TiB", None, 0, "adamw", "auto", None, "bitwise", [pin(*one) for one in pins], search=search)
        with captured(model, shape, options, machine) as session:
            for row in (r for r in rows if (r.size, r.trained, r.shape, r.pins, r.search) == (size, trained, shape, pins, search)):
                try:
                    found = session.study.plan(replace(session.study.planning.budgets, device_bytes=parse_bytes(row.budget)))
                except PlanError as error:
                    print(row.name, "refused:", str(error)[:200], flush=True)
                    continue
                row.path(machine_name).write_bytes(lzma.compress(found.to_json().encode()))
                print(row.name, found.predicted.step_s, found.predicted.device_peak_bytes, found.count(), flush=True)


def folder_of(size: str) -> Path:
    """A folder with random weights of the size, made once per machine."""
    import torch
    import transformers

    folder = Path(tempfile.gettempdir()) / f"fxoffload-prediction-{size}"
    if not (folder / "config.json").exists():
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config(size)).to(torch.bfloat16)
        model.to_empty(device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.data.fill_(1.0) if "norm" in name else parameter.data.normal_(0, 0.02, generator=generator)
        model.tie_weights()
        whole = Path(tempfile.mkdtemp()) / folder.name
        model.save_pretrained(whole)
        with contextlib.suppress(OSError):  # another process was sooner
            whole.rename(folder)
    return folder


def model_of(row: Row) -> Any:
    """The row's model with random weights, on the CPU; 4-bit weights are packed on the card, which takes seconds instead of minutes."""
    import peft
    import torch
    import transformers

    packed = {"quantization_config": quantization(), "device_map": {"": 0}} if row.trained == "4bit" else {}
    model = transformers.LlamaForCausalLM.from_pretrained(folder_of(row.size), dtype=torch.bfloat16, **packed).to("cpu")
    torch.manual_seed(1)
    return (model if row.trained == "full" else peft.get_peft_model(model, lora())).train()


def measure(row: Row, machine_name: str, lock: str | None) -> dict[str, Any]:
    """The committed plan of the row for a shipped machine, run."""
    from gpu_core import alone

    import torch

    import fxoffload
    from fxoffload.plans import Plan, plan_from
    from fxoffload.sizes import parse_bytes

    raw, machine = row.path(machine_name).read_bytes(), Path(fxoffload.__file__).parent / "machines" / f"{machine_name}.json"
    hashes = {"plan": hashlib.sha256(raw).hexdigest()[:16], "machine": hashlib.sha256(machine.read_bytes()).hexdigest()[:16]}
    print(row.name, hashes, flush=True)
    known: Plan = plan_from(json.loads(lzma.decompress(raw)), row.name)
    ids = torch.randint(0, 128256, row.shape, generator=torch.Generator().manual_seed(0))
    budget = parse_bytes(row.budget)
    with alone(lock, others=True):
        model = model_of(row)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
        started = time.perf_counter()
        fxoffload.compile(model, {"input_ids": ids, "labels": ids}, device="cuda", device_budget=budget, plan=known, replan=False)
        compiled_s = time.perf_counter() - started
    data = {"input_ids": ids.cuda(), "labels": ids.cuda()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    with alone(lock):
        torch.cuda.reset_peak_memory_stats()
        seconds, steps_s, losses = [], [], []
        for i in range(WARM + TIMED):
            torch.cuda.synchronize()
            started = time.perf_counter()
            loss = model(**data).loss
            loss.backward()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            losses.append(loss.item())
            if i < WARM - 1:
                started = time.perf_counter()
                optimizer.step()
                torch.cuda.synchronize()
                steps_s.append(time.perf_counter() - started)
            optimizer.zero_grad(set_to_none=True)
        predicted = known.predicted
        result = {
            "row": row.name, **asdict(row), "sha256": hashes, "predicted_s": predicted.step_s, "measured_s": statistics.median(seconds[WARM:]),
            "all_s": seconds, "optimizer_s": statistics.median(steps_s[1:]), "budget_bytes": budget, "predicted_bytes": predicted.device_peak_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved(), "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"],
            "compile_s": compiled_s, "captures": model.fxoffload.router.captures, "losses": losses, "decisions": known.count(),
            "replays": [graph.replays for graph in known.graphs.values()],
            "moved_bytes_per_step": {k: v / (WARM + TIMED) for k, v in model.fxoffload.engine.moved_bytes.items()},
        }
        result["observed"] = observed(model.fxoffload)
        model.fxoffload.close()
    return result


def observed(session: Any) -> dict[str, Any]:
    """What copies of the model's own memory took beside the machine file's seconds, all else too, and what the plan would have been
    predicted to take had the file said so of copies."""
    from fxoffload.observation import Trained, with_slower_copies

    seen = session.observe()
    graph = Trained.of(session, session.trained)
    return {
        "channel_factors": {channel.value: factor for channel, factor in seen.channel_factors.items()}, "compute_factor": seen.compute_factor,
        "step_s": seen.step_s, "predicted_with_such_copies_s": graph.step_s(with_slower_copies(session.machine, seen.channel_factors), graph.bounds),
    }


def link_rates(lock: str | None) -> dict[str, float]:
    """Bytes per second of long copies of page-locked memory, each way alone and both at once, now: what to hold against the machine file's
    where the rows that copy much are off."""
    from gpu_core import alone

    import torch

    from fxoffload.calibration.bench import Bench
    from fxoffload.calibration.copies import duplex, transfer
    from fxoffload.calibration.timing import Deadline, DeviceClock, SynchronousClock
    from fxoffload.effects import Channel

    def bench() -> Bench:
        return Bench(torch.device("cuda"), DeviceClock(), SynchronousClock(), Deadline(time.perf_counter() + _LINK_S))

    with alone(lock):
        torch.cuda.empty_cache()
        one_way = {f"{channel.value}_bytes_per_s": transfer(bench(), channel, pinned=True)["per_s"] for channel in (Channel.H2D, Channel.D2H)}
        return cast("dict[str, float]", one_way) | duplex(bench())


def written(path: Path | None, rows: dict[str, Any]) -> None:
    """Writes the rows with what they were measured with, where they are to be kept."""
    if path is not None:
        path.write_text(json.dumps(header() | rows, indent=1) + "\n")


def header() -> dict[str, Any]:
    """What the rows were measured with; the commit is filled in by hand where there is no repository."""
    import peft
    import torch
    import transformers

    return {
        "command": "python bench/prediction.py measure, then table", "commit": None, "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__,
    }


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints the rows; what they say together."""
    for row in rows:
        if "error" in row:
            print(f"{row['row']:24s} {row['error'][:150]}")
            continue
        row["seconds_off"] = row["predicted_s"] / row["measured_s"] - 1
        row["bytes_off"] = row["predicted_bytes"] / row["reserved_bytes"] - 1
        how = {True: "replayed", False: "called", None: ""}[None if "replays" not in row else all(row["replays"])]
        print(f"{row['row']:24s} {how:8s} predicted {row['predicted_s']:.4f} s measured {row['measured_s']:.4f} s {row['seconds_off']:+7.1%}   "
              f"predicted {row['predicted_bytes'] / 2**30:6.2f} reserved {row['reserved_bytes'] / 2**30:6.2f} GiB {row['bytes_off']:+6.2%}")
    ran = [row for row in rows if "error" not in row]
    if not ran:
        return {"rows": len(rows), "ran": 0}
    said = {
        "rows": len(rows), "ran": len(ran), "median_seconds_off": statistics.median(abs(r["seconds_off"]) for r in ran),
        "most_seconds_off": max(abs(r["seconds_off"]) for r in ran), "median_bytes_off": statistics.median(abs(r["bytes_off"]) for r in ran),
        "most_bytes_off": max(abs(r["bytes_off"]) for r in ran), "above_budget": sum(r["reserved_bytes"] > r["budget_bytes"] for r in ran),
        "above_prediction": sum(r["reserved_bytes"] > r["predicted_bytes"] for r in ran),
    }
    print(json.dumps(said, indent=1))
    return said


def main() -> int:
    """Exit status 1 when a row failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("plan", "measure", "table"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rows", default="", help="names of rows, or words of their names")
    parser.add_argument("--machine", default="h200", help="a shipped machine file's name")
    parser.add_argument("--lock")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    words = [word for word in chosen.rows.split(",") if word]
    rows = [row for name, row in ROWS.items() if not words or any(word in name for word in words)]
    if chosen.what == "plan":
        plan(rows, chosen.machine)
        return 0
    if chosen.what == "measure":
        from fxoffload.errors import PlanError

        results = []
        for row in rows:
            try:
                results.append(measure(row, chosen.machine, chosen.lock))
            except (PlanError, RuntimeError, ValueError, OSError) as error:  # a row that says what went wrong; the others count
                results.append({"row": row.name, "error": f"{type(error).__name__}: {error}"})
            print(json.dumps(results[-1]), flush=True)
            written(chosen.out, {"rows": results})
        if results:  # after the rows are safe: of all of them, beside none
            link = link_rates(chosen.lock)
            print(json.dumps(link), flush=True)
            for result in results:
                result["link"] = link
            written(chosen.out, {"rows": results})
        return 1 if any("error" in r for r in results) else 0
    files = [json.loads(file.read_text()) for file in chosen.files]
    read = sorted((row for file in files for row in file["rows"]), key=lambda row: list(ROWS).index(row["row"]))
    said = table(read)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(files[0] | {"summary": said, "rows": read}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
