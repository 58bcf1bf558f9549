"""An exact solver for small steps: which parameters reside and which values stay, chosen together as a mixed-integer program.

It is the oracle of the fast search, not a part of it, and needs the extra `[exact]` (scipy's HiGHS). Variables, per recipe: is a
parameter resident; does a value stay between two events that touch it. Objective: seconds of forward plus seconds of backward, each at
least what the longest way through its copies and its compute takes. Constraints: bytes during each event. The program leaves out only
what copies under way take of the memory, so its optimum is a bound that no plan of these recipes beats under `schedule_s`; its choice
is then laid out, its copies pulled apart and priced by the same `schedule_s`, and that is what is compared. What is recomputed is one
of the search's recipes; every one is solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .candidates import Candidate, Recomputation, free_names, priced, recomputed, settled
from .gaps import Gap, Gaps
from .overlap import overlapped
from .problem import Problem, outside_bytes
from .recipes import decided, recipes_of_small
from .spill import Ground


# The program knows nothing of the memory that copies under way take: its choice is also made with a share of the memory left to them.
_SLACK_SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4)
# Of equally fast choices the one that copies less: copies count this little beside the seconds of the step.
_COPIES_COUNT = 1e-3


@dataclass(frozen=True, slots=True)
class Exact:
    """`bound_s`: no plan is faster; `best`: the plan that was found, priced as the search prices its own, None where none fits;
    `timed_out`: of so many recipes the optimum was not proven; `n_groups`: decisions of the largest program."""

    bound_s: float
    best: Candidate | None
    timed_out: int
    n_groups: int


def solve_exactly(problem: Problem, seconds: float = 60.0) -> Exact:
    """The Exact of a problem with a device budget, each program given so many `seconds`. Trained parameters reside where they are pinned.

    Raises ImportError naming the extra where scipy is missing, and ValueError without a budget.
    """
    budget = problem.context.device_budget_bytes
    if budget is None:
        raise ValueError("an exact plan needs a device budget")
    found = [_solved(problem, recomputed(problem, recipe, decided(problem, recipe), problem.pinned_to_device), budget, seconds)
             for recipe in recipes_of_small(problem)]
    best = min((one.best for one in found if one.best is not None), key=lambda c: c.step_s, default=None)
    return Exact(min(one.bound_s for one in found), best, sum(one.timed_out for one in found), max(one.n_groups for one in found))


def _solved(problem: Problem, made: Recomputation, budget: int, seconds: float) -> Exact:
    ground = made.ground(made.must)
    outside = problem.fixed_bytes + outside_bytes(problem, made.must)
    capacity = problem.footprint.live_bytes(budget) - outside - ground.fixed_bytes
    gaps = Gaps.of(made.schedule, ground, made.rates, problem.context.kept_values, problem.context.swapped_values).every
    bound_s, timed_out, found = 0.0, 0, []
    for share in _SLACK_SHARES if problem.machine.overlaps else (0.0,):
        least_s, choice, proven = _Program(problem, made, ground, gaps, int(capacity * (1 - share))).solve(seconds)
        # A program with slack leaves out plans that have none: its optimum bounds nothing.
        bound_s, timed_out = (least_s, int(not proven)) if not share else (bound_s, timed_out)
        candidate = _priced(problem, made, choice, gaps, budget) if choice is not None else None
        found += [candidate] if candidate is not None else []
    return Exact(bound_s, min(found, key=lambda c: c.step_s, default=None), timed_out, len(gaps))


def _priced(problem: Problem, made: Recomputation, choice: Choice, gaps: Sequence[Gap], budget: int) -> Candidate | None:
    """The program's choice as a candidate of the search; None where copies under way leave it no room."""
    resident = made.must | choice.resident
    ground, outside = made.ground(resident), problem.fixed_bytes + outside_bytes(problem, resident)
    capacity = problem.footprint.live_bytes(budget) - outside - ground.fixed_bytes
    found = Gaps.of(made.schedule, ground, made.rates, problem.context.kept_values, problem.context.swapped_values).laid_out(choice.kept, capacity)
    candidate = priced(problem, made, resident, *overlapped(made.schedule, found, capacity, made.rates_with(resident)))
    return settled(problem, candidate, budget) if candidate.live_bytes <= problem.footprint.live_bytes(budget) else None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a program chose: the gaps in which values stay, and the names of inputs that reside besides those that must."""

    kept: frozenset[Gap]
    resident: frozenset[str]


class _Program:
    """Columns: one per gap (it stays), then one per input that may reside, one per value (it is sent to the host), two for seconds."""

    def __init__(self, problem: Problem, made: Recomputation, ground: Ground, gaps: Sequence[Gap], capacity: int) -> None:
        self.made, self.ground, self.gaps, self.capacity = made, ground, gaps, capacity
        free = free_names(problem)
        self.n_events = len(made.schedule.events)
        self.border = sum(1 for event in made.schedule.events if event.index < ground.border)
        inputs = dict.fromkeys(s for reads in ground.reads for s in reads if s.is_input and not s.is_tangent)
        self.inputs = {s: len(gaps) + i for i, s in enumerate(inputs)}
        self.may_reside = {s for s in inputs if s.name in free}
        values = dict.fromkeys(gap.storage for gap in gaps if not gap.storage.is_input and not gap.must_stay)
        self.sent = {s: len(gaps) + len(inputs) + i for i, s in enumerate(values)}
        self.forward = len(gaps) + len(inputs) + len(values)
        self.n_columns = self.forward + 2
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []

    def solve(self, seconds: float) -> tuple[float, Choice | None, bool]:
        """The bound, the choice (None where nothing fits or none was found in time), and whether the optimum is proven."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
            from scipy.sparse import csr_array  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError("the exact solver needs scipy: pip install 'fxoffload[exact]'") from error
        rates = self.made.rates
        self._memory()
        self._ways()
        places = [(i, column, value) for i, row in enumerate(self.rows) for column, value in row.items()]
        row_of, column_of, values = zip(*places)
        matrix = csr_array((values, (row_of, column_of)), shape=(len(self.rows), self.n_columns))
        lower, upper = np.zeros(self.n_columns), np.ones(self.n_columns)
        upper[self.forward :] = np.inf
        for i, gap in enumerate(self.gaps):
            lower[i], upper[i] = float(gap.must_stay), float(not gap.must_leave)
        for storage, column in self.inputs.items():
            upper[column] = float(storage in self.may_reside)
        aims = np.zeros(self.n_columns)
        aims[self.forward :] = 1.0
        copies_s = [rates.load_s(gap.storage) for gap in self.gaps] + [rates.load_s(s) for s in self.inputs]
        aims[: len(copies_s)] = [-_COPIES_COUNT * seconds / self._scale_s() for seconds in copies_s]
        whole = np.ones(self.n_columns)
        whole[self.forward :] = 0
        result = milp(aims, integrality=whole, bounds=Bounds(lower, upper), constraints=LinearConstraint(matrix, lb=np.array(self.least)),
                      options={"time_limit": seconds, "mip_rel_gap": 1e-6})
        if result.status == 2:
            return float("inf"), None, True
        # What stays only lowers the objective, so the seconds alone are no less than it.
        bound_s = (result.mip_dual_bound if result.mip_dual_bound is not None else 0.0) * self._scale_s()
        if result.x is None:
            return bound_s, None, False
        kept = frozenset(gap for i, gap in enumerate(self.gaps) if result.x[i] > 0.5)
        return bound_s, Choice(kept, frozenset(s.name for s, i in self.inputs.items() if result.x[i] > 0.5)), result.status == 0

    def _add(self, row: dict[int, float], least: float) -> None:
        self.rows.append(row)
        self.least.append(least)

    def _scale_s(self) -> float:
        """One unit of seconds in the program: compute of the whole step, so that its numbers are near one."""
        return sum(self.made.rates.event_s) or 1.0

    def _memory(self) -> None:
        """Bytes during each event; an input that resides stays always; a value that does not stay once is sent to the host."""
        room = np.full(self.n_events, float(self.capacity))
        stays: list[dict[int, float]] = [{} for _ in range(self.n_events)]
        for i, event in enumerate(self.made.schedule.events):
            room[i] -= event.workspace_bytes + sum(s.n_bytes for s in dict.fromkeys((*self.ground.reads[i], *event.makes)))
        touched = Gaps.of(self.made.schedule, self.ground, self.made.rates).touches
        for i, gap in enumerate(self.gaps):
            for at in range(gap.after + 1, gap.before):
                stays[at][i] = stays[at].get(i, 0.0) - gap.storage.n_bytes
            if gap.storage in self.inputs:
                self._add({i: 1.0, self.inputs[gap.storage]: -1.0}, 0.0)
            elif gap.storage in self.sent:
                self._add({i: 1.0, self.sent[gap.storage]: 1.0}, 1.0)
        for storage, column in self.inputs.items():
            first, last = touched[storage][0], touched[storage][-1]
            for at in (*range(0, first), *range(last + 1, self.n_events)):
                stays[at][column] = -float(storage.n_bytes)
        for storage, touches in touched.items():
            if storage in self.ground.returned:
                room[touches[-1] + 1 :] -= storage.n_bytes
        unit = max(float(self.capacity), 1.0)
        for at, row in enumerate(stays):
            self._add({column: value / unit for column, value in row.items()} or {self.forward: 0.0}, -room[at] / unit)

    def _ways(self) -> None:
        """Each half takes at least its copies up to an event and its compute from there; and compute up to an event, then what is sent."""
        # A table that may reside is read as if it did: no more seconds than there are.
        rates, unit = self.made.rates_with(self.made.must | {s.name for s in self.may_reside}), self._scale_s()
        for column, part in ((self.forward, range(0, self.border)), (self.forward + 1, range(self.border, self.n_events))):
            if not len(part):
                continue
            loads, sends = dict(self._loads(part)), dict(self._sends(part))
            compute = [rates.event_s[i] for i in part]
            if not rates.overlaps:
                every: dict[int, float] = {}
                constant = sum(compute) + _merged(every, (*loads.values(), *sends.values()))
                self._add({column: 1.0, **{c: -v / unit for c, v in every.items()}}, constant / unit)
                continue
            self._add({column: 1.0}, sum(compute) / unit)
            before = [0.0, *accumulate(compute)]
            until: dict[int, float] = {}
            constant = 0.0
            for i, at in enumerate(part):
                if at in loads:
                    constant += _merged(until, (loads[at],))
                    self._add({column: 1.0, **{c: -v / unit for c, v in until.items()}}, (constant + before[-1] - before[i]) / unit)
            after: dict[int, float] = {}
            constant = 0.0
            for i, at in reversed(list(enumerate(part))):
                if at in sends:
                    constant += _merged(after, (sends[at],))
                    self._add({column: 1.0, **{c: -v / unit for c, v in after.items()}}, (constant + before[i + 1]) / unit)

    def _loads(self, part: range) -> Iterator[tuple[int, tuple[dict[int, float], float]]]:
        """Per event the copies to the device that it waits for: coefficients of columns, and a constant."""
        found: dict[int, tuple[dict[int, float], float]] = {}
        first = {s: i for i in range(self.n_events - 1, -1, -1) for s in self.ground.reads[i] if s in self.inputs}
        for storage, at in first.items():
            if at in part:
                seconds = self.made.rates.least_load_s(storage)
                row, constant = found.get(at, ({}, 0.0))
                found[at] = ({**row, self.inputs[storage]: -seconds}, constant + seconds)
        for i, gap in enumerate(self.gaps):
            if gap.before in part:
                seconds = self.made.rates.least_load_s(gap.storage)
                row, constant = found.get(gap.before, ({}, 0.0))
                found[gap.before] = ({**row, i: -seconds}, constant + seconds)
        yield from found.items()

    def _sends(self, part: range) -> Iterator[tuple[int, tuple[dict[int, float], float]]]:
        """Per event the copies to the host that start behind it at the earliest."""
        found: dict[int, tuple[dict[int, float], float]] = {}
        made_at = {s: i for i in range(self.n_events - 1, -1, -1) for s in (*self.ground.reads[i], *self.made.schedule.events[i].makes)}
        for storage, column in self.sent.items():
            if made_at[storage] in part:
                row, constant = found.get(made_at[storage], ({}, 0.0))
                found[made_at[storage]] = ({**row, column: self.made.rates.spill_s(storage)}, constant)
        for at in part:
            seconds = self.made.rates.sink_s.get(self.made.schedule.events[at].index)
            if seconds is not None:
                row, constant = found.get(at, ({}, 0.0))
                found[at] = (row, constant + seconds)
        yield from found.items()


def _merged(row: dict[int, float], parts: tuple[tuple[dict[int, float], float], ...]) -> float:
    """Adds the parts' coefficients to `row`; the sum of their constants."""
    for coefficients, _ in parts:
        for column, value in coefficients.items():
            row[column] = row.get(column, 0.0) + value
    return sum(constant for _, constant in parts)
