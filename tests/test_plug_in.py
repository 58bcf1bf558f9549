"""The examples of docs/plug_in.md and the backend of README.md do what they say: single passes and pipelines on graphs that fxoffload did not capture."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same
from torch import nn

import fxoffload

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "plug_in.md"


def blocks(language: str, page: Path = DOCS) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [content for word, content in fenced if word == language]


def run_example(index: int, page: Path = DOCS) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(blocks("python", page)[index], str(page), "exec"), names)  # noqa: S102
    return names


def test_the_make_fx_example_prints_the_text_in_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_example(0)
    assert capsys.readouterr().out.strip() == blocks("")[0].strip()
    assert names["peak_bytes"] > 0
    released = [n for n in names["released"].nodes if n.target is torch.ops.fxo.release.default]
    assert len(released) == 3 and not [n for n in names["graph"].nodes if n.target is torch.ops.fxo.release.default]


@pytest.mark.parametrize("page", [DOCS, ROOT / "README.md"], ids=lambda page: page.name)
def test_the_backend_example_trains_bit_equal_and_recomputes_and_swaps(
        page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    names = run_example(1, page)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    ours = copy.deepcopy(plain)
    results = []
    for model in (plain, torch.compile(ours, backend=names["my_backend"])):
        torch.manual_seed(1)
        loss = model(torch.linspace(-1, 1, 1024).reshape(32, 32)).square().mean()
        loss.backward()
        results.append(loss)
    assert torch.equal(*results)
    assert_same(plain, ours)
    final = sorted((tmp_path / "dumps").glob("*-insert-release.ir"))[0].read_text()
    assert "fxo.swap_out" in final and "origin=" in final


def test_a_pass_that_needs_more_than_a_foreign_graph_has_says_what(tmp_path: Path) -> None:
    names = run_example(0)
    with pytest.raises(ValueError, match="hoist-transfers.*requires"):
        fxoffload.parse_pipeline("insert-checkpoint,hoist-transfers").run(names["graph"])
