"""A Plan says *what*: frozen decisions by canonical name, per graph fingerprint, and what the simulator predicts of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

from .effects import Tier
from .errors import PlanError
from .explain import explanation
from .kernels import AttentionKernel
from .reasons import Gain, Reasons, reasons_from

SCHEMA = 2


@dataclass(frozen=True, slots=True)
class Reside:
    """Parameter or buffer `value` (its fqn) lives in `tier` between its uses."""

    value: str
    tier: Tier
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Gather:
    """Parameter `value` is copied to the device: started before node `start`, awaited before node `before`."""

    value: str
    start: str
    before: str


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Value `value` is copied to `tier`: started right after node `after`; its device bytes end right after node `until`."""

    value: str
    tier: Tier
    after: str
    until: str


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Value `value`, swapped out before, returns: started before node `start`, awaited before node `before`."""

    value: str
    start: str
    before: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The gradient `value` ("<parameter>.grad"), sent to the host where it is made, is awaited right after node `until`."""

    value: str
    until: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """Forward value `value` is not saved for backward but computed again there."""

    value: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """The device copies `values` ("<parameter>@<number>") come as one: started with the first that starts, awaited with the first that
    is awaited, gone with the last. They lie in it in this order."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The cross-entropy at node `value` is computed in `chunks` of rows, with their part of backward; the gradient of a trained head is
    summed in `blocks` of its classes. Where `value` is a product: what is read of its rows is computed in `chunks` of them."""

    value: str
    chunks: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Defer:
    """The output `value` is not made: the graph returns the rows that its product with the head would be made of."""

    value: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """The embedding `value` reads rows of its table where that lies on the host."""

    value: str


Decision = Reside | Gather | SwapOut | SwapIn | Sink | Recompute | Bucket | Chunk | Defer | Lookup
_KINDS: dict[str, type] = {k.__name__.lower(): k for k in (Reside, Gather, SwapOut, SwapIn, Sink, Recompute, Bucket, Chunk, Defer, Lookup)}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of one Plan; unknown is None.

    `device_peak_bytes`, `host_peak_bytes`, `disk_bytes`: highest sums of live bytes per tier over a whole step, the optimizer's states
    and the gradients that a caller who accumulates keeps meanwhile included.
    `step_s`: seconds of one step on the Machine. `moved_bytes`: bytes per channel and step.
    """

    device_peak_bytes: int
    host_peak_bytes: int
    disk_bytes: int = 0
    step_s: float | None = None
    peak_node: str = ""
    moved_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Decisions for one Graph, the values its forward saves for backward, and its own prediction.

    `reasons`: what `Plan.explain` tells beyond them; `kernels`: what is assumed to compute attention, () where there is none. Both are
    None in plans written before there were any.
    `replays`: the device is told the step once, as a recording that is replayed; else it is called op by op.
    """

    label: str
    decisions: tuple[Decision, ...]
    saved: tuple[str, ...]
    predicted: Prediction
    reasons: Reasons | None = None
    kernels: tuple[AttentionKernel, ...] | None = None
    replays: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Residency of every parameter plus one GraphPlan per graph fingerprint. Immutable; `with_graph` makes a larger one.

    `gains`: what one more of a resource would give, where planning was asked to find out (`fxoffload.plan(explain=True)`).
    `made_with`: versions of what decides how a model's graph looks; {} in plans written before they were noted.
    """

    device_budget_bytes: int
    host_budget_bytes: int | None
    machine: str
    numerics: str
    residency: tuple[Reside, ...]
    graphs: Mapping[str, GraphPlan]
    notes: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()
    made_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def predicted(self) -> Prediction:
        """The worst of the graphs' predictions: highest peaks, longest step."""
        all_of = [graph.predicted for graph in self.graphs.values()]
        worst = max(all_of, key=lambda p: p.device_peak_bytes)
        longest = self.longest.predicted
        return replace(
            worst,
            host_peak_bytes=max(p.host_peak_bytes for p in all_of),
            disk_bytes=max(p.disk_bytes for p in all_of),
            step_s=longest.step_s,
            moved_bytes=longest.moved_bytes,
        )

    @property
    def longest(self) -> GraphPlan:
        """The graph with the longest step."""
        return max(self.graphs.values(), key=lambda graph: graph.predicted.step_s or 0.0)

    @property
    def physical_limit_s(self) -> float | None:
        """Seconds that no schedule of the longest step's work goes below (`account.limits`); None in plans without reasons."""
        return None if self.longest.reasons is None else self.longest.reasons.physical_limit_s

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions: residency first, then graph by graph."""
        return self.residency + tuple(d for graph in self.graphs.values() for d in graph.decisions)

    @property
    def id(self) -> str:
        """Twelve hex digits of the plan's text: equal plans have equal ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def count(self) -> dict[str, int]:
        """Number of decisions by kind."""
        counts = {kind: 0 for kind in sorted(_KINDS)}
        for decision in self.decisions:
            counts[type(decision).__name__.lower()] += 1
        return counts

    def with_graph(self, fingerprint: str, graph: GraphPlan) -> Plan:
        """The same plan that also covers `fingerprint`."""
        return replace(self, graphs={**self.graphs, fingerprint: graph})

    def with_kept_gradients(self, host_bytes: int, disk_bytes: int) -> Plan:
        """The same plan for a caller who accumulates: so many bytes of gradients more lie in host memory and on disk."""
        more = {
            fingerprint: replace(graph, predicted=replace(
                graph.predicted, host_peak_bytes=graph.predicted.host_peak_bytes + host_bytes,
                disk_bytes=graph.predicted.disk_bytes + disk_bytes))
            for fingerprint, graph in self.graphs.items()
        }
        return replace(self, graphs=more)

    def to_json(self) -> str:
        """Sorted keys, one decision per line."""
        head = {
            "schema": SCHEMA,
            "device_budget_bytes": self.device_budget_bytes,
            "host_budget_bytes": self.host_budget_bytes,
            "machine": self.machine,
            "numerics": self.numerics,
            "notes": list(self.notes),
            "gains": [asdict(gain) for gain in self.gains],
            "made_with": dict(sorted(self.made_with.items())),
        }
        lines = ["{"] + [f'  "{k}": {json.dumps(head[k])},' for k in sorted(head)]
        lines += ['  "residency": ['] + _rows(self.residency, "    ") + ["  ],", '  "graphs": {']
        for position, (fingerprint, graph) in enumerate(sorted(self.graphs.items())):
            lines += [f'    "{fingerprint}": {{', f'      "label": {json.dumps(graph.label)},']
            lines += [f'      "predicted": {json.dumps(asdict(graph.predicted), sort_keys=True)},']
            if graph.replays:
                lines += ['      "replays": true,']
            if graph.reasons is not None:
                lines += [f'      "reasons": {json.dumps(graph.reasons.to_dict(), sort_keys=True)},']
            if graph.kernels is not None:
                lines += ['      "kernels": ['] + _join([json.dumps(asdict(one)) for one in graph.kernels], "        ") + ["      ],"]
            lines += ['      "saved": ['] + _strings(graph.saved, "        ") + ["      ],"]
            lines += ['      "decisions": ['] + _rows(graph.decisions, "        ") + ["      ]"]
            lines += ["    }" + ("," if position + 1 < len(self.graphs) else "")]
        return "\n".join(lines + ["  }", "}"]) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON; a file under `path` is replaced only when the new one is complete."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")
        partial.write_text(self.to_json())
        partial.replace(target)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan in the file. Raises PlanError when it is not one, ValueError when the file is missing."""
        try:
            raw = json.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ValueError(f"plan: no file {str(path)!r}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{path}: not a plan: {error}") from None
        return plan_from(raw, str(path))

    def diff(self, other: Plan) -> str:
        """Lines that differ, "-" of this plan and "+" of the other; "" when they are equal."""
        mine, theirs = self.to_json().splitlines(), other.to_json().splitlines()
        gone, new = set(theirs), set(mine)
        lines = [f"- {line.strip()}" for line in mine if line not in gone]
        return "\n".join(lines + [f"+ {line.strip()}" for line in theirs if line not in new])

    def explain(self) -> str:
        """The plan for people: what binds, the physical limit beside the prediction, what the search tried, what more would give.

        A plan holds no graph, so all of this is data that was stored with the decisions (`GraphPlan.reasons`, `gains`); what an older
        plan lacks is left out.
        """
        return explanation(self)


def versions_here() -> dict[str, str]:
    """Versions of the packages that decide how a model's graph looks; of a build ("+cpu") its version."""
    return {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers", "peft")}


def plan_from(raw: object, source: str) -> Plan:
    """A Plan from parsed JSON. Raises PlanError naming `source` and the field that is wrong."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise PlanError(f"{source}: not a plan of schema {SCHEMA}")
    try:
        graphs = {
            fingerprint: GraphPlan(
                g["label"], tuple(decision_from(d) for d in g["decisions"]), tuple(g["saved"]), Prediction(**g["predicted"]),
                reasons_from(g.get("reasons")), None if g.get("kernels") is None else tuple(AttentionKernel(**k) for k in g["kernels"]),
                g.get("replays", False) is True,
            )
            for fingerprint, g in raw["graphs"].items()
        }
        residency = tuple(decision_from(d) for d in raw["residency"])
        if not all(isinstance(r, Reside) for r in residency):
            raise ValueError("residency holds something else than reside")
        return Plan(
            raw["device_budget_bytes"], raw["host_budget_bytes"], raw["machine"], raw["numerics"],
            residency, graphs, tuple(raw["notes"]), tuple(Gain(**gain) for gain in raw.get("gains", ())),  # type: ignore[arg-type]
            {str(name): str(version) for name, version in raw.get("made_with", {}).items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{source}: damaged plan: {error!r}") from None


def decision_from(raw: Mapping[str, object]) -> Decision:
    """A Decision from parsed JSON. Raises KeyError for an unknown kind, TypeError or ValueError for a wrong field."""
    fields = dict(raw)
    kind = _KINDS[str(fields.pop("kind"))]
    if "tier" in fields:
        fields["tier"] = Tier(fields["tier"])
    if kind is Bucket:
        fields["values"] = _names(fields["values"])
    return kind(**fields)  # type: ignore[no-any-return]


def _names(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, (list, tuple)) or not all(isinstance(name, str) for name in raw):
        raise TypeError(f"not a list of names: {raw!r}")
    return tuple(raw)


def neighbours(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Names of the parameters that come in buckets, in the order in which their bytes lie side by side on the host: then most buckets
    are one copy."""
    return tuple(dict.fromkeys(copy.rsplit("@", 1)[0] for one in decisions if isinstance(one, Bucket) for copy in one.values))


def _rows(decisions: Iterable[Decision], indent: str) -> list[str]:
    rows = [
        json.dumps({"kind": type(d).__name__.lower(), **{k: str(v) if isinstance(v, Tier) else v for k, v in asdict(d).items()}})
        for d in decisions
    ]
    return _join(rows, indent)


def _strings(names: Iterable[str], indent: str) -> list[str]:
    return _join([json.dumps(name) for name in names], indent)


def _join(rows: list[str], indent: str) -> list[str]:
    return [indent + row + ("," if i + 1 < len(rows) else "") for i, row in enumerate(rows)]
