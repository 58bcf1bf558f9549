"""Models that read images as grids of patches, trained with LoRA on their language model: predicted, and measured beside plain PyTorch.

    python bench/vision.py measure --model qwen3_vl --budget 8GiB [--out FILE]      one row; --budget none is plain PyTorch without a cap;
                                                                                    with --lock FILE several compile side by side, and measure in turns
    python bench/vision.py table FILE ... [--out FILE]                              one table

Every row has one image of 32 x 32 patches and 1024 tokens of text and image. Weights are random in real widths: Qwen3-VL of 2B with all its
layers, Qwen2.5-VL of 3B with 8 of 32 layers of its tower and 12 of 36 of its language model (a window is a call of attention of its own, and so
are its graph's nodes). Six steps to warm up, the first five with the optimizer's, then the median of seven of forward and backward, under a hard
cap of the budget. `gradients_repeat`: whether two more backward passes of the same weights gave the same bits, `differ`: how many tensors had
others. Where plain PyTorch's do not repeat, losses need not be equal behind the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WARM, TIMED = 6, 7
SEQUENCE, SIDE = 1024, 32
ROWS_OF = {"qwen3_vl": 4, "qwen2_5_vl": 2}


def model_of(name: str) -> Any:
    """The model with adapters, bf16, on the CPU."""
    import peft
    import torch
    import transformers

    text: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 128000}
    tower = {"num_heads": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if name == "qwen3_vl":
        text |= {"intermediate_size": 6144, "num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128,
                 "rope_parameters": rope | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}}
        tower |= {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 16, "num_position_embeddings": 2304,
                  "deepstack_visual_indexes": [5, 11, 17]}
        config, cls = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    else:
        text |= {"intermediate_size": 11008, "num_hidden_layers": 12, "num_key_value_heads": 2,
                 "rope_parameters": rope | {"mrope_section": [16, 24, 24]}}
        tower |= {"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [3, 7]}
        config, cls = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = cls(config(text_config=text, vision_config=tower, tie_word_embeddings=True))
    torch.set_default_dtype(torch.float32)
    adapters = peft.LoraConfig(r=16, target_modules=r".*language_model.*_proj", task_type="CAUSAL_LM")
    return peft.get_peft_model(model.cpu(), adapters).train()


def batch_of(model: Any, n: int) -> dict[str, Any]:
    """`n` rows of tokens with an image each."""
    import torch

    config, numbers = model.config, torch.Generator().manual_seed(0)
    vision = config.vision_config
    ids = torch.randint(1000, 100000, (n, SEQUENCE), generator=numbers)
    n_tokens = (SIDE // vision.spatial_merge_size) ** 2
    ids[:, 1], ids[:, 2:2 + n_tokens] = config.vision_start_token_id, config.image_token_id
    row = 3 * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": torch.randn(n * SIDE * SIDE, row, generator=numbers).bfloat16(), "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * n)}


def measure(name: str, budget: str, lock: str | None) -> dict[str, Any]:
    """One row."""
    from turns import alone

    with alone(lock, others=True):
        model, batch, result = compiled(name, budget)
    with alone(lock):
        return result | timed(model, batch)


def compiled(name: str, budget: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model, its batch, and what is known before it runs."""
    import peft
    import torch
    import transformers

    import fxoffload
    from fxoffload.sizes import parse_bytes

    model = model_of(name)
    batch = batch_of(model, ROWS_OF[name])
    torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "model": name, "budget": budget, "batch": [ROWS_OF[name], SEQUENCE], "parameters": sum(p.numel() for p in model.parameters()),
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    started = time.perf_counter()
    if budget == "none":
        model.cuda()
    else:
        n_bytes = parse_bytes(budget)
        torch.cuda.set_per_process_memory_fraction(n_bytes / torch.cuda.get_device_properties(0).total_memory)
        fxoffload.compile(model, batch, device="cuda", device_budget=n_bytes, machine="h200", dynamic=False)
        predicted = model.fxoffload.plan.predicted
        result |= {"budget_bytes": n_bytes, "predicted_s": predicted.step_s, "predicted_bytes": predicted.device_peak_bytes,
                   "decisions": model.fxoffload.plan.count()}
    result["compile_s"] = time.perf_counter() - started
    print(json.dumps(result), flush=True)
    return model, batch, result


def timed(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Seconds, losses and bytes of its steps."""
    import torch

    data = {key: value.cuda() for key, value in batch.items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for i in range(WARM + TIMED):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = model(**data).loss
        loss.backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
        if i < WARM - 1:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    first, second = (_gradients(model, data) for _ in range(2))
    return {
        "gradients_repeat": all(map(torch.equal, first, second)), "differ": sum(not torch.equal(*pair) for pair in zip(first, second)),
        "measured_s": statistics.median(seconds[WARM:]), "all_s": seconds, "losses": losses, "reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(), "allocator_retries": torch.cuda.memory_stats()["num_alloc_retries"]}


def _gradients(model: Any, data: dict[str, Any]) -> list[Any]:
    """Of all that is trained, in host memory."""
    trained = [p for p in model.parameters() if p.requires_grad]
    model(**data).loss.backward()
    found = [p.grad.detach().to("cpu", copy=True) for p in trained]
    for parameter in trained:
        parameter.grad = None
    return found


def main() -> int:
    """Exit status 1 when a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", default="qwen3_vl", choices=sorted(ROWS_OF))
    parser.add_argument("--budget", default="none")
    parser.add_argument("--lock")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.what == "measure":
        row = measure(chosen.model, chosen.budget, chosen.lock)
        print(json.dumps(row), flush=True)
        if chosen.out is not None:
            chosen.out.write_text(json.dumps(row) + "\n")
        return 0
    rows = sorted((json.loads(file.read_text()) for file in chosen.files), key=lambda row: (row["model"], row.get("budget_bytes", 1 << 60)))
    plain = {row["model"]: row for row in rows if row["budget"] == "none"}
    for row in rows:
        beside = plain.get(row["model"])
        if beside is not None and row is not beside:
            row["times_plain"], row["losses_equal"] = row["measured_s"] / beside["measured_s"], row["losses"] == beside["losses"]
        told = f"predicted {row['predicted_s']:.4f} s, {row['predicted_bytes'] / 2**30:.2f} GiB" if "predicted_s" in row else ""
        print(f"{row['model']:12s} {row['budget']:>8s} {row['measured_s']:.4f} s, reserved {row['reserved_bytes'] / 2**30:.2f} GiB "
              f"{told} {row.get('times_plain', 1):.2f} x plain, losses equal {row.get('losses_equal', '')}")
    if chosen.out is not None:
        chosen.out.write_text(json.dumps({"command": "python bench/vision.py measure, then table", "commit": None, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
