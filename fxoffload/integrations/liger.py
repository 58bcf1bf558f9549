"""Liger: its ops choose their kernels in a few functions, which the capture leaves whole as it does the Functions behind them. What the
Functions of a decoder compute is known here in torch's ops too, for an executor that fuses these."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
_CHOOSING = (("liger_kernel.backends", "dispatch"), ("liger_kernel.transformers.model.loss_utils", "fixed_fused_linear_cross_entropy"))


def choosing() -> tuple[Callable[..., Any], ...]:
    """Those functions, as far as they are loaded."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _CHOOSING)
    return tuple(one for one in found if one is not None)


def by_torch(name: str, arguments: Sequence[Any]) -> Any:
    """What the Function `name`, "module:class", gives for these arguments, by torch's ops, to the rounding of its dtype; NotImplemented where
    that is not known. Gradients are autograd's."""
    known = _OPENED.get(name)
    return known(*arguments) if known is not None and _takes(known, arguments) else NotImplemented


def _takes(function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
    """Whether the function has these parameters: another version of Liger may have more."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _silu_mul(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    return _scaled(F.silu(_scaled(gate, gate_multiplier)) * up, down_multiplier)


def _scaled(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1 else value * factor


def _gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


_CASTING: Mapping[str | int, str] = {0: "llama", 1: "gemma", -1: "none"} | {name: name for name in ("llama", "gemma", "none")}


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama", in_place: bool = True,
    row_mode: bool | None = None,
) -> Tensor:
    if casting_mode not in _CASTING:
        return NotImplemented
    mode = _CASTING[casting_mode]
    wide = x if mode == "none" else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if mode == "llama":
        normed = normed.to(x.dtype)
    if weight is not None:
        weight = weight.float() if mode == "gemma" else weight
        normed = (weight if offset == 0 else weight + offset) * normed
    return normed.to(x.dtype)


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1, rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Of whole heads, (batch, heads, sequence, width); cosines and sines (batch or 1, sequence, width)."""
    if rotary_dim not in (None, q.shape[-1]) or cos.shape[-1] != q.shape[-1] or cos.dim() != 3:
        return NotImplemented
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotated(q), rotated(k)


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0,
    reduction: str = "mean", *others: Any,
) -> tuple[Tensor, None, None, None]:
    """(rows, classes) against (rows,). `others`: soft-capping, and what is returned beside the loss."""
    if weight is not None or lse_square_scale or any(others):
        return NotImplemented
    # `torch.nn.functional.cross_entropy` may be Liger's own.
    kind = ("none", "mean", "sum").index(reduction)
    return torch.ops.aten.cross_entropy_loss.default(logits.float(), target, None, kind, ignore_index, label_smoothing), None, None, None


def _linear_cross_entropy(
    rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, *others: Any,
) -> tuple[Tensor, None, None, None]:
    """The loss of a head's logits. `others`: scaling by token, what is returned beside the loss, the kernel, the memory of a chunk."""
    if accum_dtype is not None or any(others[:5]):
        return NotImplemented
    return _cross_entropy(
        F.linear(rows, weight, bias), target, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss)


_OPENED: Mapping[str, Callable[..., Any]] = {
    "liger_kernel.ops.swiglu:LigerSiLUMulFunction": _silu_mul,
    "liger_kernel.ops.geglu:LigerGELUMulFunction": _gelu_mul,
    "liger_kernel.ops.rms_norm:LigerRMSNormFunction": _rms_norm,
    "liger_kernel.ops.rope:LigerRopeFunction": _rotated,
    "liger_kernel.ops.cross_entropy:LigerCrossEntropyFunction": _cross_entropy,
    "liger_kernel.ops.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction": _linear_cross_entropy,
}
