"""Which kernel `scaled_dot_product_attention` dispatches: asked of torch where the device is, by rules where only a machine file is.

The rules follow torch's `sdp_utils.cpp` (2.11 to 2.13, cuDNN 9.16 or newer) with the switches of `torch.backends.cuda` and the
order of `torch.nn.attention.sdpa_kernel` as they are now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import PlanError
from .kernels import CUDNN, EFFICIENT, FLASH, MATH, OTHER
from .machine import Machine
from .torch_compat import attention_order, without_modes

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Call:
    """The operands of one call, of which sizes, strides and dtypes are read. `trains`: whether a gradient goes to any of them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    p: float
    causal: bool
    scale: float | None
    gqa: bool
    trains: bool

    @property
    def form(self) -> tuple[object, ...]:
        """All that a choice depends on."""
        tensors = [(t.shape, t.stride(), t.dtype) if t is not None else None for t in (self.query, self.key, self.value, self.mask)]
        return (*tensors, self.p, self.causal, self.scale, self.gqa, self.trains)


@dataclass(slots=True)
class Dispatch:
    """Names the kernel of a Call on `device`; where that is None, on a CUDA card of this compute capability (None: of any since 8.0)."""

    device: torch.device | None
    capability: Capability | None = None
    _known: dict[object, str] = field(default_factory=dict, compare=False)

    @staticmethod
    def on(device: torch.device, machine: Machine) -> Dispatch:
        """What torch does on `device`. Without a device, which is "cpu", on the machine's."""
        if device.type == "cpu" and machine.device_type == "cuda":
            return Dispatch(None, machine.compute_capability)
        return Dispatch(device)

    @staticmethod
    def of(device_type: str) -> Dispatch:
        """On any device of this type."""
        return Dispatch(None) if device_type == "cuda" else Dispatch(torch.device(device_type))

    def __call__(self, call: Call) -> str:
        key = (switches(), call.form)
        if key not in self._known:
            self._known[key] = assumed(call, self.capability) if self.device is None else dispatched(call, self.device)
        return self._known[key]


def switches() -> tuple[object, ...]:
    """The state of this process on which torch's choice depends besides the operands."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        is_deterministic(), attention_order(),
    )


def is_deterministic() -> bool:
    """Whether ops that are not deterministic are refused."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# Asking torch ---------------------------------------------------------------------------------------------------------


def dispatched(call: Call, device: torch.device) -> str:
    """The kernel that torch takes on `device`, found by tracing one call on fake tensors. Raises PlanError where it has none."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_modes())
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.set_grad_enabled(call.trains))
        stack.enter_context(FakeTensorMode())
        query, key, value, mask = (_like(t, device) for t in (call.query, call.key, call.value, call.mask))
        assert query is not None
        query.requires_grad_(call.trains and query.is_floating_point())
        seen = stack.enter_context(_Fused())
        try:
            F.scaled_dot_product_attention(query, key, value, mask, call.p, call.causal, scale=call.scale, enable_gqa=call.gqa)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise PlanError(f"scaled_dot_product_attention has no kernel on {device}: {str(error).splitlines()[0]}") from None
    return seen.kernel


def settle_order(device: torch.device) -> None:
    """Has torch decide the order in which it asks its kernels, as it does by itself at the first call on a CUDA card."""
    if device.type == "cuda":
        small = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
        dispatched(Call(small, small, small, None, 0.0, False, None, False, False), device)


class _Fused(TorchDispatchMode):
    """Notes the fused attention op that is called; none is "math"."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = MATH

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernel = fused_kernel(func.name()) or self.kernel
        return func(*args, **(kwargs or {}))


_PREFIX = "aten::_scaled_dot_product_"
_WORDS = {"flash_attention": FLASH, "cudnn_attention": CUDNN, "efficient_attention": EFFICIENT}


def fused_kernel(op: str) -> str | None:
    """The kernel of a forward op of torch ("aten::_scaled_dot_product_flash_attention_for_cpu"), None for any other op."""
    if not op.startswith(_PREFIX) or "backward" in op:
        return None
    rest = op.removeprefix(_PREFIX)
    return next((kernel for word, kernel in _WORDS.items() if rest.startswith(word)), OTHER)


def _like(operand: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if operand is None else torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device=device)


# Without a card -------------------------------------------------------------------------------------------------------

_HALF = (torch.float16, torch.bfloat16)
# Capabilities with fused kernels; those of the cards whose shared memory is too small for flash's backward of wide heads; and those
# on which torch asks cuDNN first.
_FIRST, _LAST = (8, 0), (12, 1)
_SMALL = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
_CUDNN_FIRST = (9, 10)
_TORCHS_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)


def assumed(call: Call, capability: Capability | None) -> str:
    """The kernel that torch takes on a CUDA card of this compute capability. Raises PlanError where all that could are switched off."""
    enabled = {
        FLASH: torch.backends.cuda.flash_sdp_enabled(), EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled(),
        CUDNN: torch.backends.cuda.cudnn_sdp_enabled(), MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    takes = {FLASH: _flash_takes, EFFICIENT: _efficient_takes, CUDNN: _cudnn_takes, MATH: lambda call, capability: True}
    for kernel in _order(capability):
        if enabled[kernel] and takes[kernel](call, capability or _FIRST):
            return kernel
    raise PlanError("scaled_dot_product_attention has no kernel for these operands: math, which takes all, is switched off")


def _order(capability: Capability | None) -> tuple[str, ...]:
    order = tuple(_KERNELS[number] for number in attention_order() if number in _KERNELS)
    is_default = order == _TORCHS_ORDER
    return (CUDNN, FLASH, EFFICIENT, MATH) if is_default and capability is not None and capability[0] in _CUDNN_FIRST else order


# As `torch.nn.attention.SDPBackend` numbers them.
_KERNELS = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}


def _flash_takes(call: Call, capability: Capability) -> bool:
    width = call.query.shape[-1]
    is_small = any(first <= capability <= last for first, last in _SMALL)
    trains_in_it = width <= 192 or (not call.p and width > 224)
    return (
        _is_fusable(call, capability, gqa=True) and call.mask is None and call.query.dtype in _HALF
        and width == call.key.shape[-1] == call.value.shape[-1] and width <= 256 and (not call.trains or not is_small or trains_in_it)
        and (not call.causal or call.query.shape[-2] == call.key.shape[-2])
    )


def _efficient_takes(call: Call, capability: Capability) -> bool:
    dtype, width = call.query.dtype, call.query.shape[-1]
    aligned = 8 if dtype in _HALF else 4
    return (
        _is_fusable(call, capability, gqa=False) and dtype in (*_HALF, torch.float32) and width == call.key.shape[-1]
        and width % aligned == 0 and call.value.shape[-1] % aligned == 0
    )


def _cudnn_takes(call: Call, capability: Capability) -> bool:
    widths = call.query.shape[-1], call.value.shape[-1]
    is_narrow = max(widths) <= (256 if capability == (9, 0) else 128) or (widths == (192, 128) and capability[0] == 10)
    lengths = call.query.shape[-2], call.key.shape[-2]
    return (
        _is_fusable(call, capability, gqa=True) and not is_deterministic() and call.query.dtype in _HALF and is_narrow
        and not any(width % 8 for width in widths) and (call.p * 16).is_integer() and lengths[1] != 1 and not (call.p and lengths[0] == 1)
    )


def _is_fusable(call: Call, capability: Capability, gqa: bool) -> bool:
    """What every fused kernel asks for. `gqa`: whether it takes heads that share keys and values."""
    operands = (call.query, call.key, call.value)
    heads = [t.shape[1] for t in operands]
    has_heads = len(set(heads)) == 1 or call.gqa and gqa and heads[1] == heads[2] and heads[0] % heads[1] == 0
    return (
        _FIRST <= capability <= _LAST and len({t.dtype for t in operands}) == 1 and has_heads and all(t.numel() for t in operands)
        and all(t.stride(-1) == 1 for t in operands)
    )


@contextlib.contextmanager
def only(kernel: str | None) -> Iterator[None]:
    """Inside, torch dispatches `kernel` and no other; nothing changes for None and for kernels of other vendors."""
    numbers = [number for number, word in _KERNELS.items() if word == kernel]
    if not numbers:
        yield
        return
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend(numbers[0])):
        yield
