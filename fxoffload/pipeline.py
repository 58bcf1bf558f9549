"""Passes and the Pipeline that runs, checks and dumps them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import networkx as nx

import torch
import torch.fx as fx

from . import text
from .effects import Tier
from .errors import VerifyError
from .graph import Bounds, copy_graph
from .liveness import LiveCurve, Liveness, no_workspace
from .machine import Machine
from .plans import Decision, GraphPlan, Prediction
from .sizes import format_bytes
from .verify import Checked, verified

ENTRY_POINTS = "fxoffload.passes"
Option = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may read besides the graph: sizes, the plan to apply, budgets and options of the pipeline text.

    `live`: the Liveness of the graph, for a pass that changes none of its nodes' operands; None where nobody has it.
    `draws_once`: no random op may be run again, since nobody could set its generator back.
    """

    bounds: Bounds = field(default_factory=Bounds)
    plan: GraphPlan | None = None
    device_budget_bytes: int | None = None
    device: torch.device = torch.device("cpu")
    host: torch.device = torch.device("cpu")
    swap_tier: Tier = Tier.PAGEABLE
    kept_values: frozenset[str] = frozenset()
    recomputed_values: frozenset[str] = frozenset()
    swapped_values: frozenset[str] = frozenset()
    machine: Machine | None = None
    workspace: Callable[[fx.Node], int] = no_workspace
    options: Mapping[str, Option] = field(default_factory=dict)
    live: Liveness | None = None
    draws_once: bool = False


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of a Pipeline. `run` returns a graph (a rewrite) or decisions (a planner, which cannot change the graph).

    A planner's name starts with "plan". What it decides joins `ctx.plan` for the passes after it.

    `requires`: facts that must hold before; `provides`: facts it establishes, which are checked, not believed; `breaks`: facts it
    may destroy. `options`: every option it knows with its value; `run` finds them in `ctx.options`.
    """

    name: str
    run: Callable[[fx.Graph, Context], fx.Graph | tuple[Decision, ...]]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    breaks: frozenset[str] = frozenset()
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)

    @property
    def is_planner(self) -> bool:
        """Whether the pass decides; a rewrite may change the graph it is handed."""
        return self.name.startswith("plan")

    def with_options(self, options: Mapping[str, Option]) -> Pass:
        """The same pass with other values of its options. Raises ValueError for an unknown option or a value of another type."""
        for key, value in options.items():
            if key not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise ValueError(f"{self.name} has no option {key!r}; it has {known}")
            if type(value) is not type(self.options[key]):
                raise ValueError(f"{self.name}: {key}={value!r} is not of type {type(self.options[key]).__name__}")
        return replace(self, options={**self.options, **options})

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}{{{','.join(f'{k}={_option_text(v)}' for k, v in self.options.items())}}}"


@dataclass(frozen=True, slots=True)
class Row:
    """What a Pipeline's table says of the graph after one pass ("input": before the first)."""

    name: str
    nodes: int
    device_peak_bytes: int
    peak_node: str
    wall_s: float


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order they run. Its text, `str(pipeline)`, is what `parse_pipeline` reads."""

    passes: Sequence[Pass]

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def check(self, held: frozenset[str] = frozenset()) -> None:
        """Raises ValueError naming the passes when one requires a fact that does not hold there; `held` hold at the start."""
        for i, step in enumerate(self.passes):
            for fact in sorted(step.requires - held):
                raise ValueError(_why_missing(self.passes, i, fact))
            held = (held - step.breaks) | step.provides

    def run(self, graph: fx.Graph, ctx: Context | None = None, dump_dir: str | Path | None = None) -> fx.Graph:
        """The graph after all passes; `graph` itself is left alone.

        After each pass the graph is linted and verified with all facts that hold then. With `dump_dir`: `NN-<pass>.ir`,
        `NN-<pass>.diff`, `table.txt` and `table.json`, and `repro.ir` (the failing pass's input and the passes left) on failure.
        Raises ValueError before anything runs when the facts do not chain, and for a rewrite that decides; VerifyError when a pass
        breaks the graph.
        """
        ctx = ctx or Context(text.hint_bounds(graph))
        dump = _Dump(Path(dump_dir), ctx.bounds) if dump_dir is not None else None
        started = time.perf_counter()
        checked = Checked.of(graph, ctx.bounds, ctx.device_budget_bytes, ctx.workspace)
        held = frozenset(fact for fact in sorted(self._needed()) if checked.holds(fact))
        self.check(held)
        if dump is not None:
            dump.graph("input", graph, checked.curve, time.perf_counter() - started)
        if dump is None:
            graph = copy_graph(graph)
        for i, step in enumerate(self.passes):
            held = (held - step.breaks) | step.provides
            with _repro(dump, graph, Pipeline(self.passes[i:])):
                started = time.perf_counter()
                # The repro needs what a pass was handed; without a dump only planners must be kept from it.
                handed = copy_graph(graph) if dump is not None or step.is_planner else graph
                result = step.run(handed, replace(ctx, options=step.options))
                if isinstance(result, tuple):
                    if not step.is_planner:
                        raise ValueError(f"pass {step.name!r} decides: the name of a planner starts with 'plan'")
                    ctx = replace(ctx, plan=_extended(ctx.plan, result))
                else:
                    graph = result
                checked = _checked(step, graph, ctx, held)
                if dump is not None:
                    dump.graph(step.name, graph, checked.curve, time.perf_counter() - started)
        return graph

    def _needed(self) -> set[str]:
        """The facts that the passes need from the input graph."""
        needed: set[str] = set()
        seen: frozenset[str] = frozenset()
        for step in self.passes:
            needed |= step.requires - seen
            seen |= step.breaks | step.provides
        return needed


def _extended(plan: GraphPlan | None, decisions: tuple[Decision, ...]) -> GraphPlan:
    before = plan or GraphPlan("", (), (), Prediction(0, 0))
    return replace(before, decisions=before.decisions + decisions)


def get_pass(name: str, **options: Option) -> Pass:
    """The pass called `name` ("insert-release"): ours, or one of the entry-point group "fxoffload.passes".

    Raises ValueError for an unknown name or option, and for two passes of one name.
    """
    found = [entry.load() for entry in _registered(entry_points, tuple(sys.path)) if entry.name == name]
    module = f"{ENTRY_POINTS}.{name.replace('-', '_')}"
    if re.fullmatch(r"[a-z][a-z0-9-]*", name) and importlib.util.find_spec(module) is not None:
        found.append(getattr(importlib.import_module(module), "PASS", None))
    if len(found) > 1:
        raise ValueError(f"{len(found)} passes are called {name!r}; an entry point must not take a name that is taken")
    if not found or not isinstance(found[0], Pass):
        raise ValueError(f"there is no pass {name!r}")
    return found[0].with_options(options)


@functools.cache
def _registered(read: Callable[..., EntryPoints], path: tuple[str, ...]) -> EntryPoints:
    """What installed packages register, read anew where `path`, on which they are found, has changed: a search asks often."""
    return read(group=ENTRY_POINTS)


def pipeline_names(name: str) -> tuple[str, ...]:
    """The passes of the built-in pipeline of that name ("plan", "lower"), in order."""
    return importlib.import_module(ENTRY_POINTS).PIPELINES[name]  # type: ignore[no-any-return]


def parse_pipeline(description: str) -> Pipeline:
    """The Pipeline that "a,b{option=1}" describes. Raises ValueError quoting what it cannot read."""
    passes: list[Pass] = []
    rest = description.strip()
    while rest:
        match = _CALL.match(rest)
        if match is None:
            raise ValueError(f"pipeline: cannot read {rest!r}; write pass,pass{{option=1}}")
        passes.append(get_pass(match.group(1), **_options(match.group(2) or "")))
        rest = rest[match.end() :]
    return Pipeline(passes)


_CALL = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def _options(description: str) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for item in filter(None, map(str.strip, description.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"pipeline: expected option=value, got {item!r}")
        found[key.strip()] = _option(value.strip())
    return found


def _option(word: str) -> Option:
    if word in ("true", "false"):
        return word == "true"
    if re.fullmatch(r"-?\d+", word):
        return int(word)
    return float(word) if re.fullmatch(r"-?\d*\.?\d+(e[-+]?\d+)?", word) else word


def _option_text(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _why_missing(passes: Sequence[Pass], i: int, fact: str) -> str:
    """One line on why `fact` does not hold before pass `i`."""
    claim = f"pass {passes[i].name!r} requires {fact!r}"
    breakers = [p.name for p in passes[:i] if fact in p.breaks]
    if breakers:
        return f"{claim}, which {breakers[-1]!r} before it breaks"
    providers = [p.name for p in passes[i + 1 :] if fact in p.provides]
    if not providers:
        return f"{claim}: the graph does not have it and no pass before provides it"
    order = _order(passes)
    try:
        cycle = nx.find_cycle(order, passes[i].name)
    except nx.NetworkXNoCycle:
        good = ",".join(nx.lexicographical_topological_sort(order, key=[p.name for p in passes].index))
        return f"{claim}, which {providers[0]!r} provides only after it; an order that works: {good}"
    circle = ", ".join(f"{b!r} needs {order[a][b]['fact']!r} from {a!r}" for a, b in cycle)
    return f"{claim}: the facts go in a circle: {circle}"


def _order(passes: Sequence[Pass]) -> nx.DiGraph:
    """An edge from each pass that provides a fact to each that requires it."""
    order = nx.DiGraph()
    order.add_nodes_from(p.name for p in passes)
    for provider in passes:
        for user in passes:
            for fact in sorted(provider.provides & user.requires):
                if provider.name != user.name:
                    order.add_edge(provider.name, user.name, fact=fact)
    return order


def _checked(step: Pass, graph: fx.Graph, ctx: Context, held: frozenset[str]) -> Checked:
    try:
        checked = verified(graph, ctx.bounds, held, ctx.device_budget_bytes if "fits" in held else None, ctx.workspace)
    except VerifyError as error:
        raise VerifyError(f"after pass {step.name!r}: {error}") from error
    graph.lint()
    return checked


@contextmanager
def _repro(dump: _Dump | None, graph: fx.Graph, rest: Pipeline) -> Iterator[None]:
    """Keeps the graph that a pass fails on, with the passes that were left."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done and dump is not None:
            dump.write("repro.ir", f"// fxoffload opt repro.ir -p '{rest}'\n{text.render(graph, dump.bounds)}")


class _Dump:
    """The files of one Pipeline run."""

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.bounds = bounds
        self._folder = folder
        self._rows: list[Row] = []
        self._before = ""

    def write(self, name: str, content: str) -> None:
        (self._folder / name).write_text(content, encoding="utf-8")

    def graph(self, name: str, graph: fx.Graph, curve: LiveCurve, wall_s: float) -> None:
        """Writes the text of the graph after pass `name`, what the pass changed and the table so far."""
        stem = f"{len(self._rows):02d}-{name}"
        after = text.render(graph, self.bounds)
        self.write(f"{stem}.ir", after)
        if self._rows:
            self.write(f"{stem}.diff", text.diff(self._before, after))
        self._before = after
        self._rows.append(Row(name, len(graph.nodes), curve.peak_bytes, curve.peak_node, wall_s))
        self.write("table.json", json.dumps([asdict(row) for row in self._rows], indent=1) + "\n")
        self.write("table.txt", _table(self._rows))


def _table(rows: Sequence[Row]) -> str:
    lines = [f"{'pass':<24} {'nodes':>7} {'device peak':>12} {'wall ms':>9}  at"]
    for row in rows:
        peak = format_bytes(row.device_peak_bytes)
        lines.append(f"{row.name:<24} {row.nodes:>7} {peak:>12} {row.wall_s * 1e3:>9.1f}  {row.peak_node}")
    return "\n".join(lines) + "\n"
