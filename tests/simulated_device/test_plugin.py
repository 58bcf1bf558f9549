"""The pytest plugin: golden files, and what its import costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxoffload.testing import plugin

pytest_plugins = ["pytester"]


def test_a_golden_file_that_differs_fails_with_a_diff_until_it_is_updated(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_text(assert_golden): assert_golden('new', 'golden/text.txt')")
    golden = pytester.mkdir("golden") / "text.txt"
    golden.write_text("old")
    pytester.runpytest_inprocess().stdout.fnmatch_lines(["-old", "+new", "*--update-golden"])
    assert pytester.runpytest_inprocess("--update-golden").ret == 0
    assert golden.read_text() == "new"
    assert pytester.runpytest_inprocess().ret == 0


def test_a_missing_golden_file_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_text(assert_golden): assert_golden('', 'missing.txt')")
    assert pytester.runpytest_inprocess().ret == 1


def test_the_plugin_does_not_import_torch() -> None:
    program = f"import runpy, sys; runpy.run_path({plugin.__file__!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
