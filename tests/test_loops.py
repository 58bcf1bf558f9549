"""Programs of elementwise ops and sums, written in the finest sizes that their views show: the same numbers, one kind of loop."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxoffload.fusion import program, run_program, write
from fxoffload.runtime.loops import common_parts, in_finest_sizes
from fxoffload.torch_compat import compiled_by_inductor, traced_program

# Backward of a norm of heads, which are moved, with what an adapter's dropout reads of it.
NORM_OF_HEADS = (
    "%a0 = input; %a1 = input; %a2 = input; %s0 = input; %s1 = input; %s2 = input; %s3 = input; %v0 = aten._to_copy %a0, dtype=f32; "
    "%v1 = aten._to_copy %a1, dtype=f32; %v2 = aten.mul.Tensor %v0, %v1; %v4 = aten.sum.dim_IntList %v2, [3], true; "
    "%v5 = aten.mul.Tensor %v4, %a2; %v10 = aten.expand %v5, [%s2, %s1, %s3, %s0]; %v11 = aten.mul.Tensor %v10, %v1; "
    "%v12 = aten.add.Tensor %v0, %v11; %v13 = aten._to_copy %v12, dtype=bf16; %v14 = aten.clone %v13, memory_format=contiguous_format; "
    "%v15 = aten.reshape %v14, [%s2, %s1, -1]; %v16 = aten.mul.Tensor %v15, 0.5; return [%v14, %v16]")
# Heads put beside each other, before and after.
MOVED_HEADS = (
    "%a0 = input; %s0 = input; %s1 = input; %v0 = aten._to_copy %a0, dtype=bf16; %v2 = aten.permute %v0, [0, 2, 1, 3]; "
    "%v3 = aten.clone %v2, memory_format=contiguous_format; %v4 = aten.reshape %v3, [%s0, %s1, -1]; %v5 = aten._to_copy %v4, dtype=f32; "
    "return [%v3, %v5]")
# What is summed by heads is made, and written, in rows of all of them, of numbers for each column and for each row.
SUMMED_BY_HEADS = (
    "%a0 = input; %a1 = input; %a2 = input; %s0 = input; %s1 = input; %s2 = input; %v0 = aten.mul.Tensor %a0, %a1; "
    "%v1 = aten.add.Tensor %v0, %a2; %v2 = aten.reshape %v1, [%s0, %s1, %s2, -1]; %v3 = aten.mean.dim %v2, [-1]; return [%v1, %v3]")
PROGRAMS = {
    "norm of heads": (NORM_OF_HEADS, [((2, 6, 4, 8), (192, 8, 48, 1)), ((2, 6, 4, 8), (192, 32, 8, 1)), ((2, 6, 4, 1), (24, 4, 1, 1))], (8, 6, 2, 4), [2, 6, 4, 8]),
    "moved heads": (MOVED_HEADS, [((2, 4, 6, 8), (192, 48, 8, 1))], (2, 6), [2, 6, 4, 8]),
    "summed by heads": (SUMMED_BY_HEADS, [((2, 6, 32), (192, 32, 1)), ((32,), (1,)), ((2, 6, 1), (6, 1, 1))], (2, 6, 4), [2, 6, 4, 8]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_written_has_the_finest_sizes_and_the_same_bits(name: str) -> None:
    text, layouts, sizes, finest = PROGRAMS[name]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(shape, generator=generator).as_strided(shape, stride) for shape, stride in layouts]
    expected = run_program(operands, text, sizes)
    given = [*operands, *(torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in expected)]

    def body(*inputs: torch.Tensor) -> tuple[()]:
        for out, made in zip(inputs[len(operands) :], program(text)(*inputs[: len(operands)], *sizes), strict=True):
            write(out, made)
        return ()

    with FakeTensorMode() as mode:
        traced = traced_program(body, [mode.from_tensor(v) for v in given])
    graph = in_finest_sizes(traced.graph)
    assert graph is not traced.graph
    stores = graph.find_nodes(op="call_function", target=write)
    assert len(stores) == len(expected)
    for store, whole in zip(stores, expected, strict=True):
        if whole.numel() == given[0].numel():
            assert list(store.args[0].meta["val"].shape) == finest
    inputs = [v.as_strided(p.meta["val"].shape, p.meta["val"].stride()) for v, p in zip(given, graph.find_nodes(op="placeholder"), strict=True)]
    fx.GraphModule(torch.nn.Module(), graph)(*inputs)
    for out, right in zip(given[len(operands) :], expected, strict=True):
        assert torch.equal(out, right)


@pytest.mark.integration
def test_a_kernel_computes_its_result_where_it_lies_and_in_no_memory_of_its_own() -> None:
    """Of a result that is laid out otherwise than what it is made of: `copy_` would put it down in their order and then copy it."""
    text = "%a0 = input; %a1 = input; %v0 = aten.mul.Tensor %a0, %a1; %v1 = aten.transpose.int %v0, 1, 2; %v2 = aten.clone %v1, memory_format=contiguous_format; return [%v2]"
    operands, out = [torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)], torch.empty(2, 8, 4, 16)

    def body(*inputs: torch.Tensor) -> tuple[()]:
        write(inputs[-1], program(text)(*inputs[:-1])[0])
        return ()

    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(v) for v in (*operands, out)]
    kernel, _, n_allocations = compiled_by_inductor(traced_program(body, inputs), inputs, False, write)
    kernel([*operands, out])
    assert not n_allocations and torch.equal(out, run_program(operands, text, [])[0])


def test_a_program_whose_sizes_are_alike_stays_as_it_is() -> None:
    with FakeTensorMode():
        traced = traced_program(lambda a, b, out: (write(out, a * b + 1), ())[1], [torch.empty(4, 6), torch.empty(6), torch.empty(4, 6)])
    assert in_finest_sizes(traced.graph) is traced.graph


def test_nothing_is_taken_apart_where_there_are_no_elements() -> None:
    with FakeTensorMode():
        traced = traced_program(lambda a, out: (write(out, a.reshape(0, 4, 6) * 2), ())[1], [torch.empty(0, 24), torch.empty(0, 4, 6)])
    assert in_finest_sizes(traced.graph) is traced.graph


@pytest.mark.parametrize("a, b, expected", [
    ((24,), (4, 6), (4, 6)),
    ((6, 4), (2, 12), (2, 3, 4)),
    ((6, 4), (4, 6), None),
    ((6,), (6,), (6,)),
    ((), (), ()),
    (("n", 12), ("n*3", 4), ("n", 3, 4)),
    (("n*m",), ("n", "m"), ("n", "m")),
    (("n",), (2, "n"), None),
])
def test_common_parts(a: tuple[object, ...], b: tuple[object, ...], expected: tuple[object, ...] | None) -> None:
    def parts(of: tuple[object, ...]) -> tuple[sympy.Expr, ...]:
        return tuple(sympy.sympify(n, locals={s: sympy.Symbol(s, integer=True, positive=True) for s in "nm"}) for n in of)

    assert common_parts(parts(a), parts(b)) == common_parts(parts(b), parts(a)) == (None if expected is None else parts(expected))
