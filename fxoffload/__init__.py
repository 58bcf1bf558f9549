"""fxoffload: a memory compiler for PyTorch training."""

from .api import compile
from .errors import PlanError, VerifyError
from .plan import Plan

__all__ = ["Plan", "PlanError", "VerifyError", "compile"]
