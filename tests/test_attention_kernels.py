"""Attention's neutral op runs the kernel that eager dispatches, once in forward and once in backward, with its bits."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from fxoffload import neutral
from fxoffload.workspace import _fused_backward_bytes

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")])


class Calls(TorchDispatchMode):
    """Counts calls of fused attention kernels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        if name.startswith("_scaled_dot_product_"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def operands(device: str, dtype: torch.dtype, dim: int, gqa: bool) -> list[torch.Tensor]:
    """grad, query, key and value, laid out [batch, length, heads, dim] as models have them."""
    generator = torch.Generator().manual_seed(4)
    sizes = [(4, 48), (4, 48), (2 if gqa else 4, 48), (2 if gqa else 4, 48)]
    return [torch.randn(2, n, h, dim, generator=generator).to(device, dtype).transpose(1, 2) for h, n in sizes]


def mask_of(kind: str, device: str, dtype: torch.dtype) -> torch.Tensor | None:
    seen = torch.ones(2, 1, 48, 48, dtype=torch.bool).tril()
    seen[1, :, :, -5:] = False
    if kind == "bool":
        return seen.to(device)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min).to(device) if kind == "float" else None


def check(device: str, dtype: torch.dtype, dim: int, kind: str, gqa: bool, p: float) -> Counter[str]:
    """The calls of the neutral op's two halves, after their results were found to be eager's."""
    grad, *values = operands(device, dtype, dim, gqa)
    options = mask_of(kind, device, dtype), p, kind == "causal"
    leaves = [t.detach().requires_grad_() for t in values]
    torch.manual_seed(8)
    expected = F.scaled_dot_product_attention(*leaves, *options, enable_gqa=gqa)
    gradients = torch.autograd.grad(expected, leaves, grad)
    torch.manual_seed(8)
    # The ops' kernels themselves: a mode does not see what happens inside an op.
    with torch.no_grad(), Calls() as calls:
        out, *saved = neutral._attention(*values, *options, None, gqa)
        found = neutral._attention_backward(grad, *values, options[0], out, *saved, *options[1:], None, gqa)
    for name, one, other in zip("oqkv", (out, *found), (expected, *gradients), strict=True):
        assert torch.equal(one, other), (name, device, dtype, dim, kind, gqa, p)
    return calls.seen


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_has_eagers_bits_whatever_kernel_it_is(device: str, dtype: torch.dtype) -> None:
    drops = [0.0] if device == "cpu" else [0.0, 0.25]
    for dim, kind, gqa, p in itertools.product([16, 20], ["none", "causal", "bool", "float"], [False, True], drops):
        check(device, dtype, dim, kind, gqa, p)


def test_a_fused_kernel_runs_once_in_each_half() -> None:
    assert check("cpu", torch.bfloat16, 16, "causal", True, 0.0) == {
        "_scaled_dot_product_flash_attention_for_cpu": 1, "_scaled_dot_product_flash_attention_for_cpu_backward": 1}


def test_dropout_on_the_cpu_has_no_fused_kernel() -> None:
    assert not check("cpu", torch.float32, 16, "bool", False, 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
@pytest.mark.parametrize(("backend", "name", "kind"), [
    (SDPBackend.FLASH_ATTENTION, "flash", "causal"), (SDPBackend.EFFICIENT_ATTENTION, "efficient", "bool"),
    (SDPBackend.EFFICIENT_ATTENTION, "efficient", "causal"), (SDPBackend.CUDNN_ATTENTION, "cudnn", "causal"),
    (SDPBackend.CUDNN_ATTENTION, "cudnn", "bool"),
], ids=lambda value: str(value).rpartition(".")[2])
def test_every_kernel_of_a_card_runs_once_in_each_half(backend: Any, name: str, kind: str) -> None:
    with sdpa_kernel(backend):
        calls = check("cuda", torch.bfloat16, 64, kind, False, 0.0)
    assert calls == {f"_scaled_dot_product_{name}_attention": 1, f"_scaled_dot_product_{name}_attention_backward": 1}


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Any:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


SHAPES = [(1, 4, 2, 512, 128), (2, 32, 8, 1024, 128), (4, 32, 8, 2048, 128), (2, 8, 8, 640, 64)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
@pytest.mark.parametrize("deterministic", [False, True], indirect=True)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fused_backward_takes_no_more_for_itself_than_is_planned(shape: tuple[int, ...], deterministic: bool) -> None:
    batch, heads, shared, length, width = shape
    query, grad = (torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "qg")
    key, value = (torch.randn(batch, length, shared, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in "kv")
    options = None, 0.0, True, None, heads != shared
    with torch.no_grad():
        for _ in range(2):
            out, *saved = neutral._attention(query, key, value, *options)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            gradients = neutral._attention_backward(grad, query, key, value, None, out, *saved, *options[1:])
            torch.cuda.synchronize()
            taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - sum(one.nbytes for one in gradients)
            del gradients
    planned = _fused_backward_bytes(query, key, value, torch.cuda.get_device_properties().multi_processor_count)
    assert taken <= planned + 64 * 1024


@pytest.mark.parametrize("deterministic", [False, True], indirect=True)
def test_a_deterministic_backward_is_planned_with_a_sum_for_each_multiprocessor_that_heads_leave_idle(deterministic: bool) -> None:
    few, many = (torch.empty(1, heads, 256, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 1024))
    rows = 4 * 256
    sums = 132 // 4 if deterministic else 1
    assert _fused_backward_bytes(few, few, few, 132) == rows * (sums * 64 + 2) * 4
    assert _fused_backward_bytes(many, many, many, 132) == 1024 * 256 * (64 + 2) * 4
