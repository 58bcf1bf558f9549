"""One arena for all steps, and recordings beside it: a step for which they leave no room has it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import zoo
from zoo import tokens

import fxoffload
from fxoffload.footprint import Footprint
from fxoffload.runtime.device_arena import DeviceArena, _inside
from fxoffload.runtime.room import Room
from fxoffload.testing.simulated_device import SimulatedDevice

KiB = 1024
PAGE_BYTES = 4 * KiB


def test_a_room_has_the_largest_arena_beside_which_all_else_fits_and_never_less_than_it_needs() -> None:
    room = Room(arena_bytes=100, beside_bytes=50, budget_bytes=400)
    assert room.most_arena_bytes == 350 and room.has(350) and not room.has(351)
    assert Room(arena_bytes=100, beside_bytes=350, budget_bytes=400).most_arena_bytes == 100


def test_an_arena_is_as_large_as_its_step_has_room_for() -> None:
    arena, moves = DeviceArena(torch.device("cpu")), []
    arena.moves = lambda: moves.append(arena.held_bytes)
    arena.reserve(1000)
    large, small, either = Room(1000, 0, 2000), Room(300, 1500, 2000), Room(200, 0, 2000)
    assert not arena.suits(large) and arena.take(large) and arena.held_bytes == 1000 and not moves
    assert arena.suits(either) and not arena.suits(small)
    value = arena.strided(0, (4,), (1,), torch.float32)
    assert not arena.take(small) and arena.held_bytes == 1000, "something looks into it"
    del value
    assert arena.take(small) and arena.held_bytes == 500 and moves == [1000]
    assert arena.take(either) and arena.held_bytes == 500 and arena.suits(small)
    assert arena.take(large) and arena.held_bytes == 1000 and moves == [1000, 500]


def test_addresses_behind_a_place_that_a_small_arena_has_not_stay_what_they_are() -> None:
    place = ((8 * PAGE_BYTES, 2 * PAGE_BYTES), (0, PAGE_BYTES))
    assert _inside(place, 10 * PAGE_BYTES) == place
    assert _inside(place, 9 * PAGE_BYTES) == ((0, PAGE_BYTES),) * 3


def read(logits: torch.Tensor) -> torch.Tensor:
    """As metrics do: in fp32, and log-probabilities."""
    return logits.float().log_softmax(-1).amax(-1)


@pytest.mark.integration
@pytest.mark.parametrize("page_bytes", [0, PAGE_BYTES])
def test_what_an_evaluation_returns_has_room_beside_the_memory_of_training(
        page_bytes: int, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training fills the budget, the evaluation's logits and what is made of them would not fit beside its arena."""
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True, page_bytes=page_bytes)))
    case = zoo.llama(vocab_size=2048, num_hidden_layers=2)
    plain, batch = copy.deepcopy(case.model).to("fxsim"), {name: value.to("fxsim") for name, value in tokens().items()}
    held_out = {"input_ids": tokens(seed=3)["input_ids"].to("fxsim")}

    def losses_and_metrics(model: Any) -> list[torch.Tensor]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for i in range(4):
            if i % 2 == 1:
                with torch.no_grad():
                    found.append(read(model(**held_out).logits).cpu())
            loss = model(**batch).loss
            loss.backward()
            found.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = losses_and_metrics(plain)
    del plain
    gc.collect()
    base = simulated_device.memory_allocated()
    n_logits = tokens()["input_ids"].numel() * 2048
    budget = 5 * n_logits * 4
    simulated_device.set_capacity(base + budget)
    model = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget=budget, dynamic=False)
    simulated_device.reset_peak_memory_stats()
    for ours, theirs in zip(losses_and_metrics(model), expected, strict=True):
        assert torch.equal(ours, theirs)
    arena = model.fxoffload.arena
    # Without a smaller arena the evaluation would have had to have all of it at once.
    assert arena.n_bytes + 3 * n_logits * 4 > budget
    assert simulated_device.max_memory_allocated() - base <= budget
    model.fxoffload.close()
