"""Python's garbage collector while graphs of many nodes are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@contextlib.contextmanager
def heap_at_rest() -> Iterator[None]:
    """Every full collection looks only at what was made since the last one: a capture makes millions of objects that stay, and to
    walk all of them each time would take longer the more there are. Collections are rare, too: what a search makes and drops is gone
    without one. May be entered again inside. Where the caller has frozen the heap, nothing is done.
    """
    # Asked last: it counts the frozen objects one by one.
    if not _entered and gc.get_freeze_count() > _FROZEN_AT_START:
        yield
        return
    _entered.append(_Rest(gc.get_threshold()))
    if len(_entered) == 1:
        gc.freeze()
        gc.callbacks.append(_keep_survivors)
        young, *older = gc.get_threshold()
        gc.set_threshold(max(young, _YOUNG) if young else 0, *older)
    try:
        yield
    finally:
        rest = _entered.pop()
        if not _entered:
            gc.set_threshold(*rest.thresholds)
            gc.callbacks.remove(_keep_survivors)
            gc.unfreeze()


@dataclass(slots=True)
class _Rest:
    """`thresholds`: the collector's before it. `has_kept`: things that were made in it are out of sight."""

    thresholds: tuple[int, int, int]
    has_kept: bool = False


def keep() -> None:
    """What there is now is out of the collector's sight, until the heap at rest is at work again: for what is known to last, which is not
    walked in vain then."""
    if _entered:
        gc.freeze()
        _entered[0].has_kept = True


def _keep_survivors(phase: str, collection: Mapping[str, int]) -> None:
    """What a full collection leaves is out of the next one's sight, until the heap is at work again."""
    if phase == "stop" and collection["generation"] == 2:
        keep()


_entered: list[_Rest] = []
# Objects that are made before young ones are looked at, where Python says 700: some hundred megabytes. Most of what a search makes lives as
# long as the search: of one of 7.6 s collections took 0.9 s at 200,000, because its objects were walked twice, 0.46 s at 1,000,000; at this
# there is none.
_YOUNG = 4_000_000
# Python 3.12 starts with some hundred objects frozen; a caller who freezes his heap has hundreds of thousands.
_FROZEN_AT_START = 10_000


@dataclass(slots=True)
class Litter:
    """What captures leave in cycles: Dynamo's frames end in them and hold the batch of the call that captured, bytes on the device that
    no plan knows, until the collector comes by. `lies`: something was captured since the last sweep."""

    lies: bool = False

    def sweep(self) -> None:
        """Frees it, once per capture. At rest only what was made since is walked, unless some of that is out of sight already."""
        if not self.lies:
            return
        self.lies = False
        if _entered and _entered[0].has_kept:
            gc.unfreeze()
        gc.collect()

    def swept_before(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`run`, which sweeps before its first call after a capture: by then Dynamo has returned, and nothing of the step is on the
        device yet."""

        def start(arguments: list[Any]) -> Any:
            self.sweep()
            return run(arguments)

        return start
