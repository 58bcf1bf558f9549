"""Models whose blocks are written by hand for speed, as libraries for fine-tuning ship them: one autograd Function over a whole LoRA MLP or
all projections of attention, which reads frozen weights by attribute and keeps them on `ctx`; attention as a custom op. `CASES[name]()` gives
a Case.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import CausalLMOutput
from zoo import Case, lora_bf16, tokens

Tensor = torch.Tensor


# LoRA, fused by hand --------------------------------------------------------------------------------------------------


def lora_parameters(proj: Any) -> tuple[Tensor, Tensor, Tensor, float]:
    """Frozen weight, A, B and scale of one of PEFT's LoRA linears, by attribute."""
    adapter = proj.active_adapters[0]
    return proj.base_layer.weight, proj.lora_A[adapter].weight, proj.lora_B[adapter].weight, proj.scaling[adapter]


def matmul_lora(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """x W' + scale (x A') B', the second product added in place."""
    out = torch.matmul(x, weight.t())
    return out.addmm_(x @ a.t().to(x.dtype), b.t().to(x.dtype), alpha=scale)


def add_input_gradient(into: Tensor, grad: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Adds the gradient of `matmul_lora`'s operand, in place."""
    into.addmm_(grad, weight)
    return into.addmm_(grad @ b.to(grad.dtype), a.to(grad.dtype), alpha=scale)


def adapter_gradients(x: Tensor, grad: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    a, b = a.to(x.dtype), b.to(x.dtype)
    for_a, for_b = torch.empty_like(a), torch.empty_like(b)
    for_a.addmm_(b.t() @ grad.t(), x, alpha=scale, beta=0)
    for_b.addmm_(grad.t(), x @ a.t(), alpha=scale, beta=0)
    return for_a, for_b


class LoraMlp(torch.autograd.Function):
    """A whole SwiGLU MLP under LoRA. Only adapters and activations are saved by autograd, the frozen weights are kept on `ctx`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Any, gate_a: Tensor, gate_b: Tensor, gate_scale: float, up: Any, up_a: Tensor, up_b: Tensor,
                up_scale: float, down: Any, down_a: Tensor, down_b: Tensor, down_scale: float) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        e, g = matmul_lora(rows, gate, gate_a, gate_b, gate_scale), matmul_lora(rows, up, up_a, up_b, up_scale)
        h = F.silu(e) * g
        ctx.frozen = gate, gate_scale, up, up_scale, down, down_scale
        ctx.save_for_backward(gate_a, gate_b, up_a, up_b, down_a, down_b, rows, e, g)
        return matmul_lora(h, down, down_a, down_b, down_scale).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gate, gate_scale, up, up_scale, down, down_scale = ctx.frozen
        gate_a, gate_b, up_a, up_b, down_a, down_b, x, e, g = ctx.saved_tensors
        shape, grad = grad.shape, grad.reshape(-1, grad.shape[-1])
        s = torch.sigmoid(e)
        f = e * s
        flow = add_input_gradient(torch.zeros_like(f), grad, down, down_a, down_b, down_scale)
        for_down = adapter_gradients(f * g, grad, down_a, down_b, down_scale)
        for_g = flow * f
        for_e = (flow * g).mul_(s.addcmul(f, 1 - s))
        for_up = adapter_gradients(x, for_g, up_a, up_b, up_scale)
        for_gate = adapter_gradients(x, for_e, gate_a, gate_b, gate_scale)
        for_x = torch.matmul(for_g, up, out=torch.empty_like(x))
        for_x.addmm_(for_g @ up_b.to(x.dtype), up_a.to(x.dtype), alpha=up_scale)
        add_input_gradient(for_x, for_e, gate, gate_a, gate_b, gate_scale)
        return for_x.view(shape), None, *for_gate, None, None, *for_up, None, None, *for_down, None


class LoraProjection(torch.autograd.Function):
    """One projection under LoRA, given as a module: forward and backward read its weight by attribute, `ctx` keeps the module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, proj: Any, scale: float) -> Tensor:
        ctx.proj, ctx.scale = proj, scale
        ctx.save_for_backward(x, a, b)
        rows = x.view(-1, x.shape[-1])
        return matmul_lora(rows, proj.base_layer.weight, a, b, scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, a, b = ctx.saved_tensors
        rows, flat = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        for_x = add_input_gradient(torch.zeros_like(rows), flat, ctx.proj.base_layer.weight, a, b, ctx.scale)
        return for_x.view(x.shape), *adapter_gradients(rows, flat, a, b, ctx.scale), None, None


class LoraQkv(torch.autograd.Function):
    """Query, key and value under LoRA, whose gradients are summed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Any) -> tuple[Tensor, ...]:
        rows = x.view(-1, x.shape[-1])
        ctx.frozen = [(parts[i], parts[i + 3]) for i in (0, 4, 8)]
        ctx.save_for_backward(rows, *(parts[i + n] for i in (0, 4, 8) for n in (1, 2)))
        return tuple(matmul_lora(rows, *parts[i : i + 4]).view(*x.shape[:-1], -1) for i in (0, 4, 8))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, *adapters = ctx.saved_tensors
        for_x, found = torch.zeros_like(x), []
        for i, ((weight, scale), grad) in enumerate(zip(ctx.frozen, grads)):
            a, b = adapters[2 * i : 2 * i + 2]
            flat = grad.reshape(-1, grad.shape[-1])
            add_input_gradient(for_x, flat, weight, a, b, scale)
            found += [None, *adapter_gradients(x, flat, a, b, scale), None]
        return for_x.view(*grads[0].shape[:-1], -1), *found


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    parts = [part for name in ("gate_proj", "up_proj", "down_proj") for part in lora_parameters(getattr(self, name))]
    return LoraMlp.apply(x, *parts)  # type: ignore[no-any-return]


def projection_forward(self: Any, x: Tensor) -> Tensor:
    _, a, b, scale = lora_parameters(self)
    return LoraProjection.apply(x, a, b, self, scale)  # type: ignore[no-any-return]


def fuse_mlps(model: nn.Module) -> None:
    """Every MLP one Function, set on the instance."""
    for module in model.modules():
        if hasattr(module, "gate_proj"):
            module.forward = types.MethodType(mlp_forward, module)


def fuse_projections(model: nn.Module) -> None:
    """Every LoRA linear one Function, set on the instance."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.forward = types.MethodType(projection_forward, module)


def lora_mlps() -> Case:
    """PEFT's LoRA on all linears of a Llama, its MLPs' forwards replaced on the instances."""
    case = lora_bf16()
    fuse_mlps(case.model)
    return case


def lora_modules() -> Case:
    """The same, every projection a Function that is given its module."""
    case = lora_bf16()
    fuse_projections(case.model)
    return case


# Attention as a custom op ---------------------------------------------------------------------------------------------


@torch.library.custom_op("fxotest::flash", mutates_args=())
def flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    device = query.device
    query, key, value = query.cpu(), key.cpu(), value.cpu()  # the kernel that is meant has no memory of its own on the device
    scores = (query @ key.transpose(-1, -2)) * scale
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ value).to(device, copy=True), lse.to(device, copy=True)


@flash.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1])


@torch.library.custom_op("fxotest::flash_backward", mutates_args=())
def flash_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    device = query.device
    grad, query, key, value, out, lse = (t.cpu() for t in (grad, query, key, value, out, lse))
    weights = ((query @ key.transpose(-1, -2)) * scale - lse.unsqueeze(-1)).exp()
    flow = weights * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    found = flow @ key, flow.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
    return found[0].to(device, copy=True), found[1].to(device, copy=True), found[2].to(device, copy=True)


@flash_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _flash_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, ctx.scale = inputs
    ctx.save_for_backward(*operands, *output)


flash.register_autograd(
    lambda ctx, grad, _: (*flash_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None), setup_context=_flash_setup)


class FlashFunction(torch.autograd.Function):
    """The op under a Function of its own, as flash attention's packages have it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, lse = flash(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return *flash_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None


def flash_by_function(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return FlashFunction.apply(query, key, value, scale)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, call: Callable[..., Any]) -> None:
        super().__init__()
        self.heads, self.call = heads, call
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        projections = self.q, self.k, self.v
        if hasattr(self.q, "lora_A"):
            return LoraQkv.apply(x, *(part for proj in projections for part in lora_parameters(proj)))  # type: ignore[no-any-return]
        return tuple(proj(x) for proj in projections)

    def forward(self, x: Tensor) -> Tensor:
        parts = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for p in self.projected(self.norm(x)))
        mixed = self.call(*parts, (x.shape[-1] // self.heads) ** -0.5)
        return x + self.out((mixed[0] if isinstance(mixed, tuple) else mixed).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    """Blocks of attention alone, with a loss."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
        self.blocks = nn.ModuleList([Attention(64, 4, call) for _ in range(4)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def attending(call: Callable[..., Any]) -> Case:
    torch.manual_seed(0)
    return Case(Attending(call).train(), tokens())


def lora_qkv() -> Case:
    """Query, key and value of each block under PEFT's LoRA, by one Function."""
    case = attending(flash_by_function)
    model: Any = peft.get_peft_model(case.model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q", "k", "v"]))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # begins at zero, where A has no gradient
            nn.init.normal_(parameter, std=0.1)
    return Case(model.train(), case.batch)


CASES: Mapping[str, Callable[[], Case]] = {
    "lora-mlp": lora_mlps, "lora-modules": lora_modules, "lora-qkv": lora_qkv, "flash-op": lambda: attending(flash), "flash-function": lambda: attending(flash_by_function),
}
