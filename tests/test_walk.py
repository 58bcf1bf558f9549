"""One walk serves calls as long as the model's structure is the same, and never a call too long."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxoffload import walk as walk_module
from fxoffload.walk import Walk, Walks

pytestmark = pytest.mark.unit


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


def test_an_unchanged_model_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, n = Walks(model()), []
    once = Walk.over
    monkeypatch.setattr(Walk, "over", staticmethod(lambda m: n.append(m) or once(m)))
    first = walks.now()
    walks.model[0].weight.requires_grad_(False)
    walks.model(torch.ones(1, 2)).sum().backward()
    walks.model.zero_grad()
    assert walks.now() is first and len(n) == 1


def added(m: nn.Sequential) -> None:
    m[1].add_module("more", nn.Linear(2, 2))


def removed(m: nn.Sequential) -> None:
    del m[1]


def child_replaced(m: nn.Sequential) -> None:
    m[1][0] = nn.Linear(2, 2)


def parameter_replaced(m: nn.Sequential) -> None:
    m[1][0].weight = nn.Parameter(torch.zeros(2, 2))


def parameter_gone(m: nn.Sequential) -> None:
    m[2].bias = None


def tied(m: nn.Sequential) -> None:
    m[2].weight = m[0].weight


@pytest.mark.parametrize("tables_tell", [True, False])
@pytest.mark.parametrize("change", [added, removed, child_replaced, parameter_replaced, parameter_gone, tied])
def test_every_change_of_structure_is_seen(change: object, tables_tell: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tables_tell:  # a Python that does not count writes
        monkeypatch.setattr(walk_module, "dict_versions", lambda tables: None)
    walks = Walks(model())
    before = walks.now()
    change(walks.model)  # type: ignore[operator]
    now = walks.now()
    assert [id(m) for m in now.modules] == [id(m) for m in walks.model.modules()]
    assert [id(p) for p in now.parameters] == [id(p) for p in walks.model.parameters()]
    assert (now.modules, list(map(id, now.parameters))) != (before.modules, list(map(id, before.parameters)))


def test_what_is_forgotten_holds_no_module() -> None:
    walks = Walks(model())
    walks.now()
    walks.forget()
    assert walks._last is None and not walks._tables
