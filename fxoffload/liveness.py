"""Liveness per Storage, per node, over a whole Graph (forward and backward are one program).

A Storage is the memory a node's result aliases. Views, `wait` and `getitem` share their source's Storage; every other result
is a new one. The unit of bytes is the Storage at the Bounds, so a plan made here is valid for every smaller shape.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum

import torch
import torch.fx as fx

from . import ops
from .effects import Alloc, Tier
from .graph import Bounds, Role, border_of, info, name_of, operands, tensor_bytes, tensors_in


class Kind(str, Enum):
    """The three byte columns of a dump, and what is outside them."""

    PARAMETER = "parameter"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory: `name` is its producer's canonical name (with ":i" for output i of several)."""

    name: str
    n_bytes: int
    tier: Tier
    kind: Kind
    is_input: bool


@dataclass(frozen=True)
class Liveness:
    """`of[node]`: Storages the node's value aliases. `first`/`last`: node index of definition and last use of each Storage.

    A Storage that the output returns, and every input, is live to the end (`escapes`).
    """

    nodes: tuple[fx.Node, ...]
    index: dict[fx.Node, int]
    of: dict[fx.Node, tuple[Storage, ...]]
    first: dict[Storage, int]
    last: dict[Storage, int]
    uses: dict[Storage, tuple[int, ...]]
    escapes: frozenset[Storage]

    def defined_at(self, node: fx.Node) -> tuple[Storage, ...]:
        """Storages the node makes."""
        i = self.index[node]
        return tuple(s for s in self.of.get(node, ()) if self.first[s] == i)


# Ops that return their input's memory although their schema does not say so.
_HIDDEN_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default})


def is_view(node: fx.Node) -> bool:
    """True when the node's result shares its first tensor argument's Storage (by schema, not by fake value)."""
    spec = ops.spec_of(node)
    if spec is not None:
        return spec.alias_of is not None
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target in _HIDDEN_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    return any(r.alias_info is not None for r in schema.returns)


def view_source(node: fx.Node) -> fx.Node:
    """The operand a view, `wait` or `getitem` looks into."""
    spec = ops.spec_of(node)
    if spec is not None and spec.alias_of is not None:
        source = spec.argument(node, spec.alias_of)
    else:
        source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def liveness(graph: fx.Graph, bounds: Bounds | None = None) -> Liveness:
    """The Liveness of `graph`; Storages without tensors (symbols) are left out. Raises KeyError for an unbounded symbol."""
    bounds = bounds or Bounds()
    nodes = tuple(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    border = border_of(graph)
    border_index = index[border] if border is not None else len(nodes)
    of: dict[fx.Node, tuple[Storage, ...]] = {}
    first: dict[Storage, int] = {}
    uses: dict[Storage, list[int]] = {}
    for i, node in enumerate(nodes):
        for operand in operands(node):
            for storage in of.get(operand, ()):
                uses[storage].append(i)
        if node.op == "output":
            continue
        of[node] = _storages(node, of, i > border_index, bounds)
        for storage in of[node]:
            if storage not in first:
                first[storage] = i
                uses[storage] = []
    output = nodes[-1] if nodes and nodes[-1].op == "output" else None
    returned = {s for operand in operands(output) for s in of.get(operand, ())} if output is not None else set()
    escapes = frozenset(returned | {s for s in first if s.is_input})
    last = {s: (uses[s][-1] if uses[s] else first[s]) for s in first}
    return Liveness(nodes, index, of, first, last, {s: tuple(u) for s, u in uses.items()}, escapes)


def _storages(node: fx.Node, of: dict[fx.Node, tuple[Storage, ...]], in_backward: bool, bounds: Bounds) -> tuple[Storage, ...]:
    if node.op == "placeholder":
        return _input_storage(node, bounds)
    if node.target is operator.getitem:
        source = of.get(view_source(node), ())
        position = node.args[1]
        shared = is_view(view_source(node)) or len(source) == 1
        return source if shared else source[position : position + 1] if isinstance(position, int) else source
    if is_view(node):
        return of.get(view_source(node), ())
    values = tensors_in(node.meta.get("val"))
    if not values:
        return ()
    tier, kind = _tier(node, of), _kind(node, of, in_backward)
    name = name_of(node)
    if len(values) == 1 and isinstance(node.meta.get("val"), torch.Tensor):
        return (Storage(name, tensor_bytes(values[0], bounds), tier, kind, False),)
    return tuple(Storage(f"{name}:{i}", tensor_bytes(v, bounds), tier, kind, False) for i, v in enumerate(values))


def _input_storage(node: fx.Node, bounds: Bounds) -> tuple[Storage, ...]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    entry = info(node)
    kind = {Role.PARAMETER: Kind.PARAMETER, Role.TANGENT: Kind.GRADIENT}.get(entry.role or Role.BATCH, Kind.OTHER)
    return (Storage(entry.name, tensor_bytes(value, bounds), entry.tier, kind, True),)


def _tier(node: fx.Node, of: dict[fx.Node, tuple[Storage, ...]]) -> Tier:
    spec = ops.spec_of(node)
    if spec is not None:
        for effect in spec.effects:
            if isinstance(effect, Alloc):
                return effect.tier if isinstance(effect.tier, Tier) else Tier(str(spec.argument(node, effect.tier)))
    sources = [s for operand in operands(node) for s in of.get(operand, ())]
    if sources and all(s.tier.on_host for s in sources):
        return Tier.PAGEABLE
    return Tier.DEVICE


def _kind(node: fx.Node, of: dict[fx.Node, tuple[Storage, ...]], in_backward: bool) -> Kind:
    spec = ops.spec_of(node)
    sources = [s for operand in operands(node) for s in of.get(operand, ())]
    if spec is not None and sources:
        return sources[0].kind
    if sources and all(s.kind is Kind.PARAMETER for s in sources):
        return Kind.PARAMETER
    entry = info(node)
    return Kind.GRADIENT if in_backward and entry.origin is None else Kind.ACTIVATION
