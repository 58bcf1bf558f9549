"""What an optimizer keeps per trained parameter, from its name, class or instance.

The optimizer's own few bytes (step counters, tables that all parameters share) are left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

log = logging.getLogger("fxoffload")


class States(Protocol):
    """Bytes of optimizer state."""

    @property
    def temporaries(self) -> int:
        """Times the bytes of all parameters that a step over them makes for itself at most."""

    def bytes_of(self, shape: Sequence[int], item_bytes: int, embedding: bool = False) -> int:
        """Bytes kept for a parameter of that shape and so many bytes per element. `embedding`: it is an embedding's weight."""


@dataclass(frozen=True, slots=True)
class Own:
    """So many tensors of the parameter's own shape and dtype, as `zeros_like` makes them. `temporaries` of torch's foreach kernels.
    `fused`: torch's fused kernel steps."""

    count: int
    temporaries: int = 1
    fused: bool = False

    def bytes_of(self, shape: Sequence[int], item_bytes: int, embedding: bool = False) -> int:
        return self.count * math.prod(shape) * item_bytes


@dataclass(frozen=True, slots=True)
class Fp32:
    """So many fp32 tensors of the parameter's shape, whatever its dtype."""

    count: int
    temporaries: ClassVar[int] = 2

    def bytes_of(self, shape: Sequence[int], item_bytes: int, embedding: bool = False) -> int:
        return self.count * math.prod(shape) * 4


@dataclass(frozen=True, slots=True)
class Factored:
    """One fp32 sum per row and column, a full tensor for vectors; with `momentum` one more full tensor (Adafactor's `beta1`)."""

    momentum: bool = False
    temporaries: ClassVar[int] = 2

    def bytes_of(self, shape: Sequence[int], item_bytes: int, embedding: bool = False) -> int:
        n = math.prod(shape)
        sums = n if len(shape) < 2 else n // max(shape[-1], 1) + n // max(shape[-2], 1)
        return 4 * (sums + n * self.momentum)


# bitsandbytes' `min_8bit_size` and torchao's limit: smaller parameters are not coded.
_CODED_FROM = 4096


@dataclass(frozen=True, slots=True)
class Blockwise8:
    """bitsandbytes: so many tensors of one byte per element, each with one fp32 scale per block of 256; in fp32 for small parameters
    and, where told so (as transformers' Trainer does), for embeddings."""

    count: int
    coded_from: int = _CODED_FROM
    embeddings_in_fp32: bool = False
    temporaries: ClassVar[int] = 2

    def bytes_of(self, shape: Sequence[int], item_bytes: int, embedding: bool = False) -> int:
        n = math.prod(shape)
        in_fp32 = n < self.coded_from or (embedding and self.embeddings_in_fp32)
        return self.count * (4 * n if in_fp32 else n + 4 * -(-n // 256))


@dataclass(frozen=True, slots=True)
class Coded:
    """torchao: two tensors of codes, each with one fp32 scale per block and its own table; where blocks do not divide the
    parameter, or it is small, two of the parameter's dtype."""

    bits: int
    block: int
    temporaries: ClassVar[int] = 2

    def bytes_of(self, shape: Sequence[int], item_bytes: int, embedding: bool = False) -> int:
        n = math.prod(shape)
        if n < _CODED_FROM or n % self.block:
            return 2 * n * item_bytes
        return 2 * (n * self.bits // 8 + 4 * (n // self.block) + 4 * 2**self.bits)


# By transformers' OptimizerNames, class names of their libraries, and short words. Where a name leaves open what decides (momentum of
# SGD and RMSprop, ranks of GaLore and APOLLO, Kahan sums of StableAdamW) it is the most that the usual choices keep.
_KNOWN: Sequence[tuple[States, str]] = (
    (Own(0), "lomo"),
    (Own(1, temporaries=2), "adagrad"),
    (Own(1), "sgd asgd lion muon schedule_free_sgd SGDScheduleFree"),
    (Own(2, temporaries=2), "adadelta rprop"),
    (Own(2), "adam adamw adamw_torch adamw_torch_xla adamw_hf adamax nadam radam sparse_adam "
             "schedule_free_adamw schedule_free_radam AdamWScheduleFree RAdamScheduleFree"),
    (Own(2, fused=True), "adamw_torch_fused adamw_torch_npu_fused"),
    (Own(3), "rmsprop grokadamw stable_adamw galore_adamw galore_adamw_layerwise galore_adafactor "
             "galore_adafactor_layerwise apollo_adamw apollo_adamw_layerwise"),
    (Own(202), "lbfgs"),  # its default history of 100 steps and of 100 changes of the gradient, the last direction and gradient
    (Factored(), "adafactor adalomo"),
    (Fp32(1), "lion_32bit paged_lion_32bit rmsprop_bnb rmsprop_bnb_32bit"),
    (Fp32(2), "paged_adamw_32bit adamw_anyprecision AnyPrecisionAdamW galore_adamw_8bit galore_adamw_8bit_layerwise"),
    (Fp32(3), "ademamix paged_ademamix_32bit"),
    (Blockwise8(1, embeddings_in_fp32=True), "lion_8bit paged_lion_8bit rmsprop_bnb_8bit"),
    (Blockwise8(2, embeddings_in_fp32=True), "adamw_8bit adamw_bnb_8bit paged_adamw_8bit"),
    (Blockwise8(3, embeddings_in_fp32=True), "ademamix_8bit paged_ademamix_8bit"),
    (Coded(4, 128), "adamw_torch_4bit"),
    (Coded(8, 256), "adamw_torch_8bit"),
)
# The most that any optimizer we know keeps, a history of steps apart.
_PRIOR = Fp32(3)
_BNB_TENSORS = {"adam": 2, "adamw": 2, "lamb": 2, "ademamix": 3, "lion": 1, "sgd": 1, "lars": 1, "rmsprop": 1, "adagrad": 1}


def optimizer_states(optimizer: Any) -> States | None:
    """The States of a name (transformers' own, any case), class or instance; None where no optimizer steps (None or "none").

    Raises ValueError with the known names for another name, or for what is no optimizer. A class nobody knows is taken for one that
    keeps the most, and a warning says so.
    """
    if optimizer is None or (isinstance(optimizer, str) and optimizer.lower() == "none"):
        return None
    if isinstance(optimizer, str):
        if _word(optimizer) not in _BY_WORD:
            raise ValueError(f"optimizer: unknown name {optimizer!r}; known are {', '.join(_names())}, or pass the class")
        return _BY_WORD[_word(optimizer)]
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not hasattr(kind, "step"):
        raise ValueError(f"optimizer: expected a name, an optimizer's class or instance, or None; got {optimizer!r:.60}")
    instance = None if isinstance(optimizer, type) else optimizer
    for base in kind.__mro__:
        found = _of_class(base, instance)
        if found is not None:
            return found
    log.warning("optimizer %s is not known: its states are taken for three fp32 tensors per trained parameter", kind.__name__)
    return _PRIOR


def _of_class(kind: type, instance: Any) -> States | None:
    library, word = kind.__module__.split(".")[0], _word(kind.__name__)
    if library == "bitsandbytes":
        return _bitsandbytes(word, instance)
    if library == "torchao":
        return _BY_WORD.get(word.replace("adamw", "adam").replace("adam", "adamwtorch"))
    known = _BY_WORD.get(word)
    return known if instance is None or known is None else max(
        (_with_choices(word, known, group) for group in instance.param_groups), key=lambda s: s.bytes_of((64, 64), 4))


def _with_choices(word: str, known: States, group: dict[str, Any]) -> States:
    """What an instance keeps with the hyperparameters of one of its groups."""
    if word == "sgd":
        known = Own(int(group["momentum"] != 0))
    elif word == "rmsprop":
        known = Own(1 + bool(group["centered"]) + (group["momentum"] > 0))
    elif word == "adafactor":
        return Factored(group.get("beta1") is not None)
    elif group.get("amsgrad"):
        known = Own(3)
    return replace(known, fused=bool(group.get("fused"))) if isinstance(known, Own) else known


def _bitsandbytes(word: str, instance: Any) -> States | None:
    count = _BNB_TENSORS.get(word.removeprefix("paged").removesuffix("8bit").removesuffix("32bit"))
    if count is None:
        return None
    if instance is None:
        return Blockwise8(count) if word.endswith("8bit") else Fp32(count)
    if instance.args.optim_bits == 32:
        return Fp32(count)
    # A list for all optimizers of the process, which each looks through at its first step.
    return Blockwise8(count, instance.args.min_8bit_size, embeddings_in_fp32=bool(instance.mng.module_weight_config_triple))


def _word(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _names() -> list[str]:
    return sorted(name for _, names in _KNOWN for name in names.split() if name.islower())


_BY_WORD = {_word(name): states for states, names in _KNOWN for name in names.split()}
