"""Attention in a graph: its calls, the kernel of each, and what one takes.

A call is one of our neutral ops, another op that is attention as a whole, or a softmax between two products that the model wrote out
itself ("math", its values of length x length are the graph's). The neutral ops run what `bind` names in them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from .attention import BOTH, FORWARD, backwards_of, forward_of, set_kernel
from .dispatch import fused_kernel
from .graph import Bounds, border_of, name_of, op_name, tensors_in
from .kernels import MATH, AttentionKernel, grouped
from .workspace import Workspace

_aten = torch.ops.aten


def bind(graph: fx.Graph, workspace: Workspace) -> None:
    """Names in every neutral attention of a canonical Step the kernel that it runs, forward and backward the same."""
    for node in _neutral(graph):
        forward = forward_of(node) if node.target not in FORWARD else node
        set_kernel(node, workspace.kernel_of(forward if forward is not None else node))


def unbind(graph: fx.Graph) -> None:
    """Leaves the kernel of every neutral attention to torch."""
    for node in _neutral(graph):
        set_kernel(node, None)


def _neutral(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function" and node.target in BOTH)


def kernels_in(graph: fx.Graph, bounds: Bounds, workspace: Workspace) -> tuple[AttentionKernel, ...]:
    """What computes the attention of a canonical Step, calls that are alike as one. () for a graph without any."""
    alike: dict[tuple[str, int, int], list[str]] = {}
    for call in _calls(graph, bounds, workspace):
        alike.setdefault((call.kernel, call.saved_bytes, call.scratch_bytes), []).append(call.calls)
    return tuple(
        AttentionKernel(calls, kernel, saved, scratch) for (kernel, saved, scratch), names in alike.items() for calls in grouped(names))


def _calls(graph: fx.Graph, bounds: Bounds, workspace: Workspace) -> Iterator[AttentionKernel]:
    border, order = border_of(graph), {node: i for i, node in enumerate(graph.nodes)}
    end = order[border] if border is not None else len(order)
    for node, position in order.items():
        if position >= end:
            return
        if node.op != "call_function":
            continue
        if node.target in FORWARD:
            scratch = max(workspace(one) for one in (node, *backwards_of(node)))
            yield AttentionKernel(name_of(node), workspace.kernel_of(node), _saved_bytes([node], order, end, bounds), scratch)
        elif (kernel := _whole(node)) is not None:
            yield AttentionKernel(name_of(node), kernel, _saved_bytes([node], order, end, bounds), workspace(node))
        elif node.target in _SOFTMAX and (chain := _written_out(node)):
            yield AttentionKernel(name_of(node), MATH, _saved_bytes(chain, order, end, bounds), max(map(workspace, chain)))


def _saved_bytes(made: list[fx.Node], order: dict[fx.Node, int], end: int, bounds: Bounds) -> int:
    """Bytes of the results of `made` that backward reads, directly or through views."""
    return sum(bounds.bytes_of(t) for node in made for t, item in _results(node) if any(order[user] >= end for user in _readers(item)))


def _results(node: fx.Node) -> Iterator[tuple[torch.Tensor, fx.Node]]:
    """Each tensor that a node makes, and the node that stands for it."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value, node
        return
    for user in node.users:
        if op_name(user) == "getitem":
            for tensor in tensors_in(user.meta.get("val")):
                yield tensor, user


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield user
        if op_name(user) in _VIEWS:
            yield from _readers(user)


# Calls ----------------------------------------------------------------------------------------------------------------


# Ops of others that are attention as a whole, by the first letters of their names.
_OTHERS = {"flex_attention": "flex", "_flash_attn": "flash_attn", "flash_attn": "flash_attn"}


def _whole(node: fx.Node) -> str | None:
    """The kernel of a torch op, or of another library's, that is attention as a whole."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return fused_kernel(node.target._schema.name)
    name = op_name(node)
    return next((kernel for word, kernel in _OTHERS.items() if name.startswith(word) and "backward" not in name), None)


_SOFTMAX = (_aten._softmax.default, _aten._safe_softmax.default)
_PRODUCTS = ("bmm", "matmul", "baddbmm")
_VIEWS = ("reshape", "view", "_unsafe_view", "expand", "transpose", "permute", "unsqueeze", "squeeze", "slice", "alias", "detach")
# What stands between the scores' product and their softmax, and between that and the second product.
_BEFORE = (*_VIEWS, "mul", "div", "add", "sub", "where", "masked_fill", "_to_copy", "tanh", "clone", "cat", "amax")
_AFTER = (*_VIEWS, "_to_copy", "dropout", "native_dropout", "getitem", "clone", "mul")
_FAR = 12


def _written_out(softmax: fx.Node) -> list[fx.Node]:
    """The softmax and what is made of it on the way to the second product, where this is attention; [] where it is not."""
    if not _comes_from_product(softmax, _FAR):
        return []
    chain, frontier = [softmax], [softmax]
    for _ in range(_FAR):
        users = [user for node in frontier for user in node.users]
        if any(op_name(user) in _PRODUCTS for user in users):
            return [node for node in chain if op_name(node) not in (*_VIEWS, "getitem")]
        frontier = [user for user in dict.fromkeys(users) if op_name(user) in _AFTER]
        chain += frontier
    return []


def _comes_from_product(node: fx.Node, left: int) -> bool:
    for source in node.all_input_nodes:
        name = op_name(source)
        if name in _PRODUCTS or left and name in _BEFORE and _comes_from_product(source, left - 1):
            return True
    return False
