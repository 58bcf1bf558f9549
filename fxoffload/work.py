"""The Work of a node: what kind of kernel it is, and how many bytes and FLOPs it has, at the bounds. No machine in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from . import functions
from .function_effort import Effort
from .fusion import fused
from .graph import Bounds, op_name, tensor_bytes, tensors_in
from .text_words import expr_of
from .torch_compat import without_modes

_DTYPE_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CREATED = frozenset(
    "arange empty empty_like full full_like new_empty "
    "new_full new_ones new_zeros ones ones_like rand randn scalar_tensor zeros zeros_like".split()
)
_COPIES = frozenset(
    "_to_copy cat clone constant_pad_nd copy copy_ flip repeat roll select_backward "
    "select_scatter slice_backward slice_scatter stack".split()
)
# Those of one tensor, in its shape.
_WHOLE_COPIES = frozenset({"_to_copy", "clone"})
_REDUCTIONS = frozenset(
    "_fused_rms_norm _fused_rms_norm_backward all amax amin any argmax argmin linalg_vector_norm max mean min native_batch_norm "
    "native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward prod sum var "
    "var_mean".split()
)
_SOFTMAXES = frozenset(
    "_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data logsumexp nll_loss_backward "
    "nll_loss_forward".split()
)
_GATHERS = frozenset("embedding gather index index_select".split())
_SCATTERS = frozenset("_unsafe_index_put embedding_dense_backward index_add index_put scatter scatter_add".split())
_UNPACKS = frozenset("dequantize_4bit dequantize_8bit dequantize_blockwise".split())  # bitsandbytes
_DROPOUTS = frozenset("dropout dropout_backward native_dropout native_dropout_backward".split())


@dataclass(frozen=True, slots=True)
class Work:
    """`kind`: "matrix", "attention_forward", "attention_backward", one of MEMORY_KINDS, or "unknown".

    `dtype`: the word for what is multiplied ("other" for integers and the like). `n_bytes`: read and written. `size`: (m, k, n) of a
    matrix product that runs `times` times.
    """

    kind: str
    dtype: str
    n_bytes: int
    n_flops: int = 0
    size: tuple[int, int, int] = (0, 0, 0)
    times: int = 1
    head_dim: int = 0


def work_of(node: fx.Node, bounds: Bounds) -> Work:
    """What the kernel of a call that returns tensors does."""
    return bounds.told(_work_of, node)


def _work_of(node: fx.Node, bounds: Bounds) -> Work:
    if node.target in functions.OPS:
        return _function(node, bounds)
    found = product_of(node, bounds)
    name = op_name(node)
    return found if found is not None else Work(_kind(name, node), "other", _moved_bytes(name, node, bounds))


def product_of(node: fx.Node, bounds: Bounds) -> Work | None:
    """The Work of a node that multiplies matrices, attention included; None for all others."""
    name = op_name(node)
    return _product(name, node, bounds) or _attention(name, node, bounds)


def touched_bytes(node: fx.Node, bounds: Bounds) -> int:
    """Bytes of the node's operands and results, each once."""
    values = [v for o in node.all_input_nodes for v in tensors_in(o.meta.get("val"))] + tensors_in(node.meta.get("val"))
    return sum(tensor_bytes(v, bounds) for v in values)


def reads_rows(node: fx.Node) -> bool:
    """Whether the node reads only some rows of its first operand, a table."""
    return op_name(node) in _GATHERS


def _function(node: fx.Node, bounds: Bounds) -> Work:
    """What a Function around Triton kernels does, by its own code; its products as one of the largest, so often as gives their FLOPs."""
    operands, call, sizes = node.args
    with without_modes():
        given = [
            torch.empty_strided(bounds.shape_of(v), [bounds.of(n) for n in v.stride()], dtype=v.dtype, device="meta")
            for v in (o.meta["val"] for o in operands)]  # type: ignore[union-attr]
    numbers = [bounds.of(n.meta["val"] if isinstance(n, fx.Node) else n) for n in sizes]  # type: ignore[union-attr, arg-type]
    effort = Effort.of(node.target, given, str(call), numbers)
    if not effort.products:
        return Work("binary", "other", effort.n_bytes)
    m, k, n = max(effort.products, key=math.prod)
    n_flops = 2 * sum(map(math.prod, effort.products))
    return Work("matrix", dtype_word(given[0].dtype), effort.n_bytes, n_flops, (m, k, n), -(-n_flops // (2 * m * k * n)))


# Bound by memory ------------------------------------------------------------------------------------------------------


def _kind(name: str, node: fx.Node) -> str:
    if name in _CREATED:
        return "copy"
    if name in _COPIES:
        return _kind_of_copy(node) if name in _WHOLE_COPIES else "copy"
    for kind, names in (("reduction", _REDUCTIONS), ("softmax", _SOFTMAXES), ("gather", _GATHERS), ("scatter", _SCATTERS)):
        if name in names:
            return kind
    if name in _DROPOUTS:
        return "binary"
    if name in _UNPACKS:
        return "widen"
    if node.target is fused:
        return "binary"
    return _kind_of_pointwise(node) if torch.Tag.pointwise in getattr(node.target, "tags", ()) else "unknown"


def _kind_of_copy(node: fx.Node) -> str:
    source, result = (tensors_in(value)[0] for value in (node.all_input_nodes[0].meta.get("val"), node.meta["val"]))
    if source.is_floating_point() and result.is_floating_point() and source.element_size() < result.element_size():
        return "widen"
    return "copy" if _lie_alike(source, result) else "strided"


def _kind_of_pointwise(node: fx.Node) -> str:
    """Kernels that convert an operand, or step through memory in another order than their result's, are slower than others."""
    result = tensors_in(node.meta["val"])[0]
    read = [v for o in node.all_input_nodes for v in tensors_in(o.meta.get("val")) if v.ndim]
    if len({v.dtype for v in read if v.is_floating_point()}) > 1:
        return "mixed"
    if not all(_lie_alike(v, result) for v in read):
        return "strided"
    return "pointwise" if len(node.all_input_nodes) < 2 else "binary"


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the same steps lead through both; symbols as expressions, so that no guard is set."""
    if a.ndim != b.ndim:
        return False
    sizes = [(expr_of(m), expr_of(n)) for m, n in zip(a.shape, b.shape)]
    steps = [(expr_of(m), expr_of(n)) for m, n in zip(a.stride(), b.stride())]
    return all(m == n and (n == 1 or s == t) for (m, n), (s, t) in zip(sizes, steps))


def _moved_bytes(name: str, node: fx.Node, bounds: Bounds) -> int:
    """Bytes read and written: of a table only the rows that are read, of a new tensor only itself."""
    written = sum(tensor_bytes(v, bounds) for v in tensors_in(node.meta["val"]))
    if name in _CREATED:
        return written
    if name in _GATHERS:
        read = [v for o in node.all_input_nodes[1:] for v in tensors_in(o.meta.get("val"))]
        return 2 * written + sum(tensor_bytes(v, bounds) for v in read)
    return touched_bytes(node, bounds)


# Matrix products ------------------------------------------------------------------------------------------------------


def _product(name: str, node: fx.Node, bounds: Bounds) -> Work | None:
    """A product of matrices, a convolution as the product it is computed by, None for all else."""
    if name.startswith("convolution"):
        return _convolution(node, bounds, backward="backward" in name)
    if name in ("mm", "_int_mm", "addmm", "add_product"):
        (m, k), (_, n) = _shapes(node, bounds, *((0, 1) if name != "addmm" else (1, 2)))
    elif name in ("bmm", "baddbmm"):
        (b, rows, k), (_, _, n) = _shapes(node, bounds, *((0, 1) if name == "bmm" else (1, 2)))
        m = b * rows
    elif name in ("_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward", "grouped_mm_backward"):
        (m, k), weight = _shapes(node, bounds, 0, 1)
        return _matrix_work(node, bounds, (m, k, weight[-1]), 2 if "backward" in name else 1)
    elif name in ("gemm_4bit", "linear_8bit"):  # bitsandbytes: rows times a packed weight
        source, (out,) = _shapes(node, bounds, 0)[0], tensors_in(node.meta["val"])
        m, k, n = math.prod(source[:-1]), source[-1], bounds.shape_of(out)[-1]
    else:
        return None
    return _matrix_work(node, bounds, (m, k, n))


def _matrix_work(node: fx.Node, bounds: Bounds, size: tuple[int, int, int], times: int = 1) -> Work:
    m, k, n = size
    return Work("matrix", _dtype(node), touched_bytes(node, bounds), 2 * m * k * n * times, size, times)


def _convolution(node: fx.Node, bounds: Bounds, backward: bool) -> Work:
    """Implicit GEMM: every output position is a row, every weight of one output channel a step of k; backward makes two products."""
    weight = _shapes(node, bounds, 2 if backward else 1)[0]
    out = _shapes(node, bounds, 0)[0] if backward else bounds.shape_of(tensors_in(node.meta["val"])[0])
    positions = math.prod(out) // max(out[1], 1)
    return _matrix_work(node, bounds, (positions, math.prod(weight[1:]), out[1]), 2 if backward else 1)


# Attention ------------------------------------------------------------------------------------------------------------


def _attention(name: str, node: fx.Node, bounds: Bounds) -> Work | None:
    """Fused attention: 4bhqkd FLOPs forward (two products), 10bhqkd backward (five), both halved when causal."""
    if not (name.startswith("attention") or name.startswith("_scaled_dot_product")):
        return None
    backward = "backward" in name
    query, key = _shapes(node, bounds, *((1, 2) if backward else (0, 1)))
    n_flops = (10 if backward else 4) * query[0] * query[1] * query[2] * key[2] * query[3]
    if _argument(node, "causal") is True or _argument(node, "is_causal") is True:
        n_flops //= 2
    kind = "attention_backward" if backward else "attention_forward"
    return Work(kind, _dtype(node), touched_bytes(node, bounds), n_flops, head_dim=query[3])


def _argument(node: fx.Node, name: str) -> object:
    """What the node passes for a schema argument, None where it has none of that name or leaves the default."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name)
    return None


def _shapes(node: fx.Node, bounds: Bounds, *positions: int) -> list[tuple[int, ...]]:
    return [bounds.shape_of(node.args[i].meta["val"]) for i in positions]  # type: ignore[union-attr]


def _dtype(node: fx.Node) -> str:
    first = next(v for a in node.args if isinstance(a, fx.Node) for v in tensors_in(a.meta.get("val")))
    return dtype_word(first.dtype)


def dtype_word(dtype: torch.dtype) -> str:
    """What machine files call a dtype, "other" where none has a rate of its own."""
    return _DTYPE_WORDS.get(dtype, "other")
