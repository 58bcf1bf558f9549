"""What leaves the device where memory is short."""

from __future__ import annotations

import pytest

from fxoffload import spill, text
from fxoffload.spill import Schedule

_N = 96


def step() -> str:
    """A step that makes `wide` between `logits` and what reads them, and reads 96 values of 64 KiB at the end."""
    small = "".join(f"%v{i + 1}: f32[1024,16] = aten.sin %v{i}\n" for i in range(_N))
    last = "".join(f"%g{i + 1}: f32[1024,16] = aten.mul.Tensor %g{i}, %v{i + 1}\n" for i in range(_N))
    return (
        'graph "loss"\n%v0: f32[1024,16] = input {role=batch}\n%w: f32[16,1024] = input {role=batch}\n%u: f32[16,2048] = input {role=batch}\n'
        f"%t: f32[1024,16] = input {{role=tangent}}\n{small}%logits: f32[1024,1024] = aten.mm %v{_N}, %w\n"
        "%wide: f32[1024,2048] = aten.mm %v1, %u\n%mean: f32[1024,1] = aten.mean.dim %wide, [1], true\nfxo.backward\n"
        "%soft: f32[1024,1] = aten.mean.dim %logits, [1], true\n%g0: f32[1024,16] = aten.mul.Tensor %t, %soft\n"
        f"{last}return ((%mean), (%g{_N}, none, none))\n")


def spilled() -> set[str]:
    """What leaves for `wide`."""
    schedule = Schedule.of(text.parse(step()), text.parse_bounds(step()))
    found = schedule.scan(schedule.scan(None).peak_bytes - (4 << 20))
    assert not found.shortfall_bytes
    return {one.storage.name for one in found.spills}


def test_what_is_needed_soon_stays_where_many_smaller_values_are_needed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(spilled()) == 64 and spilled() <= {f"v{i}" for i in range(1, _N + 1)}
    # Were each of them a crumb beside the 4 MiB that are to leave, the logits would go and come back at once.
    monkeypatch.setattr(spill, "_CRUMBS", 32)
    assert spilled() == {"logits"}


@pytest.mark.parametrize("kept", [frozenset(), frozenset({"v3", "logits"})])
def test_there_is_room_for_a_scan_from_the_bytes_on_that_are_said_without_one(kept: frozenset[str]) -> None:
    schedule = Schedule.of(text.parse(step()), text.parse_bounds(step()))
    least = schedule.least_bytes(schedule.ground(), kept)
    assert schedule.scan(least - 1, kept).shortfall_bytes == 1
    assert not schedule.scan(least, kept).shortfall_bytes
