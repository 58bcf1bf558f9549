"""How long the last training steps took."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from .errors import PlanError

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

# Steps that are remembered, and how many of them there must be: the first ones compile kernels, record and fill caches.
_KEPT, _LEAST = 9, 5


@dataclass(frozen=True, slots=True)
class StepsTaken:
    """Median seconds of `n_steps` training steps that ran the graph `label` on batches of one shape."""

    label: str
    shapes: Shapes
    n_steps: int
    step_s: float


class StepClock:
    """Times the last training steps: from a call of forward to the end of its backward. On CUDA by events, which nothing waits for before
    they are read."""

    def __init__(self, device: torch.device) -> None:
        self._by_events = device.type == "cuda"
        self._begun: tuple[Shapes, Any] | None = None
        self._steps: deque[tuple[str, Shapes, Any, Any]] = deque(maxlen=_KEPT)

    def begin(self, shapes: Shapes) -> None:
        """A forward is called on a batch. One whose backward never came is forgotten."""
        self._begun = shapes, self._now()

    def end(self, label: str) -> None:
        """The backward of the graph `label` has been issued."""
        if self._begun is not None:
            self._steps.append((label, *self._begun, self._now()))
            self._begun = None

    @property
    def label(self) -> str | None:
        """The graph of the last step."""
        return self._steps[-1][0] if self._steps else None

    def taken(self) -> StepsTaken:
        """The steps that were as the last one. Raises PlanError where there are too few."""
        alike = [step for step in self._steps if step[:2] == self._steps[-1][:2]]
        if len(alike) < _LEAST:
            raise PlanError(f"{len(alike)} of the last training steps were of one shape; {_LEAST} are needed to observe what they take")
        return StepsTaken(*alike[-1][:2], len(alike), statistics.median(self._between_s(begun, ended) for _, _, begun, ended in alike))

    def _now(self) -> Any:
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between_s(self, begun: Any, ended: Any) -> float:
        if not self._by_events:
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) * 1e-3
