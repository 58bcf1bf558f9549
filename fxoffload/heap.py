"""Python's garbage collector while graphs of many nodes are made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def heap_at_rest() -> Iterator[None]:
    """Collections look only at what is made from here on: a capture makes millions of objects that stay, and every full
    collection would walk all of them. May be entered again inside. Where the caller has frozen the heap, nothing is done.
    """
    if gc.get_freeze_count() and not _entered:
        yield
        return
    _entered.append(True)
    gc.freeze()
    try:
        yield
    finally:
        _entered.pop()
        if not _entered:
            gc.unfreeze()


_entered: list[bool] = []


def sweep() -> None:
    """Frees what a capture left in cycles. Dynamo's frames end in them with the batch and the outputs of the call that captured: bytes
    on the device that no plan knows, until the collector comes by."""
    gc.collect()
