"""Calibration: fits on made-up samples, order and time on a made-up clock, and one real run on this CPU."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch

from fxoffload import cli
from fxoffload.calibration import fit
from fxoffload.calibration import issuing as issuing_module
from fxoffload.calibration.bench import Bench
from fxoffload.calibration.issuing import _n_timed, issuing
from fxoffload.calibration.run import Item, calibrate, items
from fxoffload.calibration.timing import Deadline, DeviceClock, HostClock, SynchronousClock, sweep
from fxoffload.effects import Channel, Tier
from fxoffload.machine import load_machine, machine_for, machine_from

CPU = torch.device("cpu")


class FakeTime:
    """A clock that only moves when something is measured."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_curve_keeps_its_samples_and_takes_interference_out() -> None:
    found = fit.curve(1e-5, [(10, 1e-4), (20, 9e-4), (40, 4e-4), (80, 8e-4)])
    assert found["seconds"] == [1e-4, 4e-4, 4e-4, 8e-4]
    assert found["per_s"] == pytest.approx(80 / (8e-4 - 1e-5))


def test_a_latency_above_the_first_sample_is_taken_down_to_it() -> None:
    assert fit.curve(5e-4, [(10, 1e-4)])["latency_s"] == 1e-4
    assert fit.curve(5e-4, [(10, 1e-4)])["per_s"] == pytest.approx(10 / 1e-4)
    with pytest.raises(ValueError, match="time"):
        fit.curve(1e-4, [])


AXES = ((16, 64), (16, 64), (16, 64))


def test_a_grid_extends_what_was_not_measured_by_flops() -> None:
    measured = {(0, 0, 0): 1e-5, (0, 0, 1): 2e-5}
    grid = fit.matrix(AXES, measured)
    assert grid["seconds"][0][0] == [1e-5, 2e-5]
    assert grid["seconds"][1][1][1] == pytest.approx(2e-5 * 16)
    assert grid["flops_per_s"] == pytest.approx(2 * 16 * 16 * 64 / 2e-5)


def test_a_grid_loads_whatever_the_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    measured = {cell: 1e-5 * (1 + torch.rand((), generator=generator).item()) for cell in fit.cells(AXES)}
    raw = measured_file() | {"matrix": {"fp32": fit.matrix(AXES, measured)}}
    rate = machine_from(raw, "fake").matrix["fp32"]
    assert rate.product_s(16, 16, 16) <= rate.product_s(64, 16, 16) <= rate.product_s(64, 64, 64)
    with pytest.raises(ValueError, match="time"):
        fit.matrix(AXES, {})


def test_a_sweep_stops_before_a_size_that_would_not_fit() -> None:
    now = FakeTime()

    def measure(size: int, limit_s: float) -> float:
        now.now_s += 5 * size
        return size

    assert sweep([1, 8, 2, 4], measure, Deadline(40.0, now)) == [(1, 1), (2, 2), (4, 4)]
    assert sweep([8], measure, Deadline(now(), now)) == [(8, 8)]


def test_a_deadline_is_shared_and_never_negative() -> None:
    now = FakeTime()
    deadline = Deadline(10.0, now)
    assert deadline.share(0.3).left_s() == pytest.approx(3.0)
    now.now_s = 12.0
    assert deadline.left_s() == deadline.share(0.5).left_s() == 0.0


def test_the_host_clock_counts_one_call_of_many() -> None:
    n_calls = 0

    def act() -> None:
        nonlocal n_calls
        n_calls += 1

    assert 0 < HostClock().seconds(act, 1e-6) < 1e-3
    assert n_calls >= 5


def fake_items(now: FakeTime) -> list[Item]:
    """Every item of a CPU, measured in no time by arithmetic: 1 GB/s copies, 100 GFLOP/s."""
    line = fit.curve(1e-6, [(size, 1e-6 + size / 1e9) for size in (1 << 16, 1 << 20)])
    grid = fit.matrix(AXES, {cell: fit.flops(AXES, cell) / 1e11 for cell in fit.cells(AXES)})
    rate = {"head_dim": 64, "dtype": "fp32", "forward": line, "backward": line}
    values = {"transfers": line, "memory": line, "matrix": grid, "attention": [rate], "optimizer_params_per_s": 1e9,
              "host.disk": {"disk_read_bytes_per_s": 2e9, "disk_write_bytes_per_s": 1e9}}
    applicable = [item for item in items() if not item.cuda_only]
    return [Item(item.name, item.weight, _returning(now, _value(values, item.name)), field=item.field) for item in applicable]


def _value(values: dict[str, object], name: str) -> object:
    return values[name] if name in values else values[name.partition(".")[0]]


def _returning(now: FakeTime, value: object) -> Callable[[object], object]:
    def measure(bench: object) -> object:
        now.now_s += 0.1
        return value

    return measure


def measured_file() -> dict[str, object]:
    now = FakeTime()
    return calibrate(CPU, 10.0, name="fake", date="2026-01-01", chosen=fake_items(now), now=now)


def test_what_calibration_writes_loads_as_it_was_measured() -> None:
    machine = machine_from(json.loads(json.dumps(measured_file())), "fake.json")
    assert (machine.name, machine.measured.date, machine.measured.torch) == ("fake", "2026-01-01", torch.__version__)
    assert machine.transfer_s(1 << 20, Channel.H2D) == pytest.approx(1e-6 + (1 << 20) / 1e9)
    assert machine.transfer_s(1 << 20, Channel.H2D, Tier.DISK) == pytest.approx(1e-6 + (1 << 20) / 1e9 + (1 << 20) / 2e9)
    assert machine.flops_per_s["bf16"] == pytest.approx(1e11)
    assert machine.optimizer_params_per_s["host"]["foreach_bf16"] == 1e9
    assert machine.optimizer_params_per_s["device"] == {} and machine.host.pin_bytes_per_s is None
    assert machine.attention[0].head_dim == 64 and machine.dispatch_s is None


def test_the_same_measurements_write_the_same_file() -> None:
    assert json.dumps(measured_file()) == json.dumps(measured_file())


def test_one_failure_is_null_with_its_error_and_the_rest_is_measured() -> None:
    def fail(bench: object) -> float:
        raise RuntimeError("no such\nkernel")

    now = FakeTime()
    chosen = [Item(i.name, i.weight, fail if i.name == "matrix.fp16" else i.measure, field=i.field) for i in fake_items(now)]
    raw = calibrate(CPU, 10.0, chosen=chosen, now=now)
    assert raw["errors"] == {"matrix.fp16": "RuntimeError: no such kernel"}
    assert set(machine_from(raw, "fake").flops_per_s) == {"fp32", "bf16"}


def test_every_item_gets_its_part_of_the_time_that_is_left() -> None:
    left: list[float] = []
    now = FakeTime()

    def measure(bench: object) -> float:
        left.append(bench.deadline.left_s())
        now.now_s += 1.0
        return 1.0

    calibrate(CPU, 10.0, chosen=[Item("dispatch_s", weight, measure) for weight in (2, 1, 1)], now=now)
    assert left == pytest.approx([5.0, 4.5, 8.0])


def test_items_fill_fields_of_the_file_that_exist() -> None:
    """Also those of an accelerator: a blank file has a place for every item."""
    blank = calibrate(CPU, 1.0, chosen=[])
    for item in items():
        target: object = blank
        for word in [w for w in (item.name if item.field is None else item.field).split(".") if w]:
            assert isinstance(target, dict) and word in target, item.name
            target = target[word]


def test_a_blank_measurement_cannot_be_planned_with() -> None:
    with pytest.raises(ValueError, match="matrix.fp32: missing"):
        machine_from(calibrate(CPU, 1.0, chosen=[]), "blank")


@pytest.mark.integration
def test_issuing_is_a_step_over_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on a CPU is never sooner done than issued; here only the count of ops and the clean end are what is looked at."""
    found = []
    monkeypatch.setattr(issuing_module, "_n_timed", lambda graph: found.append(_n_timed(graph)) or found[-1])  # type: ignore[func-returns-value]
    seconds = issuing(Bench(CPU, HostClock(), HostClock(), Deadline(0.0)))
    assert len(found) == 1 and 8 * 20 < found[0] < 8 * 60
    assert 1e-7 < seconds < 1e-2


@pytest.mark.gpu
def test_issuing_on_a_card_takes_longer_than_one_op_and_leaves_nothing() -> None:
    bench = Bench(torch.device("cuda", 0), DeviceClock(), SynchronousClock(), Deadline(time.perf_counter() + 5))
    seconds = issuing(bench)
    left = torch.ones(64, device="cuda")
    one = HostClock().seconds(lambda: left + left, 0.1)
    assert one < seconds < 100 * one
    gc.collect()
    assert torch.cuda.memory_allocated() < 100 << 20


@pytest.mark.integration
def test_calibrate_measures_this_cpu_in_a_small_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.json"
    assert cli.main(["calibrate", "--device", "cpu", "--budget-s", "1", "--out", str(out), "--date", "2026-01-01"]) == 0
    raw, machine = json.loads(out.read_text()), load_machine(out)
    assert raw["errors"] == {} and machine.measured.date == "2026-01-01" and not machine.datasheet
    assert all(0 < rate < math.inf for rate in [*machine.flops_per_s.values(), machine.device_bytes_per_s])
    assert machine.flops_per_s["fp32"] > 1e8
    assert raw["transfers"]["h2d_pinned"] is raw["host"]["pin_bytes_per_s"] is raw["host"]["disk_read_bytes_per_s"] is None
    assert set(machine.optimizer_params_per_s["host"]) == {"fused_fp32", "fused_bf16", "foreach_fp32", "foreach_bf16"}
    assert "TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [
    ["--device", "tpu"], ["--budget-s", "0"], ["--out", "/no/such/folder/m.json"], ["--disk-dir", "/no/such/folder"],
])
def test_bad_arguments_of_calibrate_are_status_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate", *arguments]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_a_cuda_device_that_is_not_there_is_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["calibrate", "--device", "cuda", "--out", str(tmp_path / "m.json")]) == 2
    assert "--device" in capsys.readouterr().err


def test_a_measurement_that_cannot_be_planned_with_is_status_1_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fxoffload.calibration.run.items", lambda: [])
    out = tmp_path / "m.json"
    assert cli.main(["calibrate", "--device", "cpu", "--out", str(out)]) == 1
    assert "matrix.fp32" in capsys.readouterr().err
    assert json.loads(out.read_text())["matrix"]["fp32"] is None


def test_without_out_the_file_is_the_one_that_compile_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FXOFFLOAD_MACHINES", str(tmp_path / "machines"))
    monkeypatch.setattr("fxoffload.calibration.run.items", lambda: [])
    assert cli.main(["calibrate", "--device", "cpu"]) == 1
    assert "nothing is written" in capsys.readouterr().err and not list(tmp_path.iterdir())
    raw = json.loads(resources.files("fxoffload.machines").joinpath("cpu.json").read_text()) | {"name": "mine"}
    monkeypatch.setattr("fxoffload.calibration.run.calibrate", lambda *arguments: raw)
    assert cli.main(["calibrate", "--device", "cpu"]) == 0
    assert machine_for(CPU).name == "mine" and str(tmp_path) in "".join(capsys.readouterr().out.split())
