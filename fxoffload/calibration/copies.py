"""Rates between host and device: one way, both ways, beside compute, and page-locking."""

from __future__ import annotations

import time

import torch

from ..effects import Channel
from ..runtime.slabs import pinned_slab
from ..torch_compat import device_sleep
from . import fit
from .bench import Bench
from .fit import Json
from .timing import Act, sweep

_KIB, _MIB = 1 << 10, 1 << 20
_BYTES = [64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 128 * _MIB, 256 * _MIB]
_CPU_BYTES = _BYTES[:5]
_SMALLEST = 256
_LONG_BYTES = 64 * _MIB
_ISSUE_CYCLES = 20_000_000  # 10 ms at 2 GHz: the device waits until everything is issued
_SIDE = 4096  # of the products that copies compete with


def transfer(bench: Bench, channel: Channel, pinned: bool) -> Json:
    """Seconds of one copy over its bytes."""
    sizes = bench.fitting(_BYTES if bench.is_cuda else _CPU_BYTES)
    host, device = _host_bytes(sizes[-1], pinned), torch.ones(sizes[-1], dtype=torch.uint8, device=bench.device)
    source, target = (host, device) if channel is Channel.H2D else (device, host)
    clock = bench.clock if pinned else bench.copy_clock

    def seconds(n_bytes: int, limit_s: float) -> float:
        return clock.seconds(lambda: target[:n_bytes].copy_(source[:n_bytes], non_blocking=True), limit_s)

    latency_s = seconds(_SMALLEST, bench.deadline.left_s() / (2 * len(sizes)))
    return fit.curve(latency_s, sweep(sizes, seconds, bench.deadline))


def _host_bytes(n_bytes: int, pinned: bool) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pinned).fill_(1)  # written, so that every page is there


class _Copies:
    """Copies of one pinned buffer on a stream of their own."""

    def __init__(self, bench: Bench, channel: Channel) -> None:
        host, device = _host_bytes(_LONG_BYTES, True), torch.ones(_LONG_BYTES, dtype=torch.uint8, device=bench.device)
        self.source, self.target = (host, device) if channel is Channel.H2D else (device, host)
        self.stream = torch.cuda.Stream(bench.device)
        self.end = torch.cuda.Event(enable_timing=True)

    def issue(self, n_copies: int, start: torch.cuda.Event) -> None:
        """Queues copies that begin after `start`."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(start)
            for _ in range(n_copies):
                self.target.copy_(self.source, non_blocking=True)
            self.end.record()


def duplex(bench: Bench) -> dict[str, float]:
    """Rate of each direction while both copy."""
    ways = {channel: _Copies(bench, channel) for channel in (Channel.H2D, Channel.D2H)}
    start, n_copies = torch.cuda.Event(enable_timing=True), 20
    for _ in range(2):  # the first round warms up
        torch.cuda.synchronize()
        device_sleep(_ISSUE_CYCLES)
        start.record()
        for copies in ways.values():
            copies.issue(n_copies, start)
        torch.cuda.synchronize()
    seconds = {channel: start.elapsed_time(copies.end) * 1e-3 for channel, copies in ways.items()}
    return {f"duplex_{channel.value}_bytes_per_s": n_copies * _LONG_BYTES / s for channel, s in seconds.items()}


def contention(bench: Bench, kind: str) -> float:
    """Seconds of compute that one second of a concurrent copy to the device costs; `kind`: "matrix" or "memory"."""
    left, right = bench.values(_SIDE, _SIDE), bench.values(_SIDE, _SIDE)
    act: Act = (lambda: torch.mm(left, right)) if kind == "matrix" else (lambda: torch.add(left, right))
    copies = _Copies(bench, Channel.H2D)
    once = bench.clock.seconds(act, bench.deadline.left_s() / 4)
    copy_s = bench.clock.seconds(lambda: copies.target.copy_(copies.source, non_blocking=True), bench.deadline.left_s() / 4)
    n_acts = min(max(int(0.02 / once), 1), 500)  # some 20 ms, within the launch queue
    n_copies = int(3 * n_acts * once / copy_s) + 2  # longer than the compute, however much that slows
    alone_s = min(_acts_s(act, n_acts, None, 0) for _ in range(3))
    beside_s = min(_acts_s(act, n_acts, copies, n_copies) for _ in range(3))
    return min(max((beside_s - alone_s) / beside_s, 0.0), 1.0)


def _acts_s(act: Act, n_acts: int, copies: _Copies | None, n_copies: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    device_sleep(_ISSUE_CYCLES)
    start.record()
    if copies is not None:
        copies.issue(n_copies, start)
    for _ in range(n_acts):
        act()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def pinning(bench: Bench) -> float:
    """Bytes page-locked per second, as the runtime does it: fresh pages, registered with the driver."""
    samples: list[float] = []
    while len(samples) < 3 or (len(samples) < 8 and bench.deadline.left_s() > 4 * max(samples)):
        started = time.perf_counter()
        slab = pinned_slab(256 * _MIB)
        samples.append(time.perf_counter() - started)
        slab.close()
    return 256 * _MIB / sorted(samples)[len(samples) // 2]
