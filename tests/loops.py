"""Training loops as users write them, and the comparison with plain PyTorch: bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

# Models this small gain nothing from threads, and on a busy host each operation would wait for them.
torch.set_num_threads(1)


def train(model: nn.Module, batches: Iterable[Mapping[str, Any]], lr: float = 1e-2) -> list[float]:
    """Losses of AdamW steps, one per batch. Gradients of the last step stay."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(plain: nn.Module, compiled: nn.Module) -> None:
    """Every parameter, gradient and buffer of the two models is equal to the bit."""
    ours = dict(compiled.named_parameters())
    assert list(ours) == [n for n, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours[name].cpu()), name
        assert (parameter.grad is None) == (ours[name].grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, ours[name].grad.cpu()), f"gradient of {name}"
    for (name, buffer), other in zip(plain.named_buffers(), compiled.buffers()):
        assert torch.equal(buffer, other.cpu()), name
