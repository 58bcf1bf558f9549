"""A replayed forward that is issued before its call is checked.

Dynamo looks at every module in each call before it runs what it compiled: 8 to 30 ms for 8B with LoRA, in which a device that has ended its
last step does nothing. A recorded forward that writes nothing but its own memory can be issued meanwhile, with the arguments of its last
replay and the batch of now. When the compiled function is reached with those arguments, its results are there; otherwise they are dropped,
the device's generator goes back, and all goes on as if nothing had been issued.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.fx as fx

from .. import ops

# A forward that was issued in vain so many times is not issued early any more.
_MOST_IN_VAIN = 3

Batch = Mapping[str, torch.Tensor]


class Starting(Protocol):
    """What is replayed."""

    def start(self, batch: Batch) -> Hashable:
        """Issues the forward of this batch: what it read, or None where that is not as it was, or its memory is not free."""


@dataclass(slots=True)
class EarlyStarts:
    """Those of one Session on `device`. `n_used`: how many were right so far; `n_in_vain`: how many were not."""

    device: torch.device
    n_used: int = 0
    n_in_vain: int = 0
    _call: tuple[Hashable, Batch] | None = None
    _expected: dict[Hashable, weakref.ref[Starting]] = field(default_factory=dict)
    _started: tuple[Starting, Hashable] | None = None
    _drawn: torch.Tensor | None = None
    _in_vain: weakref.WeakKeyDictionary[Starting, int] = field(default_factory=weakref.WeakKeyDictionary)

    @property
    def waits(self) -> bool:
        """Whether something was issued that nobody has claimed yet."""
        return self._started is not None

    @contextlib.contextmanager
    def during(self, mode: Hashable, batch: Batch) -> Iterator[None]:
        """A call: what was replayed in the last one in this mode is issued at once."""
        if self._call is not None:  # inside another
            yield
            return
        self._call = mode, batch
        try:
            expected = self._expected.get(mode, _nobody)()
            if expected is not None:
                self._drawn = ops.get_rng_state(self.device)
                read = expected.start(batch)
                self._started = None if read is None else (expected, read)
            yield
        finally:
            self.drop()
            self._call = None

    def batch_of(self, replay: Starting) -> Batch | None:
        """The batch of the call at work, in which `replay` was replayed, and is expected to be again."""
        if self._call is None or self._in_vain.get(replay, 0) >= _MOST_IN_VAIN:
            return None
        mode, batch = self._call
        self._expected[mode] = weakref.ref(replay)
        return batch

    def claim(self, replay: Starting, read: Hashable) -> bool:
        """True when `replay` was issued, and it read this: what it has written are its results. Else what was issued is dropped."""
        if self._started != (replay, read):
            self.drop()
            return False
        self._started = None
        self.n_used += 1
        return True

    def forget(self) -> None:
        """Expects nothing any more."""
        self._expected.clear()

    def drop(self) -> None:
        """What runs now is not what was issued: nothing must have been drawn since."""
        if self._started is None or self._drawn is None:
            return
        replay, _ = self._started
        self._started = None
        ops.set_rng_state(self._drawn, self.device)
        self.n_in_vain += 1
        self._in_vain[replay] = self._in_vain.get(replay, 0) + 1
        for mode in [mode for mode, expected in self._expected.items() if expected() is replay]:
            del self._expected[mode]


def _nobody() -> None:
    """Stands for an expectation that is not there."""


def writes_inputs(graph: fx.Graph) -> bool:
    """Whether the graph may write into something that it was given."""
    return any(node.op == "call_function" and _writes(node.target) for node in graph.nodes)


def _writes(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
