"""Grids of images and videos under capture: numbers in a batch that decide what sizes a step has.

Models of the Qwen-VL kind get the patches of all images in one row, and beside it a tensor of (frames, height, width) for each image
(`image_grid_thw`): sequences are cut by its values, so a graph is for one grid. Before a call each grid is read once, as eager reads it, and
goes into the step as text, which Dynamo guards: another grid is another capture. Inside, `restored` makes it a tensor whose values are known
while the step is captured (`torch_compat.known_values`).

Positions that depend on which tokens are an image's are computed before the call, by the model's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_GRID = "grid_thw"
_POSITIONS = "compute_3d_position_ids"


def prepared(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments with every grid as text, and the positions that the model would compute from the batch's values.

    Raises ValueError for a grid whose values are not there, or that has no patch.
    """
    grids = {name: value for name, value in kwargs.items() if _is_grid(name, value)}
    if not grids:
        return kwargs
    texts = {name: _text(name, value) for name, value in grids.items()}
    return {**kwargs, **_positions(model, kwargs), **texts}


def restored(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What `prepared` gave, with grids as tensors again. Traced by Dynamo."""
    texts = [name for name, value in kwargs.items() if name.endswith(_GRID) and isinstance(value, str)]
    if not texts:
        return kwargs
    device = [value.device for value in kwargs.values() if isinstance(value, torch.Tensor)][0]
    return {**kwargs, **{name: torch.tensor(_numbers(kwargs[name]), device=device) for name in texts}}


def n_patches(kwargs: Mapping[str, Any]) -> frozenset[int]:
    """Of what `prepared` gave, the patches that each grid counts: as many rows of the batch cannot be more or fewer in the same graph."""
    texts = (value for name, value in kwargs.items() if name.endswith(_GRID) and isinstance(value, str))
    return frozenset(sum(t * h * w for t, h, w in _numbers(text)) for text in texts)


def _is_grid(name: str, value: object) -> bool:
    return name.endswith(_GRID) and isinstance(value, torch.Tensor) and value.ndim == 2 and value.shape[1] == 3


def _text(name: str, grid: torch.Tensor) -> str:
    if grid.device.type == "meta" or not bool((grid > 0).all()):
        raise ValueError(f"{name}: the sizes of a step are the values of this tensor; give a batch that has them")
    return ";".join(",".join(map(str, row)) for row in grid.tolist())


def _numbers(text: str) -> list[list[int]]:
    return [[int(number) for number in row.split(",")] for row in text.split(";")]


def _positions(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What the model's own function says of this call, where it would be asked."""
    asked = kwargs.get("position_ids") is None and kwargs.get("input_ids") is not None and kwargs.get("mm_token_type_ids") is not None
    inner = next((module for module in model.modules() if hasattr(module, _POSITIONS)), None)
    if not asked or inner is None:
        return {}
    compute = getattr(inner, _POSITIONS)
    names = inspect.signature(compute).parameters
    with torch.no_grad():
        found = compute(**{name: kwargs.get(name) for name in names})
    return {} if found is None else {"position_ids": found}


def window_index(grid: torch.Tensor, merge_size: int, window_size: int, patch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' get_vision_window_index gives, from slices of known sizes: the order of merged patches, window by window, and where
    each window's patches end. Traced by Dynamo."""
    side, unit = window_size // merge_size // patch_size, merge_size * merge_size
    order, ends, first = [], [0], 0
    for frames, height, width in grid.tolist():
        rows, columns = height // merge_size, width // merge_size
        # Not on the host, where transformers has it: a step in which an index is copied could not be recorded.
        index = torch.arange(frames * rows * columns, device=grid.device).reshape(frames, rows, columns) + first
        first += frames * rows * columns
        for frame in range(frames):
            for row in range(0, rows, side):
                for column in range(0, columns, side):
                    order.append(index[frame, row : row + side, column : column + side].reshape(-1))
                    ends.append(ends[-1] + (min(row + side, rows) - row) * (min(column + side, columns) - column) * unit)
    return torch.cat(order), torch.tensor(ends, device=grid.device, dtype=torch.int32)
