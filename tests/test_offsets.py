"""Memory planned by offsets: packing, the verifier's rule, out variants, and steps whose values lie in one arena."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Row, fault, rows

from fxoffload.footprint import Footprint
from fxoffload.offsets import ALIGNMENT, Lifetime, live_bytes, pack
from fxoffload.testing.simulated_device import SimulatedDevice


@st.composite
def lifetimes(draw: st.DrawFn) -> Lifetime:
    begin = draw(st.integers(0, 40))
    return Lifetime(begin, begin + draw(st.integers(1, 12)), draw(st.integers(1, 5000)))


@given(st.lists(lifetimes(), max_size=40))
@settings(deadline=None)
def test_what_is_there_at_the_same_time_lies_apart_in_an_arena_that_ends_with_the_highest(found: list[Lifetime]) -> None:
    offsets, n_bytes = pack(found)
    ends = [offset + one.n_bytes for offset, one in zip(offsets, found, strict=True)]
    for i, one in enumerate(found):
        assert offsets[i] % ALIGNMENT == 0 and ends[i] <= n_bytes
        for k, other in enumerate(found[:i]):
            together = one.begin < other.end and other.begin < one.end
            assert not together or ends[i] <= offsets[k] or ends[k] <= offsets[i]
    assert live_bytes(found) <= n_bytes <= sum(-(-one.n_bytes // ALIGNMENT) * ALIGNMENT for one in found)
    assert pack(found) == (offsets, n_bytes)


def test_values_of_one_size_need_no_more_than_is_live() -> None:
    found = [Lifetime(i, i + 1 + i * 7 % 5, 1024) for i in range(50)]
    assert pack(found)[1] == live_bytes(found)


@pytest.fixture
def by_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has its memory planned by offsets."""
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True)))


@pytest.mark.integration
@pytest.mark.usefixtures("by_offsets")
@pytest.mark.parametrize("family", ["gpt2", "lora_bf16"])
def test_five_steps_in_an_arena_are_bit_equal_and_take_what_was_predicted(family: str, simulated_device: SimulatedDevice) -> None:
    found: list[Row] = list(rows(family, "fxsim", simulated_device, (1.0, 0.5)))
    for row in found:
        assert not row.refused and not fault(row, found[0]), (fault(row, found[0]), row)
