"""Models and batches for planning without weights: parameters on the meta device, buffers as they are built."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .integrations import bitsandbytes, synthetic


def model_without_weights(model_or_config: Any, lora: Any = None, quantization: Any = None) -> nn.Module:
    """A module to plan: the given one, or one built on the meta device from a config, a folder or a config.json.

    Raises ValueError when the argument is none of these or the model type is unknown to transformers.
    """
    if isinstance(model_or_config, nn.Module):
        if lora is not None or quantization is not None:
            raise ValueError("lora and quantization apply to a config; apply them to the module yourself")
        return model_or_config
    config = _config(model_or_config)
    model = _build(config, quantization)
    if lora is not None:
        import peft

        model = peft.get_peft_model(model, lora, low_cpu_mem_usage=True)
    return model.train()


def _build(config: Any, quantization: Any) -> nn.Module:
    """The model class the config names, parameters on meta and buffers real (their values decide nothing, their bytes count)."""
    import transformers
    from accelerate import init_empty_weights

    config = copy.deepcopy(config)  # a model keeps its config, and quantization is recorded in it
    dtype = _dtype(getattr(config, "dtype", None) or torch.float32, "config")
    names = getattr(config, "architectures", None) or []
    cls = getattr(transformers, names[0], None) if names else None
    quantizer = bitsandbytes.quantizer_for(quantization, getattr(config, "quantization_config", None))
    with init_empty_weights(include_buffers=False), _default_dtype(dtype):
        model = cls(config) if cls is not None else transformers.AutoModelForCausalLM.from_config(config)
        if quantizer is not None:
            quantizer.preprocess_model(model, device_map={"": "cpu"})
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # accelerate made each tied parameter anew as it was registered
    if quantizer is not None:
        bitsandbytes.pack_without_weights(model, dtype)
        quantizer.postprocess_model(model)
    return model  # type: ignore[no-any-return]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _config(source: Any) -> Any:
    import transformers

    if isinstance(source, transformers.PretrainedConfig):
        return source
    if not isinstance(source, (str, Path)):
        raise ValueError(f"model: expected a module, a transformers config, a folder or a config.json, got {type(source).__name__}")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model: no config.json at {str(source)!r}")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"model: {path} is not JSON: {error}") from None
    model_type = raw.pop("model_type", None) if isinstance(raw, dict) else None
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model: {path} has model_type {model_type!r}, which transformers {transformers.__version__} does not know")
    return transformers.AutoConfig.for_model(model_type, **raw)


def sample_batch(batch_or_spec: Any, model: nn.Module) -> Any:
    """A batch to trace with: the given one, zeros for a mapping of (shape, dtype), synthetic inputs for (batch, sequence).

    Text alone gets synthetic images where the model has a vision tower (`integrations.synthetic`).
    """
    if is_shape(batch_or_spec):
        if min(batch_or_spec) < 1:
            raise ValueError(f"batch: (batch, sequence) must be positive, got {batch_or_spec}")
        return synthetic.sample_of(model, *batch_or_spec)
    if isinstance(batch_or_spec, Mapping) and all(_is_spec(v) for v in batch_or_spec.values()):
        zeros = {name: torch.zeros(tuple(shape), dtype=_dtype(dtype, "batch")) for name, (shape, dtype) in batch_or_spec.items()}
        return synthetic.with_images(model, zeros)
    return synthetic.with_images(model, batch_or_spec)


def is_shape(batch_or_spec: Any) -> bool:
    """Whether it is a (batch, sequence)."""
    return isinstance(batch_or_spec, tuple) and len(batch_or_spec) == 2 and all(type(n) is int for n in batch_or_spec)


def _is_spec(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], (tuple, list))


def _dtype(value: Any, owner: str) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{owner}: unknown dtype {value!r}")
    return found
