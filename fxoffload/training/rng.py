"""The states of every random number generator that training draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fxoffload.training.tree import Tensors


def capture(device: torch.device) -> tuple[dict[str, list[Any]], Tensors]:
    """(JSON part, tensors) of the generators of Python, numpy, torch and the accelerator `device`."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    plain: dict[str, list[Any]] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }
    tensors = {"rng.torch": torch.get_rng_state()}
    read = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_rng_state", None)
    if read is not None:
        tensors["rng.device"] = read(device.index or 0)
    return plain, tensors


def restore(plain: dict[str, list[Any]], tensors: Tensors, device: torch.device) -> None:
    """Sets every generator to the captured state."""
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["rng.torch"])
    if device.type != "cpu" and "rng.device" in tensors:
        torch.get_device_module(device).set_rng_state(tensors["rng.device"], device.index or 0)
