"""Golden tests of passes: text in, text out.

A golden file holds cases, each an input and the text expected of it; "// -----" lines stand between all of them. Comment lines
that start an input say what the case shows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.fx as fx

from .. import text
from ..graph import Bounds
from ..verify import verify

SEPARATOR = "// -----"
Rewrite = Callable[[fx.Graph, Bounds], fx.Graph]


def assert_golden(path: str | Path, rewrite: Rewrite, update: bool = False, facts: frozenset[str] = frozenset()) -> None:
    """Every case of the file holds: `rewrite` makes the expected text of the input, and its graph passes the verifier.

    With `update` the file is rewritten with what `rewrite` makes. Raises AssertionError with the diff of the first case that
    differs, ValueError when an input has no expected text.
    """
    cases = golden_cases(path)
    made = [(given, _rewritten(given, rewrite, facts)) for given, _ in cases]
    if update:
        Path(path).write_text(f"\n{SEPARATOR}\n".join(part.strip() for case in made for part in case) + "\n")
        return
    for number, ((_, expected), (given, got)) in enumerate(zip(cases, made), 1):
        difference = text.diff(expected.strip(), got.strip())
        assert not difference, f"{path}, case {number} ({given.strip().splitlines()[0]}):\n{difference}"


def golden_cases(path: str | Path) -> list[tuple[str, str]]:
    """Pairs of input and expected text. Raises ValueError when they do not pair up."""
    parts = Path(path).read_text().split(f"\n{SEPARATOR}\n")
    if len(parts) % 2:
        raise ValueError(f"{path}: an input has no expected text after it")
    return list(zip(parts[::2], parts[1::2]))


def _rewritten(given: str, rewrite: Rewrite, facts: frozenset[str]) -> str:
    bounds = text.parse_bounds(given)
    graph = rewrite(text.parse(given), bounds)
    verify(graph, bounds, facts)
    return text.render(graph, bounds, columns=False)
