"""One arena for all steps, and recordings beside it: a step for which they leave no room has it."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
import zoo
from zoo import FAMILIES, tokens

import fxoffload
from fxoffload.footprint import Footprint
from fxoffload.plans import Defer
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
@pytest.mark.parametrize("page_bytes", [0, pytest.param(PAGE_BYTES, marks=pytest.mark.slow)])
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


@pytest.mark.integration
@pytest.mark.parametrize("numerics, budget_mib, replays, is_whole", [
    ("reordered", 1700, True, False), ("reordered", 1800, True, True), ("bitwise", 1500, False, True), ("bitwise", 1800, True, True)])
def test_logits_are_whole_and_a_recording_copies_them_where_they_can_be_read_beside_both(
        numerics: str, budget_mib: int, replays: bool, is_whole: bool) -> None:
    """A recording keeps the logits and gives the caller a copy, and metrics make twice their fp32 bytes of that."""
    model = zoo.llama(vocab_size=65536, num_hidden_layers=2, hidden_size=256, intermediate_size=512, tie_word_embeddings=True).model
    ids = torch.randint(0, 65536, (4, 512))
    with torch.no_grad():
        plan = fxoffload.plan(
            model.bfloat16().eval(), {"input_ids": ids}, machine="h200", device_budget=f"{budget_mib}MiB", numerics=numerics).longest
    assert (plan.replays, not any(isinstance(decision, Defer) for decision in plan.decisions)) == (replays, is_whole)
    assert not is_whole or plan.predicted.device_peak_bytes + 8 * ids.numel() * 65536 <= budget_mib << 20


def in_turn(model: Any, acts: list[str]) -> list[torch.Tensor]:
    """What these acts give, on the CPU: steps on long and short batches, accumulation, evaluations whose logits are read, with labels too."""
    torch.manual_seed(7)
    optimizer, found = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05), []
    for i, act in enumerate(acts):
        batch = {name: value[:, : 16 if act == "short" else None].to("fxsim") for name, value in tokens(seed=i % 3).items()}
        if act in ("train", "short", "accumulate"):
            loss = model(**batch).loss
            loss.backward()
            found.append(loss.detach().cpu())
            del loss
            if act != "accumulate":
                optimizer.step()
                optimizer.zero_grad()
            continue
        model.train(act == "labels")
        with torch.no_grad():
            out = model(**batch) if act == "labels" else model(input_ids=batch["input_ids"])
            found.append((out.logits.argmax(-1) if act == "labels" else read(out.logits)).cpu())
        del out
        model.train()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_training_and_evaluations_in_any_order_keep_to_a_device_of_the_budget(
        seed: int, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    page_bytes, numerics = draw.choice([0, PAGE_BYTES]), draw.choice(["bitwise", "reordered"])
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True, page_bytes=page_bytes)))
    case = draw.choice([lambda: zoo.llama(vocab_size=2048), FAMILIES["lora"], FAMILIES["gpt2"]])()
    acts = [draw.choice(["train", "train", "short", "accumulate", "logits", "labels"]) for _ in range(12)]
    plain = copy.deepcopy(case.model).to("fxsim")
    plain.tie_weights()
    plain.config.use_cache = False
    expected = in_turn(plain, acts)
    logits_bytes = tokens()["input_ids"].numel() * plain.config.vocab_size * 4
    budget = int(draw.uniform(0.3, 1.2) * sum(p.nbytes for p in plain.parameters()) + draw.uniform(4, 6) * logits_bytes)
    del plain
    gc.collect()
    base = simulated_device.memory_allocated()
    simulated_device.set_capacity(base + budget)
    model = fxoffload.compile(case.model, tokens(), device="fxsim", device_budget=budget, numerics=numerics, machine="h200")
    for ours, theirs in zip(in_turn(model, acts), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **(dict(rtol=0, atol=0) if numerics == "bitwise" else dict(rtol=1e-5, atol=1e-5)))
    model.fxoffload.close()
