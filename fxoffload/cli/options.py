"""Option values that several commands read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from fxoffload.training.config import LoraOptions

_SWITCHES = {"true": True, "false": False}


def parse_lora(text: str) -> LoraOptions:
    """The options in "r=16,alpha=32,targets=q_proj+v_proj,dora=true". Raises ValueError naming the key."""
    from fxoffload.training import schema
    from fxoffload.training.config import LoraOptions

    values: dict[str, object] = {}
    for item in text.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals:
            raise ValueError(f"--lora: expected key=value, got {item.strip()!r}; for example r=16,alpha=32")
        values[key] = value.split("+") if "+" in value else parse_scalar(value)
    return schema.read(LoraOptions, values, "--lora")


class Numbers(tuple[int, ...]):
    """Positive numbers, as many as were given."""


def parse_numbers(text: str) -> Numbers:
    """The positive numbers in "1,2,4"; for typer, which names the option. Raises BadParameter with the one that is none."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not word.isdecimal() or int(word) < 1]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is not a positive number")
    return Numbers(map(int, words))


def parse_scalar(text: str) -> int | float | bool | str:
    """`text` as the int, float or bool that it spells, else itself."""
    if text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
