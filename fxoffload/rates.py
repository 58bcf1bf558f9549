"""The rates that a Machine is made of: seconds of copies, products and ops as functions of their size."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import product

from .effects import Channel, Tier

# Kinds of ops that are bound by memory, each with its own Curve over the bytes it reads and writes.
MEMORY_KINDS = ("copy", "widen", "pointwise", "binary", "mixed", "strided", "reduction", "softmax", "gather", "scatter")
# What stands for a kind that a machine file does not have: files of before know no kernels that convert or step through memory.
INSTEAD = {"widen": "copy", "mixed": "binary", "strided": "binary"}


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds against a size in bytes (FLOPs for attention): `latency_s` at size 0, lines through the measured `points`, and
    `per_s` beyond the last of them. With no points it is Hockney's model, latency + size / rate."""

    latency_s: float
    per_s: float
    points: tuple[tuple[float, float], ...] = ()

    def seconds(self, size: float) -> float:
        """Seconds at `size`; never falls as the size grows."""
        i = bisect_left(self.points, (size,))
        left, left_s = self.points[i - 1] if i else (0.0, self.latency_s)
        if i == len(self.points):
            return left_s + (size - left) / self.per_s
        right, right_s = self.points[i]
        return left_s + (right_s - left_s) * (size - left) / (right - left)

    def least_s_per_unit(self, most: float) -> float:
        """The fewest seconds per unit of size that any size up to `most` takes. Between two points seconds per unit only rise or fall."""
        return min(self.seconds(size) / size for size in (*(x for x, _ in self.points if 0 < x < most), most))


@dataclass(frozen=True, slots=True)
class MatrixRate:
    """Seconds of a product of (m, k) and (k, n) in one dtype: `seconds[i][j][l]` at `m[i]`, `k[j]`, `n[l]`, which are sorted.

    Between the grid's sizes log seconds are interpolated over log sizes, below it the smallest size stands, beyond it seconds grow
    with FLOPs. With no grid: `latency_s` + FLOPs / `flops_per_s`, the best rate.
    """

    flops_per_s: float
    latency_s: float
    m: tuple[int, ...] = ()
    k: tuple[int, ...] = ()
    n: tuple[int, ...] = ()
    seconds: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def product_s(self, m: int, k: int, n: int) -> float:
        """Seconds of one product; never falls as a size grows."""
        if not self.seconds:
            return self.latency_s + 2 * m * k * n / self.flops_per_s
        sizes, axes = (m, k, n), (self.m, self.k, self.n)
        ends = [_neighbours(axis, size) for axis, size in zip(axes, sizes)]
        log_s = sum(
            a_weight * b_weight * c_weight * math.log(self.seconds[a][b][c])
            for (a, a_weight), (b, b_weight), (c, c_weight) in product(*ends)
        )
        return math.exp(log_s) * math.prod(max(1.0, size / axis[-1]) for axis, size in zip(axes, sizes))


def _neighbours(axis: tuple[int, ...], size: int) -> tuple[tuple[int, float], ...]:
    """The grid indices around `size` and their weights, which sum to 1."""
    right = bisect_right(axis, size)
    if right == 0:
        return ((0, 1.0),)
    if right == len(axis):
        return ((right - 1, 1.0),)
    weight = math.log(size / axis[right - 1]) / math.log(axis[right] / axis[right - 1])
    return ((right - 1, 1.0 - weight), (right, weight))


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Fused attention at one head dimension and dtype, over the FLOPs it does (half of all where causal)."""

    head_dim: int
    dtype: str
    forward: Curve
    backward: Curve


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies between host and device by channel and the host's tier; `duplex_*`: both directions at once, pinned."""

    h2d_pinned: Curve | None
    h2d_pageable: Curve | None
    d2h_pinned: Curve | None
    d2h_pageable: Curve | None
    duplex_h2d_bytes_per_s: float | None = None
    duplex_d2h_bytes_per_s: float | None = None

    def curve(self, channel: Channel, tier: Tier) -> Curve:
        """The Curve for `tier`'s memory, where only the other is known that one. Raises KeyError for other channels."""
        pinned, pageable = {
            Channel.H2D: (self.h2d_pinned, self.h2d_pageable), Channel.D2H: (self.d2h_pinned, self.d2h_pageable),
        }[channel]
        found = pinned or pageable if tier is Tier.PINNED else pageable or pinned
        assert found is not None  # machine_file.py refuses a machine with neither
        return found


@dataclass(frozen=True, slots=True)
class Contention:
    """Seconds of compute that one second of a concurrent copy costs: of a matrix product, of an op bound by memory."""

    matrix: float | None
    memory: float | None


@dataclass(frozen=True, slots=True)
class Host:
    """`pin_bytes_per_s`: page-locking. Disk rates: of files in the folder that calibration was given."""

    pin_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """With what and when the numbers were measured."""

    torch: str | None
    device: str | None
    date: str | None
