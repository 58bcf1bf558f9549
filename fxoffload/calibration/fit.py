"""From samples to the tables of a machine file. Pure: no clock, no device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, product

Json = dict[str, object]
Cell = tuple[int, int, int]


def curve(latency_s: float, samples: Sequence[tuple[float, float]]) -> Json:
    """A Curve through (size, seconds) samples in rising order of size. Interference only ever adds seconds, so a sample that is
    slower than a larger size is taken down to it.

    `per_s` is the last sample's own rate, its latency apart. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no size could be measured in the time that was left")
    sizes = [size for size, _ in samples]
    seconds = list(accumulate((s for _, s in reversed(samples)), min))[::-1]
    latency_s = min(latency_s, seconds[0])
    moving_s = seconds[-1] - latency_s
    return {"latency_s": latency_s, "per_s": sizes[-1] / (moving_s or seconds[-1]), "sizes": sizes, "seconds": seconds}


def matrix(axes: Sequence[Sequence[int]], measured: Mapping[Cell, float]) -> Json:
    """A MatrixRate from seconds by grid indices. What is not measured grows with FLOPs from the largest measured product inside it;
    one that is slower than a larger one is taken down to it. Raises ValueError when the smallest product is missing."""
    if (0, 0, 0) not in measured:
        raise ValueError("no product could be measured in the time that was left")
    grid: dict[Cell, float] = {}
    for cell in reversed(cells(axes)):
        s = measured[cell] if cell in measured else extended_s(cell, axes, measured)
        grid[cell] = min([s, *(grid[larger] for larger in _after(cell) if larger in grid)])
    m, k, n = (list(axis) for axis in axes)
    seconds = [[[grid[i, j, l] for l in range(len(n))] for j in range(len(k))] for i in range(len(m))]
    best = max(flops(axes, cell) / s for cell, s in measured.items())
    return {"flops_per_s": best, "latency_s": grid[0, 0, 0], "m": m, "k": k, "n": n, "seconds": seconds}


def flops(axes: Sequence[Sequence[int]], cell: Cell) -> float:
    """Floating-point operations of the product at a grid index."""
    return 2.0 * math.prod(axis[i] for axis, i in zip(axes, cell))


def cells(axes: Sequence[Sequence[int]]) -> list[Cell]:
    """All grid indices, the last axis fastest."""
    m, k, n = (range(len(axis)) for axis in axes)
    return list(product(m, k, n))


def _after(cell: Cell) -> list[Cell]:
    """The indices one step on along each axis."""
    i, j, l = cell
    return [(i + 1, j, l), (i, j + 1, l), (i, j, l + 1)]


def extended_s(cell: Cell, axes: Sequence[Sequence[int]], measured: Mapping[Cell, float]) -> float:
    """Seconds at a grid index, by FLOPs from the largest measured product that is no larger in any dimension."""
    inside = [c for c in measured if all(a <= b for a, b in zip(c, cell))]
    nearest = max(inside, key=lambda c: (flops(axes, c), c))
    return measured[nearest] * flops(axes, cell) / flops(axes, nearest)
