"""What a profiler's trace of one step on a CUDA card says: idle time by cause, copies hidden under kernels, waits of the host.

Events are those of `torch.profiler`'s Chrome trace, "X" events alone; times are in us there, seconds here. The step's parts are the
annotations "forward" and "backward".
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]

FORWARD, BACKWARD = "forward", "backward"
# A kernel that starts this soon after the one before it left no gap, only the card's own pause between kernels.
PAUSE_US = 3.0
_CALLS = ("cuda_runtime", "cuda_driver")
# Calls that return when the device is done with something. Freed device memory, too, waits for the device.
_WAITS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
    "cudaMemcpy", "cudaFree", "cudaFreeHost", "cuMemFree", "cuMemFreeHost")
# How the names of calls that give the device work begin, where the call does not wait for it.
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cuMemcpy", "cudaMemsetAsync", "cudaGraphLaunch", "cuGraphLaunch")
_DIRECTIONS = {"h2d": "HtoD", "d2h": "DtoH"}
# Chrome's trace format counts in us; a tenth of one is finer than what is drawn.
_DECIMALS = 1


def events_of(path: Path) -> list[Event]:
    """The complete events of an exported trace."""
    return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]


# Idle time --------------------------------------------------------------------------------------------------------------


def causes(events: Sequence[Event]) -> dict[str, Any]:
    """Busy seconds per kind of work, and the gaps between kernels by cause and by the kernel that ends them."""
    launched = {e["args"]["correlation"]: e for e in events if e.get("cat") in _CALLS and "correlation" in e.get("args", {})}
    kernels = _kernels(events)
    busy = {"kernels_s": _sum(kernels), "n_kernels": len(kernels)}
    for direction in _DIRECTIONS:
        busy[f"{_DIRECTIONS[direction]}_s"] = _sum(_copies(events, direction))
    gaps: Counter[str] = Counter()
    longest: list[tuple[float, str, str, float]] = []
    first = end = kernels[0]["ts"]
    for kernel in kernels:
        gap = kernel["ts"] - end
        if gap > PAUSE_US:
            launch = launched.get(kernel["args"].get("correlation"))
            late = launch is None or launch["ts"] + launch["dur"] > end
            cause = "host" if late else "copy"
            gaps[cause] += gap
            longest.append((round(gap), cause, kernel["name"][:80], round((end - first) / 1e3, 2)))
        elif gap > 0:
            gaps["pause"] += gap
        end = max(end, kernel["ts"] + kernel["dur"])
    calls = Counter[str]()
    for call in (e for e in events if e.get("cat") in _CALLS):
        calls[call["name"]] += call["dur"]
    return {**busy, "gaps_s": {k: v / 1e6 for k, v in gaps.items()}, "longest_gaps_us": sorted(longest, reverse=True)[:40],
            "runtime_calls_s": {k: round(v / 1e6, 4) for k, v in calls.most_common(12)},
            "kernels_by_name_s": [(k, round(v / 1e6, 4)) for k, v in _by_name(kernels).most_common(30)]}


def _by_name(kernels: Iterable[Event]) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for kernel in kernels:
        seconds[kernel["name"][:100]] += kernel["dur"]
    return seconds


# Copies ---------------------------------------------------------------------------------------------------------------


def overlap(events: Sequence[Event], bytes_per_s: Mapping[str, float]) -> dict[str, Any]:
    """Seconds of copies, and how many of them lie under kernels. `bytes_per_s`: the machine's rate by channel.

    `could_hide`: what the copies' bytes take at these rates is less than what the kernels take, in each direction, so that all of the
    copies could be hidden. `hidden_share` is None where nothing was copied.
    """
    busy = _merged(_kernels(events))
    compute_s = sum(end - start for start, end in busy) / 1e6
    copied = {direction: _copies(events, direction) for direction in _DIRECTIONS}
    copied_s = {direction: _sum(copies) for direction, copies in copied.items()}
    hidden_s = {direction: sum(_under(copy, busy) for copy in copies) / 1e6 for direction, copies in copied.items()}
    n_bytes = {direction: sum(int(copy["args"]["bytes"]) for copy in copies) for direction, copies in copied.items()}
    total_s = sum(copied_s.values())
    return {
        "compute_s": compute_s, "copied_s": copied_s, "copied_bytes": n_bytes, "hidden_s": hidden_s,
        "hidden_share": sum(hidden_s.values()) / total_s if total_s else None,
        "could_hide": all(n_bytes[direction] / bytes_per_s[direction] < compute_s for direction in _DIRECTIONS),
    }


def _merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times at which at least one of the events, which are in order of their start, goes on."""
    found: list[tuple[float, float]] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _under(event: Event, busy: Sequence[tuple[float, float]]) -> float:
    """How much of the event's time lies in one of the times, which are in order and apart."""
    start, end = event["ts"], event["ts"] + event["dur"]
    found, i = 0.0, max(bisect_left(busy, (start,)) - 1, 0)
    while i < len(busy) and busy[i][0] < end:
        found += max(0.0, min(end, busy[i][1]) - max(start, busy[i][0]))
        i += 1
    return found


# The host -------------------------------------------------------------------------------------------------------------


def host_waits(events: Sequence[Event], n_gradients_to_host: int) -> dict[str, Any]:
    """Where in the step the host waited for the device, and what of it should not be.

    Allowed is one wait for an event at the end of backward, behind all that backward gives the device to do, where gradients go to the
    host. Copies from and to memory that is not pinned wait by themselves. `record_stream` keeps memory until the allocator finds out that
    another stream is done with it: none is needed.
    """
    parts = {name: next(e for e in events if e.get("cat") == "user_annotation" and e["name"] == name) for name in (FORWARD, BACKWARD)}
    calls = {name: [e for e in events if e.get("cat") in _CALLS and _within(e, part)] for name, part in parts.items()}
    waits = {name: [e for e in found if e["name"].split("_v")[0] in _WAITS] for name, found in calls.items()}
    last_launch = max((e["ts"] for e in calls[BACKWARD] if e["name"].startswith(_LAUNCHES)), default=0.0)
    at_end = [e for e in waits[BACKWARD] if e["ts"] > last_launch]
    inside = [f"{e['name']} in {name}" for name, found in waits.items() for e in found if e not in at_end]
    pageable = [e["name"] for e in events if e.get("cat") == "gpu_memcpy" and "Pageable" in e["name"]]
    recorded = sum(1 for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::record_stream")
    faults = [*inside, *pageable, *["record_stream"] * recorded]
    if len(at_end) > bool(n_gradients_to_host):
        faults.append(f"{len(at_end)} waits at the end of backward, where {n_gradients_to_host} gradients go to the host")
    faults += [f"{e['name']} at the end of backward, no wait for an event" for e in at_end if e["name"] != "cudaEventSynchronize"]
    if n_gradients_to_host and not at_end:
        faults.append("gradients on the host, and no wait for them")
    return {
        "gradients_to_host": n_gradients_to_host, "waits_inside": len(inside), "waits_at_end": len(at_end), "waited_at_end_s": _sum(at_end),
        "copies_not_pinned": len(pageable), "record_stream": recorded, "faults": faults,
    }


def _within(event: Event, part: Event) -> bool:
    return bool(part["ts"] <= event["ts"] < part["ts"] + part["dur"])


# The trace itself -----------------------------------------------------------------------------------------------------


def write_compact(events: Sequence[Event], path: Path) -> int:
    """Writes what a reader needs of a trace, for chrome://tracing or Perfetto, gzipped: kernels, copies, waits and the step's parts.
    Returns the file's bytes."""
    begins = min(e["ts"] for e in events)
    kept = [_compact(e, begins) for e in sorted(events, key=lambda e: e["ts"]) if _is_shown(e)]
    content = json.dumps({"traceEvents": kept, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(content, 9, mtime=0))
    return path.stat().st_size


def _is_shown(event: Event) -> bool:
    if event.get("cat") in _CALLS:
        return event["name"].split("_v")[0] in _WAITS or "GraphLaunch" in event["name"]
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") or (
        event.get("cat") == "user_annotation" and event["name"] in (FORWARD, BACKWARD))


def _compact(event: Event, begins: float) -> dict[str, Any]:
    on_host = event["cat"] in (*_CALLS, "user_annotation")
    shown = {"ph": "X", "cat": event["cat"], "name": event["name"][:100], "pid": "host" if on_host else "device",
             "tid": "host" if on_host else f"stream {event['args'].get('stream')}",
             "ts": round(event["ts"] - begins, _DECIMALS), "dur": round(event["dur"], _DECIMALS)}
    return shown | ({"args": {"bytes": event["args"]["bytes"]}} if event["cat"] == "gpu_memcpy" else {})


def _kernels(events: Iterable[Event]) -> list[Event]:
    return sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])


def _copies(events: Iterable[Event], direction: str) -> list[Event]:
    return [e for e in events if e.get("cat") == "gpu_memcpy" and _DIRECTIONS[direction] in e["name"]]


def _sum(events: Iterable[Event]) -> float:
    return sum(e["dur"] for e in events) / 1e6
