"""Synthetic inputs of transformers models: what a step is planned from when the caller gives sizes, or text without images.

Only sizes matter to a plan, so images and sounds are zeros; but the places that an image takes in a row of tokens are marked, because
a model that finds none does not run its vision tower.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

log = logging.getLogger("fxoffload")


def sample_of(model: nn.Module, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """A batch of `batch` rows whose labels have `sequence` tokens, and the model's main input: tokens, or sound of full length.

    Raises ValueError for a model whose main input is something else.
    """
    ids = torch.zeros((batch, sequence), dtype=torch.int64)
    main = getattr(_inner(model), "main_input_name", "input_ids")
    if main == "input_ids":
        return with_images(model, {"input_ids": ids, "labels": ids.clone()})
    config: Any = getattr(model, "config", None)
    if main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # two frames for each position: the second of Whisper's two convolutions has stride 2
        return {"input_features": torch.zeros(batch, config.num_mel_bins, 2 * config.max_source_positions), "labels": ids}
    raise ValueError(
        f"batch: {type(_inner(model)).__name__} reads {main}, of which (batch, sequence) says nothing; give a batch, or a mapping of "
        "name to (shape, dtype)")


def with_images(model: nn.Module, batch: Any) -> Any:
    """`batch` with a synthetic image in every row, where the model has a vision tower and the batch has text alone; else `batch` itself.

    A warning says which of the two the plan is made from.
    """
    config: Any = getattr(model, "config", None)
    if not _lacks_images(model, config, batch):
        return batch
    n_tokens = _IMAGE_TOKENS.get(config.model_type, _unknown)(config)
    ids = batch["input_ids"]
    if n_tokens is None:
        log.warning("the batch has no pixel_values, and what an image of %s looks like is not known here: its vision tower is not in the "
                    "plan. Give a batch with images to plan it", config.model_type)
        return batch
    if ids.shape[1] <= n_tokens:
        log.warning("the batch has no pixel_values, and no row of %d tokens has room for the %d of an image: the vision tower is not in "
                    "the plan", ids.shape[1], n_tokens)
        return batch
    log.warning("the batch has no pixel_values: planned with a synthetic image of %d tokens in every row", n_tokens)
    return {**batch, **_images(config, ids, n_tokens)}


def _lacks_images(model: nn.Module, config: Any, batch: Any) -> bool:
    if getattr(config, "vision_config", None) is None or not isinstance(batch, Mapping) or "pixel_values" in batch:
        return False
    ids = batch.get("input_ids")
    takes = "pixel_values" in inspect.signature(_inner(model).forward).parameters
    return takes and isinstance(ids, torch.Tensor) and ids.ndim == 2


def _inner(model: nn.Module) -> nn.Module:
    """The model under adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator, no-any-return]


def _images(config: Any, ids: torch.Tensor, n_tokens: int) -> dict[str, torch.Tensor]:
    """The inputs that an image in every row adds or changes; it stands behind the first token."""
    token = config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index
    marked = ids.clone()
    marked[:, 1:1 + n_tokens] = token
    if config.model_type in _OF_GRIDS:
        return {"input_ids": marked, "mm_token_type_ids": (marked == token).long(), **_grids(config.vision_config, len(ids))}
    height, width = _pair(config.vision_config.image_size)
    found = {"input_ids": marked, "pixel_values": torch.zeros(len(ids), config.vision_config.num_channels, height, width)}
    if config.model_type in _TYPES_OF_TOKENS:
        found["token_type_ids"] = (marked == token).long()
    return found


# Families that read all images as one row of patches, beside the grid of each; no config says how large an image is.
_OF_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
_SIDE_PATCHES = 32


def _side(vision: Any) -> int:
    """Patches along a side of a square image: `_SIDE_PATCHES`, 448 pixels where a patch has 14, or fewer that are merged without rest."""
    return max(_SIDE_PATCHES // vision.spatial_merge_size, 1) * int(vision.spatial_merge_size)


def _grids(vision: Any, n_images: int) -> dict[str, torch.Tensor]:
    side = _side(vision)
    row = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": torch.zeros(n_images * side * side, row), "image_grid_thw": torch.tensor([[1, side, side]] * n_images)}


def _merged(config: Any) -> int:
    return int((_side(config.vision_config) // config.vision_config.spatial_merge_size) ** 2)


# Families whose masks depend on which tokens are an image's.
_TYPES_OF_TOKENS = ("gemma3", "paligemma")


def _pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _patches(config: Any) -> int:
    vision = config.vision_config
    (height, width), (patch_height, patch_width) = _pair(vision.image_size), _pair(vision.patch_size)
    return (height // patch_height) * (width // patch_width)


def _llava(config: Any) -> int:
    """What CLIP gives is a class token before its patches; "default" leaves out the first of what there is."""
    first = config.vision_config.model_type == "clip_vision_model"
    return _patches(config) + first - (config.vision_feature_select_strategy == "default")


def _unknown(config: Any) -> None:
    return None


# Tokens that one image takes in a row, by model type.
_IMAGE_TOKENS: Mapping[str, Callable[[Any], int | None]] = {
    "llava": _llava,
    "paligemma": _patches,
    "gemma3": lambda config: config.mm_tokens_per_image,
    "internvl": lambda config: int(_patches(config) * config.downsample_ratio**2),
    **{family: _merged for family in _OF_GRIDS},
}
