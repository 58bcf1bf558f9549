"""Parameters that a module outside of the model holds too: it would see them move and change under its feet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter of the model by name, and the class of a module outside that holds it too."""

    name: str
    owner: str


def shared_outside(model: nn.Module) -> Shared | None:
    """The first parameter of `model` that a live module outside of it holds too, None when there is none.

    Lists of parameters compute nothing and do not count. Python's own record of references is the only place that knows.
    """
    found = _find(model)
    if found is not None:
        # A module that is garbage in a cycle is still in the record.
        gc.collect()
        found = _find(model)
    return found


def _find(model: nn.Module) -> Shared | None:
    names = {id(p): name for name, p in model.named_parameters()}
    inside = {id(m._parameters) for m in model.modules()}
    holders = [h for h in gc.get_referrers(*model.parameters()) if type(h) is dict and id(h) not in inside] if names else []
    for module in _modules_of(holders):
        name = next((names[id(p)] for p in module._parameters.values() if id(p) in names), None)
        if name is not None:
            return Shared(name, f"a {type(module).__name__}")
    return None


def _modules_of(holders: list[dict[str, object]]) -> Iterator[nn.Module]:
    """The modules whose `_parameters` is one of the dictionaries: held directly or through the module's own `__dict__`."""
    wanted = {id(h) for h in holders}
    if not wanted:
        return
    for owner in gc.get_referrers(*holders):
        candidates = [owner, *gc.get_referrers(owner)] if type(owner) is dict else [owner]
        for candidate in candidates:
            if isinstance(candidate, nn.Module) and not isinstance(candidate, (nn.ParameterList, nn.ParameterDict)):
                if id(candidate._parameters) in wanted:
                    yield candidate
