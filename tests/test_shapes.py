"""Batches of any shape up to the planned one run on few captures, equal to plain PyTorch and inside the budget."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import assert_same
from zoo import VOCAB, llama

import fxoffload
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
LENGTHS = range(8, 48)
LONGEST = max(LENGTHS)


def batch_of(kind: str, length: int, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch without padding, with padding on the right, or with several sequences packed into each row."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, length - 3:] = 0
        batch["labels"][0, length - 3:] = -100
    if kind == "packed":
        cut = length // 2
        batch["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)]).expand(rows, -1).contiguous()
    return batch


def batches(n: int) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """`n` batches of every length, the kinds alternating, and whether autocast is on; the last one is smaller."""
    lengths = random.Random(0).choices(LENGTHS, k=n - len(LENGTHS)) + list(LENGTHS)
    for i, length in enumerate(lengths):
        rows = 3 if i < n - 1 else 2
        yield batch_of(("plain", "padded", "packed")[i % 3], length, rows, seed=i), i % 8 >= 4


def loss_of(model: Any, batch: dict[str, torch.Tensor], autocast: bool) -> float:
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = model(**batch).loss
    loss.backward()
    return loss.item()


def captures(model: Any) -> int:
    return model.fxoffload.router.captures


@pytest.mark.parametrize(("n_batches", "n_modes"), [(48, 1), pytest.param(200, 2, marks=pytest.mark.slow)])
def test_batches_of_forty_lengths_need_at_most_four_captures_per_mode(n_batches: int, n_modes: int) -> None:
    """`n_modes`: without autocast, and with it too."""
    case = llama(num_hidden_layers=1, use_cache=False)  # with a cache, transformers itself ignores packing
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(case.model, batch_of("padded", LONGEST, 3, 0), device="cpu", device_budget="1100KiB")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    for i, (batch, may_cast) in enumerate(batches(n_batches)):
        autocast = may_cast and n_modes > 1
        assert loss_of(plain, batch, autocast) == loss_of(model, batch, autocast), (i, {k: v.shape for k, v in batch.items()})
        if i % 10 == 9:
            assert_same(plain, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert captures(model) <= 4 * n_modes
    assert len(model.fxoffload.plan.graphs) <= 4 * n_modes
    assert model.fxoffload.plan.predicted.device_peak_bytes <= 1100 * 1024

    before = captures(model)
    larger = batch_of("plain", LONGEST + 9, 3, 7)
    assert loss_of(plain, larger, False) == loss_of(model, larger, False)
    for length in (LONGEST + 5, 20):
        batch = batch_of("plain", length, 3, 8)
        assert loss_of(plain, batch, False) == loss_of(model, batch, False)
    assert captures(model) == before + 1
    with pytest.raises(fxoffload.PlanError, match="short"):
        loss_of(model, batch_of("plain", 250, 16, 9), False)
    assert loss_of(plain, larger, False) == loss_of(model, larger, False)
    assert_same(plain, model)
    model.fxoffload.close()


@pytest.mark.parametrize("n_read", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_shapes_keep_to_the_budget_of_a_device_that_has_no_more(n_read: int, simulated_device: Any) -> None:
    """`n_read`: of how many kinds of batches the logits are read, which takes a graph of evaluation for each."""
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model).to("fxsim")
    several = [batch for batch, _ in batches(45)][-16:]
    expected = [plain(**{k: v.to("fxsim") for k, v in batch.items()}).loss for batch in several]
    sum(expected).backward()
    plain.to("cpu")
    losses = [loss.item() for loss in expected]
    del expected

    budget = 1000 * 1024
    simulated_device.set_capacity(budget)
    simulated_device.reset_peak_memory_stats()
    model = fxoffload.compile(case.model, batch_of("padded", LONGEST, 3, 0), device="fxsim", device_budget=budget)
    kinds = list(dict.fromkeys(tuple(batch) for batch in several))
    assert len(kinds) == 3
    for batch, loss in zip(several, losses):
        out = model(**batch)
        out.loss.backward()
        assert out.loss.item() == loss
        if tuple(batch) in kinds[:n_read]:
            assert torch.isfinite(out.logits).all()
        del out
    assert captures(model) <= 4 + n_read  # four of training, and those of evaluation for the logits
    assert simulated_device.max_memory_allocated() <= model.fxoffload.plan.predicted.device_peak_bytes <= budget
    model.fxoffload.close()
    del model, batch
    assert simulated_device.memory_allocated() == 0


def test_max_shape_plans_for_more_than_the_sample() -> None:
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(
        case.model, batch_of("plain", 10, 2, 0), device="cpu", device_budget="1500KiB", max_shape={"batch": 4, "sequence": 40})
    for rows, length in ((2, 10), (4, 40), (3, 17)):
        batch = batch_of("plain", length, rows, length)
        assert loss_of(plain, batch, False) == loss_of(model, batch, False)
    assert captures(model) == 1
    model.fxoffload.close()


def test_equal_sizes_in_the_sample_do_not_tie_the_dimensions_together() -> None:
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(case.model, batch_of("plain", 6, 6, 0), device="cpu", device_budget="1500KiB")
    batch = batch_of("plain", 5, 3, 1)
    assert loss_of(plain, batch, False) == loss_of(model, batch, False)
    assert captures(model) == 1
    model.fxoffload.close()


@pytest.mark.slow
def test_a_capture_leaves_no_bytes_on_the_device_for_the_garbage_collector(simulated_device: SimulatedDevice) -> None:
    """Dynamo's frames end in cycles that hold the batch and the outputs; with the collector off, who does not free them is seen."""
    case = llama(num_hidden_layers=1)
    gc.collect()
    gc.disable()
    try:
        model = fxoffload.compile(case.model, batch_of("plain", 16, 2, 0), device="fxsim", device_budget="1GiB")
        assert collected_bytes(simulated_device) == 0
        for length, mode in ((16, model.train), (24, model.train), (24, model.eval), (32, model.train)):
            mode()
            with torch.set_grad_enabled(model.training):
                out = model(**batch_of("plain", length, 2, 0))
            del out
            assert collected_bytes(simulated_device) == 0
        model.fxoffload.close()
    finally:
        gc.enable()


def collected_bytes(device: SimulatedDevice) -> int:
    """Bytes on the device that only the garbage collector frees."""
    before = device.memory_allocated()
    gc.collect()
    return before - device.memory_allocated()


def test_parts_of_a_larger_batch_run_in_the_capture_of_the_sample() -> None:
    case = llama()
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(case.model, case.batch, device="cpu", device_budget="16MiB")
    whole = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    for length in (20, 24):
        part = whole[:, :length]
        assert torch.equal(model(input_ids=part, labels=part).loss, plain(input_ids=part, labels=part).loss)
    assert model.fxoffload.router.captures == 1
    model.fxoffload.close()


def test_a_shape_the_plan_does_not_cover_is_refused_without_replan() -> None:
    case = llama(num_hidden_layers=1)
    options: dict[str, Any] = {"device": "cpu", "device_budget": "600KiB"}
    model = fxoffload.compile(case.model, batch_of("plain", 16, 2, 0), dynamic=False, **options)
    plan = model.fxoffload.plan
    model.fxoffload.close()
    model = fxoffload.compile(model, batch_of("plain", 16, 2, 0), plan=plan, replan=False, **options)
    loss_of(model, batch_of("plain", 12, 2, 0), False)
    with pytest.raises(fxoffload.PlanError, match="replan=False"):
        model(**batch_of("plain", 200, 8, 0))
    loss_of(model, batch_of("plain", 12, 2, 0), False)
    model.fxoffload.close()


def test_a_capture_for_one_shape_has_no_symbols_and_each_other_shape_has_its_own_under_one_plan() -> None:
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model)
    options: dict[str, Any] = {"device": "cpu", "device_budget": "700KiB", "dynamic": False}
    model = fxoffload.compile(case.model, batch_of("plain", 16, 2, 0), **options)
    for shape, n_captures in (((16, 2), 1), ((12, 2), 2), ((10, 3), 3), ((16, 2), 3), ((12, 2), 3)):
        batch = batch_of("plain", *shape, 3)
        assert loss_of(plain, batch, False) == loss_of(model, batch, False)
        assert captures(model) == n_captures and len(model.fxoffload.plan.graphs) == 1
    assert_same(plain, model)
    assert not [n for graph in model.fxoffload.graphs.values() for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    model.fxoffload.close()
    with pytest.raises(ValueError, match="max_shape"):
        fxoffload.compile(model, batch_of("plain", 16, 2, 0), max_shape={"batch": 4}, **options)


@pytest.mark.slow
def test_more_recompiles_than_dynamo_allows_raise() -> None:
    class Counting(torch.nn.Linear):
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return super().forward(x) * times

    model = fxoffload.compile(Counting(4, 4), torch.ones(2, 4), device="cpu", device_budget="1MiB")
    with torch.no_grad(), pytest.raises(fxoffload.PlanError, match="(?s)one graph.*recompile_limit"):
        for i in range(80):
            assert model(torch.ones(2, 4), times=i) is not None
    model.fxoffload.close()
