"""Planning for one model: every graph that a Session meets is planned here before it runs, all under one budget.

The first graph decides where parameters reside; every later one (evaluation, another shape, another set of trained parameters) is
planned in what that leaves, or refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from . import text
from .account import OptimizerStep, reasons_of
from .attention_calls import bind, kernels_in, unbind
from .captured_step import CapturedStep, pinned_values, value_names
from .dispatch import Dispatch
from .donation import Donated
from .effects import Tier
from .errors import HostShort, PlanError
from .explain import in_one_line
from .footprint import Footprint
from .graph import Bounds, border_of, info, output_of
from .kernels import AttentionKernel, kernel_of_call
from .layout import padded
from .liveness import liveness
from .lowered import disk_values_bytes, rewrites, saved_of
from .lookups import solve_looked_up
from .machine import Machine
from .memory_map import MemoryMap, placeable, scratch_bytes
from .optimizer_states import States
from .pins import PARAMETER_PLACES, VALUE_PLACES, Pin, idle_pins, pinned_names
from .pipeline import Context
from .planner import TRAINED_SHARE, USER_SCALAR_BYTES, Parameter, Problem, Searches, Solution, outside_bytes, place_parameters, solve
from .places import named_constants, named_weights
from .plans import Decision, GraphPlan, Plan, Prediction, Reside, SwapOut, neighbours, plan_from, versions_here
from .reorder import is_readable, solve_in_form, solve_reordered, whole_losses
from .replays import obstacle, recorded, replaying
from .runtime.slabs import whole_pages
from .simulate import simulate
from .sizes import format_bytes
from .work import dtype_word
from .workspace import Workspace

log = logging.getLogger("fxoffload")


# Where memory is not tight for a recording, and it takes less than one byte of the budget in so many, it is compared with what is called in the largest
# budget in which it is, or does: which one does not depend on the budget, and there are few rungs below it.
_NOTICEABLE = 16


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes a model may use, and where its host tiers may lie. `host_named`: whether the caller set `host_bytes`, or it is what was
    free: then it is no part of the plan, which is the same tomorrow."""

    device_bytes: int
    host_bytes: int | None = None
    disk_bytes: int = 0
    pinned: bool = False
    host_named: bool = True


@dataclass
class Planning:
    """`plan`: the Plan so far. `resident`: names of the parameters on the device, None until the first graph is planned.

    `states`: what the optimizer keeps, None where none steps: then no trained parameter resides on the device. `disk_file_bytes`: what
    the disk file must hold for every graph so far. `neighbours`: parameters that lie side by side on the host, in that order, as the first
    graph's buckets say; None until there is one. `searches`: what one graph's plans under several budgets share, where there are several.
    `form`: Defer and Chunk decisions that a plan is to have; None where the search chooses. `thorough`: see Problem.
    """

    model: nn.Module
    device: torch.device
    budgets: Budgets
    machine: Machine
    plan: Plan | None = None
    pins: tuple[Pin, ...] = ()
    numerics: str = "bitwise"
    replan: bool = True
    may_reside: bool = True
    states: States | None = None
    dump_dir: Path | None = None
    resident: frozenset[str] | None = None
    homes: dict[str, Tier] = field(default_factory=dict)
    disk_file_bytes: int = 0
    accumulates: bool = False
    neighbours: tuple[str, ...] | None = None
    searches: Searches | None = None
    form: tuple[Decision, ...] | None = None
    thorough: bool = False
    _host_limit: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for one in idle_pins(self.pins, (name for name, _ in self.model.named_parameters()), PARAMETER_PLACES):
            raise ValueError(f"pin {one.pattern!r} matches no parameter")
        self._check_device_pins()
        self.homes = self._homes()
        if self.plan is not None:
            if self.plan.numerics != "bitwise" and self.numerics == "bitwise":
                raise PlanError(f"the plan was made with numerics={self.plan.numerics!r}; to replay it, say so here too")
            self._check_residency(self.plan)
            self.resident = frozenset(r.value for r in self.plan.residency if r.tier is Tier.DEVICE)
            self.homes.update({r.value: r.tier for r in self.plan.residency if r.tier.on_host})

    def _check_device_pins(self) -> None:
        """Raises PlanError for pins that disagree, and for a parameter pinned to the device that cannot stay there."""
        weights = dict(named_weights(self.model))
        places = pinned_names(self.pins, weights, PARAMETER_PLACES)
        for name, weight in weights.items():
            if places.get(name) != "device":
                continue
            if not self.may_reside:
                raise PlanError(
                    f"{name} is pinned to the device, and {self.device.type} cannot hold a parameter that stays the same object")
            if weight.requires_grad and self.states is None:
                raise PlanError(f"{name} is trained and pinned to the device, where optimizer=None plans no states for it")

    def _check_residency(self, plan: Plan) -> None:
        """Raises PlanError when the plan is for another model, or keeps on the device what this device cannot hold."""
        other = sorted({r.value for r in plan.residency} ^ set(self.homes))
        if other:
            raise PlanError(f"the plan is for another model: {len(other)} parameters are only in one of them, the first is {other[0]!r}")
        stay = [r.value for r in plan.residency if r.tier is Tier.DEVICE]
        if stay and not self.may_reside:
            raise PlanError(
                f"the plan keeps {len(stay)} parameters on the device, the first is {stay[0]!r}, and {self.device.type} cannot hold a "
                'parameter that stays the same object; plan with pins=[fxoffload.pin("*", "host")]')

    # Lowering a captured graph ----------------------------------------------------------------------------------------

    def lower(self, captured: CapturedStep) -> tuple[str, fx.Graph]:
        """The label and the lowered form of a captured Step under the plan, which this may extend.

        Raises PlanError when the budget, the plan or replan=False forbid it.
        """
        graph, fingerprint, workspace = captured.graph, captured.fingerprint, self._workspace(captured.bounds)
        context = self._bound(graph, captured.bounds, workspace)
        if self.plan is None or fingerprint not in self.plan.graphs:
            if self.plan is not None and not self.replan:
                raise PlanError(
                    f"the plan does not cover this graph (fingerprint {fingerprint[:12]}) and replan=False{_other_versions(self.plan)}")
            self._extend(captured, context)
        elif self._has_other_kernels(self.plan.graphs[fingerprint], kernels_in(graph, captured.bounds, workspace)):
            self._extend(captured, context)
        lowered = self._apply(graph, context, fingerprint)
        assert self.plan is not None
        short = self._shortfall(graph, lowered, context, self.plan.graphs[fingerprint].replays)
        if short > 0:
            if not self.replan:
                raise PlanError(f"at these sizes the plan needs {short} bytes more than device_budget, and replan=False", short)
            self._extend(captured, context)
            lowered = self._apply(graph, context, fingerprint)
        self._check_disk(lowered, context.bounds)
        assert self.plan is not None
        known = self.plan.graphs[fingerprint]
        if self.neighbours is None:
            self.neighbours = neighbours(known.decisions)
        log.info("plan %s, graph %s: %s", self.plan.id, known.label, in_one_line(known))
        if self._rehearses:
            unbind(lowered)
        return known.label, lowered

    # What a later start need not find out again ------------------------------------------------------------------------

    def is_repeatable(self) -> bool:
        """False where the plan depends on how much host memory was free: what the host lacked went to the disk."""
        if self.budgets.host_named or self.plan is None:
            return True
        swapped = any(isinstance(d, SwapOut) and d.tier is Tier.DISK for d in self.plan.decisions)
        return not swapped and Tier.DISK not in self.homes.values()

    def state(self) -> dict[str, object]:
        """All that lowering graphs has decided so far, as JSON, for `resume`."""
        assert self.plan is not None
        return {
            "plan": self.plan.to_json(), "resident": None if self.resident is None else sorted(self.resident),
            "homes": {name: tier.value for name, tier in self.homes.items()}, "disk_file_bytes": self.disk_file_bytes,
            "neighbours": None if self.neighbours is None else list(self.neighbours),
        }

    def covers(self, state: Mapping[str, Any]) -> bool:
        """Whether the host has what the plan of a `state` needs, where no budget says so. Raises KeyError, TypeError or PlanError for
        what is no state."""
        if self.budgets.host_named or self.budgets.host_bytes is None:
            return True
        return plan_from(json.loads(state["plan"]), "plan").predicted.host_peak_bytes <= self.budgets.host_bytes

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken. Raises KeyError, TypeError, ValueError or PlanError for what is none."""
        plan, homes = plan_from(json.loads(state["plan"]), "plan"), {name: Tier(tier) for name, tier in state["homes"].items()}
        resident = None if state["resident"] is None else frozenset(state["resident"])
        neighbours = None if state["neighbours"] is None else tuple(state["neighbours"])
        self.plan, self.homes, self.resident, self.neighbours = plan, homes, resident, neighbours
        self.disk_file_bytes = int(state["disk_file_bytes"])

    def decide(self, captured: CapturedStep) -> Plan:
        """The plan of a captured Step, made and not applied: what `lower` would decide. Raises PlanError when there is none."""
        context = self._bound(captured.graph, captured.bounds, self._workspace(captured.bounds))
        solution = self._extend(captured, context)
        self._check_disk(solution.lowered, context.bounds)
        assert self.plan is not None
        return self.plan

    def problem(self, captured: CapturedStep) -> Problem:
        """What a search for the plan of a captured Step is given, where it is called."""
        context = self._bound(captured.graph, captured.bounds, self._workspace(captured.bounds))
        return self._problem(captured.graph, pinned_values(self.pins, captured.graph, context))

    def _shortfall(self, graph: fx.Graph, lowered: fx.Graph, context: Context, replays: bool) -> int:
        """Device bytes a lowered graph needs above the budget: a plan made for smaller sizes may not fit at these."""
        problem = self._problem(graph, context)
        if replays:
            problem = self._recorded(problem)
        outside = problem.fixed_bytes + outside_bytes(problem, self.resident or frozenset())
        if problem.footprint.by_offsets:
            taken = MemoryMap.of(lowered, context.bounds, context.workspace).taken_bytes(problem.footprint, outside)
            return taken - self.budgets.device_bytes
        live_bytes = simulate(lowered, context.bounds, self.machine, outside, context.workspace).device_peak_bytes
        return problem.footprint.needed_bytes(live_bytes) - self.budgets.device_bytes

    def _apply(self, graph: fx.Graph, context: Context, fingerprint: str) -> fx.Graph:
        assert self.plan is not None
        known = self.plan.graphs[fingerprint]
        place_parameters(graph, self.parameters(), self.resident or frozenset())
        output_of(graph).meta |= {text.LABEL: known.label, text.BOUNDS: context.bounds}
        dumps = self.dump_dir / known.label if self.dump_dir is not None else None
        lowered = rewrites(Footprint.planned(self.machine)).run(graph, replace(context, plan=known), dumps)
        if self.dump_dir is not None:
            self.plan.save(self.dump_dir / "plan.json")
        saved = saved_of(lowered)
        if saved != known.saved:
            raise PlanError(f"{known.label}: the graph saves other values than the plan says: {sorted(set(saved) ^ set(known.saved))[:4]}")
        return lowered

    def _bound(self, graph: fx.Graph, bounds: Bounds, workspace: Workspace) -> Context:
        """What passes may read of a graph, whose attention from now on names its kernels."""
        unbind(graph)
        bind(graph, workspace)
        return Context(
            bounds=bounds, device_budget_bytes=self.budgets.device_bytes, device=self.device, swap_tier=self._host_tier(), workspace=workspace)

    def _workspace(self, bounds: Bounds) -> Workspace:
        # A plan made without the device speaks of the machine's.
        device_type = self.machine.device_type if self.device.type == "cpu" else self.device.type
        return Workspace(bounds, device_type, self.machine.multiprocessors, Dispatch.on(self.device, self.machine))

    @property
    def _rehearses(self) -> bool:
        """Whether a graph runs on another kind of device than the plan speaks of: its attention runs what is there."""
        return self.device.type == "cpu" and self.machine.device_type != "cpu"

    def _has_other_kernels(self, known: GraphPlan, found: tuple[AttentionKernel, ...]) -> bool:
        """Whether attention runs other kernels than a plan assumes, which is logged. Raises PlanError for that with replan=False.

        A device that is not of the machine's kind runs what it has.
        """
        if known.kernels is None or self.device.type not in ("cpu", self.machine.device_type):
            return False
        assumed, now = kernel_of_call(known.kernels), kernel_of_call(found)
        other = [(one, now[name]) for name, one in assumed.items() if name in now and now[name].kernel != one.kernel]
        if not other:
            return False
        before, after = other[0]
        where = "on this device" if self.device.type == self.machine.device_type else f"on {self.machine.name}"
        told = (
            f"{known.label}: the plan assumes {before} for the attention of {before.layers}, and torch dispatches "
            f"{after} {where}")
        if not self.replan:
            raise PlanError(
                f"{told}; with replan=False only the plan's kernel may run (torch.nn.attention.sdpa_kernel chooses it)",
                max(0, after.scratch_bytes - before.scratch_bytes) or None)
        log.warning("%s: it is planned anew", told)
        return True

    def _host_tier(self) -> Tier:
        return Tier.PINNED if self.budgets.pinned else Tier.PAGEABLE

    # Making plans -----------------------------------------------------------------------------------------------------

    def _extend(self, captured: CapturedStep, context: Context) -> Solution:
        graph = captured.graph
        if self.plan is None and self.pins:
            for one in idle_pins(self.pins, value_names(graph, context.bounds), VALUE_PLACES):
                raise PlanError(f"pin {one.pattern!r} to {one.place} matches no value of the sample's graph (dump_dir shows their names)")
        solution = self._solved(graph, pinned_values(self.pins, graph, context))
        label = self._label(graph)
        reasons = reasons_of(
            solution.lowered, solution.simulation, solution.tried, context.bounds, self.machine, self._optimizer.seconds(solution.resident))
        assert isinstance(context.workspace, Workspace)
        graph_plan = GraphPlan(
            label, solution.decisions, saved_of(solution.lowered), self._prediction(solution), reasons,
            kernels_in(graph, context.bounds, context.workspace), solution.replays)
        if self.plan is None:
            self.resident = solution.resident
            host = self.budgets.host_bytes if self.budgets.host_named else None
            self.plan = Plan(
                self.budgets.device_bytes, host, self.machine.name, self.numerics, self._residency(), {}, made_with=versions_here())
        lines = whole_losses(graph) if self.numerics == "reordered" else []
        if captured.opened:
            lines = [*lines, f"{', '.join(captured.opened)}: run as torch's ops, which Inductor fuses with those beside them"]
        notes = dict.fromkeys([*self.plan.notes, *(f"{label}: {line}" for line in lines)])
        self.plan = replace(self.plan.with_graph(captured.fingerprint, graph_plan), numerics=self.numerics, notes=tuple(notes))
        return solution

    def _problem(self, graph: fx.Graph, context: Context) -> Problem:
        inputs = {info(n).fqn for n in graph.find_nodes(op="placeholder")}
        buffers = sum(b.nbytes for n, b in named_constants(self.model) if n not in inputs)
        footprint, workspace = Footprint.planned(self.machine), context.workspace
        if footprint.by_offsets:
            live = liveness(graph, context.bounds)
            footprint = replace(
                footprint, scratch_bytes=scratch_bytes(live, placeable(live), workspace), between_steps_bytes=self._between_steps_bytes())
            context = replace(context, workspace=Donated(context.bounds))
        parameters = self.parameters()
        pinned = pinned_names(self.pins, parameters, PARAMETER_PLACES)
        on_device = frozenset(n for n, place in pinned.items() if place == "device")
        return Problem(
            graph, context, parameters, self.machine, buffers + USER_SCALAR_BYTES + footprint.overhead_bytes,
            self.resident if self.may_reside else frozenset(), on_device, frozenset(pinned) - on_device, self.states is not None,
            footprint, workspace, host_bytes=self._host_limit, optimizer=self._optimizer, thorough=self.thorough,
        )

    def _between_steps_bytes(self) -> int:
        """What an optimizer that steps over all its parameters at once needs for itself, of those that may be on the device."""
        reside = self._trained_residents()
        temporaries = self.states.temporaries if self.states is not None else 0
        return temporaries * sum(p.nbytes for n, p in named_weights(self.model) if n in reside)

    def _trained_residents(self) -> frozenset[str]:
        """Trained parameters that are, or may be, on the device."""
        if self.states is None:
            return frozenset()
        weights = dict(named_weights(self.model))
        trained = {n: p.nbytes for n, p in weights.items() if p.requires_grad}
        if self.resident is not None:
            return self.resident & trained.keys()
        pinned = pinned_names(self.pins, trained, PARAMETER_PLACES)
        all_reside = sum(trained.values()) <= TRAINED_SHARE * sum(p.nbytes for p in weights.values())
        return frozenset(n for n in trained if all_reside or pinned.get(n) == "device")

    def parameters(self) -> dict[str, Parameter]:
        """Every parameter with its bytes and the tier it has off the device."""
        embeddings = {id(p) for m in self.model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        return {
            name: Parameter(
                name, p.untyped_storage().nbytes() or p.nbytes, p.requires_grad, self.homes.get(name, self._host_tier()),
                p.nbytes * p.requires_grad, self._state_bytes(p, id(p) in embeddings))
            for name, p in named_weights(self.model)
        }

    def _state_bytes(self, parameter: torch.Tensor, is_embedding: bool) -> int:
        if self.states is None or not parameter.requires_grad:
            return 0
        return self.states.bytes_of(parameter.shape, parameter.element_size(), is_embedding)

    def _homes(self) -> dict[str, Tier]:
        """The host tier of every parameter before any budget is looked at: the pinned one, else the machine's."""
        names = [name for name, _ in named_weights(self.model)]
        pinned = pinned_names(self.pins, names, ("pinned", "pageable", "disk"))
        return {name: Tier(pinned[name]) if name in pinned else self._host_tier() for name in names}

    def _solved(self, graph: fx.Graph, context: Context) -> Solution:
        """The Solution that fits the host budget too: the faster one of those that swap less, and those that send to the disk what the host
        lacks, frozen parameters, then swapped activations, then trained parameters with their gradients.

        Raises PlanError naming the bytes that are missing.
        """
        solution = self._solve(graph, context)
        if self._host_short(solution) <= 0:
            return solution
        homes = self.homes.copy()
        within = self._within_host(graph, context)
        lacks = self._host_short(within)
        if lacks <= 0 and self.budgets.disk_bytes == 0:
            return within
        solution = self._with_disk(graph, context, solution)
        short = self._host_short(solution)
        if short <= 0 and (lacks > 0 or solution.total_s < within.total_s):
            return solution
        if lacks > 0 and short <= lacks:
            self._check_host(solution)
        self.homes = homes
        self._check_host(within)
        return within

    def _within_host(self, graph: fx.Graph, context: Context) -> Solution:
        """The Solution of a search whose candidates keep to the host budget, or, where none does, that lacks least."""
        budget = self.budgets.host_bytes
        assert budget is not None
        try:
            solution = self._limited(graph, context, budget)
        except HostShort as short:
            # By what its candidates swap in all: less of it may be there at once.
            return self._limited(graph, context, budget + (short.shortfall_bytes or 0))
        over = self._host_short(solution)
        if over > 0:  # beside what candidates count there are gaps between parameters that lie side by side
            with contextlib.suppress(HostShort):
                return self._limited(graph, context, budget - over)
        return solution

    def _limited(self, graph: fx.Graph, context: Context, host_bytes: int) -> Solution:
        """Raises HostShort where no candidate of the search takes so few bytes of the host."""
        self._host_limit = host_bytes
        try:
            return self._solve(graph, context)
        finally:
            self._host_limit = None

    def _with_disk(self, graph: fx.Graph, context: Context, solution: Solution) -> Solution:
        """The Solution when the disk takes what the host lacks for `solution`, as far as it can."""
        while self._host_short(solution) > 0 and self._move_to_disk(solution, context, trained=False):
            # A copy from the disk takes longer and is in another bucket: what resides and what is swapped may change with it.
            solution = self._solve(graph, context)
        if self._host_short(solution) > 0 and self._uses(solution, context.swap_tier):
            context = replace(context, swap_tier=Tier.DISK)
            on_disk = self._solve(graph, context)
            solution = on_disk if self._disk_short(on_disk, context) <= 0 else solution
        while self._host_short(solution) > 0 and self._move_to_disk(solution, context, trained=True):
            solution = self._solve(graph, context)
        return solution

    def _solve(self, graph: fx.Graph, context: Context) -> Solution:
        """The Solution to be replayed from a recording, where the step can be recorded and that has room; else to be called.

        It must not be the slower one: where it takes a noticeable share of the budget, or memory is tight for it, a smaller budget may have room to
        call the step alone. Where what it copies for the caller leaves no room to read that, it is called.
        """
        called, known = self._problem(graph, context), self.searches if self.searches is not None else Searches()
        if not (called.footprint.by_offsets and self.budgets.pinned) or obstacle(graph) is not None:
            return self._solution(called, known)
        replayed = self._recorded(called)
        try:
            solution = replace(self._solution(replayed, known), replays=True)
        except PlanError:
            return self._solution(called, known)
        if obstacle(solution.lowered) is not None:
            return self._solution(called, known)
        more = replayed.footprint.needed_bytes(0) - called.footprint.needed_bytes(0)
        tight = max(more * _NOTICEABLE, solution.tight_bytes)
        smaller = called
        if is_readable(replayed, solution):
            # What a smaller budget may run is called: it is this one's plan too where that is faster.
            context = replace(called.context, device_budget_bytes=min(self.budgets.device_bytes, tight))
            smaller = replace(called, context=context, than_s=solution.total_s)
        try:
            return min([solution, self._solution(smaller, known)], key=lambda one: (not is_readable(called, one), one.simulation.step_s + one.after_s))
        except PlanError:
            return solution

    def _solution(self, problem: Problem, known: Searches) -> Solution:
        if self.numerics == "reordered":
            if self.form is not None:
                return solve_looked_up(problem, functools.partial(solve_in_form, form=self.form))
            return solve_looked_up(problem, functools.partial(solve_reordered, known=known), known)
        return solve_looked_up(problem, functools.partial(solve, known=known), known)

    def _recorded(self, problem: Problem) -> Problem:
        """The problem of the same step when it is replayed from a recording."""
        reside = self._trained_residents()
        trained = sum(p.n_bytes for p in problem.parameters.values() if p.trainable and p.fqn in reside)
        footprint = recorded(problem.footprint, problem.graph, problem.context.bounds, trained)
        context = replace(problem.context, draws_once=True)
        return replace(problem, context=context, machine=replaying(self.machine), footprint=footprint)

    def _host_short(self, solution: Solution) -> int:
        if self.budgets.host_bytes is None:
            return 0
        return self._prediction(solution).host_peak_bytes - self.budgets.host_bytes

    def _disk_short(self, solution: Solution, context: Context) -> int:
        used = self.parameters_on_disk_bytes(solution.resident) + disk_values_bytes(solution.lowered, context.bounds)
        return used - self.budgets.disk_bytes

    @staticmethod
    def _uses(solution: Solution, tier: Tier) -> bool:
        return any(isinstance(d, SwapOut) and d.tier is tier for d in solution.decisions)

    def _move_to_disk(self, solution: Solution, context: Context, trained: bool) -> bool:
        """Gives as many parameters as the host is short, the largest first, a home on disk. False when none could go."""
        if self.plan is not None:
            return False
        fixed = pinned_names(self.pins, self.homes, ("pinned", "pageable", "disk"))
        free = [p for p in self.parameters().values() if p.trainable == trained and p.home is not Tier.DISK]
        free = [p for p in free if p.fqn not in solution.resident and p.fqn not in fixed]
        short, left = self._host_short(solution), -self._disk_short(solution, context)
        moved = False
        for parameter in sorted(free, key=lambda p: (-p.n_bytes, p.fqn)):
            # A trained parameter's gradients follow it: the new one, and one that is still being accumulated into.
            needed = whole_pages(parameter.n_bytes) * (3 if trained else 1)
            if short > 0 and needed <= left:
                self.homes[parameter.fqn] = Tier.DISK
                short, left, moved = short - parameter.n_bytes - parameter.gradient_bytes, left - needed, True
        return moved

    def _check_host(self, solution: Solution) -> None:
        short, budget = self._host_short(solution), self.budgets.host_bytes
        if short > 0:
            raise PlanError(
                f"host_budget of {budget} bytes ({format_bytes(budget)}) is {short} bytes short for parameters, gradients, optimizer "
                f"states and swapped activations, with disk_budget of {format_bytes(self.budgets.disk_bytes)} used as far as it goes. "
                "The missing bytes, or a larger disk_budget (with disk_dir), would help.", short)

    def _check_disk(self, lowered: fx.Graph, bounds: Bounds) -> None:
        values = disk_values_bytes(lowered, bounds)
        self.disk_file_bytes = max(self.disk_file_bytes, self.parameters_on_disk_bytes(self.resident or frozenset()) + values)
        short = self.disk_file_bytes - self.budgets.disk_bytes
        if short > 0:
            raise PlanError(
                f"disk_budget of {self.budgets.disk_bytes} bytes ({format_bytes(self.budgets.disk_bytes)}) is {short} bytes short for what "
                "the plan has on disk.", short)

    def parameters_on_disk_bytes(self, resident: frozenset[str]) -> int:
        """Bytes that parameters take in the disk file."""
        return sum(
            whole_pages(p.n_bytes) for p in self.parameters().values() if p.home is Tier.DISK and p.fqn not in resident)

    def _label(self, graph: fx.Graph) -> str:
        kind = "train" if border_of(graph) is not None else "forward"
        taken = sum(1 for g in (self.plan.graphs.values() if self.plan else ()) if g.label.split("-")[0] == kind)
        return kind if not taken else f"{kind}-{taken}"

    def _prediction(self, solution: Solution) -> Prediction:
        simulation = solution.simulation
        kept = self._kept_bytes(solution.resident)
        off = [p for p in self.parameters().values() if p.fqn not in solution.resident]
        states = sum(p.state_bytes for p in off)
        together = frozenset(neighbours(solution.decisions) if self.neighbours is None else self.neighbours)
        held = {p.fqn: padded(p.n_bytes) if p.fqn in together else p.n_bytes for p in off}
        host = sum(held[p.fqn] for p in off if p.home is not Tier.DISK) + states + simulation.host_peak_bytes + kept[False]
        disk = sum(held[p.fqn] for p in off if p.home is Tier.DISK) + simulation.disk_peak_bytes + kept[True]
        return Prediction(
            simulation.device_peak_bytes, host, disk, simulation.step_s, simulation.peak_node, simulation.moved_bytes)

    def _kept_bytes(self, resident: frozenset[str]) -> dict[bool, int]:
        """Bytes of gradients off the device that the caller keeps while a step makes the next: in memory (False) and on disk (True)."""
        kept = {False: 0, True: 0}
        for parameter in self.parameters().values() if self.accumulates else ():
            if parameter.fqn not in resident:
                kept[parameter.home is Tier.DISK] += parameter.gradient_bytes
        return kept

    def accumulate(self) -> None:
        """From now on gradients are kept from one step to the next: every prediction counts them.

        Raises PlanError when the host budget has no room for them; then nothing has changed.
        """
        assert self.plan is not None
        before, self.accumulates = self.plan, True
        kept = self._kept_bytes(self.resident or frozenset())
        self.plan = self.plan.with_kept_gradients(kept[False], kept[True])
        budget = self.budgets.host_bytes
        short = 0 if budget is None else self.plan.predicted.host_peak_bytes - budget
        if short > 0:
            self.plan, self.accumulates = before, False
            raise PlanError(
                f"host_budget of {budget} bytes is {short} bytes short for gradients that are accumulated: those that are "
                f"kept take {format_bytes(kept[False])} beside the new ones. The missing bytes, or zero_grad() before each backward, would "
                "help.", short)

    @functools.cached_property
    def _optimizer(self) -> OptimizerStep:
        trained = ((n, p) for n, p in named_weights(self.model) if p.requires_grad)
        return OptimizerStep(tuple((n, p.numel(), dtype_word(p.dtype)) for n, p in trained), self.states, self.machine)

    def _residency(self) -> tuple[Reside, ...]:
        resident = self.resident or frozenset()
        return tuple(Reside(p.fqn, Tier.DEVICE if p.fqn in resident else p.home, p.n_bytes) for p in self.parameters().values())


def _other_versions(plan: Plan) -> str:
    """"; it was made with ...", where that is not what is here: then the same model's graph may be another."""
    here = versions_here()
    other = [f"{name} {version} (here {here.get(name)})" for name, version in plan.made_with.items() if here.get(name) != version]
    return f"; it was made with {', '.join(other)}" if other else ""
