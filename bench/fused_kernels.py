"""Whether Inductor makes one CUDA kernel of each fused program of a model, found without a card.

    python bench/fused_kernels.py [--models llama,qwen3,...] [--out FILE]

Needs a torch with Triton (a CUDA build; no driver) and transformers, peft. Every model is a small one of its family, fully trained and with
LoRA on all linears, in bf16. Its steps are fused as `executor="inductor"` fuses them, and each program goes through Inductor's lowering,
scheduling and code generation for an H200 that is only described: what a process with a card compiles, up to the compiler of Triton's
source. Sizes are those of the batch, not symbolic. Rows: `programs`, and of those that are not one kernel without memory of its own the name,
kernels and allocations. Families that this transformers cannot make, or that cannot be captured, have a row with the message. Exit status 1
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
from collections.abc import Iterator, Sequence
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
from fxoffload.fusion import fused, program, sums_rows, write
from fxoffload.graph import name_of
from fxoffload.pipeline import Context, get_pass
from fxoffload.runtime.loops import in_finest_sizes
from fxoffload.torch_compat import fake_tensor, kernel_options, traced_program

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
        for trained in ("all", "lora"):
            rows.append({"model": family, "trained": trained, **row(family, trained)})
            print(json.dumps(rows[-1]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    report = {"command": " ".join(["python bench/fused_kernels.py", *sys.argv[1:]]), "commit": commit, "python": platform.python_version(),
              "torch": torch.__version__, "transformers": transformers.__version__, "rows": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(one.get("apart") for one in rows))


def row(family: str, trained: str) -> dict[str, Any]:
    """The programs of a family's step, and which of them are not one kernel."""
    try:
        graph = fused_step(small(family, trained))
    except Exception as refusal:  # a row with its message: families are others' code, of many versions
        return {"refused": f"{type(refusal).__name__}: {str(refusal).splitlines()[0]}"}
    programs: dict[object, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=fused):
        programs.setdefault((node.args[1], str([_layout(v) for v in _operands(node)])), node)
    apart = []
    with described_card():
        for node in programs.values():
            kernels, allocations = compiled(node)
            if kernels != 1 or allocations:
                apart.append({"name": name_of(node), "program": node.args[1], "kernels": kernels, "allocations": allocations})
    return {"programs": len(programs), "apart": apart}


def small(family: str, trained: str) -> torch.nn.Module:
    """A model of the family with two layers."""
    configuration = transformers.AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family]})
    kind: Any = transformers.AutoModelForCausalLM
    if family in ("bert", "modernbert"):
        kind = transformers.AutoModelForMaskedLM
    if family == "t5":
        kind = transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(configuration, dtype=torch.bfloat16)
    return model if trained == "all" else peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))


def fused_step(model: torch.nn.Module) -> fx.Graph:
    """The model's step as its executor runs it."""
    ids = torch.randint(3, 1000, (2, 64))
    steps: list[CapturedStep] = []
    of = CapturedStep.of

    def noted(*arguments: Any) -> CapturedStep:
        steps.append(of(*arguments))
        return steps[-1]

    with mock.patch.object(CapturedStep, "of", staticmethod(noted)):
        fxoffload.plan(model, {"input_ids": ids, "labels": ids}, machine="h200", device_budget="100GiB")
    step = steps[-1]
    graph = get_pass("fuse").run(step.graph, Context(step.bounds))
    assert isinstance(graph, fx.Graph)
    return graph


def compiled(node: fx.Node) -> tuple[int, int]:
    """The kernels and allocations of the code that Inductor makes of a fused call."""
    operands, results = _operands(node), list(node.meta["val"])
    text, sizes = str(node.args[1]), [_number(s.meta["val"] if isinstance(s, fx.Node) else s) for s in node.args[2]]  # type: ignore[union-attr]
    mode = fakes.FakeTensorMode()
    inputs = [fake_tensor(mode, *_layout(v), v.dtype, torch.device("cuda", 0)) for v in (*operands, *results)]

    def body(*given: torch.Tensor) -> tuple[()]:
        for out, made in zip(given[len(operands) :], program(text)(*given[: len(operands)], *sizes), strict=True):
            write(out, made)
        return ()

    traced = traced_program(body, inputs)
    traced.graph = in_finest_sizes(traced.graph)
    traced.recompile()
    inputs[len(operands) :] = [p.meta["val"] for p in traced.graph.find_nodes(op="placeholder")][len(operands) :]
    context = torch._guards.TracingContext(mode)
    with torch._guards.tracing(context), torch.no_grad(), config.patch(kernel_options(sums_rows(text))):
        lowering = GraphLowering(traced, example_inputs=inputs, cpp_wrapper=False)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()), V.set_fake_mode(mode):
            lowering.run(*inputs)
            source: Any = lowering.codegen()[0]
    source = str(getattr(source, "value", source))
    return source.count(".run("), source.count("= empty_strided_")


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [operand.meta["val"] for operand in node.args[0]]  # type: ignore[union-attr]


def _layout(value: torch.Tensor) -> tuple[list[int], list[int], int]:
    return [*map(_number, value.shape)], [*map(_number, value.stride())], _number(value.storage_offset())


def _number(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


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
