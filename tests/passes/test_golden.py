"""Every rewrite of ours against its golden file; see fxoffload/testing/golden.py for what is checked beside the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fxoffload.pipeline import get_pass
from fxoffload.testing.golden import golden_cases

HERE = Path(__file__).parent
REWRITES = sorted(p.stem for p in (HERE.parents[1] / "passes").glob("*.py") if not p.stem.startswith(("plan_", "__init__")))

# What they return is another value by design; that it makes the same bits is tested where it is read (`test_chunked_logits.py`).
OTHER_RESULTS = {"defer_outputs"}


@pytest.mark.parametrize("stem", REWRITES)
def test_a_pass_writes_its_golden_text_and_changes_no_bit(stem: str, assert_golden: Callable[..., None]) -> None:
    assert_golden(f"{stem}.ir", stem.replace("_", "-"), twin=stem not in OTHER_RESULTS)


def test_values_are_placed_in_pages_as_their_golden_text_says(assert_golden: Callable[..., None]) -> None:
    assert_golden("assign_offsets_in_pages.ir", "assign-offsets{page_bytes=4096}")


@pytest.mark.parametrize("stem", REWRITES)
def test_a_golden_file_shows_the_pass_at_work_and_leaving_alone(stem: str) -> None:
    assert len(golden_cases(HERE / f"{stem}.ir")) >= 2
    assert get_pass(stem.replace("_", "-")).name == stem.replace("_", "-")


def test_the_table_in_the_docs_says_what_the_passes_say() -> None:
    rows = [line.split("|")[1:-1] for line in (HERE.parents[1] / "docs" / "ir.md").read_text().splitlines()]
    told = {row[0].strip(" `"): [set(filter(None, cell.replace(",", " ").split())) for cell in row[2:]] for row in rows if len(row) == 5}
    for name in (stem.replace("_", "-") for stem in REWRITES):
        step = get_pass(name)
        assert told[name] == [set(step.requires), set(step.provides), set(step.breaks)], name
