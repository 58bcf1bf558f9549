"""fuse: elementwise ops, casts, sums of rows and the views between them become `fxo.fused` calls, one kernel each.

First, what backward's elementwise ops read of forward is computed again inside of them where that saves bytes (a minimum cut,
`fxoffload/cuts.py`): reading a bf16 value and casting it is less than keeping the fp32 one. Then ops that step through the same elements
join, where everything that they read is there before anything that they make is needed, and no large product lies between: values do not
live longer for it. What backward reads of forward ends a call, so that a plan may still keep, move or make again each such value by itself.

What a loss or reading that can be computed in chunks is made of stays as it is (`chunk-loss`, `chunk-rows`), and so does what is made of a head's
rows alone (`defer-outputs`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import sympy
import torch
import torch.fx as fx

from fxoffload import ops
from fxoffload.cuts import Remake, made_again
from fxoffload.fusion import fused, program_text
from fxoffload.graph import INFO, Bounds, NodeInfo, Names, border_of, copy_node, info, is_symbol, module_path, name_of, tensors_in
from fxoffload.heads import find_heads
from fxoffload.liveness import is_view, view_source
from fxoffload.losses import Loss, find_losses
from fxoffload.pipeline import Context, Pass
from fxoffload.readings import find_readings
from fxoffload.text_neutral import size_arguments
from fxoffload.text_words import expr_of
from fxoffload.text_writer import Writer

_aten = torch.ops.aten
_ROW_SUMS = frozenset({_aten.mean.dim, _aten.sum.dim_IntList})
# They give each number of their result from one of their operands, at another place.
_MOVES = frozenset({_aten.cat.default, _aten.slice_backward.default})
_VIEWS = frozenset({
    _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.expand.default, _aten.slice.Tensor,
    _aten.transpose.int, _aten.permute.default, _aten.select.int,
})
# Another order of elements.
_TURNS = frozenset({_aten.transpose.int, _aten.permute.default})
# How many ops that are no part of a call may come between where a member stood and where it is computed.
_NEAR = 2
_MOST_OPERANDS, _MOST_MEMBERS, _MOST_CAT = 24, 64, 4
# Of computing a value again, in bytes that are kept: of two choices that keep as much, the one with fewer ops.
_OP_PRICE = 1e-3
# Positions have room between them for calls that wait for one another.
_STEP = 1 << 16


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with its calls; the values that are left keep their names."""
    kept = {node for loss in find_losses(graph) if isinstance(loss, Loss) for node in loss.nodes}
    kept |= {node for reading in find_readings(graph) for node in reading.nodes} | {node for head in find_heads(graph) for node in head.chain}
    _compute_in_backward(graph, ctx.bounds, kept)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _has_effect(node))
    return _rewritten(graph, _groups(graph, ctx.bounds, kept))


def _groups(graph: fx.Graph, bounds: Bounds, kept: set[fx.Node]) -> list[tuple[int, list[fx.Node]]]:
    """The calls. Which of a call's values others read is known when all are made: those in two orders are then made anew, apart."""
    apart: set[tuple[fx.Node, fx.Node]] = set()
    while True:
        grouping = _Grouping(graph, bounds, kept, frozenset(apart))
        groups = grouping.groups()
        found = grouping.in_two_orders()
        if not found:
            return groups
        apart |= found


def _has_effect(node: fx.Node) -> bool:
    spec = ops.spec_of(node)
    schema = getattr(node.target, "_schema", None)
    return not spec.pure if spec is not None else (schema is not None and schema.is_mutable) or node.is_impure()


# What can be a member -------------------------------------------------------------------------------------------------


def _joins(node: fx.Node) -> bool:
    """Whether the op can be computed inside of a call."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace != "aten" or node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    sources = [v for o in node.all_input_nodes for v in tensors_in(o.meta.get("val"))]
    if not sources or any(v.device != value.device for v in sources) or value.is_complex() or any(v.is_complex() for v in sources):
        return False
    if node.target in _ROW_SUMS:
        return _sums_rows(node)
    if node.target in _MOVES:
        return len(sources) <= _MOST_CAT
    if node.target is _aten._to_copy.default:
        return node.kwargs.get("memory_format") in (None, torch.preserve_format)
    return torch.Tag.pointwise in node.target.tags


def _sums_rows(node: fx.Node) -> bool:
    """Whether the op sums over the last dimension alone, in its operand's dtype or a wider one."""
    source, dims = node.args[0], node.args[1]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    return (
        isinstance(dims, (list, tuple)) and len(dims) == 1 and dims[0] in (-1, value.dim() - 1) and value.is_floating_point()
        and isinstance(value.shape[-1], int) and value.dim() > 1)


def _base(node: fx.Node) -> fx.Node:
    """What a view looks into in the end."""
    while is_view(node) and node.target in _VIEWS:
        node = view_source(node)
    return node


def _numel(value: torch.Tensor) -> sympy.Expr:
    return sympy.expand(sympy.Mul(*(sympy.sympify(expr_of(n)) for n in value.shape)))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads the node's memory, views looked through."""
    for user in node.users:
        if is_view(user) and user.target in _VIEWS:
            yield from _readers(user)
        else:
            yield user


# What backward computes again -----------------------------------------------------------------------------------------


def _compute_in_backward(graph: fx.Graph, bounds: Bounds, kept: set[fx.Node]) -> None:
    """Gives members of backward copies of their own of what they read of forward, where that leaves less to be kept."""
    border = border_of(graph)
    if border is None:
        return
    forward = list(takewhile(lambda node: node is not border, graph.nodes))
    inside, at = _made_inside(forward, bounds, kept), {node: i for i, node in enumerate(forward)}
    node = border.next
    while node.op != "output":
        if node not in kept and _joins(node):
            for operand in node.all_input_nodes:
                _give_copy(graph, operand, node, inside, at)
        node = node.next


def _made_inside(forward: Sequence[fx.Node], bounds: Bounds, kept: set[fx.Node]) -> set[fx.Node]:
    """The forward ops that backward's calls compute again for themselves: the least bytes are then kept of forward.

    What backward reads otherwise, or forward returns, is there in any case.
    """
    order = set(forward)
    sizes = {n: _numel(n.meta["val"]) for n in forward if n not in kept and _joins(n) and n.target not in _ROW_SUMS}
    there, wanted = set[fx.Node](), set[fx.Node]()
    for node in forward:
        for reader in _readers(node) if node.op == "call_function" and not is_view(node) else ():
            if reader.op == "output" or (reader not in order and not (node in sizes and _takes(reader, sizes[node], kept))):
                there.add(node)
            elif reader not in order:
                wanted.add(node)
    remakes = []
    for node in (n for n in sizes if n not in there):
        reads = dict.fromkeys(_base(o) for o in node.all_input_nodes if not is_symbol(o))
        needed = tuple(r for r in reads if r.op == "call_function" and r not in there and not _of_parameters(r))
        remakes.append(Remake(_OP_PRICE, needed, (node,)))
    values = {v for remake in remakes for v in (*remake.reads, *remake.makes)}
    prices = {v: float(sum(bounds.bytes_of(t) for t in tensors_in(v.meta.get("val")))) for v in values}
    again = made_again(remakes, prices, frozenset(wanted & values))
    return {remake.makes[0] for remake, yes in zip(remakes, again, strict=True) if yes}


def _takes(reader: fx.Node, size: sympy.Expr, kept: set[fx.Node]) -> bool:
    """Whether a node of backward could compute a value of that many elements inside of its call."""
    if reader in kept or not _joins(reader):
        return False
    return bool(_numel(reader.all_input_nodes[0].meta["val"] if reader.target in _ROW_SUMS else reader.meta["val"]) == size)


def _of_parameters(node: fx.Node) -> bool:
    """True for what parameters give without an activation: it is there again whenever they are."""
    return bool(node.all_input_nodes) and all(_base(o).op == "placeholder" and info(_base(o)).fqn is not None for o in node.all_input_nodes)


def _give_copy(graph: fx.Graph, operand: fx.Node, reader: fx.Node, inside: set[fx.Node], at: Mapping[fx.Node, int]) -> None:
    """Lets a reader have a copy of what it reads, and of all that it is made from inside, in front of it; no chain through half a model.

    `at`: where forward's nodes stand.
    """
    chain, work = dict[fx.Node, None](), [operand]
    while work:
        node = work.pop()
        if _base(node) in inside and node not in chain:
            chain[node] = None
            work += node.all_input_nodes
    if not chain or len(chain) > _MOST_MEMBERS // 2:
        return
    copies: dict[fx.Node, fx.Node] = {}
    for node in sorted(chain, key=at.__getitem__):
        with graph.inserting_before(reader):
            copies[node] = copy_node(graph, node, lambda n: copies.get(n, n))
        copies[node].meta[INFO] = NodeInfo(f"{name_of(node)}~{name_of(reader)}")
    reader.replace_input_with(operand, copies[operand])


# Which join -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Group:
    """Members of one call. `size`: elements that it steps through; `rows`: sums it makes, None where it makes none.

    `turns`: whether it reads something in another order. `slot`: the position at which it is computed.
    """

    members: list[fx.Node]
    size: sympy.Expr
    rows: sympy.Expr | None
    turns: bool
    forward: bool
    slot: int = 0


@dataclass
class _Grouping:
    graph: fx.Graph
    bounds: Bounds
    kept: set[fx.Node]
    apart: frozenset[tuple[fx.Node, fx.Node]] = frozenset()
    of: dict[fx.Node, _Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = list(self.graph.nodes)
        self.at = {node: (i + 1) * _STEP for i, node in enumerate(nodes)}
        self.large = list(accumulate((int(self._is_large(n)) for n in nodes), initial=0))
        border = border_of(self.graph)
        self.end = self.at[border] if border is not None else len(nodes) * _STEP + _STEP

    def groups(self) -> list[tuple[int, list[fx.Node]]]:
        """Of every call of two ops or more: the number of the node at or behind which it is computed, and its members, in graph order."""
        for node in self.graph.nodes:
            if node not in self.kept and _joins(node):
                self._place(node)
        found = dict.fromkeys(g for node in self.graph.nodes if (g := self.of.get(node)) is not None)
        return [(g.slot // _STEP - 1, sorted(g.members, key=self.at.__getitem__)) for g in found if len(g.members) > 1]

    def in_two_orders(self) -> set[tuple[fx.Node, fx.Node]]:
        """Members and readers of them in another order, of the calls of whose values others read some before and some behind such a turn: loops
        of two orders are two kernels."""
        found: set[tuple[fx.Node, fx.Node]] = set()
        for group in dict.fromkeys(self.of.values()):
            turned, n_turns = set[tuple[fx.Node, fx.Node]](), dict[fx.Node, int]()
            for m in sorted(group.members, key=self.at.__getitem__) if group.turns else ():
                inside = [o for o in m.all_input_nodes if _base(o) in n_turns]
                turned |= {(_base(o), m) for o in inside if self._turned(o)}
                n_turns[m] = max((n_turns[_base(o)] + self._turned(o) for o in inside), default=0)
            if len({n for m, n in n_turns.items() if any(self.of.get(r) is not group for r in _readers(m))}) > 1:
                found |= turned
        return found

    def _is_large(self, node: fx.Node) -> bool:
        return node.op == "call_function" and bool(tensors_in(node.meta.get("val"))) and not is_view(node) and not _joins(node) and (
            getattr(node.target, "__name__", "") != "getitem")

    def _between(self, a: int, b: int) -> int:
        """Large ops between two positions."""
        low, high = sorted((a // _STEP, b // _STEP))
        return self.large[min(high, len(self.large) - 1)] - self.large[min(low, len(self.large) - 1)]

    def _place(self, node: fx.Node) -> None:
        """Lets a node join the groups of what it reads, or begin one."""
        own = self._alone(node)
        near = dict.fromkeys(g for o in node.all_input_nodes if (g := self.of.get(_base(o))) is not None)
        self.of[node] = own
        for group in sorted(near, key=lambda g: -g.slot):
            self._merge(group, self.of[node])

    def _alone(self, node: fx.Node) -> _Group:
        value = node.meta["val"]
        rows = _numel(value) if node.target in _ROW_SUMS else None
        size = _numel(node.all_input_nodes[0].meta["val"]) if rows is not None else _numel(value)
        turns = node.target in _MOVES or any(self._turned(o) for o in node.all_input_nodes)
        group = _Group([node], size, rows, turns, self.at[node] < self.end)
        group.slot = self._slot(group)
        return group

    @staticmethod
    def _turned(operand: fx.Node) -> bool:
        while is_view(operand) and operand.target in _VIEWS:
            if operand.target in _TURNS:
                return True
            operand = view_source(operand)
        return False

    def _merge(self, a: _Group, b: _Group) -> None:
        """Makes one of two groups, where `b` reads `a`, if that is allowed."""
        if a is b or a.forward != b.forward or len(a.members) + len(b.members) > _MOST_MEMBERS:
            return
        size = self._common_size(a, b)
        rows = a.rows if a.rows is not None else b.rows
        turns = a.turns or b.turns
        if size is None or (rows is not None and turns) or (a.rows is not None and b.rows is not None and a.rows != b.rows):
            return
        if a.forward and any(self._ends(m, size) for m in a.members if any(self.of.get(r) is b for r in _readers(m))):
            return
        joint = _Group([*a.members, *b.members], size, rows, turns, a.forward)
        before = {m: self.of[m] for m in joint.members}
        for m in joint.members:
            self.of[m] = joint
        joint.slot = self._slot(joint)
        if not (self._keeps_apart(joint) and self._is_allowed(joint) and all(self._is_near(part, joint) for part in (a, b))):
            self.of.update(before)

    def _common_size(self, a: _Group, b: _Group) -> sympy.Expr | None:
        if a.size == b.size:
            return a.size
        if a.rows is not None and b.size == a.rows and b.rows is None:
            return a.size
        if b.rows is not None and a.size == b.rows and a.rows is None:
            return b.size
        moves = [m for m in b.members if m.target in _MOVES]
        if moves and a.rows is None and b.rows is None and all(self.of.get(r) is b for m in a.members for r in _readers(m)):
            return b.size  # parts of what a move puts together
        return None

    def _ends(self, node: fx.Node, size: sympy.Expr) -> bool:
        """Whether a forward value ends its call: backward reads it, and it is no small one."""
        n_elements = _numel(node.meta["val"])
        if n_elements != size:
            return False
        return any(self.at.get(reader, 0) > self.end and reader.op != "output" for reader in _readers(node))

    def _reads(self, group: _Group) -> dict[fx.Node, None]:
        """What a group reads from outside; views of it as their own."""
        return dict.fromkeys(
            o for m in group.members for o in m.all_input_nodes if self.of.get(_base(o)) is not group)

    def _slot(self, group: _Group) -> int:
        """Where its first member stands, or behind the last that it reads."""
        slot = min(self.at[m] for m in group.members)
        for node in (*self._reads(group), *group.members):
            slot = max([slot, *(self.at[s] for s in node.all_input_nodes if is_symbol(s))])
        for operand in self._reads(group):
            other = self.of.get(_base(operand))
            slot = max(slot, other.slot + 1 if other is not None else self.at[_base(operand)])
        return slot

    def _is_allowed(self, joint: _Group) -> bool:
        """Whether all that it makes is read later, and that is not too much."""
        if len(self._reads(joint)) > _MOST_OPERANDS:
            return False
        for reader in dict.fromkeys(r for m in joint.members for r in _readers(m)):
            other = self.of.get(reader)
            if other is not joint and reader.op != "output" and (other.slot if other is not None else self.at[reader]) <= joint.slot:
                return False
        return True

    def _keeps_apart(self, joint: _Group) -> bool:
        return not any(self.of.get(a) is joint and self.of.get(b) is joint for a, b in self.apart)

    def _is_near(self, part: _Group, joint: _Group) -> bool:
        """Whether values live no longer for it, or only for a few large ops, when a part is computed where all of it is."""
        if all(self._between(joint.slot, self.at[m]) <= _NEAR for m in part.members):
            return True
        if joint.slot < part.slot:
            made = [m for m in part.members if any(self.of.get(r) is not joint for r in _readers(m))]
            freed = [o for o in dict.fromkeys(map(_base, self._reads_of(part))) if all(self.of.get(r) is joint for r in _readers(o))]
            return self._bytes(made) <= self._bytes(freed)
        held = [o for o in dict.fromkeys(map(_base, self._reads_of(part))) if o.op == "call_function"]
        longer = [o for o in held if all(self._at_last(r) <= part.slot or self.of.get(r) is joint for r in _readers(o))]
        gone = [m for m in part.members if all(self.of.get(r) is joint for r in _readers(m)) and any(r not in part.members for r in _readers(m))]
        return self._bytes(longer) <= self._bytes(gone)

    def _reads_of(self, part: _Group) -> list[fx.Node]:
        inside = set(part.members)
        return [o for m in part.members for o in m.all_input_nodes if _base(o) not in inside]

    def _at_last(self, reader: fx.Node) -> int:
        other = self.of.get(reader)
        return other.slot if other is not None else self.at[reader]

    def _bytes(self, nodes: Sequence[fx.Node]) -> int:
        return sum(self.bounds.bytes_of(v) for n in nodes for v in tensors_in(n.meta.get("val")))


# The calls ------------------------------------------------------------------------------------------------------------


def _rewritten(graph: fx.Graph, groups: Sequence[tuple[int, Sequence[fx.Node]]]) -> fx.Graph:
    """The graph with each group's members as one call in its place."""
    calls = [_Call(members) for _, members in groups]
    return _Emission(graph, calls, [place for place, _ in groups]).result


class _Emission:
    """Copies a graph, each call in the place of its members; views of what a call makes follow it."""

    def __init__(self, graph: fx.Graph, calls: Sequence[_Call], places: Sequence[int]) -> None:
        self.result = fx.Graph()
        self._names = Names(graph)
        self._made: dict[fx.Node, fx.Node] = {}
        self._waiting: dict[fx.Node, list[fx.Node | _Call]] = {}
        inside = {m for call in calls for m in call.members}
        due: dict[int, list[_Call]] = {}
        for call, place in zip(calls, places, strict=True):
            due.setdefault(place, []).append(call)
        for i, node in enumerate(graph.nodes):
            if node not in inside:
                self._put(node, node.all_input_nodes)
            for call in due.get(i, ()):
                self._put(call, call.needs)
        # Views that only members looked at are in their programs.
        stuck = [one for waiting in self._waiting.values() for one in waiting if isinstance(one, _Call)]
        if stuck:
            raise AssertionError(f"{name_of(stuck[0].members[0])} is computed before what it reads")

    def _put(self, one: fx.Node | _Call, needs: Sequence[fx.Node]) -> None:
        """Adds a node or a call; a view or a call whose operand is not there yet follows it."""
        missing = next((o for o in needs if o not in self._made), None)
        if missing is not None:
            if isinstance(one, fx.Node) and not is_view(one):
                raise AssertionError(f"{name_of(one)} comes before {name_of(missing)}")
            self._waiting.setdefault(missing, []).append(one)
            return
        if isinstance(one, fx.Node):
            new = {one: copy_node(self.result, one, self._made.__getitem__)}
        else:
            new = one.put(self.result, self._made, self._names)
        self._made.update(new)
        for node in new:
            for waiting in self._waiting.pop(node, ()):
                self._put(waiting, waiting.all_input_nodes if isinstance(waiting, fx.Node) else waiting.needs)


class _Call:
    """One `fxo.fused` call: its operands, the numbers it is given, its program, its results."""

    def __init__(self, members: Sequence[fx.Node]) -> None:
        self.members = members
        self._inside = set(members)
        self.operands: dict[fx.Node, str] = {}
        self.symbols: dict[fx.Node, None] = {}
        self._sizes: list[object] = []
        self._numbers: list[fx.Node] = []
        self._program = fx.Graph()
        self._inner: dict[fx.Node, fx.Node] = {}
        self._known: dict[object, fx.Node] = {}
        for member in members:
            self._add(member)
        self.results = [m for m in members if any(not self._is_inside(u) for u in m.users)]
        self.text = self._text()

    def _is_inside(self, user: fx.Node) -> bool:
        """Whether a reader needs nothing but the program: a member, or a view that only members read."""
        if user in self._inside:
            return True
        return is_view(user) and user.target in _VIEWS and bool(user.users) and all(self._is_inside(u) for u in user.users)

    def _add(self, node: fx.Node) -> fx.Node:
        """The program's node for a member, or for a view of one."""
        if node in self._inner:
            return self._inner[node]
        positions, keywords = size_arguments(node.target)
        args = tuple(self._argument(a, positions.get(i, False)) for i, a in enumerate(node.args))
        kwargs = {k: self._argument(a, keywords.get(k, False)) for k, a in node.kwargs.items() if _says_more(node, k)}
        key = (node.target, str(args), str(sorted(kwargs.items(), key=lambda item: item[0])))
        if key not in self._known:
            self._known[key] = self._noted(self._program.call_function(node.target, args, kwargs), f"v{len(self._known)}")  # type: ignore[arg-type]
        self._inner[node] = self._known[key]
        return self._known[key]

    def _argument(self, value: object, may_be_size: bool) -> object:
        if isinstance(value, (list, tuple)):
            return [self._argument(item, may_be_size) for item in value]
        if isinstance(value, fx.Node):
            if is_symbol(value):
                self.symbols[value] = None
                return self._size(value)
            return self._operand(value)
        if may_be_size and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self._size(value)
        return value

    def _operand(self, node: fx.Node) -> fx.Node:
        if _base(node) in self._inside:
            return self._add(node)
        if node not in self._inner:
            name = self.operands.setdefault(node, f"a{len(self.operands)}")
            self._inner[node] = self._noted(self._program.placeholder(name), name)
        return self._inner[node]

    def _size(self, value: object) -> fx.Node:
        for i, known in enumerate(self._sizes):
            if known is value or (isinstance(value, int) and isinstance(known, int) and known == value):
                return self._numbers[i]
        name = f"s{len(self._sizes)}"
        self._sizes.append(value)
        self._numbers.append(self._noted(self._program.placeholder(name), name))
        return self._numbers[-1]

    @staticmethod
    def _noted(node: fx.Node, name: str) -> fx.Node:
        node.meta[INFO] = NodeInfo(name)
        return node

    def _text(self) -> str:
        self._noted(self._program.output([self._inner[m] for m in self.results]), "/output")
        inputs = [self._inner[o] for o in self.operands] + self._numbers
        writer = Writer(self._program, None)
        rest = [n for n in self._program.nodes if n.op != "placeholder"]
        return program_text([writer.line(n) for n in (*inputs, *rest)])

    @property
    def needs(self) -> list[fx.Node]:
        """All that must be there before the call."""
        return [*self.operands, *self.symbols]

    def put(self, graph: fx.Graph, made: Mapping[fx.Node, fx.Node], names: Names) -> dict[fx.Node, fx.Node]:
        """Adds the call and a `getitem` per result, which are given back by the members that they stand for."""
        sizes = [made[s] if isinstance(s, fx.Node) else s for s in self._sizes]
        call = graph.call_function(fused, ([made[o] for o in self.operands], self.text, sizes))  # type: ignore[arg-type]
        last = self.members[-1]
        call.meta = {k: v for k, v in last.meta.items() if k in ("nn_module_stack", "fwd_nn_module_stack")}
        call.meta["val"] = [m.meta["val"] for m in self.results]
        call.meta[INFO] = NodeInfo(names.fresh(f"{module_path(last)}/fused"))
        found = {}
        for i, member in enumerate(self.results):
            found[member] = graph.call_function(operator.getitem, (call, i))
            found[member].meta = dict(member.meta)
        return found


def _says_more(node: fx.Node, keyword: str) -> bool:
    """False for what a cast names beside its dtype: where its operand lies anyhow."""
    return node.target is not _aten._to_copy.default or keyword == "dtype"


PASS = Pass("fuse", run, requires=frozenset({"functional"}), provides=frozenset({"functional"}))
