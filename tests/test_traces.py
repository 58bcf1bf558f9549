"""`bench/traces.py`: what it reads from a trace, on steps written by hand (times in us, as torch's profiler has them)."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from traces import causes, host_waits, overlap, write_compact  # noqa: E402

pytestmark = pytest.mark.unit
RATES = {"h2d": 50e9, "d2h": 50e9}
Event = dict[str, Any]


def event(cat: str, name: str, begin: float, end: float, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args}


def copy(direction: str, begin: float, end: float, memory: str = "Pinned") -> Event:
    name = {"h2d": f"Memcpy HtoD ({memory} -> Device)", "d2h": f"Memcpy DtoH (Device -> {memory})"}[direction]
    return event("gpu_memcpy", name, begin, end, bytes=1000, stream=20)


def call(name: str, begin: float, end: float) -> Event:
    return event("cuda_runtime", name, begin, end, correlation=int(begin))


def step(*more: Event) -> list[Event]:
    """Two kernels with 50 us between them, launched in forward and in backward."""
    return [
        event("user_annotation", "forward", 0, 40), event("user_annotation", "backward", 40, 300),
        call("cudaLaunchKernel", 10, 12), call("cudaLaunchKernel", 45, 47),
        event("kernel", "a", 20, 100, correlation=10, stream=7), event("kernel", "b", 150, 250, correlation=45, stream=7), *more]


def test_a_gap_before_a_kernel_that_was_launched_in_time_is_a_copys() -> None:
    found = causes(step())
    assert found["gaps_s"] == {"copy": pytest.approx(50e-6)} and found["kernels_s"] == pytest.approx(180e-6)


def test_seconds_of_copies_are_hidden_where_a_kernel_runs() -> None:
    found = overlap(step(copy("h2d", 90, 160), copy("d2h", 200, 220), copy("h2d", 260, 270)), RATES)
    assert found["copied_s"] == {"h2d": pytest.approx(80e-6), "d2h": pytest.approx(20e-6)}
    assert found["hidden_s"] == {"h2d": pytest.approx(20e-6), "d2h": pytest.approx(20e-6)}
    assert found["hidden_share"] == pytest.approx(0.4) and found["copied_bytes"] == {"h2d": 2000, "d2h": 1000} and found["could_hide"]


def test_kernels_beside_each_other_hide_a_copy_once() -> None:
    found = overlap(step(event("kernel", "c", 20, 90, correlation=10, stream=8), copy("h2d", 30, 80)), RATES)
    assert found["hidden_share"] == pytest.approx(1.0) and found["compute_s"] == pytest.approx(180e-6)


def test_copies_of_more_than_kernels_take_cannot_be_hidden() -> None:
    assert not overlap(step(copy("h2d", 30, 80)), {"h2d": 1000 / 180e-6, "d2h": 1.0})["could_hide"]
    assert overlap(step(), RATES)["hidden_share"] is None


def test_one_wait_for_an_event_behind_the_last_launch_of_backward_is_allowed_for_gradients_alone() -> None:
    events = step(call("cudaEventSynchronize", 60, 290))
    assert host_waits(events, 4)["faults"] == [] and host_waits(events, 4)["waited_at_end_s"] == pytest.approx(230e-6)
    assert host_waits(events, 0)["faults"] == ["1 waits at the end of backward, where 0 gradients go to the host"]
    assert host_waits(step(), 0)["faults"] == []
    assert host_waits(step(), 4)["faults"] == ["gradients on the host, and no wait for them"]


@pytest.mark.parametrize(("more", "fault"), [
    ([call("cudaStreamSynchronize", 14, 16)], "cudaStreamSynchronize in forward"),
    ([call("cudaEventSynchronize", 42, 44)], "cudaEventSynchronize in backward"),
    ([call("cudaEventSynchronize", 250, 260)], "2 waits at the end of backward, where 4 gradients go to the host"),
    ([copy("h2d", 30, 80, "Pageable")], "Memcpy HtoD (Pageable -> Device)"),
    ([event("cpu_op", "aten::record_stream", 30, 31)], "record_stream"),
])
def test_every_other_wait_is_a_fault(more: list[Event], fault: str) -> None:
    assert host_waits(step(call("cudaEventSynchronize", 60, 240), *more), 4)["faults"] == [fault]


def test_a_wait_for_more_than_an_event_is_a_fault() -> None:
    faults = host_waits(step(call("cudaStreamSynchronize", 60, 290)), 4)["faults"]
    assert faults == ["cudaStreamSynchronize at the end of backward, no wait for an event"]


def test_waits_of_the_caller_between_the_steps_do_not_count() -> None:
    assert host_waits(step(call("cudaDeviceSynchronize", 300, 310)), 0)["faults"] == []


def test_a_compact_trace_has_kernels_copies_and_waits_and_the_same_overlap(tmp_path: Path) -> None:
    events = step(copy("h2d", 90, 160), call("cudaEventSynchronize", 60, 290), event("cpu_op", "aten::mm", 12, 14))
    n_bytes = write_compact(events, tmp_path / "step.json.gz")
    content = (tmp_path / "step.json.gz").read_bytes()
    kept = json.loads(gzip.decompress(content))["traceEvents"]
    assert n_bytes == len(content) and {e["name"] for e in kept} == {
        "a", "b", "forward", "backward", "cudaEventSynchronize", "Memcpy HtoD (Pinned -> Device)"}
    assert overlap(kept, RATES) == overlap(events, RATES)
