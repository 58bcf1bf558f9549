"""Rewriting uses of a value to its latest device copy: the mechanism under insert-gather and insert-swap.

A value that returns to the device (a gather, a swap_in) is a new node, a new version. Every later use reads the latest version;
views are derived again from it right before the use, so no view keeps an old version alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.fx as fx

from .graph import INFO, NodeInfo, Names, copy_node, info, name_of
from .liveness import is_view, view_source
import operator

Build = Callable[[fx.Node], fx.Node]


def base_of(node: fx.Node) -> fx.Node:
    """The node whose Storage `node` looks into: itself unless it is a view (or an element of a view tuple)."""
    while True:
        if node.op != "call_function":
            return node
        if is_view(node) or (node.target is operator.getitem and is_view(view_source(node))):
            node = view_source(node)
            continue
        return node


def last_element(node: fx.Node) -> fx.Node:
    """The last of the `getitem` nodes that follow a tuple's producer: only behind them is the tuple itself gone."""
    while node.next.target is operator.getitem:
        node = node.next
    return node


def reload(graph: fx.Graph, returns: Mapping[fx.Node, Sequence[tuple[fx.Node, Build]]]) -> None:
    """Inserts the versions and moves uses to them, in place.

    `returns[base]`: pairs of (node, build) in any order; `build(node)` makes the version right before `node`, which and whose
    successors then read it. Views left without a use are removed.
    """
    before: dict[fx.Node, list[tuple[fx.Node, Build]]] = {}
    for base, pairs in returns.items():
        for node, build in pairs:
            before.setdefault(node, []).append((base, build))
    _Versions(graph, set(returns), before).run()


class _Versions:
    def __init__(self, graph: fx.Graph, bases: set[fx.Node], before: dict[fx.Node, list[tuple[fx.Node, Build]]]) -> None:
        self.graph, self.bases, self.before = graph, bases, before
        self.names = Names(graph)
        self.latest: dict[fx.Node, fx.Node] = {}
        self.base: dict[fx.Node, fx.Node] = {}
        self.derived: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.views: list[fx.Node] = []

    def run(self) -> None:
        for node in list(self.graph.nodes):
            for base, build in self.before.get(node, ()):
                self.latest[base] = build(node)
            self._note_view(node)
            if node not in self.base:
                self._read_latest(node)
        for view in reversed(self.views):
            if not view.users:
                self.graph.erase_node(view)

    def _note_view(self, node: fx.Node) -> None:
        """Views of a moved value are not uses; they are derived again where they are read."""
        if node.op != "call_function":
            return
        if not (is_view(node) or (node.target is operator.getitem and node.args[0] in self.base)):
            return
        base = base_of(node)
        if base in self.bases:
            self.base[node] = base
            self.views.append(node)

    def _read_latest(self, node: fx.Node) -> None:
        for operand in list(node.all_input_nodes):
            base = self.base.get(operand, operand)
            latest = self.latest.get(base)
            if latest is not None and latest is not node:
                node.replace_input_with(operand, self._derive(operand, base, latest, node))

    def _derive(self, wanted: fx.Node, base: fx.Node, latest: fx.Node, before: fx.Node) -> fx.Node:
        if wanted is base:
            return latest
        key = (wanted, latest)
        if key not in self.derived:
            source = view_source(wanted)
            new_source = self._derive(source, base, latest, before)
            with self.graph.inserting_before(before):
                clone = copy_node(self.graph, wanted, lambda n: new_source if n is source else n)
            clone.meta[INFO] = NodeInfo(self.names.fresh(name_of(wanted), "~"), origin=info(wanted).origin or name_of(wanted))
            self.derived[key] = clone
        return self.derived[key]
