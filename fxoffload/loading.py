"""Loading pretrained models for `compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def from_pretrained(folder: str | Path, **kwargs: Any) -> nn.Module:
    """A causal language model from a local folder, on the CPU, its weights served from the memory-mapped safetensors.

    Keyword arguments go to `AutoModelForCausalLM.from_pretrained`. No network, no remote code unless `local_files_only=False` or
    `trust_remote_code=True` is passed. Raises ValueError when the folder holds no model.
    """
    from transformers import AutoModelForCausalLM

    if not Path(folder).joinpath("config.json").is_file() and kwargs.get("local_files_only", True):
        raise ValueError(f"from_pretrained: {str(folder)!r} holds no config.json")
    options = {"local_files_only": True, "trust_remote_code": False, "device_map": "cpu", **kwargs}
    return AutoModelForCausalLM.from_pretrained(str(folder), **options)  # type: ignore[no-any-return]
