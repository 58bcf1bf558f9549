"""A compiled model in the user's own loop does what the plain model does, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from loops import assert_same, train
from torch import nn
from zoo import gpt2, llama, tokens

import fxoffload

pytestmark = pytest.mark.integration
BUDGET = "600KiB"  # the Llama of the zoo needs about 1.4 MiB free of budget: parameters stream, activations are recomputed


@dataclass
class Pair:
    plain: Any
    compiled: Any


def compiled(model: nn.Module, batch: Any, **options: Any) -> Any:
    return fxoffload.compile(model, batch, **{"device": "cpu", "device_budget": BUDGET, **options})


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
