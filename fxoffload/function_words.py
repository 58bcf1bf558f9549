"""What the text of a call of an autograd Function says of its arguments and of what it keeps: values in the words of JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .errors import PlanError
from .triton_kernels import is_constant

Tensor = torch.Tensor


class Code:
    """Values in the words of JSON. A tensor is a place, and how it lies in that place's memory where it is a view; a size that is a symbol
    is its place among `sizes`, which grow. `place`: gives a tensor's place and the tensor that lies there."""

    def __init__(self, sizes: list[int | torch.SymInt], whose: str, place: Callable[[Tensor], tuple[int, Tensor]]) -> None:
        self.sizes, self.whose, self.place = sizes, whose, place

    def word(self, value: Any) -> Any:
        """Raises PlanError for what has none."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt):
            self.sizes.append(value)
            return {"size": len(self.sizes) - 1}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [self.word(v) for v in value]}
        if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            return {"dict": {k: self.word(v) for k, v in value.items()}}
        if is_constant(value):
            return self.word(value.value)
        raise PlanError(f"{self.whose} is called with or keeps a {type(value).__name__}, which no graph can hold: make an op of what calls it "
                        "(torch.library.custom_op, with register_fake and register_autograd)")

    def _tensor(self, value: Tensor) -> Any:
        place, base = self.place(value)
        if value.dtype != base.dtype:
            raise PlanError(f"{self.whose} keeps a tensor's memory as another dtype, which no graph can hold")
        offset = value.storage_offset() - base.storage_offset()
        if (value.shape, value.stride(), offset) == (base.shape, base.stride(), 0):
            return {"tensor": place}
        return {"tensor": place, "lies": [self.word(n) for n in (*value.shape, *value.stride(), offset)]}


def decoded(word: Any, tensors: Sequence[Tensor], sizes: Sequence[int | torch.SymInt]) -> Any:
    """The value of `Code`'s word."""
    if not isinstance(word, Mapping):
        return word
    kind, what = next(iter(word.items()))
    if kind == "tensor":
        base, lies = tensors[what], [decoded(n, tensors, sizes) for n in word.get("lies", ())]
        n = len(lies) // 2
        return base.as_strided(lies[:n], lies[n:-1], base.storage_offset() + lies[-1]) if lies else base
    if kind == "size":
        return sizes[what]
    if kind == "dtype":
        return getattr(torch, what)
    if kind == "dict":
        return {k: decoded(v, tensors, sizes) for k, v in what.items()}
    return (tuple if kind == "tuple" else list)(decoded(v, tensors, sizes) for v in what)


class Counted:
    """Every tensor a place of its own, in the order in which they come."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, tensor: Tensor) -> tuple[int, Tensor]:
        self.n += 1
        return self.n - 1, tensor


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, fake ones too, lie in the same memory."""
    return one is other or one.untyped_storage()._cdata == other.untyped_storage()._cdata  # type: ignore[attr-defined,no-any-return]


def tensors_of(value: object) -> list[Tensor]:
    """The tensors of a value, in order, whatever holds them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
