"""The model of the tests of the command line and of training."""

from __future__ import annotations

from transformers import LlamaConfig


def tiny_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )
