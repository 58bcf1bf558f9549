"""Wrong arguments: one clear error that names the argument, and a model that is as it was."""

from __future__ import annotations

import copy
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import assert_same, train
from torch import nn
from zoo import llama, llava, tokens

import fxoffload
from fxoffload.sizes import parse_bytes

pytestmark = pytest.mark.integration


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


BATCH = torch.zeros(4, 8)
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("device_budget", {"device_budget": "lots"}),
    ("device_budget", {"device_budget": "3 parsecs"}),
    ("device_budget", {"device_budget": -1}),
    ("device_budget", {"device_budget": 0}),
    ("device_budget", {"device_budget": float("nan")}),
    ("device_budget", {"device_budget": True}),
    ("device_budget", {"device_budget": "auto"}),
    ("host_budget", {"host_budget": "-5GiB"}),
    ("disk_budget", {"disk_budget": -7}),
    ("disk_dir", {"disk_budget": "1MiB"}),
    ("disk_dir", {"disk_budget": "1MiB", "disk_dir": "/no/such/folder"}),
    ("device", {"device": "toaster"}),
    ("device", {"device": "cuda:7"}),
    ("device", {"device": "meta"}),
    ("outputs", {"outputs": "some"}),
    ("numerics", {"numerics": "sloppy"}),
    ("executor", {"executor": "interpreter"}),
    ("search", {"search": "exhaustive"}),
    ("optimizer", {"optimizer": "adamwww"}),
    ("machine", {"machine": "no-such-machine"}),
    ("plan", {"plan": "/no/such/plan.json"}),
    ("plan", {"plan": 5}),
    ("max_shape", {"max_shape": {"width": 5}}),
    ("max_shape", {"max_shape": {"batch": "many"}}),
    ("max_shape", {"max_shape": {"batch": -1}}),
    ("pins", {"pins": ("model.embed",)}),
]


@pytest.mark.parametrize(("argument", "options"), WRONG, ids=lambda v: v if isinstance(v, str) else str(next(iter(v.values())))[:20])
def test_a_wrong_argument_is_named_and_the_model_stays_as_it_was(argument: str, options: dict[str, Any]) -> None:
    if options.get("device") == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("this host has such a device")
    model = small()
    with pytest.raises(ValueError, match=f"^{argument}"):
        fxoffload.compile(model, BATCH, **{"device": "cpu", "device_budget": "1MiB", **options})
    assert type(model) is nn.Sequential and type(model[0]) is nn.Linear


@pytest.mark.parametrize("batch", [{}, (), None, [], "text", torch.zeros(0, 8), {"input": torch.zeros(0, 8)}], ids=repr)
def test_an_empty_or_unusable_batch_is_named(batch: Any) -> None:
    model = small()
    with pytest.raises(ValueError, match="^batch"):
        fxoffload.compile(model, batch, device="cpu", device_budget="1MiB")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("model", [None, "llama", nn.Linear, lambda x: x], ids=["none", "text", "class", "function"])
def test_what_is_not_a_module_is_named(model: Any) -> None:
    with pytest.raises(ValueError, match="^model"):
        fxoffload.compile(model, BATCH, device="cpu", device_budget="1MiB")


def test_parameters_without_weights_are_named() -> None:
    with torch.device("meta"):
        model = small()
    with pytest.raises(ValueError, match="^model: .*'0.weight'"):
        fxoffload.compile(model, BATCH, device="cpu", device_budget="1MiB")


def test_an_impossible_budget_names_the_shortfall_and_leaves_the_model_as_it_was() -> None:
    model = small()
    with pytest.raises(fxoffload.PlanError, match="short") as refused:
        fxoffload.compile(model, BATCH, device="cpu", device_budget=64)
    assert refused.value.shortfall_bytes
    assert type(model[0]) is nn.Linear and not hasattr(model, "fxoffload")
    with pytest.raises(fxoffload.PlanError, match="host_budget"):
        fxoffload.compile(model, BATCH, device="cpu", device_budget="1MiB", host_budget=64)
    assert type(model[0]) is nn.Linear and not hasattr(model, "fxoffload")


@pytest.mark.parametrize(("pins", "budget"), [((), "300KiB"), ((), 1), ((fxoffload.pin("0.weight", "device"),), "300KiB")], ids=str)
def test_a_refusal_names_the_values_that_are_there_largest_first_and_they_are_what_is_needed(pins: Any, budget: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])
    with pytest.raises(fxoffload.PlanError, match="would do. Fixed on the device: ") as refused:
        fxoffload.compile(model, torch.zeros(256, 64), device="cpu", device_budget=budget, pins=pins)
    said = str(refused.value)
    found = re.search(r"(\d+) bytes would do. Fixed on the device: (.*?)\. Largest live values there: (.*?)\. A", said)
    assert found is not None
    needed, fixed, listed = found.groups()
    sizes = [parse_bytes(value.split(" ", 1)[1].replace(" ", ""), "value") for value in listed.split("; ")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 256 * 64 * 4
    assert sum(sizes) + parse_bytes(fixed.replace(" ", ""), "fixed") == pytest.approx(int(needed), abs=10)  # rounded to 0.01 KiB
@pytest.mark.parametrize(("budget", "message"), [
    (0, "device_budget: must be more than 0 bytes"), ("0GiB", "more than 0"), ("24.5", "cannot read '24.5'"), ("24 GB/s", "cannot read"),
    ("nan", "cannot read"), (1.5, "expected bytes as int or text"),
])
def test_a_plan_for_an_impossible_budget_says_what_is_wrong_with_it(budget: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fxoffload.plan(small(), BATCH, device_budget=budget, machine="cpu")


def test_a_budget_smaller_than_one_op_names_the_op_and_what_is_alive_there() -> None:
    with pytest.raises(fxoffload.PlanError) as refused:
        fxoffload.plan(small(), BATCH, device_budget=1200, machine="cpu")
    found = re.search(r"bytes short at [012]/\w+#\d: (\d+) bytes would do\. .*Largest live values there: (\S+) \d", str(refused.value))
    assert found is not None and int(found.group(1)) == 1200 + refused.value.shortfall_bytes


def test_a_model_error_on_the_sample_is_reported_and_leaves_the_model_as_it_was() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="(?s)cannot be captured.*reduction dim"):
        fxoffload.compile(model, torch.zeros(4, 9), device="cpu", device_budget="1MiB")
    assert type(model[0]) is nn.Linear


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def test_what_cannot_be_one_graph_is_refused_with_its_place() -> None:
    model = Branching(8, 8)
    with pytest.raises(fxoffload.PlanError, match="(?s)one graph.*test_bad_input.py"):
        fxoffload.compile(model, BATCH, device="cpu", device_budget="1MiB")
    assert type(model) is Branching


class Choosing(nn.Linear):
    """A part of the rows: how many, only the values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x[:, 0] > 0]


class Windowed(nn.Linear):
    """Sizes read from values, on which the trace must branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.detach()[0, :2].long().tolist()
        return super().forward(x) * len(torch.arange(height * width).reshape(height, width).sum(0).tolist())


@pytest.mark.parametrize("kind", [Choosing, Windowed])
@pytest.mark.parametrize("call", [
    lambda model, x: fxoffload.compile(model, x, device="cpu", device_budget="1MiB"),
    lambda model, x: fxoffload.plan(model, x, device_budget="1MiB", machine="cpu"),
], ids=["compile", "plan"])
def test_a_size_that_depends_on_values_is_refused_with_its_place(kind: type[nn.Module], call: Any) -> None:
    model = kind(8, 8)
    with pytest.raises(fxoffload.PlanError, match="(?s)test_bad_input.py.*depends on values|depend.*test_bad_input.py"):
        call(model, torch.full((4, 8), 2.0))
    assert type(model) is kind


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    model = fxoffload.compile(small(), BATCH, device="cpu", device_budget="1MiB")
    model.fxoffload.plan.save(path)
    yield path


def test_a_plan_for_another_graph_is_refused_without_replan(saved: Path) -> None:
    same = fxoffload.compile(small(), BATCH, device="cpu", device_budget="1MiB", plan=saved, replan=False)
    same(BATCH).sum().backward()
    with pytest.raises(fxoffload.PlanError, match="replan=False"), torch.autocast("cpu", torch.bfloat16):
        same(BATCH)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(fxoffload.PlanError, match="fingerprint.*replan=False"):
        fxoffload.compile(other, BATCH, device="cpu", device_budget="1MiB", plan=saved, replan=False)


def test_a_plan_file_that_is_not_one_is_named(tmp_path: Path, saved: Path) -> None:
    half = tmp_path / "half.json"
    half.write_text(saved.read_text()[:100])
    with pytest.raises(fxoffload.PlanError, match="half.json"):
        fxoffload.compile(small(), BATCH, device="cpu", device_budget="1MiB", plan=half)


def test_nan_in_a_batch_trains_as_plain_pytorch_does() -> None:
    model = small()
    plain = copy.deepcopy(model)
    model = fxoffload.compile(model, BATCH, device="cpu", device_budget="1MiB")
    batch = torch.full((4, 8), float("nan"))
    for net in (plain, model):
        net(batch).sum().backward()
    assert all(torch.equal(p.grad.isnan(), q.grad.isnan()) for p, q in zip(plain.parameters(), model.parameters()))
    model.zero_grad(), plain.zero_grad()
    for net in (plain, model):
        net(torch.ones(3, 8)).sum().backward()
    assert_same(plain, model)


def test_a_call_the_model_cannot_take_raises_and_the_next_one_trains() -> None:
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(case.model, case.batch, device="cpu", device_budget="700KiB", dynamic=False)
    with pytest.raises((ValueError, fxoffload.PlanError), match="input_ids"):
        model()
    with pytest.raises((RuntimeError, IndexError)):
        model(input_ids=torch.zeros(2, 4), labels=torch.zeros(2, 4, dtype=torch.long))
    assert train(plain, [tokens()]) == train(model, [tokens()])
    assert_same(plain, model)


def test_what_a_model_requires_of_its_values_is_checked_in_every_step() -> None:
    case = llava()
    model = fxoffload.compile(case.model, case.batch, device="cpu", device_budget="64MiB", dynamic=False)
    model(**case.batch).loss.backward()
    without_images = torch.full_like(case.batch["input_ids"], 7)
    with pytest.raises(RuntimeError, match="assertion failed|requires of its inputs"):
        model(**{**case.batch, "input_ids": without_images}).loss.backward()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every address that somebody tried to reach, none of them with success; nothing in the environment says that we are offline."""
    tried: list[object] = []

    def refuse(self: socket.socket, address: object) -> None:
        tried.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: refuse(None, host))  # type: ignore[arg-type]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tried


def test_nobody_is_asked_over_the_network(tmp_path: Path, offline: list[object]) -> None:
    llama().model.save_pretrained(tmp_path)
    model = fxoffload.from_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        assert fxoffload.plan(source, (2, 16), device_budget="1GiB").predicted.device_peak_bytes
    fxoffload.compile(model, tokens(), device="cpu", device_budget="600KiB", dynamic=False).fxoffload.close()
    for name in ("meta-llama/Llama-3.1-8B", str(tmp_path / "nothing")):
        with pytest.raises(ValueError, match="config.json"):
            fxoffload.from_pretrained(name)
        with pytest.raises(ValueError, match="config.json"):
            fxoffload.plan(name, (2, 16), device_budget="600KiB")
    assert not offline


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit('remote code ran')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": names, "architectures": ["EvilForCausalLM"]}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks at a terminal
    with pytest.raises(ValueError):
        fxoffload.from_pretrained(tmp_path)
    with pytest.raises(ValueError):
        fxoffload.plan(tmp_path, (2, 16), device_budget="600KiB")
    assert not ran.exists()
