"""How calibration measures seconds: a Clock per device, and how long it may go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..torch_compat import device_sleep

Act = Callable[[], object]

_MIN_SAMPLES, _MAX_SAMPLES = 3, 15
# Calls between two events: enough that an event's resolution (about 0.5 us) does not count, few enough for the launch queue.
_MAX_CALLS = 40
_BATCH_S = 2e-3
# The device waits for half again as long as the host takes to issue the calls, at a clock of 2 GHz (accelerators run below that).
_CYCLES_PER_ISSUED_S = 1.5 * 2e9


class Clock(Protocol):
    """Median seconds of one call of `act`, measured for about `limit_s` in all; warmed up, and never fewer than three times."""

    def seconds(self, act: Act, limit_s: float) -> float: ...


class HostClock:
    """Wall seconds of synchronous work."""

    def seconds(self, act: Act, limit_s: float) -> float:
        act()
        once = _wall_s(act)
        n_calls = min(_MAX_CALLS, max(1, int(_BATCH_S / 10 / max(once, 1e-9))))
        return _median(lambda: _wall_s(lambda: _repeat(act, n_calls)) / n_calls, once * n_calls, limit_s)


class DeviceClock:
    """Device seconds by CUDA events. The device waits before the first event, so that the host's issuing is not what is measured."""

    def seconds(self, act: Act, limit_s: float) -> float:
        act()
        torch.cuda.synchronize()
        started = time.perf_counter()
        act()
        issued_s = time.perf_counter() - started
        torch.cuda.synchronize()
        once = time.perf_counter() - started
        n_calls = min(_MAX_CALLS, max(1, int(_BATCH_S / once)))
        return _median(lambda: _between_events_s(act, n_calls, issued_s), (once + issued_s) * n_calls, limit_s)


def _between_events_s(act: Act, n_calls: int, issued_s: float) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    device_sleep(int(_CYCLES_PER_ISSUED_S * issued_s * n_calls))
    start.record()
    _repeat(act, n_calls)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / n_calls


class SynchronousClock:
    """Wall seconds of device work until it is done: for copies that the host takes part in."""

    def seconds(self, act: Act, limit_s: float) -> float:
        def done() -> None:
            act()
            torch.cuda.synchronize()

        return HostClock().seconds(done, limit_s)


def _wall_s(act: Act) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def _repeat(act: Act, n_calls: int) -> None:
    for _ in range(n_calls):
        act()


def _median(sample: Callable[[], float], expected_s: float, limit_s: float) -> float:
    n_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, int(limit_s / max(expected_s, 1e-9))))
    return statistics.median(sample() for _ in range(n_samples))


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the wall clock `now`."""

    end_s: float
    now: Callable[[], float] = time.perf_counter

    def left_s(self) -> float:
        """Seconds until then, never below zero."""
        return max(0.0, self.end_s - self.now())

    def share(self, part: float) -> Deadline:
        """The Deadline after `part` of what is left."""
        return Deadline(self.now() + self.left_s() * part, self.now)


def sweep(sizes: Iterable[int], measure: Callable[[int, float], float], deadline: Deadline) -> list[tuple[int, float]]:
    """(size, seconds) of each size in rising order, as far as time goes: a size is skipped with all above it when five calls of it,
    expected from the one before, would pass the deadline. The first is always measured. `measure(size, limit_s)`."""
    rising = sorted(sizes)
    samples: list[tuple[int, float]] = []
    for i, size in enumerate(rising):
        if samples and 5 * samples[-1][1] * size / samples[-1][0] > deadline.left_s():
            break
        samples.append((size, measure(size, deadline.left_s() / (2 * (len(rising) - i)))))
    return samples
