"""fxoffload itself, as its README says to call it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from peers.resident import fuse_by_hand, with_liger
from peers.task import Task, Training, adamw, loop

# Of what is free on the card, without a cap: what libraries take lies beside it.
UNCAPPED_SHARE = 0.9


def ours(task: Task, *, numerics: str, executor: str = "eager", liger: bool = False, functions: bool = False) -> Training:
    """The model is loaded on the host and compiled for the cap and the batch's shape; the loop is everybody's. `liger`: with Liger's kernels in
    it, but for its loss. `functions`: its MLPs and its attention's projections are autograd Functions that keep frozen weights on `ctx`."""
    import fxoffload

    base = task.base("cpu")
    if liger:
        with_liger(base, fused_loss=False)
    model: Any = task.adapted(base)
    if functions:
        fuse_by_hand(model)
    started = time.perf_counter()
    fxoffload.compile(
        model, task.batch("cpu"), device=task.device, device_budget=_budget(task), host_budget=task.row.host_bytes, numerics=numerics, executor=executor,
        optimizer="adamw_torch_fused", dynamic=False)
    compile_s = time.perf_counter() - started
    n_steps = 0
    step_once = loop(model, task.batch(), adamw(model))

    def step() -> torch.Tensor:
        nonlocal n_steps
        n_steps += 1
        return step_once()

    return Training(step, facts=lambda: {"compile_s": compile_s, **facts(model.fxoffload, n_steps)}, close=model.fxoffload.close)


def _budget(task: Task) -> int:
    if task.cap_bytes is not None:
        return task.cap_bytes
    return int(torch.cuda.mem_get_info()[0] * UNCAPPED_SHARE) if task.device == "cuda" else 1 << 40


def facts(session: Any, n_steps: int) -> Mapping[str, Any]:
    """The plan's predictions and decisions, the memory nodes of the lowered graphs and what moved per step."""
    from fxoffload.effects import Tier
    from fxoffload.ops import SPECS

    plan = session.plan
    nodes = Counter(SPECS[node.target].name for graph in session.graphs.values() for node in graph.nodes if node.target in SPECS)
    return {
        "plan_id": plan.id, "machine": plan.machine, "numerics": plan.numerics, "decisions": plan.count(), "nodes": dict(sorted(nodes.items())),
        "n_nodes": sum(len(graph.nodes) for graph in session.graphs.values()),
        "predicted_bytes": plan.predicted.device_peak_bytes, "predicted_host_bytes": plan.predicted.host_peak_bytes,
        "predicted_step_s": plan.predicted.step_s, "replays": [graph.replays for graph in plan.graphs.values()],
        "moved_bytes_per_step": {channel: moved / n_steps for channel, moved in session.transferred.items()},
        "pinned_bytes": session.memory.peak_bytes[Tier.PINNED],
    }
