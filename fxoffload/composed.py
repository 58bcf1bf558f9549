"""Kernels that are several ops where no device has them as one: dropout, and the gradients of attention.

Attention's gradients take the fewest bytes that still give autograd's bits. They run what autograd runs, in the order of torch's
`_scaled_dot_product_attention_math` (2.11 and 2.13), without the forward's result, scaling operands again rather than keeping them.
Values of length x length end at their last use: three of them and dropout's mask are alive at once, where autograd has up to five.
"""

from __future__ import annotations

import math

import torch

_aten = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# Dropout --------------------------------------------------------------------------------------------------------------


def _has_fused_dropout(device: torch.device) -> bool:
    """Where eager's dropout is one kernel that saves a boolean mask."""
    return device.type not in ("cpu", "mps")


def dropout_kernel(src: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, mask of what is kept), drawn as eager draws on the device."""
    if _has_fused_dropout(src.device) and 0 < p < 1:
        return _aten.native_dropout(src, p, True)  # type: ignore[no-any-return]
    kept = torch.empty_like(src).bernoulli_(1 - p)
    mask = kept.bool()
    return kept.div_(1 - p).mul_(src), mask


def dropout_backward_kernel(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient of `dropout_kernel`'s operand."""
    if _has_fused_dropout(grad.device):
        return _aten.native_dropout_backward(grad, mask, 1.0 / (1.0 - p))  # type: ignore[no-any-return]
    return mask.to(grad.dtype).div_(1 - p).mul_(grad)


# Attention ------------------------------------------------------------------------------------------------------------


def attention_gradients(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
                        p: float, causal: bool, scale: float | None, gqa: bool) -> Gradients:
    """Gradients of query, key and value [batch, heads, length, dim], bit for bit autograd's through the composed forward.

    Draws the dropout from the device's generator, as the forward does.
    """
    n_repeats = query.shape[1] // key.shape[1] if gqa else 1
    for_value, for_scores = _to_scores(grad, query, key, value, mask, p, causal, scale, n_repeats)
    for_value = _summed(for_value.view(*query.shape[:2], *value.shape[2:]), n_repeats).to(value.dtype)
    return (*_from_scores(for_scores, query, key, scale, n_repeats), for_value)


def _to_scores(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float,
               causal: bool, scale: float | None, n_repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the repeated value, gradient of the scores), [batch x heads, rows, columns] each."""
    probabilities = _probabilities(query, key, mask, causal, scale, n_repeats)
    grad = _flat(grad.to(probabilities.dtype))
    kept = None
    if p > 0:
        dropped, kept = dropout_kernel(probabilities, p)
        for_value = torch.bmm(_flat(dropped).transpose(1, 2), grad)
        del dropped
    else:
        for_value = torch.bmm(_flat(probabilities).transpose(1, 2), grad)
    flow = torch.bmm(grad, _flat(_repeated(_raised(value), n_repeats)).transpose(1, 2)).view(probabilities.shape)
    del grad
    if kept is not None:
        flow, kept = dropout_backward_kernel(flow, kept, p), None
    return for_value, _flat(_aten._softmax_backward_data(flow, probabilities, -1, probabilities.dtype))


def _from_scores(for_scores: torch.Tensor, query: torch.Tensor, key: torch.Tensor, scale: float | None, n_repeats: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of query and key."""
    factor, key_factor = _factors(query, scale)
    for_key = torch.bmm(_flat(_raised(query) * factor).transpose(1, 2), for_scores).view(*query.shape[:2], key.shape[3], key.shape[2])
    for_key = _summed((for_key * key_factor).transpose(-2, -1), n_repeats).to(key.dtype)
    for_query = torch.bmm(for_scores, _flat(_scaled_key(key, key_factor, n_repeats)).transpose(1, 2)).view(query.shape)
    return (for_query * factor).to(query.dtype), for_key


def _probabilities(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None,
                   n_repeats: int) -> torch.Tensor:
    factor, key_factor = _factors(query, scale)
    scores = torch.bmm(_flat(_raised(query) * factor), _flat(_scaled_key(key, key_factor, n_repeats)))
    scores = scores.view(*query.shape[:3], key.shape[2])
    bias = _bias(query, key, mask, causal)
    if bias is not None:
        scores += bias
        del bias
    return _aten._safe_softmax(scores, -1)  # type: ignore[no-any-return]


def _factors(query: torch.Tensor, scale: float | None) -> tuple[float, float]:
    """What query and key are multiplied with: the root of the scale, its sign with the query."""
    size = 1.0 / math.sqrt(query.shape[-1]) if scale is None else abs(scale)
    root = math.sqrt(size)
    return (-root if scale is not None and scale < 0 else root), root


def _scaled_key(key: torch.Tensor, factor: float, n_repeats: int) -> torch.Tensor:
    return _repeated(_raised(key), n_repeats).transpose(-2, -1) * factor


def _raised(operand: torch.Tensor) -> torch.Tensor:
    """Half precision is computed in fp32 unless the user has allowed otherwise."""
    is_half = operand.dtype in (torch.float16, torch.bfloat16)
    return operand.float() if is_half and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() else operand


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """What is added to the scores, None for nothing."""
    if causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, -float("inf")).to(_raised(query[:0]).dtype)


def _repeated(operand: torch.Tensor, n_repeats: int) -> torch.Tensor:
    return operand.repeat_interleave(n_repeats, -3) if n_repeats > 1 else operand


def _summed(gradient: torch.Tensor, n_repeats: int) -> torch.Tensor:
    """Over the heads that were one before they were repeated."""
    if n_repeats == 1:
        return gradient
    batch, heads, *rest = gradient.shape
    return gradient.view(batch, heads // n_repeats, n_repeats, *rest).sum([2], keepdim=True).squeeze(2)


def _flat(operand: torch.Tensor) -> torch.Tensor:
    """[batch x heads, rows, columns]."""
    return operand.reshape(-1, *operand.shape[-2:])
