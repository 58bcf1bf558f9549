"""The one knob that people turn by hand: how many of the last layers keep their activations instead of making them again."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from peers.task import Task, decoder_layers

# Layers kept in the second attempt, from which the bytes of one are taken.
_PROBE = 2
# Share of the cap that what is allocated may take where the allocator's own losses must not end the run.
_CAREFUL = 0.94


@dataclass(frozen=True, slots=True)
class Attempt:
    """Seconds and peak bytes of a step that fitted; a step that did not is None."""

    step_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """`layers` is the fastest of `tried`: seconds by number of layers, None where it ran out of memory."""

    layers: int
    tried: dict[int, float | None]


def search(n_layers: int, limit_bytes: int, attempt: Callable[[int], Attempt | None], upwards: bool = True) -> Tuned:
    """Attempts none and a few layers, then what their peaks say just fits, then up, if asked to, or down to the largest number that fits.

    The fastest of all attempts is taken: near the limit an allocator that must give back what it cached makes the largest slower. Raises
    MemoryError when not even checkpointing every layer fits.
    """
    tried: dict[int, Attempt | None] = {}

    def fits(n: int) -> bool:
        if n not in tried:
            tried[n] = attempt(n)
        return tried[n] is not None

    if not fits(0):
        raise MemoryError("checkpointing every layer does not fit")
    probe = min(_PROBE, n_layers)
    n = _expected(n_layers, limit_bytes, probe, tried) if fits(probe) else 1
    while n > 0 and not fits(n):
        n -= 1
    while upwards and n < n_layers and fits(n + 1):
        n += 1
    fits(max(n - 1, 0))
    seconds = {layers: None if one is None else one.step_s for layers, one in sorted(tried.items())}
    fastest = min((s, layers) for layers, s in seconds.items() if s is not None)
    return Tuned(fastest[1], seconds)


def _expected(n_layers: int, limit_bytes: int, probe: int, tried: dict[int, Attempt | None]) -> int:
    """How many layers fit if each takes as many bytes as the first few did."""
    none, few = tried[0], tried[probe]
    assert none is not None and few is not None
    each = (few.peak_bytes - none.peak_bytes) / probe
    return n_layers if each <= 0 else max(0, min(n_layers, int((limit_bytes - none.peak_bytes) / each)))


def tuned(step: Callable[[], torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, careful: bool = False) -> Tuned:
    """Sets the number of layers that is fastest within the task's cap (the card's memory without one). The steps that it takes to find
    out leave no trace: their learning rate is 0, and the optimizer forgets them. `careful`: stays a little below the cap, for what cannot go
    on after it ran out of memory."""
    on_card = task.device == "cuda"
    layers = decoder_layers(model)
    limit = task.cap_bytes or (torch.cuda.get_device_properties(0).total_memory if on_card else 1 << 60)

    def keep(n: int) -> None:
        for i, layer in enumerate(layers):
            layer.gradient_checkpointing = i < len(layers) - n

    def attempt(n: int) -> Attempt | None:
        keep(n)
        found = _attempt(step, on_card)
        if found is None:  # outside the handler: until it ends, its traceback holds the step's tensors
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
        return found

    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    found = search(len(layers), int(limit * _CAREFUL) if careful else limit, attempt, upwards=not careful)
    keep(found.layers)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    optimizer.state.clear()
    return found


def _attempt(step: Callable[[], torch.Tensor], on_card: bool) -> Attempt | None:
    """The second of two steps: the first may build kernels and the optimizer's state."""
    try:
        step()
        if on_card:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        step()
        if on_card:
            torch.cuda.synchronize()
        return Attempt(time.perf_counter() - started, torch.cuda.max_memory_allocated() if on_card else 0)
    except torch.OutOfMemoryError:
        return None
