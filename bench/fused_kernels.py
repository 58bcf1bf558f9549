"""Whether Inductor makes one CUDA kernel of each fused program of a model, found without a card.

    python bench/fused_kernels.py [--models llama,qwen3,...] [--out FILE]

Needs a torch with Triton (a CUDA build; no driver) and transformers, peft. Every model is a small one of its family, fully trained and with
LoRA on all linears, in bf16: narrow at the sizes of a batch, and as wide as real ones, of one layer, at symbolic sizes, and evaluated too.
Steps are fused as `executor="inductor"` fuses them, and each program goes through Inductor's lowering, scheduling and code generation for an
H200 that is only described: what a process with a card compiles, up to the compiler of Triton's source. Rows: `programs`, and of those that are
not one kernel without memory of its own the name, kernels and allocations. Families that this transformers cannot make, or that cannot be captured, have a row with the message. Exit status 1
where a program is not one kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import torch.fx as fx
import transformers
from torch._dynamo import device_interface
from torch._inductor import config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor as fakes

import fxoffload
from fxoffload.captured_step import CapturedStep
from fxoffload.errors import PlanError
from fxoffload.fusion import fused, sums_rows, write
from fxoffload.pipeline import Context, get_pass
from fxoffload.runtime.fused import Form
from fxoffload.torch_compat import fake_mode_of, kernel_options, lower_in_place

ROOT = Path(__file__).resolve().parent.parent
_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}
_HEADS = {"head_dim": 64}
# What else a family is to be told to be small.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys((
        "llama", "qwen2", "olmo2", "olmo3", "granite", "cohere", "cohere2", "phi3", "phi", "mistral", "bert", "modernbert", "falcon", "gpt_neox",
        "smollm3", "starcoder2", "gptj", "bloom", "stablelm", "persimmon", "nemotron", "exaone4", "ernie4_5", "arcee", "bitnet", "seed_oss",
        "apertus"), {}),
    **dict.fromkeys(("qwen3", "gemma2", "gemma3_text", "glm4"), _HEADS),
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "t5": {"d_model": 256, "d_ff": 512, "num_layers": 2, "num_heads": 4, "d_kv": 64, "decoder_start_token_id": 0},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, **_HEADS},
}


@dataclass(frozen=True, slots=True)
class Size:
    """`batch`: and length. `trained`: what of a model is, in its rows. `wide`: settings of a wide model, by the name of each."""

    batch: tuple[int, int]
    is_symbolic: bool
    trained: tuple[str, ...]
    wide: Mapping[str, int]

    def of(self, family: str) -> dict[str, int]:
        """Those of `wide` that the family is told otherwise."""
        told = {**_SIZES, **FAMILIES[family]}
        return {name: n for name, n in self.wide.items() if name in told}


# Loops over rows of 256 are one, over longer ones several: Inductor decides otherwise what is put down between them.
SIZES = {
    "narrow": Size((2, 64), False, ("all", "lora"), {}),
    "wide": Size((4, 2048), True, ("all", "lora", "none"), {
        "hidden_size": 3072, "n_embd": 3072, "d_model": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "n_head": 24, "num_heads": 24,
        "num_key_value_heads": 8, "head_dim": 128, "d_kv": 128, "moe_intermediate_size": 1024, "n_layer": 1, "num_layers": 1, "num_hidden_layers": 1,
        "n_positions": 8192, "max_position_embeddings": 8192}),
}
_CARD = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536, warp_size=32, gcnArchName="", shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, is_integrated=0, is_multi_gpu_board=0, clock_rate=1980000,
    memory_clock_rate=3201000, memory_bus_width=5120, uuid="", pci_bus_id=0, max_threads_per_block=1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(FAMILIES))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "fused_kernels.json")
    arguments = parser.parse_args()
    rows = []
    for family in arguments.models.split(","):
        for name, trained in ((name, trained) for name, size in SIZES.items() for trained in size.trained):
            rows.append({"model": family, "size": name, "trained": trained, **row(family, trained, SIZES[name])})
            print(json.dumps(rows[-1]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    report = {"command": " ".join(["python bench/fused_kernels.py", *sys.argv[1:]]), "commit": commit, "python": platform.python_version(),
              "torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(one.get("apart") for one in rows))


def row(family: str, trained: str, size: Size) -> dict[str, Any]:
    """The programs of a family's step, and which of them are not one kernel. `trained`: "all", "lora", or of an evaluation "none"."""
    try:
        graph = fused_step(small(family, trained, size), size, trained != "none")
    except Exception as refusal:  # a row with its message: families are others' code, of many versions
        return {"refused": f"{type(refusal).__name__}: {str(refusal).splitlines()[0]}"}
    forms: dict[object, Form] = {}
    for node in graph.find_nodes(op="call_function", target=fused):
        form = Form(node)
        forms.setdefault(form.key(), form)
    apart = []
    with described_card():
        for form in forms.values():
            try:
                kernels, allocations = compiled(form)
            except PlanError as refusal:
                return {"refused": f"PlanError: {refusal}"}
            if kernels != 1 or allocations:
                apart.append({"name": form.name, "program": form.text, "kernels": kernels, "allocations": allocations})
    return {"programs": len(forms), "apart": apart}


def small(family: str, trained: str, size: Size) -> torch.nn.Module:
    """A model of the family, as deep and wide as `size` says; what is evaluated has adapters."""
    configuration = transformers.AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family], **size.of(family)})
    kind: Any = transformers.AutoModelForCausalLM
    if family in ("bert", "modernbert"):
        kind = transformers.AutoModelForMaskedLM
    if family == "t5":
        kind = transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(configuration, dtype=torch.bfloat16)
    return model if trained == "all" else peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))


def fused_step(model: torch.nn.Module, size: Size, trains: bool) -> fx.Graph:
    """The model's step, or an evaluation without labels, as its executor runs it."""
    ids = torch.randint(3, 1000, size.batch)
    batch, steps = {"input_ids": ids, "labels": ids} if trains else {"input_ids": ids}, list[CapturedStep]()
    most = {"batch": 2 * size.batch[0], "sequence": 2 * size.batch[1]} if size.is_symbolic else None
    of = CapturedStep.of

    def noted(*arguments: Any) -> CapturedStep:
        steps.append(of(*arguments))
        return steps[-1]

    with mock.patch.object(CapturedStep, "of", staticmethod(noted)), torch.set_grad_enabled(trains):
        fxoffload.plan(model.train(trains), batch, machine="h200", device_budget="1000GiB", max_shape=most)
    step = steps[-1]
    graph = get_pass("fuse").run(step.graph, Context(step.bounds))
    assert isinstance(graph, fx.Graph)
    return graph


def compiled(form: Form) -> tuple[int, int]:
    """The kernels and allocations of the code that Inductor makes of a fused call."""
    traced, inputs = form.traced(torch.device("cuda", 0))
    mode = fake_mode_of(inputs)
    lower_in_place(write)
    with torch._guards.tracing(torch._guards.TracingContext(mode)), torch.no_grad(), config.patch(kernel_options(sums_rows(form.text))):
        lowering = GraphLowering(traced, example_inputs=inputs, shape_env=mode.shape_env, cpp_wrapper=False)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), V.set_fake_mode(mode):
            lowering.run(*inputs)
            source: Any = lowering.codegen()[0]
    source = str(getattr(source, "value", source))
    return source.count(".run("), source.count("= empty_strided_")


@contextlib.contextmanager
def described_card() -> Iterator[None]:
    """Inductor sees the card that is described above."""
    import triton
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    interface = device_interface.CudaInterface
    answers = {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": _CARD, "get_device_capability": (9, 0),
        "_lazy_init": None, "synchronize": None, "get_compute_capability": 90, "is_bf16_supported": True}
    active = {"get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0, "is_active": True, "get_device_capability": (9, 0)}
    triton.runtime.driver.set_active(types.SimpleNamespace(**{name: _always(value) for name, value in active.items()}))
    with contextlib.ExitStack() as stack:
        owners: Sequence[Any] = (torch.cuda, interface, interface.Worker)
        for owner in owners:
            for name, value in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, _always(value) if owner is torch.cuda else staticmethod(_always(value))))
        stack.enter_context(mock.patch.object(fakes, "init_gpu_context", _always(None)))
        for module in (_triton, scheduler):
            stack.enter_context(mock.patch.object(module, "has_triton", _always(True)))
        yield


def _always(value: object) -> Any:
    return lambda *arguments, **keywords: value


if __name__ == "__main__":
    sys.exit(main())
