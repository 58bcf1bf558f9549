"""DeepSpeed: ZeRO-3 with parameters and optimizer in host memory, and DeepCompile, its compiler over ZeRO-3."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from peers.resident import checkpointed, with_liger
from peers.task import LEARNING_RATE, Task, Training

FP32_MASTER = "A: bf16 weights, fp32 master copy and moments of what is trained"
_ON_HOST = {"device": "cpu", "pin_memory": True}
# A parameter of fewer elements stays on the device; what is fetched ahead at most, in elements (the default, and four times it).
_PERSISTENT, _PREFETCHED = 100_000, 50_000_000
# What DeepCompile's budget leaves of a cap for what its profile does not see.
_HEADROOM_BYTES = 2 << 30


def zero3(task: Task, *, liger: bool = False, buckets: int = 4) -> Training:
    """ZeRO-3 offload with gradient checkpointing. `buckets`: times DeepSpeed's default sizes of what is fetched ahead and reduced at once."""
    base = task.base("cpu")
    if liger:
        with_liger(base)
    model = task.adapted(base)
    checkpointed(model)
    zero = {
        "stage": 3, "offload_param": _ON_HOST, "offload_optimizer": _ON_HOST, "overlap_comm": True, "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": buckets * _PREFETCHED, "stage3_param_persistence_threshold": _PERSISTENT}
    return _training(task, base, _engine(task, model, {"zero_optimization": zero}))


def deepcompile(task: Task, *, offload: str = "") -> Training:
    """DeepCompile over ZeRO-3. `offload`: "activation" or "parameters", of which it does one at a time."""
    zero: dict[str, Any] = {"stage": 3}
    if offload == "parameters":
        zero |= {"offload_param": _ON_HOST, "offload_optimizer": _ON_HOST}
    if task.cap_bytes is not None:  # else it plans for the card's memory, whatever the process may take
        os.environ["DS_DC_OFFLOAD_ACT_BUDGET_GB"] = f"{(task.cap_bytes - _HEADROOM_BYTES) / 1e9:.2f}"
    base = task.base("cpu")
    engine = _engine(task, task.adapted(base), {
        "zero_optimization": zero, "compile": {"deepcompile": True, "offload_activation": offload == "activation"}})
    engine.compile(backend="inductor")
    return _training(task, base, engine)


def _engine(task: Task, model: torch.nn.Module, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine of one process over the model."""
    import deepspeed

    deepspeed.init_distributed("nccl" if task.device == "cuda" else "gloo")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": task.row.batch, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}}, **config})
    return engine


def _training(task: Task, base: Any, engine: Any) -> Training:
    base.model.rotary_emb.to(task.device)
    data = task.batch()

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(**data).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(step, FP32_MASTER, close=dist.destroy_process_group)
