"""Transformers under capture: masks that depend on the batch's values, and hooks that capture cannot follow.

Under tracing, transformers cannot look into a mask and always builds the full one; eager looks, and leaves it out where nothing is
padded. So one look per call, before the graph, picks the variant, and Dynamo is told (through the public
`torch.compiler.substitute_in_graph`) what the look found. The values are guarded: a call of another variant is another graph.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Variant:
    """What the look found. The defaults are what transformers assumes by itself, so that other users of Dynamo see no change."""

    def __init__(self) -> None:
        self.ours = False
        self.padded = True
        self.packed = True


VARIANT = Variant()
_MASKS = ("attention_mask", "decoder_attention_mask", "encoder_attention_mask")


@dataclass(frozen=True, slots=True)
class Look:
    """Whether a batch is padded or packed."""

    padded: bool
    packed: bool

    @staticmethod
    def at(kwargs: Mapping[str, Any]) -> Look:
        """The look at a call's keyword arguments."""
        masks = [kwargs[k] for k in _MASKS if isinstance(kwargs.get(k), torch.Tensor)]
        padded = any(m.ndim != 2 or not bool((m != 0).all()) for m in masks if m.device.type != "meta")
        positions = kwargs.get("position_ids")
        packed = isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.device.type != "meta"
        packed = packed and bool((positions.diff(dim=-1) != 1).any())
        return Look(padded, packed)

    def __enter__(self) -> None:
        VARIANT.ours, VARIANT.padded, VARIANT.packed = True, self.padded, self.packed

    def __exit__(self, *_: object) -> None:
        VARIANT.ours, VARIANT.padded, VARIANT.packed = False, True, True


class _Registered:
    done = False


def register() -> None:
    """Tells Dynamo about the mask functions, once per process."""
    if _Registered.done:
        return
    from transformers import masking_utils

    plain_packed = _untouched(masking_utils.find_packed_sequence_indices)
    plain_causal = _untouched(masking_utils._ignore_causal_mask_sdpa)
    plain_bidirectional = _untouched(masking_utils._ignore_bidirectional_mask_sdpa)

    @torch.compiler.substitute_in_graph(masking_utils.find_packed_sequence_indices, skip_signature_check=True)
    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if VARIANT.ours and not VARIANT.packed:
            return None
        return plain_packed(position_ids)  # type: ignore[no-any-return]

    @torch.compiler.substitute_in_graph(masking_utils._ignore_causal_mask_sdpa, skip_signature_check=True)
    def _ignore_causal_mask_sdpa(padding_mask: Any, q_length: int, kv_length: int, q_offset: Any, kv_offset: int,
                                 local_attention_size: int | None = None) -> bool:
        if not VARIANT.ours or isinstance(q_offset, torch.Tensor):
            return plain_causal(padding_mask, q_length, kv_length, q_offset, kv_offset, local_attention_size)  # type: ignore[no-any-return]
        if padding_mask is not None and VARIANT.padded:
            return False
        if local_attention_size is not None and kv_length >= local_attention_size:
            return False
        return q_length == 1 or kv_length == q_length or q_offset == 0

    @torch.compiler.substitute_in_graph(masking_utils._ignore_bidirectional_mask_sdpa, skip_signature_check=True)
    def _ignore_bidirectional_mask_sdpa(padding_mask: Any, kv_length: int, local_attention_size: int | None = None) -> bool:
        if not VARIANT.ours:
            return plain_bidirectional(padding_mask, kv_length, local_attention_size)  # type: ignore[no-any-return]
        if padding_mask is not None and VARIANT.padded:
            return False
        return local_attention_size is None or kv_length < local_attention_size

    _Registered.done = True


def _untouched(function: Any) -> Any:
    """The same function as another object: what Dynamo traces when the substitute asks for the original."""
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


class InputHooks:
    """Puts aside the forward hooks of `enable_input_require_grads`: capture cannot follow them, and planned recomputation needs
    no gradient at the embeddings' output."""

    def __init__(self, model: nn.Module) -> None:
        self.removed: list[tuple[nn.Module, int, Any]] = []
        for module in model.modules():
            for key, hook in list(module._forward_hooks.items()):
                if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                    self.removed.append((module, key, hook))
                    del module._forward_hooks[key]

    def restore(self) -> None:
        """The hooks are back."""
        for module, key, hook in self.removed:
            module._forward_hooks[key] = hook
