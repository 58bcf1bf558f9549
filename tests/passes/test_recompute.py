from __future__ import annotations

import pytest
import torch

from fxoffload import text
from fxoffload.effects import Tier
from fxoffload.graph import Bounds
from fxoffload.machine import load_machine
from fxoffload.pipeline import Context, get_pass, parse_pipeline
from fxoffload.plans import GraphPlan, Prediction, Recompute
from fxoffload.testing.twins import assert_same_results

# `scaled` reads the buffer before forward writes it; backward reads `scaled`.
MUTATED = """\
graph "mutated"
%x: f32[4,8] = input {role=batch}
%mean: f32[8] = input {role=buffer, fqn="mean"}
%t: f32[4,8] = input {role=tangent}
%scaled: f32[8] = aten.mul.Tensor %mean, 0.9
%a: f32[4,8] = aten.mul.Tensor %x, %scaled
%y: f32[4,8] = aten.exp %a
%kept: f32[8] = aten.copy_ %mean, %scaled
fxo.backward
%g: f32[4,8] = aten.mul.Tensor %t, %y
%gx: f32[4,8] = aten.mul.Tensor %g, %scaled
%gs: f32[4,8] = aten.mul.Tensor %gx, %a
return ((%y), (%gs, none))
"""


# The same of an element of a tuple, where what is written is an output and the caller writes it.
MUTATED_TUPLE = """\
graph "mutated_tuple"
%x: f32[4,8] = input {role=batch}
%mean: f32[8] = input {role=buffer, fqn="mean", written=true}
%var: f32[8] = input {role=buffer, fqn="var", written=true}
%t: f32[4,8] = input {role=tangent}
%norm: (f32[4,8],f32[8],f32[8],f32[8],f32[8]) = aten._native_batch_norm_legit_functional %x, none, none, %mean, %var, true, 0.1, 1e-05
%a: f32[4,8] = getitem %norm, 0
%new_mean: f32[8] = getitem %norm, 3
%new_var: f32[8] = getitem %norm, 4
%y: f32[4,8] = aten.exp %a
%z: f32[4,8] = aten.sin %y
fxo.backward
%g: f32[4,8] = aten.mul.Tensor %t, %y
%gx: f32[4,8] = aten.mul.Tensor %g, %a
return ((%new_mean, %new_var, %z), (%gx, none, none))
"""


def decided(lines: str, keep: str, machine: str | None = None, draws_once: bool = False) -> list[str]:
    graph, known = text.parse(lines), None if machine is None else load_machine(machine)
    context = Context(text.parse_bounds(lines), options={"keep": keep, "blocks": -1}, machine=known, draws_once=draws_once)
    decisions = get_pass("plan-recompute").run(graph, context)
    return [d.value for d in decisions]  # type: ignore[union-attr]


NORM = """\
graph "norm"
%x: f32[4096,4096] = input {role=batch}
%t: f32[4096,4096] = input {role=tangent}
%square: f32[4096,4096] = aten.pow.Tensor_Scalar %x, 2
%mean: f32[4096,1] = aten.mean.dim %square, [1], true
%root: f32[4096,1] = aten.rsqrt %mean
%y: f32[4096,4096] = aten.mul.Tensor %x, %root
%z: f32[4096,4096] = aten.exp %y
fxo.backward
%g: f32[4096,4096] = aten.mul.Tensor %t, %z
%h: f32[4096,4096] = aten.mul.Tensor %g, %y
%i: f32[4096,4096] = aten.mul.Tensor %h, %root
return ((%x), (%i))
"""


def test_what_returns_sooner_than_it_is_made_is_saved_on_a_machine_that_is_known() -> None:
    assert decided(NORM, "costly") == ["square", "mean", "root", "y", "z"]
    assert decided(NORM, "costly", "h200") == ["y", "z"]  # the square is read by nothing that is made again
    assert decided(NORM, "inputs", "h200") == ["square", "mean", "root", "y", "z"]


SUMS = """\
graph "sums"
%x: bf16[4096,4096] = input {role=batch}
%w: bf16[4096,4096] = input {role=parameter, fqn="w"}
%v: bf16[4096,4096] = input {role=parameter, fqn="v"}
%t: bf16[4096,4096] = input {role=tangent}
%a: bf16[4096,4096] = aten.mm %x, %w
%b: bf16[4096,4096] = aten.mm %x, %v
%sum: bf16[4096,4096] = aten.add.Tensor %a, %b
%wide: f32[4096,4096] = aten._to_copy %sum, dtype=f32
%y: bf16[4096,4096] = aten.relu %sum
fxo.backward
%g: f32[4096,4096] = aten.mul.Tensor %wide, %wide
%h: bf16[4096,4096] = aten._to_copy %g, dtype=bf16
%i: bf16[4096,4096] = aten.mul.Tensor %h, %y
return ((%x), (%i))
"""


def test_of_what_is_cheap_to_make_the_fewest_bytes_are_saved() -> None:
    """Not the two products, from which all the rest could be made, but their sum."""
    assert decided(SUMS, "costly", "h200") == ["wide", "y"]


def recomputed(lines: str, *values: str) -> tuple[object, object]:
    graph = text.parse(lines)
    plan = GraphPlan("", tuple(map(Recompute, values)), (), Prediction(0, 0))
    after = parse_pipeline("insert-checkpoint,recompute").run(graph, Context(text.parse_bounds(lines), plan=plan, device=torch.device("cpu", 0)))
    return graph, after


DRAWN = """\
graph "drawn"
%x: f32[4,8] = input {role=batch}
%t: f32[4,8] = input {role=tangent}
%a: f32[4,8] = aten.exp %x
%kept: f32[4,8] = aten.bernoulli.p %a, 0.5
%y: f32[4,8] = aten.mul.Tensor %a, %kept
%z: f32[4,8] = aten.sin %y
fxo.backward
%g: f32[4,8] = aten.mul.Tensor %t, %z
%h: f32[4,8] = aten.mul.Tensor %g, %kept
return ((%y), (%h))
"""


def test_what_is_drawn_is_saved_where_draws_are_made_once() -> None:
    assert decided(DRAWN, "inputs") == ["a", "kept", "z"]
    assert decided(DRAWN, "inputs", draws_once=True) == ["a", "z"]


def test_what_reads_a_buffer_that_forward_writes_is_saved_and_what_reads_it_then_is_not() -> None:
    assert decided(MUTATED, "inputs") == ["a"]
    assert decided(MUTATED_TUPLE, "inputs") == ["y"]
    assert_same_results(*recomputed(MUTATED, "a"))  # type: ignore[arg-type]


def test_computing_such_a_value_again_would_give_another_gradient() -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_same_results(*recomputed(MUTATED, "a", "scaled"))  # type: ignore[arg-type]


def test_no_value_has_two_clones_however_often_backward_reads_it() -> None:
    reads = "".join(f"%g{i + 1}: f32[4,8] = aten.mul.Tensor %g{i}, %v{i % 5}\n" for i in range(20))
    chain = "".join(f"%v{i + 1}: f32[4,8] = aten.sin %v{i}\n" for i in range(4))
    lines = (
        'graph "many"\n%v0: f32[4,8] = input {role=batch}\n%g0: f32[4,8] = input {role=tangent}\n'
        f"{chain}fxo.backward\n{reads}return ((%v4), (%g20))\n"
    )
    before, after = recomputed(lines, "v1", "v2", "v3")
    origins = [line.split("origin=")[1] for line in text.render(after, Bounds(), columns=False).splitlines() if "origin=" in line]  # type: ignore[arg-type]
    assert sorted(origins) == ['"v1"}', '"v2"}', '"v3"}']
    assert_same_results(before, after)  # type: ignore[arg-type]


# What a block makes of `x`, which crosses its border: a product that backward does not read, and what it is read for.
BLOCK = """\
graph "block"
%x: bf16[8192,4096] = input {role=batch}
%w: bf16[4096,N] = input {role=parameter, fqn="0.w"}
%t: bf16[8192,N] = input {role=tangent}
%0.lin/mm: bf16[8192,N] = aten.mm %x, %w
%0.act/relu: bf16[8192,N] = aten.relu %0.lin/mm
%0.act/exp: bf16[8192,N] = aten.exp %0.act/relu
%1/neg: bf16[8192,N] = aten.neg %0.act/exp
fxo.backward
%g: bf16[8192,N] = aten.mul.Tensor %t, %0.act/exp
%h: bf16[8192,N] = aten.mul.Tensor %g, %0.act/relu
return ((%1/neg), (%h, none))
"""


def made_again_of_a_block(price: float) -> list[str]:
    lines = BLOCK.replace("N", "4096")
    context = Context(
        text.parse_bounds(lines), options={"keep": "blocks", "price": price}, machine=load_machine("h200"), swap_tier=Tier.PINNED)
    return [d.value for d in get_pass("plan-recompute").run(text.parse(lines), context)]  # type: ignore[union-attr]


@pytest.mark.parametrize(("price", "n_again"), [(0.05, 0), (0.1, 0), (0.25, 2), (1.0, 2)])
def test_of_a_block_is_made_again_what_costs_least_at_a_price_of_saved_bytes(price: float, n_again: int) -> None:
    """At a low price the product, which takes a sixth of what its copies take, is not run again for the cheap op behind it: one of the
    two values would have to be saved. What crosses the border is saved at any price."""
    assert made_again_of_a_block(price) == ["0.lin/mm", "0.act/relu"][:n_again]
