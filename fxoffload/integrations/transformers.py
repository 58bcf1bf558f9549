"""Transformers under capture: masks that depend on the batch's values, and hooks that capture cannot follow.

Under tracing, transformers cannot look into a mask and always builds the full one; eager looks, and leaves it out where nothing is
padded. So one look per call, before the graph, picks the variant, and Dynamo is told (through the public
`torch.compiler.substitute_in_graph`) what the look found. The values are guarded: a call of another variant is another graph.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import grids


class Variant:
    """What the look found. The defaults are what transformers assumes by itself, so that other users of Dynamo see no change."""

    def __init__(self) -> None:
        self.ours = False
        self.padded = True
        self.packed = True


VARIANT = Variant()
_CACHES = ("past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class Look:
    """Whether a batch is padded or packed."""

    padded: bool
    packed: bool

    @staticmethod
    def at(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Look:
        """The look at a call. What cannot be judged counts as padded and packed: then the real masks are built.

        Where plain transformers makes a cache it looks for no packing; a planned call makes none, but gives the same numbers.
        """
        if any(isinstance(a, torch.Tensor) for a in args[1:]):
            return Look(True, True)
        masks = [v for k, v in kwargs.items() if k.endswith("attention_mask") and isinstance(v, torch.Tensor)]
        packed = _is_packed(kwargs.get("position_ids")) and not _would_cache(model, kwargs)
        return Look(not masks or not all(map(_is_full, masks)), packed)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Captures inside build what the look found. A call inside a call gives the outer one its variant back."""
        before = VARIANT.ours, VARIANT.padded, VARIANT.packed
        VARIANT.ours, VARIANT.padded, VARIANT.packed = True, self.padded, self.packed
        try:
            yield
        finally:
            VARIANT.ours, VARIANT.padded, VARIANT.packed = before


def _is_full(mask: torch.Tensor) -> bool:
    return mask.ndim == 2 and mask.device.type != "meta" and bool((mask != 0).all())


def _is_packed(positions: object) -> bool:
    if not isinstance(positions, torch.Tensor):
        return False
    if positions.ndim != 2 or positions.device.type == "meta":
        return True
    return bool((positions.diff(dim=-1) != 1).any())


def prepared(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments as a planned call needs them: no cache, and counts as tensors (a number would be part of the graph)."""
    kwargs = dict(kwargs)
    if kwargs.get("use_cache") is None and _takes_use_cache(model) and not _computes_with_cache(model):
        kwargs["use_cache"] = False
    if isinstance(kwargs.get("num_items_in_batch"), int):
        kwargs["num_items_in_batch"] = torch.tensor(kwargs["num_items_in_batch"])
    return kwargs


def _computes_with_cache(model: nn.Module) -> bool:
    """True where a cache decides what training computes: a recurrent model that keeps its state pads its convolutions, and sums in
    another order. What it would keep is left out by `without_cache`."""
    return torch.is_grad_enabled() and getattr(model, "_is_stateful", False)


def without_cache(out: Any) -> Any:
    """A model's output less the cache it would keep for generation. Traced by Dynamo."""
    if isinstance(out, dict) and any(name in out for name in _CACHES):
        return type(out)(**{key: value for key, value in out.items() if key not in _CACHES})
    return out


def _would_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    if not _takes_use_cache(model) or kwargs.get("use_cache") is False:
        return False
    checkpointing = model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    return bool(getattr(model, "config").use_cache) and not checkpointing


def _takes_use_cache(model: nn.Module) -> bool:
    if getattr(getattr(model, "config", None), "use_cache", None) is None:
        return False
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(p.name == "use_cache" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


class _Registered:
    done = False


def register() -> None:
    """Tells Dynamo about the mask functions, once per process."""
    if _Registered.done:
        return
    from transformers import masking_utils
    from transformers.utils import import_utils

    plain_packed = _untouched(masking_utils.find_packed_sequence_indices)
    plain_causal = _untouched(masking_utils._ignore_causal_mask_sdpa)
    plain_bidirectional = _untouched(masking_utils._ignore_bidirectional_mask_sdpa)
    plain_check = _untouched(import_utils.torch_compilable_check)

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

    _register_windows()

    # Before torch 2.13 Dynamo does not trace the check of a tensor. Since then it reads it on the host.
    @torch.compiler.substitute_in_graph(import_utils.torch_compilable_check, skip_signature_check=True)
    def torch_compilable_check(cond: Any, msg: Any, error_type: type[Exception] = ValueError) -> None:
        if VARIANT.ours and isinstance(cond, torch.Tensor):
            torch._assert_async(cond.all(), "what the model requires of its inputs is not so")
        else:
            plain_check(cond, msg, error_type)

    _Registered.done = True


def _register_windows() -> None:
    """Windows of a vision tower, where transformers has them in a place of their own."""
    try:
        from transformers import vision_utils
    except ImportError:
        return
    plain = _untouched(vision_utils.get_vision_window_index)

    @torch.compiler.substitute_in_graph(vision_utils.get_vision_window_index, skip_signature_check=True)
    def get_vision_window_index(grid_thw: torch.Tensor, spatial_merge_size: int, window_size: int, patch_size: int, kwargs: Any = None) -> Any:
        if not VARIANT.ours or kwargs is not None and kwargs.get("window_index") is not None:
            return plain(grid_thw, spatial_merge_size, window_size, patch_size, kwargs)
        return grids.window_index(grid_thw, spatial_merge_size, window_size, patch_size)


def _untouched(function: Any) -> Any:
    """The same function as another object: what Dynamo traces when the substitute asks for the original."""
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


class Recorders:
    """The hooks that record hidden states, attentions and router logits. They would come with the first forward that asks for any, under a
    lock that capture cannot take: they are there before, and go with `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before: dict[nn.Module, set[int]] = {}

    def install(self, kwargs: Mapping[str, Any]) -> None:
        """Encoders inside a composite model record in every forward, others when the call's `kwargs` or a config ask for it."""
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        config: Any = getattr(self.model, "config", None)
        if config is None:
            return
        own = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
        asked = asks_for_records(kwargs)
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel) and not getattr(module, _HOOKED, False) and (
                asked or _records_always(module.config) or not any(module.config is c for c in own)
            ):
                for inner in module.modules():
                    self._before.setdefault(inner, set(inner._forward_hooks))
                maybe_install_capturing_hooks(module)

    def remove(self) -> None:
        """Every module has the hooks that it had, and the user's own of since."""
        for module, before in self._before.items():
            for key in [k for k, hook in module._forward_hooks.items() if k not in before and _records(hook)]:
                del module._forward_hooks[key]
            module.__dict__.pop(_HOOKED, None)
        self._before.clear()


_HOOKED = "_output_capturing_hooks_installed"


def _records(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _records_always(config: Any) -> bool:
    return asks_for_records(vars(config)) or bool(getattr(config, "output_attentions", False))


def asks_for_records(options: Mapping[str, Any]) -> bool:
    """Whether a call's arguments or a config ask for more than a model's last hidden state."""
    return any(name.startswith("output_") and value for name, value in options.items())


def overrides(module: nn.Module, home: str) -> dict[str, Any]:
    """Attributes of the class that stands for `module`'s under capture. `home`: where the module keeps its Home.

    A scan over time is the loop that eager runs; under tracing Mamba would take the associative scan, which sums in another order.
    """
    return {_SCAN: property(functools.partial(_uses_scan, home), _set_scan)} if _SCAN in module.__dict__ else {}


_SCAN = "use_associative_scan"


def _uses_scan(home: str, module: nn.Module) -> bool:
    # In this order: to Dynamo of torch 2.11 `__dict__` gives this property again, and again.
    return not module.__dict__[home].active and module.__dict__[_SCAN]


def _set_scan(module: nn.Module, value: bool) -> None:
    module.__dict__[_SCAN] = value


class _GroupedProduct(torch.autograd.Function):
    """Transformers' grouped product, its gradient as one op too."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight, offs)
        return torch.ops.transformers.grouped_mm_fallback(input, weight, offs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return (*torch.ops.fxo.grouped_mm_backward(*ctx.saved_tensors, grad), None)


def _grouped_product(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return _GroupedProduct.apply(input, weight, offs)  # type: ignore[no-untyped-call, no-any-return]


def _grouped_product_backward(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from transformers.integrations import moe

    saved = types.SimpleNamespace(saved_tensors=(input, weight), offs=offs)
    return moe._grouped_mm_fallback_backward(saved, grad)[:2]  # type: ignore[no-any-return]


_LIBRARY = torch.library.Library("fxo", "FRAGMENT")
_LIBRARY.define(
    "grouped_mm_backward(Tensor input, Tensor weight, Tensor offs, Tensor grad) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("grouped_mm_backward", _grouped_product_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fxo::grouped_mm_backward", lambda input, weight, offs, grad: (torch.empty_like(input), torch.empty_like(weight)), lib=_LIBRARY)


def traceable() -> dict[Any, Any]:
    """Calls of a Dynamo graph that AOTAutograd cannot trace, and what computes the same and can be traced.

    The gradient of the grouped product reads its offsets in Python; transformers 5.23 has an op for it, 5.17 has none.
    """
    known = torch.ops.transformers
    if not hasattr(known, "grouped_mm_fallback") or hasattr(known, "grouped_mm_fallback_backward"):
        return {}
    return dict.fromkeys((known.grouped_mm_fallback, known.grouped_mm_fallback.default), _grouped_product)


_HOOK = "make_inputs_require_grads"


class InputHooks:
    """Puts aside the forward hooks of `enable_input_require_grads`: capture cannot follow them, and planned recomputation needs
    no gradient at the embeddings' output."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.removed: list[tuple[nn.Module, int, Any]] = []
        self.strip()

    def strip(self) -> bool:
        """Puts aside the hooks that are there now. True when there were any."""
        found = [(m, k, h) for m in self.model.modules() for k, h in m._forward_hooks.items() if getattr(h, "__name__", "") == _HOOK]
        for module, key, _ in found:
            del module._forward_hooks[key]
        self.removed += found
        return bool(found)

    def restore(self) -> None:
        """The hooks are back."""
        for module, key, hook in self.removed:
            module._forward_hooks[key] = hook
