"""What leaves the device where memory is short."""

from __future__ import annotations

import pytest

from fxoffload import spill, text
from fxoffload.spill import Schedule

_N = 96


def spilled() -> set[str]:
    """What leaves for `wide` in a step whose `logits` are read again right behind it, and 96 values of 64 KiB at the end."""
    small = "".join(f"%v{i + 1}: f32[1024,16] = aten.sin %v{i}\n" for i in range(_N))
    last = "".join(f"%g{i + 1}: f32[1024,16] = aten.mul.Tensor %g{i}, %v{i + 1}\n" for i in range(_N))
    lines = (
        'graph "loss"\n%v0: f32[1024,16] = input {role=batch}\n%w: f32[16,1024] = input {role=batch}\n%u: f32[16,2048] = input {role=batch}\n'
        f"%t: f32[1024,16] = input {{role=tangent}}\n{small}%logits: f32[1024,1024] = aten.mm %v{_N}, %w\n"
        "%wide: f32[1024,2048] = aten.mm %v1, %u\n%mean: f32[1024,1] = aten.mean.dim %wide, [1], true\nfxo.backward\n"
        "%soft: f32[1024,1] = aten.mean.dim %logits, [1], true\n%g0: f32[1024,16] = aten.mul.Tensor %t, %soft\n"
        f"{last}return ((%mean), (%g{_N}, none, none))\n")
    schedule = Schedule.of(text.parse(lines), text.parse_bounds(lines))
    found = schedule.scan(schedule.scan(None).peak_bytes - (4 << 20))
    assert not found.shortfall_bytes
    return {one.storage.name for one in found.spills}


def test_what_is_needed_soon_stays_where_many_smaller_values_are_needed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(spilled()) == 64 and spilled() <= {f"v{i}" for i in range(1, _N + 1)}
    # Were each of them a crumb beside the 4 MiB that are to leave, the logits would go and come back at once.
    monkeypatch.setattr(spill, "_CRUMBS", 32)
    assert spilled() == {"logits"}
