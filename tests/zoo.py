"""Small models of every family, in real shapes of their architecture: `FAMILIES[name]()` gives a Case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

from fxoffload.machine import Machine
from fxoffload.optimizer_states import optimizer_states
from fxoffload.problem import Problem
from fxoffload.session import Options, Session


@dataclass(frozen=True, slots=True)
class Case:
    """An untrained model in train mode and one batch with labels."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    autocast: torch.dtype | None = None


def problem_of(case: Case, machine: Machine) -> Problem:
    """The case's captured step as a problem of that machine, without weights on a device."""
    options = Options(torch.device("cpu"), device_budget_bytes=1 << 40, planning_only=True, states=optimizer_states("adamw"))
    session = Session(case.model, options, machine, None)
    session.router.capture((), dict(case.batch))
    found = session.planning.problem(session.captured)
    session.close()
    return found


VOCAB = 512
_SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
    max_position_embeddings=256, head_dim=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)


def tokens(batch: int = 2, length: int = 32, seed: int = 0) -> dict[str, torch.Tensor]:
    """A causal language model's batch without padding."""
    ids = torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def _causal(config: Any, length: int = 32) -> Case:
    torch.manual_seed(0)
    return Case(tf.AutoModelForCausalLM.from_config(config).train(), tokens(length=length))


def _sizes(**changes: Any) -> dict[str, Any]:
    return {**_SIZES, **changes}


def llama(**changes: Any) -> Case:
    return _causal(tf.LlamaConfig(**_sizes(**changes)))


def gpt2() -> Case:
    return _causal(tf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=128, bos_token_id=1, eos_token_id=2))


def gemma2() -> Case:
    return _causal(tf.Gemma2Config(**_sizes(sliding_window=16, query_pre_attn_scalar=16)))


def gemma3() -> Case:
    return _causal(tf.Gemma3TextConfig(**_sizes(sliding_window=16, query_pre_attn_scalar=16)))


def qwen3() -> Case:
    return _causal(tf.Qwen3Config(**_sizes(head_dim=16)))


def qwen3_next() -> Case:
    return _causal(tf.Qwen3NextConfig(**_sizes(
        layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )))


def mixtral() -> Case:
    return _causal(tf.MixtralConfig(**_sizes(num_local_experts=4, num_experts_per_tok=2)))


def qwen3_moe() -> Case:
    return _causal(tf.Qwen3MoeConfig(**_sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)))


def mamba() -> Case:
    """The scan is a loop over time: a graph of as many nodes as the sequence is long."""
    return _causal(tf.MambaConfig(
        hidden_size=64, num_hidden_layers=2, vocab_size=VOCAB, state_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0), length=16)


def bamba() -> Case:
    return _causal(tf.BambaConfig(**_sizes(
        attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_chunk_size=16,
    )))


def t5() -> Case:
    torch.manual_seed(0)
    model = tf.T5ForConditionalGeneration(tf.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0, dropout_rate=0.1))
    ids = torch.randint(3, VOCAB, (2, 24))
    return Case(model.train(), {"input_ids": ids, "labels": torch.randint(3, VOCAB, (2, 16))})


def bert() -> Case:
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB, num_labels=3,
        problem_type="single_label_classification"))
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, 20:] = 0
    return Case(model.train(), {"input_ids": torch.randint(3, VOCAB, (2, 32)), "attention_mask": mask, "labels": torch.tensor([0, 2])})


def vit() -> Case:
    torch.manual_seed(0)
    model = tf.ViTForImageClassification(tf.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=5,
        problem_type="single_label_classification"))
    return Case(model.train(), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 4])})


def whisper() -> Case:
    torch.manual_seed(0)
    model = tf.WhisperForConditionalGeneration(tf.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, vocab_size=VOCAB, max_source_positions=50, max_target_positions=64, num_mel_bins=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.1, suppress_tokens=None, begin_suppress_tokens=None))
    return Case(model.train(), {"input_features": torch.randn(2, 16, 100), "labels": torch.randint(3, VOCAB, (2, 12))})


def llava() -> Case:
    torch.manual_seed(0)
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8, projection_dim=32)
    config = tf.LlavaConfig(
        vision_config=vision, text_config=tf.LlamaConfig(**_SIZES), image_token_index=5, vision_feature_layer=-1,
        vision_feature_select_strategy="default")
    ids = torch.randint(6, VOCAB, (2, 24))
    ids[:, 2:6] = 5
    return Case(tf.LlavaForConditionalGeneration(config).train(), {
        "input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(2, 3, 16, 16), "attention_mask": torch.ones_like(ids)})


def of_grids(model: nn.Module, grids: tuple[tuple[int, int, int], ...] = ((1, 8, 8), (1, 4, 12)), kind: str = "image", length: int = 32) -> Case:
    """A model of the Qwen-VL kind and one image or video in each row, each of its own frames, height and width in patches."""
    numbers = torch.Generator().manual_seed(len(grids))
    config: Any = model.config
    vision = config.vision_config
    grid, token, merged = torch.tensor(grids), getattr(config, f"{kind}_token_id"), vision.spatial_merge_size**2
    ids = torch.randint(16, VOCAB, (len(grids), length), generator=numbers)
    types = torch.zeros_like(ids)
    for row, n in enumerate((grid.prod(-1) // merged).tolist()):
        ids[row, 2], ids[row, 3:3 + n], types[row, 3:3 + n] = 7, token, 1 if kind == "image" else 2
    patch = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    pixels = torch.randn(int(grid.prod(-1).sum()), patch, generator=numbers)
    return Case(model.train(), {
        "input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types,
        "pixel_values" if kind == "image" else "pixel_values_videos": pixels, f"{kind}_grid_thw": grid})


# Of the models that read images as grids of patches: tokens, and rotations by time, height and width.
_IMAGE_TOKENS: dict[str, Any] = dict(image_token_id=5, video_token_id=6, vision_start_token_id=7, vision_end_token_id=8)
_TOWER: dict[str, Any] = dict(num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)


def _rotated(**more: Any) -> dict[str, Any]:
    return _sizes(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **more})


def qwen2_vl() -> Case:
    torch.manual_seed(0)
    config = tf.Qwen2VLConfig(text_config=_rotated(), vision_config={**_TOWER, "depth": 2, "embed_dim": 32, "hidden_size": 64}, **_IMAGE_TOKENS)
    return of_grids(tf.Qwen2VLForConditionalGeneration(config))


def qwen2_5_vl() -> Case:
    torch.manual_seed(0)
    vision = {**_TOWER, "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    config = tf.Qwen2_5_VLConfig(text_config=_rotated(), vision_config=vision, **_IMAGE_TOKENS)
    return of_grids(tf.Qwen2_5_VLForConditionalGeneration(config))


def qwen3_vl() -> Case:
    torch.manual_seed(0)
    vision = {**_TOWER, "depth": 3, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64,
              "deepstack_visual_indexes": [0, 1]}
    config = tf.Qwen3VLConfig(text_config=_rotated(mrope_interleaved=True), vision_config=vision, **_IMAGE_TOKENS)
    return of_grids(tf.Qwen3VLForConditionalGeneration(config))


def glm4v() -> Case:
    torch.manual_seed(0)
    vision = {**_TOWER, "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "image_size": 32}
    text = _rotated(partial_rotary_factor=1.0)
    config = tf.Glm4vConfig(text_config=text, vision_config=vision, image_start_token_id=7, image_end_token_id=8, video_start_token_id=9,
                            video_end_token_id=10, image_token_id=5, video_token_id=6)
    return of_grids(tf.Glm4vForConditionalGeneration(config))


def _lora(case: Case, autocast_adapter_dtype: bool = True, **changes: Any) -> Case:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, **{"target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})
    model = peft.get_peft_model(case.model, config, autocast_adapter_dtype=autocast_adapter_dtype)
    return Case(model.train(), case.batch, case.autocast)


def _bf16(case: Case) -> Case:
    return Case(case.model.to(torch.bfloat16), case.batch)


def lora(dropout: float = 0.0, **changes: Any) -> Case:
    """Adapters beside a matrix of each kind (all of them: `lora_bf16`): a capture costs by the operation."""
    model = _bf16(llama(**{"intermediate_size": 512, **changes}))
    return _lora(model, target_modules=["q_proj", "gate_proj", "down_proj"], lora_dropout=dropout)


def lora_bf16() -> Case:
    return _lora(_bf16(llama(intermediate_size=512)), autocast_adapter_dtype=False, lora_dropout=0.1)


def dora() -> Case:
    return _lora(llama(), use_dora=True)


def packed_4bit(model: nn.Module, *kept: str) -> nn.Module:
    """The model frozen, its linears but those named `kept` as bitsandbytes nf4 layers under double quantization."""
    import bitsandbytes as bnb

    for name, linear in [(n, m) for n, m in model.requires_grad_(False).named_modules() if isinstance(m, nn.Linear) and n not in kept]:
        packed = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
        packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True)
        model.set_submodule(name, packed.to("cpu"))
    return model


def qlora() -> Case:
    model = packed_4bit(llama(intermediate_size=512).model, "lm_head")
    return _lora(Case(model, tokens()), target_modules=["q_proj", "v_proj", "down_proj"])


def autocast() -> Case:
    case = llama()
    return Case(case.model, case.batch, torch.bfloat16)


def checkpointed() -> Case:
    case = llama()
    case.model.gradient_checkpointing_enable()
    return case


FAMILIES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "qwen2": lambda: _causal(tf.Qwen2Config(**_sizes())),
    "qwen3": lambda: _causal(tf.Qwen3Config(**_sizes())),
    "qwen3_next": qwen3_next,
    "mistral": lambda: _causal(tf.MistralConfig(**_sizes(sliding_window=16))),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": lambda: _causal(tf.Phi3Config(**_sizes())),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "mamba": mamba,
    "bamba": bamba,
    "t5": t5,
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "glm4v": glm4v,
    "lora": lora,
    "lora_bf16": lora_bf16,
    "dora": dora,
    "qlora": qlora,
    "bf16": lambda: _bf16(llama()),
    "autocast": autocast,
    "gradient_checkpointing": checkpointed,
}
