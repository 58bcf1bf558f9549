"""Sweeps: one capture per shape, the predictions of `plan`, refusals as rows, the page."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import zoo
from torch import nn
from zoo import FAMILIES

import fxoffload
from fxoffload import cli
from fxoffload.api import captured, planning_options
from fxoffload.machine import load_machine
from fxoffload.report import pareto
from fxoffload.router import Router
from fxoffload.sweeps import Row

pytestmark = pytest.mark.integration

GIB = 1 << 30
BUDGETS = ["150KiB", "450KiB", "1GiB"]


def small_lora() -> nn.Module:
    return zoo.lora(num_hidden_layers=1).model


@functools.cache
def swept() -> tuple[list[Row], int]:
    """The rows of two shapes, two machines and three budgets, and how often a step was captured."""
    captures, capture = [], Router.capture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "capture", lambda *call: (captures.append(1), capture(*call)))
        rows = fxoffload.sweep(
            small_lora(), batch=[1, 2], sequence=32, device_budget=BUDGETS, machine=["cpu", "rtx3090"])
    return rows, len(captures)


def test_every_point_is_a_row_and_every_shape_is_captured_once() -> None:
    rows, n_captures = swept()
    assert n_captures == 2
    points = [(row.batch, row.sequence, row.machine, row.device_budget_bytes) for row in rows]
    budgets = [150 * 1024, 450 * 1024, GIB]
    assert points == [(b, 32, m, n) for b in (1, 2) for m in ("cpu", "rtx3090") for n in budgets]


def test_a_row_has_the_predictions_of_the_plan_made_alone() -> None:
    rows, _ = swept()
    for machine, budget in (("cpu", 450 * 1024), ("rtx3090", GIB)):
        row = next(r for r in rows if (r.batch, r.machine, r.device_budget_bytes) == (2, machine, budget))
        alone = fxoffload.plan(small_lora(), (2, 32), device_budget=budget, machine=machine).predicted
        assert (row.device_peak_bytes, row.host_peak_bytes, row.step_s) == (alone.device_peak_bytes, alone.host_peak_bytes, alone.step_s)
        assert row.tokens_per_s == pytest.approx(64 / alone.step_s)


def test_a_point_that_does_not_fit_is_a_row_with_its_true_shortfall() -> None:
    row = next(r for r in swept()[0] if (r.batch, r.machine, r.device_budget_bytes) == (2, "cpu", 150 * 1024))
    assert not row.fits and row.step_s is None and "bytes short at" in row.reason
    plan = functools.partial(fxoffload.plan, small_lora(), (2, 32), machine="cpu")
    plan(device_budget=row.device_budget_bytes + row.shortfall_bytes)
    with pytest.raises(fxoffload.PlanError):
        plan(device_budget=row.device_budget_bytes + row.shortfall_bytes - 1)


def test_budgets_of_one_machine_share_their_searches_and_machines_do_not() -> None:
    model, cpu, rtx = small_lora(), load_machine("cpu"), load_machine("rtx3090")
    with captured(model, (2, 32), planning_options(model, cpu, GIB, None, 0, "adamw", "auto", None, "bitwise", ()), cpu) as session:
        study, found = session.study, []
        for machine, n_bytes in ((cpu, GIB), (cpu, 450 * 1024), (cpu, 400 * 1024), (rtx, GIB)):
            study.plan(replace(study.planning.budgets, device_bytes=n_bytes), machine)
            found.append(len(study.searches.found))
    assert found[0] == found[1] == found[2] < found[3]


def test_the_budget_card_is_the_machines_and_more_than_it_has_is_refused_by_name() -> None:
    sweep = functools.partial(fxoffload.sweep, FAMILIES["llama"]().model, batch=1, sequence=16)
    card, larger = sweep(device_budget=["card", "80GiB"], machine="rtx3090")
    assert (card.fits, card.device_budget_bytes) == (True, load_machine("rtx3090").device_capacity_bytes)
    assert not larger.fits and larger.reason == "rtx3090 has 24.00 GiB of device memory" and larger.shortfall_bytes is None


@pytest.mark.parametrize(("changed", "message"), [
    ({"machine": ["h200", "rtx9000"]}, "rtx9000.*rtx3090"),
    ({"device_budget": [GIB, "1 lb"]}, "device_budget: cannot read '1 lb'"),
    ({"device_budget": 0}, "device_budget: must be more than 0"),
    ({"batch": [1, 0]}, "batch: must be positive"),
    ({"sequence": "32"}, "sequence: must be positive"),
    ({"machine": []}, "at least one"),
    ({"device_budget": "card", "machine": "cpu"}, "device_capacity_bytes, which machine 'cpu'"),
])
def test_a_bad_axis_is_refused_by_its_name(changed: dict[str, object], message: str) -> None:
    axes = {"batch": 1, "sequence": 16, "device_budget": GIB} | changed
    with pytest.raises(ValueError, match=message):
        fxoffload.sweep(FAMILIES["llama"]().model, **axes)


def row(machine: str, budget: int, step_s: float | None, batch: int = 1, reason: str = "") -> Row:
    return Row(machine, batch, 8, budget, step_s is not None, budget, budget, step_s, None, None if step_s else 7, reason)


def test_the_picture_has_a_point_for_what_fits_and_a_cross_for_what_does_not() -> None:
    rows = [row("a", GIB, None, reason="a < b"), row("a", 2 * GIB, 3.0), row("a", 4 * GIB, 2.0), row("b", 2 * GIB, 1.0, batch=2)]
    root = ElementTree.fromstring(pareto.svg(rows))
    found = {tag: [e for e in root.iter() if e.tag.endswith("}" + tag)] for tag in ("circle", "path", "polyline")}
    assert {tag: len(elements) for tag, elements in found.items()} == {"circle": 3, "path": 1, "polyline": 1}
    (x1, y1), (x2, y2) = [tuple(map(float, point.split(","))) for point in found["polyline"][0].get("points").split()]
    assert x1 < x2 and y1 < y2, "more memory to the right, fewer seconds further down"
    assert "a < b" in "".join(found["path"][0].itertext())


def test_the_page_loads_nothing_and_says_why_each_point_was_refused(tmp_path: Path) -> None:
    pareto.write([row("a", GIB, None, reason="<b>short</b>"), row("a", 2 * GIB, 3.0)], tmp_path / "s.html", "x & y")
    content = (tmp_path / "s.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']|@import|https?://(?!www\.w3\.org/2000/svg)|<script|<!--""", content)
    assert "&lt;b&gt;short&lt;/b&gt;" in content and "<b>" not in content and "x &amp; y" in content and "7 B short" in content


def test_the_command_prints_the_table_and_writes_the_rows_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAMILIES["llama"]().model.config.save_pretrained(tmp_path)
    words = ["plan", "--model", str(tmp_path), "--batch", "1,2", "--seq", "16", "--device-budget", "10KiB,1GiB", "--machine", "cpu",
             "--sweep", "--json", str(tmp_path / "s.json"), "--html", str(tmp_path / "s.html")]
    assert cli.main(words) == 0
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [(r["batch"], r["fits"]) for r in rows] == [(1, False), (1, True), (2, False), (2, True)]
    out = capsys.readouterr().out
    assert all(word in out for word in ("tokens/s", "short", "1.00 GiB"))
    assert (tmp_path / "s.html").read_text().count("<circle") == 2


@pytest.mark.parametrize(("more", "message"), [
    (["--batch", "1,2"], "--batch: several values need --sweep"),
    (["--seq", "8,16"], "--seq: several values need --sweep"),
    (["--device-budget", "1GiB,2GiB"], "--device-budget: several values need --sweep"),
    (["--machine", "cpu,h200"], "--machine: several values need --sweep"),
    (["--batch", "1,x", "--sweep"], "Invalid value for '--batch': 'x'"),
    (["--device-budget", "card"], "--device-budget: cannot read 'card'"),
    (["--sweep", "--explain"], "--save and --explain are for one"),
])
def test_values_that_do_not_go_together_are_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--batch": "1", "--seq": "8", "--device-budget": "1GiB", "--machine": "cpu"}
    words = ["plan", "--model", "/no", *more, *(w for name, value in given.items() if name not in more for w in (name, value))]
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
