"""`bench/peers`: every peer is measured alone, with the fields that its row must have; what cannot run is a row with its message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from peers import run, summary  # noqa: E402
from peers.limit import limits_of  # noqa: E402
from peers.rows import ROWS  # noqa: E402
from peers.tuning import Attempt, search  # noqa: E402
from turns import alone  # noqa: E402

from fxoffload.machine import load_machine  # noqa: E402

FIELDS = {"row", "peer", "cap_bytes", "shape", "trained", "batch", "length", "precision", "step_s", "step_s_all", "tokens_per_s", "reserved_bytes",
          "allocated_bytes", "host_rss_peak_bytes", "pinned_bytes", "loss_first", "loss_last", "losses", "versions", "facts", "warm", "timed",
          "physical_limit_s", "limit_s", "limit_machine", "limit_share"}
ONE_LAYER_BYTES = 10


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The tiny rows of one run, by peer. Liger's kernels cannot run on a CPU, whether they are installed or not."""
    out = tmp_path_factory.mktemp("peers") / "rows.json"
    command = [sys.executable, str(ROOT / "bench" / "peers" / "run.py"), "--row", "F1", "--tiny", "--device", "cpu", "--peers",
               "plain@none,checkpoint,liger", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return {row["peer"]: row for row in json.loads(out.read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.integration
def test_every_peer_of_a_run_has_a_row_with_all_fields(measured: dict[str, dict[str, Any]]) -> None:
    assert list(measured) == ["plain", "checkpoint", "liger"]
    assert measured["plain"]["cap_bytes"] is None and measured["checkpoint"]["cap_bytes"] == ROWS["F1"].cap_bytes
    for peer in ("plain", "checkpoint"):
        row = measured[peer]
        assert FIELDS <= row.keys()
        assert row["warm"] >= 3 and row["timed"] >= 5 and len(row["losses"]) == row["warm"] + row["timed"]
        assert row["loss_last"] < row["loss_first"]


@pytest.mark.slow
@pytest.mark.integration
def test_peers_start_from_the_same_weights(measured: dict[str, dict[str, Any]]) -> None:
    assert measured["plain"]["losses"] == measured["checkpoint"]["losses"]


@pytest.mark.slow
@pytest.mark.integration
def test_peers_of_a_row_with_the_same_cap_have_the_same_limit_and_none_is_faster(measured: dict[str, dict[str, Any]]) -> None:
    """The tiny model fits into its cap as into the machine's memory, so that here the cap makes no difference either."""
    assert len({row["physical_limit_s"] for row in measured.values()}) == 1 and "limit_share" not in measured["liger"]
    for peer in ("plain", "checkpoint"):
        row = measured[peer]
        assert 0 < row["limit_share"] == row["physical_limit_s"] / row["step_s"] < 1


@pytest.mark.unit
def test_weights_that_do_not_fit_under_a_cap_are_loaded_once_for_forward_and_once_for_backward() -> None:
    row, machine = replace(ROWS["L2"].tiny, cap_bytes=1 << 14), load_machine("h200")
    found = limits_of(row, machine)
    assert found["uncapped"]["limit_s"]["h2d"] == 0 and found["uncapped"]["limit_s"]["compute"] > 0
    linears = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 176), (64, 176), (176, 64)]
    weights_bytes = 2 * (2 * sum(m * n + 16 * (m + n) for m, n in linears) + 64 * 512)  # two layers with their adapters, and the head
    loaded_bytes = found["capped"]["limit_s"]["h2d"] * machine.channel_bytes_per_s["h2d"]
    assert loaded_bytes == pytest.approx(2 * (weights_bytes - (1 << 14)), rel=0.05)


@pytest.mark.slow
@pytest.mark.integration
def test_a_peer_that_cannot_run_is_a_row_with_its_message(measured: dict[str, dict[str, Any]]) -> None:
    row = measured["liger"]
    assert "Error: " in row["error"] and str(ROOT) not in row["error"] and "step_s" not in row


@pytest.mark.slow
@pytest.mark.integration
def test_the_summary_shows_what_ran_and_what_did_not(measured: dict[str, dict[str, Any]]) -> None:
    rows = summary.merged([{"rows": list(measured.values())}])
    text, picture = summary.markdown(rows), summary.svg(rows)
    assert "Physical limit (cpu, cap 24 GiB): " in text and "Physical limit (cpu, cap none): " in text
    assert f"| {measured['plain']['limit_share']:.0%} |" in text
    assert "| checkpoint | 24 GiB | **" in text and "| liger | 24 GiB | did not run: " in text
    assert picture.count("<rect class=\"peer\"") == 2 and picture.count("<title>") == 1 and "no cap" in picture


@pytest.mark.unit
def test_a_peer_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    child = "import subprocess, time; print(subprocess.Popen(['setsid', 'sleep', '60']).pid, flush=True); time.sleep(60)"
    began, log = time.perf_counter(), tmp_path / "log"
    status = run.ended([sys.executable, "-c", child], dict(os.environ), log, 1.0)
    assert status is None and time.perf_counter() - began < 10
    assert not psutil.pid_exists(int(log.read_text())) or psutil.Process(int(log.read_text())).status() == psutil.STATUS_ZOMBIE
    assert run.last_words(status, 1.0, log.read_text()).startswith("no row within 1 s; last: ")


@pytest.mark.unit
@pytest.mark.parametrize("fitting", [0, 1, 2, 5, 8])
def test_tuning_finds_the_largest_number_of_layers_that_fits(fitting: int) -> None:
    """However wrong what two layers tell of the others: here the peak of the first few is too high by two layers."""

    def attempt(n: int) -> Attempt | None:
        return Attempt(2.0 - 0.1 * n, 100 + ONE_LAYER_BYTES * n + 2 * ONE_LAYER_BYTES * (n == 2)) if n <= fitting else None

    found = search(8, 100 + ONE_LAYER_BYTES * fitting, attempt)
    assert found.layers == fitting


@pytest.mark.unit
def test_tuning_takes_the_fastest_that_fits_not_the_largest() -> None:
    found = search(4, 1000, lambda n: Attempt(1.0 if n == 3 else 2.0, 100 + n))
    assert found.layers == 3 and found.tried == {0: 2.0, 2: 2.0, 3: 1.0, 4: 2.0}


def test_who_measures_is_alone_and_those_who_prepare_are_beside_each_other(tmp_path: Path) -> None:
    lock, said = tmp_path / "lock", list[str]()

    def measures() -> None:
        with alone(lock):
            said.append("measured")

    waiting = threading.Thread(target=measures)
    with alone(lock, others=True), alone(lock, others=True):
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "it measured while others prepared"
        said.append("prepared")
    waiting.join(10)
    assert said == ["prepared", "measured"]
