"""Parameters that a module outside of the model holds too: it would see them move and change under its feet."""

from __future__ import annotations

import gc
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter of the model by name, and the class of a module outside that holds it too."""

    name: str
    owner: str


def shared_outside(model: nn.Module) -> Shared | None:
    """The first parameter of `model` that a live module outside of it holds too, None when there is none.

    Lists of parameters compute nothing and do not count. Only Python's collector knows every module there is.
    """
    found = _find(model)
    if found is not None:
        # A module that is garbage in a cycle is still in the record.
        gc.collect()
        found = _find(model)
    return found


def _find(model: nn.Module) -> Shared | None:
    names = {id(p): name for name, p in model.named_parameters()}
    if not names:
        return None
    inside = {id(m._parameters) for m in model.modules()}
    # Most of what there is are no modules: nothing else is done for each.
    for module in [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]:
        held = vars(module).get("_parameters", {})
        if id(held) in inside or isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            continue
        name = next((names[id(p)] for p in held.values() if id(p) in names), None)
        if name is not None:
            return Shared(name, f"a {type(module).__name__}")
    return None
