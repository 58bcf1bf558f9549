"""Models, adapters and optimizers as a TrainConfig describes them; local files only, no remote code."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import bitsandbytes
import peft
import torch
import transformers
from safetensors.torch import load_file

from fxoffload.training.config import Dtype, LoraOptions, OptimizerConfig, QuantizationOptions, ScheduleConfig, TrainConfig

DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop, "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "adamw8bit": bitsandbytes.optim.AdamW8bit,
}


def build_model(config: TrainConfig, checkpoint: Path | None = None) -> torch.nn.Module:
    """The model to train, on the CPU, in train mode; its trained weights come from the folder `checkpoint` if given.

    Random weights depend on torch's seed alone. Raises ValueError for folders and model types that cannot be used.
    """
    stored = checkpoint if checkpoint is not None and config.method == "full" else None
    model = _base_model(config, stored)
    if config.method != "full":
        model = _add_adapters(model, config.lora or LoraOptions(), checkpoint)
    _own_memory(model.parameters())
    return model.train()


def load_model_config(path: Path) -> transformers.PretrainedConfig:
    """The transformers configuration in a model folder or a config.json. Raises ValueError, one line."""
    if not path.exists():
        raise ValueError(f"model: {path} does not exist; give a local model folder or a config.json")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"model: {path} holds no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"model: {path} is not a usable model configuration: {_first_line(error)}") from error
    return cast(transformers.PretrainedConfig, config)


def load_tokenizer(config: TrainConfig) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer in `config.tokenizer`, by default the model's folder. Raises ValueError."""
    path = config.tokenizer or config.model.path
    if path is None or not path.is_dir():
        raise ValueError(f"tokenizer: {path} is not a folder with tokenizer files")
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"tokenizer: {path} holds no usable tokenizer: {_first_line(error)}") from error


def lora_config(options: LoraOptions) -> peft.LoraConfig:
    """The peft configuration of `options`."""
    targets = options.targets if isinstance(options.targets, str) else list(options.targets)
    return peft.LoraConfig(
        r=options.r, lora_alpha=2 * options.r if options.alpha is None else options.alpha, lora_dropout=options.dropout,
        target_modules=targets, use_dora=options.dora, use_rslora=options.rslora, task_type="CAUSAL_LM",
    )


def quantization_config(options: QuantizationOptions, dtype: Dtype) -> transformers.BitsAndBytesConfig:
    """The bitsandbytes configuration of `options`; `dtype` is what quantized layers compute in."""
    if options.load_in == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=options.quant_type, bnb_4bit_use_double_quant=options.double_quant,
        bnb_4bit_compute_dtype=DTYPES[dtype],
    )


def build_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over `parameters`. Raises ValueError for an argument that its constructor does not take."""
    optimizer_class = OPTIMIZERS[config.name]
    named = {"lr": config.lr, "weight_decay": config.weight_decay, "betas": config.betas}
    arguments: dict[str, Any] = {name: value for name, value in named.items() if value is not None} | config.args
    for name in arguments:
        if name not in inspect.signature(optimizer_class).parameters:
            raise ValueError(f"optimizer.{name}: {optimizer_class.__name__} takes no such argument")
    return optimizer_class(list(parameters), **arguments)


def build_scheduler(optimizer: torch.optim.Optimizer, config: ScheduleConfig, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning-rate schedule over `total_steps` optimizer steps. Raises ValueError for arguments it does not take."""
    try:
        scheduler = transformers.get_scheduler(
            config.name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=total_steps,
            scheduler_specific_kwargs=config.args or None,
        )
    except TypeError as error:
        raise ValueError(f"schedule.args: {config.name} does not take them: {error}") from error
    return cast(torch.optim.lr_scheduler.LRScheduler, scheduler)


def _base_model(config: TrainConfig, stored: Path | None) -> torch.nn.Module:
    source = stored or config.model.path or config.model.config
    assert source is not None  # ModelSource holds exactly one
    model_config = load_model_config(source)
    if type(model_config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"model: {source}: model type {model_config.model_type!r} has no causal language model in transformers")
    dtype = DTYPES[config.weight_dtype]
    if stored is None and config.model.config is not None:
        model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=False)
        return cast(torch.nn.Module, model)
    quantization = None
    if config.method == "qlora":
        quantization = quantization_config(config.quantization or QuantizationOptions(), config.weight_dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, quantization_config=quantization, local_files_only=True, trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {source} cannot be loaded: {_first_line(error)}") from error
    return cast(torch.nn.Module, model)


def _add_adapters(model: torch.nn.Module, options: LoraOptions, checkpoint: Path | None) -> torch.nn.Module:
    base = cast(transformers.PreTrainedModel, model)
    adapted = peft.get_peft_model(base, lora_config(options), autocast_adapter_dtype=options.adapter_dtype == "fp32")
    if checkpoint is not None:
        loaded: Any = peft.set_peft_model_state_dict(adapted, load_file(checkpoint / ADAPTER_FILE))
        unknown = loaded.unexpected_keys
        if unknown:
            raise ValueError(f"{checkpoint}: its adapters do not fit this model: {unknown[0]} is unknown")
    return adapted


def _own_memory(parameters: Iterable[torch.nn.Parameter]) -> None:
    # Weights read from safetensors are views of the mapped file at any 8-byte offset: matrix products round differently by
    # alignment, so a resumed run would leave the uninterrupted one's bits, and training would write into the mapping.
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.data = parameter.data.clone()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
