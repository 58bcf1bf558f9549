"""fxoffload: a memory compiler for PyTorch training.

An unmodified model, a sample batch and byte budgets in; the same model, which then trains inside them, out. See `compile` and `plan`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import compile, plan
    from .errors import PlanError, VerifyError
    from .loading import from_pretrained
    from .pins import pin
    from .pipeline import Context, Pass, Pipeline, get_pass, parse_pipeline
    from .plans import Plan
    from .sweeps import sweep

# Names load on first use: importing torch takes seconds that `fxoffload --help` should not.
_HOMES = {
    "compile": "api", "plan": "api", "PlanError": "errors", "VerifyError": "errors", "from_pretrained": "loading", "pin": "pins",
    "Plan": "plans", "Context": "pipeline", "Pass": "pipeline", "Pipeline": "pipeline", "get_pass": "pipeline",
    "parse_pipeline": "pipeline", "sweep": "sweeps",
}

__all__ = [
    "Context", "Pass", "Pipeline", "Plan", "PlanError", "VerifyError", "compile", "from_pretrained", "get_pass", "parse_pipeline", "pin",
    "plan", "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fxoffload' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
