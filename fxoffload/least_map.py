"""What a candidate takes at least where its values lie at offsets of one arena, told without lowering it.

Plans that take more than the budget at their offsets are known by it: lowering one takes longer than to scan many. Every byte counted
here is counted by `MemoryMap` of the lowered graph. In the arena are, at each event, values that stay, but for those that an op makes
itself, or that may lie where an operand did; in scratch, what the event's op makes itself and needs. And wherever they lie, all that is there at
an event lies apart, but for what may lie where an operand did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import torch
import torch.fx as fx

from .candidates import Candidate
from .donation import takes_a_place
from .effects import Tier
from .graph import operands, output_of
from .liveness import Storage
from .memory_map import SOON_NODES, MemoryMap, makes_its_results
from .offsets import ALIGNMENT, aligned
from .overlap import bytes_during
from .problem import Problem
from .replays import anew_bytes
from .spill import Event, Schedule


def least_taken_bytes(problem: Problem, candidate: Candidate) -> int:
    """A bound: bytes that the device's allocator reserves for the candidate, once it is lowered, are no fewer."""
    live, graph = candidate.schedule.live, candidate.schedule.graph
    fixed = candidate.recomputation.ground(candidate.resident).fixed
    inputs = [s for s in live.first if s in fixed or s.is_tangent and s.tier is Tier.DEVICE]
    results = [s for s in live.escapes if s.tier is Tier.DEVICE and not s.is_input]
    inputs_bytes, anew = sum([aligned(s.n_bytes) for s in inputs]), anew_bytes(graph, problem.context.bounds)
    gifts = np.array([_gift_bytes(event, live.nodes[event.index]) for event in candidate.schedule.events], dtype=np.int64)
    every = [(first, end, storage.n_bytes) for storage, first, end in _there(candidate)]
    placed, there = (bytes_during(candidate.schedule, spans) - gifts for spans in (_placed(candidate), every))
    by_place = MemoryMap(
        inputs_bytes, sum([aligned(s.n_bytes) for s in results]), int(placed.max(initial=0)), _scratch_bytes(problem, candidate.schedule), anew)
    at_once = MemoryMap(inputs_bytes, 0, int(there.max(initial=0)), 0, anew)
    return max(one.taken_bytes(problem.footprint, candidate.outside_bytes) for one in (by_place, at_once))


def _scratch_bytes(problem: Problem, schedule: Schedule) -> int:
    live, most = schedule.live, 0
    for event in schedule.events:
        node = live.nodes[event.index]
        made = [s for s in event.makes if s not in live.escapes] if makes_its_results(node) else []
        most = max(most, problem.workspace(node) + sum([aligned(s.n_bytes) for s in made]))
    return most


def _gift_bytes(event: Event, node: fx.Node) -> int:
    """Bytes of what the event makes, if that may take the place of what it reads."""
    if len(event.makes) != 1 or not takes_a_place(node):
        return 0
    n_bytes = event.makes[0].n_bytes
    return n_bytes if any([read.n_bytes == n_bytes for read in event.reads]) else 0


def _placed(candidate: Candidate) -> Iterator[tuple[int, int, int]]:
    """From which event until before which one how many bytes are in the arena. A copy to the host may end as soon as it has started."""
    schedule, live, position = candidate.schedule, candidate.schedule.live, candidate.schedule.position
    elsewhere, sent = _elsewhere(schedule), {spill.storage: position[spill.after] for spill in candidate.found.spills}
    for storage, first, end in _there(candidate):
        if first <= sent.get(storage, -1) < end:
            end = sent[storage] + 1
        is_original = not storage.is_input and schedule.events[first].index == live.first[storage]
        soon = is_original and end - first <= SOON_NODES + 1 and makes_its_results(live.nodes[live.first[storage]])
        if storage not in elsewhere and not soon:
            yield first, end, storage.n_bytes


def _there(candidate: Candidate) -> Iterator[tuple[Storage, int, int]]:
    """From which event until before which one each Storage, or its copy under way, is there, of those that are not all along."""
    position = candidate.schedule.position
    yield from ((storage, first, last + 1) for storage, first, last in candidate.found.stays if not storage.is_tangent)
    yield from ((storage, position[start], position[before]) for storage, before, start, _ in candidate.found.loads)


def _elsewhere(schedule: Schedule) -> Collection[Storage]:
    """Storages that need not lie in the arena: what is returned or comes with backward, what is small, and what is viewed at an offset from
    the beginning of its memory."""
    live = schedule.live
    returned = {s for operand in operands(output_of(schedule.graph)) for s in live.of.get(operand, ())}
    from_start = {s for node in live.nodes if node.target is torch.ops.aten.as_strided.default for s in live.of[node]}
    return returned | from_start | {s for s in live.first if s.n_bytes < ALIGNMENT or s.is_tangent}
