"""Rates from a machine file, checked: every refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .rates import MEMORY_KINDS, AttentionRate, Contention, Curve, Host, MatrixRate, Measured, Transfers

T = TypeVar("T")
_ABSENT = object()
# The head dimension that a data sheet's attention rates are filed under; its rates hold for all.
_ANY_HEAD_DIM = 128
# Slow disks do 1e7 bytes and fast cards 1e16 FLOP per second, so what is outside these is in another unit (GB/s, TFLOP/s, ...).
_RATES = (1e5, 1e18)
# A kernel or copy that takes a second to start is one whose milliseconds or microseconds were written as seconds.
_LONGEST_START_S = 1.0


class Section:
    """A JSON object under reading: fields are taken by name, and `end` refuses what nobody took."""

    def __init__(self, raw: object, where: str, separator: str = ": ") -> None:
        if not isinstance(raw, dict):
            raise ValueError(f"{where}: must be an object, got {raw!r:.80}")
        self._left, self._where, self._separator = dict(raw), where, separator

    def path(self, name: str) -> str:
        """The field's full name, as errors say it."""
        return f"{self._where}{self._separator}{name}"

    def take(self, name: str) -> object:
        """The raw value. Raises ValueError when it is missing."""
        value = self._left.pop(name, _ABSENT)
        if value is _ABSENT:
            raise ValueError(f"{self.path(name)}: missing")
        return value

    def maybe(self, name: str, read: Callable[[str], T]) -> T | None:
        """What `read` makes of the field, None where it is null or absent."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return read(name)

    def section(self, name: str) -> Section:
        """The field as a Section of its own."""
        return Section(self.take(name), self.path(name), ".")

    def number(self, name: str, least: float = 0.0, above: bool = True, most: float = math.inf) -> float:
        """A finite number above `least` (or equal to it without `above`) and at most `most`."""
        return checked(self.take(name), self.path(name), least, above, most)

    def rate(self, name: str) -> float:
        """Bytes, FLOPs or parameters per second. Refuses what can only be in another unit."""
        value, (least, most) = self.number(name), _RATES
        if not least <= value <= most:
            limits = f"{least:g} to {most:g}"
            raise ValueError(f"{self.path(name)}: {value:g} per second is no rate in bytes, FLOPs or parameters per second ({limits})")
        return value

    def start_s(self, name: str, above: bool = True) -> float:
        """Seconds that something takes to start. Refuses what can only be in another unit."""
        value = self.number(name, above=above)
        if value > _LONGEST_START_S:
            raise ValueError(f"{self.path(name)}: {value:g} seconds are too many to start one op; is it in ms or us?")
        return value

    def whole(self, name: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self.take(name)
        if type(value) is not int or value < least:
            raise ValueError(f"{self.path(name)}: must be a whole number of at least {least}, got {value!r:.80}")
        return value

    def maybe_whole(self, name: str, least: int = 1) -> int | None:
        """A whole number of at least `least`, or None."""
        return self.maybe(name, lambda name: self.whole(name, least))

    def version(self, name: str) -> tuple[int, int]:
        """A major and a minor number as text, "9.0"."""
        value = self.take(name)
        parts = value.split(".") if isinstance(value, str) else []
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f'{self.path(name)}: must be text like "9.0", got {value!r:.80}')
        return int(parts[0]), int(parts[1])

    def text(self, name: str) -> str:
        """Text that is not empty."""
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{self.path(name)}: must be text, got {value!r:.80}")
        return value

    def flag(self, name: str) -> bool:
        """true or false."""
        value = self.take(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path(name)}: must be true or false, got {value!r:.80}")
        return value

    def lines(self, name: str) -> tuple[str, ...]:
        """A list of texts; absent: none."""
        value = self._left.pop(name, [])
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            raise ValueError(f"{self.path(name)}: must be a list of texts, got {value!r:.80}")
        return tuple(value)

    def texts(self, name: str) -> dict[str, str]:
        """Texts by name; absent: none."""
        if name not in self._left:
            return {}
        inner = self.section(name)
        return {key: inner.text(key) for key in inner.names()}

    def names(self) -> list[str]:
        """The fields that nobody has taken yet, sorted."""
        return sorted(self._left)

    def end(self) -> None:
        """Raises ValueError when a field is left."""
        if self._left:
            raise ValueError(f"{self.path(self.names()[0])}: unknown field")


def checked(value: object, where: str, least: float = 0.0, above: bool = True, most: float = math.inf) -> float:
    """`value` as a float within the limits. Raises ValueError naming `where`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (value > least if above else value >= least) or value > most:  # type: ignore[operator]
        limits = f"{'above' if above else 'of at least'} {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise ValueError(f"{where}: must be a number {limits}, got {value!r:.80}")
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Rates:
    """The parts of a Machine that a measured file states and a data sheet's file lets us derive."""

    matrix: Mapping[str, MatrixRate]
    attention: tuple[AttentionRate, ...]
    memory: Mapping[str, Curve]
    transfers: Transfers
    dispatch_s: float | None


# Measured -------------------------------------------------------------------------------------------------------------


def measured_rates(section: Section) -> Rates:
    """Rates as calibration writes them."""
    matrix, memory = _all(section.section("matrix"), _matrix), _all(section.section("memory"), _curve)
    if "fp32" not in matrix:
        raise ValueError(f"{section.path('matrix')}.fp32: missing")
    if "copy" not in memory:
        raise ValueError(f"{section.path('memory')}.copy: missing")
    unknown = sorted(set(memory) - set(MEMORY_KINDS))
    if unknown:
        raise ValueError(f"{section.path('memory')}.{unknown[0]}: unknown field")
    attention = section.maybe("attention", lambda name: tuple(_list(section.take(name), section.path(name), _attention)))
    dispatch_s = section.maybe("dispatch_s", section.start_s)
    return Rates(matrix, attention or (), memory, _transfers(section.section("transfers")), dispatch_s)


def _all(section: Section, read: Callable[[Section], T]) -> dict[str, T]:
    """Every field that is not null."""
    found = {name: section.maybe(name, lambda name: read(section.section(name))) for name in section.names()}
    return {name: value for name, value in found.items() if value is not None}


def _list(raw: object, where: str, read: Callable[[Section], T]) -> Iterable[T]:
    if not isinstance(raw, list):
        raise ValueError(f"{where}: must be a list, got {raw!r:.80}")
    return [read(Section(item, f"{where}[{i}]", ".")) for i, item in enumerate(raw)]


def _curve(section: Section) -> Curve:
    latency_s, per_s = section.start_s("latency_s", above=False), section.rate("per_s")
    sizes, seconds = section.maybe("sizes", section.take), section.maybe("seconds", section.take)
    points = _points(sizes or [], seconds or [], latency_s, section)
    section.end()
    return Curve(latency_s, per_s, points)


def _points(sizes: object, seconds: object, latency_s: float, section: Section) -> tuple[tuple[float, float], ...]:
    if not isinstance(sizes, list) or not isinstance(seconds, list) or len(sizes) != len(seconds):
        raise ValueError(f"{section.path('seconds')}: must be a list as long as sizes")
    points = [(0.0, latency_s)]
    for i, (size, s) in enumerate(zip(sizes, seconds)):
        size = checked(size, f"{section.path('sizes')}[{i}]", points[-1][0])
        points.append((size, checked(s, f"{section.path('seconds')}[{i}]", points[-1][1], above=points[-1][1] == 0)))
    return tuple(points[1:])


def _matrix(section: Section) -> MatrixRate:
    flops_per_s, latency_s = section.rate("flops_per_s"), section.start_s("latency_s", above=False)
    axes = [_axis(section.maybe(name, section.take) or [], section.path(name)) for name in ("m", "k", "n")]
    raw = section.maybe("seconds", section.take)
    seconds = _grid(raw, axes, section.path("seconds")) if raw is not None else ()
    section.end()
    return MatrixRate(flops_per_s, latency_s, axes[0], axes[1], axes[2], seconds)


def _axis(raw: object, where: str) -> tuple[int, ...]:
    if not isinstance(raw, list) or any(type(n) is not int or n < 1 for n in raw) or raw != sorted(set(raw)):
        raise ValueError(f"{where}: must be sizes in rising order, got {raw!r:.80}")
    return tuple(raw)


def _grid(raw: object, axes: list[tuple[int, ...]], where: str) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """`raw` as nested tuples of the axes' lengths, in which no step along an axis takes fewer seconds."""
    n_m, n_k, n_n = (len(axis) for axis in axes)
    seconds = tuple(tuple(_row(row, n_n, where) for row in _sized(plane, n_k, where)) for plane in _sized(raw, n_m, where))
    for i, plane in enumerate(seconds):
        for j, row in enumerate(plane):
            for l, s in enumerate(row):
                before = [seconds[i - 1][j][l] if i else 0.0, plane[j - 1][l] if j else 0.0, row[l - 1] if l else 0.0]
                if s < max(before):
                    raise ValueError(f"{where}[{i}][{j}][{l}]: a larger product takes fewer seconds, {s!r} after {max(before)!r}")
    return seconds


def _row(raw: object, length: int, where: str) -> tuple[float, ...]:
    return tuple(checked(s, f"{where}[...][{i}]") for i, s in enumerate(_sized(raw, length, where)))


def _sized(raw: object, length: int, where: str) -> list[object]:
    if not isinstance(raw, list) or len(raw) != length or not length:
        raise ValueError(f"{where}: must be lists as long as m, k and n, got {raw!r:.80}")
    return raw


def _attention(section: Section) -> AttentionRate:
    rate = AttentionRate(
        section.whole("head_dim", 1), section.text("dtype"), _curve(section.section("forward")), _curve(section.section("backward")))
    section.end()
    return rate


def _transfers(section: Section) -> Transfers:
    names = ("h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable")
    curves = {name: section.maybe(name, lambda name: _curve(section.section(name))) for name in names}
    for channel in ("h2d", "d2h"):
        if curves[f"{channel}_pinned"] is None and curves[f"{channel}_pageable"] is None:
            raise ValueError(f"{section.path(channel)}_pageable: missing")
    duplex = [section.maybe(f"duplex_{channel}_bytes_per_s", section.rate) for channel in ("h2d", "d2h")]
    section.end()
    return Transfers(curves["h2d_pinned"], curves["h2d_pageable"], curves["d2h_pinned"], curves["d2h_pageable"], duplex[0], duplex[1])


def measured(section: Section) -> Measured | None:
    """Torch, device and date of a measurement."""
    found = section.maybe("measured", section.section)
    if found is None:
        return None
    values = [found.maybe(name, found.text) for name in ("torch", "device", "date")]
    found.end()
    return Measured(*values)


def contention(section: Section) -> Contention:
    """Shares of 1 that a concurrent copy takes; all unknown where the file has none."""
    found = section.maybe("contention", section.section)
    if found is None:
        return Contention(None, None)
    values = [found.maybe(name, lambda name: found.number(name, above=False, most=1.0)) for name in ("matrix", "memory")]
    found.end()
    return Contention(*values)


def optimizers(section: Section) -> dict[str, dict[str, float]]:
    """Known rates by place and kind."""
    found = section.maybe("optimizer_params_per_s", section.section)
    result: dict[str, dict[str, float]] = {"device": {}, "host": {}}
    for place in found.names() if found is not None else []:
        if place not in result:
            raise ValueError(f"{found.path(place)}: unknown field")  # type: ignore[union-attr]
        inner = found.section(place)  # type: ignore[union-attr]
        rates = {kind: inner.maybe(kind, inner.rate) for kind in inner.names()}
        result[place] = {kind: rate for kind, rate in rates.items() if rate is not None}
    return result


def host(section: Section) -> Host:
    """Rates of the host; unknown where the file has none."""
    found = section.maybe("host", section.section)
    if found is None:
        return Host()
    values = [found.maybe(name, found.rate) for name in ("pin_bytes_per_s", "disk_read_bytes_per_s", "disk_write_bytes_per_s")]
    found.end()
    return Host(*values)


# Data sheet -----------------------------------------------------------------------------------------------------------


def datasheet_rates(section: Section) -> Rates:
    """Rates from a vendor's `peak` figures times the `prior`: the share of each that programs reach, and latencies."""
    peak, prior = section.section("peak"), section.section("prior")
    launch_s, copy_s = prior.start_s("launch_s"), prior.start_s("transfer_s")
    peaks, matrix_share = peak.section("flops_per_s"), _share(prior, "matrix")
    flops = {dtype: peaks.rate(dtype) for dtype in peaks.names()}
    if "fp32" not in flops:
        raise ValueError(f"{section.path('peak')}.flops_per_s.fp32: missing")
    device_rate, link_rate = peak.rate("device_bytes_per_s"), peak.rate("link_bytes_per_s")
    shares = prior.section("memory")
    memory = {kind: Curve(launch_s, device_rate * _share(shares, kind)) for kind in MEMORY_KINDS}
    fastest = max(flops, key=lambda dtype: (flops[dtype], dtype))
    passes = [Curve(launch_s, flops[fastest] * _share(prior, name)) for name in ("attention_forward", "attention_backward")]
    pinned, pageable = (Curve(copy_s, link_rate * _share(prior, name)) for name in ("link_pinned", "link_pageable"))
    dispatch_s = prior.start_s("dispatch_s")
    for read in (peaks, peak, shares, prior):
        read.end()
    matrix = {dtype: MatrixRate(rate * matrix_share, launch_s) for dtype, rate in flops.items()}
    attention = (AttentionRate(_ANY_HEAD_DIM, fastest, passes[0], passes[1]),)
    return Rates(matrix, attention, memory, Transfers(pinned, pageable, pinned, pageable), dispatch_s)


def _share(section: Section, name: str) -> float:
    return section.number(name, most=1.0)
