"""Which values backward makes again when saving a byte has a price: least of all seconds and prices together, by minimum cuts.

Saving a value costs its price; making one again costs its op's seconds once, and takes that all the op reads is there, saved or made
again too. That is a closure problem. What backward reads anyhow is there in any case, so the problem falls apart into the ops that
are linked by values that backward does not read; of equal parts, as repeated blocks have them, one is solved.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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


# A value as a number, its size, and whether it is needed; an op's seconds, what it reads that is not needed, and what it makes.
_Told = tuple[int, float, bool]
_Part = tuple[tuple[float, tuple[_Told, ...], tuple[_Told, ...]], ...]


@dataclass(frozen=True, slots=True)
class Remakes:
    """Ops that may run again, in parts that no value links that is not needed. `alike`: the numbers of the ops of each part, of parts that are equal
    but for the names of their values under what they are."""

    n_ops: int
    alike: Mapping[_Part, Sequence[Sequence[int]]]

    @staticmethod
    def of(ops: Sequence[Remake[Value]], sizes: Mapping[Value, float], needed: frozenset[Value]) -> Remakes:
        """`sizes`: of every value that an op reads or makes; `needed`: values that backward reads."""
        alike: dict[_Part, list[list[int]]] = {}
        for part in _parts(ops, needed):
            alike.setdefault(_told([ops[i] for i in part], sizes, needed), []).append(part)
        return Remakes(len(ops), alike)

    def made_again(self, price: float) -> list[bool]:
        """For every op whether it runs again where a value is worth so many seconds times its size."""
        chosen = [False] * self.n_ops
        for told, parts in self.alike.items():
            for at, again in enumerate(_cut(told, price)):
                for part in parts if again else ():
                    chosen[part[at]] = True
        return chosen


def made_again(ops: Sequence[Remake[Value]], prices: Mapping[Value, float], needed: frozenset[Value]) -> list[bool]:
    """For every op whether it runs again. `prices`: seconds that saving a value is worth, for every value that an op reads or makes;
    `needed`: values that backward reads."""
    return Remakes.of(ops, prices, needed).made_again(1.0)


def _parts(ops: Sequence[Remake[Value]], needed: frozenset[Value]) -> Iterator[list[int]]:
    """Numbers of ops that values that are not `needed` link, in order."""
    links = nx.utils.UnionFind(range(len(ops)))
    known: dict[Value, int] = {}
    for i, op in enumerate(ops):
        for value in (*op.reads, *op.makes):
            if value not in needed and known.setdefault(value, i) != i:
                links.union(known[value], i)
    yield from map(sorted, links.to_sets())


def _told(part: Sequence[Remake[Value]], sizes: Mapping[Value, float], needed: frozenset[Value]) -> _Part:
    """Equal for parts that are equal but for the names of their values."""
    number: dict[Value, int] = {}

    def told(values: Iterable[Value]) -> tuple[_Told, ...]:
        return tuple([(number.setdefault(v, len(number)), sizes[v], v in needed) for v in values])

    return tuple([(op.seconds, told([v for v in op.reads if v not in needed]), told(op.makes)) for op in part])


# A search asks for the parts of a block once per recipe; a model has a handful.
@functools.lru_cache(maxsize=1024)
def _cut(part: _Part, price: float) -> tuple[bool, ...]:
    """On the source's side of the cut: ops that run again, and values that are there.

    Capacities are whole numbers: of floats, what a flow leaves depends on the order in which it was found, and so does the cut.
    """
    flow: nx.DiGraph[Hashable] = nx.DiGraph()
    flow.add_nodes_from(("there", "not"))
    for i, (seconds, reads, makes) in enumerate(part):
        flow.add_edge(("op", i), "not", capacity=round(seconds / _UNIT_S))
        flow.add_edge("there", ("op", i), capacity=sum(round(size * price / _UNIT_S) for _, size, is_needed in makes if is_needed))
        for value, size, _ in reads:
            flow.add_edge(("op", i), ("value", value))
            flow.add_edge(("value", value), "not", capacity=round(size * price / _UNIT_S))
        for value, size, is_needed in makes:
            if not is_needed:  # saved no more, where it is there and its op runs again
                flow.add_edge(("value", value), "not", capacity=round(size * price / _UNIT_S))
                flow.add_edge("there", ("both", i, value), capacity=round(size * price / _UNIT_S))
                flow.add_edge(("both", i, value), ("value", value))
                flow.add_edge(("both", i, value), ("op", i))
    _, (there, _) = nx.minimum_cut(flow, "there", "not")
    return tuple([("op", i) in there for i in range(len(part))])
