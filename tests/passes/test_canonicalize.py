"""canonicalize: sizes are asked for where their values are there."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxoffload import ops
from fxoffload.graph import INFO, NodeInfo, Role
from fxoffload.pipeline import Context, get_pass

aten = torch.ops.aten


def step() -> fx.Graph:
    """A forward, the border, and a backward that asks for sizes of forward's value, of the tangent, and for their product, first of all."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    value = fake.from_tensor(torch.empty(3, 4), static_shapes=False)
    size = value.shape[0]
    graph = fx.Graph()

    def put(node: fx.Node, found: object, role: Role | None = None) -> fx.Node:
        node.meta["val"] = found
        if role is not None:
            node.meta[INFO] = NodeInfo(node.name, role)
        return node

    x = put(graph.placeholder("x"), value, Role.BATCH)
    tangent = put(graph.placeholder("tangent"), value, Role.TANGENT)
    a = put(graph.call_function(aten.sin.default, (x,)), value)
    b = put(graph.call_function(aten.cos.default, (a,)), value)
    graph.call_function(ops.backward)
    of_a = put(graph.call_function(aten.sym_size.int, (a, 0)), size)
    of_tangent = put(graph.call_function(aten.sym_size.int, (tangent, 0)), size)
    twice = put(graph.call_function(operator.mul, (of_a, 2)), size * 2)
    late = put(graph.call_function(operator.mul, (of_tangent, of_a)), size * size)
    c = put(graph.call_function(aten.new_zeros.default, (tangent, [twice])), value)
    d = put(graph.call_function(aten.new_zeros.default, (tangent, [late])), value)
    graph.output(((b,), (c, d)))
    return graph


def test_a_size_is_asked_for_as_soon_as_its_value_is_there_and_a_tangents_size_in_backward() -> None:
    graph = get_pass("canonicalize").run(step(), Context())
    graph.lint()
    names = [str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else node.op for node in graph.nodes]
    assert names == [
        "placeholder", "placeholder", "sin.default", "sym_size.int", "mul", "cos.default", "backward.default", "sym_size.int", "mul",
        "new_zeros.default", "new_zeros.default", "output"]


def test_a_slice_that_cuts_nothing_off_goes_and_its_gradient_stays_where_that_is_laid_out_anew() -> None:
    turned, plain = torch.empty(2, 4, 3, device="meta").transpose(1, 2), torch.empty(2, 3, 4, device="meta")
    graph = fx.Graph()

    def put(target: object, args: tuple[object, ...], val: torch.Tensor) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = val
        return node

    inputs = [graph.placeholder("a"), graph.placeholder("b")]
    for node, val in zip(inputs, (turned, plain), strict=True):
        node.meta |= {"val": val, INFO: NodeInfo(node.name, Role.BATCH)}
    whole = put(aten.slice.Tensor, (inputs[0], 2, 0, 9), turned)
    anew = put(aten.slice_backward.default, (inputs[0], [2, 3, 4], 2, 0, 9, 1), plain)
    same = put(aten.slice_backward.default, (inputs[1], [2, 3, 4], 2, 0, 9, 1), plain)
    graph.output((tuple(put(aten.sin.default, (one,), one.meta["val"]) for one in (whole, anew, same)), ()))
    graph = get_pass("canonicalize").run(graph, Context())
    read = [node.args[0] for node in graph.find_nodes(op="call_function", target=aten.sin.default)]
    assert [one.op for one in read] == ["placeholder", "call_function", "placeholder"] and read[1].target is aten.slice_backward.default
