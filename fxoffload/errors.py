"""The errors fxoffload raises besides ValueError (the caller's argument)."""

from __future__ import annotations


class VerifyError(RuntimeError):
    """A graph breaks the rules of memory: a pass is wrong. The text shows the lines around the node."""


class PlanError(RuntimeError):
    """This plan, machine or budget cannot work.

    `shortfall_bytes` is what the budget lacks (the budget plus it plans and runs), or None when bytes are not the reason. `remedies`:
    changes that were tried and plan, in words, where planning was asked for them.
    """

    def __init__(self, message: str, shortfall_bytes: int | None = None, remedies: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.shortfall_bytes = shortfall_bytes
        self.remedies = remedies


class HostShort(PlanError):
    """What every plan of a search lacks is host memory."""
