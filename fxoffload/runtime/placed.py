"""Calls whose results lie in the device's arena: what the executor puts in an op's place where memory is planned by offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from ..graph import info
from ..liveness import owner_of
from ..memory_map import COPIES
from ..out_variants import OutVariant, out_variant
from ..fusion import fused
from .device_arena import DeviceArena
from .fused import fused_call
from .scatters import SCATTERS

# The index of a result that is no tuple's element.
ALONE = -1


def places(graph: fx.Graph, arena: DeviceArena) -> dict[fx.Node, dict[int, int]]:
    """For each node that makes values with offsets: the offset of every result, by its index in a tuple or ALONE.

    Inputs of a backward may have offsets too: forward has put them there.
    """
    found: dict[fx.Node, dict[int, int]] = {}
    for node in graph.nodes:
        entry = info(node)
        if entry.offset is not None and node.op == "call_function":
            owner = owner_of(node)
            offset = arena.offset_of(entry.offset, entry.pages)
            found.setdefault(owner, {})[ALONE if owner is node else int(node.args[1])] = offset  # type: ignore[arg-type]
    return found


def placed_call(node: fx.Node, offsets: Mapping[int, int], arena: DeviceArena) -> Callable[..., object]:
    """What to call instead of an ATen op's, or one of our ops', target."""
    if node.target is fused:
        return fused_call(node, offsets, arena)
    variant = out_variant(node.target)
    if variant is not None:
        return WrittenThere(variant, node.meta["val"], offsets, arena)
    if node.target in COPIES:
        return CopiedThere(node.meta["val"].dtype, offsets[ALONE], arena)
    return MovedThere(SCATTERS.get(node.target, node.target), offsets, arena)  # type: ignore[arg-type]


class _Call:
    """A callable under a name that generated code can print."""

    __module__ = __name__

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = type(self).__name__


class WrittenThere(_Call):
    """An op by its out variant. Results that have no place get memory of their own."""

    def __init__(self, variant: OutVariant, value: Any, offsets: Mapping[int, int], arena: DeviceArena) -> None:
        super().__init__()
        values = value if isinstance(value, (tuple, list)) else (value,)
        self._op, self._arena = variant.op, arena
        alone = offsets.get(ALONE)
        self._results = tuple(
            (name, offsets.get(i, alone), one.dtype) for i, (name, one) in enumerate(zip(variant.results, values, strict=True)))

    def __call__(self, *args: object, **kwargs: object) -> object:
        for name, offset, dtype in self._results:
            kwargs[name] = (
                torch.empty(0, dtype=dtype, device=self._arena.device) if offset is None else self._arena.empty(offset, dtype))
        return self._op(*args, **kwargs)


class CopiedThere(_Call):
    """A copy of the first argument, maybe in another dtype, by one kernel."""

    def __init__(self, dtype: torch.dtype, offset: int, arena: DeviceArena) -> None:
        super().__init__()
        self._dtype, self._offset, self._arena = dtype, offset, arena

    def __call__(self, src: torch.Tensor, *, memory_format: torch.memory_format | None = None, **_: object) -> torch.Tensor:
        wanted = torch.preserve_format if memory_format is None else memory_format
        if src.is_contiguous() and wanted in (torch.preserve_format, torch.contiguous_format):
            stride = src.stride()
        else:
            stride = torch.empty_like(src, device="meta", memory_format=wanted).stride()
        return self._arena.strided(self._offset, src.shape, stride, self._dtype).copy_(src)


class MovedThere(_Call):
    """An op that makes its results itself: those with a place are copied to it and freed."""

    def __init__(self, op: Callable[..., object], offsets: Mapping[int, int], arena: DeviceArena) -> None:
        super().__init__()
        self._op, self._offsets, self._arena = op, offsets, arena

    def __call__(self, *args: object, **kwargs: object) -> object:
        made: Any = self._op(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return self._moved(made, self._offsets[ALONE])
        return tuple(self._moved(one, self._offsets[i]) if i in self._offsets else one for i, one in enumerate(made))

    def _moved(self, made: torch.Tensor, offset: int) -> torch.Tensor:
        return self._arena.strided(offset, made.shape, made.stride(), made.dtype).copy_(made)


class LoadedThere(_Call):
    """A copy to the device, or rows that it looks up, into its place."""

    def __init__(self, start: Callable[..., object], offset: int, arena: DeviceArena) -> None:
        super().__init__()
        self._start, self._offset, self._arena = start, offset, arena

    def __call__(self, *src: object) -> object:
        return self._start(*src, self._new)

    def _new(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._arena.strided(self._offset, shape, stride, dtype)
