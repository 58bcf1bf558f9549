"""Which values backward makes again when saving a byte has a price: least of all seconds and prices together, by minimum cuts.

Saving a value costs its price; making one again costs its op's seconds once, and takes that all the op reads is there, saved or made
again too. That is a closure problem. What backward reads anyhow is there in any case, so the problem falls apart into the ops that
are linked by values that backward does not read; of equal parts, as repeated blocks have them, one is solved.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import networkx as nx


Value = TypeVar("Value", bound=Hashable)
# Capacities are counted in these.
_UNIT_S = 1e-15


@dataclass(frozen=True, slots=True)
class Remake(Generic[Value]):
    """An op that may run again: its seconds, the values it reads that are not always there, and those it makes."""

    seconds: float
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]


def made_again(ops: Sequence[Remake[Value]], prices: Mapping[Value, float], needed: frozenset[Value]) -> list[bool]:
    """For every op whether it runs again. `prices`: seconds that saving a value is worth, for every value that an op reads or makes;
    `needed`: values that backward reads."""
    chosen, known = [False] * len(ops), dict[tuple[object, ...], tuple[bool, ...]]()
    for part in _parts(ops, needed):
        signature = _signature([ops[i] for i in part], prices, needed)
        if signature not in known:
            known[signature] = _cut([ops[i] for i in part], prices, needed)
        for i, again in zip(part, known[signature], strict=True):
            chosen[i] = again
    return chosen


def _parts(ops: Sequence[Remake[Value]], needed: frozenset[Value]) -> Iterable[list[int]]:
    """Numbers of ops that values that are not `needed` link, in order."""
    links: nx.Graph[Hashable] = nx.Graph()
    links.add_nodes_from(("op", i) for i in range(len(ops)))
    links.add_edges_from((("op", i), ("value", v)) for i, op in enumerate(ops) for v in (*op.reads, *op.makes) if v not in needed)
    for part in nx.connected_components(links):
        yield sorted(i for kind, i in part if kind == "op")  # type: ignore[misc]


def _signature(part: Sequence[Remake[Value]], prices: Mapping[Value, float], needed: frozenset[Value]) -> tuple[object, ...]:
    """Equal for parts that are equal but for the names of their values."""
    number: dict[Value, int] = {}
    def told(values: Iterable[Value]) -> tuple[object, ...]:
        return tuple((number.setdefault(v, len(number)), prices[v], v in needed) for v in values)
    return tuple((op.seconds, told(v for v in op.reads if v not in needed), told(op.makes)) for op in part)


def _cut(part: Sequence[Remake[Value]], prices: Mapping[Value, float], needed: frozenset[Value]) -> tuple[bool, ...]:
    """On the source's side of the cut: ops that run again, and values that are there.

    Capacities are whole numbers: of floats, what a flow leaves depends on the order in which it was found, and so does the cut.
    """
    price = {v: round(prices[v] / _UNIT_S) for op in part for v in (*op.reads, *op.makes)}
    flow: nx.DiGraph[Hashable] = nx.DiGraph()
    flow.add_nodes_from(("there", "not"))
    for i, op in enumerate(part):
        flow.add_edge(("op", i), "not", capacity=round(op.seconds / _UNIT_S))
        flow.add_edge("there", ("op", i), capacity=sum(price[v] for v in op.makes if v in needed))
        for value in op.reads:
            if value not in needed:
                flow.add_edge(("op", i), ("value", value))
                flow.add_edge(("value", value), "not", capacity=price[value])
        for value in op.makes:
            if value not in needed:  # saved no more, where it is there and its op runs again
                flow.add_edge(("value", value), "not", capacity=price[value])
                flow.add_edge("there", ("both", i, value), capacity=price[value])
                flow.add_edge(("both", i, value), ("value", value))
                flow.add_edge(("both", i, value), ("op", i))
    _, (there, _) = nx.minimum_cut(flow, "there", "not")
    return tuple(("op", i) in there for i in range(len(part)))
