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
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
import torch.fx as fx

from fxoffload.blocks import block_of, position_of
from fxoffload.cost import flops, node_s
from fxoffload.cuts import Remake, made_again
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
    values = forward.values
    if ctx.draws_once:
        values = {s: v for s, v in values.items() if name_of(v) in ctx.recomputed_values or not is_random(owner_of(v))}
    again = {s for s, v in values.items() if v not in forward.closure and _recomputed(s, v, forward, keep, blocks, ctx.bounds)}
    if keep in ("costly", "blocks") and ctx.machine is not None:
        # In graph order: blocks that are alike are then told to be, and one cut is made of them all.
        inside = {s: v for s, v in values.items() if s in again and keep == "blocks" and forward.is_inside(s, blocks)}
        again -= set(_return_sooner({s: v for s, v in values.items() if s in again and s not in inside}, forward, ctx))
        outside = {s: v for s, v in values.items() if s in again and s not in inside}
        for part, price in ((inside, float(ctx.options.get("price", 1.0))), (outside, 1.0)):
            again -= part.keys() - _cheapest(part, forward, price, ctx)
    chosen = {name_of(node) for s, node in values.items() if s in again or node in forward.closure}
    chosen -= ctx.kept_values | ctx.swapped_values
    chosen |= {name_of(v) for v in values.values() if name_of(v) in ctx.recomputed_values}
    return tuple(Recompute(name_of(node)) for node in values.values() if name_of(node) in chosen)


@dataclass(frozen=True, slots=True)
class _Forward:
    """What no option changes. `values`: every Storage forward makes that may be made again, under the node that names it; `closure`:
    nodes that parameters alone feed; `positions`: the block of each value, by number, in none where it lies outside; `crossing`: those
    that forward reads outside their block; `read`: Storages that backward reads; `needed`: of the node that makes a value what it reads
    that is not always there."""

    values: Mapping[Storage, fx.Node]
    closure: Set[fx.Node]
    positions: Mapping[Storage, int]
    crossing: Set[Storage]
    read: frozenset[Storage]
    needed: Mapping[fx.Node, tuple[Storage, ...]]

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
            {owner: _needed(owner, free, live) for owner in owners})

    def is_inside(self, storage: Storage, blocks: int) -> bool:
        """Whether the value lies in one of the first so many blocks."""
        position = self.positions.get(storage)
        return position is not None and (blocks < 0 or position < blocks)


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


def _cheapest(values: Mapping[Storage, fx.Node], forward: _Forward, price: float, ctx: Context) -> set[Storage]:
    """Which of the values are made again where a saved byte costs `price` times its copies, and all that an op reads must be there."""
    assert ctx.machine is not None
    if not values:
        return set()
    most_bytes = max(s.n_bytes for s in values)
    per_byte_s = price * sum(ctx.machine.least_s_per_byte(most_bytes, channel, ctx.swap_tier) for channel in (Channel.H2D, Channel.D2H))
    made: dict[fx.Node, list[Storage]] = {}
    for storage, node in values.items():
        made.setdefault(owner_of(node), []).append(storage)
    made_s = _made_s(forward, ctx.bounds, ctx.machine)
    remakes = [Remake(made_s[owner], forward.needed[owner], tuple(storages)) for owner, storages in made.items()]
    prices = {s: s.n_bytes * per_byte_s for remake in remakes for s in (*remake.reads, *remake.makes)}
    again = made_again(remakes, prices, forward.read)
    return {s for remake, yes in zip(remakes, again, strict=True) if yes for s in remake.makes}


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


def _recomputed(storage: Storage, node: fx.Node, forward: _Forward, keep: str, blocks: int, bounds: Bounds) -> bool:
    if keep == "all":
        return False
    if keep == "inputs":
        return True
    if keep == "blocks" and forward.is_inside(storage, blocks):
        return storage not in forward.crossing
    return is_cheap(node, bounds)


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
