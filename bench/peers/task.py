"""What every peer is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from models import batch, config_of, draw_adapters, drawn, with_lora
from torch import nn

from peers.rows import Row

LEARNING_RATE = 1e-4
ALL_BF16 = "C: all bf16, AdamW's moments too"


@dataclass(frozen=True, slots=True)
class Task:
    """One row for one peer. `cap_bytes`: of reserved memory, already set; None without a cap. `device`: "cuda" or "cpu"."""

    row: Row
    device: str
    cap_bytes: int | None

    @property
    def capped(self) -> bool:
        return self.cap_bytes is not None

    def base(self, place: str) -> Any:
        """The model as it would be loaded, in training mode on `place`."""
        model = drawn(config_of(self.row.shape, use_cache=False), place).train()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # the weights were drawn there
        return model

    def adapted(self, base: Any) -> Any:
        """What is trained: the base itself, or with LoRA, its adapters drawn."""
        if self.row.trained == "full":
            return base
        model = with_lora(base, torch.bfloat16)
        draw_adapters(model)
        return model

    def model(self, place: str) -> Any:
        return self.adapted(self.base(place))

    def batch(self, place: str | None = None) -> dict[str, torch.Tensor]:
        vocabulary = config_of(self.row.shape).vocab_size
        return batch(self.row.batch, self.row.length, place or self.device, vocabulary)


@dataclass(frozen=True, slots=True)
class Training:
    """A peer ready to train: `step` is forward, backward and the optimizer's step, and returns the loss.

    `precision`: the class and what it means. `facts`: what else its row tells, asked after the last step.
    """

    step: Callable[[], torch.Tensor]
    precision: str = ALL_BF16
    facts: Callable[[], Mapping[str, Any]] = dict
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, slots=True)
class Peer:
    """`told`: what it is, in a line. `warm`: warm-up steps it needs at least. `environment`: what is set before its process starts."""

    told: str
    prepare: Callable[[Task], Training]
    warm: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The one optimizer of all rows but DeepSpeed's, which brings its own with the same settings."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)


def loop(forward: Callable[..., Any], data: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    """The step of a bare training loop."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = forward(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def decoder_layers(model: nn.Module) -> list[Any]:
    """The model's blocks, first to last."""
    stacks = (getattr(module, "layers", None) for module in model.modules())
    return list(next(stack for stack in stacks if isinstance(stack, nn.ModuleList)))
