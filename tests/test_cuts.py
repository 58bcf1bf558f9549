"""What is made again at a price per saved byte: the cheapest choice of all, by brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from fxoffload.cuts import Remake, made_again

Remakes = Sequence[Remake[str]]


def cost(ops: Remakes, prices: Mapping[str, float], needed: frozenset[str], again: Sequence[bool]) -> float:
    """Seconds of what runs again, and prices of what must be there for it and for backward and is not made again."""
    there = needed.union(*(op.reads for op, yes in zip(ops, again, strict=True) if yes))
    made = {v for op, yes in zip(ops, again, strict=True) if yes for v in op.makes}
    return sum(op.seconds for op, yes in zip(ops, again, strict=True) if yes) + sum(prices[v] for v in there - made)


def drawn(seed: int, n_ops: int) -> tuple[list[Remake[str]], dict[str, float], frozenset[str]]:
    """Ops in order, each reading inputs and what earlier ones made; some make two values."""
    draw = random.Random(seed)
    values, ops = ["in0", "in1"], []
    for i in range(n_ops):
        reads = tuple(sorted(draw.sample(values, min(len(values), draw.randint(1, 2)))))
        makes = tuple(f"v{i}.{j}" for j in range(draw.choice((1, 1, 2))))
        ops.append(Remake(float(draw.randint(1, 9)), reads, makes))
        values += makes
    return ops, {v: float(draw.randint(1, 12)) for v in values}, frozenset(v for v in values if draw.random() < 0.5)


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(60))
def test_no_choice_costs_less(seed: int) -> None:
    ops, prices, needed = drawn(seed, 7)
    least = min(cost(ops, prices, needed, again) for again in itertools.product((False, True), repeat=len(ops)))
    assert cost(ops, prices, needed, made_again(ops, prices, needed)) == least


@pytest.mark.unit
def test_equal_parts_are_chosen_alike_and_what_costs_more_than_its_price_is_saved() -> None:
    ops = [op for i in range(3) for op in (
        Remake(1.0, (f"in{i}",), (f"a{i}",)), Remake(1.0, (f"a{i}",), (f"b{i}",)), Remake(9.0, (f"b{i}",), (f"c{i}",)))]
    prices = {v: 5.0 for op in ops for v in (*op.reads, *op.makes)}
    needed = frozenset(f"{letter}{i}" for letter in ("in", "b", "c") for i in range(3))
    assert made_again(ops, prices, needed) == [True, True, False] * 3


@pytest.mark.unit
def test_what_backward_does_not_read_is_saved_only_for_what_is_cheaper_with_it() -> None:
    ops = [Remake(6.0, ("in",), ("a",)), Remake(1.0, ("a",), ("b",))]
    needed = frozenset({"in", "b"})
    assert made_again(ops, {"in": 1.0, "a": 2.0, "b": 9.0}, needed) == [False, True]  # "a" saved: 3 beside 7 and 9
    assert made_again(ops, {"in": 1.0, "a": 20.0, "b": 9.0}, needed) == [True, True]
    assert made_again(ops, {"in": 1.0, "a": 20.0, "b": 6.0}, needed) == [False, False]


@pytest.mark.unit
def test_a_choice_does_not_depend_on_the_order_in_which_sets_give_their_members() -> None:
    def drawn_anew(seed: int) -> list[bool]:
        draw, values = random.Random(seed), [object() for _ in range(24)]
        prices = {v: draw.choice((1, 2, 3, 7)) * 1e-4 / 7 for v in values}
        ops = [Remake(draw.choice((1, 2, 3, 7)) * 1e-4 / 7, tuple(draw.sample(values[:i], min(i, 2))), (v,)) for i, v in enumerate(values)]
        return made_again(ops, prices, frozenset(v for v in values if draw.random() < 0.4))

    for seed in range(60):
        assert len({tuple(drawn_anew(seed)) for _ in range(8)}) == 1
