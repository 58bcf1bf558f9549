"""Kernels of several ops give the bits and the random draws of torch's own, within fewer bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fxoffload import composed
from fxoffload.testing.simulated_device import SimulatedDevice

SHAPES = [(8, 8), (5, 13), (64, 96)]


def operands(device: str, dtype: torch.dtype, shape: tuple[int, int], gqa: bool, contiguous: bool) -> list[torch.Tensor]:
    """grad, query, key and value [2, 4 or 2, length, 16]; laid out [batch, length, heads, dim] unless `contiguous`."""
    torch.manual_seed(3)
    rows, columns = shape
    heads = 2 if gqa else 4
    sizes = [(4, rows), (4, rows), (heads, columns), (heads, columns)]
    if contiguous:
        return [torch.randn(2, h, n, 16, dtype=dtype).to(device) for h, n in sizes]
    return [torch.randn(2, n, h, 16, dtype=dtype).to(device).transpose(1, 2) for h, n in sizes]


def mask_of(kind: str, device: str, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor | None:
    """Two padded sequences; a row of the first sees nothing."""
    seen = torch.ones(2, 1, *shape, dtype=torch.bool)
    seen[0, :, 0] = False
    seen[1, :, :, -3:] = False
    if kind == "bool":
        return seen.to(device)
    return torch.zeros(2, 1, *shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).to(device) if kind == "float" else None


def by_autograd(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float,
                causal: bool, scale: float | None, gqa: bool) -> tuple[torch.Tensor, ...]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        return torch.autograd.grad(F.scaled_dot_product_attention(*leaves, mask, p, causal, scale=scale, enable_gqa=gqa), leaves, grad)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("device", ["cpu", "fxsim"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attentions_gradients_are_autograds(device: str, dtype: torch.dtype, p: float, simulated_device: SimulatedDevice) -> None:
    masks = ["none", "bool", "float", "causal"]
    for shape, mask, gqa, contiguous, scale in itertools.product(SHAPES, masks, [False, True], [False, True], [None, 0.3, -0.5]):
        given = *operands(device, dtype, shape, gqa, contiguous), mask_of(mask, device, dtype, shape), p, mask == "causal", scale, gqa
        torch.manual_seed(5)
        expected = by_autograd(*given)
        drawn = torch.randn(3)
        torch.manual_seed(5)
        found = composed.attention_gradients(*given)
        for one, other in zip(found, expected, strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(bits(one), bits(other)), (shape, mask, gqa, contiguous, scale)
        assert torch.equal(torch.randn(3), drawn)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_three_values_of_length_by_length_are_alive_at_most(p: float, simulated_device: SimulatedDevice) -> None:
    length, heads = 256, 4
    given = [torch.randn(1, heads, length, 8).to("fxsim") for _ in range(4)]
    square = heads * length * length * 4
    peak = peak_beside(simulated_device, lambda: composed.attention_gradients(*given, None, p, False, None, False))
    # The gradient of the values is made before the third, and the mask of the dropout is a quarter of one.
    assert 3 * square <= peak <= (3.25 if p else 3) * square + given[0].nbytes + 4096
    assert peak_beside(simulated_device, lambda: by_autograd(*given, None, p, False, None, False)) > peak


def peak_beside(device: SimulatedDevice, run: Callable[[], object]) -> int:
    """Bytes of the device at their highest while `run` runs, beside those that were there before."""
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    run()
    return device.max_memory_allocated() - before


def test_dropout_is_torchs_own() -> None:
    src = torch.randn(7, 33, requires_grad=True)
    torch.manual_seed(1)
    expected = F.dropout(src, 0.2)
    torch.manual_seed(1)
    result, kept = composed.dropout_kernel(src.detach(), 0.2)
    assert torch.equal(result, expected)
    grad = torch.randn(7, 33)
    assert torch.equal(composed.dropout_backward_kernel(grad, kept, 0.2), torch.autograd.grad(expected, src, grad)[0])
