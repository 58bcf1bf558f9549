"""A replayed backward that is issued before autograd hands over what forward has kept for it.

autograd takes what was kept out of its node one by one, and the graph's wrappers look at each: 5 to 10 ms for 8B with LoRA, in which a
device that has ended the forward does nothing. A recorded backward reads all of it where the recorded forward has put it. The gradients it
begins with are all that it needs to be given.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..torch_compat import keeps_graph


class Beginning(Protocol):
    """A backward that is replayed."""

    def begin(self, passed: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> bool:
        """Issues the backward of these gradients; False where it must wait for the rest of its arguments. `passed`: see `Pair.begun`."""

    def end_begun(self) -> None:
        """Nothing that was begun is waited for any more."""


@dataclass(slots=True, eq=False)
class Pair:
    """Forward and backward of one step. `n_returned`: how many of forward's results the caller gets, the others are kept for backward;
    `fixed`: addresses, outside the arena, where the recorded forward has put some of those; `notice`: called when a backward begins."""

    n_returned: float = math.inf
    fixed: set[int] = field(default_factory=set)
    notice: Callable[[], None] | None = None
    backward: weakref.ref[Beginning] | None = None

    @contextlib.contextmanager
    def begun(self, passed: Sequence[torch.Tensor], gradients: Sequence[object]) -> Iterator[None]:
        """Inside, autograd runs the backward of a forward that was replayed, and the device has begun with it, if it can. `passed`: what
        forward was given anew and has kept as it is, in the order of its results; `gradients`: of what it returned."""
        if self.notice is not None:
            self.notice()
        backward = self.backward() if self.backward is not None else None
        # A backward that may run again leaves what was kept as it is: its values are not where they are recorded.
        if backward is None or keeps_graph() or torch.is_grad_enabled():
            yield
            return
        has_begun = backward.begin(passed, [one for one in gradients if isinstance(one, torch.Tensor)])
        try:
            yield
        finally:
            if has_begun:
                backward.end_begun()
