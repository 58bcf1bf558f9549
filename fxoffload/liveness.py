"""Liveness per Storage, per node, over a whole Graph (forward and backward are one program).

A Storage is the memory a node's result aliases. Views, `wait` and `getitem` share their source's Storage; every other result
is a new one. The unit of bytes is the Storage at the Bounds, so a plan made here is valid for every smaller shape.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Final, cast

import torch
import torch.fx as fx

from . import ops
from .effects import Alloc, Await, Borrow, Effect, Free, Tier
from .graph import Bounds, Role, Told, border_of, info, name_of, operands, remembered, tensor_bytes


class Kind(str, Enum):
    """The three byte columns of a dump, and what is outside them."""

    PARAMETER = "parameter"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OTHER = "other"


@dataclass(slots=True, eq=False)
class Storage:
    """One piece of memory: `name` is its producer's canonical name (with ":i" for output i of several).

    Each Liveness has Storages of its own, equal to nothing but themselves.
    """

    # Final, not frozen: a search makes a hundred thousand, and what freezes a dataclass takes longer than making it.
    name: Final[str]
    n_bytes: Final[int]
    tier: Final[Tier]
    kind: Final[Kind]
    is_input: Final[bool]

    @property
    def is_tangent(self) -> bool:
        """An input that comes with backward: nobody has it while forward runs."""
        return self.is_input and self.kind is Kind.GRADIENT


@dataclass(frozen=True)
class Liveness:
    """`of[node]`: Storages the node's value aliases. `reads`, `makes`: of every node, in order, those its operands alias, and new ones.
    `first`/`last`: node index of definition and last use of each Storage.

    A wait is a use of what its Transfer borrows.

    A Storage that the output returns, and every input, is live to the end (`escapes`).
    """

    nodes: tuple[fx.Node, ...]
    index: dict[fx.Node, int]
    of: dict[fx.Node, tuple[Storage, ...]]
    reads: list[tuple[Storage, ...]]
    makes: list[tuple[Storage, ...]]
    first: dict[Storage, int]
    last: dict[Storage, int]
    uses: dict[Storage, tuple[int, ...]]
    escapes: frozenset[Storage]
    border: int
    _told: dict[object, object] = field(default_factory=dict, init=False, compare=False, repr=False)

    def told(self, tell: Callable[[Liveness], Told]) -> Told:
        """`tell(self)`, remembered: what depends on nothing else is asked for once per recipe of a search."""
        if tell not in self._told:
            self._told[tell] = tell(self)
        return cast(Told, self._told[tell])

    def begin(self, storage: Storage) -> int:
        """The node index at which a Storage's bytes begin to count: inputs are there from the start, tangents from the border."""
        if storage.is_tangent:
            return self.border
        return 0 if storage.is_input else self.first[storage]

    def defined_at(self, node: fx.Node) -> tuple[Storage, ...]:
        """Storages the node makes."""
        return self.makes[self.index[node]]


# Ops that return their input's memory although their schema does not say so.
_HIDDEN_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default})


def is_view(node: fx.Node) -> bool:
    """True when the node's result shares its first tensor argument's Storage (by schema, not by fake value)."""
    return node.op == "call_function" and returns_its_input(node.target)


@remembered
def returns_its_input(target: object) -> bool:
    """True when a call of `target` gives a view of its first tensor argument."""
    spec = ops.SPECS.get(target)  # type: ignore[call-overload]
    if spec is not None:
        return spec.alias_of is not None
    schema = getattr(target, "_schema", None)
    return target in _HIDDEN_VIEWS or (schema is not None and any(r.alias_info is not None for r in schema.returns))


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
    reads: list[tuple[Storage, ...]] = []
    makes: list[tuple[Storage, ...]] = []
    first: dict[Storage, int] = {}
    uses: dict[Storage, list[int]] = {}
    borrowed: dict[Storage, tuple[Storage, ...]] = {}
    for i, node in enumerate(nodes):
        spec = ops.spec_of(node)
        sources = read = _sources(node, of)
        if spec is not None and borrowed:
            # a Transfer reads its source until the wait: the wait is a use of the source too
            awaited = _of_effect(node, spec, Await, of)
            if awaited:
                read = tuple(dict.fromkeys((*sources, *(s for w in awaited for s in borrowed.pop(w, ())))))
        for storage in read:
            uses[storage].append(i)
        looked_into = _looked_into(node, of, sources)
        made = _made(node, spec, sources, i > border_index, bounds) if looked_into is None else ()
        of[node] = made if looked_into is None else looked_into
        for storage in made:
            first[storage] = i
            uses[storage] = []
            if spec is not None:
                borrows = _of_effect(node, spec, Borrow, of)
                if borrows:
                    borrowed[storage] = borrows
        reads.append(sources)
        makes.append(made)
    output = nodes[-1] if nodes and nodes[-1].op == "output" else None
    returned = {s for operand in operands(output) for s in of.get(operand, ())} if output is not None else set()
    escapes = frozenset(returned | {s for s in first if s.is_input})
    last = {s: (uses[s][-1] if uses[s] else first[s]) for s in first}
    return Liveness(nodes, index, of, reads, makes, first, last, {s: tuple(u) for s, u in uses.items()}, escapes, border_index)


def with_releases(live: Liveness) -> Liveness:
    """The Liveness of the same graph once releases were inserted, each behind the last use of what it releases: nothing else has changed."""
    nodes = tuple(live.nodes[0].graph.nodes) if live.nodes else ()
    index = {node: i for i, node in enumerate(nodes)}
    at = [index[node] for node in live.nodes]
    of = live.of.copy()
    reads: list[tuple[Storage, ...]] = [()] * len(nodes)
    makes = reads.copy()
    for i, read, made in zip(at, live.reads, live.makes, strict=True):
        reads[i], makes[i] = read, made
    uses = {storage: tuple([at[i] for i in used]) for storage, used in live.uses.items()}
    for i, node in enumerate(nodes):
        if node not in of:
            of[node], reads[i] = (), _sources(node, of)
            uses.update((storage, (*uses[storage], i)) for storage in reads[i])
    first = {storage: at[i] for storage, i in live.first.items()}
    last = {storage: used[-1] if used else first[storage] for storage, used in uses.items()}
    border = at[live.border] if live.border < len(at) else len(nodes)
    return Liveness(nodes, index, of, reads, makes, first, last, uses, live.escapes, border)


def _sources(node: fx.Node, of: dict[fx.Node, tuple[Storage, ...]]) -> tuple[Storage, ...]:
    """The Storages of the node's operands, each once."""
    inputs = operands(node)
    if len(inputs) == 1:
        return of.get(inputs[0], ())
    return tuple(dict.fromkeys([storage for operand in inputs for storage in of.get(operand, ())]))


def base_nodes(live: Liveness) -> Mapping[Storage, fx.Node]:
    """The node that names each Storage: its producer, or the first getitem of a tuple's element. Elements that no getitem takes
    have none; they die with the tuple, at its last getitem."""
    return live.told(_base_nodes)


def _base_nodes(live: Liveness) -> Mapping[Storage, fx.Node]:
    found: dict[Storage, fx.Node] = {}
    for node, made in zip(live.nodes, live.makes, strict=True):
        storages = live.of[node] if node.target is operator.getitem else made
        if len(storages) == 1 and isinstance(node.meta.get("val"), torch.Tensor):
            found.setdefault(storages[0], node)
    return found


def owner_of(node: fx.Node) -> fx.Node:
    """The node that makes the memory of a Storage's base node: of a tuple's element the tuple's, else itself."""
    return view_source(node) if node.target is operator.getitem else node


def _of_effect(
    node: fx.Node, spec: ops.Spec | None, effect_type: type[Effect], of: dict[fx.Node, tuple[Storage, ...]]
) -> tuple[Storage, ...]:
    """Storages of the operands on which a memory op has such an effect."""
    if spec is None:
        return ()
    found = [operand for effect in spec.effects if type(effect) is effect_type for operand in spec.nodes(node, effect.value)]
    return tuple(storage for operand in found for storage in of.get(operand, ()))


def _looked_into(node: fx.Node, of: dict[fx.Node, tuple[Storage, ...]], sources: tuple[Storage, ...]) -> tuple[Storage, ...] | None:
    """What a view or an element of a tuple aliases, nothing for the output; None for a node whose value is its own. `sources`: the Storages of
    its operands."""
    if node.op != "call_function":
        return () if node.op == "output" else None
    if node.target is operator.getitem:
        return _element(node, of, sources)
    return of.get(view_source(node), ()) if returns_its_input(node.target) else None


def _made(node: fx.Node, spec: ops.Spec | None, sources: tuple[Storage, ...], in_backward: bool, bounds: Bounds) -> tuple[Storage, ...]:
    """The Storages of a value that is its own."""
    if node.op in ("placeholder", "get_attr"):
        return _input_storage(node, bounds)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        tier, kind = _tier(node, spec, sources), _kind(node, spec, sources, in_backward)
        return (Storage(name_of(node), tensor_bytes(value, bounds), tier, kind, False),)
    elements = _elements(value)
    if not elements:
        return ()
    tier, kind, name = _tier(node, spec, sources), _kind(node, spec, sources, in_backward), name_of(node)
    return tuple(Storage(name + suffix, tensor_bytes(v, bounds), tier, kind, False) for suffix, v in elements.items())


def _element(node: fx.Node, of: dict[fx.Node, tuple[Storage, ...]], sources: tuple[Storage, ...]) -> tuple[Storage, ...]:
    """What an element of a tuple aliases."""
    owner = view_source(node)
    if is_view(owner):
        return of.get(owner, ())
    if "val" in node.meta and node.meta["val"] is None:
        return ()
    element = f"{name_of(owner)}:{node.args[1]}"
    # a list inside a tuple has no Storage of its own name: then all of the tuple's stand for it
    return tuple([s for s in sources if s.name == element]) or sources


def _elements(value: object) -> dict[str, torch.Tensor]:
    """The tensors of a tuple by the suffix of their Storage's name; an element that is None has no Storage."""
    if not isinstance(value, (tuple, list)):
        return {}
    found: dict[str, torch.Tensor] = {}
    for i, item in enumerate(value):
        found |= {f":{i}": item} if isinstance(item, torch.Tensor) else {f":{i}{k}": v for k, v in _elements(item).items()}
    return found


def _input_storage(node: fx.Node, bounds: Bounds) -> tuple[Storage, ...]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    entry = info(node)
    kind = {Role.PARAMETER: Kind.PARAMETER, Role.TANGENT: Kind.GRADIENT}.get(entry.role or Role.BATCH, Kind.OTHER)
    return (Storage(entry.name, tensor_bytes(value, bounds), entry.tier, kind, True),)


def _tier(node: fx.Node, spec: ops.Spec | None, sources: tuple[Storage, ...]) -> Tier:
    if spec is not None:
        for effect in spec.effects:
            if isinstance(effect, Alloc):
                return effect.tier if isinstance(effect.tier, Tier) else Tier(str(spec.argument(node, effect.tier)))
    # A host input that an op reads has not been gathered yet; the op will run on the device.
    for source in sources:
        if source.is_input or source.tier is Tier.DEVICE:
            return Tier.DEVICE
    return Tier.PAGEABLE if sources else Tier.DEVICE


def _kind(node: fx.Node, spec: ops.Spec | None, sources: tuple[Storage, ...], in_backward: bool) -> Kind:
    if sources and spec is not None and node.target is not ops.lookup:
        return sources[0].kind  # moved, not made
    if sources and sources[0].kind is Kind.PARAMETER and all([s.kind is Kind.PARAMETER for s in sources]):
        return Kind.PARAMETER
    return Kind.GRADIENT if in_backward and info(node).origin is None else Kind.ACTIVATION


@dataclass(frozen=True, slots=True)
class LiveCurve:
    """Bytes alive in one tier at every node, in node order: what the node reads or makes included, what it releases not.

    `by_kind`: the same, of one Kind. Inputs and what the output returns are alive to the end.
    """

    names: tuple[str, ...]
    total_bytes: tuple[int, ...]
    by_kind: Mapping[Kind, tuple[int, ...]]

    @property
    def peak_bytes(self) -> int:
        """The highest total; 0 for an empty Graph."""
        return max(self.total_bytes, default=0)

    @property
    def peak_node(self) -> str:
        """Name of the first node at the peak."""
        return self.names[self.total_bytes.index(self.peak_bytes)] if self.names else ""


def no_workspace(node: fx.Node) -> int:
    """Ops need nothing for themselves: what counts when no device is known."""
    return 0


def live_curve(
    live: Liveness, tier: Tier = Tier.DEVICE, workspace: Callable[[fx.Node], int] = no_workspace, given: Mapping[Storage, int] = {}
) -> LiveCurve:
    """The LiveCurve of `tier`. A Storage ends at its release, or after its last use when nothing releases it; in `given`, where another takes
    its place.

    `workspace`: bytes a node needs for itself while it runs; they are of no Kind's column but OTHER's.
    """
    released = {s: i for i, node in enumerate(live.nodes) for s in _of_effect(node, ops.spec_of(node), Free, live.of)}
    n = len(live.nodes)
    deltas = {kind: [0] * (n + 1) for kind in Kind}
    for storage in live.first:
        if storage.tier is not tier:
            continue
        end = n if storage in live.escapes else given.get(storage, released.get(storage, live.last[storage] + 1))
        deltas[storage.kind][live.begin(storage)] += storage.n_bytes
        deltas[storage.kind][end] -= storage.n_bytes
    for i, node in enumerate(live.nodes):
        n_bytes = workspace(node) if tier is Tier.DEVICE else 0
        deltas[Kind.OTHER][i] += n_bytes
        deltas[Kind.OTHER][i + 1] -= n_bytes
    by_kind = {kind: tuple(accumulate(delta[:n])) for kind, delta in deltas.items()}
    return LiveCurve(tuple(map(name_of, live.nodes)), tuple(map(sum, zip(*by_kind.values()))), by_kind)


def largest_live(live: Liveness, indices: Iterable[int], n: int) -> dict[int, list[Storage]]:
    """The `n` largest device Storages alive at each of the node indices, largest first."""
    wanted = sorted(set(indices))
    starts: dict[int, list[Storage]] = {}
    ends: dict[int, list[Storage]] = {}
    for storage, first in live.first.items():
        if storage.tier is Tier.DEVICE:
            starts.setdefault(0 if storage.is_input else first, []).append(storage)
            if storage not in live.escapes:
                ends.setdefault(live.last[storage], []).append(storage)
    alive: dict[Storage, None] = {}
    found: dict[int, list[Storage]] = {}
    position = 0
    for i in range(len(live.nodes)):
        alive.update(dict.fromkeys(starts.get(i, ())))
        if position < len(wanted) and wanted[position] == i:
            found[i] = heapq.nlargest(n, alive, key=lambda s: (s.n_bytes, s.name))
            position += 1
        for storage in ends.get(i, ()):
            alive.pop(storage, None)
    return found
