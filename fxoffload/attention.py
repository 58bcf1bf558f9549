"""Nodes of neutral attention: the kernel that one names, and which forward belongs to which backward."""

from __future__ import annotations

import torch.fx as fx

from . import neutral
from .graph import op_name

FORWARD = (neutral.attention, neutral.attention_dropout)
BOTH = frozenset((*FORWARD, neutral.attention_backward))
# How many arguments there are before the name of the kernel.
_N_OPERANDS = {neutral.attention: 8, neutral.attention_dropout: 8, neutral.attention_backward: 13}
# Among them, of backward: what forward was given, and what it made.
_BACKWARD_OUT = 5


def kernel_named_in(node: fx.Node) -> str | None:
    """The kernel that a node of attention runs; None where it is left to torch."""
    named = node.args[_N_OPERANDS[node.target] :]  # type: ignore[index]
    return str(named[0]) if named and named[0] is not None else None


def set_kernel(node: fx.Node, kernel: str | None) -> None:
    """Names the kernel that a node of attention runs, or leaves it to torch."""
    node.args = operands_of(node) if kernel is None else (*operands_of(node), kernel)


def operands_of(node: fx.Node) -> tuple[fx.node.Argument, ...]:
    """The arguments of any node; of attention without the name of the kernel."""
    return node.args[: _N_OPERANDS[node.target]] if node.target in BOTH else node.args  # type: ignore[index]


def forward_of(backward: fx.Node) -> fx.Node | None:
    """The forward whose results a backward was handed; None where they came by way of a copy."""
    out = backward.args[_BACKWARD_OUT]
    made = out.args[0] if isinstance(out, fx.Node) and op_name(out) == "getitem" else None
    return made if isinstance(made, fx.Node) and made.target in FORWARD else None


def backwards_of(forward: fx.Node) -> list[fx.Node]:
    """The backwards that were handed the results of a forward."""
    users = (user for item in forward.users for user in item.users if op_name(item) == "getitem")
    return [user for user in dict.fromkeys(users) if user.target is neutral.attention_backward and forward_of(user) is forward]
