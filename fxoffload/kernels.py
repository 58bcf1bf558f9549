"""Names of attention kernels in a plan: which calls run which, and what one of them takes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .sizes import format_bytes

FLASH, CUDNN, EFFICIENT, MATH = "flash", "cudnn", "efficient", "math"
# A kernel of another vendor, which torch calls through an interface of its own.
OTHER = "other"
FUSED = (FLASH, CUDNN, EFFICIENT)


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Attention calls that one kernel computes. `calls`: their canonical names, numbers as ranges ("layers.0-31.self_attn/attention#0").

    `kernel`: "flash", "cudnn", "efficient", "math" (several ops with values of length x length), or the name of another op.
    `saved_bytes`: what one call makes for backward, before any of it is recomputed or swapped. `scratch_bytes`: the most that one
    call holds for itself while it runs, forward or backward.
    """

    calls: str
    kernel: str
    saved_bytes: int
    scratch_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every call."""
        return expanded(self.calls)

    @property
    def layers(self) -> str:
        """The calls' modules ("layers.0-31.self_attn"); the calls themselves where they are in none."""
        return self.calls.rpartition("/")[0] or self.calls

    def __str__(self) -> str:
        return f"{self.kernel} (a call saves {format_bytes(self.saved_bytes)} and holds {format_bytes(self.scratch_bytes)} while it runs)"


def kernel_of_call(kernels: Iterable[AttentionKernel]) -> dict[str, AttentionKernel]:
    """What computes each call, by the call's name."""
    return {name: one for one in kernels for name in one.names}


def grouped(names: Sequence[str]) -> list[str]:
    """The names, those that differ in numbers between dots alone written as one, number by number from the left."""
    rows = [tuple(re.split(r"([./])", name)) for name in names]
    for position in range(max(map(len, rows), default=0)):
        merged: dict[tuple[str, ...], list[str]] = {}
        for row in rows:
            is_number = position < len(row) and row[position].isdigit()
            rest = (*row[:position], "", *row[position + 1 :]) if is_number else row
            merged.setdefault(rest, []).append(row[position] if is_number else "")
        rows = [
            (*rest[:position], _ranges([int(n) for n in numbers]), *rest[position + 1 :]) if numbers[0] else rest
            for rest, numbers in merged.items()
        ]
    return ["".join(row) for row in rows]


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


_RANGES = re.compile(r"(?<![^./])\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*(?![^./])")


def expanded(text: str) -> tuple[str, ...]:
    """The names that `grouped` wrote as `text`."""
    choices = [_numbers(found) for found in _RANGES.findall(text)]
    words = _RANGES.split(text)
    return tuple(
        "".join(itertools.chain.from_iterable(itertools.zip_longest(words, numbers, fillvalue="")))
        for numbers in itertools.product(*choices)
    )


def _numbers(ranges: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [str(n) for n in range(int(first), int(last or first) + 1)]
    return found
