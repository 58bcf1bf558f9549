"""Donation: a result that takes the place of an operand that nobody reads any more, where memory is planned by offsets.

Only ops that read of an element's place nothing after they wrote there may do so: elementwise ones, the softmax family along the last
dimension, whose kernels read a row before they write it, and products of matrices that are added to something, which takes the sum without being
copied first. The bits are those of the same op with a result of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from . import ops
from .graph import Bounds, info, operands, remembered, same_form
from .liveness import Liveness, Storage, base_nodes
from .out_variants import out_variant

_aten = torch.ops.aten
# Position of the operand whose place the result may take, and of the dimension that must be the last.
_ROWWISE = {
    _aten._log_softmax.default: (0, 1),
    _aten._softmax.default: (0, 1),
    _aten._log_softmax_backward_data.default: (0, 2),
    _aten._softmax_backward_data.default: (0, 2),
}
# To their first operand products are added; the others are read to the end.
_ADDED_TO = frozenset({_aten.addmm.default, _aten.baddbmm.default})


def donations(live: Liveness, placed: dict[Storage, fx.Node]) -> dict[Storage, Storage]:
    """For each Storage that takes another's place, that other: both in `placed`, of one size, the last read of one the making of the other."""
    found: dict[Storage, Storage] = {}
    for i, node in enumerate(live.nodes):
        made = live.defined_at(node) if takes_a_place(node) else ()
        if len(made) != 1 or made[0] not in placed:
            continue
        for operand in _candidates(node):
            storages = live.of.get(operand, ())
            if len(storages) != 1:
                continue
            given = storages[0]
            if given not in placed or given.n_bytes != made[0].n_bytes or _last_read(live, given) != i:
                continue
            if all(_reads_in_step(other, operand, node) for other in operands(node) if given in live.of.get(other, ())):
                found[made[0]] = given
                break
    return found


def given_away(live: Liveness) -> dict[Storage, int]:
    """Storages whose place another has taken, by the offsets of the graph, and the node index at which it has."""
    placed = {s: node for s, node in base_nodes(live).items() if info(node).offset is not None}
    pairs = donations(live, placed) if placed else {}
    return {given: live.first[taker] for taker, given in pairs.items() if _place(placed[given]) == _place(placed[taker])}


def _place(node: fx.Node) -> object:
    return info(node).offset, info(node).pages


def takes_a_place(node: fx.Node) -> bool:
    """Whether the op can write its result over an operand."""
    return node.op == "call_function" and _may_overwrite(node.target)


@remembered
def _may_overwrite(target: object) -> bool:
    variant = out_variant(target)
    if variant is None or len(variant.results) != 1 or not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _ROWWISE or target in _ADDED_TO or torch.Tag.pointwise in target.tags


def _reads_in_step(other: fx.Node, operand: fx.Node, node: fx.Node) -> bool:
    """Whether the op reads `other`, which lies where `operand` does, no later than it writes there."""
    return other is operand if node.target in _ADDED_TO else same_form(other, node)


def _candidates(node: fx.Node) -> Iterator[fx.Node]:
    """Operands whose place the result may take, as far as shapes say."""
    if node.target in _ROWWISE:
        position, dim = _ROWWISE[node.target]  # type: ignore[index]
        operand = node.args[position]
        if isinstance(operand, fx.Node) and node.args[dim] in (-1, node.meta["val"].dim() - 1) and same_form(operand, node):
            yield operand
        return
    if node.target in _ADDED_TO:
        into, *factors = node.args[:3]
        if isinstance(into, fx.Node) and into not in factors and same_form(into, node):
            yield into
        return
    for operand in operands(node):
        if same_form(operand, node):
            yield operand


def _last_read(live: Liveness, storage: Storage) -> int:
    """Index of the last node that uses the Storage, its release apart."""
    return next((i for i in reversed(live.uses[storage]) if live.nodes[i].target is not ops.release), live.first[storage])


@dataclass(frozen=True, slots=True)
class Donated:
    """A workspace for planning: minus the bytes that an op does not need because its result takes an operand's place, whatever the plan is.

    That is so where nothing else reads the operand at all.
    """

    bounds: Bounds

    def __call__(self, node: fx.Node) -> int:
        own = [operand for operand in operands(node) if _is_read_by_it_alone(node, operand)] if takes_a_place(node) else []
        return -self.spared_bytes(node) if own and any(operand in own for operand in self.givers(node)) else 0

    def spared_bytes(self, node: fx.Node) -> int:
        """Bytes that a node with `givers` does not need, if one of them gives its place."""
        return self.bounds.bytes_of(node.meta["val"])

    @staticmethod
    def givers(node: fx.Node) -> list[fx.Node]:
        """Operands whose place the node's result takes if nothing else reads them: made by ops that can write where they are told, or brought back
        by a copy."""
        return [operand for operand in _candidates(node) if _is_written_where_told(operand)] if takes_a_place(node) else []


def _is_written_where_told(operand: fx.Node) -> bool:
    return operand.op == "call_function" and (out_variant(operand.target) is not None or operand.target is ops.wait)


def _is_read_by_it_alone(node: fx.Node, operand: fx.Node) -> bool:
    return all(user is node or user.target is ops.release for user in operand.users)
