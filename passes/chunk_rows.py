"""chunk-rows: what is read of the rows of a product is computed a chunk of rows at a time, and the product forgotten."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx as fx

from fxoffload.errors import PlanError
from fxoffload.graph import INFO, NodeInfo, Names, by_name, name_of, op_name
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Chunk
from fxoffload.readings import Reading, find_readings
from fxoffload.torch_compat import fake_like

_aten = torch.ops.aten


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with every product of a Chunk decision read in chunks. Raises PlanError for one that cannot be read so."""
    chunks = {d.value: d.chunks for d in (ctx.plan.decisions if ctx.plan is not None else ()) if isinstance(d, Chunk)}
    names = by_name(graph) if chunks else {}
    wanted = [name for name in chunks if name in names and names[name].target is _aten.mm.default]
    readings = {name_of(one.product): one for one in find_readings(graph)} if wanted else {}
    for name in wanted:
        if name not in readings:
            raise PlanError(f"the plan reads {name} in chunks of rows, but not all that reads it treats rows one by one")
        _Chunks(graph, readings[name], chunks[name]).rewrite()
    return graph


class _Chunks:
    """One reading in `n` chunks."""

    def __init__(self, graph: fx.Graph, reading: Reading, n: int) -> None:
        self.graph, self.reading, self.n = graph, reading, n
        self.names = Names(graph)
        self.path = name_of(reading.product).rpartition("/")[0]
        # By the first size, the others and the dtype: making one with symbols takes long.
        self.fakes: dict[tuple[object, ...], torch.Tensor] = {}

    def rewrite(self) -> None:
        """Puts the chunks before what reads their results."""
        rows = self.reading.product.args[0]
        assert isinstance(rows, fx.Node)
        parts: dict[fx.Node, list[fx.Node]] = {result: [] for result in self.reading.results}
        with self.graph.inserting_before(self.reading.before):
            split = {value: self._split(value) for value in (rows, *self.reading.others)}
            for i in range(self.n):
                made = {value: chunks[i] for value, chunks in split.items()}
                for node in self.reading.nodes:
                    made[node] = self._clone(node, made, made[rows].meta["val"].shape[0])
                for result, found in parts.items():
                    found.append(made[result])
            for result, found in parts.items():
                whole = self._call(_aten.cat.default, (found,), result.meta["val"])
                result.replace_all_uses_with(whole, lambda user: user not in self.reading.nodes)
        for node in reversed(self.reading.nodes):
            self.graph.erase_node(node)

    def _split(self, node: object) -> list[fx.Node]:
        """Views of the first dimension's parts that differ by one at most and, where it is short, may be empty."""
        assert isinstance(node, fx.Node)
        fakes = [self._resized(node.meta["val"], size) for size in _sizes(node.meta["val"].shape[0], self.n)]
        parts = self._call(_aten.tensor_split.sections, (node, self.n), fakes)
        return [self._call(operator.getitem, (parts, i), fake) for i, fake in enumerate(fakes)]

    def _clone(self, node: fx.Node, made: dict[fx.Node, fx.Node], rows: int | torch.SymInt) -> fx.Node:
        """`node` on one chunk of so many rows."""
        value = node.meta["val"]
        resized = self._resized(value, rows) if isinstance(value, torch.Tensor) else [self._resized(one, rows) for one in value]
        clone = self.graph.node_copy(node, lambda n: made.get(n, n))
        clone.meta = {**node.meta, "val": resized, INFO: NodeInfo(self.names.fresh(name_of(node), "+"))}
        return clone

    def _resized(self, value: torch.Tensor, rows: int | torch.SymInt) -> torch.Tensor:
        key = (str(rows), *map(str, value.shape[1:]), value.dtype)
        if key not in self.fakes:
            self.fakes[key] = fake_like(value, (rows, *value.shape[1:]), value.dtype)
        return self.fakes[key]

    def _call(self, target: object, args: tuple[object, ...], value: object) -> fx.Node:
        made = self.graph.call_function(target, args)  # type: ignore[arg-type]
        made.meta = {"val": value, INFO: NodeInfo(self.names.fresh(f"{self.path}/{op_name(made)}"))}
        return made


def _sizes(length: int | torch.SymInt, n: int) -> Iterator[int | torch.SymInt]:
    """What `tensor_split` makes of a length: the first parts are the longer ones."""
    return ((length - i + n - 1) // n for i in range(n))


PASS = Pass("chunk-rows", run, requires=frozenset({"functional"}), breaks=frozenset({"released", "fits", "placed"}))
