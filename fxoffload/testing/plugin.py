"""pytest plugin of fxoffload: the fixtures `assert_golden`, `numeric_twin` and `simulated_device`, the option `--update-golden`.

Loaded by every pytest run of an environment that has fxoffload installed, hence no import of torch at the top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch.fx as fx

    from fxoffload.pipeline import Pass
    from fxoffload.testing.simulated_device import SimulatedDevice


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fxoffload")
    group.addoption("--update-golden", action="store_true", help="rewrite golden files that differ instead of failing")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Installs the device before the first test of a run that uses it: after a first backward it is too late."""
    if any("simulated_device" in getattr(item, "fixturenames", ()) for item in session.items):
        _install()


def _install() -> SimulatedDevice | None:
    from fxoffload.testing.simulated_device import NoCompilerError, install

    try:
        return install()
    except NoCompilerError:
        return None


@pytest.fixture
def simulated_device() -> Iterator[SimulatedDevice]:
    """The device "fxsim" without a capacity and with its counters reset, before the test and after it.

    Skips only where the device cannot be built: without a C++ compiler.
    """
    device = _install()
    if device is None:
        pytest.skip("the simulated device is C++ built on first use, and this machine has no C++ compiler")
    _reset(device)
    yield device
    _reset(device)


def _reset(device: SimulatedDevice) -> None:
    device.set_capacity(None)
    device.reset_peak_memory_stats()
    device.reset_transfer_stats()


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`assert_golden("my_pass.ir", "my-pass")`: the golden file (relative to the test's folder) holds for a Pass or a pipeline
    text; see `testing.golden.check_golden`. With `--update-golden` the file is rewritten instead."""
    folder = request.path.parent
    update = bool(request.config.getoption("--update-golden"))

    def check(path: str | Path, passes: str | Pass | Sequence[Pass], twin: bool = True) -> None:
        from fxoffload.testing.golden import check_golden

        check_golden(folder / path, passes, update, twin)

    return check


@pytest.fixture
def numeric_twin() -> Callable[[fx.Graph, fx.Graph], None]:
    """`numeric_twin(before, after)`: both graphs give the same bits on the adversarial reference runtime."""
    from fxoffload.testing.twins import assert_same_results

    return assert_same_results
