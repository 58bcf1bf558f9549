"""pytest plugin of fxoffload: the fixtures `simulated_device` and `assert_golden`, the option `--update-golden`.

Loaded by every pytest run of an environment that has fxoffload installed, hence no import of torch at the top.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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
def assert_golden(request: pytest.FixtureRequest) -> Callable[[str, str | Path], None]:
    """`assert_golden(text, path)`: text equals the file at path (relative to the test's folder), else the test fails
    with a unified diff. With `--update-golden` the file is rewritten instead."""
    folder = request.path.parent
    update = bool(request.config.getoption("--update-golden"))

    def check(text: str, path: str | Path) -> None:
        _compare(text, folder / path, update)

    return check


def _compare(text: str, path: Path, update: bool) -> None:
    golden = path.read_text() if path.exists() else ""
    if text == golden and path.exists():
        return
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    diff = difflib.unified_diff(golden.splitlines(), text.splitlines(), str(path), "this run", lineterm="")
    pytest.fail("\n".join([*diff, f"{path} differs; if this is meant, run pytest --update-golden"]), pytrace=False)
