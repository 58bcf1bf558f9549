"""Liger's Triton kernels as ops (`torch.library.custom_op`): planned without a card, the bits of plain PyTorch on one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo import Case, llama

import fxoffload

pytest.importorskip("triton")
pytest.importorskip("liger_kernel")

from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward  # noqa: E402
from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward  # noqa: E402

pytestmark = pytest.mark.integration
Tensor = torch.Tensor


@torch.library.custom_op("fxotest::liger_swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_forward(gate, up)[2]  # type: ignore[no-any-return]


@torch.library.custom_op("fxotest::liger_swiglu_backward", mutates_args=())
def swiglu_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(gate.clone(), up.clone(), grad)  # type: ignore[no-any-return]  # it writes over its operands


swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
swiglu_gradients.register_fake(lambda gate, up, grad: (torch.empty_like(gate), torch.empty_like(up)))
swiglu.register_autograd(
    lambda ctx, grad: swiglu_gradients(*ctx.saved_tensors, grad.contiguous()), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("fxotest::liger_rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, rstd, *_ = rms_norm_forward(x, weight, eps, 0.0, "llama", None)
    return y, rstd


@torch.library.custom_op("fxotest::liger_rms_norm_backward", mutates_args=())
def rms_norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    _, _, _, block, warps, casting = rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)
    return rms_norm_backward(grad, x.view(-1, x.shape[-1]), weight, rstd, 0.0, casting, block, warps, False, None)  # type: ignore[no-any-return]


rms_norm.register_fake(lambda x, weight, eps: (torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)))
rms_norm_gradients.register_fake(lambda grad, x, weight, rstd: (torch.empty_like(x), torch.empty_like(weight)))


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


rms_norm.register_autograd(
    lambda ctx, grad, _: (*rms_norm_gradients(grad.contiguous(), *ctx.saved_tensors), None), setup_context=_rms_norm_setup)


class Norm(nn.Module):
    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.eps = like.weight, like.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.contiguous(), self.weight, self.eps)[0]  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, like: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = like.gate_proj, like.up_proj, like.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def with_liger(case: Case) -> Case:
    """The case with these modules in the place of its norms and MLPs."""
    for name, module in list(case.model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            case.model.set_submodule(name, Norm(module))
        elif type(module).__name__ == "LlamaMLP":
            case.model.set_submodule(name, Mlp(module))
    return case


def test_a_step_of_ligers_kernels_is_planned_without_a_card() -> None:
    case = with_liger(llama())
    free = fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="cpu")
    budget_bytes = int(free.predicted.device_peak_bytes * 0.6)
    tight = fxoffload.plan(case.model, case.batch, device_budget=budget_bytes, machine="cpu")
    assert tight.decisions != free.decisions and tight.predicted.device_peak_bytes <= budget_bytes


def trained(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Losses and the last weights of three steps."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


@pytest.mark.gpu
def test_ligers_kernels_train_bit_equal_on_a_card_with_weights_off_it() -> None:
    case = with_liger(llama(hidden_size=256, intermediate_size=512))
    batch = {k: v.cuda() for k, v in case.batch.items()}
    torch.use_deterministic_algorithms(True)
    try:
        expected = trained(copy.deepcopy(case.model).cuda(), batch)
        model = fxoffload.compile(case.model, case.batch, device="cuda", device_budget="256MiB", pins=[fxoffload.pin("*", "host")])
        found = trained(model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert model.fxoffload.transferred["h2d"] > 0  # type: ignore[union-attr]
    model.fxoffload.close()  # type: ignore[union-attr,operator]
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


PATCHES = {
    "modules": {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False},
    "loss": {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": True, "fused_linear_cross_entropy": False},
    "as-shipped": {},
}


def patched(name: str, **changes: Any) -> Case:
    """A Llama as `apply_liger_kernel_to_llama` leaves it; what that puts into transformers' modules stays there."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    case = llama(**changes)
    apply_liger_kernel_to_llama(**PATCHES[name], model=case.model)  # type: ignore[arg-type]
    return case


@pytest.fixture
def unpatched() -> Iterator[None]:
    """Transformers and torch are as they were after the test."""
    from transformers.loss import loss_utils
    from transformers.models.llama import modeling_llama

    places = (modeling_llama, loss_utils, nn.functional, modeling_llama.LlamaForCausalLM)
    before = [dict(vars(place)) for place in places]
    yield
    for place, known in zip(places, before, strict=True):
        for name, value in known.items():
            if vars(place)[name] is not value:
                setattr(place, name, value)


@pytest.mark.parametrize("name", [n if n == "as-shipped" else pytest.param(n, marks=pytest.mark.slow) for n in PATCHES])
def test_a_model_that_liger_has_patched_is_planned_without_a_card(name: str, unpatched: None) -> None:
    case = patched(name)
    free = fxoffload.plan(case.model, case.batch, device_budget="1GiB", machine="cpu")
    budget_bytes = int(free.predicted.device_peak_bytes * 0.7)
    tight = fxoffload.plan(case.model, case.batch, device_budget=budget_bytes, machine="cpu")
    assert tight.decisions != free.decisions and tight.predicted.device_peak_bytes <= budget_bytes


def test_it_is_planned_for_a_card_that_is_not_there(unpatched: None) -> None:
    case = patched("as-shipped")
    found = fxoffload.plan(case.model, case.batch, device_budget="1500MiB", machine="h200", executor="inductor", numerics="reordered")
    assert 0 < found.predicted.device_peak_bytes <= found.device_budget_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_model_that_liger_has_patched_trains_bit_equal_on_a_card(name: str, executor: str, unpatched: None) -> None:
    case = patched(name, hidden_size=256, intermediate_size=512)
    batch = {k: v.cuda() for k, v in case.batch.items()}
    torch.use_deterministic_algorithms(True)
    try:
        expected = trained(copy.deepcopy(case.model).cuda(), batch)
        fused = {} if executor == "eager" else {"executor": executor, "numerics": "reordered"}
        model = fxoffload.compile(case.model, case.batch, device="cuda", device_budget="256MiB", pins=[fxoffload.pin("*", "host")], **fused)  # type: ignore[arg-type]
        found = trained(model, batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert model.fxoffload.transferred["h2d"] > 0  # type: ignore[union-attr]
    model.fxoffload.close()  # type: ignore[union-attr,operator]
    if executor == "eager":
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)
    else:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
