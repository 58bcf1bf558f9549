"""Ops whose kernels, saved values and random draws differ by device, as one device-neutral op each.

`scaled_dot_product_attention` and `dropout` would trace to other nodes on a CPU, a CUDA card and a simulated device, so a plan
made on a laptop would not fit the graph of the GPU. Before AOTAutograd sees Dynamo's graph, `neutralize` puts these ops in their
place; their kernels run exactly what eager would dispatch on the device at hand, forward and backward. Attention runs the kernel that
its last argument names, which a plan sets (`attention.bind`): both halves the same one, whatever torch's switches say by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from . import ops
from .composed import attention_gradients, dropout_backward_kernel, dropout_kernel
from .dispatch import only
from .errors import PlanError
from .integrations import transformers
from .kernels import CUDNN, EFFICIENT, FLASH, MATH
from .torch_compat import SWITCH_KERNELS

_LIBRARY = torch.library.Library("fxo", "FRAGMENT")
_aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]

_ATTENTION = (
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float p, bool causal, float? scale, bool gqa, "
    "str? kernel=None)"
)
_BACKWARD = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor lse, Tensor seed, Tensor offset, "
    "float p, bool causal, float? scale, bool gqa, str? kernel=None) -> (Tensor, Tensor, Tensor)"
)
_SEEDED = (torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
_PLAIN = (torch.Tag.pt2_compliant_tag,)


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...]) -> torch._ops.OpOverload:
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxo::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fxo, name).default  # type: ignore[no-any-return]


# Attention ------------------------------------------------------------------------------------------------------------


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float, causal: bool,
               scale: float | None, gqa: bool, named: str | None = None) -> Tensors:
    """(out, logsumexp, seed, offset) by the kernel that is named, else the one eager dispatches here; what it has no use for is empty."""
    kernel = _named(named, query) if named is not None else backend_of(query, key, value, mask, p, causal, scale, gqa)
    if kernel == SDPBackend.FLASH_ATTENTION and query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, p, causal, attn_mask=_additive(mask, query.dtype), scale=scale)
        return _neutral_layout(out), lse, *_nothing(query)
    if kernel == SDPBackend.FLASH_ATTENTION:
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(query, key, value, p, causal, False, scale=scale)
        return _neutral_layout(out), lse, seed, offset
    if kernel == SDPBackend.CUDNN_ATTENTION:
        bias = _additive(mask, query.dtype)
        out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, bias, True, p, causal, False, scale=scale)
        return _neutral_layout(out), lse, seed, offset
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned_bias(mask, query, key), True, p, causal, scale=scale)
        return _neutral_layout(out), lse, seed, offset
    lse, offset = _nothing(query)
    seed = ops.get_rng_state(query.device).to(query.device) if p > 0 else lse.clone()
    return composed_attention(query, key, value, mask, p, causal, scale, gqa, named), lse, seed, offset


def composed_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float, causal: bool,
                       scale: float | None, gqa: bool, named: str | None = None) -> torch.Tensor:
    """Attention as torch dispatches it, or with `named` alone: where no fused kernel is, several ops with values of length x length
    between them."""
    with only(named):
        return _neutral_layout(F.scaled_dot_product_attention(query, key, value, mask, p, causal, scale=scale, enable_gqa=gqa))


def _attention_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
                        out: torch.Tensor, lse: torch.Tensor, seed: torch.Tensor, offset: torch.Tensor, p: float, causal: bool,
                        scale: float | None, gqa: bool, named: str | None = None) -> Tensors:
    kernel = _named(named, query) if named is not None else backend_of(query, key, value, mask, p, causal, scale, gqa)
    if named is None and query.device.type == "cpu":  # what forward ran, should the switches have changed since
        kernel = SDPBackend.FLASH_ATTENTION if lse.numel() else SDPBackend.MATH
    if kernel == SDPBackend.FLASH_ATTENTION and query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, lse, p, causal, attn_mask=_additive(mask, query.dtype), scale=scale)
    lengths = (query.shape[2], key.shape[2])
    if kernel == SDPBackend.FLASH_ATTENTION:
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, lse, None, None, *lengths, p, causal, seed, offset, scale=scale)
    if kernel == SDPBackend.CUDNN_ATTENTION:
        return _aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, lse, seed, offset, _additive(mask, query.dtype), None, None, *lengths, p, causal, scale=scale)
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, _aligned_bias(mask, query, key), out, lse, seed, offset, p, [True, True, True, False], causal, scale=scale)
        return gradients[:3]  # type: ignore[no-any-return]
    if kernel == SDPBackend.MATH:
        return _redrawn(attention_gradients, seed, (grad, query, key, value, mask, p, causal, scale, gqa))
    with only(named):
        return _redrawn(_by_autograd, seed, (grad, query, key, value, mask, p, causal, scale, gqa))


def _redrawn(gradients: Callable[..., Tensors], seed: torch.Tensor, operands: tuple[Any, ...]) -> Tensors:
    """The gradients, with the random draws of the forward where there were any."""
    query, p = operands[1], operands[5]
    if not p:
        return gradients(*operands)
    now = ops.get_rng_state(query.device)
    ops.set_rng_state(seed.cpu(), query.device)
    results = gradients(*operands)
    ops.set_rng_state(now, query.device)
    return results


def _by_autograd(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
                 p: float, causal: bool, scale: float | None, gqa: bool) -> Tensors:
    """The forward again, differentiated by autograd.

    In this thread: a thread of the device's own would let go of the operands some time after it is done with them.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, mask, p, causal, scale=scale, enable_gqa=gqa)
        return torch.autograd.grad(out, (query, key, value), grad)


_DIRECT = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def backend_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, p: float, causal: bool,
               scale: float | None, gqa: bool) -> SDPBackend | None:
    """The kernel `scaled_dot_product_attention` dispatches for these operands on their device; MATH is none, but several ops.

    None where it does more than call the kernel: pad heads, or a kernel of another vendor. Compare with `==`: every call of the enum
    makes an object of its own.
    """
    return _direct(SDPBackend(torch._fused_sdp_choice(query, key, value, mask, p, causal, scale=scale, enable_gqa=gqa)), query)


def _direct(kernel: SDPBackend | None, query: torch.Tensor) -> SDPBackend | None:
    is_padded = query.device.type != "cpu" and query.shape[-1] % 8 != 0
    return kernel if kernel == SDPBackend.MATH or kernel in _DIRECT and not is_padded else None


_NAMED = {
    MATH: SDPBackend.MATH, FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}


def _named(kernel: str, query: torch.Tensor) -> SDPBackend | None:
    """The kernel that a plan names, as `backend_of` gives it."""
    return _direct(_NAMED.get(kernel), query)


def _nothing(like: torch.Tensor) -> Tensors:
    """Two empty results: no op may return one tensor twice."""
    return torch.empty(0, dtype=torch.int64, device=like.device), torch.empty(0, dtype=torch.int64, device=like.device)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -float("inf"))


def _aligned_bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as this kernel wants it: additive, expanded, its rows 16-element aligned (as eager pads it)."""
    bias = _additive(mask, query.dtype)
    if bias is None:
        return None
    short = -bias.shape[-1] % 16
    if short:
        bias = F.pad(bias, (0, short))[..., : key.shape[-2]]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _neutral_layout(out: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, dim] over [batch, length, heads, dim] memory: what the fused kernels give and the fake promises."""
    if out.transpose(1, 2).is_contiguous():
        return out
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Tensors:
    batch, heads, length, _dim = query.shape
    out = query.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
    aux = query.new_empty((2,), dtype=torch.int64)
    return out, query.new_empty((batch, heads, length), dtype=torch.float32), aux, torch.empty_like(aux)


def _fake_attention_dropout(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Tensors:
    """The seed is at most a generator's whole state; fused kernels have less."""
    out, lse, _seed, offset = _fake_attention(query, key, value)
    return out, lse, query.new_empty((ops.RNG_STATE_BYTES,), dtype=torch.uint8), offset


def _fake_attention_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Tensors:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


attention = _define(f"attention{_ATTENTION} -> (Tensor, Tensor, Tensor, Tensor)", _attention, _fake_attention, _PLAIN)
attention_dropout = _define(f"attention_dropout{_ATTENTION} -> (Tensor, Tensor, Tensor, Tensor)", _attention, _fake_attention_dropout, _SEEDED)
attention_backward = _define(f"attention_backward{_BACKWARD}", _attention_backward, _fake_attention_backward, _PLAIN)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    query, key, value, mask, *ctx.options = inputs  # with or without the name of a kernel
    ctx.save_for_backward(query, key, value, mask, *output)


def _attention_gradient(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    gradients = attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, *(None for _ in ctx.options))


for _name in ("attention", "attention_dropout"):
    torch.library.register_autograd(f"fxo::{_name}", _attention_gradient, setup_context=_attention_setup, lib=_LIBRARY)


def _under_autocast(op: torch._ops.OpOverload, device_type: str, key: str) -> None:
    """Autocast casts attention's floating operands, as it does for `scaled_dot_product_attention`."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            return value.to(torch.get_autocast_dtype(device_type))
        return value

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return op(*map(cast, args))

    _LIBRARY.impl(op._schema.name, kernel, key)


for _op in (attention, attention_dropout):
    for _type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"), ("privateuseone", "AutocastPrivateUse1")):
        _under_autocast(_op, _type, _key)


# Dropout --------------------------------------------------------------------------------------------------------------


def _fake_dropout(src: torch.Tensor, p: float) -> Tensors:
    return torch.empty_like(src), torch.empty_like(src, dtype=torch.bool)


dropout = _define(
    "dropout(Tensor src, float p) -> (Tensor, Tensor)", dropout_kernel, _fake_dropout, _SEEDED)
dropout_backward = _define(
    "dropout_backward(Tensor grad, Tensor mask, float p) -> Tensor", dropout_backward_kernel, lambda grad, mask, p: torch.empty_like(grad), _PLAIN)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])


def _dropout_gradient(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
    return dropout_backward(grad, ctx.saved_tensors[0], ctx.p), None


torch.library.register_autograd("fxo::dropout", _dropout_gradient, setup_context=_dropout_setup, lib=_LIBRARY)


# 8-bit weights --------------------------------------------------------------------------------------------------------


def _linear_8bit(src: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, threshold: float,
                 training: bool) -> torch.Tensor:
    """bitsandbytes' product with a row-scaled int8 weight: dequantized first on a CPU that trains, elsewhere in int8 but for the
    columns of `src` with values above `threshold`, whose number depends on the values."""
    import bitsandbytes

    state = bitsandbytes.MatmulLtState()
    state.CB, state.SCB, state.threshold = weight, scale, threshold
    state.has_fp16_weights, state.is_training = False, training
    return bitsandbytes.matmul(src, weight, bias=bias, state=state)  # type: ignore[no-any-return]


def _fake_linear_8bit(src: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return src.new_empty((*src.shape[:-1], weight.shape[0]))


def _dequantize_8bit(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In place, as bitsandbytes has it: out of place the product would have the scale's dtype."""
    return _aten._to_copy(weight, dtype=dtype).mul_(scale.unsqueeze(1).mul(1.0 / 127.0))


linear_8bit = _define(
    "linear_8bit(Tensor src, Tensor weight, Tensor scale, Tensor? bias, float threshold, bool training) -> Tensor",
    _linear_8bit, _fake_linear_8bit, _PLAIN)
dequantize_8bit = _define(
    "dequantize_8bit(Tensor weight, Tensor scale, ScalarType dtype) -> Tensor",
    _dequantize_8bit, lambda weight, scale, dtype: torch.empty_like(weight, dtype=dtype), _PLAIN)


def _linear_8bit_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    src, weight, scale, *_ = inputs
    ctx.dtype = src.dtype
    ctx.save_for_backward(weight, scale)


def _linear_8bit_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    weight, scale = ctx.saved_tensors
    rows = grad.reshape(-1, grad.shape[-1])
    for_src = for_bias = None
    if ctx.needs_input_grad[0]:
        product = torch.matmul(rows.to(ctx.dtype), dequantize_8bit(weight, scale, ctx.dtype))
        for_src = product.reshape(*grad.shape[:-1], weight.shape[1])
    if ctx.needs_input_grad[3]:
        for_bias = rows.sum(0)
    return for_src, None, None, for_bias, None, None


def _refuse_autocast(*_: Any) -> torch.Tensor:
    # Eager would cast some of the kernel's inner products and not others, by device.
    raise PlanError("8-bit weights under autocast are not supported; load the model in the dtype it should compute in")


for _key in ("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1"):
    _LIBRARY.impl("linear_8bit", _refuse_autocast, _key)
torch.library.register_autograd("fxo::linear_8bit", _linear_8bit_gradient, setup_context=_linear_8bit_setup, lib=_LIBRARY)


# Dynamo's graph -------------------------------------------------------------------------------------------------------


def neutral_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                      scale: float | None = None, enable_gqa: bool = False) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` through the neutral op. Torch's own path stay a mask that is trained, a dropout of
    everything, and heads that are broadcast."""
    is_odd = query.ndim != 4 or dropout_p >= 1 or query.shape[0] != key.shape[0] or not enable_gqa and query.shape[1] != key.shape[1]
    if is_odd or attn_mask is not None and attn_mask.requires_grad:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    op = attention_dropout if dropout_p > 0 else attention
    return op(query, key, value, attn_mask, float(dropout_p), is_causal, scale, enable_gqa)[0]


def neutral_dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """`torch.nn.functional.dropout` through the neutral op where it draws; in-place dropout keeps torch's own path."""
    if inplace or not training or p == 0 or p == 1:
        return F.dropout(input, p, training, inplace)
    return dropout(input, p)[0]


_NEUTRAL = {F.scaled_dot_product_attention: neutral_attention, F.dropout: neutral_dropout}


def neutralize(graph: fx.Graph) -> None:
    """Replaces calls of a Dynamo graph that depend on the device or cannot be traced, in place; graphs inside higher-order ops too.

    A model that chooses among attention's kernels itself (`sdpa_kernel` in its forward) keeps torch's own path: it is traced as chosen.
    """
    known = _NEUTRAL | transformers.traceable()
    if any(node.target is SWITCH_KERNELS for node in graph.nodes):
        del known[F.scaled_dot_product_attention]
    for node in graph.nodes:
        if node.op == "call_function" and node.target in known:
            node.target = known[node.target]
    owner = graph.owning_module
    for module in (owner.modules() if owner is not None else ()):
        if isinstance(module, fx.GraphModule) and module.graph is not graph:
            neutralize(module.graph)
            module.recompile()
