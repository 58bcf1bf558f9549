"""What a report shows: every lowered graph of a session, a dump folder or a plan, simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.fx as fx

from .. import ops, text
from ..graph import Bounds, border_of, output_of
from ..liveness import Liveness, liveness
from ..machine import Machine, default_machine, load_machine
from ..plans import GraphPlan, Plan
from ..simulate import Simulation, simulate
from ..timeline import Timeline, timeline

if TYPE_CHECKING:
    from typing import TypeAlias

    from ..session import Session

    Source: TypeAlias = Session | Plan | str | Path

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class View:
    """One lowered graph and what the simulator says of it. `border`: index of the backward node, None without one."""

    label: str
    graph: fx.Graph
    live: Liveness
    simulation: Simulation
    timeline: Timeline
    border: int | None

    @property
    def totals(self) -> list[int]:
        """Device bytes at every node, what is fixed included."""
        return [sum(row) + self.simulation.fixed_bytes for row in self.simulation.curve]

    @property
    def peak_index(self) -> int:
        """The first node at the peak."""
        totals = self.totals
        return totals.index(max(totals))


@dataclass(frozen=True)
class Report:
    """`views` is empty for a plan alone: a plan holds no graph."""

    title: str
    plan: Plan | None
    machine: Machine
    views: tuple[View, ...]


def report_of(source: Source) -> Report:
    """The Report of a Session, a Plan, a plan file or a dump folder. Raises ValueError for a path that is neither."""
    if isinstance(source, Plan):
        return Report(f"plan {source.id}", source, machine_of(source), ())
    if isinstance(source, (str, Path)):
        return _from_path(Path(source))
    graphs = {label: (graph, text.hint_bounds(graph)) for label, graph in source.graphs.items()}
    return _report(type(source.model).__name__, source.plan, source.machine, graphs)


def memory_nodes(graph: fx.Graph) -> Counter[str]:
    """How many nodes of each memory op the graph has."""
    specs = (ops.spec_of(node) for node in graph.nodes)
    return Counter(spec.name for spec in specs if spec is not None)


def machine_of(plan: Plan | None) -> Machine:
    """The Machine a plan names, where it ships or its file is still there, else the default."""
    try:
        return load_machine(plan.machine) if plan is not None else default_machine("cpu")
    except ValueError:
        return default_machine("cpu")


def _from_path(path: Path) -> Report:
    if path.is_file():
        alone = Plan.load(path)
        return Report(path.name, alone, machine_of(alone), ())
    last = last_dumps(path)
    if not last:
        raise ValueError(f"{path}: holds no graph dumps (*.ir); it should be the dump_dir of a compile")
    plan = Plan.load(path / PLAN_FILE) if (path / PLAN_FILE).is_file() else None
    graphs = {}
    for file in last:
        content = file.read_text(encoding="utf-8")
        graph = text.parse(content)
        label = str(output_of(graph).meta.get(text.LABEL, "graph"))
        graphs[label if label not in graphs else f"{label} ({file.parent.name})"] = (graph, text.parse_bounds(content))
    return _report(path.name, plan, machine_of(plan), graphs)


def last_dumps(folder: Path) -> list[Path]:
    """The last graph of every pipeline run under `folder`."""
    found: dict[Path, Path] = {}
    for path in sorted(folder.rglob("[0-9]*-*.ir")):
        number, before = int(path.name.split("-")[0]), found.get(path.parent)
        if before is None or number >= int(before.name.split("-")[0]):
            found[path.parent] = path
    return [found[parent] for parent in sorted(found)]


def _report(title: str, plan: Plan | None, machine: Machine, graphs: Mapping[str, tuple[fx.Graph, Bounds]]) -> Report:
    planned = {graph.label: graph for graph in plan.graphs.values()} if plan is not None else {}
    views = tuple(_view(label, graph, bounds, machine, planned.get(label)) for label, (graph, bounds) in graphs.items())
    return Report(title, plan, machine, views)


def _view(label: str, graph: fx.Graph, bounds: Bounds, machine: Machine, planned: GraphPlan | None) -> View:
    simulation = simulate(graph, bounds, machine)
    # What no value of this graph owns (other residents, overheads) is what the plan's peak has beyond the graph's own.
    fixed = max(0, planned.predicted.device_peak_bytes - simulation.device_peak_bytes) if planned is not None else 0
    if fixed:
        simulation = simulate(graph, bounds, machine, fixed)
    live = liveness(graph, bounds)
    border = border_of(graph)
    return View(label, graph, live, simulation, timeline(graph, bounds, machine), live.index[border] if border is not None else None)
