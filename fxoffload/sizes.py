"""Byte sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes of `size`: an int >= 0, or text such as "24GiB", "1.5 GB", "800m". Raises ValueError naming `name`."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"{name}: expected bytes as int or text like '24GiB', got {size!r}")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"{name}: must not be negative, got {size}")
        return size
    match = _SIZE.match(size)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS or (unit in ("", "b") and "." in match.group(1)):  # half a byte is a unit forgotten
        raise ValueError(f"{name}: cannot read {size!r} as a size; write bytes or text like '24GiB', '800MiB', '1.5GB'")
    return int(float(match.group(1)) * _UNITS[unit])


def parse_budget(size: int | str, name: str) -> int:
    """As `parse_bytes`, of more than 0 bytes."""
    n_bytes = parse_bytes(size, name)
    if n_bytes == 0:
        raise ValueError(f"{name}: must be more than 0 bytes")
    return n_bytes


def format_bytes(n_bytes: int | None) -> str:
    """`n_bytes` for people: "1.50 GiB"; "?" for None."""
    if n_bytes is None:
        return "?"
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
