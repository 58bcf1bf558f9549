"""Golden tests of passes: text in, text out, and three checks that the text alone cannot make.

A golden file holds cases, each an input and the text expected of it; "// -----" lines stand between all of them. Comment lines
that start an input say what the case shows; those of the form

    // plan {"kind": "recompute", "value": "a"}

are the decisions, written as in a plan file, that the passes apply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.fx as fx

from .. import text
from ..pipeline import Context, Pass, Pipeline, parse_pipeline
from ..plans import Decision, GraphPlan, Prediction, decision_from
from ..verify import FACTS, holds, verify
from .twins import assert_same_results

SEPARATOR = "// -----"
PLAN = "// plan "
# What a case's graph is read with: a compute device that differs from the host.
DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One input, the decisions it comes with, and the expected text ("" when it is still to be written)."""

    given: str
    expected: str
    decisions: tuple[Decision, ...]

    @property
    def title(self) -> str:
        """The first line, which says what the case shows."""
        return self.given.strip().splitlines()[0]


def check_golden(path: str | Path, passes: str | Pass | Sequence[Pass], update: bool = False, twin: bool = True) -> None:
    """Every case of the file holds: the passes (or their pipeline text) make the expected text of the input.

    Beside the text, of every case: the passes' facts chain; what held before and no pass breaks holds after; with `twin`, the
    numeric twin computes the same bits before and after. With `update` the file is rewritten with what the passes make.
    Raises AssertionError with the diff of the first case that differs, ValueError when an input has no expected text.
    """
    pipeline = _pipeline(passes)
    cases = golden_cases(path)
    made = [_made(case, pipeline, twin) for case in cases]
    if update:
        Path(path).write_text(f"\n{SEPARATOR}\n".join(part.strip() for case, got in zip(cases, made) for part in (case.given, got)) + "\n")
        return
    for number, (case, got) in enumerate(zip(cases, made), 1):
        difference = text.diff(case.expected.strip(), got.strip())
        assert not difference, f"{path}, case {number} ({case.title}):\n{difference}"


def golden_cases(path: str | Path) -> list[Case]:
    """The cases of a file. Raises ValueError when inputs and expected texts do not pair up."""
    parts = Path(path).read_text().split(f"\n{SEPARATOR}\n")
    if len(parts) % 2:
        raise ValueError(f"{path}: an input has no expected text after it")
    return [Case(given, expected, _decisions(given)) for given, expected in zip(parts[::2], parts[1::2])]


def _decisions(given: str) -> tuple[Decision, ...]:
    lines = [line for line in given.splitlines() if line.startswith(PLAN)]
    return tuple(decision_from(json.loads(line.removeprefix(PLAN))) for line in lines)


def _pipeline(passes: str | Pass | Sequence[Pass]) -> Pipeline:
    if isinstance(passes, str):
        return parse_pipeline(passes)
    return Pipeline([passes] if isinstance(passes, Pass) else passes)


def _made(case: Case, pipeline: Pipeline, twin: bool) -> str:
    bounds = text.parse_bounds(case.given)
    before = text.parse(case.given, DEVICE)
    plan = GraphPlan("", case.decisions, (), Prediction(0, 0))
    after = pipeline.run(before, Context(bounds, plan=plan, device=DEVICE, host=HOST))
    verify(after, bounds, _facts_after(before, pipeline))
    if twin:
        assert_same_results(before, after)
    return text.render(after, bounds, columns=False)


def _facts_after(graph: fx.Graph, pipeline: Pipeline) -> frozenset[str]:
    """The facts that the pipeline owes: those of its input that no pass breaks, and those its passes provide."""
    held = frozenset(fact for fact in FACTS if fact != "fits" and holds(graph, text.hint_bounds(graph), fact))
    for step in pipeline.passes:
        held = (held - step.breaks) | step.provides
    return held
