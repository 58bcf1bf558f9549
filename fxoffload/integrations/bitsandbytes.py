"""bitsandbytes layers: their packed weights are offloaded and gathered like any frozen parameter, bit for bit.

A packed weight means nothing without its state. In 4 bits: one scale per block (`absmax`, itself packed under double quantization)
and small tables; in 8 bits: one scale per row (`SCB`). The scales grow with the weight, so they are gathered beside it; the tables
stay on the device like buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import neutral, ops

META = torch.device("meta")
_TABLES = ("code", "offset", "state2.absmax", "state2.code")


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A tensor in the state of a packed weight, under a name like a parameter's."""

    name: str
    holder: Any
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself."""
        return getattr(self.holder, self.attribute)  # type: ignore[no-any-return]


def quantizer_for(quantization: Any, stored: Any = None) -> Any:
    """Transformers' quantizer for a BitsAndBytesConfig, None without one. Raises ValueError for any other quantization.

    `stored`: the quantization that a model folder's config records. It wins over the caller's, as in transformers.
    """
    from transformers.quantizers import AutoHfQuantizer

    chosen = quantization if stored is None else AutoHfQuantizer.merge_quantization_configs(stored, quantization)
    if chosen is None:
        return None
    if not (getattr(chosen, "load_in_4bit", False) or getattr(chosen, "load_in_8bit", False)):
        kind = getattr(chosen, "quant_method", None) or type(chosen).__name__
        raise ValueError(f"quantization: only bitsandbytes' 4-bit and 8-bit weights can be planned, not {kind}")
    if chosen.load_in_8bit and chosen.llm_int8_has_fp16_weight:
        raise ValueError("quantization: llm_int8_has_fp16_weight keeps weights that are quantized anew in every forward; leave it out")
    return AutoHfQuantizer.from_config(chosen, pre_quantized=stored is not None)


def pack_without_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every replaced layer of a model on the meta device the packed weight and the state that weights of `dtype` would get.

    bitsandbytes itself says what they look like: its quantization runs on meta tensors.
    """
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    # bitsandbytes keeps the table of 8-bit codes of its first call for all later ones: that call must not be on meta.
    functional.quantize_blockwise(torch.zeros(1))
    for module in model.modules():
        if isinstance(module, (Linear4bit, Linear8bitLt)):
            plain = torch.empty(module.out_features, module.in_features, dtype=dtype, device=META)
            (_pack_4bit if isinstance(module, Linear4bit) else _pack_8bit)(module, plain)
            if module.bias is not None:
                module.bias.requires_grad_()  # as for every unpacked weight that is loaded


def _pack_4bit(layer: Any, plain: torch.Tensor) -> None:
    from bitsandbytes import functional
    from bitsandbytes.nn import Params4bit

    old = layer.weight
    packed, layer.quant_state = functional.quantize_4bit(
        plain, blocksize=old.blocksize, compress_statistics=old.compress_statistics, quant_type=old.quant_type,
        quant_storage=old.quant_storage)
    layer.weight = Params4bit(packed, **{**old.__dict__, "quant_state": layer.quant_state, "bnb_quantized": True})


def _pack_8bit(layer: Any, plain: torch.Tensor) -> None:
    from bitsandbytes import functional
    from bitsandbytes.nn import Int8Params

    packed, scale, _ = functional.int8_vectorwise_quant(plain.to(torch.float16))
    layer.weight = Int8Params(packed, requires_grad=False, CB=packed, SCB=scale)


def scales(model: nn.Module, parameters: Sequence[tuple[str, torch.Tensor]]) -> Iterator[StateTensor]:
    """The block scales of every packed weight: frozen parameters in all but name. `parameters`: the model's, by name."""
    for name, state in _states(parameters):
        yield StateTensor(f"{name}.absmax", state, "absmax")
    if any("SCB" in parameter.__dict__ for _, parameter in parameters):
        for name, layer in _layers_8bit(model):
            yield StateTensor(f"{name}.weight.SCB", layer.state, "SCB")


def tables(model: nn.Module) -> Iterator[StateTensor]:
    """The small tensors of every packed weight's state: buffers in all but name. Weights may share one."""
    for name, state in _states(model.named_parameters()):
        for path in _TABLES:
            *inner, attribute = path.split(".")
            holder = getattr(state, inner[0], None) if inner else state
            if isinstance(getattr(holder, attribute, None), torch.Tensor):
                yield StateTensor(f"{name}.{path}", holder, attribute)


def move_tables(model: nn.Module, device: torch.device) -> bool:
    """Puts every table on `device`; what weights share stays shared. True when any moved."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for state in list(tables(model)):
        tensor = state.tensor
        if tensor.device not in (device, META):
            state.holder.__dict__[state.attribute] = moved.setdefault(id(tensor), (tensor, tensor.to(device)))[1]
    return bool(moved)


def _states(parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    for name, parameter in parameters:
        state = parameter.__dict__.get("quant_state")
        if state is not None:
            yield name, state


def follow_weights(model: nn.Module) -> None:
    """8-bit layers keep a second reference to their weight's bytes: it is where the weight is now, not where it was."""
    for _, layer in _layers_8bit(model):
        layer.state.CB = layer.weight.data


def _layers_8bit(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with a packed 8-bit weight. The scale, which the first forward moves from the weight to the layer, is moved now."""
    for name, module in model.named_modules():
        if _is_packed_8bit(module):
            if module._parameters["weight"].CB is not None:  # type: ignore[union-attr]
                module.init_8bit_state()  # type: ignore[operator]
            yield name, module


def _is_packed_8bit(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and "SCB" in weight.__dict__ and weight.dtype == torch.int8 and hasattr(module, "init_8bit_state")


def overrides(module: nn.Module, home: str) -> dict[str, Any]:
    """Attributes of the class that stands for `module`'s under capture. `home`: where the module keeps its Home."""
    weight = module._parameters.get("weight")
    if weight is not None and weight.__dict__.get("quant_state") is not None:
        return {"forward": _forward_4bit(type(module), home)}
    if _is_packed_8bit(module):
        return {"forward": _forward_8bit(type(module), home)}
    return {}


def _forward_8bit(cls: type[nn.Module], home_name: str) -> Callable[..., torch.Tensor]:
    """bitsandbytes' own forward, through the neutral op: its kernels differ by device, and one counts outliers in the values."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        home = self.__dict__[home_name]
        if not home.active:
            return cls.forward(self, x)  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.to(x.dtype)
        scale = _gathered(self.state.SCB, home.device)
        return neutral.linear_8bit(x, self.weight, scale, bias, float(self.state.threshold), self.training)  # type: ignore[no-any-return]

    return forward


def _forward_4bit(cls: type[nn.Module], home_name: str) -> Callable[..., torch.Tensor]:
    """bitsandbytes' own forward less what it writes into the module: the gathered weight is a plain tensor without a state."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        home = self.__dict__[home_name]
        if not home.active:
            return cls.forward(self, x)  # type: ignore[no-any-return]
        state = self._parameters["weight"].quant_state
        dtype = self.compute_dtype if self.compute_type_is_set else x.dtype
        inputs = x if dtype is None else x.to(dtype)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        made = _matmul_4bit(inputs, self.weight, bias, _tensors_of(state, home.device), *_constants_of(state))
        return made.to(x.dtype)  # type: ignore[no-any-return]

    return forward


def _tensors_of(state: Any, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """absmax, code and offset of a state, then those of the one that its absmax is packed with. The scales grow with the weight: gathered.

    Spelled out, because Dynamo traces this once per layer.
    """
    absmax, second = _gathered(state.absmax, device), state.state2
    if device.type == "cpu":
        own = (absmax, _gathered(state.code, device), _gathered(state.offset, device))
        if second is None:
            return own
        return (*own, _gathered(second.absmax, device), _gathered(second.code, device), _gathered(second.offset, device))
    if second is None:
        return absmax, state.code, state.offset
    return absmax, state.code, state.offset, second.absmax, second.code, second.offset


def _constants_of(state: Any) -> tuple[Any, ...]:
    """What a state holds beside tensors, then the same of the one that its absmax is packed with."""
    own = (state.shape, state.blocksize, state.quant_type, state.dtype)
    second = state.state2
    return own if second is None else (*own, second.shape, second.blocksize, second.quant_type, second.dtype)


def _state_of(cls: type, tensors: tuple[torch.Tensor | None, ...], constants: tuple[Any, ...]) -> Any:
    """The state that `_tensors_of` and `_constants_of` took apart."""
    if not tensors:
        return None
    (absmax, code, offset), (shape, blocksize, quant_type, dtype) = tensors[:3], constants[:4]
    return cls(absmax=absmax, shape=shape, code=code, blocksize=blocksize, quant_type=quant_type, dtype=dtype,
               offset=offset, state2=_state_of(cls, tensors[3:], constants[4:]))


@torch._dynamo.allow_in_graph
def _matmul_4bit(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tensors: tuple[torch.Tensor | None, ...], *constants: Any,
) -> torch.Tensor:
    """bitsandbytes' product. Dynamo leaves it whole, its ops and its backward are traced after it: a state is no value of a graph."""
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import QuantState

    return matmul_4bit(inputs, weight, bias=bias, quant_state=_state_of(QuantState, tensors, constants))  # type: ignore[no-any-return]


def _gathered(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    if tensor is None or tensor.device == device and device.type != "cpu":
        return tensor
    return ops.gather(tensor, device)  # type: ignore[no-any-return]
