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
from collections.abc import Iterator

import torch
import torch.fx as fx

from fxoffload.blocks import block_of, block_position
from fxoffload.cost import flops, node_s
from fxoffload.cuts import Remake, made_again
from fxoffload.effects import Channel, Tier
from fxoffload.fusion import fused
from fxoffload.graph import Bounds, Role, border_of, info, is_random, name_of, returned
from fxoffload.liveness import Liveness, Storage, base_nodes, is_view, liveness, owner_of
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Decision, Recompute

_COSTLY = frozenset({"embedding", "sort", "topk", "cumsum", "convolution", "native_batch_norm", "_native_batch_norm_legit"})


def run(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
    """One Recompute decision per value, in graph order. Raises ValueError for an unknown `keep`."""
    keep, blocks = str(ctx.options.get("keep", "all")), int(ctx.options.get("blocks", -1))
    if keep not in ("all", "costly", "blocks", "inputs"):
        raise ValueError(f"plan-recompute: keep must be all, costly, blocks or inputs, got {keep!r}")
    border = border_of(graph)
    if border is None:
        return ()
    live = ctx.live or liveness(graph, ctx.bounds)
    values = _forward_values(graph, live, border)
    if ctx.draws_once:
        values = {s: v for s, v in values.items() if name_of(v) in ctx.recomputed_values or not is_random(owner_of(v))}
    closure = _parameter_closure(graph, live, border)
    again = {s for s in values if values[s] not in closure and _recomputed(s, values[s], live, border, keep, blocks, ctx.bounds)}
    if keep in ("costly", "blocks") and ctx.machine is not None:
        # In graph order: blocks that are alike are then told to be, and one cut is made of them all.
        inside = {s: v for s, v in values.items() if s in again and keep == "blocks" and _is_inside(v, blocks)}
        again -= set(_return_sooner({s: v for s, v in values.items() if s in again and s not in inside}, ctx))
        outside = {s: v for s, v in values.items() if s in again and s not in inside}
        for part, price in ((inside, float(ctx.options.get("price", 1.0))), (outside, 1.0)):
            again -= part.keys() - _cheapest(part, closure, live, border, price, ctx)
    chosen = {name_of(node) for s, node in values.items() if s in again or node in closure}
    chosen -= ctx.kept_values | ctx.swapped_values
    chosen |= {name_of(v) for v in values.values() if name_of(v) in ctx.recomputed_values}
    return tuple(Recompute(name_of(node)) for node in values.values() if name_of(node) in chosen)


def _forward_values(graph: fx.Graph, live: Liveness, border: fx.Node) -> dict[Storage, fx.Node]:
    """Every Storage forward makes that may be made again, under the node that names it."""
    end = live.index[border]
    outputs, _ = returned(graph)
    kept = {s for v in outputs if isinstance(v, fx.Node) for s in live.of.get(v, ())}
    written = {s for node in live.nodes[:end] if _writes(node) for s in live.of.get(node.all_input_nodes[0], ())}
    found = {}
    for storage, node in base_nodes(live).items():
        # Backward would read what forward has written there since (a running mean), not what the original read.
        if any(s in written for operand in node.all_input_nodes for s in live.of.get(operand, ())):
            continue
        if storage.is_input or storage in kept or live.first[storage] >= end or node.op != "call_function":
            continue
        if storage.tier is Tier.DEVICE and not is_view(node) and not _writes(node):
            found[storage] = node
    return found


def _cheapest(values: dict[Storage, fx.Node], closure: set[fx.Node], live: Liveness, border: fx.Node, price: float,
              ctx: Context) -> set[Storage]:
    """Which of the values are made again where a saved byte costs `price` times its copies, and all that an op reads must be there."""
    assert ctx.machine is not None
    if not values:
        return set()
    end, free = live.index[border], {s for node in closure for s in live.of.get(node, ())}
    most_bytes = max(s.n_bytes for s in values)
    per_byte_s = price * sum(ctx.machine.least_s_per_byte(most_bytes, channel, ctx.swap_tier) for channel in (Channel.H2D, Channel.D2H))
    made: dict[fx.Node, list[Storage]] = {}
    for storage, node in values.items():
        made.setdefault(owner_of(node), []).append(storage)
    remakes = []
    for owner, storages in made.items():
        reads = dict.fromkeys(s for operand in owner.all_input_nodes for s in live.of.get(operand, ()))
        needed = tuple(s for s in reads if not s.is_input and s not in free and s not in live.escapes)
        remakes.append(Remake(node_s(owner, ctx.bounds, ctx.machine)[1], needed, tuple(storages)))
    prices = {s: s.n_bytes * per_byte_s for remake in remakes for s in (*remake.reads, *remake.makes)}
    read = frozenset(s for s in prices if any(i > end and not is_view(live.nodes[i]) for i in live.uses[s]))
    again = made_again(remakes, prices, read)
    return {s for remake, yes in zip(remakes, again, strict=True) if yes for s in remake.makes}


def _return_sooner(values: dict[Storage, fx.Node], ctx: Context) -> Iterator[Storage]:
    """Values whose op takes longer than copies of all it makes would, at the best rate there is."""
    assert ctx.machine is not None
    if not values:
        return
    n_bytes: Counter[fx.Node] = Counter()
    for storage, node in values.items():
        n_bytes[owner_of(node)] += storage.n_bytes
    load_s = ctx.machine.least_s_per_byte(max(n_bytes.values()), Channel.H2D, ctx.swap_tier)
    made_s = {owner: node_s(owner, ctx.bounds, ctx.machine)[1] for owner in n_bytes}
    yield from (storage for storage, node in values.items() if made_s[owner_of(node)] > n_bytes[owner_of(node)] * load_s)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _parameter_closure(graph: fx.Graph, live: Liveness, border: fx.Node) -> set[fx.Node]:
    """Forward nodes fed by parameters alone (casts, transposes, dequantization, norms of weights)."""
    closure: set[fx.Node] = set()
    for node in graph.nodes:
        if node is border:
            break
        if node.op == "placeholder" and info(node).role in (Role.PARAMETER,):
            closure.add(node)
        elif node.op == "call_function" and node.all_input_nodes and all(o in closure for o in node.all_input_nodes):
            if not is_random(node):
                closure.add(node)
    return closure


def _recomputed(storage: Storage, node: fx.Node, live: Liveness, border: fx.Node, keep: str, blocks: int, bounds: Bounds) -> bool:
    if keep == "all":
        return False
    if keep == "inputs":
        return True
    block = block_of(name_of(node))
    if keep == "blocks" and block is not None and _is_inside(node, blocks):
        return not _crosses(storage, block, live, border)
    return is_cheap(node, bounds)


def _is_inside(node: fx.Node, blocks: int) -> bool:
    """Whether the node lies in one of the first so many blocks."""
    position = block_position(name_of(node))
    return position is not None and (blocks < 0 or position < blocks)


def _crosses(storage: Storage, block: str, live: Liveness, border: fx.Node) -> bool:
    """True when forward reads the value outside its block."""
    end = live.index[border]
    for i in live.uses[storage]:
        node = live.nodes[i]
        if i < end and not is_view(node) and node.op == "call_function" and block_of(name_of(node)) != block:
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
