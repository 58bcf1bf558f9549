"""Rules of the house that a reader of one file cannot see: who imports whom, what no module does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PASSES = sorted((ROOT / "passes").glob("*.py"))
LIBRARY = sorted((ROOT / "fxoffload").rglob("*.py"))
MODULES = {path: ast.parse(path.read_text(), str(path)) for path in (*PASSES, *LIBRARY)}


def imported(path: Path) -> Iterator[str]:
    """Full dotted names of everything the file imports; relative imports resolved."""
    package = ["fxoffload", "passes"] if path.parent == ROOT / "passes" else list(path.parent.relative_to(ROOT).parts)
    for node in ast.walk(MODULES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


# Where the process ends: every error becomes one line and an exit status.
PROCESS_BOUNDARY = ROOT / "fxoffload" / "cli" / "__init__.py"


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in PASSES if p.stem != "__init__"], ids=ids)
def test_no_pass_imports_another(path: Path) -> None:
    assert not [name for name in imported(path) if name.startswith(("fxoffload.passes", "passes"))]


@pytest.mark.parametrize("path", LIBRARY, ids=ids)
def test_fxoffload_never_imports_a_pass(path: Path) -> None:
    """The registry in pipeline.py finds passes by name, through importlib."""
    assert not [name for name in imported(path) if name.startswith("fxoffload.passes")]


@pytest.mark.parametrize("path", [*PASSES, *LIBRARY], ids=ids)
def test_no_module_uses_global(path: Path) -> None:
    assert not [node.lineno for node in ast.walk(MODULES[path]) if isinstance(node, ast.Global)]


@pytest.mark.parametrize("path", [p for p in (*PASSES, *LIBRARY) if p != PROCESS_BOUNDARY], ids=ids)
def test_no_module_catches_everything(path: Path) -> None:
    """A handler of everything that re-raises is a clean-up and stays allowed."""
    broad = [
        node.lineno
        for node in ast.walk(MODULES[path])
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _reraises(node)
    ]
    assert not broad


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(_is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))


def _reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


@pytest.mark.parametrize("path", [p for p in PASSES if p.stem != "__init__"], ids=ids)
def test_a_pass_is_one_module_with_one_pass_of_its_name(path: Path) -> None:
    passes = [
        node.value
        for node in MODULES[path].body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "PASS"
    ]
    if path.stem.startswith("plan_") and not passes:
        return
    (call,) = passes
    assert isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant)
    assert call.args[0].value == path.stem.replace("_", "-")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mypy_finds_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-color-output"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
