"""State dictionaries as JSON plus a table of tensors, so that no checkpoint needs pickle."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]
_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


def encode(value: object, tensors: Tensors, name: str) -> object:
    """`value` as JSON; its tensors are added to `tensors` under dotted names that start with `name`.

    Raises TypeError naming the entry for a type that JSON cannot hold exactly.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode(item, tensors, f"{name}.{i}") for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return _encode_dict(value, tensors, name)
    raise TypeError(f"{name}: a {type(value).__name__} cannot be saved in a checkpoint without pickle")


def decode(value: object, tensors: Tensors) -> object:
    """What `encode` was given; tensors are copies that own their memory."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]].clone()
    if _TUPLE in value:
        return tuple(decode(item, tensors) for item in value[_TUPLE])
    if _ITEMS in value:
        return {key: decode(item, tensors) for key, item in value[_ITEMS]}
    return {key: decode(item, tensors) for key, item in value.items()}


def for_safetensors(tensors: Tensors) -> Tensors:
    """The tensors on the CPU, contiguous, no two sharing memory, as safetensors.torch.save_file wants them."""
    seen: set[int] = set()
    result: Tensors = {}
    for name, tensor in tensors.items():
        plain = tensor.cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        result[name] = plain.clone() if address in seen else plain
        seen.add(address)
    return result


def _encode_dict(value: dict[object, object], tensors: Tensors, name: str) -> object:
    items = [(key, encode(item, tensors, f"{name}.{key}")) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("__") for key in value):
        return dict(items)
    return {_ITEMS: [list(item) for item in items]}  # JSON would turn an optimizer's int keys into text
