"""Property tests of host budgets: a plan keeps to them or is refused with bytes that help; more of the host is never predicted slower."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from zoo import FAMILIES

from fxoffload.errors import PlanError
from fxoffload.machine import load_machine
from fxoffload.optimizer_states import optimizer_states
from fxoffload.plans import Plan
from fxoffload.session import Options, Session
from fxoffload.study import Study

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("FXOFFLOAD_LAWS_SEED", "3"))


@pytest.fixture(params=["llama", pytest.param("lora", marks=pytest.mark.slow), pytest.param("gpt2", marks=pytest.mark.slow)])
def study(request: pytest.FixtureRequest) -> Iterator[Study]:
    """A captured step of a small model in a device budget that lets half of what it could keep on the device."""
    case, machine = FAMILIES[request.param](), load_machine("cpu")
    options = Options(torch.device("cpu"), device_budget_bytes=1 << 40, planning_only=True, states=optimizer_states("adamw"))
    session = Session(case.model, options, machine, None)
    session.router.capture((), dict(case.batch))
    assert session.captured is not None
    whole = Study(session.planning, session.captured)
    most = whole.plan().predicted.device_peak_bytes
    least = most
    try:
        whole.plan(replace(session.planning.budgets, device_bytes=1))
    except PlanError as refused:
        least = 1 + (refused.shortfall_bytes or 0)
    planning = replace(session.planning, budgets=replace(session.planning.budgets, device_bytes=(least + most) // 2))
    yield Study(planning, session.captured, whole.searches)
    session.close()


def planned(study: Study, host_bytes: int | None, disk_bytes: int) -> Plan:
    return study.plan(replace(study.planning.budgets, host_bytes=host_bytes, disk_bytes=disk_bytes))


@pytest.mark.parametrize("disk_bytes", [0, 1 << 40])
def test_a_host_budget_is_kept_or_refused_truly_and_more_of_it_is_never_predicted_slower(study: Study, disk_bytes: int) -> None:
    free = planned(study, None, disk_bytes).predicted
    with pytest.raises(PlanError) as refused:
        planned(study, 1, 0)
    least = 1 + (refused.value.shortfall_bytes or 0)
    dice = random.Random(f"{SEED} {disk_bytes}")
    drawn = sorted({least, free.host_peak_bytes, *(dice.randint(least // 2, free.host_peak_bytes) for _ in range(6))})
    found: list[tuple[int, Plan]] = []
    for host_bytes in drawn:
        try:
            plan = planned(study, host_bytes, disk_bytes)
        except PlanError as error:
            assert not found, f"{found[-1][0]} bytes of the host do, {host_bytes} do not"
            assert planned(study, host_bytes + (error.shortfall_bytes or 0), disk_bytes).predicted.host_peak_bytes > host_bytes
            continue
        assert plan.predicted.host_peak_bytes <= host_bytes
        assert plan.predicted.device_peak_bytes <= study.planning.budgets.device_bytes
        found.append((host_bytes, plan))
    assert found[-1][1].predicted.step_s == free.step_s
    assert found[0][0] < least if disk_bytes else found[0][0] == least
    for (smaller, a), (larger, b) in zip(found, found[1:]):
        assert (b.predicted.step_s or 0) <= (a.predicted.step_s or 0) * (1 + 1e-9), (smaller, larger, a.predicted.step_s, b.predicted.step_s)
