"""`torch.compile(model, backend="fxoffload")`: bit-equal to eager, within the budget, refusals that are true."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import assert_same, train
from torch import nn
from zoo import Case, bert, gpt2, llama, lora

import fxoffload
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, whose running statistics forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * 256, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.body(pixels).flatten(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


def conv() -> Case:
    torch.manual_seed(0)
    return Case(ConvNet().train(), {"pixels": torch.randn(16, 3, 16, 16), "labels": torch.arange(16) % 5})


def _larger(family: Callable[[], Case]) -> Callable[[], Case]:
    """The family's model with six times the batch: activations outweigh parameters."""

    def make() -> Case:
        case = family()
        if hasattr(case.model, "loss_type"):
            # Without it transformers logs a warning while it looks for the loss, and Dynamo breaks the graph there.
            case.model.loss_type = case.model.loss_type or "ForCausalLM"
        return Case(case.model, {k: v.repeat(6, *[1] * (v.ndim - 1)) for k, v in case.batch.items()})

    return make


def padded(case: Case) -> Case:
    """Its last row ends early: then transformers builds the mask in eager as it does under Dynamo, whose graph is what our backend gets."""
    mask = torch.ones_like(case.batch["input_ids"])
    mask[-1, -4:] = 0
    return Case(case.model, {**case.batch, "attention_mask": mask})


# Family -> a budget between its fixed residents and what keeping everything needs.
MODELS: dict[str, tuple[Callable[[], Case], str]] = {
    "llama": (_larger(llama), "6500KiB"), "gpt2": (_larger(gpt2), "9MiB"), "bert": (_larger(bert), "4200KiB"),
    "conv": (conv, "700KiB"), "lora": (lambda: padded(_larger(lora)()), "4MiB"),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, budget: int | str, **options: Any) -> Any:
    return torch.compile(model, backend="fxoffload", options={"device_budget": budget, **options})


def plan_in(folder: Path, label: str = "train-0-0") -> fxoffload.Plan:
    return fxoffload.Plan.load(folder / label / "plan.json")


def seeded(model: nn.Module, batch: Mapping[str, Any]) -> list[float]:
    torch.manual_seed(7)
    return train(model, [batch] * 3)


def test_torch_finds_the_backend_by_its_entry_point() -> None:
    assert "fxoffload" in torch._dynamo.list_backends()


@pytest.mark.parametrize("family", ["conv", "lora", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gpt2", "bert"))])
def test_training_is_bit_equal_to_eager_with_and_without_decisions(family: str, tmp_path: Path) -> None:
    make, tight = MODELS[family]
    plain = make()
    expected = seeded(plain.model, plain.batch)
    for budget in ("1GiB", tight):
        torch._dynamo.reset()
        case = make()
        assert seeded(compiled(case.model, budget, dump_dir=tmp_path / budget), case.batch) == expected
        assert_same(plain.model, case.model)
    assert plan_in(tmp_path / "1GiB").predicted.moved_bytes == {}
    counts = plan_in(tmp_path / tight).count()
    assert counts["swapout"] + counts["recompute"] > 0
    assert counts["gather"] == 0, "parameters stay where they are"


@pytest.mark.parametrize("family", ["llama", "conv", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "lora", "gpt2"))])
def test_training_stays_within_the_budget_on_a_device_of_that_capacity(
        family: str, simulated_device: SimulatedDevice, tmp_path: Path) -> None:
    make, tight = MODELS[family]
    before = simulated_device.memory_allocated()
    case = make()
    batch = {k: v.to("fxsim") for k, v in case.batch.items()}
    expected = seeded(copy.deepcopy(case.model).to("fxsim"), batch)
    gc.collect()
    model = case.model.to("fxsim")
    budget = fxoffload.sizes.parse_bytes(tight)
    simulated_device.set_capacity(before + budget)
    simulated_device.reset_peak_memory_stats()
    assert seeded(compiled(model, tight, dump_dir=tmp_path), batch) == expected
    assert simulated_device.max_memory_allocated() - before <= plan_in(tmp_path).predicted.device_peak_bytes <= budget


def test_a_budget_below_the_fixed_residents_names_fxoffload_compile_and_its_shortfall_is_true() -> None:
    case = _larger(llama)()
    with pytest.raises(fxoffload.PlanError, match=r"fxoffload\.compile moves them") as refused:
        seeded(compiled(case.model, 100_000), case.batch)
    assert refused.value.shortfall_bytes
    torch._dynamo.reset()
    seeded(compiled(case.model, 100_000 + refused.value.shortfall_bytes), case.batch)


@pytest.mark.parametrize(("options", "message"), [
    ({"device_budget": "1GiB", "budgets": 1, "speed": 2}, "no option 'budgets', 'speed'"),
    ({"machine": "cpu"}, "needs options="),
    ({"device_budget": "much"}, "device_budget: cannot read 'much'"),
    ({"device_budget": "1GiB", "pins": [fxoffload.pin("weight", "device")]}, "parameters stay where they are"),
])
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        torch.compile(layer, backend="fxoffload", options=options)(torch.ones(1, 2))


def test_pins_decide_over_values(tmp_path: Path) -> None:
    case = llama()
    pin = fxoffload.pin("*act_fn/silu#0", "swap")
    case.model.loss_type = "ForCausalLM"
    seeded(compiled(case.model, "1GiB", pins=[pin], dump_dir=tmp_path), case.batch)
    assert plan_in(tmp_path).count()["swapout"] == 2


def test_a_larger_batch_than_planned_is_planned_anew_and_max_shape_avoids_it(tmp_path: Path) -> None:
    # Dynamo captures the first size as a constant, the second as a symbol; what is larger than planned is one more.
    for options, n_plans in (({}, 3), ({"max_shape": {"batch": 64}}, 2)):
        torch._dynamo.reset()
        folder = tmp_path / str(n_plans)
        model = torch.compile(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), backend="fxoffload", dynamic=True,
            options={"device_budget": "1MiB", "dump_dir": folder, **options})
        for size in (8, 4, 16, 5):
            model(torch.randn(size, 8)).sum().backward()
        assert len(list(folder.iterdir())) == n_plans


def test_evaluation_is_planned_too(tmp_path: Path) -> None:
    case = bert()
    model = compiled(case.model.eval(), "1GiB", dump_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(**case.batch).logits, case.model(**case.batch).logits)
    assert plan_in(tmp_path, "forward-0-0").count()["swapout"] == 0


@pytest.mark.parametrize(("make", "reference"), [
    (lambda: padded(llama()), lambda model: model), (llama, lambda model: torch.compile(model, backend="eager")),
], ids=["eager, padded", "Dynamo's graph as it is"])
def test_autocast_around_forward_is_bit_equal(make: Callable[[], Case], reference: Callable[[nn.Module], Any]) -> None:
    results = []
    for wrap in (reference, lambda model: compiled(model, "1GiB")):
        torch._dynamo.reset()
        case = make()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrap(case.model)(**case.batch).loss
        loss.backward()
        results.append([loss, *(p.grad for p in case.model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_graph_break_is_logged_and_the_parts_still_train_bit_equal(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.first(x)
            torch._dynamo.graph_break()
            return SimpleNamespace(loss=self.second(y).square().mean())

    torch.manual_seed(0)
    plain = Broken()
    ours = copy.deepcopy(plain)
    batch = {"x": torch.randn(4, 8)}
    with caplog.at_level(logging.WARNING, "fxoffload"):
        assert seeded(compiled(ours, "1MiB"), batch) == seeded(plain, batch)
    assert_same(plain, ours)
    assert "graph break" in caplog.text
