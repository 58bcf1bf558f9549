"""Seconds of nodes and optimizers: every kind of op has a price, larger is never cheaper, unknown is dear but finite."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch
import torch.fx as fx
from hypothesis import given
from hypothesis import strategies as st

from fxoffload import text
from fxoffload.cost import flops, node_s, optimizer_s, seconds
from fxoffload.effects import Channel
from fxoffload.graph import Bounds, by_name
from fxoffload.machine import Machine, load_machine, shipped_machines
from fxoffload.rates import INSTEAD, MEMORY_KINDS, Curve
from fxoffload.work import Work, work_of

pytestmark = pytest.mark.unit

def graph_of(lines: str, result: str) -> tuple[dict[str, fx.Node], Bounds]:
    content = f'graph "g" (s0 <= 64)\n{lines}return ({result})\n'
    graph = text.parse(content, torch.device("cpu", 0))
    return by_name(graph), text.parse_bounds(content)


def work(line: str, *inputs: str) -> Work:
    """The Work of one call `%y: ... = ...` on the inputs."""
    lines = "".join(f"{name} = input {{role=batch}}\n" for name in inputs)
    nodes, bounds = graph_of(f"{lines}{line}\n", "%y")
    return work_of(nodes["y"], bounds)


def test_a_product_is_its_three_sizes_at_the_bounds() -> None:
    found = work("%y: bf16[s0,512] = aten.addmm %b, %x, %w", "%b: bf16[512]", "%x: bf16[s0,256]", "%w: bf16[256,512]")
    assert (found.kind, found.dtype, found.size, found.n_flops) == ("matrix", "bf16", (64, 256, 512), 2 * 64 * 256 * 512)


def test_a_product_with_itself_and_a_batch_of_products_count_in_full() -> None:
    assert work("%y: f32[8,8] = aten.mm %x, %x", "%x: f32[8,8]").n_flops == 2 * 8**3
    assert work("%y: f32[3,4,6] = aten.bmm %x, %z", "%x: f32[3,4,5]", "%z: f32[3,5,6]").size == (12, 5, 6)


QKV = ("%q: bf16[2,4,64,32]", "%k: bf16[2,2,64,32]", "%v: bf16[2,2,64,32]")


def attention(causal: str, gqa: str) -> Work:
    lines = "".join(f"{name} = input {{role=batch}}\n" for name in QKV)
    call = f"%a: (bf16[2,4,64,32],f32[2,4,64],i64[0],i64[0]) = fxo.attention %q, %k, %v, none, 0.0, {causal}, none, {gqa}\n"
    nodes, bounds = graph_of(f"{lines}{call}%y: bf16[2,4,64,32] = getitem %a, 0\n", "%y")
    assert node_s(nodes["y"], bounds, load_machine("h200")) == (Channel.COMPUTE, 0.0)
    return work_of(nodes["a"], bounds)


def test_only_causal_attention_does_half_the_work() -> None:
    full = 4 * 2 * 4 * 64 * 64 * 32
    assert attention("false", "true").n_flops == full
    assert attention("true", "true").n_flops == full // 2
    assert attention("true", "false").head_dim == 32


def test_a_lookup_reads_its_rows_and_not_the_table() -> None:
    found = work("%y: bf16[s0,256] = aten.embedding %t, %i", "%t: bf16[8192,256]", "%i: i64[s0]")
    assert (found.kind, found.n_bytes) == ("gather", 2 * 64 * 256 * 2 + 64 * 8)


@pytest.mark.parametrize(("line", "kind"), [
    ("aten.relu %x", "pointwise"), ("aten.add.Tensor %x, %z", "binary"), ("aten.clone %x", "copy"),
    ("aten._softmax %x, -1, false", "softmax"), ("aten.cumsum %x, 0", "unknown"), ("aten.zeros_like %x", "copy"),
])
def test_an_op_has_the_kind_of_its_kernel(line: str, kind: str) -> None:
    used = "" if "%z" in line else "%u: f32[64,64] = aten.clone %z\n"
    lines = f"%x: f32[64,64] = input {{role=batch}}\n%z: f32[64,64] = input {{role=batch}}\n{used}%y: f32[64,64] = {line}\n"
    nodes, bounds = graph_of(lines, "%y, %u" if used else "%y")
    assert work_of(nodes["y"], bounds).kind == kind


@pytest.mark.parametrize(("line", "kind"), [
    ("f32[64,64] = aten._to_copy %n, dtype=f32", "widen"), ("bf16[64,64] = aten._to_copy %x, dtype=bf16", "copy"),
    ("f32[64,64] = aten.add.Tensor %x, %n", "mixed"), ("f32[64,64] = aten.mul.Tensor %x, %r", "strided"),
    ("f32[64,64] = aten.add.Tensor %x, %t", "strided"), ("f32[64,64;1,64] = aten.neg %t", "pointwise"),
    ("f32[64,64] = aten.clone %t, memory_format=contiguous_format", "strided"), ("f32[64,64] = aten.mul.Tensor %x, %o", "binary"),
])
def test_a_kernel_that_converts_or_steps_is_of_a_kind_of_its_own(line: str, kind: str) -> None:
    lines = (
        "%x: f32[64,64] = input {role=batch}\n%n: bf16[64,64] = input {role=batch}\n%r: f32[64,1] = input {role=batch}\n"
        f"%t: f32[64,64;1,64] = input {{role=batch}}\n%o: f32[] = input {{role=batch}}\n%y: {line}\n")
    unused = [name for name in ("%x", "%n", "%r", "%t", "%o") if name not in line]
    nodes, bounds = graph_of(lines, ", ".join(["%y", *unused]))
    assert work_of(nodes["y"], bounds).kind == kind


def test_a_machine_file_of_before_prices_new_kinds_by_others() -> None:
    before = dataclasses.replace(H200, memory={kind: curve for kind, curve in H200.memory.items() if kind not in INSTEAD})
    for kind, other in INSTEAD.items():
        assert seconds(make_work(kind, "bf16", 512, 512), before) == seconds(make_work(other, "bf16", 512, 512), H200)


KINDS = ["matrix", "attention_forward", "attention_backward", *MEMORY_KINDS, "unknown"]


def make_work(kind: str, dtype: str, m: int, n: int) -> Work:
    size = (m, 64, n) if kind == "matrix" else (0, 0, 0)
    n_flops = 2 * m * 64 * n if kind == "matrix" or kind.startswith("attention") else 0
    return Work(kind, dtype, 2 * (m * 64 + 64 * n + m * n), n_flops, size, head_dim=64)


@pytest.mark.parametrize("name", shipped_machines())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "other"])
def test_every_work_has_a_price_on_every_shipped_machine(name: str, kind: str, dtype: str) -> None:
    machine = load_machine(name)
    s = seconds(make_work(kind, dtype, 512, 4096), machine)
    assert 0 < s < 1
    assert s >= seconds(make_work(kind, dtype, 512, 512), machine)


@given(st.sampled_from(KINDS), st.integers(1, 1 << 16), st.integers(1, 1 << 16), st.integers(0, 1 << 16))
def test_more_work_never_costs_less(kind: str, m: int, n: int, more: int) -> None:
    assert seconds(make_work(kind, "bf16", m, n), H200) <= seconds(make_work(kind, "bf16", m + more, n), H200)


H200 = load_machine("h200")


def test_an_unknown_op_costs_more_than_any_known_kind() -> None:
    known = max(seconds(make_work(kind, "other", 512, 512), H200) for kind in MEMORY_KINDS)
    assert seconds(make_work("unknown", "other", 512, 512), H200) > known


def test_a_product_is_never_faster_than_its_bytes() -> None:
    thin = Work("matrix", "bf16", 1 << 30, 2 * (1 << 20), (1, 1, 1 << 20))
    assert seconds(thin, H200) >= (1 << 30) / H200.device_bytes_per_s


def test_what_issuing_costs_is_no_part_of_a_kernel() -> None:
    slow_host: Machine = dataclasses.replace(H200, dispatch_s=1e-4)
    assert seconds(make_work("pointwise", "bf16", 1, 1), slow_host) < 1e-4



def test_equal_nodes_are_priced_once() -> None:
    machine = load_machine("cpu")
    for _ in range(3):
        seconds(make_work("copy", "bf16", 8, 8), machine)
    assert list(machine.known_s) == [make_work("copy", "bf16", 8, 8)]


def swapped(tier: str) -> float:
    lines = (
        f'%w: f32[1024,1024]@{tier} = input {{role=parameter, fqn="w"}}\n%y: f32[1024,1024] = fxo.swap_in %w, device\n'
        "%z: f32[1024,1024] = fxo.wait %y\n"
    )
    nodes, bounds = graph_of(lines, "%z")
    channel, s = node_s(nodes["y"], bounds, H200)
    assert channel is Channel.H2D and node_s(nodes["z"], bounds, H200)[1] == 0.0
    return s


def test_a_transfer_costs_what_its_tier_costs() -> None:
    assert swapped("pinned") < swapped("pageable") < swapped("disk")


def returned(tier: str) -> float:
    lines = (
        f'%x: f32[1024,1024] = input {{role=batch}}\n%o: f32[1024,1024]@{tier} = fxo.swap_out %x, host, "{tier}"\n'
        f"%h: f32[1024,1024]@{tier} = fxo.wait %o\n%y: f32[1024,1024] = fxo.swap_in %h, device\n%z: f32[1024,1024] = fxo.wait %y\n"
    )
    nodes, bounds = graph_of(lines, "%z")
    assert node_s(nodes["o"], bounds, H200)[0] is Channel.D2H
    return node_s(nodes["y"], bounds, H200)[1]


def test_a_value_comes_back_from_the_tier_it_went_to() -> None:
    assert returned("pinned") < returned("pageable") < returned("disk")


def test_attention_of_another_dtype_is_scaled_and_never_sped_up() -> None:
    card = load_machine("rtx3090")
    slow = seconds(make_work("attention_forward", "fp32", 4096, 4096), card)
    fast = seconds(make_work("attention_forward", "bf16", 4096, 4096), card)
    assert slow == pytest.approx(fast * 71 / 35.6, rel=0.05)


def test_flops_of_a_node_are_its_works() -> None:
    nodes, bounds = graph_of("%x: f32[s0,8] = input {role=batch}\n%y: f32[s0,s0] = aten.mm %x, %t\n".replace(
        "%y:", "%t: f32[8,s0;1,8] = aten.t %x\n%y:"), "%y")
    assert (flops(nodes["y"], bounds), node_s(nodes["t"], bounds, H200)) == (2 * 64 * 8 * 64, (Channel.COMPUTE, 0.0))


def test_adamw_on_the_host_takes_its_measured_rate() -> None:
    host = {"fused_fp32": 2e9, "foreach_fp32": 1e9}
    measured: Machine = dataclasses.replace(H200, optimizer_params_per_s={"device": {}, "host": host})
    assert optimizer_s("adamw", 4_000_000_000, "host", measured) == pytest.approx(2.0)
    assert optimizer_s("AdamW", 1 << 20, "host", measured, "bf16") == optimizer_s("adamw", 1 << 20, "host", measured)
    assert optimizer_s("adamw", 4_000_000_000, "host", measured, fused=True) == pytest.approx(2.0)
    assert optimizer_s("adamw", 4_000_000_000, "host", measured, fused=False) == pytest.approx(4.0)
    only: Machine = dataclasses.replace(H200, optimizer_params_per_s={"device": {}, "host": {"fused_fp32": 2e9}})
    assert optimizer_s("adamw", 4_000_000_000, "host", only, fused=False) == pytest.approx(2.0), "of what was measured"


def test_an_unmeasured_optimizer_is_dear_and_finite() -> None:
    bare: Machine = dataclasses.replace(H200, optimizer_params_per_s={"device": {}, "host": {}})
    for where in ("device", "host"):
        assert 0 < optimizer_s("sgd", 1 << 30, where, bare) < optimizer_s("adamw", 1 << 30, where, bare) < math.inf
    assert optimizer_s("adamw", 1 << 30, "host", bare) > optimizer_s("adamw", 1 << 30, "host", H200)


def test_an_unknown_optimizer_is_warned_of_and_counts_twice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxoffload"):
        assert optimizer_s("shampoo", 1000, "host", H200) == pytest.approx(2 * optimizer_s("adamw", 1000, "host", H200))
    assert ["shampoo" in record.getMessage() for record in caplog.records] == [True]


def test_an_optimizer_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="where"):
        optimizer_s("adamw", 1, "moon", H200)


def test_the_nearest_head_dimension_prices_attention() -> None:
    (any_dim,) = load_machine("rtx3090").attention
    rates = tuple(dataclasses.replace(any_dim, head_dim=d, forward=Curve(0.0, rate)) for d, rate in ((64, 1e12), (256, 1e13)))
    machine: Machine = dataclasses.replace(load_machine("rtx3090"), attention=rates)
    near64, near256 = (Work("attention_forward", "bf16", 8, 10**12, head_dim=d) for d in (80, 200))
    assert (seconds(near64, machine), seconds(near256, machine)) == (pytest.approx(1.0), pytest.approx(0.1))
