"""What every test runs under."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch

# pytest gives its handlers to every logger that does not propagate; with one on this logger, torch writes out each graph it captures.
# After the import of torch, which sets its loggers up.
logging.getLogger(f"{torch.__name__}.__trace").propagate = True

# A process of hundreds of captures holds millions of objects: to walk them as often as Python does by default takes a twentieth of the time.
gc.set_threshold(100_000, 50, 50)


@pytest.fixture(autouse=True, scope="module")
def forgetting(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's own functions remember, graphs and plans of its models, ends with the module, as does what Dynamo knows."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    torch._dynamo.reset()
