"""recompute: lowers every checkpoint to clones of the forward ops that made the value, right before its first use.

A clone prints its origin. Each value is cloned once, so nothing is recomputed twice in one step. Views of saved values are
cloned too (they cost nothing), so no view and no gathered parameter is ever saved. Random ops replay the generator state their
original started from.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from fxoffload import ops
from fxoffload.graph import INFO, NodeInfo, Names, border_of, copy_node, info, is_random, name_of
from fxoffload.liveness import is_view, view_source
from fxoffload.pipeline import Context, Pass
from fxoffload.versions import last_element


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` without checkpoints; backward reads saved values, inputs and clones."""
    border = border_of(graph)
    if border is not None:
        _Clones(graph, border, ctx.device).rewrite()
    return graph


class _Clones:
    def __init__(self, graph: fx.Graph, border: fx.Node, device: torch.device) -> None:
        self.graph, self.border, self.device = graph, border, device
        self.names = Names(graph)
        self.forward: set[fx.Node] = set()
        for node in graph.nodes:
            if node is border:
                break
            self.forward.add(node)
        self.clone_of: dict[fx.Node, fx.Node] = {}
        self.recomputed: set[fx.Node] = set()
        self.states: dict[fx.Node, fx.Node] = {}

    def rewrite(self) -> None:
        checkpoints = self.graph.find_nodes(op="call_function", target=ops.checkpoint)
        self.recomputed = {c.args[0] for c in checkpoints}
        self._pass_through(checkpoints)
        node = self.border.next
        while node.op != "output":
            for operand in node.all_input_nodes:
                if operand in self.forward and self._is_cloned(operand):
                    node.replace_input_with(operand, self._materialize(operand, node))
            node = node.next

    def _pass_through(self, checkpoints: list[fx.Node]) -> None:
        for checkpoint in checkpoints:
            (source,) = checkpoint.all_input_nodes
            checkpoint.replace_all_uses_with(source)
            self.graph.erase_node(checkpoint)

    def _is_cloned(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem and is_view(node.args[0]):  # type: ignore[arg-type]
            return True
        return node in self.recomputed or is_view(node) or self._is_tuple(node)

    @staticmethod
    def _is_tuple(node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), (tuple, list))

    def _materialize(self, wanted: fx.Node, before: fx.Node) -> fx.Node:
        """The clone of `wanted`, made with everything it needs right before `before`. Iterative: chains run through whole layers."""
        work = [wanted]
        while work:
            node = work[-1]
            if node in self.clone_of:
                work.pop()
                continue
            missing = [o for o in node.all_input_nodes if self._is_cloned(o) and o not in self.clone_of]
            if missing:
                work.extend(missing)
                continue
            self.clone_of[node] = self._clone(node, before)
            work.pop()
        return self.clone_of[wanted]

    def _clone(self, node: fx.Node, before: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            # Behind its tuple's other elements, so that the tuple dies there and not at the last reader.
            before = last_element(self.clone_of[view_source(node)]).next
        saved_state = self._replay_state(node, before) if is_random(node) else None
        with self.graph.inserting_before(before):
            clone = copy_node(self.graph, node, lambda n: self.clone_of.get(n, n))
        clone.meta[INFO] = NodeInfo(self.names.fresh(name_of(node), "~"), origin=name_of(node), tier=info(node).tier)
        if saved_state is not None:
            self._memory_node(ops.swap_rng_state, (saved_state, self.device), before, saved_state)
        return clone

    def _replay_state(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Keeps the generator state `node` starts from and makes the generator return to it before the clone."""
        state = self._memory_node(ops.rng_state, (self.device,), node, None)
        return self._memory_node(ops.swap_rng_state, (state, self.device), before, state)

    def _memory_node(self, op: torch._ops.OpOverload, args: tuple[object, ...], before: fx.Node, like: fx.Node | None) -> fx.Node:
        with self.graph.inserting_before(before):
            made = self.graph.call_function(op, args)  # type: ignore[arg-type]
        value = like.meta["val"] if like is not None else _fake_state(before)
        made.meta = {"val": value, INFO: NodeInfo(self.names.fresh(f"rng/{op._schema.name.split('::')[1]}"))}
        return made


def _fake_state(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    value = value[0] if isinstance(value, (tuple, list)) else value
    with value.fake_mode:
        return torch.empty(ops.RNG_STATE_BYTES, dtype=torch.uint8)


PASS = Pass(
    "recompute", run, requires=frozenset({"functional"}), provides=frozenset({"lowered"}),
    breaks=frozenset({"released", "fits", "placed"}),
)
