"""What the seconds and bytes of a lowered graph are made of: the Reasons that a plan keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from .cost import optimizer_s
from .effects import Channel
from .graph import Bounds
from .liveness import Kind, Liveness, Storage, is_view, largest_live, liveness
from .machine import Machine
from .optimizer_states import Own, States
from .reasons import ISSUE, Reasons, Tried
from .simulate import Simulation
from .timeline import Span, Timeline
from .work import product_of, reads_rows

N_LARGEST = 10


def reasons_of(
    lowered: fx.Graph, simulation: Simulation, tried: tuple[Tried, ...], bounds: Bounds, machine: Machine, after_s: float | None,
) -> Reasons:
    """The account of a lowered graph and its simulation; `after_s`: see `optimizer_step_s`."""
    schedule = simulation.schedule
    longest = max(schedule.waits, key=lambda index: schedule.waits[index], default=None)
    largest = largest_live(simulation.live, [simulation.peak_index], N_LARGEST)[simulation.peak_index]
    return Reasons(
        {channel: seconds for channel, seconds in simulation.channel_s.items() if seconds}, critical_s(schedule), schedule.stalled_s,
        "" if longest is None else simulation.names[longest], 0.0 if longest is None else schedule.waits[longest],
        limits(lowered, bounds, machine, simulation.moved_bytes), after_s, tuple((s.name, s.n_bytes) for s in largest), tried)


def critical_s(schedule: Timeline) -> dict[str, float]:
    """Seconds per channel along the chain of nodes that ends the step: each starts when the one before it ends, on its own channel or,
    at a wait or a start, on another. A node that starts at nobody's end was waiting for the host, which issues from the first on."""
    ending: dict[float, list[Span]] = {}
    for span in schedule.spans:
        ending.setdefault(span.end_s, []).append(span)
    found: dict[str, float] = defaultdict(float)
    channel, at_s = Channel.COMPUTE, schedule.end_s
    while at_s in ending:
        span = min(ending.pop(at_s), key=lambda one: one.channel is not channel)
        found[span.channel.value] += span.end_s - span.start_s
        channel, at_s = span.channel, span.start_s
    found[ISSUE] += at_s
    return {name: seconds for name, seconds in sorted(found.items()) if seconds > 0}


def limits(lowered: fx.Graph, bounds: Bounds, machine: Machine, moved_bytes: Mapping[str, int]) -> dict[str, float | None]:
    """Seconds that no schedule of `lowered` can go below on `machine`, by what limits it.

    "compute": FLOPs, those computed again included, at the best rate of their dtype, and what the copies take from compute where the
    machine's contention was measured. "h2d", "d2h": bytes at the rate of a large copy. "host": None, no machine file knows its bus.
    """
    copies = {channel: moved_bytes.get(channel, 0) / per_s for channel, per_s in machine.channel_bytes_per_s.items()}
    rates = machine.flops_per_s
    products = (bounds.told(product_of, node) for node in lowered.nodes if node.op == "call_function")
    compute_s = sum(work.n_flops / rates.get(work.dtype, max(rates.values())) for work in products if work is not None)
    return {"compute": compute_s + (machine.contention.matrix or 0.0) * sum(copies.values()), **copies, "host": None}


def least_limits(step: fx.Graph, bounds: Bounds, machine: Machine, device_bytes: int) -> dict[str, float | None]:
    """Seconds, as in `limits`, that no way of executing a captured step goes below, whoever plans it, where it may use `device_bytes` of
    the device: every product once, and of the parameters what cannot be there already.

    Between two steps, as between forward and backward, no more than `device_bytes` of parameters are on the device, so each half must be
    given at least the rest of those that it reads. Activations, gradients and rows of a table that are looked up count nothing.
    """
    live = liveness(step, bounds)
    parameters = [storage for storage in live.uses if storage.is_input and storage.kind is Kind.PARAMETER]
    read_bytes = (sum(s.n_bytes for s in parameters if _is_read(live, s, half)) for half in (False, True))
    return limits(step, bounds, machine, {Channel.H2D.value: sum(max(0, n_bytes - device_bytes) for n_bytes in read_bytes)})


def _is_read(live: Liveness, storage: Storage, in_backward: bool) -> bool:
    """Whether all of a parameter is read in that half."""
    readers = (live.nodes[i] for i in live.uses[storage] if (i > live.border) is in_backward)
    return any(node.op == "call_function" and not is_view(node) and not reads_rows(node) for node in readers)


# The optimizer that keeps so many tensors of a parameter's own shape and dtype, and whose seconds `cost` knows.
_OF_COUNT = {1: "momentum", 2: "adamw", 3: "rmsprop"}


@dataclass(frozen=True)
class OptimizerStep:
    """The optimizer's step after backward over trained parameters: (name, elements, dtype)."""

    trained: tuple[tuple[str, int, str], ...]
    states: States | None
    machine: Machine
    known_s: dict[frozenset[str], float | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    def seconds(self, resident: frozenset[str]) -> float | None:
        """Of the step with those parameters on the device, see `optimizer_step_s`."""
        if resident not in self.known_s:
            placed = ((n, dtype, "device" if name in resident else "host") for name, n, dtype in self.trained)
            self.known_s[resident] = optimizer_step_s(placed, self.states, self.machine)
        return self.known_s[resident]


def optimizer_step_s(trained: Iterable[tuple[int, str, str]], states: States | None, machine: Machine) -> float | None:
    """Seconds of one optimizer step over (parameters, dtype, "device" or "host"), None without an optimizer.

    One whose seconds nobody knows counts as `cost.optimizer_s` has it, with one warning per dtype and place.
    """
    if states is None:
        return None
    if isinstance(states, Own) and (kind := _OF_COUNT.get(states.count)) is not None:
        return sum(optimizer_s(kind, n, where, machine, dtype, states.fused) for n, dtype, where in trained)
    together: dict[tuple[str, str], int] = defaultdict(int)
    for n, dtype, where in trained:
        together[dtype, where] += n
    return sum(optimizer_s(str(states), n, where, machine, dtype) for (dtype, where), n in together.items())
