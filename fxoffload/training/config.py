"""The YAML file of `fxoffload train`: every key, its type and its default. Relative paths start at the working directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from fxoffload.sizes import parse_bytes
from fxoffload.training import schema

Scalar = int | float | str | bool | None
Dtype = Literal["bf16", "fp32"]


def load_config(path: Path) -> TrainConfig:
    """The validated configuration in the YAML file `path`. Raises ValueError, one line that starts with the path."""
    try:
        mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from error
    try:
        return schema.read(TrainConfig, mapping)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A local model folder (`path`), or a config.json whose weights are random, drawn from the seed (`config`)."""

    path: Path | None = None
    config: Path | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of 'path' (a model folder) and 'config' (a config.json, random weights)")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Text files and how they become batches of `batch_size` rows of at most `seq_len` tokens."""

    paths: tuple[Path, ...]
    seq_len: int
    batch_size: int
    field: str = "text"  # of a .jsonl line
    documents: Literal["file", "paragraph", "line"] = "file"  # what one document of a .txt file is
    packing: bool = True
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = True
    pad_to_multiple_of: int = 8  # rounds a padded batch's length up, never above seq_len

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size, pad_to_multiple_of=self.pad_to_multiple_of)
        _at_least(2, seq_len=self.seq_len)  # one token has no next token to predict
        if not self.paths:
            raise ValueError("paths: name at least one .txt or .jsonl file")


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Low-rank adapters; `alpha` None is 2 r. `adapter_dtype` "base" keeps adapters in the base model's dtype."""

    r: int = 16
    alpha: int | None = None
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    dora: bool = False
    rslora: bool = False
    adapter_dtype: Literal["fp32", "base"] = "fp32"

    def __post_init__(self) -> None:
        _at_least(1, r=self.r)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """How bitsandbytes stores the frozen base of `method: qlora`."""

    load_in: Literal["4bit", "8bit"] = "4bit"
    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = True


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """A torch.optim or bitsandbytes optimizer; None is the library's default; `args` go to its constructor."""

    name: Literal["adamw", "adam", "sgd", "adafactor", "adagrad", "rmsprop", "adamax", "nadam", "radam", "adamw8bit"] = "adamw"
    lr: float = 1e-4
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    args: dict[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr: must not be negative, got {self.lr}")


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """A learning-rate schedule of transformers.get_scheduler; `args` are its scheduler_specific_kwargs."""

    name: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial",
        "inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay",
    ] = "constant"
    warmup_steps: int = 0
    args: dict[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(0, warmup_steps=self.warmup_steps)


@dataclass(frozen=True, slots=True)
class EvalConfig:
    """Held-out loss every `every` steps, on other files (`paths`) or the last `fraction` of the training rows."""

    every: int
    paths: tuple[Path, ...] = ()
    fraction: float | None = None

    def __post_init__(self) -> None:
        _at_least(1, every=self.every)
        if bool(self.paths) == (self.fraction is not None):
            raise ValueError("give exactly one of 'paths' and 'fraction'")
        if self.fraction is not None and not 0 < self.fraction < 1:
            raise ValueError(f"fraction: must be above 0 and below 1, got {self.fraction}")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One fine-tuning run. `device_budget` None is plain PyTorch without fxoffload, the reference to compare with."""

    model: ModelSource
    data: DataConfig
    device_budget: int | str | None = field(
        metadata={"help": "write bytes, text like '24GiB', 'auto', or null for plain PyTorch without fxoffload"}
    )
    tokenizer: Path | None = None  # default: the model's folder
    method: Literal["full", "lora", "qlora"] = "full"
    lora: LoraOptions | None = None
    quantization: QuantizationOptions | None = None
    dtype: Dtype | None = None  # of the loaded weights; default: bf16 with precision bf16, else fp32
    precision: Literal["bf16", "fp32", "autocast"] = "fp32"  # autocast: bf16 compute on weights of `dtype`
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    max_steps: int | None = None
    epochs: int | None = None
    gradient_accumulation: int = 1  # each micro-batch's mean loss has equal weight
    max_grad_norm: float | None = None
    device: str = "auto"
    host_budget: int | str | None = None
    disk_budget: int | str = 0
    disk_dir: Path | None = None
    machine: str | None = None
    numerics: Literal["bitwise", "reordered"] = "bitwise"
    executor: Literal["eager", "inductor"] = "eager"
    search: Literal["quick", "thorough"] = "quick"
    dump_dir: Path | None = None
    cache_dir: Path | None = None  # the compile cache: a later start of the same run is not traced and planned again
    seed: int = 0
    output_dir: Path | None = None
    save_every: int | None = None  # default: once, at the end
    keep_last: int | None = 3  # None keeps every checkpoint
    resume: str = "auto"  # "auto": the newest complete checkpoint of output_dir, if any; "none"; or a checkpoint's path
    eval: EvalConfig | None = None

    def __post_init__(self) -> None:
        _at_least(1, gradient_accumulation=self.gradient_accumulation, max_steps=self.max_steps, epochs=self.epochs,
                  save_every=self.save_every, keep_last=self.keep_last)
        self._check_sizes()
        self._check_method()
        if self.precision != "autocast" and self.dtype not in (None, self.precision):
            raise ValueError(f"dtype: {self.dtype} contradicts precision {self.precision}; use precision: autocast")
        if self.save_every is not None and self.output_dir is None:
            raise ValueError("save_every: needs output_dir, the folder of the checkpoints")
        if self.tokenizer is None and self.model.path is None:
            raise ValueError("tokenizer: missing; model.config names no folder to load one from")

    def _check_sizes(self) -> None:
        for name in ("device_budget", "host_budget", "disk_budget"):
            size = getattr(self, name)
            if size is not None and not (name == "device_budget" and size == "auto"):
                parse_bytes(size, name)

    def _check_method(self) -> None:
        if self.method == "full" and self.lora is not None:
            raise ValueError("lora: only with method: lora or qlora")
        if self.method != "qlora" and self.quantization is not None:
            raise ValueError("quantization: only with method: qlora")
        if self.method == "qlora" and self.model.path is None:
            raise ValueError("model.path: method qlora quantizes stored weights, so it needs a model folder")

    @property
    def weight_dtype(self) -> Dtype:
        """The dtype of the loaded weights."""
        return self.dtype or ("bf16" if self.precision == "bf16" else "fp32")


def _at_least(lowest: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < lowest:
            raise ValueError(f"{name}: must be at least {lowest}, got {value}")
