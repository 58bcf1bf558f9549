"""numerics="reordered": logits and their cross-entropy in chunks of rows, on whole models.

Tolerance, everywhere: against the same model in float64, the relative error (2-norm) of the loss and of each gradient is at most twice
plain PyTorch's own, or four units in the last place of fp32 where plain PyTorch happens to round to the nearest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import zoo
from torch import nn

import fxoffload
from fxoffload import text
from fxoffload.api import captured, planning_options
from fxoffload.liveness import liveness
from fxoffload.machine import load_machine
from fxoffload.plans import Chunk
from fxoffload.study import Study
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
CLASSES, ROWS, LENGTH = 2048, 4, 64
# Where the loss holds the most bytes in every case here, and more than any block.
SIZES = dict(vocab_size=CLASSES, hidden_size=32, intermediate_size=64, head_dim=8, num_hidden_layers=1)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model whose loss sets the peak, its batch with ignored labels, and how it is run."""

    model: nn.Module
    batch: dict[str, Any]
    autocast: torch.dtype | None = None

    def mode(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext()


def batch_of(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens whose first labels are padding, more of it in each row."""
    ids = torch.randint(3, CLASSES, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row * length // 8] = -100
    return {"input_ids": ids, "labels": labels}


def model_of(config: type, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = zoo._sizes(**SIZES) | changes
    return tf.AutoModelForCausalLM.from_config(config(**sizes)).eval()  # no dropout: float64 would draw other numbers


def llama() -> Setting:
    return Setting(model_of(tf.LlamaConfig), batch_of())


def llama_bf16() -> Setting:
    return Setting(llama().model.bfloat16(), batch_of())


def counted() -> Setting:
    """The Trainer's own: the sum of all losses, divided by a number of items that is a tensor."""
    return Setting(llama().model.bfloat16(), batch_of() | {"num_items_in_batch": torch.tensor(300)})


def gemma2() -> Setting:
    model = model_of(tf.Gemma2Config, sliding_window=16, query_pre_attn_scalar=8, final_logit_softcapping=5.0).bfloat16()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # logits that reach the cap
    return Setting(model, batch_of())


def gpt2() -> Setting:
    torch.manual_seed(0)
    config = tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=CLASSES, n_positions=128, bos_token_id=1, eos_token_id=2)
    return Setting(tf.AutoModelForCausalLM.from_config(config).eval(), batch_of())


def qwen2() -> Setting:
    return Setting(model_of(tf.Qwen2Config).bfloat16(), batch_of())


def lora() -> Setting:
    import peft

    base = llama().model.bfloat16()
    torch.manual_seed(1)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return Setting(adapted.eval(), batch_of())


def t5() -> Setting:
    torch.manual_seed(0)
    config = tf.T5Config(vocab_size=CLASSES, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    return Setting(tf.T5ForConditionalGeneration(config).eval(), batch_of())


def autocast() -> Setting:
    return Setting(llama().model, batch_of(), torch.bfloat16)


SETTINGS: dict[str, Callable[[], Setting]] = {
    f.__name__: f for f in (llama, llama_bf16, counted, gemma2, gpt2, qwen2, lora, t5, autocast)}
# One of every mechanism: rows of bf16, soft-capping, a tied head, a frozen one. `make soak` runs all.
QUICK = ("llama_bf16", "lora")


@contextlib.contextmanager
def study_of(setting: Setting, numerics: str) -> Iterator[Study]:
    machine = load_machine("cpu")
    options = planning_options(setting.model, machine, 1, None, 0, "adamw", "auto", None, numerics, ())
    with setting.mode(), captured(setting.model, setting.batch, options, machine) as session:
        yield session.study


@functools.cache
def refused_budget(name: str) -> int:
    """One byte less than the step needs at least with numerics="bitwise", which refuses it."""
    with study_of(SETTINGS[name](), "bitwise") as study:
        with pytest.raises(fxoffload.PlanError) as refusal:
            study.plan()
        assert refusal.value.shortfall_bytes is not None
        budgets = replace(study.planning.budgets, device_bytes=refusal.value.shortfall_bytes)
        with pytest.raises(fxoffload.PlanError, match="is 1 bytes short"):
            study.plan(budgets)
    return budgets.device_bytes


def compiled(setting: Setting, budget: int, numerics: str = "reordered", device: str = "cpu", **options: Any) -> Any:
    with setting.mode():
        return fxoffload.compile(
            setting.model, setting.batch, device=device, device_budget=budget, numerics=numerics, machine="cpu", **{"dynamic": False, **options})


def step(model: Any, setting: Setting) -> dict[str, torch.Tensor]:
    """The loss and every gradient."""
    model.zero_grad()
    with setting.mode():
        loss = model(**setting.batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def exact_step(setting: Setting) -> dict[str, torch.Tensor]:
    return step(copy.deepcopy(setting.model).double(), replace(setting, autocast=None))


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def assert_as_near(
    ours: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], units: int = 4,
) -> None:
    assert ours.keys() == plain.keys() == exact.keys()
    for name, value in exact.items():
        assert ours[name].dtype is plain[name].dtype
        assert error(ours[name], value) <= max(2 * error(plain[name], value), units * torch.finfo(torch.float32).eps), name


def lowered_bytes(model: Any, label: str = "train") -> dict[str, int]:
    """Every Storage that a lowered graph makes, with its bytes."""
    graph = model.fxoffload.graphs[label]
    live = liveness(graph, graph.output_node().meta[text.BOUNDS])
    return {s.name: s.n_bytes for s in live.first if not s.is_input}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(SETTINGS)])
def test_a_step_that_bitwise_refuses_fits_in_chunks_as_near_to_the_truth(name: str) -> None:
    setting = SETTINGS[name]()
    plain, exact = step(copy.deepcopy(setting.model), setting), exact_step(setting)
    setting.model.zero_grad()
    budget = refused_budget(name)
    model = compiled(setting, budget)
    assert model.fxoffload.plan.count()["chunk"] == 1
    assert model.fxoffload.plan.predicted.device_peak_bytes <= budget
    assert_as_near(step(model, setting), plain, exact)
    logits_bytes = setting.batch["labels"].numel() * CLASSES * 2
    assert not {name: n for name, n in lowered_bytes(model).items() if n >= logits_bytes}
    model.fxoffload.close()


def test_backward_with_a_frozen_head_reads_neither_logits_nor_head() -> None:
    setting = lora()
    model = compiled(setting, refused_budget("lora"))
    backward = text.render(model.fxoffload.graphs["train"]).split("fxo.backward", 1)[1]
    assert "lm_head.weight" not in backward.split("return", 1)[0]
    model.fxoffload.close()


def test_the_tangent_scales_what_forward_has_computed() -> None:
    setting = gpt2()
    model = compiled(setting, refused_budget("gpt2"))
    once = step(model, setting)
    model.zero_grad()
    (model(**setting.batch).loss * 4).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, 4 * once[name]), name
    model.fxoffload.close()


def test_a_batch_of_nothing_but_ignored_labels_gives_what_plain_pytorch_gives() -> None:
    setting = qwen2()
    nothing = replace(setting, batch=setting.batch | {"labels": torch.full((ROWS, LENGTH), -100)})
    plain = step(copy.deepcopy(setting.model), nothing)
    model = compiled(setting, refused_budget("qwen2"))
    ours = step(model, nothing)
    assert ours["loss"].isnan() and plain["loss"].isnan()
    assert all(torch.equal(ours[name], plain[name]) for name in plain if name != "loss")
    model.fxoffload.close()


def test_batches_of_other_sizes_run_on_the_same_capture_even_with_fewer_rows_than_chunks() -> None:
    setting = llama()
    shapes = [(4, 64), (3, 50), (2, 64), (4, 7), (2, 3)]
    settings = [replace(setting, batch=batch_of(*shape, seed=i)) for i, shape in enumerate(shapes)]
    exact = [exact_step(one) for one in settings]
    plain = [step(copy.deepcopy(setting.model), one) for one in settings]
    model = compiled(setting, refused_budget("llama"), dynamic=True)
    (chunk,) = [d for d in model.fxoffload.plan.decisions if isinstance(d, Chunk)]
    assert chunk.chunks > 2 * 3  # of two tokens the second sees no target: gradients of queries would be rounding alone
    before = model.fxoffload.router.captures
    for one, near, truth in zip(settings, plain, exact):
        # A chunk of one row is multiplied by another kernel, whose sums of 2048 terms are in an order of their own.
        assert_as_near(step(model, one), near, truth, units=16)
    assert model.fxoffload.router.captures == before
    model.fxoffload.close()


def test_evaluation_and_logits_that_are_read_are_plain_pytorchs_bits_with_no_second_value_of_their_size() -> None:
    setting = llama_bf16()
    with torch.no_grad():
        expected = setting.model(**setting.batch)
    model = compiled(setting, 3 * expected.logits.nbytes)
    out = model(**setting.batch)
    out.loss.backward()
    assert torch.equal(out.logits, expected.logits)
    with torch.no_grad():
        evaluated = model(**setting.batch)
    assert torch.equal(evaluated.logits, expected.logits)
    torch.testing.assert_close(evaluated.loss, expected.loss, rtol=1e-6, atol=0)
    large = {label: [n for n in lowered_bytes(model, label).values() if n >= expected.logits.nbytes] for label in model.fxoffload.graphs}
    assert sorted(large.values()) == [[], [], [expected.logits.nbytes]]  # training, evaluation, what reads all logits
    model.fxoffload.close()


def test_bitwise_knows_no_chunks_and_both_numerics_have_one_fingerprint() -> None:
    with study_of(llama(), "bitwise") as bitwise, study_of(llama(), "reordered") as reordered:
        assert bitwise.captured.fingerprint == reordered.captured.fingerprint
        tight = replace(bitwise.planning.budgets, device_bytes=refused_budget("llama") + 1)
        roomy = replace(tight, device_bytes=1 << 30)
        assert bitwise.plan(tight).count()["chunk"] == 0
        assert not any(one.recipe.startswith("logits") for g in bitwise.plan(tight).graphs.values() for one in g.reasons.tried)
        assert reordered.plan(replace(tight, device_bytes=tight.device_bytes - 1)).count()["chunk"] == 1
        # Where memory does not bind, chunks cost launches and give nothing.
        ours, theirs = reordered.plan(roomy), bitwise.plan(roomy)
        assert (ours.decisions, ours.predicted) == (theirs.decisions, theirs.predicted)


def test_a_plan_with_chunks_replays_and_is_refused_where_bits_are_promised(tmp_path: Path) -> None:
    setting = gemma2()
    budget = refused_budget("gemma2")
    made = fxoffload.plan(setting.model, setting.batch, device_budget=budget, numerics="reordered", machine="cpu")
    made.save(tmp_path / "plan.json")
    with pytest.raises(fxoffload.PlanError, match="reordered"):
        compiled(setting, budget, "bitwise", plan=tmp_path / "plan.json")
    model = compiled(setting, budget, plan=tmp_path / "plan.json", replan=False)
    assert model.fxoffload.plan == made
    assert step(model, setting)["loss"].isfinite()
    model.fxoffload.close()


def test_logits_that_are_an_output_with_a_gradient_of_their_own_stay_whole() -> None:
    plan = fxoffload.plan(llama().model, batch_of(), device_budget="1GiB", numerics="reordered", outputs="all", machine="cpu")
    assert plan.count()["chunk"] == 0
    assert "stay whole: the logits are an output" in plan.explain()


def test_logits_that_the_caller_has_pinned_stay_whole() -> None:
    setting, pins = llama(), [fxoffload.pin("/_log_softmax#0", "keep")]
    budget = 2 * refused_budget("llama")
    tight = dict(device_budget=budget // 2, numerics="reordered", machine="cpu")
    assert fxoffload.plan(setting.model, setting.batch, **tight).count()["chunk"] == 1
    with pytest.raises(fxoffload.PlanError, match="short"):
        fxoffload.plan(setting.model, setting.batch, pins=pins, **tight)
    assert fxoffload.plan(setting.model, setting.batch, pins=pins, **tight | {"device_budget": budget}).count()["chunk"] == 0


def test_no_budget_changes_the_size_of_a_chunk() -> None:
    """With a size that grows with the budget, a larger one could be slower."""
    setting, budget = llama(), refused_budget("llama")
    with study_of(setting, "reordered") as study:
        budgets = [replace(study.planning.budgets, device_bytes=budget * share // 8) for share in (5, 6, 7, 8)]
        plans = [study.plan(one) for one in budgets]
    chunks = {d.chunks for plan in plans for d in plan.decisions if isinstance(d, Chunk)}
    assert all(plan.count()["chunk"] == 1 for plan in plans) and len(chunks) == 1


def test_a_bitwise_plan_that_is_extended_with_chunks_is_bitwise_no_more() -> None:
    setting = llama()
    made = fxoffload.plan(setting.model, setting.batch, device_budget=refused_budget("llama") + 1, machine="cpu")
    budget = made.device_budget_bytes
    model = compiled(setting, budget, plan=made)
    assert (model.fxoffload.plan.numerics, model.fxoffload.plan.count()["chunk"]) == ("bitwise", 0)
    larger = replace(setting, batch=batch_of(ROWS, LENGTH + 20))
    assert step(model, larger)["loss"].isfinite()
    assert (model.fxoffload.plan.numerics, model.fxoffload.plan.count()["chunk"]) == ("reordered", 1)
    model.fxoffload.close()


class WithZLoss(nn.Module):
    """A router's or PaLM's term on the logits' normalizer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama().model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.inner(input_ids=input_ids, labels=labels)
        return {"loss": out.loss + 1e-4 * out.logits.float().logsumexp(-1).square().mean()}


class Smoothed(WithZLoss):
    """The Trainer's label smoothing."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.trainer_pt_utils import LabelSmoother

        out = self.inner(input_ids=input_ids)
        return {"loss": LabelSmoother(0.1)({"logits": out.logits}, labels, shift_labels=True)}


class HalfLogits(WithZLoss):
    """What fp16 autocast makes of a head: the gradient of its result is fp16."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.inner.model(input_ids=input_ids).last_hidden_state
        logits = hidden.half() @ self.inner.lm_head.weight.half().t()
        return {"loss": nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    "make, reason", [(WithZLoss, "reads the logits too"), (Smoothed, "label smoothing"), (HalfLogits, "fp16")])
def test_a_loss_that_needs_its_logits_whole_is_left_alone_and_the_plan_says_why(make: type, reason: str) -> None:
    plan = fxoffload.plan(make(), batch_of(), device_budget="1GiB", numerics="reordered", machine="cpu")
    assert plan.count()["chunk"] == 0
    assert "stay whole" in plan.explain() and reason in plan.explain()
    assert reason not in fxoffload.plan(make(), batch_of(), device_budget="1GiB", machine="cpu").explain()


def test_training_in_chunks_keeps_to_the_budget_of_a_device_that_has_no_more(simulated_device: SimulatedDevice) -> None:
    setting = llama()
    plain = copy.deepcopy(setting.model)
    budget = refused_budget("llama")
    base = simulated_device.memory_allocated()
    simulated_device.set_capacity(base + budget)
    simulated_device.reset_peak_memory_stats()
    model = compiled(setting, budget, device="fxsim")
    losses = []
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = one(**setting.batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    measured = simulated_device.max_memory_allocated() - base
    assert measured <= model.fxoffload.plan.predicted.device_peak_bytes <= budget
    model.fxoffload.close()
