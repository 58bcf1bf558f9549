"""Machine files: what loads, what is refused and by which name, and how rates follow size."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxoffload.api import _machine
from fxoffload.effects import Channel, Tier
from fxoffload.machine import Machine, calibrated_file, load_machine, machine_for, machine_from, shipped_for, shipped_machines
from fxoffload.plans import Plan
from fxoffload.rates import MEMORY_KINDS, Curve, MatrixRate

pytestmark = pytest.mark.unit

SIZES = st.integers(1, 1 << 34)
SIDES = st.integers(1, 1 << 18)


def raw_of(name: str) -> dict[str, object]:
    return json.loads(resources.files("fxoffload.machines").joinpath(f"{name}.json").read_text())


@pytest.mark.parametrize("name", shipped_machines())
def test_every_shipped_machine_has_a_positive_rate_for_everything_planned(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert {"bf16", "fp16", "fp32"} <= set(machine.matrix)
    rates = [*machine.flops_per_s.values(), machine.device_bytes_per_s, *machine.channel_bytes_per_s.values()]
    assert all(0 < rate < math.inf for rate in rates)
    assert machine.transfer_s(1 << 20, Channel.H2D) < machine.transfer_s(1 << 20, Channel.H2D, Tier.DISK) < 1


def test_the_cards_people_ask_for_ship() -> None:
    assert set(shipped_machines()) >= {
        "rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "h100", "h100-80gb-hbm3", "h200", "l40s", "b200", "cpu",
    }


@pytest.mark.parametrize("name", sorted(set(shipped_machines()) - {"h100-80gb-hbm3", "h200", "cpu"}))
def test_a_data_sheet_file_names_its_document_and_derates_its_peaks(name: str) -> None:
    raw, machine = raw_of(name), load_machine(name)
    assert machine.datasheet and "NVIDIA" in machine.source and machine.measured is None
    assert machine.flops_per_s["bf16"] == pytest.approx(raw["peak"]["flops_per_s"]["bf16"] * raw["prior"]["matrix"])
    assert machine.device_bytes_per_s < raw["peak"]["device_bytes_per_s"]
    assert set(machine.memory) == set(MEMORY_KINDS)


def test_a_machine_loads_from_a_file_as_from_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(raw_of("h200")))
    assert load_machine(path) == load_machine("h200") == load_machine(load_machine("h200"))


CHANGES = [
    ("h200", "schema", 1, "schema 2"),
    ("h200", "name", "", "name"),
    ("h200", "overlaps", "yes", "overlaps"),
    ("h200", "overhead_bytes", -1, "overhead_bytes"),
    ("h200", "overhead_bytes", None, "overhead_bytes"),
    ("h200", "device_capacity_bytes", 0, "device_capacity_bytes"),
    ("h200", "dispatch_s", -1e-6, "dispatch_s"),
    ("h200", "transfers.h2d_pinned.per_s", 0, "transfers.h2d_pinned.per_s"),
    ("h200", "transfers.h2d_pinned.latency_s", -1.0, "transfers.h2d_pinned.latency_s"),
    ("h200", "transfers.h2d_pinned.sizes", [16, 4, 64, 256, 1024, 4096, 8192, 16384], "transfers.h2d_pinned.sizes[1]"),
    ("h200", "transfers.h2d_pinned.seconds", [1.0, 0.5, 2, 3, 4, 5, 6, 7], "transfers.h2d_pinned.seconds[1]"),
    ("h200", "transfers.h2d_pinned.seconds", [1.0], "transfers.h2d_pinned.seconds"),
    ("h200", "transfers.duplex_h2d_bytes_per_s", -5, "transfers.duplex_h2d_bytes_per_s"),
    ("h200", "matrix.fp32", None, "matrix.fp32"),
    ("h200", "matrix.bf16.flops_per_s", float("nan"), "matrix.bf16.flops_per_s"),
    ("h200", "matrix.bf16.flops_per_s", True, "matrix.bf16.flops_per_s"),
    ("h200", "matrix.bf16.m", [4, 2], "matrix.bf16.m"),
    ("h200", "matrix", None, "matrix"),
    ("h200", "memory.copy", None, "memory.copy"),
    ("h200", "memory.shuffle", {"latency_s": 0, "per_s": 1}, "memory.shuffle"),
    ("h200", "contention.matrix", 1.5, "contention.matrix"),
    ("h200", "optimizer_params_per_s.host.fused_fp32", 0, "optimizer_params_per_s.host.fused_fp32"),
    ("h200", "optimizer_params_per_s.moon", {}, "optimizer_params_per_s.moon"),
    ("h200", "host.pin_bytes_per_s", math.inf, "host.pin_bytes_per_s"),
    ("h200", "colour", "green", "colour"),
    ("h200", "compute_capability", 9.0, 'compute_capability: must be text like "9.0", got 9.0'),
    ("h200", "compute_capability", "hopper", "compute_capability"),
    ("rtx3090", "peak.flops_per_s.fp32", None, "peak.flops_per_s.fp32"),
    ("rtx3090", "peak.link_bytes_per_s", 0, "peak.link_bytes_per_s"),
    ("rtx3090", "prior.matrix", 1.2, "prior.matrix"),
    ("rtx3090", "prior.memory.gather", 0, "prior.memory.gather"),
    ("rtx3090", "prior.hope", 1, "prior.hope"),
    # units: GB/s, TFLOP/s, GiB, us, and words
    ("h200", "transfers.h2d_pinned.per_s", 55.0, "transfers.h2d_pinned.per_s: 55 per second is no rate in bytes"),
    ("h200", "matrix.bf16.flops_per_s", 787.3, "matrix.bf16.flops_per_s: 787.3 per second is no rate"),
    ("h200", "optimizer_params_per_s.host.fused_fp32", 4.6, "optimizer_params_per_s.host.fused_fp32: 4.6 per second"),
    ("h200", "memory.copy.latency_s", 3, "memory.copy.latency_s: 3 seconds are too many"),
    ("h200", "device_capacity_bytes", 141, "device_capacity_bytes"),
    ("h200", "overhead_bytes", 1 << 40, "overhead_bytes and context_bytes leave nothing of device_capacity_bytes"),
    ("h200", "transfers.h2d_pinned.per_s", "55 GB/s", "transfers.h2d_pinned.per_s: must be a number above 0, got '55 GB/s'"),
    ("rtx3090", "peak.link_bytes_per_s", 31.5, "peak.link_bytes_per_s: 31.5 per second is no rate"),
    ("rtx3090", "prior.launch_s", 3.0, "prior.launch_s: 3 seconds are too many"),
    ("rtx3090", "prior.dispatch_s", float("nan"), "prior.dispatch_s"),
    ("rtx3090", "schema", 3, "schema 2 (schema: 3); measure one with"),
]


@pytest.mark.parametrize(("name", "field", "value", "named"), CHANGES)
def test_an_impossible_value_is_refused_by_its_name(name: str, field: str, value: object, named: str) -> None:
    raw = raw_of(name)
    *path, last = field.split(".")
    inner = raw
    for word in path:
        inner = inner[word]
    inner[last] = value
    with pytest.raises(ValueError, match="mine.json") as refusal:
        machine_from(raw, "mine.json")
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_unknown_machine_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'rtx9000' is neither a file nor one of: ") as refusal:
        load_machine("rtx9000")
    assert all(name in str(refusal.value) for name in shipped_machines())


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[1, 2]", b'"h200"'])
def test_a_file_that_is_no_machine_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="mine.json") as refusal:
        load_machine(path)
    assert "\n" not in str(refusal.value)


def test_what_is_neither_a_name_nor_a_path_is_refused() -> None:
    with pytest.raises(ValueError, match="machine: expected a Machine, a name or a path, got int"):
        load_machine(200)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["name", "source", "datasheet", "device_type", "matrix", "memory", "transfers", "allocation_bytes"])
def test_a_missing_field_is_named(field: str) -> None:
    raw = raw_of("cpu")
    del raw[field]
    with pytest.raises(ValueError, match=f"{field}: missing"):
        machine_from(raw, "mine.json")


def test_unknown_rates_stay_unknown() -> None:
    machine = load_machine("rtx3090")
    assert (machine.contention.memory, machine.host.disk_read_bytes_per_s) == (None, None)
    assert machine.optimizer_params_per_s["device"] == {}


CURVE = Curve(1e-5, 1e10, ((1000.0, 2e-5), (100_000.0, 2e-5), (1_000_000.0, 2e-4)))


def test_a_curve_passes_through_its_points_and_goes_on_at_its_rate() -> None:
    assert CURVE.seconds(0) == 1e-5
    assert [CURVE.seconds(size) for size, _ in CURVE.points] == [s for _, s in CURVE.points]
    assert CURVE.seconds(11_000_000) == pytest.approx(2e-4 + 1e7 / 1e10)
    assert Curve(1e-5, 1e10).seconds(1e10) == pytest.approx(1 + 1e-5)


@given(SIZES, SIZES)
def test_more_bytes_never_take_fewer_seconds(a: int, b: int) -> None:
    assert CURVE.seconds(min(a, b)) <= CURVE.seconds(max(a, b))


# A card whose small products cost 10 us, whatever their FLOPs; 1 TFLOP/s above that.
AXES = (16, 256, 4096)
GRID = MatrixRate(1e12, 1e-5, AXES, AXES, AXES, tuple(
    tuple(tuple(max(1e-5, 2 * m * k * n / 1e12) for n in AXES) for k in AXES) for m in AXES
))


def test_a_product_on_the_grid_takes_what_was_measured() -> None:
    assert GRID.product_s(16, 16, 16) == pytest.approx(1e-5)
    assert GRID.product_s(4096, 256, 4096) == pytest.approx(2 * 4096 * 256 * 4096 / 1e12)


def test_a_thin_product_is_priced_by_latency_and_a_huge_one_by_its_flops() -> None:
    assert GRID.product_s(1, 8, 8) == pytest.approx(1e-5)
    assert GRID.product_s(8192, 4096, 128_000) == pytest.approx(2 * 8192 * 4096 * 128_000 / 1e12)
    assert GRID.product_s(512, 16, 512) > 2 * 512 * 16 * 512 / 1e12  # a LoRA rank as the inner dimension


@given(SIDES, SIDES, SIDES, st.integers(0, 2), SIDES)
def test_a_larger_product_never_takes_fewer_seconds(m: int, k: int, n: int, axis: int, more: int) -> None:
    larger = [m, k, n]
    larger[axis] += more
    assert GRID.product_s(m, k, n) <= GRID.product_s(*larger) * (1 + 1e-9)


def test_a_pageable_tier_is_priced_apart_and_a_file_is_read_first() -> None:
    machine = load_machine("h200")
    pinned, pageable, disk = (machine.transfer_s(1 << 26, Channel.H2D, tier) for tier in (Tier.PINNED, Tier.PAGEABLE, Tier.DISK))
    assert pinned < pageable < disk
    with pytest.raises(KeyError):
        machine.transfer_s(1, Channel.NET)


def test_a_machine_without_pinned_memory_copies_from_what_it_has() -> None:
    machine = load_machine("cpu")
    assert machine.transfer_s(1 << 20, Channel.D2H) == machine.transfer_s(1 << 20, Channel.D2H, Tier.PAGEABLE)


def test_a_changed_machine_forgets_what_was_computed() -> None:
    machine = load_machine("cpu")
    machine.known_s["anything"] = 1.0
    changed: Machine = dataclasses.replace(machine, name="other")
    assert changed.known_s == {} and copy.copy(machine) == machine


@pytest.mark.parametrize("card, gib, expected", [
    ("NVIDIA H200", 139.8, "h200"), ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb-hbm3"), ("NVIDIA H100 PCIe", 79.2, "h100"),
    ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
    ("NVIDIA A100 80GB PCIe", 79.2, "a100-80"), ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"), ("NVIDIA L40S", 44.4, "l40s"),
    ("NVIDIA GH200 480GB", 95.0, None), ("NVIDIA GeForce RTX 2080 Ti", 10.8, None)])
def test_a_card_has_the_shipped_machine_that_is_called_as_it(card: str, gib: float, expected: str | None) -> None:
    assert shipped_for(card, int(gib * 2**30)) == expected


def test_compile_plans_for_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    card = SimpleNamespace(name="NVIDIA GeForce RTX 3090", total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert machine_for(torch.device("cuda", 0)).name == "rtx3090" and not caplog.records
    assert machine_for(torch.device("cpu")).name == "cpu"
    card.name = "NVIDIA T4"
    assert machine_for(torch.device("cuda", 0)).name == "h200" and "no machine file ships for NVIDIA T4" in caplog.text


def test_compile_plans_for_what_was_measured_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_MACHINES", str(tmp_path / "machines"))
    card = SimpleNamespace(name="NVIDIA GeForce RTX 3090", total_memory=24 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    device = torch.device("cuda", 0)
    assert machine_for(device).name == "rtx3090"
    file = calibrated_file(device)
    assert file == tmp_path / "machines" / "nvidia-geforce-rtx-3090.json"
    file.parent.mkdir()
    file.write_text(json.dumps(raw_of("h200") | {"name": "mine"}))
    assert machine_for(device).name == "mine"
    assert _machine("rtx4090", None, device).name == "rtx4090"
    card.name = "NVIDIA GeForce RTX 4090"
    assert machine_for(device).name == "rtx4090"
    assert calibrated_file(torch.device("cpu")).name == "cpu.json" and machine_for(torch.device("cpu")).name == "cpu"
    file.with_name("cpu.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cpu\.json"):
        machine_for(torch.device("cpu"))


def test_without_a_home_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXOFFLOAD_MACHINES")
    monkeypatch.setenv("HOME", "/nowhere")
    assert calibrated_file(torch.device("cpu")) == Path("/nowhere/.config/fxoffload/machines/cpu.json")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert machine_for(torch.device("cpu")).name == "cpu"


def test_a_given_plan_runs_with_the_machine_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="NVIDIA H100 PCIe", total_memory=80 << 30))
    plan, card = Plan(1 << 30, None, "h200", "bitwise", (), {}), torch.device("cuda", 0)
    assert _machine(None, plan, card).name == "h200" and _machine("rtx4090", plan, card).name == "rtx4090"
    assert _machine(None, None, card).name == _machine(None, dataclasses.replace(plan, machine="my-card"), card).name == "h100"
    assert _machine(None, plan, torch.device("cpu")).name == "cpu"
