"""Models of the Qwen-VL kind, whose sizes are values of the batch: planned, inside a hard capacity, bit-equal, one capture for each grid."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import peft
import pytest
import torch
from loops import assert_same, train
from zoo import _bf16, of_grids, qwen2_5_vl, qwen3_vl

import fxoffload
from fxoffload.integrations import grids
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
Grids = tuple[tuple[int, int, int], ...]


@pytest.mark.parametrize("kind", ["image", pytest.param("video", marks=pytest.mark.slow)])
def test_every_grid_is_a_capture_bit_equal_inside_the_capacity(kind: str, simulated_device: SimulatedDevice) -> None:
    case = qwen2_5_vl()
    first: Grids = ((2, 8, 4), (2, 4, 8))
    # The first again, and images of the same sizes in another order.
    found = [of_grids(case.model, one, kind, length=40).batch for one in (first, first[::-1], first)]
    found = [{name: tensor.to("fxsim") for name, tensor in batch.items()} for batch in found]
    plain = copy.deepcopy(case.model).to("fxsim")
    losses = train(plain, found)
    plain.cpu()
    gc.collect()
    base = simulated_device.memory_allocated()
    simulated_device.set_capacity(base + (1 << 20))
    model: Any = fxoffload.compile(case.model, found[0], device="fxsim", device_budget=1 << 20, dynamic=False)
    assert sum(model.fxoffload.plan.predicted.moved_bytes.values()) > 1 << 20
    assert train(model, found) == losses
    assert_same(plain, model)
    assert model.fxoffload.router.captures == 2
    model.fxoffload.close()


@pytest.mark.slow
def test_adapters_beside_a_frozen_tower_train_bit_equal_and_fused() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(_bf16(qwen2_5_vl()).model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in qwen2_5_vl().batch.items()}
    plain = make()
    losses = train(plain, [batch] * 2)
    model = fxoffload.compile(make(), batch, device="cpu", device_budget="700KiB", dynamic=False)
    assert train(model, [batch] * 2) == losses
    assert_same(plain, model)
    fused = fxoffload.compile(make(), batch, device="cpu", device_budget="700KiB", dynamic=False, numerics="reordered", executor="inductor")
    assert train(fused, [batch] * 2) == pytest.approx(losses, rel=1e-2)


@pytest.mark.slow
def test_rows_of_any_length_with_the_same_grids_are_one_capture() -> None:
    case, plain = qwen2_5_vl(), qwen2_5_vl().model
    model: Any = fxoffload.compile(case.model, of_grids(case.model, length=48).batch, device="cpu", device_budget="1GiB")
    for length in (48, 40, 33):
        batch = of_grids(case.model, length=length).batch
        assert model(**batch).loss.item() == plain(**batch).loss.item()
    assert model.fxoffload.router.captures == 1


@pytest.mark.slow
def test_more_patches_take_more_memory() -> None:
    case = qwen3_vl()
    plan = fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="h200")
    larger = {**case.batch, **{k: v for k, v in of_grids(case.model, ((1, 8, 12), (1, 8, 8)), length=32).batch.items()}}
    assert plan.predicted.device_peak_bytes < fxoffload.plan(case.model, larger, device_budget="1GiB", machine="h200").predicted.device_peak_bytes


@pytest.mark.slow
def test_a_config_is_planned_as_its_model() -> None:
    case = qwen2_5_vl()
    case.model.config.architectures = [type(case.model).__name__]
    plans = [fxoffload.plan(one, case.batch, device_budget="1GiB", machine="h200") for one in (case.model, case.model.config)]
    assert plans[0].predicted == plans[1].predicted


@pytest.mark.parametrize("grid", [torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64, device="meta")])
def test_a_grid_without_values_is_refused_by_its_name(grid: torch.Tensor) -> None:
    case = qwen2_5_vl()
    with pytest.raises(ValueError, match="image_grid_thw: the sizes of a step are the values of this tensor"):
        fxoffload.plan(case.model, {**case.batch, "image_grid_thw": grid}, device_budget="1GiB", machine="h200")


@pytest.mark.unit
def test_windows_are_those_of_transformers() -> None:
    vision_utils = pytest.importorskip("transformers.vision_utils")
    dice = random.Random(0)
    for _ in range(40):
        merge = dice.choice((1, 2, 3))
        sizes = [[dice.randint(1, 3), merge * dice.randint(1, 9), merge * dice.randint(1, 9)] for _ in range(dice.randint(1, 3))]
        grid, window = torch.tensor(sizes), merge * 4 * dice.randint(1, 5)
        expected = vision_utils.get_vision_window_index(grid, merge, window, 4)
        for ours, theirs in zip(grids.window_index(grid, merge, window, 4), expected, strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


@pytest.mark.gpu
@pytest.mark.parametrize("make", [qwen2_5_vl, qwen3_vl])
def test_two_grids_have_the_bits_of_plain_pytorch_on_cuda(make: Any) -> None:
    case = make()
    torch.manual_seed(1)
    adapted = peft.get_peft_model(case.model, peft.LoraConfig(r=2, target_modules=r".*language_model.*_proj"))
    first: Grids = ((2, 8, 4), (2, 4, 8))
    found = [{name: tensor.cuda() for name, tensor in of_grids(case.model, one, length=40).batch.items()} for one in (first, first[::-1])]
    plain = copy.deepcopy(adapted).cuda()
    losses = [summed(plain, batch) for batch in found * 3]  # no optimizer: one on the host rounds otherwise
    model: Any = fxoffload.compile(adapted, found[0], device="cuda", device_budget="1GiB", dynamic=False)
    assert [summed(model, batch) for batch in found * 3] == losses
    assert_same(plain.cpu(), model)
    assert model.fxoffload.router.captures == 2
    model.fxoffload.close()


def summed(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """The loss; its gradients are added to those there are."""
    loss = model(**batch).loss
    loss.backward()
    return float(loss.item())
