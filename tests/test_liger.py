"""Liger's Triton kernels as ops (`torch.library.custom_op`): planned without a card, the bits of plain PyTorch on one."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo import Case, llama

import fxoffload
from fxoffload.integrations import liger

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


FUSED: dict[str, Any] = {"executor": "inductor", "numerics": "reordered"}


@pytest.mark.parametrize("name", [n if n == "as-shipped" else pytest.param(n, marks=pytest.mark.slow) for n in PATCHES])
def test_for_inductor_it_is_planned_as_the_model_without_liger(name: str, unpatched: None) -> None:
    """A kernel that nothing can be fused with takes longer there than what it computes."""
    budget: dict[str, Any] = {"device_budget": "320MiB", "machine": "h200", "pins": [fxoffload.pin("*", "host")]}
    expected = fxoffload.plan(llama(vocab_size=16384).model, (4, 512), **budget, **FUSED)
    found = fxoffload.plan(patched(name, vocab_size=16384).model, (4, 512), **budget, **FUSED)
    assert found.predicted.step_s is not None and expected.predicted.step_s is not None
    assert 0.998 * expected.predicted.step_s < found.predicted.step_s <= expected.predicted.step_s  # its loss needs one op less
    assert found.predicted.device_peak_bytes == expected.predicted.device_peak_bytes and found.count()["chunk"] == 1
    assert ["LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction" in note for note in found.notes] == [True] and not expected.notes
    assert "run as torch's ops" in found.explain()


def test_op_by_op_its_kernels_run_as_they_are(unpatched: None) -> None:
    case = patched("as-shipped")
    found = fxoffload.plan(case.model, case.batch, device_budget="1500MiB", machine="h200", numerics="reordered")
    assert not any("torch's ops" in note for note in found.notes)


def test_a_loss_whose_options_are_not_known_stays_a_kernel(unpatched: None) -> None:
    """Soft-capping inside of the fused loss: the norms are torch's ops all the same."""
    case = patched("as-shipped")
    plain = case.model.forward
    case.model.forward = lambda **batch: plain(**batch, final_logit_softcapping=30.0)  # type: ignore[method-assign]
    (note,) = fxoffload.plan(case.model, case.batch, device_budget="1500MiB", machine="h200", **FUSED).notes
    assert "LigerRMSNormFunction" in note and "CrossEntropy" not in note


def of_torch(module: str, name: str, *arguments: Any) -> Any:
    return liger.by_torch(f"liger_kernel.ops.{module}:{name}", arguments)


def test_by_torch_they_are_what_transformers_computes() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    for module, offset, mode in ((LlamaRMSNorm(64, 1e-5), 0.0, "llama"), (GemmaRMSNorm(64, 1e-5), 1.0, "gemma")):
        module.weight.data = weight
        assert torch.equal(of_torch("rms_norm", "LigerRMSNormFunction", x, weight, 1e-5, offset, mode), module(x))
    assert of_torch("rms_norm", "LigerRMSNormFunction", x, weight, 1e-5, 0.0, "another") is NotImplemented
    assert of_torch("swiglu", "LigerSiLUMulFunction", x, x, 1.0, 1.0, "of a later version") is NotImplemented
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
    cos, sin = torch.randn(2, 8, 16), torch.randn(2, 8, 16)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    for a, b in zip(of_torch("rope", "LigerRopeFunction", q, k, cos, sin), expected, strict=True):
        assert torch.equal(a, b)
    assert of_torch("rope", "LigerRopeFunction", q, k, cos[..., :8], sin[..., :8]) is NotImplemented
    logits, target = torch.randn(16, 32, dtype=torch.bfloat16), torch.randint(0, 32, (16,))
    target[3] = -100
    for kind in ("mean", "sum", "none"):
        loss = of_torch("cross_entropy", "LigerCrossEntropyFunction", logits, target, None, -100, 0.0, 0.1, kind)[0]
        assert torch.equal(loss, nn.functional.cross_entropy(logits.float(), target, ignore_index=-100, reduction=kind, label_smoothing=0.1))
    assert of_torch("cross_entropy", "LigerCrossEntropyFunction", logits, target, None, -100, 1e-4) is NotImplemented


SCALE = torch.linspace(0.5, 1.5, 64)
KERNELS: dict[str, tuple[str, str, int, tuple[Any, ...]]] = {
    "swiglu": ("swiglu", "LigerSiLUMulFunction", 2, ()), "swiglu-scaled": ("swiglu", "LigerSiLUMulFunction", 2, (1.5, 0.5)),
    "geglu": ("geglu", "LigerGELUMulFunction", 2, ()),
    **{f"norm-{mode}": ("rms_norm", "LigerRMSNormFunction", 1, (SCALE, 1e-5, 0.0, mode, False)) for mode in ("llama", "gemma", "none")},
    "norm-offset": ("rms_norm", "LigerRMSNormFunction", 1, (SCALE, 1e-5, 1.0, "gemma", False)),
    "rope": ("rope", "LigerRopeFunction", 2, (torch.randn(1, 8, 32).repeat(1, 1, 2), torch.randn(1, 8, 32).repeat(1, 1, 2))),
    "loss": ("cross_entropy", "LigerCrossEntropyFunction", 1, (torch.arange(16), None, 3, 0.0, 0.1, "mean")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_by_torch_they_are_what_the_kernels_compute_on_a_card(name: str) -> None:
    module, function, n, rest = KERNELS[name]
    shape = (2, 4, 8, 64) if name == "rope" else (16, 64)
    operands = [torch.randn(shape, device="cuda") for _ in range(n)]
    rest = tuple(one.cuda() if isinstance(one, Tensor) else one for one in rest)
    kernel = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    found = []
    for call in (kernel.apply, lambda *arguments: of_torch(module, function, *arguments)):
        given = [one.clone().requires_grad_() for one in operands]
        results = call(*(g + 0 for g in given), *rest)  # kernels write over their operands
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
        sum((r.float() * torch.linspace(0, 1, r.numel(), device="cuda").view(r.shape)).sum() for r in results).backward()  # type: ignore[union-attr]
        found.append([*(r.detach() for r in results), *(g.grad for g in given)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


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
