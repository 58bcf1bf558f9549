"""Workspace: device bytes an op needs for itself while it runs, beyond its operands and results.

Only ops that PyTorch composes of others inside one call have any that a graph does not show. Our neutral attention and dropout are
run on fake tensors under a mode that counts live bytes; the few ATen ops have a formula each, seen on the simulated device
(torch 2.11 and 2.13). What a vendor's library takes beside that is the Machine's `overhead_bytes`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import attention, composed, functions, neutral
from .dispatch import Call, Dispatch, is_deterministic
from .fusion import fused, run_program
from .graph import Bounds, remembered
from .kernels import FUSED, MATH
from .products import add_product, converted_bytes
from .torch_compat import without_modes

_aten = torch.ops.aten
_MOST_MULTIPROCESSORS = 170


class Workspace:
    """A function of a node: its workspace in bytes at `bounds` on a device type. Remembers what it has computed.

    `multiprocessors`: of the card; None is taken for as many as any has that the shipped machine files know. `dispatch`: which kernel
    computes attention that names none; None: on any device of this type.
    """

    def __init__(self, bounds: Bounds, device_type: str, multiprocessors: int | None = None, dispatch: Dispatch | None = None) -> None:
        self.bounds, self.device_type = bounds, device_type
        self.dispatch = dispatch if dispatch is not None else Dispatch.of(device_type)
        self.multiprocessors = multiprocessors or _MOST_MULTIPROCESSORS
        self._known: dict[object, int] = {}
        self._told: dict[tuple[object, ...], tuple[list[object], int]] = {}
        self._may_need_any = remembered(lambda target: self._formula(target) is not None or target in _KERNELS)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workspace) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return (self.bounds, self.device_type, self.dispatch, self.multiprocessors)

    def __call__(self, node: fx.Node) -> int:
        if node.op != "call_function" or not self._may_need_any(node.target):
            return 0
        named = self.kernel_of(node) if node.target in attention.BOTH else None
        values = [node.meta.get("val"), *[operand.meta.get("val") for operand in node.all_input_nodes]]
        key = (id(node.target), named, *map(id, values))
        if key not in self._told:
            # The entry holds the values, which tell a node and its copies from all others, so that their ids cannot become others'.
            self._told[key] = (values, self._bytes_of(node, named))
        return self._told[key][1]

    def _bytes_of(self, node: fx.Node, named: str | None) -> int:
        formula, kernel = self._formula(node.target), _KERNELS.get(node.target)
        args = self._operands(node)
        key = (node.target, named, str([_described(a) for a in tree_leaves(args, is_leaf=lambda a: a is None)]))
        if key not in self._known:
            self._known[key] = formula(*args) if formula is not None else self._composed(node.target, kernel, args, named)  # type: ignore[arg-type]
        return self._known[key]

    def kernel_of(self, node: fx.Node) -> str:
        """The kernel of a neutral attention node: the one it names, else the one that is dispatched. Raises PlanError for none."""
        return attention.kernel_named_in(node) or self.dispatch(self._call(node))

    def _call(self, node: fx.Node) -> Call:
        operands, trains = self._operands(node), True
        if node.target is neutral.attention_backward:
            _grad, query, key, value, mask, _out, _lse, _seed, _offset, *options = operands
        else:
            (query, key, value, mask, *options), trains = operands, bool(attention.backwards_of(node))
        p, causal, scale, gqa = options
        return Call(query, key, value, mask, p, causal, scale, gqa, trains)

    def _operands(self, node: fx.Node) -> tuple[Any, ...]:
        args = attention.operands_of(node)
        return tree_map(self._concrete, args, is_leaf=lambda value: isinstance(value, fx.Node))  # type: ignore[no-any-return]

    def _formula(self, target: object) -> Callable[..., int] | None:
        if target is neutral.linear_8bit:
            return _linear_8bit_on_cpu if self.device_type == "cpu" else _linear_8bit
        if target is fused and self.device_type == "cuda":
            return _nothing
        if target is add_product:
            return None if self.device_type == "cuda" else converted_bytes
        if self.device_type == "cuda" and target in _SUMS:
            return functools.partial(_partial_sums, self.multiprocessors)
        if self.device_type == "cuda" and target in _CUDA_FORMULAS:
            return _CUDA_FORMULAS[target]
        return _FORMULAS.get(target) or _NAMED.get(str(target))

    def _concrete(self, value: object) -> object:
        """Operands as meta tensors of their largest size, symbols as numbers."""
        value = value.meta.get("val") if isinstance(value, fx.Node) else value
        if isinstance(value, torch.Tensor):
            shape, stride = [self.bounds.of(n) for n in value.shape], [self.bounds.of(n) for n in value.stride()]
            with without_modes():
                return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
        if isinstance(value, torch.SymInt):
            return self.bounds.of(value)
        return value

    def _composed(self, target: object, kernel: Callable[..., Any], args: tuple[Any, ...], named: str | None) -> int:
        if named in FUSED:
            is_counted = target is neutral.attention_backward and self.device_type == "cuda"
            return _bias_bytes(args) + (_fused_backward_bytes(args[1], args[2], args[3], self.multiprocessors) if is_counted else 0)
        with without_modes(), FakeTensorMode(), LiveBytes() as live:
            operands = tree_map(self._fake, args)
            live.restart()
            results = kernel(*operands)
            workspace = live.peak_bytes - live.now_bytes
            del results
        return workspace

    def _fake(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        # Fake tensors of a device that torch was built without fail in some ops; "meta" takes the same path as a card does.
        device = "meta" if self.device_type == "cuda" else self.device_type
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that ops make, until their last tensor is gone; inner workspaces by formula."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._n_bytes: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def restart(self) -> None:
        """Counts from here on."""
        self._n_bytes.clear()
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        operands = {weakref.ref(t.untyped_storage()) for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            key = weakref.ref(tensor.untyped_storage(), self._forget)
            if key not in operands and key not in self._n_bytes:
                self._n_bytes[key] = tensor.untyped_storage().nbytes()
                self.now_bytes += self._n_bytes[key]
        formula = _FORMULAS.get(func)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes + (formula(*args) if formula is not None else 0))
        return result

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self.now_bytes -= self._n_bytes.pop(key, 0)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _described(value: object) -> object:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


# Attention ------------------------------------------------------------------------------------------------------------


def _nothing(*_: object) -> int:
    """One kernel, that needs no memory beside its operands and results."""
    return 0


def _bias_bytes(args: tuple[Any, ...]) -> int:
    """A fused kernel gets a boolean mask as an additive one, made through its negation."""
    query = next(a for a in args if isinstance(a, torch.Tensor))
    masks = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.bool]
    return sum(m.numel() * (query.element_size() + 1) for m in masks)


def _fused_backward_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, multiprocessors: int) -> int:
    """What a fused backward sums in: the query's gradient in fp32, two numbers per row, and where heads share keys and values their gradients
    per query head (seen of cuDNN in bf16 on an H200, torch 2.11; rows in blocks of 128). Under deterministic algorithms the flash kernel runs
    instead: it keeps several sums of the query's gradient, fewer the more heads there are."""
    batch, heads, length, width = query.shape
    rows = batch * heads * -(-length // 128) * 128
    shared = key.shape[1] != heads
    per_head = batch * heads * -(-key.shape[2] // 128) * 128 * (key.shape[3] + value.shape[3]) * query.element_size()
    sums = -(-multiprocessors // (batch * heads)) if is_deterministic() else 1
    return rows * (sums * width + 2) * 4 + shared * per_head


def _attention_backward(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
                        *saved_and_options: Any) -> tuple[torch.Tensor, ...]:
    return composed.attention_gradients(grad, query, key, value, mask, *saved_and_options[4:])


_KERNELS: Mapping[object, Callable[..., Any]] = {
    neutral.attention: functools.partial(neutral.composed_attention, named=MATH),
    neutral.attention_dropout: functools.partial(neutral.composed_attention, named=MATH),
    neutral.attention_backward: _attention_backward,
    fused: run_program,
    neutral.dropout: composed.dropout_kernel,
    neutral.dropout_backward: composed.dropout_backward_kernel,
    **functions.FAKES,
}


# ATen -----------------------------------------------------------------------------------------------------------------


def _safe_softmax(src: torch.Tensor, dim: int, *_: object) -> int:
    """Which elements are -inf, which rows are, and a zero."""
    return src.numel() + src.numel() // max(src.shape[dim], 1) + src.element_size()


def _logsumexp(src: torch.Tensor, dim: list[int], *_: object) -> int:
    return src.nbytes + src.nbytes // max(math.prod(src.shape[d] for d in dim), 1)


def _embedding(weight: torch.Tensor, indices: torch.Tensor, *_: object) -> int:
    return 0 if indices.is_contiguous() else indices.numel() * indices.element_size()


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, n_weights: int, *_: object) -> int:
    """Of many indices: sorted with where they were, where the runs of equal ones and their parts begin, and in fp32 a sum for every part
    (at most ten of a run's gradients; PyTorch's EmbeddingBackwardKernel.cu). Few are added up as they come."""
    n = indices.numel()
    if n <= 3072:
        return 0
    parts = n // 10 + min(n, n_weights)
    return parts * -(-grad.shape[-1] // 32) * 32 * max(4, grad.element_size()) + 6 * n * 8


def _partial_sums(multiprocessors: int, src: torch.Tensor, dims: list[int] | None = None, *_: object) -> int:
    """A sum over rows whose columns lie side by side is shared by many blocks when it is long; each keeps what it has summed, in fp32, for
    every thread's columns and once more for every thread (PyTorch's Reduce.cuh). A sum along the columns keeps next to nothing."""
    summed = {d % src.ndim for d in dims} if dims and src.ndim else set(range(src.ndim))
    kept = [d for d in range(src.ndim) if d not in summed]
    if not src.numel() or not kept or src.stride(kept[-1]) != 1:
        return 0
    columns = math.prod(src.shape[d] for d in kept)
    rows = src.numel() // columns
    vector = next(v for v in (4, 2, 1) if src.shape[kept[-1]] % v == 0)
    width = min(_power_of_2(src.shape[kept[-1]] // vector), 32)
    height = min(_power_of_2(rows), 512 // vector // width)
    rows_per_thread = -(-rows // height)
    blocks = -(-columns // (vector * width))
    at_once = multiprocessors * (_THREADS_PER_MULTIPROCESSOR // (width * height))
    if rows_per_thread < 256 or blocks > at_once:
        return 0
    shares = max(min(-(-at_once // blocks), -(-rows_per_thread // 16)), -(-rows_per_thread // 256))
    return max(4, src.element_size()) * columns * shares * width * vector if shares > 1 else 0


# The most that any card has.
_THREADS_PER_MULTIPROCESSOR = 2048


def _power_of_2(n: int) -> int:
    """The largest that is not above `n`."""
    return 1 << max(n.bit_length() - 1, 0)


def _index(src: torch.Tensor, indices: list[torch.Tensor | None]) -> int:
    """The places of a boolean mask's elements, one number per dimension."""
    return sum(i.numel() * i.ndim * 8 for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8))


def _cross_entropy(src: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, *_: object) -> int:
    return 2 * src.numel() * src.element_size() + (weight.numel() + 1 if weight is not None else 0) * src.element_size()


def _convolution(src: torch.Tensor, weight: torch.Tensor, *_: object) -> int:
    """Contiguous copies; two-dimensional images may have their channels last."""
    return sum(t.numel() * t.element_size() for t in (src, weight) if not (t.is_contiguous() or _is_channels_last(t)))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _linear_8bit_on_cpu(src: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, *_: object) -> int:
    """The dequantized weight and its factors."""
    return weight.numel() * src.element_size() + scale.nbytes


def _linear_8bit(src: torch.Tensor, weight: torch.Tensor, *_: object) -> int:
    """`src` in half precision and in int8 with a scale per row, int32 sums, the product in half precision where `src` has another
    dtype. The columns of outliers, a few of thousands, are left out: how many there are is in the values."""
    rows, n_out = src.numel() // src.shape[-1], weight.shape[0]
    casts = src.numel() * 2 if src.dtype != torch.float16 else 0
    return casts + src.numel() + rows * 4 + rows * n_out * (4 + (2 if casts else 0))


def _gemm_4bit(src: torch.Tensor, weight: torch.Tensor, shape: list[int], absmax: torch.Tensor, blocksize: int, kind: str,
               bias: object = None, absmax_8bit: torch.Tensor | None = None, *_: object) -> int:
    """The dequantized weight; under double quantization its scales too, which are made first, by a sum of two."""
    scales = 0 if absmax_8bit is None else absmax_8bit.numel() * 4
    return max(2 * scales, scales + math.prod(shape) * src.element_size())


_SUMS = frozenset({_aten.sum.dim_IntList, _aten.mean.dim})
_CUDA_FORMULAS: Mapping[object, Callable[..., int]] = {_aten.embedding_dense_backward.default: _embedding_backward}
_NAMED: Mapping[str, Callable[..., int]] = {"bitsandbytes.gemm_4bit.default": _gemm_4bit}
_FORMULAS: Mapping[object, Callable[..., int]] = {
    _aten._safe_softmax.default: _safe_softmax,
    _aten.logsumexp.default: _logsumexp,
    _aten.embedding.default: _embedding,
    _aten.index.Tensor: _index,
    _aten.binary_cross_entropy_with_logits.default: _cross_entropy,
    _aten.convolution.default: _convolution,
}
