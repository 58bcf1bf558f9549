"""What the first steps took, and a plan made anew from it, between two steps."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from loops import assert_same, train
from torch import nn
from zoo import FAMILIES, lora, tokens

import fxoffload
from fxoffload import observation
from fxoffload.effects import Channel
from fxoffload.errors import PlanError
from fxoffload.machine import load_machine
from fxoffload.observation import Trained, _fitting, with_slower_compute, with_slower_copies
from fxoffload.plans import Chunk, Plan
from fxoffload.step_clock import StepClock
from fxoffload.study import Study

# On which swapping costs nothing beside recomputing, and the other way round.
SLOW_COMPUTE = with_slower_compute(load_machine("cpu"), 300.0)
SLOW_COPIES = with_slower_copies(load_machine("cpu"), {Channel.H2D: 300.0, Channel.D2H: 300.0})
ONE_SHAPE = {"device": "cpu", "dynamic": False}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    """Losses of `n` steps, each of another batch."""
    losses = []
    for seed in range(n):
        optimizer.zero_grad()
        loss = model(**tokens(seed=seed)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.integration
@pytest.mark.parametrize(("family", "budget", "numerics"), [
    ("llama", 700_000, "bitwise"), pytest.param("lora", 1_651_255, "reordered", marks=pytest.mark.slow)])
def test_a_plan_made_anew_between_two_steps_changes_no_bit(family: str, budget: int, numerics: str) -> None:
    case, other = FAMILIES[family](), FAMILIES[family]()
    options: dict[str, Any] = dict(ONE_SHAPE, device_budget=budget, machine=SLOW_COMPUTE, numerics=numerics)
    plain = fxoffload.compile(other.model, other.batch, **options) if numerics != "bitwise" else other.model
    model = fxoffload.compile(case.model, case.batch, **options)
    ours, theirs, session = adam(model), adam(plain), model.fxoffload
    before, losses = session.plan, steps(model, ours, 3)
    assert session.replan(SLOW_COPIES)
    after = model.fxoffload.plan
    assert model.fxoffload is not session and session.closed and model.fxoffload.machine.transfers == SLOW_COPIES.transfers
    assert before.count()["swapin"] > after.count()["swapin"] and after.count()["recompute"] > before.count()["recompute"]
    assert [d for d in before.decisions if isinstance(d, Chunk)] == [d for d in after.decisions if isinstance(d, Chunk)]
    assert losses + steps(model, ours, 3) == steps(plain, theirs, 3) + steps(plain, theirs, 3)
    assert_same(plain, model)
    model.fxoffload.close()


class Replanning(transformers.TrainerCallback):
    """Plans anew once, after three steps, and after the first half of a fourth where gradients are accumulated."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.taken = model, False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.taken = self.model.fxoffload.replan(SLOW_COPIES)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and args.gradient_accumulation_steps == 1:
            self.taken = self.model.fxoffload.replan(SLOW_COPIES)


def trainer_of(model: nn.Module, folder: Path, n_accumulated: int, bf16: bool) -> transformers.Trainer:
    batches = [tokens(seed=seed) for seed in range(16)]
    return transformers.Trainer(
        model=model, train_dataset=[{name: values[i] for name, values in batch.items()} for batch in batches for i in range(len(batch["input_ids"]))],
        args=transformers.TrainingArguments(
            output_dir=str(folder), max_steps=6, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=n_accumulated,
            bf16=bf16, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=1e-2))


@pytest.mark.integration
@pytest.mark.parametrize(("n_accumulated", "bf16"), [pytest.param(1, True, marks=pytest.mark.slow), (2, False)])
def test_a_trainer_goes_on_by_a_plan_made_anew(n_accumulated: int, bf16: bool, tmp_path: Path) -> None:
    """Under autocast, which Accelerate puts around forward after compile, and with gradients that are accumulated already."""
    case, plain = FAMILIES["llama"](), FAMILIES["llama"]().model
    model = fxoffload.compile(case.model, case.batch, **ONE_SHAPE, device_budget=700_000, machine=SLOW_COMPUTE)
    replanning, session = Replanning(model), model.fxoffload
    ours, theirs = (trainer_of(one, tmp_path, n_accumulated, bf16) for one in (model, plain))
    ours.add_callback(replanning)
    ours.train(), theirs.train()
    assert replanning.taken and model.fxoffload is not session and model.fxoffload.router.captures == 1
    assert [h["loss"] for h in ours.state.log_history[:-1]] == [h["loss"] for h in theirs.state.log_history[:-1]]
    assert_same(plain, model)
    model.fxoffload.close()


@pytest.mark.slow
@pytest.mark.integration
def test_a_start_from_the_cache_is_planned_anew_for_the_largest_shapes_met(tmp_path: Path) -> None:
    losses = []
    for again in (False, True):
        case = FAMILIES["llama"]()
        model = fxoffload.compile(
            case.model, tokens(length=20), device="cpu", device_budget=700_000, machine=SLOW_COMPUTE, cache_dir=tmp_path)
        session, longer = model.fxoffload, tokens()
        assert session.router.captures == 1
        model(**longer).loss.backward()
        if again:
            assert session.replan(SLOW_COPIES) and model.fxoffload is not session
        losses.append([model(**batch).loss.item() for batch in (longer, tokens(length=20))])
        assert not again or model.fxoffload.router.captures == 1
        model.fxoffload.close()
    assert losses[0] == losses[1]


@pytest.mark.integration
def test_a_plan_that_is_no_faster_is_not_taken() -> None:
    case = FAMILIES["lora"]()
    model = fxoffload.compile(case.model, case.batch, **ONE_SHAPE, device_budget=870_000, machine=SLOW_COMPUTE)
    session = model.fxoffload
    assert not session.replan(SLOW_COMPUTE) and model.fxoffload is session and not session.closed
    known = Trained.of(session, session.trained)
    assert known.step_s(SLOW_COMPUTE, known.bounds) == known.known.predicted.step_s
    session.close()


@pytest.mark.integration
def test_a_plan_has_to_be_five_percent_faster_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    case, restarted = FAMILIES["lora"](), list[Plan]()
    session = fxoffload.compile(case.model, case.batch, **ONE_SHAPE, device_budget=870_000).fxoffload
    known = Trained.of(session, session.trained)
    (label,), (graph,) = session.plan.graphs, session.plan.graphs.values()
    monkeypatch.setattr(observation, "restart", lambda *args: restarted.append(args[-1]))
    for share, taken in ((0.96, False), (0.94, True)):
        step_s = known.step_s(session.machine, known.bounds) * share
        other = replace(session.plan, graphs={label: replace(graph, predicted=replace(graph.predicted, step_s=step_s))})
        monkeypatch.setattr(Study, "anew", lambda *_: other)
        assert session.replan(session.machine) == taken and restarted == [other] * taken
    session.close()


@pytest.mark.integration
def test_what_steps_took_is_observed_and_the_machine_says_so() -> None:
    case = FAMILIES["lora"]()
    model = fxoffload.compile(case.model, case.batch, device="cpu", device_budget=870_000)
    with pytest.raises(PlanError, match="0 of the last training steps were of one shape; 5 are needed"):
        model.fxoffload.observe()
    train(model, [tokens(seed=i) for i in range(6)])
    begun = time.perf_counter()
    train(model, [tokens(seed=i) for i in range(9)])
    longest_s = time.perf_counter() - begun
    seen = model.fxoffload.observe()
    assert seen.n_steps == 9 and 0 < seen.step_s < longest_s
    known = Trained.of(model.fxoffload, model.fxoffload.trained)
    assert known.step_s(seen.machine, known.bounds) == pytest.approx(seen.step_s, rel=0.05) or seen.compute_factor > 9
    assert f"{seen.n_steps} steps took {seen.step_s:.4f} s" in str(seen) and seen.channel_factors == {}
    model(**tokens(length=16)).loss.backward()
    with pytest.raises(PlanError, match="1 of the last training steps"):
        model.fxoffload.observe()
    model.fxoffload.close()


@pytest.mark.integration
def test_a_given_plan_that_may_not_change_is_not_made_anew() -> None:
    case = FAMILIES["lora"]()
    plan = fxoffload.plan(copy.deepcopy(case.model), case.batch, device_budget="1MiB", machine="cpu")
    model = fxoffload.compile(case.model, case.batch, device="cpu", device_budget="1MiB", plan=plan, replan=False, machine="cpu", dynamic=False)
    with pytest.raises(PlanError, match="replan=False"):
        model.fxoffload.replan(SLOW_COPIES)
    model.fxoffload.close()


def test_all_that_is_no_copy_or_every_copy_takes_so_many_times_as_long() -> None:
    h200 = load_machine("h200")
    slower, linked = with_slower_compute(h200, 2.0), with_slower_copies(h200, {Channel.H2D: 3.0})
    assert slower.matrix["bf16"].product_s(4096, 4096, 4096) == pytest.approx(2 * h200.matrix["bf16"].product_s(4096, 4096, 4096))
    for size in (0, 1 << 12, 1 << 24, 1 << 34):
        assert slower.memory["copy"].seconds(size) == pytest.approx(2 * h200.memory["copy"].seconds(size))
        assert slower.attention[0].backward.seconds(size) == pytest.approx(2 * h200.attention[0].backward.seconds(size))
        assert linked.transfer_s(size, Channel.H2D) == pytest.approx(3 * h200.transfer_s(size, Channel.H2D))
        assert linked.transfer_s(size, Channel.D2H) == h200.transfer_s(size, Channel.D2H) == slower.transfer_s(size, Channel.D2H)
    assert slower.dispatch_s == 2 * (h200.dispatch_s or 0) and linked.matrix == h200.matrix


def test_the_factor_of_compute_is_the_likeliest_that_gives_what_was_measured() -> None:
    assert _fitting(lambda factor: 0.1 + 2 * factor, 3.1) == pytest.approx(1.5, rel=0.01)
    assert _fitting(lambda factor: 0.1 + 2 * factor, 0.5) == pytest.approx(0.2, rel=0.05)
    assert _fitting(lambda factor: max(5.0, 2 * factor), 4.9) == pytest.approx(1.0, rel=0.01), "copies are waited for: it makes no difference"
    assert 0.8 < _fitting(lambda factor: 5 + 0.1 * factor, 5.0) < 1, "and here next to none"
    assert _fitting(lambda factor: 5 + 2 * factor, 50.0) == pytest.approx(10.0, rel=0.05)


def test_a_forward_without_a_backward_is_no_step() -> None:
    clock = StepClock(torch.device("cpu"))
    for _ in range(6):
        clock.begin((("ids", (2, 3)),))
    clock.end("step-0")
    clock.end("step-0")
    with pytest.raises(PlanError, match="1 of the last"):
        clock.taken()


@pytest.mark.gpu
def test_on_a_card_copies_are_timed_and_a_plan_made_anew_changes_no_bit() -> None:
    """Wide enough for copies that are long, in a budget in which both weights and values leave the card."""
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for again in (False, True):
            case = lora(hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=8)
            model = fxoffload.compile(case.model, tokens(4, 256), device="cuda", device_budget="240MiB")
            batches = [{name: value.cuda() for name, value in tokens(4, 256, seed).items()} for seed in range(7)]
            torch.manual_seed(0)
            losses = train(model, batches)
            if again:
                seen, session = model.fxoffload.observe(), model.fxoffload
                assert set(seen.channel_factors) == {Channel.H2D, Channel.D2H} and all(0.2 < one < 5 for one in seen.channel_factors.values())
                machine = with_slower_copies(session.machine, {Channel.H2D: 300.0, Channel.D2H: 300.0})
                assert session.replan(machine) and model.fxoffload.plan.count()["recompute"] > session.plan.count()["recompute"]
            found.append((losses, train(model, batches), model))
            model.fxoffload.close()
    finally:
        torch.use_deterministic_algorithms(False)
    (before, after, plain), (ours_before, ours_after, model) = found
    assert before == ours_before and after == ours_after
    assert_same(plain, model)
