"""What it costs the CPU to issue an op of a step: a small model is compiled, whose device work is done sooner than it is issued."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import nn

from ..api import compile
from ..cost import node_s
from ..graph import Bounds, output_of
from ..machine import default_machine
from ..text import BOUNDS
from .bench import DTYPES, Bench

_WIDTH, _HEADS, _LENGTH, _BLOCKS = 256, 4, 128, 8
_BUDGET = "1GiB"
_MIN_STEPS, _MAX_STEPS = 5, 500


class _Block(nn.Module):
    """What most blocks are made of: norms, products, attention, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.projections, self.out = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(_WIDTH, 2 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.projections(self.before(x)).view(*x.shape[:2], 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


def issuing(bench: Bench) -> float:
    """Seconds per op of a step that is called op by op and copies nothing, the step's own cost included: the upper quartile, because
    others disturb a host, and a plan that does not wait for it is at hand (a recording)."""
    model = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(DTYPES[bench.dtype]).requires_grad_(False)
    x = bench.values(1, _LENGTH, _WIDTH).requires_grad_()
    # Memory that is not pinned: such a step is not recorded.
    session: Any = compile(model, (x,), device=bench.device, device_budget=_BUDGET, pin_memory=False, optimizer=None).fxoffload
    with session as compiled:
        _step(compiled, x)
        n_ops = sum(_n_timed(graph) for graph in session.graphs.values())
        samples: list[float] = []
        while len(samples) < _MIN_STEPS or (len(samples) < _MAX_STEPS and bench.deadline.left_s() > 4 * max(samples)):
            started = time.perf_counter()
            _step(compiled, x)
            samples.append(time.perf_counter() - started)
        return sorted(samples)[3 * len(samples) // 4] / n_ops


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    x.grad = None
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _n_timed(graph: fx.Graph) -> int:
    """Ops of a lowered graph that a plan counts as issued."""
    bounds: Bounds = output_of(graph).meta[BOUNDS]
    machine = default_machine("cuda")
    return sum(node_s(node, bounds, machine)[1] > 0 for node in graph.nodes)
