"""Autograd Functions around Triton kernels: each call one op, the bits of plain PyTorch inside the budget, without a card too."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.fx as fx
from runs import fault, rows
from torch import nn
from zoo import FAMILIES

import fxoffload
from fxoffload import functions, replays, text
from fxoffload.graph import Bounds, module_path, output_of
from fxoffload.testing.simulated_device import SimulatedDevice
from fxoffload.work import work_of

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

if not isinstance(tl.sum, InterpretedFunction) and not torch.cuda.is_available():
    pytest.skip("kernels without a card: TRITON_INTERPRET=1, as `make test` sets it", allow_module_level=True)

import triton_functions  # noqa: E402
from triton_functions import CASES, Gate, Loss, Norm  # noqa: E402

from fxoffload.triton_kernels import _tensors_of, _written, is_kernel, launches, launches_noted, written_parameters  # noqa: E402

pytestmark = pytest.mark.integration
Tensor = torch.Tensor


def restored(self: Any, on_device: tuple[Any, ...], on_host: list[Any], kwargs: dict[str, Any], kwargs_on_host: dict[str, Any]) -> None:
    """What the interpreter does with what a kernel wrote; its own keeps the storages in a function that refers to itself."""
    for there, here in zip((*on_device, *kwargs.values()), (*on_host, *kwargs_on_host.values()), strict=True):
        if isinstance(there, Tensor):
            there.untyped_storage().copy_(here.untyped_storage())


@pytest.mark.parametrize("name", [
    pytest.param("triton", marks=pytest.mark.slow), "triton-loss", pytest.param("triton-lora", marks=pytest.mark.slow)])
def test_they_train_bit_equal_inside_the_budget(name: str, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, name, CASES[name])
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", restored)
    found = list(rows(name, "fxsim", simulated_device, (1.0, 0.6)))
    for row in found:
        assert not row.refused and not fault(row, found[0]), (fault(row, found[0]), row)


def lowered(model: nn.Module, *batch: Tensor) -> fx.Graph:
    compiled: Any = fxoffload.compile(model, batch, device="cpu", device_budget="1GiB")
    compiled(*batch).sum().backward()
    (graph,) = compiled.fxoffload.graphs.values()
    compiled.fxoffload.close()
    return graph  # type: ignore[no-any-return]


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in (functions.forward_op, functions.backward_op)]


def bounds_of(node: fx.Node) -> Bounds:
    return output_of(node.graph).meta[text.BOUNDS]  # type: ignore[no-any-return]


def said(node: fx.Node) -> dict[str, Any]:
    return functions._said(str(node.args[1]))


class Normed(nn.Module):
    def __init__(self, width: int = 64, in_place: bool = True) -> None:
        super().__init__()
        self.weight, self.in_place = nn.Parameter(torch.ones(width)), in_place

    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight, 1e-6, self.in_place)  # type: ignore[no-any-return]


def test_a_call_is_one_op_and_so_are_its_gradients_where_the_module_stands() -> None:
    graph = lowered(nn.Sequential(nn.Linear(64, 64), Normed()), torch.randn(4, 64))
    forward, backward = calls(graph)
    assert (said(forward)["forward"], said(backward)["backward"]) == ("triton_functions:Norm",) * 2
    assert module_path(forward).endswith("1")
    assert text.render(text.parse(text.render(graph))) == text.render(graph)


def test_only_what_is_written_in_place_is_copied() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Normed())
    forward, backward = calls(lowered(model, torch.randn(4, 64)))
    assert said(forward)["copied"] == [] and said(backward)["copied"] == [3]  # the result's gradient
    model[1].in_place = False
    assert [said(one)["copied"] for one in calls(lowered(model, torch.randn(4, 64)))] == [[], []]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return Gate.apply(self.a(x), self.b(x))  # type: ignore[no-any-return]


def test_operands_that_backward_writes_over_are_copied() -> None:
    graph = lowered(Gated(), torch.randn(8, 32))
    assert said(calls(graph)[1])["copied"] == [0, 1]


class Lossy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return Loss.apply(self.linear(x), targets)[0]  # type: ignore[no-any-return]


def test_a_function_that_reads_a_value_is_not_recorded_and_what_it_may_write_is_copied() -> None:
    graph = lowered(Lossy(), torch.randn(8, 16), torch.randint(0, 32, (8,)))
    assert all(said(one)["reads"] and said(one)["copied"] == [0] for one in calls(graph))
    assert [replays._obstacle(one) for one in calls(graph)] == ["reads a value on the host"] * 2
    assert [replays._obstacle(one) for one in calls(lowered(Gated(), torch.randn(8, 32)))] == [None, None]


def test_sizes_may_change_from_call_to_call() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Normed())
    plain, compiled = nn.Sequential(nn.Linear(64, 64), Normed()), None
    plain.load_state_dict(model.state_dict())
    compiled = fxoffload.compile(model, (torch.randn(6, 64),), device="cpu", device_budget="1GiB")
    for rows_ in (6, 3, 5):
        x = torch.randn(rows_, 64)
        for one in (plain, compiled):
            one.zero_grad()
            one(x).square().sum().backward()
        for p, q in zip(plain.parameters(), compiled.parameters()):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)
    assert len(compiled.fxoffload.graphs) == 1  # type: ignore[union-attr]


def test_torch_has_its_functions_back_after_a_capture() -> None:
    lowered(Gated(), torch.randn(8, 32))
    assert "apply" not in vars(Gate) and Gate in functions.launching_functions()
    a, b = torch.randn(8, requires_grad=True), torch.randn(8)
    Gate.apply(a.clone(), b).sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None


def test_several_captures_at_once_share_what_is_left_whole() -> None:
    with functions.as_ops((Gate,)):
        with functions.as_ops((Gate, Norm)):
            assert "apply" in vars(Norm)
        assert "apply" in vars(Gate) and "apply" not in vars(Norm)
    assert "apply" not in vars(Gate) and not torch._dynamo.trace_rules.is_callable_allowed(Gate)


def test_an_interrupt_at_any_line_leaves_nothing_replaced_beyond_the_next_capture() -> None:
    for n in itertools.count():
        n_lines = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal n_lines
            # No signal is looked for between a block's last call and the one that leaves it.
            if event == "line" and "with _lock" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                n_lines += 1
            if n_lines > n:
                raise KeyboardInterrupt
            return count

        sys.settrace(lambda frame, event, argument: count if frame.f_code is functions._settle.__code__ else None)
        try:
            with functions.as_ops((Gate,)):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        with functions.as_ops((Norm,)):
            assert "apply" not in vars(Gate) and not torch._dynamo.trace_rules.is_callable_allowed(Gate)
        assert "apply" not in vars(Norm) and Gate in functions.launching_functions()
        if n_lines <= n:
            break
    assert n > 20


class Kept:
    """What no graph can hold."""


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = Kept()
        triton_functions.times_kernel[(1,)](x, x, x.numel(), BLOCK=64)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        triton_functions.times_kernel[(1,)](x, x, x.numel(), BLOCK=64)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Calling(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.linear(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("function", "words"), [(Keeping, "keeps a Kept, which no graph can hold"), (Dirty, "mark_dirty")])
def test_what_no_graph_can_hold_is_refused_with_what_it_is(function: Any, words: str) -> None:
    with pytest.raises(fxoffload.PlanError, match=words):
        fxoffload.plan(Calling(function), (torch.randn(4, 8),), device_budget="1GiB", machine="cpu")


def test_a_function_without_a_module_is_refused() -> None:
    class Local(torch.autograd.Function):
        forward, backward = Gate.forward, Gate.backward

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Local.apply(x, x)  # type: ignore[no-any-return]

    with pytest.raises(fxoffload.PlanError, match="cannot be imported by its name"):
        fxoffload.plan(nn.Sequential(nn.Linear(8, 8), Own()), (torch.randn(4, 8),), device_budget="1GiB", machine="cpu")


# What a kernel writes -------------------------------------------------------------------------------------------------


@triton.jit
def put(to, value):  # type: ignore[no-untyped-def]
    tl.store(to, value)


@triton.jit
def through(a, b, c, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes b, and a by another function."""
    here = b + tl.arange(0, n)
    there, x = here, tl.load(c + tl.arange(0, n))
    tl.store(there, x.to(tl.float32))
    put(a, value=tl.sum(x, axis=0))


@triton.jit
def counted(a, b, c):  # type: ignore[no-untyped-def]
    at = tl.load(c)
    tl.atomic_add(a + at, tl.load(b))


another_name = tl.store


@triton.jit
def renamed(a, b, c, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a by another name of store, b through a loop, and gives c to what is not known."""
    another_name(a, 1.0)
    for there in (b, b + n):
        tl.store(there, 0.0)
    n.told(c)


@pytest.mark.parametrize(("kernel", "tensors", "written"), [
    (renamed, "abc", "abc"),
    (through, "abc", "ab"), (counted, "abc", "a"), (triton_functions.times_kernel, ("x_ptr", "by_ptr"), ("x_ptr",)),
    (triton_functions.norm_kernel, ("y_ptr", "x_ptr", "w_ptr", "scale_ptr"), ("y_ptr", "scale_ptr")),
    (triton_functions.gate_backward_kernel, ("dc_ptr", "a_ptr", "b_ptr"), ("a_ptr", "b_ptr"))])
def test_what_a_kernel_writes_is_read_from_its_source(kernel: Any, tensors: Any, written: Any) -> None:
    assert written_parameters(kernel) & set(tensors) == set(written)


def test_a_noted_launch_writes_nothing_and_says_what_it_would() -> None:
    x, by = torch.ones(8), torch.full((1,), 3.0)
    with launches_noted() as launched:
        triton_functions.times_kernel[(1,)](x, by, 8, BLOCK=8)
    (launch,) = launched
    assert [t is x for t in launch.tensors] == [True, False] and [t is x for t in launch.written] == [True]
    assert torch.equal(x, torch.ones(8))
    if not torch.cuda.is_available():
        triton_functions.times_kernel[(1,)](x, by, 8, BLOCK=8)
        assert torch.equal(x, torch.full((8,), 3.0))


def test_a_kernel_without_a_source_writes_all_it_is_given() -> None:
    scope: dict[str, Any] = {}
    exec("def made(a, b): pass", scope)
    assert _written(scope["made"]) == {"a", "b"}


def test_tensors_in_tuples_and_descriptors_are_noted() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert [t is x or t is y for t in _tensors_of((x, (types.SimpleNamespace(base=y), 3)))] == [True, True]


def helping(x: Tensor) -> None:
    triton_functions.times_kernel[(1,)](x, x, 1, BLOCK=1)


def test_functions_are_found_by_what_they_call() -> None:
    def plain(x: Tensor) -> Tensor:
        return torch.relu(x)

    assert is_kernel(put) and not is_kernel(plain)
    assert launches(Norm.forward) and launches(Loss.backward) and launches(types.FunctionType(helping.__code__, globals()))
    assert not launches(plain)
    found: Callable[[], tuple[Any, ...]] = functions.launching_functions
    assert {Norm, Gate, Loss} <= set(found()) and not any(one.__module__.startswith("torch.") for one in found())


# What a call takes ----------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_call_are_those_of_its_ops_and_kernels() -> None:
    forward, backward = calls(lowered(Gated(), torch.randn(8, 32)))
    one = 8 * 32 * 4
    assert work_of(forward, bounds_of(forward)).kind == "binary" and work_of(forward, bounds_of(forward)).n_bytes == 3 * one
    # Both operands copied, then three tensors read and two of them written.
    assert work_of(backward, bounds_of(forward)).n_bytes == (2 * 2 + 3 + 2) * one


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        triton_functions.times_kernel[(1,)](y, y, y.numel(), BLOCK=4096)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Multiplied.apply(self.linear(x), self.linear.weight)  # type: ignore[no-any-return]


def test_products_inside_of_a_function_count_as_products() -> None:
    graph = lowered(Product(), torch.randn(8, 16))
    forward, backward = (work_of(one, bounds_of(one)) for one in calls(graph))
    assert (forward.kind, forward.size, forward.times) == ("matrix", (8, 16, 16), 1)
    assert (backward.kind, backward.n_flops) == ("matrix", 2 * forward.n_flops)
