"""`evaluator.cpp` and `derived.cpp`, built on first use: the scan, its overlap, its buckets, its seconds and what is kept of it, on tables of numbers.

What it gives is what the functions of spill.py, overlap.py, buckets.py and fill.py give, bit for bit, in a fraction of the time. It is built by the
C++ compiler that Inductor needs too, once per machine. Where there is none those functions run, and that is said.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .layout import ALIGNMENT
from .liveness import Storage
from .machine import COPY_ISSUES
from .numbers import Doubles, Longs, Mask, Numbers, Rows, ints

if TYPE_CHECKING:
    from .overlap import Rates
    from .spill import Bytes, Ground, Schedule

log = logging.getLogger("fxoffload")

_SOURCES = (Path(__file__).with_name("evaluator.cpp"), Path(__file__).with_name("derived.cpp"))
_OPTIONS = ("-shared", "-fPIC", "-std=c++17", "-O3", "-ffp-contract=off")
# Set to anything, it leaves the evaluator in Python: for whoever compares the two.
SWITCH = "FXOFFLOAD_PYTHON_EVALUATOR"


def library() -> ctypes.CDLL | None:
    """The evaluator; None where nothing can build it."""
    return None if os.environ.get(SWITCH) else _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = Path.home() / ".cache" / "fxoffload" / f"evaluator-{_key()}.so"
    try:
        if not path.exists():
            _build(path)
        found = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        told = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        log.warning("plans of large models take several times as long, and are the same: the evaluator in C++ cannot be built (%s)", told)
        return None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _key() -> str:
    told = "\0".join((*[source.read_text() for source in _SOURCES], *_OPTIONS, platform.machine(), platform.system()))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def _build(path: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C++ compiler was found")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, then moved: a build that is killed or runs twice at once never leaves half a library.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        subprocess.run([compiler, *_OPTIONS, *map(str, _SOURCES), "-o", str(built)], check=True, capture_output=True, text=True)
        os.replace(built, path)


_POINTER, _LONG, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "fxo_trouble": (ctypes.c_char_p, []),
    "fxo_scan": (_POINTER, [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT]),
    "fxo_overlap": (_POINTER, [_POINTER, _POINTER, _POINTER, _LONG, _DOUBLE, _POINTER]),
    "fxo_bucket": (_POINTER, [_POINTER, _POINTER, _LONG, _DOUBLE, _POINTER]),
    "fxo_buckets": (_LONG, [_POINTER] * 4),
    "fxo_seconds": (_DOUBLE, [_POINTER] * 4),
    "fxo_stalls": (_LONG, [_POINTER] * 6),
    "fxo_just_in_time": (_POINTER, [_POINTER] * 4 + [_DOUBLE] * 2),
    "fxo_used": (_INT, [_POINTER] * 3),
    "fxo_fill": (_POINTER, [_POINTER] * 4 + [_LONG] * 2 + [_POINTER] * 2 + [_LONG] + [_POINTER] * 2 + [_INT] + [_POINTER] * 2),
    "fxo_least": (_LONG, [_POINTER] * 4),
    "fxo_gaps": (_LONG, [_POINTER]),
    "fxo_pack": (None, [_POINTER] * 6 + [_LONG, _DOUBLE] + [_POINTER] * 2),
    "fxo_lay_out": (_POINTER, [_POINTER] * 4 + [_LONG]),
    "fxo_make": (_POINTER, [_LONG, _POINTER] * 4),
    "fxo_describe": (None, [_POINTER] * 3),
    "fxo_copy_out": (None, [_POINTER] * 6),
    "fxo_drop": (None, [_POINTER]),
    "fxo_derive": (_POINTER, [_POINTER] * 3),
    "fxo_derive_trouble": (ctypes.c_char_p, []),
    "fxo_derive_draws": (_INT, [_POINTER]),
    "fxo_derive_drop": (None, [_POINTER]),
}


class RowsRead(ctypes.Structure):
    _fields_ = (("at", _POINTER), ("of", _POINTER))


class _Table(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("n_events", "n_storages", "border", "graph_border", "before_border", "border_event", "never", "far", "crumbs", "alignment")),
        *((name, _POINTER) for name in ("index", "own_bytes", "workspace_bytes", "read_bytes")),
        *((name, RowsRead) for name in ("makes", "reads", "touches", "leaves", "uses")),
        *((name, _POINTER) for name in ("next_use", "n_bytes", "rank", "tier", "made_by", "is_input", "is_tangent", "returned", "mergeable")),
    )


class _Seconds(ctypes.Structure):
    _fields_ = (*((name, _POINTER) for name in ("event_s", "load_s", "spill_s", "sink_s", "sinks")), ("dispatch_s", _DOUBLE), ("copy_issues", _DOUBLE))


@dataclass(slots=True)
class Evaluated:
    """A scan that the evaluator holds, at `address`, until this is gone. `counts`: of its loads, spills, sinks, stays, and of what is live at the worst
    event; `numbers`: bytes and event of the peak, bytes and event of the shortfall."""

    table: Table
    address: int
    counts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        counts, numbers = (ctypes.c_int64 * 5)(), (ctypes.c_int64 * 4)()
        self.table.core.fxo_describe(self.address, counts, numbers)
        self.counts, self.numbers = tuple(counts), tuple(numbers)

    def __del__(self) -> None:
        self.table.core.fxo_drop(self.address)

    def columns(self) -> tuple[list[list[int]], ...]:
        """Loads, spills, sinks, stays, what is live at the worst event: rows of numbers."""
        n_loads, n_spills, n_sinks, n_stays, n_live = self.counts
        shapes = (n_loads, 4), (n_spills, 3), (n_sinks, 2), (n_stays, 3), (n_live, 1)
        columns = [np.empty(shape, dtype=np.int32) for shape in shapes]
        self.table.core.fxo_copy_out(self.address, *(column.ctypes.data for column in columns))
        return tuple(column.tolist() for column in columns)


@dataclass(slots=True)
class _Timed:
    """The seconds of some Rates as the evaluator reads them; what its pointers point to."""

    rates: Rates
    held: tuple[Any, ...]
    seconds: _Seconds


class Table:
    """A Schedule as the evaluator reads it. `storages`: its Storages by number; `number`: of each; `index`: node index of each event."""

    def __init__(self, core: ctypes.CDLL, schedule: Schedule, numbers: Numbers, **others: int) -> None:
        """`others`: numbers of the evaluator's Table that only who calls this knows."""
        self.core, self.schedule, self.numbers = core, schedule, numbers
        self.storages, self.n_bytes = numbers.storages, numbers.n_bytes
        self.number = {storage: i for i, storage in enumerate(self.storages)}
        self.index: list[int] = numbers.index.tolist()
        told: dict[str, Any] = {one.name: getattr(numbers, one.name) for one in fields(numbers) if one.name != "storages"}
        table = _Table(n_events=len(self.index), n_storages=len(self.storages), alignment=ALIGNMENT, **others, **{
            name: one if isinstance(one, int) else rows_of(one) if isinstance(one, Rows) else one.ctypes.data for name, one in told.items()})
        self._table, self.address = table, ctypes.addressof(table)
        self._named: dict[Collection[str], Mask] = {}
        self._timed: dict[int, _Timed] = {}
        self._copied: dict[Callable[[Storage], float], Doubles] = {}

    def of(self, storages: Iterable[Storage]) -> Mask:
        """The mask of some of the Storages."""
        found = np.zeros(len(self.storages), dtype=np.uint8)
        found[[self.number[storage] for storage in storages]] = 1
        return found

    def named(self, names: frozenset[str]) -> Mask:
        """The mask of the Storages of those names."""
        if names not in self._named:
            found = np.zeros(len(self.storages), dtype=np.uint8)
            found[[self._by_name[name] for name in names if name in self._by_name] if names else []] = 1
            self._named[names] = found
        return self._named[names]

    @functools.cached_property
    def _by_name(self) -> dict[str, int]:
        return {storage.name: i for i, storage in enumerate(self.storages)}

    def scan(self, ground: Ground, capacity_bytes: int, kept: frozenset[str], swapped: frozenset[str], to_the_end: bool) -> Evaluated:
        """What Spiller finds."""
        fixed, staying = self.of(ground.fixed - self.schedule.fixed), self.named(kept)
        leaving = self.named(swapped)
        return self._made(self.core.fxo_scan(
            self.address, fixed.ctypes.data, capacity_bytes, staying.ctypes.data, leaving.ctypes.data if leaving.any() else None, to_the_end))

    def overlapped(self, found: Evaluated, capacity_bytes: int, rates: Rates, slack: float) -> tuple[Evaluated, Bytes]:
        """What `overlap.overlapped` gives."""
        used = self._bytes()
        return self._made(self.core.fxo_overlap(self.address, self._seconds(rates), found.address, capacity_bytes, slack, used.ctypes.data)), used

    def bucketed(self, found: Evaluated, used: Bytes, limit_bytes: int, held_up: float) -> tuple[Evaluated, Bytes]:
        """What `buckets.bucketed` gives."""
        used = used.copy()
        return self._made(self.core.fxo_bucket(self.address, found.address, limit_bytes, held_up, used.ctypes.data)), used

    def seconds(self, found: Evaluated, rates: Rates) -> float:
        """What `overlap.schedule_s` gives."""
        merged = self._merged(found, rates)
        seconds: float = self.core.fxo_seconds(self.address, self._seconds(rates), found.address, merged.ctypes.data)
        if seconds < 0:
            raise self._error()
        return seconds

    def stalls_s(self, found: Evaluated, rates: Rates) -> dict[Storage, float]:
        """What `overlap.stalls_s` gives."""
        storages, seconds = np.empty(len(self.storages), dtype=np.int32), np.empty(len(self.storages), dtype=np.float64)
        merged = self._merged(found, rates)
        n = self.core.fxo_stalls(
            self.address, self._seconds(rates), found.address, merged.ctypes.data, storages.ctypes.data, seconds.ctypes.data)
        if n < 0:
            raise self._error()
        return {self.storages[i]: s for i, s in zip(storages[:n].tolist(), seconds[:n].tolist(), strict=True)}

    def just_in_time(self, found: Evaluated, rates: Rates, ahead_s: float, faster: float) -> Evaluated:
        """The scan with the starts that `overlap._JustInTime` finds."""
        merged = self._merged(found, rates)
        return self._made(self.core.fxo_just_in_time(self.address, self._seconds(rates), found.address, merged.ctypes.data, ahead_s, faster))

    def used_bytes(self, found: Evaluated) -> Bytes:
        """What `overlap.used_bytes` gives."""
        used = self._bytes()
        if not self.core.fxo_used(self.address, found.address, used.ctypes.data):
            raise self._error()
        return used

    def filled(self, found: Evaluated, used: Bytes, rates: Rates, capacity_bytes: int, most_bytes: int, may_reside: frozenset[str],
               must_leave: frozenset[str], tables: Sequence[tuple[Storage, float]], from_buckets: bool) -> tuple[Evaluated | None, frozenset[str], int]:
        """What `fill.filled` gives; no scan where nothing is kept."""
        resident, peak = np.zeros(len(self.storages), dtype=np.uint8), ctypes.c_int64(0)
        free, leaving = self.named(may_reside), self.named(must_leave)
        numbers, saved_s = ints(self.number[storage] for storage, _ in tables), np.array([seconds for _, seconds in tables], dtype=np.float64)
        address = self.core.fxo_fill(
            self.address, self._seconds(rates), found.address, used.ctypes.data, capacity_bytes, most_bytes, free.ctypes.data, leaving.ctypes.data,
            len(tables), numbers.ctypes.data, saved_s.ctypes.data, from_buckets, resident.ctypes.data, ctypes.addressof(peak))
        if address is None and self.core.fxo_trouble():
            raise self._error()
        names = frozenset(self.storages[i].name for i in resident.nonzero()[0].tolist())
        return None if address is None else Evaluated(self, address), names, peak.value

    def least_bytes(self, ground: Ground, kept: frozenset[str], spared: Bytes | None) -> int:
        """What `Schedule.least_bytes` gives, beside the fixed inputs."""
        fixed, staying = self.of(ground.fixed - self.schedule.fixed), self.named(kept)
        n_bytes: int = self.core.fxo_least(self.address, fixed.ctypes.data, staying.ctypes.data, None if spared is None else spared.ctypes.data)
        return n_bytes

    def packed(self, ground: Ground, rates: Rates, capacity_bytes: int, power: float, free: frozenset[str], kept: frozenset[str],
               swapped: frozenset[str]) -> tuple[frozenset[str], Mask]:
        """What `Gaps.packed_jointly` gives: what is to reside, and the gaps to stay in, by number."""
        fixed, free_mask, staying, leaving = self.of(ground.fixed - self.schedule.fixed), self.named(free), self.named(kept), self.named(swapped)
        stays, resident = np.zeros(self._n_gaps, dtype=np.uint8), np.zeros(len(self.storages), dtype=np.uint8)
        self.core.fxo_pack(
            self.address, self._seconds(rates), fixed.ctypes.data, staying.ctypes.data, leaving.ctypes.data if leaving.any() else None,
            free_mask.ctypes.data, capacity_bytes, power, stays.ctypes.data, resident.ctypes.data)
        return frozenset(self.storages[i].name for i in resident.nonzero()[0].tolist()), stays

    def laid_out(self, ground: Ground, rates: Rates, stays: Mask, capacity_bytes: int) -> Evaluated:
        """What `Gaps.laid_out` gives."""
        fixed = self.of(ground.fixed - self.schedule.fixed)
        return self._made(self.core.fxo_lay_out(self.address, self._seconds(rates), fixed.ctypes.data, stays.ctypes.data, capacity_bytes))

    @functools.cached_property
    def _n_gaps(self) -> int:
        n: int = self.core.fxo_gaps(self.address)
        return n

    def made(self, loads: Sequence[Sequence[int]], spills: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]],
             stays: Sequence[Sequence[int]]) -> Evaluated:
        """The scan of those rows of numbers."""
        columns = [np.array(rows, dtype=np.int32) for rows in (loads, spills, sinks, stays)]
        return self._made(self.core.fxo_make(*(part for column in columns for part in (len(column), column.ctypes.data))))

    def _made(self, address: int | None) -> Evaluated:
        if address is None:
            raise self._error()
        return Evaluated(self, address)

    def _error(self) -> AssertionError:
        return AssertionError(f"the evaluator: {self.core.fxo_trouble().decode()}")

    def _bytes(self) -> Bytes:
        return np.zeros(len(self.index), dtype=np.int64)

    def _merged(self, found: Evaluated, rates: Rates) -> Doubles:
        """Seconds of each bucket of several copies."""
        n_loads = found.counts[0]
        storages, n_bytes = np.empty(n_loads, dtype=np.int32), np.empty(n_loads, dtype=np.int64)
        n = self.core.fxo_buckets(self.address, found.address, storages.ctypes.data, n_bytes.ctypes.data)
        return np.array([rates.merged_s(b, self.storages[s]) for b, s in zip(n_bytes[:n].tolist(), storages[:n].tolist(), strict=True)], dtype=np.float64)

    def _seconds(self, rates: Rates) -> int:
        """Where the evaluator reads the rates."""
        if id(rates) not in self._timed:
            sink_s, sinks = np.zeros(len(self.index), dtype=np.float64), np.zeros(len(self.index), dtype=np.uint8)
            for index, seconds in rates.sink_s.items():
                at = self.schedule.position[index]
                sink_s[at], sinks[at] = seconds, 1
            held = (
                np.array(rates.event_s, dtype=np.float64), self._copies_s(rates.load_s), self._copies_s(rates.spill_s), sink_s, sinks)
            self._timed[id(rates)] = _Timed(rates, held, _Seconds(*(array.ctypes.data for array in held), rates.dispatch_s, COPY_ISSUES))
        return ctypes.addressof(self._timed[id(rates)].seconds)

    def _copies_s(self, copy_s: Callable[[Storage], float]) -> Doubles:
        """Of every Storage; what is alike takes as long."""
        if copy_s not in self._copied:
            first, alike = self._alike
            self._copied[copy_s] = np.array([copy_s(self.storages[i]) for i in first.tolist()], dtype=np.float64)[alike]
        return self._copied[copy_s]

    @functools.cached_property
    def _alike(self) -> tuple[Longs, Longs]:
        """One Storage of each size, tier and origin, and of every Storage which of these it is like."""
        numbers = self.numbers
        kinds = (numbers.n_bytes * (1 + int(numbers.tier.max(initial=0))) + numbers.tier) * 2 + numbers.is_input
        _, first, alike = np.unique(kinds, return_index=True, return_inverse=True)
        return first, alike


def rows_of(rows: Rows) -> RowsRead:
    """Rows as the evaluator reads them."""
    return RowsRead(rows.at.ctypes.data, rows.of.ctypes.data)
