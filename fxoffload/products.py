"""`fxo.add_product`: one term of a sum of matrix products that is kept in fp32, whatever is multiplied.

CUDA multiplies into fp32 as it accumulates (ATen's `mm.dtype`); elsewhere the operands are converted first, which gives the same up to
the order of sums.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("fxo", "FRAGMENT")


def _add_product(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    wide = sum_dtype(left.dtype)
    if left.dtype is not wide and left.device.type == "cuda":
        product = torch.mm(left, right, out_dtype=wide)
    else:
        product = torch.mm(left.to(wide), right.to(wide))
    return product if total is None else product.add_(total)


def _fake_add_product(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=sum_dtype(left.dtype))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of this one are summed in."""
    return dtype if dtype is torch.float64 else torch.float32


def converted_bytes(left: torch.Tensor, right: torch.Tensor, *_: object) -> int:
    """Bytes of the operands in fp32, where the device cannot multiply them into fp32 as they are."""
    return 0 if left.dtype in (torch.float32, torch.float64) else 4 * (left.numel() + right.numel())


_LIBRARY.define("add_product(Tensor left, Tensor right, Tensor? total) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("add_product", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake("fxo::add_product", _fake_add_product, lib=_LIBRARY)
add_product: torch._ops.OpOverload = torch.ops.fxo.add_product.default
