"""What the first steps took, and a plan made anew from it: between two steps, never inside one.

Two things are measured of a Session at work, and nothing is guessed beside them. Copies: what it keeps in page-locked memory of its own is
copied to the device's arena and back, while no step has the arena; host memory that lies far from the card, or a link that others use too,
shows there. Steps: the seconds between a call of forward and the end of its backward. All that is no copy is then taken to be slower or faster
than the machine file says by one factor, the likeliest by what the simulated step then takes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from . import text
from .captured_step import bounds_of
from .effects import Channel, Tier
from .errors import PlanError
from .graph import Bounds, border_of, output_of
from .machine import Machine
from .places import named_weights
from .plans import Chunk, Defer, GraphPlan
from .rates import Curve, MatrixRate
from .replays import replaying
from .simulate import simulate
from .start import restart
from .study import Study

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger("fxoffload")

# Copies that are shorter say more of latency than of the link; so many bytes of them are enough.
_LONG_BYTES, _ENOUGH_BYTES = 8 << 20, 1 << 30
# Beyond it, and its inverse, a factor speaks of something else than a card's rates.
_MOST_FACTOR = 10.0
# Logarithms: how far the simulated seconds of a step are off by themselves, and what a machine file says of compute; and of the search.
_STEP_DOUBT, _FILE_DOUBT, _PRECISION = 0.02, 0.3, 2e-3
# A plan that takes so much of the other's seconds is worth compiling the model again. Predicted gains are that uncertain: on an H200 one of 3 %
# gave nothing, one of 7 % gave 5 (`bench/results/h200_replan.json`).
_WORTH = 0.95


@dataclass(frozen=True, slots=True)
class Observation:
    """Median seconds of `n_steps` training steps beside what the plan's graph is predicted to take at their sizes.

    `channel_factors`: how many times as long as the machine file says copies of the model's own page-locked memory took, by channel, where
    there is such memory; `compute_factor`: the same of all that is no copy. `machine`: the planned one with these.
    """

    step_s: float
    n_steps: int
    predicted_s: float
    channel_factors: Mapping[Channel, float]
    compute_factor: float
    machine: Machine

    def __str__(self) -> str:
        copies = ", ".join(f"{channel.value} {factor:.2f}" for channel, factor in self.channel_factors.items())
        return (
            f"{self.n_steps} steps took {self.step_s:.4f} s (median), predicted {self.predicted_s:.4f} s; against {self.machine.name} copies "
            f"took {copies or 'not measured'} times as long, all else {self.compute_factor:.2f} times")


def observe(session: Session) -> Observation:
    """See `Session.observe`."""
    taken = session.clock.taken()
    trained = Trained.of(session, taken.label)
    bounds = bounds_of(trained.lowered, dict(taken.shapes))
    factors = _channel_factors(session)
    linked = with_slower_copies(session.machine, factors)
    factor = _fitting(lambda one: trained.step_s(with_slower_compute(linked, one), bounds), taken.step_s)
    return Observation(
        taken.step_s, taken.n_steps, trained.step_s(session.machine, bounds), factors, factor, with_slower_compute(linked, factor))


def replan(session: Session, machine: Machine | None = None) -> bool:
    """See `Session.replan`."""
    if not session.options.replan or session.closed:
        raise PlanError("the model was compiled with replan=False" if not session.options.replan else "the session has ended")
    if machine is None:
        observation = session.observe()
        log.info("%s", observation)
        machine = observation.machine
    label = session.trained
    captured, trained = session.captured_again(label), Trained.of(session, label)
    form = tuple(d for d in trained.known.decisions if isinstance(d, (Chunk, Defer)))
    before_s = trained.step_s(machine, trained.bounds)
    plan = Study(session.planning, captured).anew(machine, form)
    after_s = plan.predicted.step_s
    assert after_s is not None
    log.info("planned anew for %s: %.4f s, as it is %.4f s", machine.name, after_s, before_s)
    if after_s > before_s * _WORTH:
        return False
    restart(session, session.samples[label], machine, plan)
    return True


@dataclass(frozen=True, slots=True)
class Trained:
    """A lowered graph that trains, and what its plan says of it."""

    lowered: fx.Graph
    known: GraphPlan

    @staticmethod
    def of(session: Session, label: str) -> Trained:
        """Raises PlanError where the graph `label` does not train."""
        assert session.plan is not None
        lowered = session.graphs[label]
        if border_of(lowered) is None:
            raise PlanError(f"graph {label} does not train")
        return Trained(lowered, next(known for known in session.plan.graphs.values() if known.label == label))

    @property
    def bounds(self) -> Bounds:
        """The sizes that it is planned for."""
        return output_of(self.lowered).meta[text.BOUNDS]  # type: ignore[no-any-return]

    def step_s(self, machine: Machine, bounds: Bounds) -> float:
        """Simulated seconds on another machine, or of other sizes."""
        return simulate(self.lowered, bounds, replaying(machine) if self.known.replays else machine).step_s


def with_slower_copies(machine: Machine, factors: Mapping[Channel, float]) -> Machine:
    """The machine with copies that take so many times as long, by channel, whichever memory of the host they are from or to."""
    now, into, out = machine.transfers, factors.get(Channel.H2D, 1.0), factors.get(Channel.D2H, 1.0)
    return replace(machine, transfers=replace(
        now, h2d_pinned=_slower(now.h2d_pinned, into), h2d_pageable=_slower(now.h2d_pageable, into),
        d2h_pinned=_slower(now.d2h_pinned, out), d2h_pageable=_slower(now.d2h_pageable, out)))


def with_slower_compute(machine: Machine, factor: float) -> Machine:
    """The machine with everything that is no copy taking so many times as long."""
    attention = tuple(replace(one, forward=_slowed(one.forward, factor), backward=_slowed(one.backward, factor)) for one in machine.attention)
    return replace(
        machine, matrix={word: _slower_products(rate, factor) for word, rate in machine.matrix.items()}, attention=attention,
        memory={kind: _slowed(curve, factor) for kind, curve in machine.memory.items()},
        dispatch_s=None if machine.dispatch_s is None else machine.dispatch_s * factor)


def _slower(curve: Curve | None, factor: float) -> Curve | None:
    return None if curve is None else _slowed(curve, factor)


def _slowed(curve: Curve, factor: float) -> Curve:
    return Curve(curve.latency_s * factor, curve.per_s / factor, tuple((size, s * factor) for size, s in curve.points))


def _slower_products(rate: MatrixRate, factor: float) -> MatrixRate:
    seconds = tuple(tuple(tuple(s * factor for s in row) for row in plane) for plane in rate.seconds)
    return replace(rate, flops_per_s=rate.flops_per_s / factor, latency_s=rate.latency_s * factor, seconds=seconds)


def _fitting(seconds: Callable[[float], float], wanted_s: float) -> float:
    """The likeliest factor, within bounds: the measured seconds are believed to `_STEP_DOUBT`, that a machine file is right to `_FILE_DOUBT`. So
    where copies are waited for, and seconds hardly speak of anything else, it is near 1."""

    def doubt(log_factor: float) -> float:
        return (math.log(seconds(math.exp(log_factor)) / wanted_s) / _STEP_DOUBT) ** 2 + (log_factor / _FILE_DOUBT) ** 2

    return math.exp(_least(doubt, -math.log(_MOST_FACTOR), math.log(_MOST_FACTOR)))


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least, by golden section, to `_PRECISION`."""
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > _PRECISION:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = function(b)
    return (low + high) / 2


def _channel_factors(session: Session) -> dict[Channel, float]:
    """See `Observation.channel_factors`; {} where nothing is page-locked or no arena is there to copy to. Raises PlanError where what the last step
    gave still lies in the arena."""
    arena, engine = session.arena, session.engine
    if arena is None or not arena.held_bytes or not session.memory.pin:
        return {}
    sources = _long_pinned(session, arena.held_bytes)
    if not sources:
        return {}
    engine.settle()
    if arena.is_used:
        raise PlanError("outputs of the last step are still held in the device's arena; observe when they are gone")
    taken_s = {Channel.H2D: 0.0, Channel.D2H: 0.0}
    expected_s = dict(taken_s)
    for source in sources:
        there = arena.strided(0, (source.numel(),), (1,), torch.uint8)
        ways = {Channel.H2D: (there, source), Channel.D2H: (source, there)}  # what comes back is what is there
        for channel, (out, src) in ways.items():
            taken_s[channel] += min(_copy_s(out, src) for _ in range(2))
            expected_s[channel] += session.machine.transfer_s(source.numel(), channel, Tier.PINNED)
    return {channel: taken_s[channel] / expected_s[channel] for channel in taken_s}


def _long_pinned(session: Session, most_bytes: int) -> list[torch.Tensor]:
    """Bytes of frozen parameters in page-locked memory of ours, evenly from all that are long, as many as are enough."""
    resident = session.planning.resident or frozenset()
    weights = [p for name, p in named_weights(session.model) if name not in resident and not p.requires_grad]
    long = [p for p in weights if _LONG_BYTES <= p.nbytes <= most_bytes and p.is_contiguous() and session.memory.owns(p) and p.device.type == "cpu"]
    every = max(1, sum(p.nbytes for p in long) // _ENOUGH_BYTES)
    return [p.detach().view(-1).view(torch.uint8) for p in long[::every]]


def _copy_s(out: torch.Tensor, src: torch.Tensor) -> float:
    device = out.device if out.device.type != "cpu" else src.device
    synchronize = getattr(torch.get_device_module(device), "synchronize", _nothing)
    synchronize()
    begun = time.perf_counter()
    out.copy_(src, non_blocking=True)
    synchronize()
    return time.perf_counter() - begun


def _nothing() -> None:
    """A device without streams has done what it was told."""
