"""Random (model, budget) pairs on the simulated device with its capacity at the budget: bit-equal inside it, or truly refused.

Each model is captured once; every budget plans that graph anew and runs the lowered graph on the device. FXOFFLOAD_SOAK_SEED
repeats a run.
"""

from __future__ import annotations

import copy
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.fx as fx
import transformers as tf
from torch import nn

from fxoffload.errors import PlanError
from fxoffload.graph import Role, info, output_of
from fxoffload.machine import default_machine
from fxoffload.places import named_constants, named_weights
from fxoffload.planner import Problem, Searches, Solution, solve
from fxoffload.captured_step import CapturedStep
from fxoffload.runtime.executor import compile_eager
from fxoffload.session import Options, Session
from fxoffload.testing.simulated_device import SimulatedDevice
from fxoffload.verify import verify

DEVICE = "fxsim"
SEED = int(os.environ.get("FXOFFLOAD_SOAK_SEED", "20"))
Batch = dict[str, torch.Tensor]
Model = tuple[nn.Module, Batch]


# Random models ----------------------------------------------------------------------------------------------------------


def sizes(dice: random.Random) -> dict[str, object]:
    heads = dice.choice((2, 4))
    return dict(
        hidden_size=heads * 16, intermediate_size=dice.choice((32, 64, 96)), num_hidden_layers=dice.choice((1, 2)), num_attention_heads=heads,
        num_key_value_heads=dice.choice((1, heads)), head_dim=16, vocab_size=dice.choice((64, 200)), max_position_embeddings=64,
        tie_word_embeddings=dice.random() < 0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )


def causal(config: object, dice: random.Random) -> Model:
    ids = torch.randint(3, config.vocab_size, (dice.choice((1, 2, 3)), dice.choice((8, 16))))  # type: ignore[attr-defined]
    return tf.AutoModelForCausalLM.from_config(config).train(), {"input_ids": ids, "labels": ids.clone()}


def llama(dice: random.Random) -> Model:
    return causal(tf.LlamaConfig(**sizes(dice)), dice)


def experts(dice: random.Random) -> Model:
    return causal(tf.Qwen3MoeConfig(**sizes(dice), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32), dice)


def gpt2(dice: random.Random) -> Model:
    config = tf.GPT2Config(n_embd=32, n_layer=dice.choice((1, 2)), n_head=2, vocab_size=dice.choice((64, 200)), n_positions=32)
    return causal(config, dice)


def lora(dice: random.Random) -> Model:
    import peft

    model, batch = llama(dice)
    config = peft.LoraConfig(r=dice.choice((2, 8)), target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dice.choice((0.0, 0.1)))
    return peft.get_peft_model(model, config).train(), batch


def bert(dice: random.Random) -> Model:
    config = tf.BertConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=dice.choice((1, 2)), num_attention_heads=2, vocab_size=100,
                           num_labels=3, problem_type="single_label_classification")
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, dice.choice((4, 8)):] = 0
    batch = {"input_ids": torch.randint(3, 100, (2, 12)), "attention_mask": mask, "labels": torch.tensor([0, 2])}
    return tf.BertForSequenceClassification(config).train(), batch


class Layers(nn.Module):
    """Layers in a row and a loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), y)}


def perceptron(dice: random.Random) -> Model:
    width = dice.choice((32, 64, 128))
    shared = nn.Linear(width, width)
    middle = [layer for _ in range(dice.randint(1, 4))
              for layer in (dice.choice((shared, nn.Linear(width, width))), dice.choice((nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Dropout(0.2))))]
    n = dice.choice((4, 32))
    model = Layers(nn.Linear(16, width), *middle, nn.LayerNorm(width), nn.Linear(width, 10))
    return model.train(), {"x": torch.randn(n, 16), "y": torch.randint(0, 10, (n,))}


def images(dice: random.Random) -> Model:
    channels = dice.choice((4, 8, 16))
    blocks = [layer for _ in range(dice.randint(1, 3)) for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())]
    model = Layers(nn.Conv2d(3, channels, 3, stride=2, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))
    n = dice.choice((2, 4))
    return model.train(), {"x": torch.randn(n, 3, 16, 16), "y": torch.randint(0, 5, (n,))}


KINDS: tuple[Callable[[random.Random], Model], ...] = (llama, perceptron, images, lora, gpt2, experts, bert)


# One captured model -----------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """A model's canonical graph as a planning problem without a budget, its inputs, and what they give."""

    problem: Problem
    session: Session
    inputs: Callable[[], list[object]]
    searches: Searches = field(default_factory=Searches)

    def run(self, solution: Solution) -> list[torch.Tensor | None]:
        """The lowered graph's results on the device, as host tensors, and what it leaves in its inputs."""
        buffers = [buffer for _, buffer in named_constants(self.session.model)]
        before = [buffer.cpu().clone() for buffer in buffers]
        torch.manual_seed(3)
        try:
            outputs, gradients = compile_eager(solution.lowered, self.session.engine, self.session.engine.settle)(self.inputs())  # type: ignore[misc]
            return [t.cpu().clone() if isinstance(t, torch.Tensor) else None for t in (*outputs, *gradients, *buffers)]  # type: ignore[misc]
        finally:
            for buffer, value in zip(buffers, before):
                buffer.copy_(value)

    def solved(self, budget: int | None) -> Solution:
        return solve(replace(self.problem, context=replace(self.problem.context, device_budget_bytes=budget)), self.searches)


def captured(model: nn.Module, batch: Batch, dynamic: bool) -> Captured:
    session = Session(model, Options(torch.device(DEVICE, 0), device_budget_bytes=1 << 40, dynamic=dynamic), default_machine("fxsim"), None)
    session.places.settle_constants()
    problems: list[Problem] = []
    planning, lower = session.planning, session.planning.lower

    def recording(one: CapturedStep) -> tuple[str, fx.Graph]:
        label, lowered = lower(one)
        problems.append(replace(planning.problem(one), resident=frozenset()))
        return label, lowered

    planning.lower = recording  # type: ignore[method-assign]
    session.router.capture((), dict(batch))
    return Captured(problems[0], session, lambda: inputs_of(problems[0].graph, model, batch))


def inputs_of(graph: fx.Graph, model: nn.Module, batch: Batch) -> list[object]:
    weights, constants = dict(named_weights(model)), dict(named_constants(model))

    def value(node: fx.Node) -> object:
        fake, entry = node.meta["val"], info(node)
        if entry.role is Role.SYMBOL:
            return fake.node.hint
        if entry.role is Role.PARAMETER:
            return weights[entry.fqn].detach()  # type: ignore[index]
        if entry.role is Role.BUFFER:
            return constants[entry.fqn]  # type: ignore[index]
        if entry.role is Role.TANGENT:
            return torch.ones([int(n) for n in fake.shape], dtype=fake.dtype, device=DEVICE)
        return batch[entry.name.rsplit(".", 1)[-1]].to(DEVICE)

    return [value(node) for node in graph.find_nodes(op="placeholder")]


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return len(a) == len(b) and all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b))


def gradients_by_pytorch(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """What plain PyTorch computes with a copy of the model on the device, keeping no cache.

    A cache makes keys and values contiguous; the simulated device's attention rounds them differently then at some sizes.
    """
    plain = copy.deepcopy(model).to(DEVICE)
    if hasattr(plain, "tie_weights"):
        plain.tie_weights()  # `.to` of an out-of-tree device unties
    torch.manual_seed(3)
    options = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    plain(**{name: tensor.to(DEVICE) for name, tensor in batch.items()}, **options)["loss"].backward()
    return {name: p.grad.cpu() for name, p in plain.named_parameters() if p.grad is not None}


def gradients_of(one: Captured, results: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The gradients among a run's results, by parameter."""
    graph = one.problem.graph
    outputs, gradients = output_of(graph).args[0]  # type: ignore[misc]
    names = [info(node).fqn for node in graph.find_nodes(op="placeholder")]
    found = zip(names, results[len(outputs): len(outputs) + len(gradients)])  # type: ignore[arg-type]
    return {name: value for name, value in found if name is not None and value is not None}


# The soak ---------------------------------------------------------------------------------------------------------------


def soak(seed: int, n_budgets: int, device: SimulatedDevice) -> Iterator[str]:
    """Runs one random model under `n_budgets` random budgets; yields what is wrong."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    device.set_capacity(None)
    make = KINDS[seed % len(KINDS)]
    model, batch = make(dice)
    plain = gradients_by_pytorch(model, batch)
    gc.collect()
    base = device.memory_allocated()
    one = captured(model, batch, dynamic=dice.random() < 0.5)
    free = one.solved(None)
    expected = one.run(free)
    got = gradients_of(one, expected)
    if got.keys() != plain.keys() or not all(torch.equal(got[name], plain[name]) for name in plain):
        yield f"seed {seed} ({make.__name__}): other gradients than plain PyTorch's"
    peak, least = free.simulation.device_peak_bytes, least_budget(one)
    budgets = [least, *(dice.randint(int(least * 0.8), peak) for _ in range(n_budgets - 1))]
    for budget in budgets:
        where = f"seed {seed} ({make.__name__}), budget {budget} of {least}..{peak}"
        try:
            solution = one.solved(budget)
        except PlanError as refusal:
            if budget >= least:
                yield f"{where}: refused by {refusal.shortfall_bytes}"
            budget += refusal.shortfall_bytes or 0
            solution = one.solved(budget)
        try:
            verify(solution.lowered, one.problem.context.bounds, frozenset({"lowered", "awaited"}), budget, one.problem.context.workspace)
            device.set_capacity(base + budget)
            device.reset_peak_memory_stats()
            if not same(one.run(solution), expected):
                yield f"{where}: other bits"
        except torch.OutOfMemoryError as error:
            yield f"{where}: out of memory, {solution.simulation.device_peak_bytes} predicted at {solution.simulation.peak_node}: {error}"
        measured = device.max_memory_allocated() - base
        if solution.simulation.device_peak_bytes > 1.05 * measured + 2048:
            yield f"{where}: {solution.simulation.device_peak_bytes} predicted, {measured} measured"
    device.set_capacity(None)
    one.session.close()


def least_budget(one: Captured) -> int:
    """The smallest budget that plans, as the refusal of an impossible one names it."""
    try:
        one.solved(1)
    except PlanError as refusal:
        return 1 + (refusal.shortfall_bytes or 0)
    raise AssertionError("a budget of one byte was accepted")


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_a_random_budget_is_kept_bit_equal_or_refused_with_a_shortfall_that_is_true(kind: int, simulated_device: SimulatedDevice) -> None:
    """43 budgets per kind of model: 301 pairs."""
    seed = SEED * len(KINDS) + kind
    assert list(soak(seed, 43, simulated_device)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nth", range(40))
def test_a_thousand_random_pairs_keep_their_word(nth: int, simulated_device: SimulatedDevice) -> None:
    assert list(soak((SEED + 1) * 1000 + nth, 25, simulated_device)) == []
