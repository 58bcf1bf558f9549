from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import samples
import torch.fx as fx

from fxoffload import ops, pipeline, text
from fxoffload.errors import VerifyError
from fxoffload.graph import Bounds, copy_graph
from fxoffload.pipeline import Context, Pass, Pipeline, get_pass, parse_pipeline
from fxoffload.plans import Decision
from fxoffload.verify import FACTS

PROGRAM = 'graph "g"\n%x: f32[8] = input {role=batch}\n%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\nreturn (%b)\n'


def keep(graph: fx.Graph, ctx: Context) -> fx.Graph:
    return graph


def named(name: str, requires: str = "", provides: str = "", breaks: str = "") -> Pass:
    return Pass(name, keep, *(frozenset(words.split()) for words in (requires, provides, breaks)))


def release_everything_at_once(graph: fx.Graph, ctx: Context) -> fx.Graph:
    value = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_after(value):
        graph.call_function(ops.release, (value,))
    return graph


# --- the facts chain ---------------------------------------------------------------------------------------------------------


def test_a_fact_that_comes_too_late_is_an_error_that_names_both_passes_and_an_order() -> None:
    with pytest.raises(ValueError, match="'a' requires 'lowered', which 'b' provides only after it; an order that works: b,a"):
        Pipeline([named("a", "lowered"), named("b", "", "lowered")]).check()


def test_a_fact_that_a_pass_broke_is_an_error_that_names_both_passes() -> None:
    with pytest.raises(ValueError, match="'c' requires 'lowered', which 'b' before it breaks"):
        Pipeline([named("a", "", "lowered"), named("b", "", "", "lowered"), named("c", "lowered")]).check()


def test_facts_that_go_in_a_circle_are_an_error_that_names_both_passes() -> None:
    with pytest.raises(ValueError, match="in a circle: .*'b' needs 'awaited' from 'a'"):
        Pipeline([named("a", "lowered", "awaited"), named("b", "awaited", "lowered")]).check()


def test_a_fact_that_nobody_provides_is_an_error() -> None:
    with pytest.raises(ValueError, match="'a' requires 'lowered': the graph does not have it and no pass before provides it"):
        Pipeline([named("a", "lowered")]).run(text.parse(samples.LOGICAL))


def test_a_fact_that_is_true_of_the_input_needs_no_pass() -> None:
    Pipeline([named("a", "lowered awaited functional")]).run(text.parse(samples.LOWERED))


def test_the_chain_is_checked_before_any_pass_runs() -> None:
    def fail(graph: fx.Graph, ctx: Context) -> fx.Graph:
        raise AssertionError("ran")

    with pytest.raises(ValueError, match="requires 'released'"):
        Pipeline([Pass("first", fail), named("second", "released")]).run(text.parse(PROGRAM))


def test_the_chain_of_facts_that_hold_is_kept_when_a_pass_breaks_and_another_restores() -> None:
    Pipeline([named("a", "", "lowered"), named("b", "lowered", "", "lowered"), named("c", "", "lowered"), named("d", "lowered")]).check()


# --- running -----------------------------------------------------------------------------------------------------------------


def test_a_fact_that_a_pass_only_claims_is_refused_and_the_pass_named() -> None:
    with pytest.raises(VerifyError, match="after pass 'liar': %a .* has 0 releases instead of one"):
        Pipeline([named("liar", "", "released")]).run(text.parse(PROGRAM))


def test_a_held_fact_is_checked_after_every_pass() -> None:
    drop = Pass("drop", lambda graph, ctx: (graph.erase_node(graph.find_nodes(op="call_function", target=ops.release)[0]), graph)[1])
    with pytest.raises(VerifyError, match="after pass 'drop'"):
        Pipeline([get_pass("insert-release"), drop]).run(text.parse(PROGRAM))


def test_the_budget_is_checked_from_the_pass_on_that_claims_it() -> None:
    ctx = Context(device_budget_bytes=95)
    Pipeline([named("before")]).run(text.parse(PROGRAM), ctx)
    with pytest.raises(VerifyError, match="after pass 'fit': %b needs 96 bytes"):
        Pipeline([named("before"), named("fit", "", "fits")]).run(text.parse(PROGRAM), ctx)


def test_a_pipeline_leaves_its_input_alone() -> None:
    graph = text.parse(PROGRAM)
    result = parse_pipeline("insert-release").run(graph)
    assert text.render(graph, columns=False) == PROGRAM
    assert "fxo.release %a" in text.render(result)


def test_a_planner_cannot_change_the_graph_and_says_by_its_name_that_it_is_one() -> None:
    def spoil(graph: fx.Graph, ctx: Context) -> tuple[Decision, ...]:
        graph.erase_node(graph.find_nodes(op="call_function", target=ops.release)[0])
        return ()

    released = parse_pipeline("insert-release").run(text.parse(PROGRAM))
    assert text.render(Pipeline([Pass("plan-nothing", spoil)]).run(released)) == text.render(released)
    with pytest.raises(ValueError, match="pass 'nothing' decides: the name of a planner starts with 'plan'"):
        Pipeline([Pass("nothing", spoil)]).run(released)


def test_a_dump_has_text_diff_and_table_row_of_every_pass(tmp_path: Path) -> None:
    parse_pipeline("insert-release").run(text.parse(PROGRAM), dump_dir=tmp_path / "dump")
    files = {path.name: path.read_text() for path in (tmp_path / "dump").iterdir()}
    assert sorted(files) == ["00-input.ir", "01-insert-release.diff", "01-insert-release.ir", "table.json", "table.txt"]
    assert "+fxo.release %a" in files["01-insert-release.diff"]
    assert text.render(text.parse(files["00-input.ir"]), columns=False) == PROGRAM
    first, second = json.loads(files["table.json"])
    assert (first["name"], first["nodes"], first["device_peak_bytes"], first["peak_node"]) == ("input", 4, 96, "b")
    assert (second["name"], second["nodes"]) == ("insert-release", 5)
    assert "96 B" in files["table.txt"]


def test_a_failing_pass_leaves_its_input_and_the_passes_that_were_left(tmp_path: Path) -> None:
    wrong = Pass("wrong", release_everything_at_once)
    with pytest.raises(VerifyError, match="(?s)after pass 'wrong'.*> .*%b: f32"):
        Pipeline([named("fine"), wrong, named("last")]).run(text.parse(PROGRAM), dump_dir=tmp_path)
    repro = (tmp_path / "repro.ir").read_text()
    assert "'wrong,last'" in repro.splitlines()[0]
    assert text.render(text.parse(repro), columns=False) == PROGRAM


def test_a_pass_that_raises_leaves_a_repro_too(tmp_path: Path) -> None:
    def fail(graph: fx.Graph, ctx: Context) -> fx.Graph:
        raise KeyError("missing")

    with pytest.raises(KeyError):
        Pipeline([Pass("fails", fail)]).run(text.parse(PROGRAM), dump_dir=tmp_path)
    assert (tmp_path / "repro.ir").exists()


def test_a_run_that_succeeds_leaves_no_repro(tmp_path: Path) -> None:
    Pipeline([named("fine")]).run(text.parse(PROGRAM), dump_dir=tmp_path)
    assert not (tmp_path / "repro.ir").exists()


# --- names, options, text ----------------------------------------------------------------------------------------------------


class _Entry(EntryPoint):
    def load(self) -> Pass:
        return Pass(self.name, keep, options={"distance": 1, "eager": False})


def entries(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = [_Entry(name=name, value="third.party:PASS", group="fxoffload.passes") for name in names]
    monkeypatch.setattr(pipeline, "entry_points", lambda group: found)


def test_a_pass_comes_from_an_entry_point_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    entries(monkeypatch, "third-party")
    made = parse_pipeline("third-party{distance=3, eager=true},insert-release")
    assert [p.name for p in made.passes] == ["third-party", "insert-release"]
    assert made.passes[0].options == {"distance": 3, "eager": True}
    assert str(made) == "third-party{distance=3,eager=true},insert-release"
    assert str(parse_pipeline(str(made))) == str(made)


def test_a_pass_finds_its_options_in_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    look = Pass("look", lambda graph, ctx: (seen.append(ctx.options), graph)[1], options={"distance": 1})
    Pipeline([look.with_options({"distance": 5})]).run(text.parse(PROGRAM))
    assert seen == [{"distance": 5}]


def test_an_entry_point_that_takes_a_name_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    entries(monkeypatch, "insert-release")
    with pytest.raises(ValueError, match="2 passes are called 'insert-release'"):
        get_pass("insert-release")


@pytest.mark.parametrize("name", ["no-such-pass", "__init__", "os", "../pipeline", "insert_release{"])
def test_an_unknown_pass_is_the_callers_mistake(name: str) -> None:
    with pytest.raises(ValueError, match="there is no pass"):
        get_pass(name)


def test_an_unknown_option_or_one_of_another_type_is_the_callers_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="insert-release has no option 'speed'; it has none"):
        get_pass("insert-release", speed=1)
    entries(monkeypatch, "third-party")
    with pytest.raises(ValueError, match="distance='far' is not of type int"):
        parse_pipeline("third-party{distance=far}")


@pytest.mark.parametrize("words", ["insert-release;x", "{a=1}", "insert-release{a", "insert-release{a}"])
def test_a_pipeline_text_that_cannot_be_read_is_quoted(words: str) -> None:
    with pytest.raises(ValueError, match="pipeline: "):
        parse_pipeline(words)


def test_every_fact_that_a_pass_of_ours_names_has_a_checker() -> None:
    folder = Path(pipeline.__file__).parents[1] / "passes"
    names = [path.stem.replace("_", "-") for path in folder.glob("*.py") if "PASS = " in path.read_text()]
    assert "insert-release" in names
    for name in names:
        found = get_pass(name)
        assert (found.requires | found.provides | found.breaks) <= FACTS.keys(), name
        assert found.name == name


def test_a_copied_graph_has_the_same_text() -> None:
    graph = text.parse(samples.LOWERED)
    assert text.render(copy_graph(graph), Bounds({"s0": 4})) == text.render(graph, Bounds({"s0": 4}))


def test_a_copied_graph_finds_and_names_nodes_as_one_made_node_by_node() -> None:
    graph = text.parse(samples.LOWERED)
    copied, made = copy_graph(graph), fx.Graph()
    made.output(made.graph_copy(graph, {}))
    for one in (copied, made):
        one.lint()
        release = one.find_nodes(op="call_function", target=ops.release)[-1]
        with one.inserting_before(release):
            one.call_function(ops.release, release.args)
        one.erase_node(release)
    assert [(n.op, n.name, n.target, str(n.args), len(n.users)) for n in copied.nodes] == [
        (n.op, n.name, n.target, str(n.args), len(n.users)) for n in made.nodes]
    assert len(copied.nodes) == len(graph.nodes) and not {*copied.nodes} & {*graph.nodes}
