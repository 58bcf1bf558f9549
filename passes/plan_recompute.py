"""plan-recompute: which forward values backward computes again instead of reading saved ones.

Option `keep`: "all" saves every value backward reads; "costly" recomputes what costs no more than reading its operands
(pointwise ops, casts, norms); "blocks" saves what crosses the border of a repeated block (a numbered module), and of the rest what is
cheaper saved; outside of blocks what is costly; "inputs" saves nothing. What only parameters feed is recomputed always, so that no
gathered parameter or view of one is ever saved; where the context says that draws are made once, what a random op makes is made
again only where the caller says so.

Options of "blocks": `blocks`, how many of them, in order, it applies to (-1: all), and `price`, what a saved byte costs, in times of its
copies to the host and back on the machine: which values of a block are made again is then a minimum cut (`fxoffload/cuts.py`). Where no
machine is known nothing of them is saved. On a machine that is known, "costly" also saves what an op takes longer to make than all it
makes takes to return from the host (sums over rows): to move it, or to keep it, is cheaper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from fxoffload.blocks import block_of, position_of
from fxoffload.cost import flops, node_s
from fxoffload.cuts import Remake, Remakes
from fxoffload.effects import Channel, Tier
from fxoffload.fusion import fused
from fxoffload.graph import Bounds, Role, border_of, info, is_random, name_of, remembered, returned
from fxoffload.liveness import Liveness, Storage, base_nodes, is_view, liveness, owner_of
from fxoffload.machine import Machine
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Decision, Recompute

_COSTLY = frozenset({"embedding", "sort", "topk", "cumsum", "convolution", "native_batch_norm", "_native_batch_norm_legit"})


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """One Recompute decision per value, in graph order. Raises ValueError for an unknown `keep`."""
    keep, blocks = str(ctx.options.get("keep", "all")), int(ctx.options.get("blocks", -1))
    if keep not in ("all", "costly", "blocks", "inputs"):
        raise ValueError(f"plan-recompute: keep must be all, costly, blocks or inputs, got {keep!r}")
    if border_of(graph) is None:
        return ()
    forward = (ctx.live or liveness(graph, ctx.bounds)).told(_Forward.of)
    choice = forward.choice(keep, blocks, ctx)
    again, names, pinned = choice.again(float(ctx.options.get("price", 1.0)), ctx), forward.names, ctx.kept_values | ctx.swapped_values
    return tuple([
        forward.decisions[s] for s, node in choice.values.items()
        if (s in again or node in forward.closure) and names[s] not in pinned or names[s] in ctx.recomputed_values])


@dataclass(frozen=True, slots=True)
class _Forward:
    """What no option changes. `values`: every Storage forward makes that may be made again, under the node that names it; `closure`:
    nodes that parameters alone feed; `positions`: the block of each value, by number, in none where it lies outside; `crossing`: those
    that forward reads outside their block; `read`: Storages that backward reads; `needed`: of the node that makes a value what it reads
    that is not always there. `choices`, `cheap`: what was asked for, the first each with its machine, by whose identity it is known."""

    values: Mapping[Storage, fx.Node]
    closure: Set[fx.Node]
    positions: Mapping[Storage, int]
    crossing: Set[Storage]
    read: frozenset[Storage]
    needed: Mapping[fx.Node, tuple[Storage, ...]]
    names: Mapping[Storage, str]
    decisions: Mapping[Storage, Recompute]
    choices: dict[tuple[object, ...], tuple[Machine | None, _Choice]] = field(default_factory=dict)
    cheap: dict[Storage, bool] = field(default_factory=dict)

    @staticmethod
    def of(live: Liveness) -> _Forward:
        """The forward half of a graph that has a backward."""
        values, closure = _forward_values(live), _parameter_closure(live)
        blocks = {s: block for s, node in values.items() if (block := block_of(name_of(node))) is not None}
        free = {s for node in closure for s in live.of.get(node, ())}
        owners = dict.fromkeys(map(owner_of, values.values()))
        return _Forward(
            values, closure, {s: position_of(block) for s, block in blocks.items()},
            {s for s, block in blocks.items() if _crosses(s, block, live)},
            frozenset(s for s, uses in live.uses.items() if any(i > live.border and not is_view(live.nodes[i]) for i in reversed(uses))),
            {owner: _needed(owner, free, live) for owner in owners},
            {s: name_of(node) for s, node in values.items()}, {s: Recompute(name_of(node)) for s, node in values.items()})

    def is_inside(self, storage: Storage, blocks: int) -> bool:
        """Whether the value lies in one of the first so many blocks."""
        position = self.positions.get(storage)
        return position is not None and (blocks < 0 or position < blocks)

    def is_cheap(self, storage: Storage, bounds: Bounds) -> bool:
        """See `is_cheap`, asked once of each value."""
        if storage not in self.cheap:
            self.cheap[storage] = is_cheap(self.values[storage], bounds)
        return self.cheap[storage]

    def choice(self, keep: str, blocks: int, ctx: Context) -> _Choice:
        """What is there to choose from, found out once."""
        drawn = ctx.recomputed_values if ctx.draws_once else None
        key = keep, blocks, drawn, id(ctx.machine), ctx.swap_tier
        if key not in self.choices:
            self.choices[key] = ctx.machine, _Choice.of(self, keep, blocks, ctx)
        return self.choices[key][1]


@dataclass(frozen=True, slots=True)
class _Choice:
    """What no price changes. `values`: those that may be made again at all; `sure`: those that are; `inside`: those of blocks, of which a minimum cut
    says which."""

    values: Mapping[Storage, fx.Node]
    sure: Set[Storage]
    inside: _Cuts | None = None

    @staticmethod
    def of(forward: _Forward, keep: str, blocks: int, ctx: Context) -> _Choice:
        """What the option `keep` says of so many blocks."""
        values = forward.values
        if ctx.draws_once:
            values = {s: v for s, v in values.items() if name_of(v) in ctx.recomputed_values or not is_random(owner_of(v))}
        again = {s: v for s, v in values.items() if v not in forward.closure and _recomputed(s, forward, keep, blocks, ctx.bounds)}
        if keep not in ("costly", "blocks") or ctx.machine is None:
            return _Choice(values, again.keys())
        # In graph order: blocks that are alike are then told to be, and one cut is made of them all.
        inside = {s: v for s, v in again.items() if keep == "blocks" and forward.is_inside(s, blocks)}
        sooner = set(_return_sooner({s: v for s, v in again.items() if s not in inside}, forward, ctx))
        outside = {s: v for s, v in again.items() if s not in inside and s not in sooner}
        return _Choice(values, _Cuts.of(outside, forward, ctx).cheapest(1.0, ctx), _Cuts.of(inside, forward, ctx))

    def again(self, price: float, ctx: Context) -> Set[Storage]:
        """The values that are made again, by choice, where a saved byte costs `price` times its copies."""
        return self.sure if self.inside is None else self.sure | self.inside.cheapest(price, ctx)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Values of which a minimum cut says which are made again: what each op makes, and the ops. `most_bytes`: of the largest."""

    made: Sequence[Sequence[Storage]]
    remakes: Remakes
    most_bytes: int

    @staticmethod
    def of(values: Mapping[Storage, fx.Node], forward: _Forward, ctx: Context) -> _Cuts:
        """Of the values."""
        assert ctx.machine is not None
        made: dict[fx.Node, list[Storage]] = {}
        for storage, node in values.items():
            made.setdefault(owner_of(node), []).append(storage)
        made_s = _made_s(forward, ctx.bounds, ctx.machine)
        remakes = [Remake(made_s[owner], forward.needed[owner], tuple(storages)) for owner, storages in made.items()]
        sizes = {s: s.n_bytes for remake in remakes for s in (*remake.reads, *remake.makes)}
        return _Cuts(list(made.values()), Remakes.of(remakes, sizes, forward.read), max([s.n_bytes for s in values], default=0))

    def cheapest(self, price: float, ctx: Context) -> set[Storage]:
        """Which of the values are made again where a saved byte costs `price` times its copies, and all that an op reads must be there."""
        assert ctx.machine is not None
        if not self.made:
            return set()
        channels = Channel.H2D, Channel.D2H
        per_byte_s = price * sum(ctx.machine.least_s_per_byte(self.most_bytes, channel, ctx.swap_tier) for channel in channels)
        again = self.remakes.made_again(per_byte_s)
        return {s for storages, yes in zip(self.made, again, strict=True) if yes for s in storages}


def _forward_values(live: Liveness) -> dict[Storage, fx.Node]:
    end = live.border
    outputs, _ = returned(live.nodes[end].graph)
    kept = {s for v in outputs if isinstance(v, fx.Node) for s in live.of.get(v, ())}
    targets = [node.all_input_nodes[0] for node in live.nodes[:end] if _writes(node.target)]
    targets += [node for node in live.nodes[:end] if node.op == "placeholder" and info(node).written]
    written = {s for target in targets for s in live.of.get(target, ())}
    found = {}
    for storage, node in base_nodes(live).items():
        if storage.is_input or storage in kept or live.first[storage] >= end or node.op != "call_function":
            continue
        # Backward would read what forward has written there since (a running mean), not what the original read.
        if written and any(s in written for operand in owner_of(node).all_input_nodes for s in live.of.get(operand, ())):
            continue
        if storage.tier is Tier.DEVICE and not is_view(node) and not _writes(node.target):
            found[storage] = node
    return found


def _needed(owner: fx.Node, free: Set[Storage], live: Liveness) -> tuple[Storage, ...]:
    reads = dict.fromkeys(s for operand in owner.all_input_nodes for s in live.of.get(operand, ()))
    return tuple(s for s in reads if not s.is_input and s not in free and s not in live.escapes)


def _made_s(forward: _Forward, bounds: Bounds, machine: Machine) -> Mapping[fx.Node, float]:
    """Seconds of every node that makes a value of forward, found out once for all recipes."""
    return bounds.once(lambda: {owner: node_s(owner, bounds, machine)[1] for owner in forward.needed}, _made_s, forward, machine)


def _return_sooner(values: dict[Storage, fx.Node], forward: _Forward, ctx: Context) -> Iterator[Storage]:
    """Values whose op takes longer than copies of all it makes would, at the best rate there is."""
    assert ctx.machine is not None
    if not values:
        return
    n_bytes: Counter[fx.Node] = Counter()
    for storage, node in values.items():
        n_bytes[owner_of(node)] += storage.n_bytes
    load_s = ctx.machine.least_s_per_byte(max(n_bytes.values()), Channel.H2D, ctx.swap_tier)
    made_s = _made_s(forward, ctx.bounds, ctx.machine)
    yield from (storage for storage, node in values.items() if made_s[owner_of(node)] > n_bytes[owner_of(node)] * load_s)


@remembered
def _writes(target: object) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _parameter_closure(live: Liveness) -> set[fx.Node]:
    """Forward nodes fed by parameters alone (casts, transposes, dequantization, norms of weights)."""
    closure: set[fx.Node] = set()
    for node in live.nodes[: live.border]:
        if node.op == "placeholder" and info(node).role in (Role.PARAMETER,):
            closure.add(node)
        elif node.op == "call_function" and node.all_input_nodes and all(o in closure for o in node.all_input_nodes):
            if not is_random(node):
                closure.add(node)
    return closure


def _recomputed(storage: Storage, forward: _Forward, keep: str, blocks: int, bounds: Bounds) -> bool:
    if keep == "all":
        return False
    if keep == "inputs":
        return True
    if keep == "blocks" and forward.is_inside(storage, blocks):
        return storage not in forward.crossing
    return forward.is_cheap(storage, bounds)


def _crosses(storage: Storage, block: str, live: Liveness) -> bool:
    """True when forward reads the value outside its block."""
    for i in live.uses[storage]:
        node = live.nodes[i]
        if i < live.border and not is_view(node) and node.op == "call_function" and block_of(name_of(node)) != block:
            return True
    return False


def is_cheap(node: fx.Node, bounds: Bounds) -> bool:
    """True when making the value again costs about what reading its operands does."""
    source = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else node
    assert isinstance(source, fx.Node)
    name = getattr(getattr(source.target, "_schema", None), "name", "").split("::")[-1]
    if name in _COSTLY or not isinstance(source.target, torch._ops.OpOverload):
        return False
    if is_random(source) or (source.target.namespace != "aten" and source.target is not fused):
        return False
    return flops(source, bounds) == 0 and "attention" not in name


PASS = Pass("plan-recompute", run, requires=frozenset({"functional"}), options={"keep": "all", "blocks": -1, "price": 1.0})
