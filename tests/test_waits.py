"""When a step waits for the host's copies, and who waits for the others: on the simulated device, whose engine is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.runtime.transfers import SynchronousEngine
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration


@pytest.fixture
def asked(simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often an engine was asked to finish, and to settle."""
    found: Counter[str] = Counter()
    for name in ("finish", "settle"):
        monkeypatch.setattr(SynchronousEngine, name, lambda self, name=name: found.update([name]))
    yield found


class Block(nn.Module):
    """Two products and what is between them; returns a loss."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def compiled(trained: bool) -> Any:
    """A block whose weights are on the host."""
    model = fxoffload.compile(Block(trained), torch.randn(4, 32, requires_grad=True), device="fxsim", device_budget="64MiB")
    assert model.fxoffload.plan.predicted.moved_bytes["h2d"] > 0
    return model


def step(model: Any) -> torch.Tensor:
    """Trains on what also wants a gradient, which is given back."""
    x = torch.randn(4, 32).to("fxsim").requires_grad_()
    model(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(("trained", "waits"), [(True, 1), (False, 0)])
def test_backward_waits_where_gradients_go_to_the_host_and_nowhere_else(trained: bool, waits: int, asked: Counter[str]) -> None:
    model = compiled(trained)
    step(model)
    model.zero_grad()
    asked.clear()
    assert step(model).device.type == "fxsim"
    assert asked == Counter(finish=waits)
    gradient = model.up.weight.grad
    assert gradient is None or gradient.device.type == "cpu" and trained


def test_an_optimizers_step_waits_for_nothing(asked: Counter[str]) -> None:
    """That it was made is noted without asking the model for its parameters, which would wait for the whole step."""
    model: Any = fxoffload.compile(Block(True), torch.randn(4, 32), device="fxsim", device_budget="64MiB")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 32).to("fxsim")).backward()
    before = model.fxoffload.writes.state([])
    asked.clear()
    optimizer.step()
    optimizer.zero_grad()
    assert not asked and model.fxoffload.writes.state([]) != before


@pytest.mark.parametrize("access", [
    lambda model, state: model.up.weight,
    lambda model, state: next(model.parameters()),
    lambda model, state: model.up.load_state_dict(state),
    lambda model, state: model.to(torch.float32),
    lambda model, state: model.fxoffload.close(),
], ids=["attribute", "parameters", "load_state_dict", "to", "close"])
def test_who_is_given_a_parameter_after_a_step_gets_it_behind_the_copies_that_read_it(
        access: Callable[[Any, Any], object], asked: Counter[str]) -> None:
    model = compiled(trained=False)
    state = model.up.state_dict()
    step(model)
    asked.clear()
    access(model, state)
    assert asked["settle"]


def test_a_forward_without_gradients_ends_behind_all_copies(asked: Counter[str]) -> None:
    model = compiled(trained=False)
    with torch.no_grad():
        model(torch.randn(4, 32).to("fxsim"))
        asked.clear()
        model(torch.randn(4, 32).to("fxsim"))
    assert asked == Counter(settle=1)
