"""Memory planned by offsets: packing, the verifier's rule, out variants, and steps whose values lie in one arena."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Row, fault, rows
from torch import nn

import fxoffload
from fxoffload import text
from fxoffload.donation import takes_a_place
from fxoffload.footprint import Footprint
from fxoffload.graph import Bounds, info, name_of
from fxoffload.machine import load_machine
from fxoffload.memory_map import MemoryMap
from fxoffload.offsets import ALIGNMENT, Lifetime, _packed, live_bytes, pack
from fxoffload.out_variants import out_variant
from fxoffload.pipeline import Context, get_pass
from fxoffload.simulate import simulate
from fxoffload.testing.simulated_device import SimulatedDevice
from fxoffload.verify import verify

aten = torch.ops.aten


@st.composite
def lifetimes(draw: st.DrawFn) -> Lifetime:
    begin = draw(st.integers(0, 40))
    return Lifetime(begin, begin + draw(st.integers(1, 12)), draw(st.integers(1, 5000)))


@given(st.lists(lifetimes(), max_size=40))
@settings(deadline=None)
def test_what_is_there_at_the_same_time_lies_apart_in_an_arena_that_ends_with_the_highest(found: list[Lifetime]) -> None:
    _packed.cache_clear()
    offsets, n_bytes = pack(found)
    ends = [offset + one.n_bytes for offset, one in zip(offsets, found, strict=True)]
    for i, one in enumerate(found):
        assert offsets[i] % ALIGNMENT == 0 and ends[i] <= n_bytes
        for k, other in enumerate(found[:i]):
            together = one.begin < other.end and other.begin < one.end
            assert not together or ends[i] <= offsets[k] or ends[k] <= offsets[i]
    assert live_bytes(found) <= n_bytes <= sum(-(-one.n_bytes // ALIGNMENT) * ALIGNMENT for one in found)
    _packed.cache_clear()
    assert pack(found) == (offsets, n_bytes)


def test_values_of_one_size_need_no_more_than_is_live() -> None:
    found = [Lifetime(i, i + 1 + i * 7 % 5, 1024) for i in range(50)]
    assert pack(found)[1] == live_bytes(found)


def test_little_lies_idle_in_a_step_of_8b_width_whose_memory_is_full_long_before_the_loss() -> None:
    # what a Llama of 8B shape with LoRA, 4 x 2048, is to hold on a GPU, planned for 21 GiB of live bytes
    rows = lzma.decompress((Path(__file__).parent / "lifetimes_8b_lora.csv.xz").read_bytes()).decode().split()[1:]
    found = [Lifetime(*map(int, row.split(","))) for row in rows]
    assert len(found) > 4000
    assert pack(found)[1] <= 1.03 * live_bytes(found)


@pytest.fixture
def by_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has its memory planned by offsets."""
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True)))


def test_an_out_variant_has_the_bits_and_strides_of_its_op_over_an_operand_too() -> None:
    x, y = (torch.randn(6, 33, dtype=torch.bfloat16) for _ in range(2))
    soft = torch.softmax(x.float(), -1)
    calls = [
        (aten.mul.Tensor, (x, y)), (aten.add.Tensor, (x, y)), (aten.silu.default, (x,)), (aten.silu_backward.default, (x, y)),
        (aten.neg.default, (x,)), (aten.pow.Tensor_Scalar, (x, 2)), (aten.sub.Tensor, (x, y[:1])), (aten._softmax.default, (x.float(), -1, False)),
        (aten._log_softmax.default, (x.float(), 1, False)), (aten._softmax_backward_data.default, (x.float(), soft, -1, torch.float32)),
        (aten._log_softmax_backward_data.default, (x.float(), soft.log(), -1, torch.float32)),
    ]
    for op, args in calls:
        variant = out_variant(op)
        assert variant is not None and takes_a_place(call_of(op)), op
        expected = op(*args)
        for out in (torch.empty(0, dtype=expected.dtype), args[0].clone()):
            operands = (out, *args[1:]) if out.numel() else args
            got = variant.op(*operands, **{variant.results[0]: out})
            assert torch.equal(got, expected) and got.stride() == expected.stride(), op


def call_of(op: torch._ops.OpOverload) -> torch.fx.Node:
    return torch.fx.Graph().call_function(op)


def test_ops_that_read_elsewhere_or_draw_numbers_take_no_place() -> None:
    for op in (aten.mm.default, aten.sum.dim_IntList, aten.cat.default, aten.native_dropout.default, aten.cumsum.default, aten.flip.default):
        assert not takes_a_place(call_of(op)), op
    assert out_variant(aten.native_layer_norm.default) is None  # it has one, which calls the op and copies


DONATED = """\
graph "donated"
%x: f32[256] = input {role=batch}
%a: f32[256] = aten.neg %x
%b: f32[256] = aten.mul.Tensor %a, 2.0
fxo.release %a
%c: f32[256] = aten.add.Tensor %b, %x
%d: f32[256] = aten.mul.Tensor %b, %c
fxo.release %b
fxo.release %c
%e: f32[256] = aten.neg %d
fxo.release %d
return (%e)
"""


def test_a_result_takes_the_place_of_an_operand_that_is_read_for_the_last_time() -> None:
    graph = get_pass("assign-offsets").run(text.parse(DONATED), Context())
    assert isinstance(graph, torch.fx.Graph)
    offsets = {name_of(node): info(node).offset for node in graph.nodes}
    # b takes a's place, which d takes over; c is made while b is still to be read
    assert offsets["a"] == offsets["b"] == offsets["d"] and offsets["c"] != offsets["b"] and offsets["e"] is None
    verify(graph, facts=frozenset({"placed"}))
    assert MemoryMap.of(graph, Bounds()).arena_bytes == 2048
    # what a dump, a report and a trace say: x, two values and what is returned, never both of a pair
    assert simulate(graph, Bounds(), load_machine("cpu")).device_peak_bytes == 3 * 1024
    assert simulate(text.parse(DONATED), Bounds(), load_machine("cpu")).device_peak_bytes == 4 * 1024


ADDED = """\
graph "added"
%x: f32[16,16] = input {role=batch}
%w: f32[16,16] = input {role=batch}
%a: f32[16,16] = aten.mm %x, %w
%b: f32[16,16] = aten.addmm %a, %x, %w, alpha=2
fxo.release %a
%c: f32[16,16] = aten.addmm %b, %b, %w
fxo.release %b
%d: f32[16] = aten.select.int %x, 0, 0
%e: f32[16,16] = aten.addmm %d, %c, %w
fxo.release %c
%f: f32[16,16] = aten.neg %e
fxo.release %e
return (%f)
"""


def test_a_product_is_added_where_its_sum_lies_unless_it_is_also_multiplied() -> None:
    graph = get_pass("assign-offsets").run(text.parse(ADDED), Context())
    assert isinstance(graph, torch.fx.Graph)
    offsets = {name_of(node): info(node).offset for node in graph.nodes}
    assert offsets["a"] == offsets["b"] and offsets["c"] != offsets["b"] and offsets["e"] != offsets["c"]
    verify(graph, facts=frozenset({"placed"}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_added_where_its_sum_lies_has_the_bits_of_one_that_is_added_to_a_copy(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for target, shapes in ((aten.addmm, ((64, 48), (64, 16), (16, 48))), (aten.baddbmm, ((2, 64, 48), (2, 64, 16), (2, 16, 48)))):
        into, a, b = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        expected = target(into, a, b, alpha=0.5)
        there = torch.empty(0, dtype=dtype, device=device).set_(into.untyped_storage(), 0, (0,))
        assert target.out(into, a, b, alpha=0.5, out=there).data_ptr() == into.data_ptr() and torch.equal(there, expected)


def feed_forward() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 64))


@pytest.mark.integration
@pytest.mark.usefixtures("by_offsets")
def test_steps_that_are_open_at_once_and_a_graph_that_is_kept_have_memory_of_their_own(simulated_device: SimulatedDevice) -> None:
    model = fxoffload.compile(feed_forward(), torch.ones(8, 64), device="fxsim", device_budget="1GiB", dynamic=False)
    plain = feed_forward().to("fxsim")
    a, b = torch.randn(8, 64).to("fxsim"), torch.randn(8, 64).to("fxsim")
    gradients = []
    for one in (plain, model):
        first, second = one(a).square().sum(), one(b).square().sum()
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        one(a).square().sum().backward()
        with torch.no_grad():
            one(b)
        gradients.append([p.grad.cpu() for p in one.parameters()])
    assert all(map(torch.equal, *gradients))
    assert model.fxoffload.arena.n_bytes > 0 and model.fxoffload.arena.take()
    model.fxoffload.close()


@pytest.mark.integration
@pytest.mark.usefixtures("by_offsets")
@pytest.mark.parametrize("family", [
    "gpt2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("lora_bf16", "bert", "t5", "mamba", "qwen3_moe", "autocast"))])
def test_five_steps_in_an_arena_are_bit_equal_and_take_what_was_predicted(family: str, simulated_device: SimulatedDevice) -> None:
    found: list[Row] = list(rows(family, "fxsim", simulated_device, (1.0, 0.5)))
    for row in found:
        assert not row.refused and not fault(row, found[0]), (fault(row, found[0]), row)
