"""Device bytes on plain "cpu": what an allocator with a counter would have seen, from the operators alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DeviceMeter(TorchDispatchMode):
    """Counts the bytes of CPU storages that operators allocate inside the context, in forward and backward.

    A storage is counted from the operator that returns it until its last tensor is gone, also after the context has
    ended; storages that were there before count only if `include`d. Host-tier storages are left out: those given to
    `ignore` and those of results for which `is_host` says so.

    The same operators give the simulated device's curve to the byte, but for what one operator allocates and frees
    inside (its copies of convolution's operands, the indices of a boolean mask) and for `torch.tensor(data)`, which
    enters by no operator: both are counted there and not here. Other operators run, hence other curves, for

    - F.dropout: a device saves a mask of one byte per element, the CPU noise in the dtype of the input;
    - scaled_dot_product_attention: the simulated device takes the math path, with S x S values, the CPU flash;
    - optimizers with foreach=None: an accelerator takes the foreach variant, whose temporaries are all alive at once.
    """

    def __init__(self, is_host: Callable[[torch.Tensor], bool] | None = None) -> None:
        super().__init__()
        self._is_host = is_host
        self._n_bytes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._current_bytes = 0
        self._peak_bytes = 0

    @property
    def current_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the start or `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """The peak restarts at the bytes alive now."""
        self._peak_bytes = self._current_bytes

    def include(self, tensor: torch.Tensor) -> None:
        """Counts the whole storage of a tensor that was made outside the context, once however often it is included."""
        self._count(tensor.untyped_storage())

    def ignore(self, tensor: torch.Tensor) -> None:
        """Declares the storage of tensor to be on the host: it is not counted, from now on."""
        storage = tensor.untyped_storage()
        self._host.add(storage)
        self._forget(weakref.ref(storage))

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = {weakref.ref(tensor.untyped_storage()) for tensor in _cpu_tensors((args, kwargs))}
        for tensor in _cpu_tensors(result):
            self._observe(tensor, operands)
        return result

    def _observe(self, tensor: torch.Tensor, operands: set[weakref.ref[torch.UntypedStorage]]) -> None:
        storage = tensor.untyped_storage()
        key = weakref.ref(storage)
        if storage in self._host or (key in operands and key not in self._n_bytes):
            return
        if key not in self._n_bytes and self._is_host is not None and self._is_host(tensor):
            self._host.add(storage)
            return
        self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = weakref.ref(storage, self._forget)
        n_bytes = storage.nbytes()
        self._current_bytes += n_bytes - self._n_bytes.get(key, 0)  # known already: only what resize_ added
        self._n_bytes[key] = n_bytes  # keeps the key it has, and with it the callback
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def _forget(self, key: weakref.ref[torch.UntypedStorage]) -> None:
        self._current_bytes -= self._n_bytes.pop(key, 0)


def _cpu_tensors(values: object) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            continue
        if value.untyped_storage().device.type == "cpu":  # asked of the storage: that of a fake CPU tensor is on meta
            yield value
