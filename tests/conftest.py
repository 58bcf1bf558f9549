"""What every test runs under."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._inductor.config

from fxoffload import rung

# pytest gives its handlers to every logger that does not propagate; with one on this logger, torch writes out each graph it captures.
# After the import of torch, which sets its loggers up.
logging.getLogger(f"{torch.__name__}.__trace").propagate = True

# A process of hundreds of captures holds millions of objects: to walk them as often as Python does by default takes a twentieth of the time.
gc.set_threshold(100_000, 50, 50)

# What the processor says of its vectors is believed: each empty cache of kernels would have Inductor compile three programs to see.
torch._inductor.config.cpp.vec_isa_ok = True

# What somebody measured of this machine is no part of the tests: no file lies in there.
os.environ["FXOFFLOAD_MACHINES"] = os.devnull


@pytest.fixture(autouse=True, scope="module")
def forgetting(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's own functions remember, graphs and plans of its models, ends with the module, as does what Dynamo knows."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    torch._dynamo.reset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-search", action="store_true", help="all plans are searched for as users' are")


@pytest.fixture(autouse=True, scope="module")
def search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans of small models are searched for on fewer rungs, and not packed: tests of what is done with a plan need none that is near the
    best. Modules marked `full_search` have the search that users have."""
    with pytest.MonkeyPatch.context() as patch:
        if not (request.config.getoption("--full-search") or request.node.get_closest_marker("full_search")):
            patch.setattr(rung, "_EFFORTS", tuple(replace(one, bits=4, n_refined=1, n_tries=0) for one in rung._EFFORTS))
        yield
