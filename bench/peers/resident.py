"""Peers that keep the weights on the card: plain PyTorch, torch.compile, checkpointing, Liger's kernels, activations in host memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peers.task import Task, Training, adamw, decoder_layers, loop
from peers.tuning import tuned

# Saved tensors below this stay on the card: a copy of less takes longer to start than to make.
OFFLOAD_BYTES = 1 << 20


def resident(
    task: Task, *, liger: bool = False, checkpoint: str = "", compiled: dict[str, Any] | None = None, offload: str = "", tune: bool = False,
    functions: bool = False,
) -> Training:
    """`checkpoint`: "" for none, "device" or "host" for where block inputs wait. `compiled`: options of `nn.Module.compile`. `offload`:
    "save_on_cpu" puts all that autograd saves into pinned host memory, "functorch" lets AOTAutograd do it in the compiled graph.
    `tune`: checkpointing off for as many of the last layers as is fastest within the cap. `functions`: LoRA's blocks as autograd Functions."""
    base = task.base(task.device)
    if liger:
        with_liger(base)
    model = task.adapted(base)
    if functions:
        fuse_by_hand(model)
    if checkpoint:
        checkpointed(model, checkpoint == "host")
    if compiled is not None:
        if offload == "functorch":
            offload_in_graph()
        model.compile(**compiled)
    forward = saved_on_cpu(model) if offload == "save_on_cpu" else model
    optimizer = adamw(model)
    step = loop(forward, task.batch(), optimizer)
    found = tuned(step, model, optimizer, task) if tune else None
    return Training(step, facts=lambda: {} if found is None else {"layers_not_checkpointed": found.layers, "tried": found.tried})


def fuse_by_hand(model: torch.nn.Module) -> None:
    """The blocks that `tests/fused_functions.py` has, in the way of libraries for fine-tuning."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    from fused_functions import fuse_mlps, fuse_projections

    fuse_projections(model)
    fuse_mlps(model)


def with_liger(base: Any, fused_loss: bool = True) -> None:
    """Liger's fused rotary embedding, RMSNorm, SwiGLU and, with `fused_loss`, linear cross-entropy in the model's class. To run it needs a GPU
    that Triton knows."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3

    apply = {"llama": apply_liger_kernel_to_llama, "qwen3": apply_liger_kernel_to_qwen3}[base.config.model_type]
    apply(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=fused_loss, model=base)


def checkpointed(model: Any, on_host: bool = False) -> None:
    """Transformers' gradient checkpointing of every block."""
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=on_host)
    flags = [layer.gradient_checkpointing for layer in decoder_layers(model)]
    assert all(flags), "not every block is checkpointed"


def saved_on_cpu(model: Any) -> Callable[..., Any]:
    """The model's forward, under torch's public hooks that keep what autograd saves in pinned host memory."""

    def forward(**data: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
            return model(**data)

    return forward


def offload_in_graph() -> None:
    """AOTAutograd's own activation offloading, of every large saved value, on a stream of its own, fetched ahead. Its switches are
    private and said to be for tests; what is to be moved must be marked in the joint graph."""
    from torch._functorch import config

    def mark(joint: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_floating_point():
                node.meta["should_offload"] = value.numel() * value.element_size() >= OFFLOAD_BYTES
        return joint

    config.enable_activation_offloading = True
    config.activation_offload_separate_stream = True
    config.activation_offload_sink_wait = True
    config.activation_reload_prefetch = True
    config.joint_custom_pass = mark
