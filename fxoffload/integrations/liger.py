"""Liger: its ops choose their kernels in a few functions, which the capture leaves whole as it does the Functions behind them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_CHOOSING = (("liger_kernel.backends", "dispatch"), ("liger_kernel.transformers.model.loss_utils", "fixed_fused_linear_cross_entropy"))


def choosing() -> tuple[Callable[..., Any], ...]:
    """Those functions, as far as they are loaded."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _CHOOSING)
    return tuple(one for one in found if one is not None)
