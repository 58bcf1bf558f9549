"""The one simulator: bytes per tier at every node, and the schedule of a lowered Step on its channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

from .donation import given_away
from .effects import Channel, Tier
from .graph import Bounds, info, name_of, tensor_bytes
from .liveness import Kind, Liveness, Storage, liveness, no_workspace
from . import ops
from .machine import Machine
from .timeline import Timeline, timeline


@dataclass(frozen=True, slots=True)
class Simulation:
    """`curve`: device bytes during each node, by kind (the four columns sum to the total). Peaks in bytes, `step_s` in seconds.

    `schedule`: its channels' timeline. `live`: what its bytes come from. `host_peak_bytes` and `disk_peak_bytes` count what the graph
    itself puts there, its inputs apart.
    """

    names: tuple[str, ...]
    curve: tuple[tuple[int, int, int, int], ...]
    fixed_bytes: int
    device_peak_bytes: int
    peak_node: str
    host_peak_bytes: int
    disk_peak_bytes: int
    moved_bytes: dict[str, int]
    channel_s: dict[str, float]
    step_s: float
    schedule: Timeline
    live: Liveness
    peak_index: int


_COLUMNS = (Kind.PARAMETER, Kind.ACTIVATION, Kind.GRADIENT, Kind.OTHER)


def simulate(graph: fx.Graph, bounds: Bounds, machine: Machine, outside_bytes: int = 0, workspace: Callable[[fx.Node], int] = no_workspace,
             live: Liveness | None = None) -> Simulation:
    """What `graph` needs and takes. A Storage lives from its producer to its release, or to its last use where it has none, or until
    another takes its place.

    `workspace`: bytes a node needs for itself while it runs; less than none where its result takes an operand's place, until that is released.
    `live`: the graph's Liveness, where it is known.
    """
    live = live or liveness(graph, bounds)
    starts: list[list[Storage]] = [[] for _ in live.nodes]
    ends: list[list[Storage]] = [[] for _ in live.nodes]
    given = given_away(live)
    for storage in live.first:
        starts[live.begin(storage)].append(storage)
        if storage not in live.escapes:
            ends[given[storage] - 1 if storage in given else live.last[storage]].append(storage)
    on_device = dict.fromkeys(_COLUMNS, 0)
    elsewhere = dict.fromkeys((Tier.PINNED, Tier.PAGEABLE, Tier.DISK), 0)

    def change(storage: Storage, n_bytes: int) -> None:
        if storage.tier is Tier.DEVICE:
            on_device[storage.kind] += n_bytes
        elif not storage.is_input:
            elsewhere[storage.tier] += n_bytes

    curve, peak, peak_at, host_peak, disk_peak, own = [], 0, 0, 0, 0, 0
    for i, node in enumerate(live.nodes):
        for storage in starts[i]:
            change(storage, storage.n_bytes)
        own = min(own, 0) if node.target is ops.release else workspace(node)
        parameters, activations, gradients, other = on_device.values()
        row = parameters, activations, gradients, other + own
        curve.append(row)
        if sum(row) > peak:
            peak, peak_at = sum(row), i
        host_peak = max(host_peak, elsewhere[Tier.PINNED] + elsewhere[Tier.PAGEABLE])
        disk_peak = max(disk_peak, elsewhere[Tier.DISK])
        for storage in ends[i]:
            change(storage, -storage.n_bytes)
    schedule = timeline(graph, bounds, machine)
    return Simulation(
        tuple(name_of(n) for n in live.nodes), tuple(curve), outside_bytes, peak + outside_bytes,  # type: ignore[arg-type]
        name_of(live.nodes[peak_at]) if live.nodes else "", host_peak, disk_peak, _moved_bytes(graph, bounds),
        {channel.value: schedule.busy_s(channel) for channel in Channel}, schedule.end_s, schedule, live, peak_at,
    )


def _moved_bytes(graph: fx.Graph, bounds: Bounds) -> dict[str, int]:
    moved: Counter[str] = Counter()
    for node in graph.nodes:
        spec = ops.spec_of(node)
        if node.target is ops.lookup and info(node.args[0]).tier.on_host:  # type: ignore[arg-type]
            moved[Channel.H2D.value] += tensor_bytes(node.meta["val"], bounds)
        elif spec is not None and spec.starts_transfer:
            moved[spec.channel.value] += tensor_bytes(node.meta["val"], bounds)
    return dict(moved)
