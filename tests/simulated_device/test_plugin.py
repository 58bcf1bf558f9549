"""The pytest plugin: golden files, and what its import costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fxoffload.testing import golden, plugin, twins  # noqa: F401  # what a run inside imports first is forgotten with it

pytest_plugins = ["pytester"]


GIVEN = 'graph "g"\n%x: f32[8] = input {role=batch}\n%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\nreturn (%b)\n'
TEST = "def test_text(assert_golden): assert_golden('case.ir', 'insert-release')"


def test_a_golden_file_that_differs_fails_with_a_diff_until_it_is_updated(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    golden = pytester.path / "case.ir"
    golden.write_text(GIVEN + "// -----\n" + GIVEN)
    pytester.runpytest_inprocess().stdout.fnmatch_lines(["*+fxo.release %a*"])
    assert pytester.runpytest_inprocess("--update-golden").ret == 0
    assert golden.read_text().startswith(GIVEN) and golden.read_text().count("fxo.release %a\n") == 1
    assert pytester.runpytest_inprocess().ret == 0


def test_a_missing_golden_file_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    assert pytester.runpytest_subprocess().ret == 1


def test_the_plugin_does_not_import_torch() -> None:
    program = f"import runpy, sys; runpy.run_path({plugin.__file__!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
