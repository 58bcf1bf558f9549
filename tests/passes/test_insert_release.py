from __future__ import annotations

from collections.abc import Callable

import pytest

from fxoffload import ops, text
from fxoffload.errors import VerifyError
from fxoffload.pipeline import parse_pipeline

def test_insert_release_writes_the_golden_text(assert_golden: Callable[..., None]) -> None:
    assert_golden("insert_release.ir", "insert-release")


def test_insert_release_refuses_a_transfer_that_nobody_awaits() -> None:
    graph = text.parse('graph "g"\n%w: f32[8]@pinned = input\n%a: f32[8] = fxo.swap_in %w, device\nreturn ()')
    with pytest.raises(VerifyError, match="open Transfer"):
        parse_pipeline("insert-release").run(graph)


def test_insert_release_after_itself_would_release_twice_and_is_refused() -> None:
    graph = text.parse('graph "g"\n%x: f32[8] = input\n%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\nreturn (%b)')
    once = parse_pipeline("insert-release").run(graph)
    assert len(once.find_nodes(op="call_function", target=ops.release)) == 1
    with pytest.raises(VerifyError, match="insert-release"):
        parse_pipeline("insert-release").run(once)
