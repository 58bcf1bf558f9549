"""Models of real shapes with random weights, and their batches; nothing here imports fxoffload, so that a peer's process need not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

# Llama 3's shape of 8B (and a quarter of its layers), Llama 3.2's of 3B, Qwen3's of 32B; the tiny ones are of the same two families.
_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
_TINY = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 256}
_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, **_LLAMA}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "8B": _8B,
    "8B-quarter": _8B | {"num_hidden_layers": 8},
    "3B": {"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "tie_word_embeddings": True, **_LLAMA},
    "32B": {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000.0},
    "tiny-llama": {"model_type": "llama", **_TINY},
    "tiny-qwen3": {"model_type": "qwen3", **_TINY},
}


def config_of(shape: str, **changes: Any) -> transformers.PretrainedConfig:
    """The bf16 config of one of SHAPES."""
    return transformers.AutoConfig.for_model(**(dict(SHAPES[shape]) | {"dtype": torch.bfloat16} | changes))


def drawn(config: transformers.PretrainedConfig, device: str) -> Any:
    """A bf16 causal language model on `device`, the same weights wherever it lies: drawn on the card, where there is one (a CPU would
    take minutes), parameter by parameter."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.to_empty(device=device)
    model.tie_weights()
    pencil = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(pencil).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=pencil).normal_(0, 0.02, generator=generator)
            parameter.data.copy_(values)
            del values
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def with_lora(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in training mode with LoRA r=16 of `dtype` on all linears but the head, as PEFT initializes it."""
    import peft  # takes longer to load than a small model to train

    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def draw_adapters(model: nn.Module) -> None:
    """Adapters with the same values wherever the model lies, none of them zero: the first loss depends on them, and no first gradient is zero, of
    which Adam would make a step of rounding alone."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.empty(parameter.shape).normal_(0, 0.01, generator=generator))


def batch(size: int, length: int, device: str, vocabulary: int = 128256) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}
