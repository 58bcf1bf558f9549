"""The verifier: an abstract memory machine that interprets `ops.SPECS`, and the facts a Graph may claim.

Each Storage is pending -> ready -> freed. ATen ops read every tensor operand and make ready results; views only need memory
that is still there; ops that ask for a size need no bytes. What a wrong rewrite does to memory shows here, before it runs.
"""

from __future__ import annotations

import bisect
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum

import torch
import torch.fx as fx

from . import ops, text
from .donation import given_away
from .effects import Alloc, Await, Borrow, Effect, Free, Read, Tier
from .errors import VerifyError
from .graph import Bounds, info, name_of, operands, remembered
from .liveness import LiveCurve, Liveness, Storage, base_nodes, live_curve, liveness, no_workspace, returns_its_input
from .memory_map import lifetime, makes_its_results, place_of, placeable
from .sizes import format_bytes


class State(str, Enum):
    """What the bytes of a Storage are."""

    PENDING = "pending"
    READY = "ready"
    FREED = "freed"


class Touch(Effect):
    """The op needs the memory to be there, not its bytes: a view, a question for the size."""


class Write(Effect):
    """The op changes the bytes in place."""


@dataclass(frozen=True)
class Checked:
    """A Graph, its analyses and the budget: what a fact's checker looks at."""

    graph: fx.Graph
    live: Liveness
    device_budget_bytes: int | None
    workspace: Callable[[fx.Node], int]

    @functools.cached_property
    def curve(self) -> LiveCurve:
        """The device LiveCurve."""
        return live_curve(self.live, workspace=self.workspace)

    @staticmethod
    def of(graph: fx.Graph, bounds: Bounds | None, device_budget_bytes: int | None, workspace: Callable[[fx.Node], int]) -> Checked:
        """The analyses of a graph that keeps the rules of memory. Raises VerifyError where it does not."""
        _check_order(graph)
        checked = Checked(graph, liveness(graph, bounds), device_budget_bytes, workspace)
        Machine(checked).run()
        return checked

    def holds(self, fact: str) -> bool:
        """True when `fact` is true of the graph. Raises ValueError for a fact nobody defined."""
        _check_known({fact})
        try:
            FACTS[fact](self)
        except VerifyError:
            return False
        return True

    def error(self, node: fx.Node, message: str) -> VerifyError:
        """The error `message` at `node`, with the lines around it."""
        return VerifyError(f"{message}\n{text.excerpt(self.graph, node, self.live)}")


def verify(
    graph: fx.Graph,
    bounds: Bounds | None = None,
    facts: frozenset[str] = frozenset(),
    device_budget_bytes: int | None = None,
    workspace: Callable[[fx.Node], int] = no_workspace,
) -> LiveCurve:
    """The device LiveCurve of a graph that keeps the rules of memory, the claimed facts and the budget. Raises as `verified` does."""
    return verified(graph, bounds, facts, device_budget_bytes, workspace).curve


def verified(
    graph: fx.Graph,
    bounds: Bounds | None = None,
    facts: frozenset[str] = frozenset(),
    device_budget_bytes: int | None = None,
    workspace: Callable[[fx.Node], int] = no_workspace,
) -> Checked:
    """The analyses of a graph that keeps the rules of memory, the claimed facts and the budget.

    Raises VerifyError with the lines around the first node that breaks a rule, ValueError for a fact nobody defined.
    """
    _check_known(facts)
    checked = Checked.of(graph, bounds, device_budget_bytes, workspace)
    if device_budget_bytes is not None:
        _check_fits(checked)
    for fact in sorted(facts):
        FACTS[fact](checked)
    return checked


def _check_known(facts: Set[str]) -> None:
    unknown = sorted(facts - FACTS.keys())
    if unknown:
        raise ValueError(f"unknown fact {unknown[0]!r}; there are {', '.join(sorted(FACTS))}")


def holds(graph: fx.Graph, bounds: Bounds | None, fact: str, device_budget_bytes: int | None = None) -> bool:
    """True when the graph is valid and `fact` is true of it."""
    try:
        verify(graph, bounds, frozenset({fact}), device_budget_bytes if fact == "fits" else None)
    except VerifyError:
        return False
    return True


def effects_of(node: fx.Node, live: Liveness) -> Iterator[tuple[type[Effect], tuple[Storage, ...]]]:
    """What the node does to which Storages, in order: reads, then new Storages, then what else its Spec says."""
    spec = ops.spec_of(node)
    if spec is not None:
        for effect in spec.effects:
            if effect.value == "result":
                yield type(effect), live.defined_at(node)
            else:
                yield type(effect), tuple(s for operand in spec.nodes(node, effect.value) for s in live.of[operand])
        return
    kind = Touch if _needs_no_bytes(node) else Read
    for operand in operands(node):
        yield kind, live.of.get(operand, ())
    for operand in _written(node):
        yield Write, live.of.get(operand, ())
    if node.op != "output":
        yield Alloc, live.defined_at(node)


class Machine:
    """Runs a Graph's effects, one handler per effect type."""

    def __init__(self, checked: Checked) -> None:
        self._checked, self._live = checked, checked.live
        self._state: dict[Storage, State] = {}
        # source -> destinations of the open Transfers that read it; and the way back
        self._borrowers: dict[Storage, list[Storage]] = {}
        self._sources: dict[Storage, list[Storage]] = {}
        self._by: dict[tuple[str, Storage], fx.Node] = {}

    def run(self) -> None:
        """Raises VerifyError at the first node that breaks a rule."""
        for node in self._live.nodes:
            self._check_tiers(node)
            for effect, storages in effects_of(node, self._live):
                for storage in storages:
                    HANDLERS[effect](self, node, storage)
        self._check_closed()

    def touch(self, node: fx.Node, storage: Storage) -> None:
        self._check_not_freed(node, storage, "reads")

    def read(self, node: fx.Node, storage: Storage) -> None:
        self.touch(node, storage)
        self._check_not_pending(node, storage, "reads")

    def write(self, node: fx.Node, storage: Storage) -> None:
        self._check_not_borrowed(node, storage, "writes")

    def borrow(self, node: fx.Node, storage: Storage) -> None:
        self.read(node, storage)
        for destination in self._live.defined_at(node):
            self._borrowers.setdefault(storage, []).append(destination)
            self._sources.setdefault(destination, []).append(storage)

    def alloc(self, node: fx.Node, storage: Storage) -> None:
        self._state[storage] = State.PENDING if _starts_transfer(node) else State.READY
        self._by["made", storage] = node

    def await_(self, node: fx.Node, storage: Storage) -> None:
        self.touch(node, storage)
        self._check_pending(node, storage)
        self._state[storage] = State.READY
        self._by["awaited", storage] = node
        for source in self._sources.pop(storage, []):
            self._borrowers[source].remove(storage)

    def free(self, node: fx.Node, storage: Storage) -> None:
        self._check_not_input(node, storage)
        self._check_not_freed(node, storage, "releases")
        self._check_not_pending(node, storage, "releases")
        self._check_not_borrowed(node, storage, "releases")
        self._state[storage] = State.FREED
        self._by["freed", storage] = node

    def _check_not_input(self, node: fx.Node, storage: Storage) -> None:
        if storage.is_input:
            raise self._checked.error(node, f"%{name_of(node)} releases the input {_quote(storage)}; inputs belong to the caller")

    def _check_not_freed(self, node: fx.Node, storage: Storage, does: str) -> None:
        if self._state[storage] is State.FREED:
            freed = name_of(self._by["freed", storage])
            raise self._checked.error(node, f"%{name_of(node)} {does} {_quote(storage)}, which %{freed} has freed")

    def _check_not_pending(self, node: fx.Node, storage: Storage, does: str) -> None:
        if self._state[storage] is State.PENDING:
            started = name_of(self._by["made", storage])
            raise self._checked.error(node, f"%{name_of(node)} {does} {_quote(storage)} before a wait: %{started} is pending")

    def _check_pending(self, node: fx.Node, storage: Storage) -> None:
        if self._state[storage] is not State.PENDING:
            awaited = self._by.get(("awaited", storage))
            why = f"%{name_of(awaited)} has awaited it" if awaited is not None else "no Transfer makes it"
            raise self._checked.error(node, f"%{name_of(node)} awaits {_quote(storage)}, which is not pending: {why}")

    def _check_not_borrowed(self, node: fx.Node, storage: Storage, does: str) -> None:
        for destination in self._borrowers.get(storage, ()):
            reader = name_of(self._by["made", destination])
            raise self._checked.error(node, f"%{name_of(node)} {does} {_quote(storage)} while %{reader} borrows it")

    def _check_closed(self) -> None:
        for storage, state in self._state.items():
            if state is State.PENDING:
                started = self._by["made", storage]
                raise self._checked.error(
                    started, f"the program ends with an open Transfer: nothing waits for %{name_of(started)}"
                )

    def _check_tiers(self, node: fx.Node) -> None:
        """Compute runs on one side: host values reach the device, and device values the host, by memory ops only.

        A host input may still be read beside device values: it has not been gathered yet, and the fact "resident" says when all are.
        """
        if node.op != "call_function" or ops.spec_of(node) is not None or _needs_no_bytes(node):
            return
        sides: dict[bool, str] = {}
        for operand in operands(node):
            for storage in self._live.of.get(operand, ()):
                if storage.tier is Tier.DEVICE:
                    if False not in sides and not _may_be_anywhere(operand):
                        sides[False] = name_of(operand)
                elif True not in sides and not storage.is_input and not _may_be_anywhere(operand):
                    sides[True] = name_of(operand)
        if len(sides) == 2:
            raise self._checked.error(node, f"%{name_of(node)} reads %{sides[True]} on the host beside %{sides[False]} on the device")


HANDLERS: Mapping[type[Effect], Callable[[Machine, fx.Node, Storage], None]] = {
    Touch: Machine.touch,
    Read: Machine.read,
    Write: Machine.write,
    Borrow: Machine.borrow,
    Alloc: Machine.alloc,
    Await: Machine.await_,
    Free: Machine.free,
}

_SIZE_QUESTIONS = frozenset({
    torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default, torch.ops.aten.sym_storage_offset.default,
})  # fmt: skip


def _needs_no_bytes(node: fx.Node) -> bool:
    return node.op == "call_function" and _only_looks(node.target)


@remembered
def _only_looks(target: object) -> bool:
    return target is operator.getitem or target in _SIZE_QUESTIONS or (returns_its_input(target) and not writes(target))


def _starts_transfer(node: fx.Node) -> bool:
    spec = ops.spec_of(node)
    return spec is not None and spec.starts_transfer


def _written(node: fx.Node) -> list[fx.Node]:
    """Operands that an in-place op writes."""
    if node.op != "call_function" or not writes(node.target):
        return []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    passed = dict(zip((a.name for a in arguments), node.args)) | dict(node.kwargs)
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for name in names if isinstance(value := passed.get(name), fx.Node)]


@remembered
def writes(target: object) -> bool:
    """True when the op's schema says that it writes into an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _may_be_anywhere(node: fx.Node) -> bool:
    """0-dim tensors and generator states may be on the host in an op that runs on the device."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return True
    spec = ops.spec_of(node)
    return spec is not None and spec.name in ("rng_state", "swap_rng_state")


def _quote(storage: Storage) -> str:
    return f"%{storage.name} ({format_bytes(storage.n_bytes)}, {storage.tier})"


def _check_order(graph: fx.Graph) -> None:
    defined: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        name = name_of(node)
        for operand in operands(node):
            if operand not in defined:
                raise _structural(graph, node, f"%{name} uses %{name_of(operand)} before it is defined")
        if name in names:
            raise _structural(graph, node, f"two nodes are called %{name}")
        defined.add(node)
        names.add(name)


def _structural(graph: fx.Graph, node: fx.Node, message: str) -> VerifyError:
    return VerifyError(f"{message}\n{text.excerpt(graph, node)}")


def _check_functional(checked: Checked) -> None:
    """No op writes in place, except copies into inputs."""
    for node in checked.live.nodes:
        for target in _written(node):
            if node.target is torch.ops.aten.copy_.default and target.op == "placeholder":
                continue
            raise checked.error(node, f"%{name_of(node)} writes %{name_of(target)} in place: the graph is not functional")


def _check_resident(checked: Checked) -> None:
    """No compute op reads bytes on the host, 0-dim tensors and generator states aside."""
    for node in checked.live.nodes:
        if node.op != "call_function" or ops.spec_of(node) is not None or _needs_no_bytes(node):
            continue
        for operand in operands(node):
            if any(s.tier is not Tier.DEVICE for s in checked.live.of.get(operand, ())) and not _may_be_anywhere(operand):
                raise checked.error(node, f"%{name_of(node)} computes on %{name_of(operand)}, which is on the host: not resident")


def _check_lowered(checked: Checked) -> None:
    """No logical op is left."""
    for node in checked.live.nodes:
        spec = ops.spec_of(node)
        if spec is not None and spec.logical:
            raise checked.error(node, f"%{name_of(node)} is a logical {spec.name}: the graph is not lowered")


def _check_awaited(checked: Checked) -> None:
    """Every Transfer has exactly one wait of its own."""
    for node in checked.live.nodes:
        if not _starts_transfer(node):
            continue
        waits = [user for user in node.users if user.target is ops.wait]
        if len(waits) != 1:
            raise checked.error(node, f"%{name_of(node)} has {len(waits)} waits instead of one")


def _check_released(checked: Checked) -> None:
    """Every device Storage the graph makes and does not return has exactly one release, if a node names it."""
    live = checked.live
    releases = Counter(
        s for node in live.nodes if ops.spec_of(node) is not None
        for effect, found in effects_of(node, live) if effect is Free for s in found
    )
    for storage, node in base_nodes(live).items():
        if storage not in live.escapes and storage.tier is Tier.DEVICE and releases[storage] != 1:
            raise checked.error(node, f"{_quote(storage)} of %{name_of(node)} has {releases[storage]} releases instead of one")


def _check_placed(checked: Checked) -> None:
    """What is written where it is to lie has an offset, and nothing overlaps another that is there at the same time, donations apart."""
    live = checked.live
    found = placeable(live)
    placed = {storage: node for storage, node in found.items() if info(node).offset is not None}
    for storage, node in found.items():
        if storage not in placed and not makes_its_results(live.nodes[live.first[storage]]):
            raise checked.error(node, f"{_quote(storage)} of %{name_of(node)} has no offset")
    taken = given_away(live)
    starts: dict[int, list[Storage]] = {}
    ends: dict[int, list[Storage]] = {}
    for storage, node in placed.items():
        one = lifetime(live, storage)
        starts.setdefault(one.begin, []).append(storage)
        ends.setdefault(taken.get(storage, one.end), []).append(storage)
    there: list[tuple[int, int, str]] = []
    for i, node in enumerate(live.nodes):
        for storage in ends.get(i, ()):
            for place in _ranges(storage, placed[storage]):
                there.remove(place)
        for storage in starts.get(i, ()):
            if sum(end - begin for begin, end, _ in _ranges(storage, placed[storage])) < storage.n_bytes:
                raise checked.error(node, f"{_quote(storage)} has {storage.n_bytes} bytes, and fewer in its pages")
            for place in _ranges(storage, placed[storage]):
                at = bisect.bisect(there, place)
                for other in there[max(at - 1, 0) : at + 1]:
                    if place[0] < other[1] and other[0] < place[1]:
                        raise checked.error(
                            node, f"{_quote(storage)} at {place[0]} overlaps %{other[2]}, which lies from {other[0]} to {other[1]}")
                there.insert(at, place)


def _ranges(storage: Storage, node: fx.Node) -> list[tuple[int, int, str]]:
    return [(offset, offset + n_bytes, storage.name) for offset, n_bytes in place_of(node, storage)]


def _check_fits(checked: Checked) -> None:
    """The device bytes alive never exceed the budget."""
    budget, curve = checked.device_budget_bytes, checked.curve
    if budget is None:
        raise ValueError("the fact 'fits' needs a device budget")
    if curve.peak_bytes > budget:
        node = checked.live.nodes[curve.total_bytes.index(curve.peak_bytes)]
        over = format_bytes(curve.peak_bytes - budget)
        raise checked.error(
            node, f"%{name_of(node)} needs {curve.peak_bytes} bytes on the device, the budget is {budget}: {over} too much"
        )


# What a pass may require, provide or break: name -> checker that raises VerifyError.
FACTS: Mapping[str, Callable[[Checked], None]] = {
    "functional": _check_functional,
    "resident": _check_resident,
    "lowered": _check_lowered,
    "awaited": _check_awaited,
    "released": _check_released,
    "placed": _check_placed,
    "fits": _check_fits,
}
