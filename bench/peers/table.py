"""Every peer by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from peers.fsdp2 import fsdp2
from peers.ours import ours
from peers.resident import resident
from peers.task import Peer
from peers.zero3 import deepcompile, zero3

# DeepCompile recompiles at its fifth step. The builder of DeepSpeed's extensions does not parse the "9.0a" that torch may name.
_DEEPCOMPILE_WARM = 9
_DEEPSPEED = {"TORCH_CUDA_ARCH_LIST": "9.0"}

PEERS: Mapping[str, Peer] = {
    "plain": Peer("plain PyTorch, everything on the device", resident),
    "compile": Peer("torch.compile", partial(resident, compiled={"dynamic": False})),
    "compile-cudagraphs": Peer("torch.compile, reduce-overhead", partial(resident, compiled={"dynamic": False, "mode": "reduce-overhead"}), warm=6),
    "compile-offload": Peer(
        "torch.compile, AOTAutograd's activation offloading", partial(resident, compiled={"dynamic": False}, offload="functorch")),
    "checkpoint": Peer("gradient checkpointing of every block", partial(resident, checkpoint="device")),
    "checkpoint-offload": Peer("the same, block inputs in host memory", partial(resident, checkpoint="host")),
    "checkpoint-tuned": Peer("checkpointing off on as many layers as fit", partial(resident, checkpoint="device", tune=True)),
    "save-on-cpu": Peer("torch's save_on_cpu for all activations", partial(resident, offload="save_on_cpu")),
    "plain-functions": Peer("LoRA's MLPs and projections as autograd Functions", partial(resident, functions=True)),
    "liger": Peer("Liger's kernels", partial(resident, liger=True)),
    "liger-checkpoint": Peer("Liger's kernels, checkpointing of every block", partial(resident, liger=True, checkpoint="device")),
    "liger-checkpoint-offload": Peer("the same, block inputs in host memory", partial(resident, liger=True, checkpoint="host")),
    "liger-tuned": Peer(
        "Liger's kernels, checkpointing off on as many layers as fit", partial(resident, liger=True, checkpoint="device", tune=True)),
    "liger-save-on-cpu": Peer("Liger's kernels, torch's save_on_cpu for all activations", partial(resident, liger=True, offload="save_on_cpu")),
    "fsdp2": Peer("FSDP2 CPUOffloadPolicy, checkpointing", fsdp2),
    "fsdp2-prefetch": Peer("the same, two blocks fetched ahead explicitly", partial(fsdp2, prefetch=2)),
    "fsdp2-liger": Peer("FSDP2 CPUOffloadPolicy, Liger's kernels, checkpointing, two blocks ahead", partial(fsdp2, liger=True, prefetch=2)),
    "fsdp2-liger-tuned": Peer("the same, checkpointing off on as many layers as fit", partial(fsdp2, liger=True, prefetch=2, tune=True)),
    "zero3": Peer("DeepSpeed ZeRO-3, parameters and optimizer on the host, checkpointing", zero3, environment=_DEEPSPEED),
    "zero3-small-buckets": Peer("the same with DeepSpeed's default bucket sizes, a quarter", partial(zero3, buckets=1), environment=_DEEPSPEED),
    "zero3-liger": Peer("ZeRO-3 as above, Liger's kernels", partial(zero3, liger=True), environment=_DEEPSPEED),
    "deepcompile": Peer("DeepCompile over ZeRO-3", deepcompile, _DEEPCOMPILE_WARM, _DEEPSPEED),
    "deepcompile-offload-activation": Peer(
        "DeepCompile, activations to the host", partial(deepcompile, offload="activation"), _DEEPCOMPILE_WARM, _DEEPSPEED),
    "deepcompile-offload-parameters": Peer(
        "DeepCompile, parameters and optimizer on the host", partial(deepcompile, offload="parameters"), _DEEPCOMPILE_WARM, _DEEPSPEED),
    "fxoffload-bitwise": Peer('fxoffload, numerics="bitwise"', partial(ours, numerics="bitwise")),
    "fxoffload-reordered": Peer('fxoffload, numerics="reordered"', partial(ours, numerics="reordered")),
    "fxoffload-inductor": Peer('fxoffload, numerics="reordered", executor="inductor"', partial(ours, numerics="reordered", executor="inductor")),
    "fxoffload-liger": Peer(
        'the same, with Liger\'s rotary embedding, RMSNorm and SwiGLU in the model', partial(ours, numerics="reordered", executor="inductor", liger=True)),
    "fxoffload-liger-reordered": Peer(
        'Liger\'s three in the model, numerics="reordered"', partial(ours, numerics="reordered", liger=True)),
    "fxoffload-functions": Peer(
        "the same, with LoRA's MLPs and projections as autograd Functions", partial(ours, numerics="reordered", executor="inductor", functions=True)),
    "fxoffload-functions-bitwise": Peer('such Functions, numerics="bitwise"', partial(ours, numerics="bitwise", functions=True)),
    "fxoffload-functions-reordered": Peer(
        'such Functions, numerics="reordered"', partial(ours, numerics="reordered", functions=True)),
}
