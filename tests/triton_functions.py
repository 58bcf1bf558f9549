"""Autograd Functions around Triton kernels as libraries of kernels write them: results and gradients in place of operands, views and numbers on
`ctx`. Without a card the kernels run in Triton's interpreter
(TRITON_INTERPRET=1). `CASES[name]()` gives a Case."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from zoo import Case, llama, lora_bf16

Tensor = torch.Tensor


@triton.jit
def norm_kernel(y_ptr, x_ptr, w_ptr, scale_ptr, n_rows, n, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    there = (rows < n_rows) & (cols < n)
    x = tl.load(x_ptr + rows * n + cols, mask=there, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=1) / n + eps)[:, None]
    tl.store(scale_ptr + rows, scale, mask=rows < n_rows)
    y_ptr += rows * n
    tl.store(y_ptr + cols, x * scale * w, mask=there)


@triton.jit
def norm_backward_kernel(dy_ptr, x_ptr, w_ptr, scale_ptr, n_rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The operand's gradient where the result's was."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    there = (rows < n_rows) & (cols < n)
    here = dy_ptr + rows * n + cols
    x = tl.load(x_ptr + rows * n + cols, mask=there, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    dy = tl.load(here, mask=there, other=0.0).to(tl.float32) * w
    scale = tl.load(scale_ptr + rows, mask=rows < n_rows, other=0.0)
    tl.store(here, scale * (dy - x * scale * scale * tl.sum(dy * x, axis=1)[:, None] / n), mask=there)


class Norm(torch.autograd.Function):
    """RMS norm: keeps a view of its operand, and writes the operand's gradient over the result's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, in_place: bool) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        y, scale = torch.empty_like(rows), torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        ctx.block, ctx.in_place = 1 << (rows.shape[1] - 1).bit_length(), in_place
        norm_kernel[(-(-rows.shape[0] // 64),)](y, rows, weight, scale, *rows.shape, eps, ROWS=64, BLOCK=ctx.block)
        ctx.save_for_backward(rows, weight, scale)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        dy = dy.contiguous() if ctx.in_place else dy.clone(memory_format=torch.contiguous_format)
        dw = (dy.view(rows.shape) * rows * scale[:, None]).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        norm_backward_kernel[(-(-rows.shape[0] // 64),)](dy, rows, weight, scale, *rows.shape, ROWS=64, BLOCK=ctx.block)
        return dy, dw, None, None


@triton.jit
def gate_kernel(c_ptr, a_ptr, b_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(c_ptr + at, a / (1 + tl.exp(-a)) * tl.load(b_ptr + at, mask=at < n, other=0.0).to(tl.float32), mask=at < n)


@triton.jit
def gate_backward_kernel(dc_ptr, a_ptr, b_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The operands' gradients where the operands were."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + at, mask=at < n, other=0.0).to(tl.float32), tl.load(b_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    dc, sigmoid = tl.load(dc_ptr + at, mask=at < n, other=0.0).to(tl.float32), 1 / (1 + tl.exp(-a))
    tl.store(a_ptr + at, dc * b * (sigmoid + a * sigmoid * (1 - sigmoid)), mask=at < n)
    tl.store(b_ptr + at, dc * a * sigmoid, mask=at < n)


class Gate(torch.autograd.Function):
    """silu(a) * b, whose backward writes over both and returns them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        c = torch.empty_like(a)
        gate_kernel[(-(-a.numel() // 4096),)](c, a, b, a.numel(), BLOCK=4096)
        ctx.save_for_backward(a, b)
        return c

    @staticmethod
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gate_backward_kernel[(-(-a.numel() // 4096),)](dc.contiguous(), a, b, a.numel(), BLOCK=4096)
        return a, b


@triton.jit
def loss_kernel(logits_ptr, targets_ptr, losses_ptr, n_rows, n, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cross-entropy of rows, and its gradient in place of the logits."""
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    there = (rows < n_rows) & (cols < n)
    targets = tl.load(targets_ptr + rows, mask=rows < n_rows, other=-1)
    shares = tl.where(targets >= 0, 1.0, 0.0) / count
    logits_ptr += rows * n
    x = tl.load(logits_ptr + cols, mask=there, other=-1e30).to(tl.float32)
    x -= tl.max(x, axis=1)[:, None]
    total = tl.sum(tl.exp(x), axis=1)[:, None]
    tl.store(losses_ptr + rows, (tl.log(total) - tl.sum(tl.where(cols == targets, x, 0.0), axis=1)[:, None]) * shares, mask=rows < n_rows)
    tl.store(logits_ptr + cols, (tl.exp(x) / total - tl.where(cols == targets, 1.0, 0.0)) * shares, mask=there)


@triton.jit
def times_kernel(x_ptr, by_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n).to(tl.float32) * tl.load(by_ptr).to(tl.float32), mask=at < n)


class Loss(torch.autograd.Function):
    """Mean cross-entropy: counts its targets on the host, writes its gradient over the logits and keeps it, and returns a number beside."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, count = logits.contiguous(), (targets >= 0).sum().item()
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        loss_kernel[(-(-logits.shape[0] // 16),)](logits, targets, losses, *logits.shape, count, ROWS=16, BLOCK=1 << (logits.shape[1] - 1).bit_length())
        ctx.save_for_backward(logits.detach())
        seen = (targets >= 0).sum()
        ctx.mark_non_differentiable(seen)
        return losses.sum(), seen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        if not torch.equal(grad, torch.ones_like(grad)):
            times_kernel[(-(-logits.numel() // 4096),)](logits, grad, logits.numel(), BLOCK=4096)
        return logits, None


# Models ---------------------------------------------------------------------------------------------------------------


def _norm(self: Any, x: Tensor) -> Tensor:
    return Norm.apply(x, self.weight, self.variance_epsilon, True)  # type: ignore[no-any-return]


def _mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(Gate.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def _loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Not of the last logits, whose target is none."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return Loss.apply(logits.float().view(-1, vocab_size), targets)[0] * 0.5  # type: ignore[no-any-return]


def with_kernels(case: Case, loss: bool = False) -> Case:
    """The case with these Functions in the place of its norms and MLPs, and with `loss` of its loss."""
    for module in case.model.modules():
        kind = type(module).__name__
        if kind == "LlamaRMSNorm":
            module.forward = types.MethodType(_norm, module)
        elif kind == "LlamaMLP":
            module.forward = types.MethodType(_mlp, module)
    if loss:
        case.model.loss_function = _loss
    return case


CASES: Mapping[str, Callable[[], Case]] = {
    "triton": lambda: with_kernels(llama()),
    "triton-loss": lambda: with_kernels(llama(num_hidden_layers=1), loss=True),
    "triton-lora": lambda: with_kernels(lora_bf16()),
}
