"""Plans from sizes or text alone: vision towers are planned from synthetic images, or a warning says that they are not."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
import transformers as tf
import zoo
from packaging.version import Version
from torch import nn

import fxoffload
from fxoffload.dry import sample_batch

pytestmark = pytest.mark.integration

TOWER = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIGLIP = TOWER | dict(image_size=16, patch_size=4, vision_use_head=False)
LLAMA = {k: v for k, v in zoo._SIZES.items() if k != "head_dim"}


def llava(**changes: Any) -> nn.Module:
    model = zoo.llava().model
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def gemma3() -> nn.Module:
    text = tf.Gemma3TextConfig(**zoo._sizes(sliding_window=16, query_pre_attn_scalar=16))
    return tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(
        text_config=text, vision_config=tf.SiglipVisionConfig(**SIGLIP), mm_tokens_per_image=4, image_token_index=5, boi_token_index=6,
        eoi_token_index=7)).train()


def paligemma() -> nn.Module:
    return tf.PaliGemmaForConditionalGeneration(tf.PaliGemmaConfig(
        text_config=tf.GemmaConfig(**zoo._SIZES), vision_config=tf.SiglipVisionConfig(**SIGLIP, projection_dim=64), image_token_index=5,
        projection_dim=64, hidden_size=64)).train()


def internvl() -> nn.Module:
    vision = TOWER | dict(image_size=[16, 16], patch_size=[4, 4])
    config = tf.InternVLConfig(text_config=tf.Qwen2Config(**LLAMA), vision_config=vision, image_token_id=5)
    return tf.InternVLForConditionalGeneration(config).train()


TOWERS = {
    "llava": (llava, 4), "gemma3": (gemma3, 4), "paligemma": (paligemma, 16), "internvl": (internvl, 4),
    **{name: (lambda name=name: zoo.FAMILIES[name]().model, 256) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")}}


@pytest.mark.parametrize("name", TOWERS)
def test_plain_transformers_runs_on_the_synthetic_batch_and_its_tower_gets_gradients(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, n_tokens = TOWERS[name]
    torch.manual_seed(0)
    model = make()
    with caplog.at_level(logging.WARNING, "fxoffload"):
        batch = sample_batch((2, n_tokens + 20), model)
    assert f"synthetic image of {n_tokens} tokens in every row" in caplog.text
    assert ((batch["input_ids"] == 5).sum(1) == n_tokens).all()
    model(**batch).loss.backward()
    tower = [p.grad for n, p in model.named_parameters() if ("vision" in n or "visual" in n) and p.requires_grad]
    assert tower and any(grad is not None and bool(grad.isfinite().all()) for grad in tower)


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_an_image_of_llava_takes_as_many_tokens_as_its_strategy_leaves(strategy: str) -> None:
    model = llava(vision_feature_select_strategy=strategy)
    features = model.get_image_features(torch.zeros(1, 3, 16, 16), vision_feature_select_strategy=strategy).pooler_output
    assert (sample_batch((1, 24), model)["input_ids"] == 5).sum() == sum(len(image) for image in features)


def names_in(plan: fxoffload.Plan) -> str:
    return " ".join(str(d) for graph in plan.graphs.values() for d in graph.decisions)


@pytest.mark.parametrize("batch", [
    (2, 24), pytest.param({"input_ids": ((2, 24), "int64"), "labels": ((2, 24), "int64")}, marks=pytest.mark.slow)])
def test_a_plan_from_text_has_the_vision_tower_in_it(batch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxoffload"):
        plan = fxoffload.plan(llava(), batch, device_budget="400KiB", machine="cpu")
    assert "no pixel_values" in caplog.text
    assert "vision_tower" in names_in(plan)
    assert plan.predicted == plan_with_pictures().predicted


@functools.cache
def plan_with_pictures() -> fxoffload.Plan:
    pictures = {k: v for k, v in zoo.llava().batch.items() if k != "attention_mask"}
    return fxoffload.plan(llava(), pictures, device_budget="400KiB", machine="cpu")


def test_a_batch_with_images_or_a_model_without_a_tower_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxoffload"):
        case = zoo.llava()
        assert sample_batch(case.batch, case.model) is case.batch
        assert set(sample_batch((2, 24), zoo.llama().model)) == {"input_ids", "labels"}
    assert not caplog.records


def test_rows_too_short_for_an_image_are_planned_as_text_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxoffload"):
        assert "pixel_values" not in sample_batch((2, 4), llava())
    assert "no row of 4 tokens has room for the 4 of an image: the vision tower is not in the plan" in caplog.text


def test_a_family_whose_images_are_not_known_says_that_its_tower_is_not_planned(caplog: pytest.LogCaptureFixture) -> None:
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4)
    model = tf.Idefics3ForConditionalGeneration(tf.Idefics3Config(
        text_config=tf.LlamaConfig(**zoo._SIZES), vision_config=vision, image_token_id=5, scale_factor=2)).train()
    with caplog.at_level(logging.WARNING, "fxoffload"):
        plan = fxoffload.plan(model, (2, 16), device_budget="1GiB", machine="cpu")
    assert "idefics3 looks like is not known here: its vision tower is not in the plan" in caplog.text
    assert "vision" not in names_in(plan)


def test_adapters_on_a_vision_language_model_hide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llava(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with caplog.at_level(logging.WARNING, "fxoffload"):
        assert "pixel_values" in sample_batch((2, 24), model)


@pytest.mark.skipif(
    Version(tf.__version__) < Version("5.23"), reason="before, Whisper draws and branches on a number in every layer: no graph")
def test_an_encoder_of_sound_is_planned_from_batch_and_sequence() -> None:
    case = zoo.whisper()
    batch = sample_batch((2, 12), case.model)
    assert {name: tensor.shape for name, tensor in batch.items()} == {name: tensor.shape for name, tensor in case.batch.items()}
    assert fxoffload.plan(case.model, (2, 12), device_budget="1GiB", machine="cpu").predicted.device_peak_bytes > 0


def test_a_model_of_images_alone_asks_for_a_batch() -> None:
    with pytest.raises(ValueError, match="ViTForImageClassification reads pixel_values"):
        fxoffload.plan(zoo.vit().model, (2, 12), device_budget="1GiB", machine="cpu")


def test_a_model_compiled_on_text_has_both_steps_planned_and_trains_on_images_as_plain_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    case, plain = zoo.llava(), zoo.llava().model
    plain.load_state_dict(case.model.state_dict())
    text = {name: case.batch[name] for name in ("input_ids", "labels")} | {"input_ids": case.batch["input_ids"].clamp(min=6)}
    with caplog.at_level(logging.WARNING, "fxoffload"):
        model = fxoffload.compile(case.model, text, device="cpu", device_budget="400KiB", dynamic=False)
    assert "synthetic image" in caplog.text
    assert sorted(graph.label for graph in model.fxoffload.plan.graphs.values()) == ["train", "train-1"]
    pictures = {name: tensor for name, tensor in case.batch.items() if name != "attention_mask"}
    for batch in (text, pictures):
        assert [one(**batch).loss.backward() for one in (plain, model)] == [None, None]
    assert len(model.fxoffload.plan.graphs) == 2, "the step with images was planned at compile"
    grads = {n: p.grad for n, p in plain.named_parameters()}
    assert all(torch.equal(grads[n], p.grad) if grads[n] is not None else p.grad is None for n, p in model.named_parameters())
    model.fxoffload.close()
