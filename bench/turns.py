"""Turns on one card: processes that share a lock file prepare beside each other and measure one by one."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(lock: str | Path | None, others: bool = False) -> Iterator[None]:
    """Inside, no other process measures that has the same lock file; with `others` those that prepare, and ask so, may be inside too."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if others else fcntl.LOCK_EX)
        yield
