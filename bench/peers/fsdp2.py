"""FSDP2 with its CPU offload policy on one device: weights, adapters and optimizer's states in pinned host memory, block by block."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from peers.resident import checkpointed, with_liger
from peers.task import Task, Training, adamw, decoder_layers, loop
from peers.tuning import tuned


def fsdp2(task: Task, *, liger: bool = False, prefetch: int = 0, tune: bool = False) -> Training:
    """Every block is a group of its own, embedding, head and last norm the root's. `prefetch`: blocks whose copies are started ahead by
    the explicit interface, forward and backward; 0 leaves it to the default. `tune`: as in `resident`."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo")
    base = task.base("cpu")
    if liger:
        with_liger(base)
    model = task.adapted(base)
    checkpointed(model)
    layers = decoder_layers(model)
    mesh = init_device_mesh(task.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=task.device == "cuda")
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, offload_policy=policy)
    for i, layer in enumerate(layers if prefetch else ()):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - prefetch) : i][::-1])
    base.model.rotary_emb.to(task.device)
    optimizer = adamw(model)
    step = loop(model, task.batch(), optimizer)
    found = tuned(step, model, optimizer, task, careful=True) if tune else None
    return Training(
        step, facts=lambda: {} if found is None else {"layers_not_checkpointed": found.layers, "tried": found.tried},
        close=dist.destroy_process_group)
