"""The device's arena: one allocation in which a lowered graph's values lie at the offsets it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class DeviceArena:
    """Bytes that one step at a time has for itself, from its forward until nothing looks into them any more.

    It is allocated when it is first used and grows, while nobody has it, to the largest graph's need.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n_bytes = 0
        self._storage: torch.UntypedStorage | None = None
        self._stream: Any = None
        self._lasting: dict[tuple[object, ...], torch.Tensor] = {}

    def reserve(self, n_bytes: int) -> None:
        """From its next use on the arena has at least `n_bytes`."""
        self.n_bytes = max(self.n_bytes, n_bytes)

    def take(self) -> bool:
        """True when a step may begin to use the arena: nothing looks into it."""
        if self._storage is not None and torch._C._storage_Use_Count(self._storage._cdata) > 1 + len(self._lasting):
            return False
        if self._storage is None or self._storage.nbytes() < self.n_bytes:
            self._forget()
            self._storage = torch.empty(self.n_bytes, dtype=torch.uint8, device=self.device).untyped_storage()
        self._follow()
        return True

    def holds(self, values: Sequence[object]) -> bool:
        """Whether one of the values lies in the arena."""
        begin, end = self.extent()
        return any(isinstance(v, torch.Tensor) and v.device == self.device and begin <= v.data_ptr() < end for v in values)

    def extent(self) -> tuple[int, int]:
        """The addresses of its first byte and of the one behind its last; (0, 0) before it is first used."""
        if self._storage is None:
            return 0, 0
        begin = self._storage.data_ptr()
        return begin, begin + self._storage.nbytes()

    def empty(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements that begins at `offset` bytes: what an out variant resizes to its result."""
        return self.strided(offset, (0,), (1,), dtype)

    def strided(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape and stride that begins at `offset` bytes. It is no view of another: its versions are its own."""
        out = torch.empty(0, dtype=dtype, device=self.device)
        out.set_(self._storage, offset // dtype.itemsize, shape, stride)  # type: ignore[arg-type]
        return out

    def lasting(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, made once for all steps. It does not tell that a step has the arena."""
        key = offset, tuple(shape), tuple(stride), dtype
        known = self._lasting.get(key)
        if known is None:
            known = self._lasting[key] = self.strided(*key)
        return known

    def release(self) -> None:
        """Gives the bytes back once nothing looks into them."""
        self._forget()
        self.n_bytes = 0

    def _forget(self) -> None:
        self._storage = None
        self._lasting.clear()

    def _follow(self) -> None:
        """A step on another stream than the last one waits for it: it writes where the last one wrote."""
        if self.device.type == "cpu" or not hasattr(module := torch.get_device_module(self.device), "current_stream"):
            return
        stream = module.current_stream(self.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
