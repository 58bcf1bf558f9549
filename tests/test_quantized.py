"""Plans of quantized models made from the config alone are those of the really quantized model, and run it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers as tf
from loops import assert_same, train
from zoo import tokens

import fxoffload
from fxoffload.dry import model_without_weights
from fxoffload.places import named_constants, named_weights

pytestmark = pytest.mark.integration
BATCHES = [tokens(seed=i) for i in range(3)]
FORMATS: dict[str, dict[str, Any]] = {
    "nf4, scales quantized too": dict(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", llm_int8_skip_modules=["lm_head", "gate_proj"]),
    "int8": dict(load_in_8bit=True),
}
# Close to the least that each runs in.
TIGHT = {"nf4, scales quantized too": "394KiB", "fp4": "388KiB", "int8": "388KiB"}


def config() -> tf.LlamaConfig:
    return tf.LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=256, head_dim=16, attention_bias=True, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama with random weights."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    tf.LlamaForCausalLM(config()).to(torch.bfloat16).save_pretrained(path)
    return path


def adapters() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def quantized(folder: Path, quantization: tf.BitsAndBytesConfig) -> Any:
    """Packed by bitsandbytes from the stored weights."""
    base = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)
    torch.manual_seed(1)
    return peft.get_peft_model(base, adapters()).train()


def described(model: torch.nn.Module) -> list[tuple[object, ...]]:
    """Everything that is gathered or stays on the device: name, class, dtype, shape and whether it is trained."""
    tensors = [*named_weights(model), *named_constants(model)]
    return [(name, type(t).__name__, t.dtype, tuple(t.shape), t.requires_grad) for name, t in tensors]


# What fp4 adds, its codes and layers left out, is in the shapes that the next test compares.
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "fp4" else ()) for name in FORMATS])
def test_a_plan_from_the_config_is_the_real_models_and_runs_it(folder: Path, name: str) -> None:
    quantization = tf.BitsAndBytesConfig(**FORMATS[name])
    real = quantized(folder, quantization)
    planned = fxoffload.plan(
        config(), (2, 32), quantization=quantization, lora=adapters(), device_budget=TIGHT[name], machine="cpu")
    assert planned == fxoffload.plan(real, BATCHES[0], device_budget=TIGHT[name], machine="cpu")
    assert planned.count()["gather"] > 20 and planned.count()["swapout"] > 10  # or there is little to run
    plain = copy.deepcopy(real)
    compiled = fxoffload.compile(real, BATCHES[0], device="cpu", device_budget=TIGHT[name], machine="cpu", plan=planned, replan=False)
    assert train(compiled, BATCHES) == train(plain, BATCHES)
    compiled.fxoffload.close()
    assert_same(plain, compiled)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_and_their_states_have_their_true_shapes_without_weights(folder: Path, name: str) -> None:
    quantization = tf.BitsAndBytesConfig(**FORMATS[name])
    dry = model_without_weights(config(), adapters(), quantization)
    assert described(dry) == described(quantized(folder, quantization))
    assert {t.device.type for _, t in named_weights(dry)} == {"meta"}


def test_the_quantization_that_a_folder_records_is_planned(folder: Path, tmp_path: Path) -> None:
    quantization = tf.BitsAndBytesConfig(**FORMATS["fp4"])
    tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization).save_pretrained(tmp_path)
    assert described(model_without_weights(tmp_path)) == described(tf.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_8_bit_weights_under_autocast_are_refused_with_one_sentence(folder: Path) -> None:
    real = quantized(folder, tf.BitsAndBytesConfig(load_in_8bit=True))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fxoffload.PlanError, match="^8-bit weights under autocast") as refused:
        fxoffload.compile(real, BATCHES[0], device="cpu", device_budget="1MiB")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "quantization", [tf.BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True), tf.FineGrainedFP8Config(), tf.BitsAndBytesConfig()])
def test_other_quantizations_are_refused_before_anything_is_built(quantization: Any) -> None:
    with pytest.raises(ValueError, match="^quantization: "):
        fxoffload.plan(config(), (2, 32), quantization=quantization, device_budget="1MiB")


def test_planning_leaves_the_config_and_bitsandbytes_as_they_were(folder: Path) -> None:
    mine = config()
    before = mine.to_dict()
    model_without_weights(mine, adapters(), tf.BitsAndBytesConfig(**FORMATS["nf4, scales quantized too"]))
    assert mine.to_dict() == before and not hasattr(mine, "quantization_config")
    packed, state = bitsandbytes.functional.quantize_4bit(torch.randn(64, 64), compress_statistics=True)
    assert bitsandbytes.functional.dequantize_4bit(packed, state).isfinite().all(), "its tables hold numbers"


