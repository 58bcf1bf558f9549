"""Repeated blocks of a model, as canonical names tell them: the numbered modules on a node's path."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=[./])")


def block_of(name: str) -> str | None:
    """The repeated block a canonical name lies in: its module path up to the first numbered module; None outside."""
    found = _BLOCK.match(name)
    return found.group(0) if found else None


def block_position(name: str) -> int | None:
    """The number of the block a canonical name lies in, None outside of blocks."""
    block = block_of(name)
    return position_of(block) if block is not None else None


def position_of(block: str) -> int:
    """The number of a repeated block."""
    return int(block.rsplit(".", 1)[-1])
