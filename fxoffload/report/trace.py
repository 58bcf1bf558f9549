"""The simulated step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..effects import Channel
from ..graph import module_path, op_name
from .views import View, report_of

if TYPE_CHECKING:
    from .views import Source

Event = dict[str, object]
_LANES = (Channel.COMPUTE, Channel.H2D, Channel.D2H, Channel.HOST, Channel.DISK, Channel.NET)
_COLUMNS = ("parameter", "activation", "gradient", "other")
_US = 1e6


def write(source: Source, path: str | Path) -> None:
    """Writes the trace of a Session, or of a dump folder, to `path`: one process per graph, one lane per channel, device bytes as a
    counter. Raises ValueError for a plan alone, which holds no graph to simulate."""
    report = report_of(source)
    if not report.views:
        raise ValueError("trace: a plan alone holds no graph; give the session or the dump folder of the compile")
    events = [event for process, view in enumerate(report.views, 1) for event in _events(view, process)]
    content = {"displayTimeUnit": "ms", "otherData": {"machine": report.machine.name, "title": report.title}, "traceEvents": events}
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    partial.replace(target)


def _events(view: View, process: int) -> Iterator[Event]:
    lanes = {channel: i for i, channel in enumerate(_LANES, 1)}
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": view.label}}
    for channel in dict.fromkeys(span.channel for span in view.timeline.spans):
        lane = {"pid": process, "tid": lanes[channel]}
        yield {"ph": "M", "name": "thread_name", **lane, "args": {"name": str(channel)}}
        yield {"ph": "M", "name": "thread_sort_index", **lane, "args": {"sort_index": lanes[channel]}}
    for span in view.timeline.spans:
        node = view.live.nodes[span.index]
        made = sum(storage.n_bytes for storage in view.live.defined_at(node))
        yield {
            "ph": "X", "name": op_name(node), "cat": str(span.channel), "pid": process, "tid": lanes[span.channel],
            "ts": span.start_s * _US, "dur": (span.end_s - span.start_s) * _US,
            "args": {"node": span.name, "module": module_path(node), "made_bytes": made},
        }
    for index, waited_s in sorted(view.timeline.waits.items()):
        yield {
            "ph": "X", "name": "stall", "cat": "stall", "pid": process, "tid": lanes[Channel.COMPUTE],
            "ts": view.timeline.issued_s[index] * _US, "dur": waited_s * _US, "args": {"node": view.simulation.names[index]},
        }
    yield from _counters(view, process)


def _counters(view: View, process: int) -> Iterator[Event]:
    """Device bytes by kind, at every node where they change."""
    before: tuple[int, ...] = ()
    for issued_s, row in zip(view.timeline.issued_s, view.simulation.curve):
        if row != before:
            args = {"fixed": view.simulation.fixed_bytes, **dict(zip(_COLUMNS, row))}
            yield {"ph": "C", "name": "device bytes", "pid": process, "ts": issued_s * _US, "args": args}
        before = row
