"""Parameters that a module outside of the model holds too: it would see them move and change under its feet."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter of the model by name, and the class of a module outside that holds it too."""

    name: str
    owner: str


def shared_outside(model: nn.Module) -> Shared | None:
    """The first parameter of `model` that a live module outside of it holds too, None when there is none.

    Lists of parameters compute nothing and do not count. Only Python's collector knows every module there is, and is asked only
    where something beside the model refers to a parameter.
    """
    found = _find(model)
    if found is not None:
        # A module that is garbage in a cycle is still in the record.
        gc.collect()
        found = _find(model)
    return found


def _find(model: nn.Module) -> Shared | None:
    inside = {id(m._parameters): m._parameters for m in model.modules()}
    names = _held_elsewhere(model, list(inside.values()))
    if not names:
        return None
    # Most of what there is are no modules: nothing else is done for each.
    for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:
        held = vars(module).get("_parameters", {})
        if id(held) in inside or isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            continue
        name = next((names[id(p)] for p in held.values() if id(p) in names), None)
        if name is not None:
            return Shared(name, f"a {type(module).__name__}")
    return None


def _held_elsewhere(model: nn.Module, inside: list[dict[str, nn.Parameter | None]]) -> dict[int, str]:
    """Names, by id, of the parameters that something beside the model's own dictionaries refers to: modules, optimizers or variables."""
    ((_, alone),) = _references({"": nn.Parameter(torch.empty(0))})
    found, explained = dict[int, int](), Counter[int]()
    for held in inside:
        for identity, n in _references(held):
            found[identity] = n
            explained[identity] += 1
    names = {id(p): name for name, p in model.named_parameters()}
    return {identity: names[identity] for identity, n in found.items() if n - alone + 1 > explained[identity]}


def _references(held: Mapping[str, nn.Parameter | None]) -> list[tuple[int, int]]:
    """Of each parameter its id, and how many references Python counts while it is looked at here."""
    return [(id(p), sys.getrefcount(p)) for p in held.values() if p is not None]
