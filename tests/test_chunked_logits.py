"""numerics="reordered": what is read of `out.logits` row by row is computed a chunk of rows at a time; the logits are never there.

Budgets are below the bytes of the logits, or of the logits in fp32. Rows of a product do not depend on each other, so what is read of them
is plain PyTorch's up to the order of the product's sums, and on the CPU mostly to the bit; `CLOSE` is for those sums in fp32.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
import zoo
from test_chunk_loss import LENGTH, ROWS, SETTINGS, Setting, batch_of, lowered_bytes, model_of
from torch import nn

import fxoffload
from fxoffload.lazy import LazyTensor, Root
from fxoffload.plans import Chunk, Defer
from fxoffload.recorded import Expression
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
CLOSE: dict[str, float] = dict(rtol=1e-5, atol=1e-6)
KiB = 1024
Read = Callable[[torch.Tensor, dict[str, torch.Tensor]], Any]


def token_log_probabilities(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch["input_ids"].to(logits.device)[:, 1:].unsqueeze(-1)
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens).squeeze(-1)


def entropy(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    wide = logits.float()
    return -(wide.softmax(-1) * torch.log_softmax(wide, dim=-1)).sum(-1)


METRICS: dict[str, Read] = {
    "the likeliest token": lambda t, b: t.argmax(-1),
    "how likely it is": lambda t, b: tuple(t.softmax(dim=-1).max(-1)),
    "the five likeliest": lambda t, b: torch.topk(t, 5).values,
    "normalizers": lambda t, b: torch.logsumexp(t.float(), dim=2),
    "log-probabilities of tokens": token_log_probabilities,
    "entropies": entropy,
    "the last rows": lambda t, b: t[:, -1].argmax(-1),
    "rows with a label": lambda t, b: t[(b["labels"] != -100).to(t.device)].argmax(dim=-1),
    "some columns": lambda t, b: t[..., 3:7],
}


def compiled(setting: Setting, budget: int, device: str = "cpu", **options: Any) -> Any:
    return fxoffload.compile(
        setting.model, setting.batch, device=device, device_budget=budget, numerics="reordered", machine="cpu", **{"dynamic": False, **options})


def evaluated(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return model(**batch)


def assert_alike(ours: Any, theirs: Any) -> None:
    for mine, plain in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (ours, theirs)), strict=True):
        assert type(mine) is torch.Tensor and mine.dtype is plain.dtype
        torch.testing.assert_close(mine.cpu(), plain, **CLOSE)


def decisions_of(model: Any, kind: type) -> list[Any]:
    return [d for d in model.fxoffload.plan.decisions if isinstance(d, kind)]


def large_values(model: Any, n_bytes: int) -> dict[str, int]:
    """What any lowered graph makes of so many bytes or more."""
    return {f"{label} {name}": n for label in model.fxoffload.graphs for name, n in lowered_bytes(model, label).items() if n >= n_bytes}


# Which functions read rows -----------------------------------------------------------------------------------------------------


class Counted:
    """A Source that has the whole tensor, and counts who asks for it."""

    by_rows = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.n_whole = tensor, 0

    def whole(self) -> torch.Tensor:
        self.n_whole += 1
        return self.tensor.clone()

    def rows(self) -> Counted:
        return self

    def read(self, expression: Expression, index: torch.Tensor | None) -> Sequence[torch.Tensor]:
        program, operands = expression.program()
        rows = self.tensor.reshape(-1, self.tensor.shape[-1])
        rows = rows if index is None else rows[index.reshape(-1)]
        return torch.fx.GraphModule({}, program)(rows, *operands)  # type: ignore[no-any-return]


def counted() -> tuple[LazyTensor, Counted]:
    source = Counted(torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0)))
    return LazyTensor.of(source, (3, 4, 6), torch.float32, torch.device("cpu")), source


MASK = torch.tensor([[True, False, True, True]] * 3)
TOKENS = torch.arange(12).view(3, 4, 1) % 6
BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda t: t.argmax(-1), "argmax of dimension 2": lambda t: torch.argmax(t, 2, keepdim=True),
    "max": lambda t: t.max(-1).indices, "min": lambda t: torch.min(t, dim=-1, keepdim=True).values, "amax": lambda t: t.amax(-1),
    "topk": lambda t: t.topk(2).values, "topk of a dimension": lambda t: torch.topk(t, k=2, dim=2, largest=False).indices,
    "logsumexp": lambda t: t.double().logsumexp((-1,)), "mean": lambda t: t.mean(-1, keepdim=True), "any": lambda t: (t > 1).any(-1),
    "arithmetic": lambda t: ((t / 0.7 - 1) ** 2).sum(dim=-1), "of two": lambda t: (t.softmax(-1) * t.log_softmax(-1)).sum(-1),
    "functional": lambda t: torch.nn.functional.softmax(t, dim=-1, dtype=torch.float64).max(-1).values,
    "gather": lambda t: t.gather(-1, TOKENS), "take_along_dim": lambda t: torch.take_along_dim(t, TOKENS, dim=-1),
    "a row": lambda t: t[1, 2].argmax(-1), "last": lambda t: t[:, -1] * 2, "all but last": lambda t: t[..., :-1, :].argmax(-1),
    "a mask": lambda t: t[MASK].log_softmax(-1).max(-1).values, "a mask of batches": lambda t: t[MASK[:, 0]].argmax(-1),
    "places": lambda t: t[torch.arange(3), torch.tensor([0, 3, 1])].argmax(-1), "a new dimension": lambda t: t[:, None, 1:].argmax(-1),
    "no row": lambda t: t[:, :0].argmax(-1), "flat": lambda t: t.view(-1, t.size(-1))[MASK.flatten()].argmax(-1),
    "flattened": lambda t: t[:, 1:].flatten(0, 1).argmax(-1), "reshaped": lambda t: t.reshape(2, 6, 6)[1].argmax(1),
    "columns": lambda t: t[0, -1, 2:4], "a column": lambda t: t[..., 1], "of what was kept": lambda t: t.float()[:, -1].tanh().topk(1)[0],
    "detached": lambda t: t.detach().contiguous()[:, :-1].argmax(-1),
}


@pytest.mark.parametrize("read", BY_ROWS.values(), ids=BY_ROWS.keys())
def test_what_is_read_row_by_row_needs_no_whole(read: Callable[[Any], Any]) -> None:
    lazy, source = counted()
    mine, theirs = read(lazy), read(source.tensor)
    mine = mine.materialize() if isinstance(mine, LazyTensor) else mine
    assert type(mine) is torch.Tensor and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    assert torch.equal(mine, theirs) and source.n_whole == 0


WHOLE: dict[str, Callable[[Any], Any]] = {
    "over all": lambda t: t.argmax(), "over rows": lambda t: t.sum(1), "over columns and rows": lambda t: t.mean((1, 2)),
    "sorted": lambda t: t.sort(-1).values, "sum along rows": lambda t: t.cumsum(-1), "moved": lambda t: t.transpose(1, 2).argmax(-1),
    "a mask of elements": lambda t: t[t > 0], "reshaped across rows": lambda t: t.view(3, 24).argmax(-1), "numpy": lambda t: t.numpy(),
    "with a tensor": lambda t: t + torch.ones(6), "of another's shape": lambda t: (t[:, 1:] - t[:, :-1]).sum(-1), "repr": repr,
    "columns in an order": lambda t: t[..., torch.tensor([2, 0])], "places with columns": lambda t: t[[0, 1], [1, 2], [3, 4]],
    "of a list": lambda t: torch.stack([t, t]).argmax(-1), "two tensors": lambda t: torch.max(t, torch.zeros(3, 4, 6)),
    "iteration": lambda t: [row.sum() for row in t], "a gather of fewer": lambda t: t.gather(-1, TOKENS[:2]), "viewed": lambda t: t.view(torch.int32),
}


@pytest.mark.parametrize("read", WHOLE.values(), ids=WHOLE.keys())
def test_everything_else_reads_the_whole(read: Callable[[Any], Any]) -> None:
    lazy, source = counted()
    mine, theirs = read(lazy), read(source.tensor)
    assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else str(mine) == str(theirs)


@pytest.mark.parametrize("wrong", [lambda t: t[5], lambda t: t.topk(9), lambda t: t.view(5, 6), lambda t: t.argmax(4), lambda t: t[MASK[0]]])
def test_a_wrong_argument_raises_as_of_a_plain_tensor(wrong: Callable[[Any], Any]) -> None:
    lazy, source = counted()
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        wrong(source.tensor)
    with pytest.raises(theirs.type):
        wrong(lazy)


def test_writes_are_seen_through_views_and_not_by_what_was_computed_before() -> None:
    lazy, source = counted()
    plain = source.tensor.clone()
    for t in (lazy, plain):
        last, wide, flat = t[:, -1], t.double(), t.detach().view(-1, 6)
        assert last.argmax(-1).shape == (3,)
        last.mul_(-2)
        t[0, 0] = 7.0
        found = [t, last, wide, flat, t.argmax(-1), flat[3].argmax()]
        if t is lazy:
            mine = [v.materialize() if isinstance(v, LazyTensor) else v for v in found]
    assert all(torch.equal(a, b) for a, b in zip(mine, found, strict=True)) and source.n_whole == 1


def test_nothing_is_noted_under_autocast_or_where_no_rows_are_left_out() -> None:
    lazy, source = counted()
    with torch.autocast("cpu", torch.bfloat16):
        assert lazy.softmax(-1).dtype is source.tensor.softmax(-1).dtype
        assert isinstance(lazy.float()[:, -1], LazyTensor)
    source.by_rows = False
    assert torch.equal(LazyTensor.of(source, (3, 4, 6), torch.float32, torch.device("cpu")).argmax(-1), source.tensor.argmax(-1))
    assert source.n_whole >= 1 and isinstance(lazy._root, Root)


# Models ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_of_an_evaluation_without_labels_make_no_value_of_the_logits_size() -> None:
    setting = SETTINGS["gpt2"]()
    ids = {"input_ids": setting.batch["input_ids"]}
    plain = copy.deepcopy(setting.model)
    expected = evaluated(plain, ids).logits
    model = compiled(setting, 1900 * KiB, dynamic=True)
    out = evaluated(model, ids)
    assert (out.logits.shape, out.logits.dtype) == (expected.shape, expected.dtype) and expected.nbytes == 2048 * KiB
    several = [METRICS[name] for name in ("how likely it is", "entropies", "rows with a label", "some columns")]
    for read in several:
        assert_alike(read(out.logits, setting.batch), read(expected, setting.batch))
    captures = model.fxoffload.router.captures
    for read in several:
        assert_alike(read(out.logits, setting.batch), read(expected, setting.batch))
    smaller = {"input_ids": batch_of(3, 41)["input_ids"]}
    assert_alike(entropy(evaluated(model, smaller).logits, {}), entropy(evaluated(plain, smaller).logits, {}))
    assert model.fxoffload.router.captures == captures
    assert not large_values(model, expected.nbytes // 2)
    model.fxoffload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_bf16", "gemma2", "lora"])
def test_logits_of_a_training_call_and_of_an_evaluation_with_labels_are_read_in_chunks(name: str) -> None:
    setting = SETTINGS[name]()
    plain = copy.deepcopy(setting.model)
    expected = evaluated(plain, setting.batch)
    model = compiled(setting, expected.logits.nbytes + 100 * KiB)
    out = model(**setting.batch)
    out.loss.backward()
    for logits in (out.logits, evaluated(model, setting.batch).logits):
        assert_alike(token_log_probabilities(logits, setting.batch), token_log_probabilities(expected.logits, setting.batch))
        assert_alike(logits[:, :-1].max(-1).values, expected.logits[:, :-1].max(-1).values)
    assert len(decisions_of(model, Defer)) == 1 and decisions_of(model, Chunk)
    assert all(p.predicted.device_peak_bytes <= model.fxoffload.plan.device_budget_bytes for p in model.fxoffload.plan.graphs.values())
    model.fxoffload.close()


@pytest.mark.parametrize("executor", [pytest.param("eager", marks=pytest.mark.slow), "inductor"])
def test_on_a_device_too_small_for_the_logits_metrics_keep_to_what_their_plans_say(
    executor: str, simulated_device: SimulatedDevice
) -> None:
    setting, budget = SETTINGS["gpt2"](), 1400 * KiB
    expected = evaluated(copy.deepcopy(setting.model).to("fxsim"), {k: v.to("fxsim") for k, v in setting.batch.items()}).logits.cpu()
    gc.collect()
    base = simulated_device.memory_allocated()
    simulated_device.set_capacity(base + budget)
    model = compiled(setting, budget, device="fxsim", executor=executor)
    out = model(**setting.batch)
    out.loss.backward()
    model.zero_grad()
    for name in ("the likeliest token", "log-probabilities of tokens", "normalizers"):
        before = set(model.fxoffload.plan.graphs)
        simulated_device.reset_peak_memory_stats()
        assert_alike(METRICS[name](out.logits, setting.batch), METRICS[name](expected, setting.batch))
        new = [p.predicted.device_peak_bytes for key, p in model.fxoffload.plan.graphs.items() if key not in before]
        # Beside the graph: row numbers, and the tokens that are looked up.
        assert simulated_device.max_memory_allocated() - base <= max(new) + 3 * ROWS * LENGTH * 8
        assert max(new) < expected.nbytes // 2
    with pytest.raises(fxoffload.PlanError, match="short"):
        out.logits.cpu()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(expected.shape, device="fxsim")
    assert simulated_device.max_memory_allocated() - base <= budget
    model.fxoffload.close()


@pytest.mark.slow
def test_dropout_of_a_training_call_is_drawn_again_and_no_random_state_moves() -> None:
    setting = SETTINGS["gpt2"]()
    plain = copy.deepcopy(setting.model).train()
    torch.manual_seed(5)
    expected = plain(**setting.batch).logits.argmax(-1)
    setting.model.train()
    model = compiled(setting, 1400 * KiB)
    torch.manual_seed(5)
    out = model(**setting.batch)
    torch.rand(3)
    state = torch.get_rng_state()
    assert torch.equal(out.logits.argmax(-1), expected) and torch.equal(torch.get_rng_state(), state)
    assert decisions_of(model, Defer)
    model.fxoffload.close()


@pytest.mark.slow
@pytest.mark.parametrize("name, trained", [("llama_bf16", True), ("lora", False)])
def test_what_is_read_after_the_head_was_written_is_one_clear_error_and_a_frozen_head_stays_readable(name: str, trained: bool) -> None:
    setting = SETTINGS[name]()
    model = compiled(setting, 1500 * KiB)
    out, seen = model(**setting.batch), evaluated(model, setting.batch)
    tokens = seen.logits.argmax(-1)
    assert decisions_of(model, Defer) and torch.equal(out.logits.argmax(-1), tokens)
    out = model(**setting.batch)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"before optimizer.step\(\)"):
        out.logits.argmax(-1)
    if trained:
        with pytest.raises(RuntimeError, match=r"before optimizer.step\(\)"):
            seen.logits.argmax(-1)
    else:
        assert torch.equal(seen.logits.argmax(-1), tokens)
    model.fxoffload.close()
    with pytest.raises(RuntimeError, match="close"):
        seen.logits[:, -1].argmax(-1)


def trainer_of(model: Any, folder: Path) -> tf.Trainer:
    arguments = tf.TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=ROWS, use_cpu=True, report_to=[], disable_tqdm=True, seed=3, bf16_full_eval=False)
    examples = [{k: v[0] for k, v in batch_of(1, LENGTH, seed=i).items()} for i in range(2 * ROWS)]
    accuracy = lambda p: {"accuracy": float((p.predictions == p.label_ids).mean()), "sum": int(p.predictions.sum())}  # noqa: E731
    return tf.Trainer(
        model=model, args=arguments, eval_dataset=examples, compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))


def test_trainer_evaluates_with_preprocessed_logits_in_a_budget_without_room_for_them(tmp_path: Path) -> None:
    setting = SETTINGS["llama"]()
    theirs = trainer_of(copy.deepcopy(setting.model), tmp_path / "plain").evaluate()
    model = compiled(setting, 1900 * KiB)
    mine = trainer_of(model, tmp_path / "mine").evaluate()
    assert (mine["eval_accuracy"], mine["eval_sum"]) == (theirs["eval_accuracy"], theirs["eval_sum"]) and mine["eval_sum"] > 0
    assert mine["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-6)
    assert decisions_of(model, Defer) and not large_values(model, ROWS * LENGTH * 2048 * 4)
    model.fxoffload.close()


@pytest.mark.slow
def test_bitwise_returns_the_logits_themselves_and_so_does_a_budget_with_room_to_read_them() -> None:
    setting = SETTINGS["gpt2"]()
    options: dict[str, Any] = dict(device="cpu", machine="cpu", device_budget="64MiB")
    expected = evaluated(copy.deepcopy(setting.model), setting.batch).logits
    for numerics in ("bitwise", "reordered"):
        model = fxoffload.compile(setting.model, setting.batch, numerics=numerics, **options)
        logits = evaluated(model, setting.batch).logits
        assert type(logits) is torch.Tensor and torch.equal(logits, expected) and not decisions_of(model, Defer)
        out = model(**setting.batch)
        assert torch.equal(out.logits[:, -1].argmax(-1), expected[:, -1].argmax(-1))
        model.fxoffload.close()


def adapted_head() -> Setting:
    import peft

    torch.manual_seed(1)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return Setting(peft.get_peft_model(model_of(tf.LlamaConfig), options).eval(), batch_of())


def classifier() -> Setting:
    case = zoo.bert()
    return Setting(case.model.eval(), case.batch)


class Bare(nn.Module):
    """The hidden states alone, under another name than anyone's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of(tf.LlamaConfig).model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"hidden": self.inner(input_ids=input_ids, use_cache=False).last_hidden_state}


@pytest.mark.slow
@pytest.mark.parametrize("make", [adapted_head, classifier, lambda: Setting(Bare().eval(), batch_of())], ids=["adapter", "classes", "no head"])
def test_other_heads_and_models_without_one_are_left_alone(make: Callable[[], Setting]) -> None:
    setting = make()
    expected = evaluated(copy.deepcopy(setting.model), setting.batch)
    model = compiled(setting, 9 * 1024 * KiB)
    found = evaluated(model, setting.batch)
    name = "hidden" if "hidden" in expected else "logits"
    assert torch.equal(found[name].argmax(-1), expected[name].argmax(-1)) and not decisions_of(model, Defer)
    model.fxoffload.close()


@pytest.mark.slow
def test_a_plan_with_logits_left_out_replays_and_a_compile_cache_leaves_it_alone(tmp_path: Path) -> None:
    setting = SETTINGS["gpt2"]()
    ids = {"input_ids": setting.batch["input_ids"]}
    tokens = evaluated(copy.deepcopy(setting.model), ids).logits.argmax(-1)
    for options in ({"cache_dir": tmp_path}, {"cache_dir": tmp_path}, {"plan": tmp_path / "plan.json", "replan": False}):
        model = compiled(setting, 1000 * KiB, **options)
        assert torch.equal(evaluated(model, ids).logits.argmax(-1), tokens)
        assert len(decisions_of(model, Defer)) == 1
        model.fxoffload.plan.save(tmp_path / "plan.json")
        model.fxoffload.close()
