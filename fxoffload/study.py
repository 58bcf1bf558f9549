"""Planning one captured step again: under other budgets and on other machines, each time for a search and no capture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from glob import escape

from .captured_step import CapturedStep
from .errors import PlanError
from .heap import heap_at_rest
from .machine import Machine
from .pins import Pin
from .places import named_weights
from .planner import Searches
from .planning import Budgets, Planning
from .plans import Decision, Plan
from .rates import Curve
from .reasons import Gain

_GIB = 1 << 30
_GB_PER_S = 1e9
_NO_LIMIT = 1 << 50


@dataclass(frozen=True, slots=True)
class Study:
    """A captured step, and the Planning that says for which model, pins and optimizer. The model must still be as it was captured.

    `searches`: what its plans share.
    """

    planning: Planning
    captured: CapturedStep
    searches: Searches = field(default_factory=Searches)

    def plan(self, budgets: Budgets | None = None, machine: Machine | None = None) -> Plan:
        """The plan under other Budgets or on another Machine, made and not applied. Raises PlanError when there is none."""
        return self._planned(budgets, machine)[0]

    def anew(self, machine: Machine, form: tuple[Decision, ...]) -> Plan:
        """The plan on another Machine that leaves every result what it is: with the same Defer and Chunk decisions, and each trained parameter
        where it is, beside its optimizer's states. Raises PlanError when there is none."""
        planning = self.planning
        resident = planning.resident or frozenset()
        trained = [name for name, p in named_weights(planning.model) if p.requires_grad]
        stay = tuple(Pin(escape(name), "device" if name in resident else planning.homes[name].value) for name in trained)
        with heap_at_rest():
            return replace(
                planning, plan=None, resident=None, disk_file_bytes=0, dump_dir=None, machine=machine, neighbours=None, form=form,
                pins=(*planning.pins, *stay), searches=None).decide(self.captured)

    def gains(self, plan: Plan) -> tuple[Gain, ...]:
        """What one more GiB of device memory, of host memory where it is limited, and one more GB/s to the device make of the step.

        Never longer than in `plan`, which is a plan for more of anything too.
        """
        budgets, machine, step_s = self.planning.budgets, self.planning.machine, plan.predicted.step_s
        if step_s is None:
            return ()
        more = {"GiB of device memory": (replace(budgets, device_bytes=budgets.device_bytes + _GIB), machine)}
        if budgets.host_bytes is not None:
            more["GiB of host memory"] = (replace(budgets, host_bytes=budgets.host_bytes + _GIB), machine)
        more["GB/s to the device"] = (budgets, with_faster_h2d(machine, _GB_PER_S))
        return tuple(Gain(of, min(step_s, self.plan(*changed).predicted.step_s or step_s)) for of, changed in more.items())

    def remedies(self, error: PlanError) -> list[str]:
        """Budgets that would make a refused plan work, each found by planning with it; the seconds of its step beside."""
        return [f"{name} of {n_bytes} bytes (step {step_s:.4f} s)" for name, n_bytes, step_s in self._remedies(error)]

    def _remedies(self, error: PlanError) -> Iterator[tuple[str, int, float]]:
        budgets, short = self.planning.budgets, error.shortfall_bytes or 0
        tries = [("device_budget", replace(budgets, device_bytes=budgets.device_bytes + short))]
        if budgets.host_bytes is not None:
            tries.append(("host_budget", replace(budgets, host_bytes=budgets.host_bytes + short)))
            tries.append(("disk_budget", replace(budgets, disk_bytes=_NO_LIMIT)))
        for name, changed in tries:
            try:
                plan, disk_bytes = self._planned(changed, None)
            except PlanError:
                continue
            needed = {"device_budget": changed.device_bytes, "host_budget": changed.host_bytes or 0, "disk_budget": disk_bytes}[name]
            yield name, needed, plan.predicted.step_s or 0.0

    def _planned(self, budgets: Budgets | None, machine: Machine | None) -> tuple[Plan, int]:
        """The plan, and the bytes of its disk file."""
        anew = replace(
            self.planning, plan=None, resident=None, disk_file_bytes=0, dump_dir=None, budgets=budgets or self.planning.budgets,
            machine=machine or self.planning.machine, searches=self.searches)
        with heap_at_rest():
            return anew.decide(self.captured), anew.disk_file_bytes


def with_faster_h2d(machine: Machine, bytes_per_s: float) -> Machine:
    """The machine with so much more rate to the device, of every size and from both host tiers."""
    def faster(curve: Curve | None) -> Curve | None:
        if curve is None:
            return None
        share = curve.per_s / (curve.per_s + bytes_per_s)
        points = tuple((size, curve.latency_s + (seconds - curve.latency_s) * share) for size, seconds in curve.points)
        return Curve(curve.latency_s, curve.per_s + bytes_per_s, points)

    now = machine.transfers
    return replace(machine, transfers=replace(now, h2d_pinned=faster(now.h2d_pinned), h2d_pageable=faster(now.h2d_pageable)))
