"""Rates of the compute channel: matrix products, attention, ops bound by memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import fit
from .bench import DTYPES, Bench
from .fit import Cell, Json
from .timing import Act, sweep

_aten = torch.ops.aten
# Small sides are LoRA's ranks and adapters, large ones are tokens, hidden and intermediate widths.
_GRID = ((16, 128, 1024, 4096, 16384), (16, 64, 256, 1024, 4096, 16384), (16, 64, 256, 1024, 4096, 16384))
_CPU_GRID = ((16, 128, 1024), (16, 256, 2048), (16, 256, 2048))
_HEAD_DIMS = (64, 128)
# (heads of the whole batch, length), FLOPs rising
_ATTENTIONS = ((32, 128), (32, 512), (32, 2048), (128, 2048), (32, 8192))
_CPU_ATTENTIONS = ((4, 64), (8, 128), (8, 256), (8, 512))
_KIB = 1 << 10
_BYTES = [64 * _KIB * 4**i for i in range(8)]  # 64 KiB to 1 GiB
_CPU_BYTES = _BYTES[:6]
_ROW = 1024  # elements of a row that is reduced, gathered or scattered


def matrix(bench: Bench, dtype: str) -> Json:
    """Seconds of x @ weight.T over a grid of sizes, small products first, as far as time and memory go."""
    axes = _GRID if bench.is_cuda else _CPU_GRID
    item_bytes = DTYPES[dtype].itemsize
    cells = sorted(fit.cells(axes), key=lambda cell: (fit.flops(axes, cell), cell))
    sides = {cell: (axes[0][cell[0]], axes[1][cell[1]], axes[2][cell[2]]) for cell in cells}
    largest = max(bench.fitting([max(m * k, k * n, m * n) * item_bytes for m, k, n in sides.values()], 3)) // item_bytes
    left, right = bench.values(largest, dtype=dtype), bench.values(largest, dtype=dtype)
    measured: dict[Cell, float] = {}
    for i, cell in enumerate(cells):
        m, k, n = sides[cell]
        too_long = bool(measured) and 5 * fit.extended_s(cell, axes, measured) > bench.deadline.left_s()
        if too_long or max(m * k, k * n, m * n) > largest:
            continue
        x, weight = left[: m * k].view(m, k), right[: n * k].view(n, k)
        measured[cell] = bench.clock.seconds(lambda: torch.mm(x, weight.t()), bench.deadline.left_s() / (4 * (len(cells) - i)))
    return fit.matrix(axes, measured)


def attention(bench: Bench) -> list[Json]:
    """Causal fused attention per head dimension, forward and backward, over FLOPs."""
    rates: list[Json] = []
    for i, head_dim in enumerate(_HEAD_DIMS):
        part = bench.deadline.share(1 / (len(_HEAD_DIMS) - i))
        shapes = _ATTENTIONS if bench.is_cuda else _CPU_ATTENTIONS
        sizes = {2 * heads * length * length * head_dim: (heads, length) for heads, length in shapes}
        forward = sweep(sizes, lambda n, limit_s: bench.clock.seconds(_attend(bench, *sizes[n], head_dim), limit_s), part.share(1 / 3))
        backward = sweep(sizes, lambda n, limit_s: bench.clock.seconds(_attend_backward(bench, *sizes[n], head_dim), limit_s), part)
        backward_flops = [(n * 5 // 2, s) for n, s in backward]  # five products after two
        rates.append({
            "head_dim": head_dim, "dtype": bench.dtype, "forward": fit.curve(forward[0][1], forward),
            "backward": fit.curve(backward[0][1], backward_flops),
        })
    return rates


def _attend(bench: Bench, heads: int, length: int, head_dim: int) -> Act:
    query, key, value = (bench.values(1, heads, length, head_dim) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_backward(bench: Bench, heads: int, length: int, head_dim: int) -> Act:
    query, key, value = (bench.values(1, heads, length, head_dim).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    grad = bench.values(*out.shape)
    return lambda: torch.autograd.grad(out, [query, key, value], grad, retain_graph=True)


def memory(bench: Bench, kind: str) -> Json:
    """Seconds of one kind of op over the bytes it reads and writes."""
    sizes = bench.fitting(_BYTES if bench.is_cuda else _CPU_BYTES, 2)
    limit_s = bench.deadline.left_s() / (2 * len(sizes))
    latency_s = bench.clock.seconds(_moving(bench, kind, 4 * _KIB), limit_s)
    return fit.curve(latency_s, sweep(sizes, lambda n, limit_s: bench.clock.seconds(_moving(bench, kind, n), limit_s), bench.deadline))


def _moving(bench: Bench, kind: str, n_bytes: int) -> Act:
    """An op of `kind` that reads and writes `n_bytes`."""
    n = n_bytes // DTYPES[bench.dtype].itemsize
    if kind == "binary":
        left, right = bench.values(n // 3), bench.values(n // 3)
        return lambda: torch.add(left, right)
    if kind == "mixed":  # fp32 and the training dtype, the result in fp32
        left, right = bench.values(n_bytes // 10, dtype="fp32"), bench.values(n_bytes // 10, dtype="bf16")
        return lambda: torch.add(left, right)
    if kind == "strided":  # heads of 128 beside each other, times what all heads share
        heads = bench.values(max(n // 2 // _ROW // 8, 1), 8, _ROW).transpose(0, 1)
        return lambda: torch.mul(heads, heads[:1])
    if kind == "widen":
        narrow = bench.values(n_bytes // 6, dtype="bf16")
        return narrow.float
    if kind == "reduction":
        wide = bench.values(max(n // _ROW, 1), _ROW)
        return lambda: wide.sum(-1)
    rows = max(n // 2 // _ROW, 1)
    src = bench.values(rows, _ROW)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(bench.device)
    acts: dict[str, Act] = {
        "copy": src.clone, "pointwise": lambda: F.silu(src), "softmax": lambda: torch.softmax(src, -1),
        "gather": lambda: F.embedding(order, src), "scatter": lambda: _aten.embedding_dense_backward(src, order, rows, -1, False),
    }
    return acts[kind]


def overhead(bench: Bench) -> dict[str, int]:
    """Device bytes that no tensor owns, after the first use of every library: the allocator's (workspaces) and the context's.

    The context's are all bytes in use outside this allocator, so other processes on the device are in it.
    """
    _use_libraries(bench)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(bench.device)
    free, total = torch.cuda.mem_get_info(bench.device)
    return {"overhead_bytes": reserved, "context_bytes": total - free - reserved}


def _use_libraries(bench: Bench) -> None:
    """Products and convolutions forward and backward: autograd's thread has library handles, and workspaces, of its own."""
    for dtype in DTYPES:
        square = bench.values(1024, 1024, dtype=dtype).requires_grad_()
        image, kernel = bench.values(1, 16, 64, 64, dtype=dtype), bench.values(16, 16, 3, 3, dtype=dtype).requires_grad_()
        torch.autograd.grad(torch.addmm(square[0], square, square).sum() + F.conv2d(image, kernel).sum(), [square, kernel])
    _attend_backward(bench, 8, 512, 64)()
