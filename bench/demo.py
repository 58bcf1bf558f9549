"""`make demo`: fine-tunes a 36 M parameter Llama on the Python language reference inside a budget far below what it needs.

The same steps run twice, in plain PyTorch and through fxoffload.compile; the losses and the trained weights must be equal bit for
bit. Exit status 1 if they are not. Writes the graph dumps and report.html into out/demo/. No accelerator and no network needed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tokenizers
import torch
import transformers
from rich.console import Console
from rich.table import Table

import fxoffload
from fxoffload.cli.tables import plan_table
from fxoffload.sizes import format_bytes, parse_bytes
from fxoffload.training.config import DataConfig
from fxoffload.training.data import Batches, load_batches
from fxoffload.training.measure import measure_device_peak

VOCABULARY = 8192
END = "<|end|>"
CPU = torch.device("cpu")
FREE_BUDGET = "1TiB"  # so large that nothing needs to move: the plan that plain PyTorch corresponds to
SEED = 0
# On two CPU cores copying is always cheaper than computing again: the pin shows what recomputation looks like.
PINS = (fxoffload.pin("*.mlp.act_fn*", "checkpoint"),)
console = Console()


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the budget is compared with, in bytes."""

    parameter_bytes: int
    activation_bytes: int
    free_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One training run."""

    losses: tuple[float, ...]
    weights: dict[str, torch.Tensor]


def main() -> int:
    """0 if both runs agree to the bit and the budget held, else 1."""
    options = _parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    batches = load_text(options.out, options.seq_len, options.batch_size)
    budget = parse_bytes(options.device_budget, "--device-budget")
    sizes = measure_sizes(batches.batch(0))
    show_budget(budget, sizes)
    with _timed(f"plain PyTorch: {options.steps} steps"):
        plain = train(build_model(), batches, options.steps)
    compiled, within_budget = train_in_budget(batches, budget, options.steps, options.out)
    return 0 if show_losses(plain, compiled) and within_budget else 1


def load_text(out: Path, seq_len: int, batch_size: int) -> Batches:
    """The language reference as packed batches, with a BPE tokenizer trained on it and kept in `out`."""
    text = out / "language_reference.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.save_pretrained(out / "tokenizer")
    batches = load_batches((text,), fast, DataConfig((text,), seq_len, batch_size, seed=SEED))
    console.print(f"text: Python's language reference, {text.stat().st_size} bytes, {len(batches.rows)} rows of {seq_len} tokens")
    return batches


def build_model() -> transformers.LlamaForCausalLM:
    """A Llama with random weights, the same at every call."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def measure_sizes(batch: dict[str, torch.Tensor]) -> Sizes:
    """What plain training of this batch holds, and what the planner predicts without a limit."""
    model = build_model()
    n_parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    n_activation_bytes = saved_bytes(model, batch)
    free = fxoffload.plan(model, batch, device_budget=FREE_BUDGET, optimizer="adamw", machine="cpu")
    return Sizes(n_parameter_bytes, n_activation_bytes, free.predicted.device_peak_bytes)


def saved_bytes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the storages that plain autograd keeps from forward for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    n_bytes = sum(saved.values())  # while the loss keeps them alive, no address is used twice
    del loss
    return n_bytes


def show_budget(budget: int, sizes: Sizes) -> None:
    """Prints the budget beside what it must be smaller than. Raises ValueError where it is not."""
    table = Table("", "bytes", "budget is", title="What plain PyTorch holds", title_justify="left")
    limits = (
        ("parameters", sizes.parameter_bytes, 1.0), ("activations", sizes.activation_bytes, 1.0),
        ("free plan's peak", sizes.free_peak_bytes, 0.5),
    )
    for name, n_bytes, share in limits:
        table.add_row(name, format_bytes(n_bytes), f"{budget / n_bytes:.0%}")
        if budget > share * n_bytes:
            raise ValueError(f"--device-budget {format_bytes(budget)} must be at most {share:.0%} of the {name}, {format_bytes(n_bytes)}")
    table.add_row("budget", format_bytes(budget), "")
    console.print(table)


def train(model: torch.nn.Module, batches: Batches, n_steps: int) -> Outcome:
    """The user's own loop, with AdamW; the same for both runs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    losses = []
    for step in range(n_steps):
        loss = model(**batches.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(tuple(losses), {name: weight.detach().clone() for name, weight in model.named_parameters()})


def train_in_budget(batches: Batches, budget: int, n_steps: int, out: Path) -> tuple[Outcome, bool]:
    """The run through fxoffload.compile, and whether its measured peak kept the prediction and the budget."""
    with measure_device_peak(CPU) as peak:
        with _timed("fxoffload.compile"):
            model = fxoffload.compile(
                build_model(), batches.batch(0), device="cpu", device_budget=budget, optimizer="adamw", dump_dir=out / "dumps",
                pins=PINS,
            )
        with _timed(f"fxoffload: {n_steps} steps"):
            outcome = train(model, batches, n_steps)
        measured = peak(model)
    plan = model.fxoffload.plan
    console.print(plan_table(plan, "The plan"))
    show_moved(dict(model.fxoffload.transferred), n_steps)
    model.fxoffload.report(str(out / "report.html"))
    model.fxoffload.close()
    predicted = plan.predicted.device_peak_bytes
    console.print(f"device peak: predicted {format_bytes(predicted)}, measured {format_bytes(measured)}, budget {format_bytes(budget)}")
    console.print(f"graph dumps in {out / 'dumps'}, memory timeline in {out / 'report.html'}")
    return outcome, predicted <= budget and measured is not None and measured <= predicted


def show_moved(moved: dict[str, int], n_steps: int) -> None:
    """Prints the bytes that really moved."""
    table = Table("channel", "bytes", "per step", title=f"Moved in {n_steps} steps", title_justify="left")
    for channel in ("h2d", "d2h", "disk"):
        n_bytes = moved.get(channel, 0)
        table.add_row(channel, format_bytes(n_bytes), format_bytes(n_bytes // n_steps))
    console.print(table)


def show_losses(plain: Outcome, compiled: Outcome) -> bool:
    """Prints both loss columns; whether they and all trained weights are bitwise equal."""
    table = Table("step", "plain PyTorch", "fxoffload", "equal", title="Losses", title_justify="left")
    for step, (a, b) in enumerate(zip(plain.losses, compiled.losses, strict=True), start=1):
        table.add_row(str(step), repr(a), repr(b), "yes" if a == b else "NO")
    console.print(table)
    different = [name for name, weight in plain.weights.items() if not torch.equal(weight, compiled.weights[name])]
    n_equal = len(plain.weights) - len(different)
    note = f"; first different: {different[0]}" if different else ""
    console.print(f"trained weights bitwise equal: {n_equal} of {len(plain.weights)}{note}")
    return plain.losses == compiled.losses and not different


@contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    console.print(f"{what}: {time.perf_counter() - started:.1f} s")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--device-budget", default="96MiB")
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
