from __future__ import annotations

import math
import operator
import time

import pytest
import samples
import torch
import torch.fx as fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import fxoffload
from fxoffload import ops, text
from fxoffload.effects import Tier
from fxoffload.graph import INFO, Bounds, NodeInfo, Role, border_of, by_name, copy_node, info, name_of, set_info
from fxoffload.liveness import liveness

aten = torch.ops.aten


def assert_same_graph(a: fx.Graph, b: fx.Graph) -> None:
    """Same targets, arguments, names, infos and fake values, node by node."""
    assert len(a.nodes) == len(b.nodes)
    for x, y in zip(a.nodes, b.nodes):
        assert (x.op, name_of(x)) == (y.op, name_of(y))
        assert info(x) == info(y)
        if x.op == "call_function":
            assert x.target is y.target
        assert comparable(x.args) == comparable(y.args)
        assert comparable(x.kwargs) == comparable(y.kwargs)
        assert comparable(x.meta.get("val")) == comparable(y.meta.get("val"))


def comparable(value: object) -> object:
    """A value without what a text leaves out: which device, which ShapeEnv."""
    if isinstance(value, fx.Node):
        return "%" + name_of(value)
    if isinstance(value, (list, tuple)):
        return (type(value) is tuple, [comparable(item) for item in value])
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.dtype, [str(n) for n in value.shape], [str(n) for n in value.stride()])
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, slice):
        return ("slice", comparable((value.start, value.stop, value.step)))
    return "device" if isinstance(value, torch.device) else str(value) if isinstance(value, torch.SymInt) else value


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_captured_graph_returns_from_its_text_unchanged(mode: str) -> None:
    graph, _, _ = samples.captured_step(mode)
    for node in graph.nodes:
        node.meta.setdefault("val", None)
    written = text.render(graph)
    again = text.parse(written)
    assert text.render(again) == written
    assert_same_graph(graph, again)
    assert text.fingerprint(again) == text.fingerprint(graph)


@given(samples.programs(transfers=True))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_random_program_returns_from_its_text_unchanged(program: str) -> None:
    try:
        graph = text.parse(program)
    except ValueError as error:  # the random release may stand before its value
        assert "is not defined" in str(error)
        return
    assert text.render(graph, columns=False) == program
    assert text.render(text.parse(text.render(graph))) == text.render(graph)


NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
CONSTANTS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), NAMES,
        st.sampled_from([torch.float32, torch.bool, torch.uint8, torch.strided, torch.preserve_format, torch.channels_last]),
        st.sampled_from([torch.float8_e4m3fn, 1 + 2j, ..., slice(None, 3, -1)]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)  # fmt: skip
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64])
SIZES = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(NAMES, st.lists(CONSTANTS, max_size=3), DTYPES, SIZES, st.booleans()), max_size=6, unique_by=lambda c: c[0]))
@settings(max_examples=60, deadline=None)
def test_any_name_constant_dtype_and_stride_returns_from_text(calls: list[tuple[str, list[object], torch.dtype, list[int], bool]]) -> None:
    graph, mode = fx.Graph(), FakeTensorMode()
    previous: list[object] = []
    for name, constants, dtype, sizes, transposed in calls:
        node = graph.call_function(operator.add, (*previous, *constants), {"key": constants})
        with mode:
            value = torch.empty(sizes, dtype=dtype)
        node.meta = {"val": value.permute(list(range(len(sizes)))[::-1]) if transposed else value, INFO: NodeInfo(name)}
        previous = [node]
    graph.output(tuple(previous))
    again = text.parse(text.render(graph))
    assert_same_graph(graph, again)
    assert text.render(again) == text.render(graph)


def test_roles_tiers_fqns_origins_and_the_border_return_from_text() -> None:
    graph = text.parse(samples.LOWERED.replace("%g: ", "%y~0: ").replace("%g", "%y~0").replace("2.0\n%a@0:", '2.0 {origin="y"}\n%a@0:'))
    nodes = by_name(text.parse(text.render(graph)))
    assert info(nodes["w"]) == NodeInfo("w", Role.PARAMETER, "w", Tier.PINNED, trainable=True)
    assert info(nodes["y~0"]).origin == "y"
    assert border_of(graph) is not None
    live = liveness(graph, Bounds({"s0": 4}))
    assert {s.name: s.tier for s in live.first if s.tier is not Tier.DEVICE} == {
        "w": Tier.PINNED, "a^0/out": Tier.PINNED, "w.grad/out": Tier.PINNED,
    }  # fmt: skip


def test_the_samples_return_from_their_text_unchanged() -> None:
    for sample in (samples.LOWERED, samples.LOGICAL):
        assert text.render(text.parse(sample), columns=False) == sample


def test_a_parsed_symbol_is_as_large_as_its_maximum_and_named_as_written() -> None:
    graph = text.parse('graph "g" (s0 <= 7)\n%x: f32[s0,2*s0+1] = input\nreturn (%x)')
    (x, _) = graph.nodes
    live = liveness(graph, text.parse_bounds(text.render(graph)))
    assert [s.n_bytes for s in live.first] == [7 * 15 * 4]
    assert str(x.meta["val"].shape[0]) == "s0"


@pytest.mark.parametrize("size", ["s0*s1", "(s0//2)", "s0-1", "Max(3,s1)", "Mod(s0,3)", "s0**2", "2*(((s0*s1)//4))+1", "ModularIndexing(s0,2,3)"])
def test_a_size_expression_returns_from_text(size: str) -> None:
    written = f'graph "g" (s0 <= 6, s1 <= 8)\n%x: f32[{size}] = input {{role=batch}}\nreturn (%x)\n'
    assert text.render(text.parse(written), text.parse_bounds(written), columns=False) == written


def test_scalars_that_are_values_return_from_text() -> None:
    written = (
        'graph "g" (s0 <= 6)\n%n: int(s0) = input {role=symbol}\n%half: int((s0//2)) = operator.floordiv %n, 2\n'
        "%f: float(0.5) = operator.truediv %half, 6\n%five: int(5) = operator.add %half, 2\n"
        "%big: bool(s0>3) = operator.gt %n, 3\nreturn (%f, %five, %big)\n"
    )
    assert text.render(text.parse(written), columns=False) == written


def test_columns_say_what_is_alive_on_the_device() -> None:
    lines = text.render(text.parse(samples.LOWERED)).splitlines()
    rows = {line.rsplit("| ", 1)[1].split(" = ")[0].split(":")[0]: line for line in lines[2:]}
    w, row = 8 * 8 * 4, 4 * 8 * 4
    assert rows["%h"].split("|")[0].strip() == f"{w} B"
    assert rows["%a"].split("|")[1].strip() == f"{2 * row} B"
    assert rows["fxo.release %h"].split("|")[1].strip() == f"{row} B"
    assert rows["%gh"].split("|")[2].strip() == f"{3 * row} B"


def captured_on(device: str, host: str) -> fx.Graph:
    """One gather, one creation and one sink, as a capture for that pair of devices has them."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        on_host, on_device = torch.empty(4, device=host), torch.empty(4, device=device)
    weight = graph.placeholder("w")
    weight.meta = {"val": on_host, INFO: NodeInfo("w", Role.PARAMETER, "w", Tier.PAGEABLE)}
    gathered = graph.call_function(ops.gather, (weight, torch.device(device)))
    mask = graph.call_function(aten.full.default, ([4], 0.0), {"device": torch.device(device), "pin_memory": False})
    total = graph.call_function(aten.add.Tensor, (gathered, mask))
    sunk = graph.call_function(ops.sink, (total, torch.device(host)))
    for node, value in ((gathered, on_device), (mask, on_device), (total, on_device), (sunk, on_host)):
        node.meta["val"] = value
    graph.output((sunk,))
    return graph


def test_the_fingerprint_does_not_know_the_device() -> None:
    texts = {text.neutral_text(captured_on(*pair)) for pair in [("cpu", "cpu"), ("cpu", "meta"), ("cuda:0", "cpu"), ("cuda", "meta")]}
    assert len(texts) == 1


def step_of(header: str, sizes: str, size: str) -> str:
    return text.fingerprint(text.parse(f"""graph "a"{header}
%x: f32[{sizes}] = input {{role=batch}}
%w: f32[8] = input {{role=parameter, fqn="w"}}
%v: f32[{sizes}] = aten.expand %x, [{size}, 8]
%y: f32[{sizes}] = aten.mul.Tensor %v, %w
return ((%y), ())"""))


def test_the_fingerprint_does_not_know_a_batchs_sizes_symbolic_or_not() -> None:
    assert step_of(" (s3 <= 4)", "s3,8", "4") == step_of(" (s1 <= 7)", "s1,8", "7") == step_of("", "5,8", "5")


def test_the_fingerprint_knows_ranks_and_parameters_sizes() -> None:
    other = text.parse('graph "a"\n%w: f32[8] = input {role=parameter, fqn="w"}\nreturn ((%w), ())')
    larger = text.parse('graph "a"\n%w: f32[9] = input {role=parameter, fqn="w"}\nreturn ((%w), ())')
    assert text.fingerprint(other) != text.fingerprint(larger)
    one, two = (text.parse(f'graph "a"\n%x: f32[{sizes}] = input\nreturn ((%x), ())') for sizes in ("4", "4,4"))
    assert text.fingerprint(one) != text.fingerprint(two)


@pytest.mark.parametrize("change", [("%a, 2.0", "%a, 3.0"), ('fqn="w"', 'fqn="v"'), ("%gx", "%dx"), ("aten.relu", "aten.neg")])
def test_the_fingerprint_changes_with_the_graph(change: tuple[str, str]) -> None:
    assert text.fingerprint(text.parse(samples.LOGICAL)) != text.fingerprint(text.parse(samples.LOGICAL.replace(*change)))


def test_a_diff_shows_the_inserted_line_and_nothing_that_only_costs_other_bytes() -> None:
    before = text.render(text.parse(samples.LOGICAL))
    after = text.render(text.parse(samples.LOGICAL.replace("%y:", "fxo.release %h\n%y:")))
    changed = [line for line in text.diff(before, after).splitlines() if line[0] in "+-"]
    assert changed == ["+fxo.release %h"]
    assert text.diff(before, before) == ""


def test_a_diff_shows_a_moved_line_twice() -> None:
    lines = [f"line {i}" for i in range(40)]
    moved = [*lines[:5], *lines[6:30], lines[5], *lines[30:]]
    changed = [line for line in text.diff("\n".join(lines), "\n".join(moved)).splitlines() if line[0] in "+-"]
    assert changed == ["-line 5", "+line 5"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("%a: f32[8] = aten.relu %missing", "%missing is not defined"),
        ("%a: f32[8] = aten.no_such_op %x", "unknown op"),
        ("%a: f32[zz] = aten.relu %x", "no maximum of zz"),
        ("%a: f33[8] = aten.relu %x", "unknown word 'f33'"),
        ("%x: f32[8] = aten.relu %x", "two nodes are called"),
        ("%a: f32[8] = aten.relu %x, [1, 2", "expected ]"),
        ('%a: f32[__import__("os")] = aten.relu %x', "is not a size"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="line 3: ") as caught:
        text.parse(f'graph "g"\n%x: f32[8] = input\n{line}\nreturn (%x)')
    assert complaint in str(caught.value)
    assert line in str(caught.value)


def test_a_text_without_header_is_refused() -> None:
    with pytest.raises(ValueError, match="a graph starts with"):
        text.parse("%x: f32[8] = input")


def test_what_has_no_text_is_refused_by_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (x, None, None, [])))
    with pytest.raises(ValueError, match="^cond: a call of"):
        text.render(graph)


def test_ten_thousand_nodes_are_written_in_a_second_and_a_half() -> None:
    graph = text.parse('graph "big" (s0 <= 4)\n%v0: f32[s0,8] = input\n%v1: f32[s0,8] = aten.add.Tensor %v0, %v0, alpha=2\nreturn (%v1)')
    v0, last, output = graph.nodes
    for i in range(2, 10_000):
        with graph.inserting_before(output):
            added = copy_node(graph, last, lambda node: node)
        added.args = (last, v0)
        set_info(added, name=f"v{i}")
        last = added
    output.args = ((last,),)
    assert len(graph.nodes) == 10_001
    started = time.process_time()
    text.render(graph, Bounds({"s0": 4}))
    assert time.process_time() - started < 1.5


class Named(torch.nn.Module):
    """A parameter and an argument called as fx and the ops call nodes of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.nn.Parameter(torch.ones(8, 8))
        self.backward = torch.nn.Parameter(torch.ones(8))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return ((output @ self.output + self.backward) ** 2).sum()


def test_parameters_and_inputs_may_be_called_output_and_backward() -> None:
    model = fxoffload.compile(Named(), torch.ones(4, 8), device="cpu", device_budget="1MiB", pins=[fxoffload.pin("*", "host")])
    model(torch.ones(4, 8)).backward()
    (graph,) = model.fxoffload.graphs.values()
    again = text.parse(text.render(graph))
    assert_same_graph(graph, again)
    assert text.render(again) == text.render(graph)
    assert {"output", "backward", "output.grad", "backward.grad"} <= set(by_name(again))
    model.fxoffload.close()


def test_a_node_that_is_called_output_returns_from_text() -> None:
    graph = fx.Graph()
    node = graph.call_function(operator.add, (1, 2), name="output")
    node.meta = {"val": 3}
    graph.output((node,))
    assert_same_graph(graph, text.parse(text.render(graph)))
