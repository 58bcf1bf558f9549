"""Ops that put a value into a part of a copy: the bits and strides of ATen's, and memory for the tensor alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import assert_same
from torch import nn

import fxoffload
from fxoffload.footprint import Footprint
from fxoffload.runtime.scatters import SCATTERS
from fxoffload.testing.simulated_device import SimulatedDevice

aten = torch.ops.aten


@pytest.mark.unit
def test_they_have_the_bits_and_strides_of_atens() -> None:
    whole = torch.randn(3, 4, 6, 8)
    tensors = [whole, whole[1], whole.transpose(1, 3), whole[:, ::2], whole[..., 1:5], whole[0, 0].expand(4, 6, 8), whole[:, 1:2, 0]]
    for tensor in tensors:
        calls: list[tuple[Any, tuple[Any, ...], torch.Tensor]] = [(aten.select_scatter.default, (1, -1), tensor.select(1, -1))]
        calls += [(aten.slice_scatter.default, args, aten.slice.Tensor(tensor, *args)) for args in ((), (1,), (1, 1, 99, 3), (-1, -3, None), (0, 0, -1))]
        calls += [(aten.diagonal_scatter.default, args, tensor.diagonal(*args)) for args in ((), (1,), (-1, 1, 0))]
        calls += [(aten.copy.default, (), tensor)]
        for op, args, part in calls:
            src = torch.randn(part.shape)
            expected, found = op(tensor, src, *args), SCATTERS[op](tensor, src, *args)
            assert torch.equal(found, expected) and found.stride() == expected.stride(), (op, args, tensor.shape)


class Turned(nn.Module):
    """Rows of three kinds, one kind written into another's copy as rotations of several axes are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 96), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds = self.first(x).unflatten(-1, (3, 32)).movedim(-2, 0) * 1.5
        chosen = kinds[0].clone()
        for kind in (1, 2):
            chosen[..., kind:24:3] = kinds[kind, ..., kind:24:3]
        chosen[0, 0] = 2.0
        return self.last(chosen.sin()).square().mean()


@pytest.mark.integration
@pytest.mark.parametrize("by_offsets", [False, True])
def test_a_step_that_writes_into_slices_keeps_to_what_was_predicted(
        by_offsets: bool, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=by_offsets)))
    torch.manual_seed(0)
    compiled: Any = Turned()
    plain, x = copy.deepcopy(compiled).to("fxsim"), torch.randn(32, 48, 64, device="fxsim")
    plain(x).backward()
    plain.cpu()
    base = simulated_device.memory_allocated()
    fxoffload.compile(compiled, x, device="fxsim", device_budget="3MiB", dynamic=False)
    simulated_device.reset_peak_memory_stats()
    compiled(x).backward()
    assert_same(plain, compiled)
    assert simulated_device.max_memory_allocated() - base <= compiled.fxoffload.plan.predicted.device_peak_bytes - x.nbytes
    compiled.fxoffload.close()
