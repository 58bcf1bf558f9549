"""A Step as it was captured: its canonical form, its sizes, and the names of what it makes, which pins speak of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from . import text
from .graph import Bounds, copy_graph, info
from .liveness import base_nodes, liveness
from .pins import VALUE_PLACES, Pin, pinned_names
from .pipeline import Context, get_pass, pipeline_names


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A canonical Step, its fingerprint and the largest value of each of its symbols: all that planning it again needs.

    `opened`: names of the autograd Functions that are torch's ops in it.
    """

    graph: fx.Graph
    fingerprint: str
    bounds: Bounds
    opened: tuple[str, ...] = ()

    @staticmethod
    def of(graph: fx.Graph, maxima: Mapping[str, tuple[int, ...]], opened: tuple[str, ...] = ()) -> CapturedStep:
        """`graph` in canonical form; `maxima`: the largest shapes of the batch by name."""
        bounds = bounds_of(graph, maxima)
        canonical = get_pass("canonicalize").run(graph, Context(bounds))
        assert isinstance(canonical, fx.Graph)
        return CapturedStep(canonical, text.fingerprint(canonical), bounds, opened)

    def to_run(self, executor: str, numerics: str) -> CapturedStep:
        """The step as it is planned and run: with numerics="reordered" without sums with zeros and products that are others' transposes, for
        executor="inductor" with its elementwise ops fused. What that changes has another fingerprint: a plan for one is none for the other."""
        step = self
        if numerics == "reordered":
            graph = copy_graph(step.graph)
            for name in pipeline_names("reorder"):
                graph = get_pass(name).run(graph, Context(step.bounds))  # type: ignore[assignment]
            if [n.target for n in graph.nodes] != [n.target for n in step.graph.nodes]:
                step = replace(step, graph=graph, fingerprint=text.fingerprint(graph))
        if executor == "inductor":
            fused = get_pass("fuse").run(copy_graph(step.graph), Context(step.bounds))
            assert isinstance(fused, fx.Graph)
            step = replace(step, graph=fused, fingerprint=hashlib.sha256(f"{executor} {step.fingerprint}".encode()).hexdigest())
        return step


def bounds_of(graph: fx.Graph, maxima: Mapping[str, tuple[int, ...]]) -> Bounds:
    """The largest value of every symbol: the batch's maxima where a symbol is a size of it, else what it was traced with."""
    found: dict[str, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        known = maxima.get(info(node).name.removeprefix("batch."))
        if not isinstance(value, torch.Tensor):
            continue
        for i, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                symbol = str(size.node.expr)
                found[symbol] = max(found.get(symbol, 0), known[i] if known is not None and i < len(known) else size.node.hint)
    return Bounds(found)


def pinned_values(pins: Sequence[Pin], graph: fx.Graph, context: Context) -> Context:
    """The context with the caller's pins on values, by canonical name."""
    if not any(p.place in VALUE_PLACES for p in pins):
        return context
    places = pinned_names(pins, value_names(graph, context.bounds), VALUE_PLACES)
    chosen = {place: frozenset(n for n, p in places.items() if p == place) for place in VALUE_PLACES}
    return replace(context, kept_values=chosen["keep"], swapped_values=chosen["swap"], recomputed_values=chosen["checkpoint"])


def value_names(graph: fx.Graph, bounds: Bounds) -> list[str]:
    """Canonical names of what the graph makes, one per Storage."""
    return [info(node).name for storage, node in base_nodes(liveness(graph, bounds)).items() if not storage.is_input]
