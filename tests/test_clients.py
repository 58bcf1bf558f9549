"""Unmodified Trainer, Accelerate and PEFT, and the outputs they read: same losses and same files as without fxoffload."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from loops import assert_same, train
from safetensors.torch import load_file
from zoo import llama, tokens

import fxoffload

pytestmark = pytest.mark.integration
OPTIONS: dict[str, Any] = {"device": "cpu", "device_budget": "700KiB"}
ONE_SHAPE = OPTIONS | {"dynamic": False}  # half the capture's time


# Outputs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    case = llama()
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(case.model, case.batch, **ONE_SHAPE)
    yield plain, model
    model.fxoffload.close()


READS: dict[str, Callable[[Any], Any]] = {
    "torch op": lambda t: torch.softmax(t, -1),
    "method": lambda t: t.argmax(-1),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "tolist": lambda t: t.tolist(),
    "indexing": lambda t: t[0, -1, :5],
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to(torch.float64),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": lambda t: copy.deepcopy(t),
    "repr": repr,
    "compare": lambda t: (t > 0.1) == (t < 0.1),
    "arithmetic": lambda t: 1 - t * 2,
    "inside a list": lambda t: torch.cat([t, t]),
    "no-grad loss": lambda t: torch.nn.functional.cross_entropy(t.view(-1, t.size(-1)), torch.zeros(t.size(0) * t.size(1), dtype=torch.long)),
    "float bfloat16": lambda t: t.bfloat16().float(),
    "contiguous clone": lambda t: t.contiguous().clone(),
    "nested detach": lambda t: t.detach().cpu().numpy().tolist(),
    "iteration": lambda t: [row.sum() for row in t],
    "in place": lambda t: t.clone().mul_(2),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_an_output_beside_the_loss_reads_like_the_plain_one(models: tuple[Any, Any], read: Callable[[Any], Any]) -> None:
    plain, compiled = models
    theirs, mine = read(plain(**tokens()).logits.detach()), read(compiled(**tokens()).logits)
    equal = torch.equal(theirs, mine) if isinstance(theirs, torch.Tensor) else str(theirs) == str(mine)
    assert equal and getattr(mine, "requires_grad", False) is False


def test_outputs_unpack_as_those_of_transformers(models: tuple[Any, Any]) -> None:
    plain, compiled = models
    theirs, mine = plain(use_cache=False, **tokens()), compiled(**tokens())
    assert type(mine) is type(theirs) and list(mine) == list(theirs) and len(mine.to_tuple()) == len(theirs.to_tuple())
    for logits in (mine[1], mine["logits"], mine.to_tuple()[1], dict(mine)["logits"], mine[1:][0]):
        assert torch.equal(logits, theirs.logits)


def test_sizes_and_dtype_are_known_without_computing(models: tuple[Any, Any]) -> None:
    logits = models[1](**tokens()).logits
    assert (logits.shape, logits.dtype, logits.device.type, logits.ndim) == ((2, 32, 512), torch.float32, "cpu", 3)
    assert logits.size(-1) == 512 and len(logits) == 2 and logits.numel() == 2 * 32 * 512 and not logits.requires_grad
    assert logits.detach().float()._value is None and logits._value is None


@pytest.mark.parametrize("fused", [False, True])
def test_an_output_read_after_the_step_is_one_clear_error(models: tuple[Any, Any], fused: bool) -> None:
    """A fused optimizer writes without changing the parameters' versions."""
    compiled = models[1]
    weights = copy.deepcopy(compiled.state_dict())
    out = compiled(**tokens())
    out.loss.backward()
    unrelated = torch.nn.Parameter(torch.ones(2))
    unrelated.grad = torch.ones(2)
    torch.optim.SGD([unrelated], lr=0.1).step()
    assert torch.isfinite(out.logits).all()
    out = compiled(**tokens())
    torch.optim.SGD(compiled.parameters(), lr=0.1, fused=fused).step()
    with pytest.raises(RuntimeError, match=r"before optimizer.step\(\)"):
        out.logits.sum()
    compiled.load_state_dict(weights)
    compiled.zero_grad()


def test_outputs_all_are_ordinary_differentiable_tensors() -> None:
    case = llama(num_hidden_layers=1)
    plain = copy.deepcopy(case.model)
    model = fxoffload.compile(case.model, case.batch, outputs="all", **{**ONE_SHAPE, "device_budget": "1MiB"})
    for net in (plain, model):
        out = net(**case.batch)
        assert type(out.logits) is torch.Tensor
        (out.loss + out.logits.square().mean()).backward()
    assert_same(plain, model)
    model.fxoffload.close()


# Trainer ------------------------------------------------------------------------------------------------------------------


def trainer_of(model: Any, folder: Path, n_steps: int = 4, **changes: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        bf16=True, use_cpu=True, label_smoothing_factor=0.1, max_steps=n_steps, save_steps=2, eval_strategy="steps", eval_steps=2,
        logging_steps=1, learning_rate=1e-2, report_to=[], disable_tqdm=True, seed=3, **changes)
    examples = [{k: v[0] for k, v in tokens(1, 8 + i % 5, seed=i).items()} for i in range(14)]
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=examples, eval_dataset=examples[:5], data_collator=_collate, compute_metrics=_metrics)


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(len(r["input_ids"]) for r in rows)
    pad = lambda t, value: torch.nn.functional.pad(t, (0, longest - len(t)), value=value)  # noqa: E731
    return {
        "input_ids": torch.stack([pad(r["input_ids"], 0) for r in rows]),
        "attention_mask": torch.stack([pad(torch.ones_like(r["input_ids"]), 0) for r in rows]),
        "labels": torch.stack([pad(r["labels"], -100) for r in rows]),
    }


def _metrics(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def history(trainer: transformers.Trainer) -> list[tuple[float, ...]]:
    words = ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")
    return [tuple(row[w] for w in words if w in row) for row in trainer.state.log_history if "train_loss" not in row]


def test_trainer_gives_the_same_losses_metrics_and_files_and_resumes_under_another_budget(tmp_path: Path) -> None:
    plain = llama(num_hidden_layers=1).model
    theirs = trainer_of(plain, tmp_path / "plain")
    theirs.train()
    theirs.save_model(str(tmp_path / "plain" / "final"))

    sample = _collate([{k: v[0] for k, v in tokens(1, 12).items()}] * 2)
    model = fxoffload.compile(llama(num_hidden_layers=1).model, sample, **OPTIONS)
    mine = trainer_of(model, tmp_path / "mine")
    mine.train()
    mine.save_model(str(tmp_path / "mine" / "final"))
    model.fxoffload.close()
    assert history(mine) == history(theirs) and len(history(mine)) == 6
    for name in ("final", "checkpoint-2", "checkpoint-4"):
        same_files(tmp_path / "plain" / name, tmp_path / "mine" / name)

    again = fxoffload.compile(llama(num_hidden_layers=1).model, sample, **{**ONE_SHAPE, "device_budget": "1MiB"})
    resumed = trainer_of(again, tmp_path / "mine")
    resumed.train(resume_from_checkpoint=str(tmp_path / "mine" / "checkpoint-2"))
    assert history(resumed) == history(theirs)
    assert_same(plain, again)
    again.fxoffload.close()


def same_files(theirs: Path, mine: Path) -> None:
    """Both folders hold the same files; weights are equal to the bit, configurations to the byte."""
    names = sorted(p.name for p in theirs.iterdir())
    assert names == sorted(p.name for p in mine.iterdir())
    for name in names:
        if name.endswith(".safetensors"):
            expected, found = load_file(theirs / name), load_file(mine / name)
            assert list(expected) == list(found) and all(torch.equal(expected[k], found[k]) for k in expected)
        if name.endswith("config.json"):
            assert (theirs / name).read_bytes() == (mine / name).read_bytes()


# Accelerate ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared_first", [
    pytest.param(False, id="compile then prepare"), pytest.param(True, id="prepare then compile", marks=pytest.mark.slow)])
def test_a_bare_accelerate_loop_trains_as_without_fxoffload(prepared_first: bool) -> None:
    results = []
    for compiled in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        model = llama(num_hidden_layers=1).model
        if compiled and not prepared_first:
            model = fxoffload.compile(model, tokens(), **ONE_SHAPE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if compiled and prepared_first:
            model = fxoffload.compile(model, tokens(), **ONE_SHAPE)
        losses = []
        for seed in range(4):
            with accelerator.accumulate(model):
                out = model(**tokens(seed=seed))
                accelerator.backward(out.loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                losses.append((out.loss.item(), out.logits.dtype, out.logits.sum().item()))
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, model))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    results[1][1].fxoffload.close()
    assert results[1][1](**tokens()).loss.item() == results[0][1](**tokens()).loss.item()


def test_converting_outputs_to_fp32_computes_nothing() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    case = llama(num_hidden_layers=1)
    model = accelerator.prepare(fxoffload.compile(case.model.to(torch.bfloat16), case.batch, **ONE_SHAPE))
    logits = model(**case.batch).logits
    assert logits.dtype == torch.float32 and logits._value is None
    accelerator.unwrap_model(model, keep_fp32_wrapper=False).fxoffload.close()


# PEFT ---------------------------------------------------------------------------------------------------------------------


def adapted() -> Any:
    model = llama().model
    torch.manual_seed(1)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
    made.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False))
    made.set_adapter("default")
    return made.train()


def test_peft_saves_switches_loads_and_merges_as_without_fxoffload(tmp_path: Path) -> None:
    batches = [tokens(seed=i) for i in range(2)]
    plain, model = adapted(), fxoffload.compile(adapted(), tokens(), **ONE_SHAPE)
    assert train(plain, batches) == train(model, batches)
    for name, net in (("plain", plain), ("mine", model)):
        net.save_pretrained(str(tmp_path / name))
    for part in (".", "second"):
        same_files(tmp_path / "plain" / part, tmp_path / "mine" / part)

    losses = []
    for net in (plain, model):
        net.zero_grad()
        net.set_adapter("second")
        losses.append(train(net, batches))
        net.load_adapter(str(tmp_path / "plain"), adapter_name="third", is_trainable=True)
        net.set_adapter("third")
        losses[-1] += train(net, batches)
        prompt = tokens()["input_ids"][:1, :4]
        net.eval()
        losses[-1].append(net.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False).tolist())
        with net.disable_adapter(), torch.no_grad():
            losses[-1].append(net(**batches[0]).loss.item())
    assert losses[0] == losses[1]
    assert_same(plain, model)

    merged = [net.merge_and_unload() for net in (plain, model)]
    model.fxoffload.close()
    for name, net in zip(("plain", "mine"), merged):
        net.save_pretrained(str(tmp_path / "merged" / name))
    same_files(tmp_path / "merged" / "plain", tmp_path / "merged" / "mine")
    assert [type(m) for m in merged[0].modules()] == [type(m) for m in merged[1].modules()]
    del model, merged
    gc.collect()
