"""inspect, diff and opt on the files that a real pipeline writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fxoffload import cli, text
from fxoffload.effects import Tier
from fxoffload.graph import copy_graph, set_info
from fxoffload.pipeline import Context, parse_pipeline
from fxoffload.plans import Gather, GraphPlan, Plan, Prediction, Recompute, Reside, SwapIn, SwapOut
from fxoffload.simulate import simulate
from fxoffload.machine import default_machine

STEP = """\
graph "train" (s0 <= 4)
%x: f32[s0,8] = input {role=batch}
%w: f32[8,8]@pageable = input {role=parameter, fqn="w", trainable=true}
%t: f32[s0,8] = input {role=tangent}
%a: f32[s0,8] = aten.mm %x, %w
%b: f32[s0,8] = aten.sin %a
%c: f32[s0,8] = aten.exp %b
fxo.backward
%gc: f32[s0,8] = aten.mul.Tensor %t, %b
%cos: f32[s0,8] = aten.cos %a
%ga: f32[s0,8] = aten.mul.Tensor %gc, %cos
%wt: f32[8,8;1,8] = aten.t %w
%gx: f32[s0,8] = aten.mm %ga, %wt
%xt: f32[8,s0;1,8] = aten.t %x
%gw: f32[8,8] = aten.mm %xt, %ga
return ((%c), (%gx, %gw))
"""
PASSES = "sink-gradients,insert-checkpoint,recompute,insert-gather,lower-gather,insert-swap,hoist-transfers,sink-waits,insert-release"
DECISIONS = (
    Recompute("b"), SwapOut("a", Tier.PAGEABLE, "b", "b"), Gather("w", "a", "a"), SwapIn("a", "cos", "cos"), Gather("w", "gx", "gx"),
)
BUDGET = 2048


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump folder as compile(dump_dir=...) writes it: the plan, and every pass of its one graph."""
    folder = tmp_path_factory.mktemp("dump")
    graph, bounds = text.parse(STEP, torch.device("cpu", 0)), text.parse_bounds(STEP)
    captured = copy_graph(graph)
    for node in captured.find_nodes(op="placeholder"):
        set_info(node, tier=Tier.DEVICE)
    decided = GraphPlan("train", DECISIONS, (), Prediction(0, 0))
    context = Context(bounds, plan=decided, device=torch.device("cpu", 0))
    lowered = parse_pipeline(PASSES).run(graph, context, folder / "train")
    found = simulate(lowered, bounds, default_machine("cpu"), 100)
    predicted = Prediction(found.device_peak_bytes, 512, 0, found.step_s, found.peak_node, found.moved_bytes)
    plan = Plan(BUDGET, None, "cpu", "bitwise", (Reside("w", Tier.PAGEABLE, 256),), {})
    plan.with_graph(text.fingerprint(captured), GraphPlan("train", DECISIONS, (), predicted)).save(folder / "plan.json")
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def page_data(path: Path) -> dict[str, object]:
    return json.loads(re.search(r"^const DATA = (.*);$", path.read_text(), re.MULTILINE).group(1))  # type: ignore[union-attr]


def test_inspect_of_a_dump_folder_explains_the_plan_and_every_pass(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "inspect", dump)
    assert "device peak" in out and "of 2.00 KiB" in out
    for name in ("input", *PASSES.split(",")):
        assert re.search(rf"^{name} +\d+ ", out, re.MULTILINE), name


def test_inspect_writes_a_page_that_loads_nothing_and_shows_the_peak_of_the_plan(dump: Path, tmp_path: Path) -> None:
    assert cli.main(["inspect", str(dump), "--html", str(tmp_path / "r.html")]) == 0
    content = (tmp_path / "r.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']|@import|https?://|\bfetch\(|XMLHttpRequest""", content)
    view = page_data(tmp_path / "r.html")["views"][0]  # type: ignore[index]
    plan = Plan.load(dump / "plan.json")
    assert (view["peak_bytes"], view["fixed_bytes"]) == (plan.predicted.device_peak_bytes, 100)
    drawn = max(sum(point[2:6]) for point in view["points"]) + view["fixed_bytes"]
    assert drawn == plan.predicted.device_peak_bytes
    assert sum(n for _, _, n, _ in view["largest"]) == view["peak_bytes"] - view["fixed_bytes"]  # fewer than ten are alive
    assert view["memory_nodes"]["swap_in"] == 3


def test_inspect_of_a_plan_alone_makes_a_page_without_a_timeline(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "device peak" in run(capsys, "inspect", dump / "plan.json", "--html", tmp_path / "p.html")
    data = page_data(tmp_path / "p.html")
    assert data["views"] == []
    assert len(data["plan"]["graphs"][0]["decisions"]) == len(DECISIONS)  # type: ignore[index]


def test_inspect_writes_a_trace_whose_lanes_do_not_overlap(dump: Path, tmp_path: Path) -> None:
    assert cli.main(["inspect", str(dump), "--trace", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) == 3  # compute, h2d, d2h
    for spans in lanes.values():
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(sorted(spans), sorted(spans)[1:]))
    peak = max(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert peak == Plan.load(dump / "plan.json").predicted.device_peak_bytes


def test_inspect_refuses_a_trace_of_a_plan_alone(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(dump / "plan.json"), "--trace", str(tmp_path / "t.json")]) == 2
    assert "a plan alone holds no graph" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_opt_with_the_plan_lowers_the_dumped_input_to_the_dumped_result(dump: Path, tmp_path: Path) -> None:
    given, out = dump / "train" / "00-input.ir", tmp_path / "out.ir"
    assert cli.main(["opt", str(given), "-p", PASSES, "--plan", str(dump / "plan.json"), "-o", str(out)]) == 0
    assert out.read_text() == (dump / "train" / "09-insert-release.ir").read_text()


def test_opt_runs_one_pass_and_prints_the_graph(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "opt", dump / "train" / "08-sink-waits.ir", "-p", "insert-release")
    assert out == (dump / "train" / "09-insert-release.ir").read_text()


def test_opt_decides_and_applies_in_one_pipeline(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan-recompute{keep=costly,blocks=-1},insert-checkpoint,recompute,plan-swap,insert-gather,lower-gather,insert-swap,insert-release"
    out = run(capsys, "opt", dump / "train" / "01-sink-gradients.ir", "-p", words, "--device-budget", "1KiB")
    assert 'origin="b"' in out and "fxo.swap_in %w" in out


@pytest.mark.parametrize(
    ("passes", "status", "message"),
    [
        ("insert-relese", 2, "there is no pass 'insert-relese'"),
        ("recompute{x=1}", 2, "recompute has no option 'x'"),
        ("insert-release,hoist-transfers,insert-gather,insert-release", 2, "requires 'lowered'"),
        ("insert-gather", 1, "after pass 'insert-gather'"),
    ],
)
def test_opt_says_what_is_wrong_in_one_line(passes: str, status: int, message: str, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["opt", str(dump / "train" / "00-input.ir"), "-p", passes]) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_opt_refuses_a_plan_for_another_graph(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["opt", str(dump / "train" / "09-insert-release.ir"), "-p", "recompute", "--plan", str(dump / "plan.json")]) == 1
    assert "has no decisions for this graph" in capsys.readouterr().err


def test_diff_shows_what_a_pass_did_and_nothing_of_the_byte_columns(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "diff", dump / "train" / "04-insert-gather.ir", dump / "train" / "05-lower-gather.ir")
    changed = [line for line in out.splitlines()[2:] if line[0] in "-+"]
    assert changed[0] == "-%w@0: f32[8,8] = fxo.gather %w, device"
    assert all("%w@" in line for line in changed)


def test_diff_of_two_dump_folders_compares_plans_and_lowered_graphs(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "diff", dump, dump) == "equal\n"
    other = tmp_path / "other"
    (other / "train").mkdir(parents=True)
    (other / "plan.json").write_text((dump / "plan.json").read_text().replace('"device_budget_bytes": 2048', '"device_budget_bytes": 4096'))
    (other / "train" / "00-input.ir").write_text(STEP)
    out = run(capsys, "diff", dump, other)
    assert '+ "device_budget_bytes": 4096' in out and "-fxo.release %gc" in out


def test_diff_refuses_two_kinds(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(dump), str(dump / "plan.json")]) == 2
    assert "one is a dump folder and the other a plan" in capsys.readouterr().err


def test_the_pages_curve_keeps_every_peak_however_few_points_it_draws() -> None:
    from fxoffload.report.html import sample

    totals = [i * 37 % 101 for i in range(10_000)]
    totals[7_777] = 10**6
    chosen = sample(totals, 500, [123])
    assert len(chosen) <= 510 and {123, 7_777, 0, 9_999} <= set(chosen)


def test_the_picture_is_an_image_of_the_same_peak(dump: Path) -> None:
    from xml.etree import ElementTree

    from fxoffload.report.svg import svg

    picture = svg(dump)
    ElementTree.fromstring(picture)
    assert "backward" in picture and "budget 2.00 KiB" in picture


def test_a_page_of_names_that_look_like_markup_shows_them_as_text(dump: Path, tmp_path: Path) -> None:
    from fxoffload.report import html

    plan = Plan.load(dump / "plan.json")
    evil = plan.with_graph("x", GraphPlan("</script><b>", (Recompute("</script>"),), (), plan.predicted))
    html.write(evil, tmp_path / "e.html")
    assert (tmp_path / "e.html").read_text().count("</script>") == 1
