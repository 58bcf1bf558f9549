"""The compile cache: a second start gives the same bits and the same plan, and whatever decides them is in the key."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from zoo import llama, lora

import fxoffload
from fxoffload import text
from fxoffload.compile_cache import key, store
from fxoffload.compile_cache.describe import Unstored, canonical, described
from fxoffload.compile_cache.files import Files
from fxoffload.footprint import Footprint
from fxoffload.machine import load_machine
from fxoffload.router import CaptureComplete
from fxoffload.runtime import fused
from fxoffload.runtime.fused import kernel_calls
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
VOCAB, WIDTH = 64, 16
BUDGET = "16MiB"


class Tiny(nn.Module):
    """Embedding, attention of a chosen kernel, a head; returns a loss."""

    def __init__(self, kernel: str = "fused", counts: bool = False) -> None:
        super().__init__()
        self.kernel = kernel
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("steps", torch.zeros(()) if counts else None)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = self.mix(self.embed(input_ids)).unsqueeze(1).chunk(3, -1)
        if self.kernel == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2) * WIDTH**-0.5, -1) @ v
        if self.steps is not None:
            self.steps.add_(1)
        logits = self.head(mixed.squeeze(1)).float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny(dtype: torch.dtype = torch.float32, **options: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**options).to(dtype)


def ids(batch: int = 2, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def started(folder: Path, model: nn.Module | None = None, batch: Any = None, **options: Any) -> nn.Module:
    return fxoffload.compile(
        model or tiny(), ids() if batch is None else batch, **{"device": "cpu", "device_budget": BUDGET, "cache_dir": folder, **options})


def outcome(model: nn.Module, batches: list[Any]) -> list[torch.Tensor]:
    """Losses and parameters of some AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        loss = model(**batch)["loss"]
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit."""
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@contextlib.contextmanager
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], int]]:
    """How many lines so far say something."""
    with caplog.at_level(logging.INFO, "fxoffload"):
        caplog.clear()
        yield lambda words: sum(words in record.getMessage() for record in caplog.records)


HIT = "was not traced and not planned again"


def is_hit(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> bool:
    with told(caplog) as lines:
        started(folder, **options).fxoffload.close()
    return lines(HIT) > 0


# The same training again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [
    pytest.param(lambda: (tiny(), [ids(), ids(1, 5), ids()]), id="tiny"),
    pytest.param(
        lambda: ((case := llama()).model, [case.batch, {k: v[:, :20].contiguous() for k, v in case.batch.items()}]), id="llama",
        marks=pytest.mark.slow),
    pytest.param(lambda: ((case := lora()).model, [case.batch, case.batch]), id="lora"),
])
def test_a_second_start_gives_the_same_bits_and_the_same_plan(family: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, batches = family()
    again = copy.deepcopy(model)
    several = len({batch["input_ids"].shape for batch in batches}) > 1
    first = started(tmp_path, model, batches[0], dynamic=several)
    expected = outcome(first, batches)
    with told(caplog) as lines:
        second = started(tmp_path, again, batches[0], dynamic=several)
        assert lines(HIT) == 1
    assert second.fxoffload.plan.to_json() == first.fxoffload.plan.to_json()
    assert_equal(outcome(second, batches), expected)
    for label, graph in first.fxoffload.graphs.items():
        assert text.render(second.fxoffload.graphs[label]) == text.render(graph)


class Gated(nn.Module):
    """Elementwise programs of operands of the same type, two of them halves of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        gate, up = self.up(x).chunk(2, -1)
        x = x + torch.tanh(self.down(F.silu(gate) * up) * 0.5) * x
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def test_a_second_start_with_fused_kernels_loads_them_and_gives_the_same_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the graph of an entry values of one type are one fake value: kernels must not take their operands for one."""
    torch.manual_seed(0)
    model, batches = Gated(), [ids(), ids(1, 5), ids()]
    plain, again, fused = copy.deepcopy(model), copy.deepcopy(model), {"executor": "inductor", "numerics": "reordered"}
    with fresh_cache():
        first = started(tmp_path, model, batches[0], **fused)
        assert kernel_calls(first.fxoffload.graphs.values())
        expected = outcome(first, batches)
        for ours, theirs in zip(expected, outcome(plain, batches), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
        torch._dynamo.reset()
        counters.clear()
        with told(caplog) as lines:
            second = started(tmp_path, again, batches[0], **fused)
            assert lines(HIT) == 1
        compiled = counters["inductor"]
        assert compiled["fxgraph_cache_hit"] == len(kernel_calls(second.fxoffload.graphs.values())) and not compiled["fxgraph_cache_miss"]
        assert_equal(outcome(second, batches), expected)
    for label, graph in first.fxoffload.graphs.items():
        assert text.render(second.fxoffload.graphs[label], offsets=True) == text.render(graph, offsets=True)


def test_what_making_kernels_finds_out_about_sizes_is_found_out_again_and_keeps_no_step_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A card's kernels index with 32 bits: Inductor guards that sizes allow it, in a start that loads them too."""
    guarded = []
    compile_kernel = fused.compiled_by_inductor

    def of_a_card(traced: Any, inputs: Any, *how: Any) -> Any:
        guarded.extend(v for v in inputs if isinstance(v, torch.Tensor) and bool(v.numel() < 2**31))
        return compile_kernel(traced, inputs, *how)

    monkeypatch.setattr(fused, "compiled_by_inductor", of_a_card)
    options = {"executor": "inductor", "numerics": "reordered"}
    with fresh_cache():
        torch.manual_seed(0)
        model = Gated()
        again = copy.deepcopy(model)
        expected = outcome(started(tmp_path, model, **options), [ids()])
        n_guarded = len(guarded)
        assert any(not isinstance(v.numel(), int) for v in guarded)
        torch._dynamo.reset()
        with told(caplog) as lines:
            assert_equal(outcome(started(tmp_path, again, **options), [ids()]), expected)
            assert lines(HIT) == 1 and len(guarded) > n_guarded


@pytest.mark.parametrize("in_an_arena", [False, True])
def test_a_second_start_on_a_device_of_its_own_gives_the_same_bits(
    in_an_arena: bool, tmp_path: Path, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model that returns a tensor, whose gradient comes from outside; by offsets as on CUDA, too."""
    if in_an_arena:
        monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True)))

    def run() -> tuple[list[torch.Tensor], str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(), nn.Linear(256, 64), nn.Linear(64, 64))
        model = started(tmp_path, model, torch.ones(8, 64), device="fxsim", device_budget="200KiB")
        for rows in (8, 5):
            torch.manual_seed(1)
            model(torch.ones(rows, 64)).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        plan = model.fxoffload.plan.to_json()
        model.fxoffload.close()
        return gradients, plan

    expected, plan = run()
    with told(caplog) as lines:
        found, again = run()
        assert lines(HIT) == 1
    assert_equal(found, expected)
    assert again == plan


def test_graphs_met_later_come_from_the_cache_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> list[torch.Tensor]:
        model = started(tmp_path)
        with torch.no_grad():
            model.eval()
            evaluated = model(**ids())
        model.train()
        larger = model(**ids(3, 12))
        larger["loss"].backward()
        return [evaluated["loss"], evaluated["logits"], larger["loss"].detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = run()
    with told(caplog) as lines:
        assert_equal(run(), expected)
        assert lines(HIT) == 3


def test_an_unread_output_computes_itself_after_a_second_start(tmp_path: Path) -> None:
    expected = started(tmp_path)(**ids())["logits"] + 0
    assert torch.equal(started(tmp_path)(**ids())["logits"] + 0, expected)


def test_a_plan_that_swaps_and_recomputes_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pins = [fxoffload.pin("*softmax*", "checkpoint"), fxoffload.pin("head/*addmm*", "swap")]
    runs = [started(tmp_path, tiny(kernel="written"), pins=pins) for _ in range(1)]
    decided = runs[0].fxoffload.plan.count()
    assert decided["recompute"] and decided["swapout"]
    expected = outcome(runs[0], [ids()] * 2)
    with told(caplog) as lines:
        second = started(tmp_path, tiny(kernel="written"), pins=pins)
        assert lines(HIT) == 1
    assert_equal(outcome(second, [ids()] * 2), expected)


def test_a_second_start_has_a_report_and_a_trace(tmp_path: Path) -> None:
    pages = []
    for name in ("first", "second"):
        model = started(tmp_path / "cache")
        model.fxoffload.report(tmp_path / f"{name}.html")
        model.fxoffload.trace(tmp_path / f"{name}.json")
        pages.append((tmp_path / f"{name}.json").read_text())
    assert pages[0] == pages[1]


# What decides the result is in the key --------------------------------------------------------------------------------


def looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: nn.Module | None = None, batch: Any = None, **options: Any) -> Path:
    """The file for a start's first graph."""
    keys: list[Path] = []

    def only_key(cache: Any, session: Any, gm: Any, inputs: Any, compile: Any) -> Any:
        keys.append(Files(Path()).path(key.key_of(gm, inputs, session)))
        raise CaptureComplete

    with monkeypatch.context() as patch:
        patch.setattr(store.CompileCache, "compiled", only_key)
        started(tmp_path, model, batch, **options).fxoffload.close()
    return keys[0]


def test_equal_starts_have_equal_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert looked_up(monkeypatch, tmp_path) == looked_up(monkeypatch, tmp_path / "elsewhere")


CHANGES: dict[str, dict[str, Any]] = {
    "attention kernel": {"model": lambda: tiny(kernel="written")},
    "dtype": {"model": lambda: tiny(torch.bfloat16)},
    "frozen parameter": {"model": lambda: frozen(tiny())},
    "tied parameters": {"model": lambda: tied(tiny())},
    "batch size": {"batch": ids(3, 8)},
    "length": {"batch": ids(2, 9)},
    "optimizer": {"optimizer": "adafactor"},
    "no optimizer": {"optimizer": None},
    "budget": {"device_budget": "15MiB"},
    "host budget": {"host_budget": "8GiB"},
    "disk budget": {"disk_budget": "1MiB", "disk_dir": "."},
    "largest shape": {"max_shape": {"sequence": 16}},
    "pin": {"pins": [fxoffload.pin("head.weight", "host")]},
    "outputs": {"outputs": "all"},
    "numerics": {"numerics": "reordered"},
    "machine": {"machine": "h200"},
    "a rate of the machine": {"machine": replace(load_machine("cpu"), dispatch_s=1e-3)},
    "replan": {"replan": False},
    "one shape": {"dynamic": False},
}


def frozen(model: nn.Module) -> nn.Module:
    model.get_submodule("embed").requires_grad_(False)
    return model


def tied(model: Any) -> nn.Module:
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed(change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = {name: value() if name == "model" else value for name, value in CHANGES[change].items()}
    assert looked_up(monkeypatch, tmp_path, **options) != looked_up(monkeypatch, tmp_path)


@pytest.mark.parametrize("name, value", [
    ("torch.__version__", "2.99.0"), ("torch.version.git_version", "0"), ("fxoffload.compile_cache.key._version", lambda package: "0"),
    ("fxoffload.compile_cache.key._sources_digest", lambda: "0"), ("fxoffload.compile_cache.key._foreign_passes", lambda: "another"),
    ("sys.version", "4"),
])
def test_other_code_is_another_key(name: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = looked_up(monkeypatch, tmp_path)
    # While the key is made only: nothing else shall see it.
    original = key._versions

    def versions() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            return original()

    def digest() -> Any:
        return value()

    if name.endswith("_sources_digest"):
        monkeypatch.setattr(key, "_sources_digest", digest)
    else:
        monkeypatch.setattr(key, "_versions", versions)
    assert looked_up(monkeypatch, tmp_path) != before


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def coarse_matmul() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("ambient", [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16), deterministic, coarse_matmul,
    lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
], ids=["autocast", "deterministic", "matmul precision", "attention backends"])
def test_another_ambient_choice_is_another_key(ambient: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = looked_up(monkeypatch, tmp_path)
    with ambient():
        assert looked_up(monkeypatch, tmp_path) != before


def test_a_changed_kernel_dtype_and_budget_are_planned_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_hit(tmp_path, caplog)
    assert is_hit(tmp_path, caplog)
    assert not is_hit(tmp_path, caplog, model=tiny(kernel="written"))
    assert not is_hit(tmp_path, caplog, model=tiny(torch.bfloat16))
    assert not is_hit(tmp_path, caplog, device_budget="15MiB")
    assert is_hit(tmp_path, caplog)


# What cannot be told is not stored ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [object(), torch.zeros(2), lambda x: x, copy.copy, torch.nn.Linear(1, 1)])
def test_a_value_of_an_unknown_kind_has_no_description(value: object) -> None:
    with pytest.raises(Unstored):
        described([value])


def test_descriptions_tell_kinds_apart() -> None:
    values = [1, True, 1.0, "1", (1,), [1], {1}, {1: 1}, None, float("nan"), torch.float32, torch.int32, slice(1), ..., F.gelu, torch.add]
    assert len({canonical(described(v)) for v in values}) == len(values)


def test_a_step_that_writes_buffers_is_not_stored_and_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with told(caplog) as lines:
        model = started(tmp_path, tiny(counts=True))
        model(**ids())["loss"].backward()
        assert lines("is not stored: it writes inputs") >= 1
    assert model.get_buffer("steps") == 1
    assert not list(tmp_path.iterdir())


def test_dumps_are_written_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        assert not is_hit(tmp_path / "cache", caplog, dump_dir=tmp_path / name)
        assert (tmp_path / name / "plan.json").is_file()


# Files ----------------------------------------------------------------------------------------------------------------


def only_file(folder: Path) -> Path:
    (found,) = folder.glob("*.fxo")
    return found


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def one_bit_wrong(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]


@pytest.mark.parametrize("damage", [
    cut_short, one_bit_wrong, pytest.param(lambda content: b"", marks=pytest.mark.slow),
    pytest.param(lambda content: b"PK\x03\x04 another program's", marks=pytest.mark.slow)])
def test_a_damaged_file_is_made_anew(damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_hit(tmp_path, caplog)
    path = only_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with told(caplog) as lines:
        started(tmp_path).fxoffload.close()
        assert lines("is damaged or not of this cache") == 1 and lines(HIT) == 0
    assert is_hit(tmp_path, caplog)


def test_a_file_under_the_name_of_another_key_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = Files(tmp_path)
    files.write({"of": "one"}, {"value": 1})
    files.path({"of": "one"}).rename(files.path({"of": "another"}))
    with told(caplog) as lines:
        assert files.read({"of": "another"}) is None
        assert lines("is damaged or not of this cache") == 1


def tampered(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes an entry as someone would who makes the digest right again."""
    path = only_file(folder)
    _, told_key, entry = path.read_bytes().split(b"\n", 2)
    changed = json.loads(entry)
    change(changed)
    Files(folder).write(json.loads(told_key), changed)


def calls_python(entry: dict[str, Any]) -> None:
    entry["graph"]["text"] = entry["graph"]["text"].replace("aten.embedding %", "torch.load %", 1)


def lacks_a_graph(entry: dict[str, Any]) -> None:
    del entry["graph"]


def returns_something_else(entry: dict[str, Any]) -> None:
    entry["outputs"][0]["differentiable"] = False


def wrapped_otherwise(entry: dict[str, Any]) -> None:
    entry["facts"]["mapping"][0][1] = 77


@pytest.mark.parametrize("change", [
    calls_python, *(pytest.param(one, marks=pytest.mark.slow) for one in (lacks_a_graph, wrapped_otherwise)), returns_something_else])
def test_an_entry_that_does_not_fit_is_not_used(
    change: Callable[[dict[str, Any]], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(tmp_path)
    expected = outcome(first, [ids()])
    tampered(tmp_path, change)
    with told(caplog) as lines:
        second = started(tmp_path)
        assert lines("an entry is not used") == 1 and lines(HIT) == 0
    assert_equal(outcome(second, [ids()]), expected)
    assert is_hit(tmp_path, caplog)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with told(caplog) as lines:
        model = started(tmp_path / "file" / "cache")
        assert lines("nothing can be stored") == 1
    model(**ids())["loss"].backward()


def _write_often(folder: Path, value: int) -> None:
    for _ in range(40):
        Files(folder).write({"key": "the same"}, {"value": [value] * 2000})


def test_two_processes_write_the_same_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(tmp_path, value)) for value in (1, 2)]
    for writer in writers:
        writer.start()
    seen = []
    while any(writer.is_alive() for writer in writers):
        seen.append(Files(tmp_path).read({"key": "the same"}))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    whole = [{"value": [1] * 2000}, {"value": [2] * 2000}]
    assert all(entry is None or entry in whole for entry in seen)
    first = next((i for i, entry in enumerate(seen) if entry is not None), len(seen))
    assert None not in seen[first:], "a file that was there was not read"
    assert Files(tmp_path).read({"key": "the same"}) in whole
    assert [path.name for path in tmp_path.iterdir()] == [only_file(tmp_path).name]


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    files = Files(tmp_path, most_bytes=3600)
    for i in range(3):
        files.write({"key": i}, {"value": "x" * 1000})
        os.utime(files.path({"key": i}), (i, i))
    files.read({"key": 0})
    files.write({"key": 3}, {"value": "x" * 1000})
    assert [files.read({"key": i}) is not None for i in range(4)] == [True, False, True, True]


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("row", ["full", "lora"])
def test_a_second_start_reaches_its_first_step_in_a_third_of_the_time(row: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, str(root / "bench" / "compile_cache.py"), "--one", row, "--layers", "16",
               "--cache-dir", str(tmp_path)]
    cold, *warm = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]) for _ in range(3)]
    assert [start["hits"] for start in (cold, *warm)] == [0, 1, 1]
    assert {(start["bits"], start["plan"]) for start in warm} == {(cold["bits"], cold["plan"])}
    # From the call of compile to the gradients; imports and the model's making are the same for both.
    assert min(start["compile_s"] for start in warm) <= cold["compile_s"] / 3
