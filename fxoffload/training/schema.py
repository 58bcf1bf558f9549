"""Plain mappings (from YAML) to frozen dataclasses, with errors that name the key and the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from pathlib import Path
from typing import Literal, TypeVar, Union

T = TypeVar("T")


def read(cls: type[T], mapping: object, where: str = "") -> T:
    """An instance of the dataclass `cls`; `where` is the dotted key of `mapping`.

    Raises ValueError, one line, for an unknown or missing key, a wrong type, or what `__post_init__` of a dataclass refuses.
    """
    if not isinstance(mapping, dict):
        raise ValueError(f"{where or 'config'}: expected a mapping of keys, got {_show(mapping)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise ValueError(f"{_join(where, key)}: unknown key; {suggest(key, tuple(fields))}")
    hints = typing.get_type_hints(cls)
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in mapping.items()}
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{_join(where, name)}: missing{_hint(field)}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(_locate(where, str(error), tuple(fields))) from error


def suggest(word: object, known: tuple[str, ...]) -> str:
    """Text that names the entry of `known` nearest to `word`, or all of them."""
    nearest = difflib.get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"


def _convert(hint: object, value: object, where: str) -> object:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(args, value, where)
    if origin is Literal:
        return _convert_choice(args, value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where)
    if origin is dict:
        return _convert_options(value, where)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast("type[object]", hint), value, where)
    return _convert_scalar(hint, value, where)


def _convert_union(args: tuple[object, ...], value: object, where: str) -> object:
    if value is None and type(None) in args:
        return None
    rest = [arg for arg in args if arg is not type(None)]
    if len(rest) == 1:
        return _convert(rest[0], value, where)
    for arg in rest:  # exact types first, so that the int 8 does not become the text "8"
        if isinstance(arg, type) and type(value) is arg:
            return value
    for arg in rest:
        if typing.get_origin(arg) is tuple and isinstance(value, list):
            return _convert(arg, value, where)
    raise ValueError(f"{where}: expected {' or '.join(_name(arg) for arg in rest)}, got {_show(value)}")


def _convert_choice(choices: tuple[object, ...], value: object, where: str) -> object:
    if value in choices:
        return value
    raise ValueError(f"{where}: {_show(value)} is not a choice; {suggest(value, tuple(str(c) for c in choices))}")


def _convert_tuple(args: tuple[object, ...], value: object, where: str) -> object:
    items = value if isinstance(value, list) else [value]
    if args[-1] is not Ellipsis and len(items) != len(args):
        raise ValueError(f"{where}: expected {len(args)} values, got {_show(value)}")
    return tuple(_convert(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))


def _convert_options(value: object, where: str) -> object:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise ValueError(f"{where}: expected a mapping of options, got {_show(value)}")


def _convert_scalar(hint: object, value: object, where: str) -> object:
    if hint is Path and isinstance(value, str) and value:
        return Path(value)
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        return _convert_float(value, where)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ValueError(f"{where}: expected {_name(hint)}, got {_show(value)}")


def _convert_float(value: int | float | str, where: str) -> float:
    try:
        return float(value)  # text too: YAML 1.1 reads 1e-4 as text
    except ValueError:
        raise ValueError(f"{where}: expected a number, got {_show(value)}") from None


def _name(hint: object) -> str:
    names = {Path: "a path", int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        return "a list"
    return names.get(typing.cast(type, hint), str(hint))


def _hint(field: dataclasses.Field[object]) -> str:
    return f"; {field.metadata['help']}" if "help" in field.metadata else ""


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _locate(where: str, message: str, names: tuple[str, ...]) -> str:
    """A refusal of `__post_init__` that starts with a field's name continues the dotted key; others follow it."""
    starts_with_name = message.partition(":")[0].partition(".")[0] in names
    return f"{where}{'.' if starts_with_name else ': '}{message}" if where else message


def _show(value: object) -> str:
    return "nothing" if value is None else repr(value)[:80]
