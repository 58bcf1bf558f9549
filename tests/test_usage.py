"""A compiled model in the user's own loop does what the plain model does, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import random
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers as tf
import zoo
from loops import assert_same, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from zoo import gpt2, llama, tokens

import fxoffload
from fxoffload.effects import Channel
from fxoffload.graph import info
from fxoffload.machine import load_machine
from fxoffload.observation import with_slower_copies

pytestmark = pytest.mark.integration
BUDGET = "600KiB"  # the Llama of the zoo needs about 1.4 MiB free of budget: parameters stream, activations are recomputed


@dataclass
class Pair:
    plain: Any
    compiled: Any


def compiled(model: nn.Module, batch: Any, **options: Any) -> Any:
    """Captured for the shapes of `batch`, which takes half the time, unless `dynamic` says otherwise."""
    return fxoffload.compile(model, batch, **{"device": "cpu", "device_budget": BUDGET, "dynamic": False, **options})


@pytest.fixture(scope="module")
def shared() -> Iterator[Pair]:
    case = llama()
    plain = copy.deepcopy(case.model)
    model = compiled(case.model, case.batch)
    yield Pair(plain, model)
    model.fxoffload.close()


@pytest.fixture
def pair(shared: Pair) -> Iterator[Pair]:
    """A plain and a compiled Llama, equal; weights, modes and flags are put back after the test."""
    weights = copy.deepcopy(shared.plain.state_dict())
    yield shared
    for model in (shared.plain, shared.compiled):
        model.load_state_dict(weights)
        model.train().requires_grad_(True).zero_grad()


def both(pair: Pair) -> tuple[Any, Any]:
    return pair.plain, pair.compiled


BATCHES = [tokens(seed=i) for i in range(3)]


def test_gradients_accumulate_and_are_clipped_as_in_plain_pytorch(pair: Pair) -> None:
    norms = []
    for model in both(pair):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            for batch in BATCHES:
                (model(**batch).loss / 3).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
    assert norms[:2] == norms[2:]
    assert_same(*both(pair))


def test_requires_grad_may_change_between_steps(pair: Pair) -> None:
    losses = []
    for model in both(pair):
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        first = train(model, BATCHES[:1])
        model.model.layers[0].requires_grad_(True)
        losses.append(first + train(model, BATCHES[1:]))
    assert losses[0] == losses[1]
    assert_same(*both(pair))


def test_autocast_may_be_switched_on_around_forward(pair: Pair) -> None:
    losses = []
    for model in both(pair):
        losses.append([])
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = model(**BATCHES[0]).loss
            loss.backward()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    assert_same(*both(pair))


def test_a_state_dict_may_be_loaded_in_the_middle(pair: Pair) -> None:
    losses = []
    for model in both(pair):
        start = copy.deepcopy(model.state_dict())
        losses.append(train(model, BATCHES[:2]))
        model.load_state_dict(start)
        losses[-1] += train(model, BATCHES[:2])
        model.load_state_dict(start, assign=True)
        losses[-1] += train(model, BATCHES[:2])
    assert losses[0] == losses[1] and losses[0][:2] == losses[0][2:4] == losses[0][4:]
    assert_same(*both(pair))


def test_evaluation_equals_plain_under_no_grad_inference_mode_and_grad(pair: Pair) -> None:
    results = []
    for model in both(pair):
        model.eval()
        with torch.no_grad():
            out = model(**BATCHES[0])
        with torch.inference_mode():
            inferred = model(input_ids=BATCHES[1]["input_ids"]).logits
        differentiable = model(**BATCHES[2])
        differentiable.loss.backward()
        logits = model(BATCHES[1]["input_ids"]).logits
        logits.square().mean().backward()
        results.append((out.loss, out.logits, inferred.clone(), differentiable.loss, differentiable.logits + 0, logits))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert_same(*both(pair))


def test_greedy_generation_equals_plain(pair: Pair) -> None:
    prompt = BATCHES[0]["input_ids"][:, :5]
    generated = []
    for model in both(pair):
        model.eval()
        generated.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False))
    assert torch.equal(*generated)


def test_hooks_on_parameters_and_modules_fire_as_in_plain_pytorch(pair: Pair) -> None:
    seen: list[list[Any]] = []
    for model in both(pair):
        record: list[Any] = []
        layer, weight = model.model.layers[1], model.model.layers[0].mlp.up_proj.weight
        handles = [
            weight.register_hook(lambda g: g * 2),
            weight.register_post_accumulate_grad_hook(lambda p, r=record: r.append(p.grad.sum().item())),
            layer.register_forward_pre_hook(lambda m, a: (a[0] * 1.5, *a[1:])),
            layer.mlp.register_forward_hook(lambda m, a, out: out * 0.5),
            model.register_forward_pre_hook(lambda m, a, k, r=record: r.append(sorted(k)), with_kwargs=True),
            model.register_forward_hook(lambda m, a, out, r=record: r.append(out.loss.item())),
        ]
        train(model, BATCHES[:2])
        for handle in handles:
            handle.remove()
        seen.append(record)
    assert seen[0] == seen[1] and len(seen[0]) == 6
    assert_same(*both(pair))


def test_a_backward_hook_on_an_inner_module_is_one_clear_error(pair: Pair) -> None:
    handle = pair.compiled.model.layers[0].register_full_backward_hook(lambda m, gi, go: None)
    with pytest.raises(fxoffload.PlanError, match="'model.layers.0' has a backward hook"):
        pair.compiled(**BATCHES[0])
    handle.remove()
    assert train(pair.plain, BATCHES[:1]) == train(pair.compiled, BATCHES[:1])


def test_autograd_grad_gives_gradients_and_leaves_grad_alone(pair: Pair) -> None:
    gradients = [torch.autograd.grad(model(**BATCHES[0]).loss, list(model.parameters())) for model in both(pair)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    assert all(p.grad is None for p in pair.compiled.parameters())


def test_backward_may_run_twice_with_retain_graph(pair: Pair) -> None:
    for model in both(pair):
        loss = model(**BATCHES[0]).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(*both(pair))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_one_clear_error(pair: Pair) -> None:
    parameters = list(pair.compiled.parameters())
    gradients = torch.autograd.grad(pair.compiled(**BATCHES[0]).loss, parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradients[0].square().sum().backward()
    assert train(pair.plain, BATCHES[:1]) == train(pair.compiled, BATCHES[:1])


def test_dtype_changes_pass_and_device_moves_do_not_concern_the_plan(pair: Pair) -> None:
    losses = []
    for model in both(pair):
        ids = [id(p) for p in model.parameters()]
        model.to("cpu").to(torch.bfloat16)
        losses.append(train(model, BATCHES[:1]))
        assert [id(p) for p in model.parameters()] == ids
        model.float()
        losses[-1] += train(model, BATCHES[:1])
    assert losses[0] == losses[1]
    assert_same(*both(pair))
    with pytest.raises(ValueError, match="meta"):
        pair.compiled.to("meta")


def test_pickle_deepcopy_and_torch_save_give_the_plain_model(pair: Pair) -> None:
    file = io.BytesIO()
    torch.save(pair.compiled, file)
    file.seek(0)
    copies = [copy.deepcopy(pair.compiled), pickle.loads(pickle.dumps(pair.compiled)), torch.load(file, weights_only=False)]
    for made in copies:
        assert [type(m) for m in made.modules()] == [type(m) for m in pair.plain.modules()]
        assert not hasattr(made, "fxoffload")
        assert train(made, BATCHES[:1]) == train(copy.deepcopy(pair.plain), BATCHES[:1])


def test_an_error_in_a_users_hook_leaves_the_model_usable(pair: Pair) -> None:
    def fail(*_: object) -> None:
        raise KeyError("the user's own")

    weight = pair.compiled.model.layers[1].mlp.up_proj.weight
    for handle in (pair.compiled.register_forward_pre_hook(fail), weight.register_hook(fail)):
        with pytest.raises(KeyError, match="the user's own"):
            pair.compiled(**BATCHES[0]).loss.backward()
        handle.remove()
    handle = pair.compiled.model.layers[0].register_forward_hook(fail)
    with pytest.raises((KeyError, fxoffload.PlanError), match="the user's own"):
        pair.compiled(**BATCHES[0])
    handle.remove()
    pair.compiled.zero_grad()
    assert train(pair.plain, BATCHES) == train(pair.compiled, BATCHES)
    assert_same(*both(pair))


def test_ctrl_c_at_any_instant_leaves_the_model_usable(pair: Pair) -> None:
    train(pair.compiled, BATCHES[:1])
    for delay_s in (0.001, 0.004, 0.008, 0.012, 0.016, 0.02, 0.03):
        # Again and again: Python drops an interrupt that lands in a finalizer.
        signal.setitimer(signal.ITIMER_REAL, delay_s, 0.05)
        with pytest.raises(KeyboardInterrupt):
            while True:
                pair.compiled(**BATCHES[0]).loss.backward()
        signal.setitimer(signal.ITIMER_REAL, 0)
    train(pair.plain, BATCHES[:1])
    pair.compiled.load_state_dict(pair.plain.state_dict())
    pair.compiled.zero_grad()
    assert not pair.compiled.fxoffload.home.active
    assert train(pair.plain, BATCHES) == train(pair.compiled, BATCHES)
    assert_same(*both(pair))


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """The timer's signal is Ctrl-C."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_second_compile_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="already compiled"):
        compiled(pair.compiled, BATCHES[0])
    with pytest.raises(ValueError, match="belongs to another compiled model"):
        compiled(nn.Sequential(pair.compiled.model.layers[0]), torch.zeros(1, 4, 64))
    assert train(pair.plain, BATCHES[:1]) == train(pair.compiled, BATCHES[:1])


def test_replicas_of_data_parallel_are_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="DataParallel"):
        pair.compiled._replicate_for_data_parallel()


def test_switching_capture_off_raises_instead_of_running_unplanned(pair: Pair) -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(fxoffload.PlanError, match="switched off"):
        pair.compiled(**BATCHES[0])
    assert train(pair.plain, BATCHES[:1]) == train(pair.compiled, BATCHES[:1])


def test_a_users_torch_compile_around_the_model_changes_nothing(pair: Pair) -> None:
    loss = torch.compile(lambda **batch: pair.compiled(**batch).loss * 2, backend="eager")(**BATCHES[0])
    assert torch.equal(loss, pair.plain(**BATCHES[0]).loss * 2)


def test_modules_that_change_after_compile_are_planned_again(pair: Pair) -> None:
    before = [m.model.layers[1].mlp for m in both(pair)]
    losses = []
    for model in both(pair):
        torch.manual_seed(7)
        mlp = copy.deepcopy(before[0])
        mlp.up_proj, mlp.gate_proj, mlp.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        model.model.layers[1].mlp = mlp
        losses.append(train(model, BATCHES[:2]))
        mlp.down_proj.weight = nn.Parameter(torch.randn(64, 96) / 8)
        losses[-1] += train(model, BATCHES[:2])
    assert losses[0] == losses[1]
    assert_same(*both(pair))
    pair.plain.model.layers[1].mlp, pair.compiled.model.layers[1].mlp = before


def test_parameters_shared_with_a_module_outside_are_refused() -> None:
    outside, model = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    outside.weight = model[0].weight
    with pytest.raises(ValueError, match=r"model: parameter '0.weight' is also a parameter of a Linear"):
        compiled(model, torch.zeros(2, 8))
    assert type(model[0]) is nn.Linear
    del outside
    compiled(model, torch.zeros(2, 8)).fxoffload.close()


def test_compile_touches_no_random_state_no_mode_and_no_gradient() -> None:
    """A seed set before compile gives the run of a seed set without it: dropout on, weights tied."""
    case = gpt2()
    plain = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    case.model.lm_head.weight.grad = torch.ones_like(case.model.lm_head.weight)
    config = case.model.config.to_json_string()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = compiled(case.model, case.batch, device_budget="900KiB")
    assert torch.equal(torch.get_rng_state(), expected[0]) and random.getstate() == expected[1]
    assert np.random.get_state()[1].tolist() == expected[2]
    assert model.training and model.config.to_json_string() == config and model is case.model
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert model.lm_head.weight is model.transformer.wte.weight

    optimizer.zero_grad()
    mine = [_step(model, optimizer, batch) for batch in BATCHES]
    torch.manual_seed(3)
    theirs = [_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batch) for batch in BATCHES]
    assert mine == theirs
    assert_same(plain, model)
    model.fxoffload.close()


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.item()


class Net(nn.Module):
    """Convolutions with batch norm; returns features and logits, the loss is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(32, 5)

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(images).flatten(1)
        return features, self.head(features) * scale


class NetWithLoss(Net):
    """The same with the loss inside and its logits beside it."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        _, logits = super().forward(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_plain_network_with_buffers_and_an_outside_loss_trains_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    batches = [(torch.randn(n, 3, 8, 8), torch.randint(5, (n,))) for n in (4, 4, 3)]
    model = compiled(model, (batches[0][0],), dynamic=True)
    other = llama()
    results = []
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        results.append([])
        for images, labels in batches:
            optimizer.zero_grad()
            features, logits = net(images)
            loss = nn.functional.cross_entropy(logits, labels) + features.square().mean()
            loss.backward()
            optimizer.step()
            results[-1].append(loss.item())
        net.eval()
        with torch.no_grad():
            results[-1].append(net(images, scale=2.0)[1].sum().item())
    assert results[0] == results[1]
    assert_same(plain, model)
    assert all(type(m).__module__.startswith(("torch", "test_usage")) for m in other.model.modules() if isinstance(m, Net))
    model.fxoffload.close()


def test_outputs_beside_the_loss_do_not_run_batch_norm_twice() -> None:
    torch.manual_seed(0)
    model = NetWithLoss()
    plain = copy.deepcopy(model)
    batch = {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(5, (4,))}
    model = compiled(model, batch)
    for _ in range(2):
        theirs, mine = plain(**batch), model(**batch)
        assert torch.equal(theirs["logits"], mine["logits"]) and not mine["logits"].requires_grad
        theirs["loss"].backward(), mine["loss"].backward()
    assert_same(plain, model)
    model.fxoffload.close()


def test_a_graph_knows_the_buffers_that_its_forward_writes() -> None:
    batch = {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(5, (4,))}
    model = compiled(NetWithLoss(), batch)
    inputs = model.fxoffload.graphs["train"].find_nodes(op="placeholder")
    assert {info(n).fqn for n in inputs if info(n).written} == {f"body.1.{name}" for name, _ in nn.BatchNorm2d(8).named_buffers()}
    model.fxoffload.close()


class Normed(nn.Module):
    """Linears with a batch norm each, whose results backward reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*[
            layer for _ in range(4) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Tanh())])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.body(x).square().mean()}


@pytest.mark.parametrize(("device", "machine", "width", "budget"), [
    ("cpu", "cpu", 32, "90KiB"), *(pytest.param("cuda", "h200", 1024, budget, marks=pytest.mark.gpu) for budget in ("200MiB", "150MiB"))])
def test_what_reads_statistics_that_forward_writes_is_kept_where_all_else_is_made_again(
        device: str, machine: str, width: int, budget: str) -> None:
    torch.manual_seed(0)
    plain, x = Normed(width), torch.randn(2 * width, width)
    other = copy.deepcopy(plain)
    plain.to(device)
    for _ in range(3):
        plain(x.to(device))["loss"].backward()
    plain.cpu()
    if device == "cuda":
        torch.cuda.empty_cache()  # the budget is the process's cap
    slow = with_slower_copies(load_machine(machine), {Channel.H2D: 1000.0, Channel.D2H: 1000.0})
    model = compiled(other, x, device=device, device_budget=budget, machine=slow)
    with contextlib.closing(model.fxoffload):
        for _ in range(3):
            model(x)["loss"].backward()
        assert_same(plain, model)
        assert model.fxoffload.plan.count()["recompute"] > 0


@pytest.mark.parametrize("budget", ["250MiB", "150MiB"])
def test_a_gradient_that_leaves_before_its_only_read_gives_its_place_away_when_it_is_back(budget: str) -> None:
    """Where values lie at offsets: the search counts on the place whether the gradient stays or not."""
    slow = with_slower_copies(load_machine("h200"), {Channel.H2D: 1000.0, Channel.D2H: 1000.0})
    plan = fxoffload.plan(Normed(1024), torch.randn(2048, 1024), device_budget=budget, machine=slow)
    assert plan.predicted.device_peak_bytes <= plan.device_budget_bytes


class _Stashing(torch.autograd.Function):
    """x * x that keeps x on its context, not through `save_for_backward`, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.x


class StashingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Stashing.apply(_Stashing.apply(self.body(x))).sum()  # type: ignore[no-untyped-call, no-any-return]


def test_a_loss_that_is_kept_keeps_nothing_that_backward_has_read() -> None:
    model = StashingNet()
    x = torch.randn(4, 8)
    plain = copy.deepcopy(model)
    model = compiled(model, (x,))
    before = model.fxoffload.meter.current_bytes
    loss = model(x)
    assert model.fxoffload.meter.current_bytes - before >= 4 * x.nbytes
    loss.backward(), plain(x).backward()
    assert model.fxoffload.meter.current_bytes - before <= loss.nbytes + x.nbytes
    assert_same(plain, model)
    model.fxoffload.close()


def test_close_gives_the_plain_model_back_and_may_be_called_twice() -> None:
    torch.manual_seed(0)
    model = Net()
    plain, modules, ids = copy.deepcopy(model), [type(m) for m in model.modules()], [id(p) for p in model.parameters()]
    images = torch.randn(2, 3, 8, 8)
    with compiled(model, images).fxoffload as inside:
        inside(images)[1].sum().backward()
        session = inside.fxoffload
    session.close()
    assert [type(m) for m in model.modules()] == modules and [id(p) for p in model.parameters()] == ids
    assert not hasattr(model, "fxoffload")
    # Bytes that came in buckets lie elsewhere now, each parameter's in a storage of its own.
    storages = [p.untyped_storage() for p in model.parameters()]
    assert [s.nbytes() for s in storages] == [p.nbytes for p in model.parameters()]
    assert len({s.data_ptr() for s in storages}) == len(storages) and all(s.resizable() for s in storages)
    plain(images)[1].sum().backward()
    assert_same(plain, model)
    assert torch.equal(plain(images)[1], model(images)[1])


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 4), nn.Tanh())


def test_six_cycles_leave_no_memory_threads_files_or_sessions(tmp_path: Any) -> None:
    process = psutil.Process()
    sessions, readings = [], []
    for cycle in range(6):
        model = compiled(Small(), torch.zeros(4, 16), disk_budget="1MiB", disk_dir=tmp_path, dynamic=True)
        model(torch.randn(3, 16)).sum().backward()
        sessions.append(weakref.ref(model.fxoffload))
        if cycle % 2:
            model.fxoffload.close()
        del model
        if cycle in (2, 5):
            for _ in range(3):  # what a Session's end lets go of, Dynamo's cache, holds more
                gc.collect()
            readings.append((process.num_threads(), process.num_fds(), sum(type(o) in (ShapeEnv, FakeTensor) for o in gc.get_objects())))
    assert not any(s() for s in sessions)
    assert readings[0] == readings[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_thousand_steps_leave_memory_threads_and_files_as_they_were(tmp_path: Any) -> None:
    process = psutil.Process()
    model = compiled(Small(), torch.zeros(4, 16), device_budget="2KiB", disk_budget="1MiB", disk_dir=tmp_path, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters())
    readings, resident = [], []
    for step in range(1000):
        model(torch.randn(1 + step % 4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (99, 549, 999):
            gc.collect()
            readings.append((process.num_threads(), process.num_fds(), model.fxoffload.meter.peak_bytes, len(gc.get_objects()) // 1000))
            resident.append(process.memory_info().rss)
    assert readings[1] == readings[2]
    assert resident[2] - resident[1] < 1 << 20
    model.fxoffload.close()


_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adagrad": torch.optim.Adagrad, "adadelta": torch.optim.Adadelta, "adamax": torch.optim.Adamax, "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam, "rmsprop": torch.optim.RMSprop, "asgd": torch.optim.ASGD, "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor, "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_any_optimizer_of_torch_steps_as_on_the_plain_model(pair: Pair, name: str) -> None:
    losses = []
    for model in both(pair):
        optimizer = _OPTIMIZERS[name](list(model.parameters()))
        losses.append([])

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**BATCHES[len(losses[-1]) % 3]).loss
            loss.backward()
            losses[-1].append(loss.item())
            return loss.detach()

        for _ in range(2):
            optimizer.step(closure)
    assert losses[0] == losses[1]
    assert_same(*both(pair))


def test_gradient_checkpointing_left_on_by_the_user_changes_nothing() -> None:
    case = llama(num_hidden_layers=1)
    case.model.gradient_checkpointing_enable()
    plain = copy.deepcopy(case.model)
    model = compiled(case.model, case.batch)
    model.enable_input_require_grads()
    assert train(plain, BATCHES[:2]) == train(model, BATCHES[:2])
    assert_same(plain, model)
    model.fxoffload.close()


def test_two_compiled_models_alternate(pair: Pair) -> None:
    torch.manual_seed(1)
    net = Small()
    plain = copy.deepcopy(net)
    net = compiled(net, torch.zeros(4, 16))
    for batch in BATCHES:
        x = torch.randn(4, 16)
        for small, large in ((plain, pair.plain), (net, pair.compiled)):
            (small(x).square().mean() + large(**batch).loss).backward()
    assert_same(plain, net)
    assert_same(*both(pair))
    net.fxoffload.close()


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def test_out_of_memory_in_the_middle_of_a_step_leaves_nothing_open_and_the_model_usable(simulated_device: Any) -> None:
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model).to("fxsim")
    expected = train(plain, [{k: v.to("fxsim") for k, v in batch.items()} for batch in BATCHES])
    del plain
    gc.collect()
    start = simulated_device.memory_allocated()
    model = compiled(case.model, case.batch, device="fxsim", device_budget="800KiB")
    settled = simulated_device.memory_allocated()
    needed = model.fxoffload.plan.predicted.device_peak_bytes
    for capacity in (needed * 4 // 10, needed * 7 // 10, needed * 9 // 10):
        simulated_device.set_capacity(capacity)
        try:
            model(**case.batch).loss.backward()
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("the capacity was below the plan's peak and nothing ran out")
        model.zero_grad()
        gc.collect()
        # Autograd's thread of the device holds the error, and with its frames the step's values, until it next has the interpreter.
        wait_until(lambda: simulated_device.memory_allocated() == settled)
        assert not model.fxoffload.home.active
    simulated_device.set_capacity(800 * 1024)
    assert train(model, BATCHES) == expected
    model.fxoffload.close()
    gc.collect()
    assert simulated_device.memory_allocated() == start


def test_a_frozen_parameter_that_is_thawed_trains_on_a_second_device_too(simulated_device: Any) -> None:
    case = llama(num_hidden_layers=1)
    case.model.requires_grad_(False).lm_head.requires_grad_(True)
    plain = copy.deepcopy(case.model).to("fxsim")
    model = compiled(case.model, case.batch, device="fxsim", device_budget="100MiB")
    losses = []
    for net in (plain, model):
        device_batches = [{k: v.to("fxsim") for k, v in batch.items()} for batch in BATCHES]
        losses.append(train(net, device_batches[:1]))
        net.model.layers[0].mlp.up_proj.requires_grad_(True)
        losses[-1] += train(net, device_batches[1:])
    assert losses[0] == losses[1]
    assert_same(plain.to("cpu"), model)
    model.fxoffload.close()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def recorded(model: Any, reference: Any, batch: dict[str, Any], field: str) -> None:
    """One training step of both: loss, gradients and the recorded outputs are equal."""
    ours, theirs = model(**batch), reference(**batch)
    assert torch.equal(ours.loss, theirs.loss)
    assert len(ours[field]) == len(theirs[field]) >= 2
    assert all(torch.equal(a, b) for a, b in zip(ours[field], theirs[field]))
    ours.loss.backward()
    theirs.loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "field"), [("router", "router_logits"), ("hidden", "hidden_states"), ("attentions", "attentions")])
def test_outputs_that_a_config_asks_for_are_recorded(kind: str, field: str) -> None:
    configs: dict[str, Callable[[], Any]] = {
        "router": lambda: tf.Qwen3MoeConfig(**zoo._sizes(
            num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, output_router_logits=True)),
        "hidden": lambda: tf.LlamaConfig(**zoo._sizes(num_hidden_layers=1, output_hidden_states=True)),
        "attentions": lambda: tf.LlamaConfig(**zoo._sizes(output_attentions=True, attn_implementation="eager")),
    }
    case = zoo._causal(configs[kind]())
    reference = copy.deepcopy(case.model)
    with fxoffload.compile(case.model, case.batch, device="cpu", device_budget="16MiB").fxoffload as model:
        recorded(model, reference, case.batch, field)


def test_hidden_states_that_a_call_asks_for_are_recorded() -> None:
    case = llama(num_hidden_layers=1)
    reference = copy.deepcopy(case.model)
    with fxoffload.compile(case.model, case.batch, device="cpu", device_budget="16MiB", dynamic=False).fxoffload as model:
        recorded(model, reference, {**case.batch, "output_hidden_states": True}, "hidden_states")
        assert "hidden_states" not in model(**case.batch)
    assert not any(module._forward_hooks for module in case.model.modules()), "what records went with the session"
    ours, theirs = (one(**case.batch, output_hidden_states=True).hidden_states for one in (case.model, reference))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
