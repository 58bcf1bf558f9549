"""The loop hands the contract's arguments to fxoffload.compile and reports what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxoffload.errors import PlanError
from fxoffload.training.config import TrainConfig
from fxoffload.training.loop import StepReport, train

Configure = Callable[..., TrainConfig]


class StandInCompile:
    """fxoffload.compile's contract around a model that stays as it is."""

    def __init__(self) -> None:
        self.options: dict[str, object] = {}
        self.batch: dict[str, torch.Tensor] = {}
        self.closed = 0

    def __call__(self, model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: object) -> torch.nn.Module:
        self.options, self.batch = options, batch
        predicted = SimpleNamespace(device_peak_bytes=77)
        plan = SimpleNamespace(predicted=predicted, device_budget_bytes=1234)
        object.__setattr__(model, "fxoffload", SimpleNamespace(plan=plan, close=self.close))
        return model

    def close(self) -> None:
        self.closed += 1


def test_a_budget_goes_through_compile_with_the_contracts_arguments(configure: Configure) -> None:
    stand_in = StandInCompile()
    budgets = {"device_budget": "1 MiB", "host_budget": "2GiB", "disk_budget": 5}
    budgeted = train(configure(**budgets, cache_dir="kept", output_dir=None, save_every=None), compile_fn=stand_in)
    plain = train(configure(output_dir=None, save_every=None))
    assert budgeted.losses == plain.losses
    assert (budgeted.device_budget_bytes, budgeted.predicted_device_peak_bytes) == (2**20, 77)
    assert {name: stand_in.options[name] for name in budgets} == budgets
    assert stand_in.options["cache_dir"] == Path("kept")
    assert isinstance(stand_in.options["optimizer"], torch.optim.AdamW)
    assert stand_in.batch["input_ids"].shape == (2, 32)
    assert stand_in.closed == 1


def test_an_automatic_budget_is_reported_as_the_plan_chose_it(configure: Configure) -> None:
    assert train(configure(device_budget="auto"), max_steps=1, compile_fn=StandInCompile()).device_budget_bytes == 1234


def test_compile_is_closed_when_training_fails(configure: Configure) -> None:
    stand_in = StandInCompile()
    with pytest.raises(FloatingPointError, match="step 2: the loss is nan"):
        train(configure(device_budget=1, optimizer={"name": "sgd", "lr": 1e38}), compile_fn=stand_in)
    assert stand_in.closed == 1


def test_a_refused_budget_leaves_no_checkpoint(configure: Configure) -> None:
    def refuse(*_: object, **__: object) -> torch.nn.Module:
        raise PlanError("too small", 5)

    config = configure(device_budget=1)
    with pytest.raises(PlanError, match="too small"):
        train(config, compile_fn=refuse)
    assert config.output_dir is not None
    assert list(config.output_dir.glob("checkpoint*")) == []


def test_every_step_is_reported_while_training(configure: Configure) -> None:
    reports: list[StepReport] = []
    result = train(configure(), on_step=reports.append)
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
    assert tuple(report.loss for report in reports) == result.losses
    assert all(report.n_tokens == 64 for report in reports)


def test_epochs_become_steps(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one line\n" * 20)
    data = {"paths": str(path), "documents": "line", "packing": False, "batch_size": 4}
    result = train(configure(max_steps=None, epochs=2, save_every=None, gradient_accumulation=3, data=data))
    assert len(result.losses) == 4  # 2 x 5 batches in groups of 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "sgd", "betas": [0.9, 0.9]}}, r"optimizer\.betas: SGD takes no such argument"),
        ({"schedule": {"name": "cosine", "args": {"bogus": 1}}}, r"schedule\.args: cosine does not take them"),
        ({"device": "toaster"}, "device: 'toaster' is not a torch device"),
        ({"model": {"path": "/no"}}, "model: /no does not exist"),
        ({"tokenizer": "/no"}, "tokenizer: /no is not a folder"),
    ],
)
def test_what_cannot_be_built_is_named(configure: Configure, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(configure(**changes))
