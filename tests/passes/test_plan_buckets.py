from __future__ import annotations

import pytest
import samples
import torch.fx as fx

from fxoffload import ops, text
from fxoffload.graph import Bounds
from fxoffload.pipeline import Context, Pipeline, get_pass, parse_pipeline
from fxoffload.testing.golden import DEVICE
from fxoffload.testing.twins import assert_same_results
from fxoffload.verify import verify

ROOM = "%end: f32[8] = aten.neg %x\n%wide: f32[8192] = aten.repeat %end, [1024]\n%sum: f32[] = aten.sum %wide\n"


def step(lines: str, sizes: tuple[int, ...] = (8, 8, 8, 8)) -> fx.Graph:
    """Parameters w0, w1, ... of so many floats, `lines`, and a last node that needs much more than all copies together."""
    inputs = "".join(f'%w{i}: f32[{n}]@pinned = input {{role=parameter, fqn="w{i}"}}\n' for i, n in enumerate(sizes))
    return text.parse(f'graph "g"\n%x: f32[8] = input {{role=batch}}\n{inputs}{lines}{ROOM}return (%sum)\n', DEVICE)


def copy(i: int, n: int = 8, number: int = 0) -> str:
    name = f"w{i}@{number}"
    return f"%{name}/in: f32[{n}] = fxo.swap_in %w{i}, device\n%{name}: f32[{n}] = fxo.wait %{name}/in\n%e{i}.{number}: f32[{n}] = aten.exp %{name}\n"


def buckets(graph: fx.Graph, **options: int) -> list[tuple[str, ...]]:
    chosen = get_pass("plan-buckets", **options)
    decisions = chosen.run(graph, Context(device=DEVICE, options=chosen.options))
    return [decision.values for decision in decisions]  # type: ignore[union-attr]


def test_copies_that_follow_each_other_are_one_bucket() -> None:
    assert buckets(step(copy(0) + copy(1) + copy(2))) == [("w0@0", "w1@0", "w2@0")]


def test_a_copy_alone_is_no_bucket() -> None:
    assert buckets(step(copy(0))) == []


def test_a_group_ends_at_the_size_that_the_option_gives_and_larger_copies_are_in_none() -> None:
    lines = copy(0) + copy(1) + copy(2) + copy(3)
    assert buckets(step(lines), bytes=64) == [("w0@0", "w1@0"), ("w2@0", "w3@0")]
    assert buckets(step(lines), bytes=32) == []


def test_no_bucket_raises_the_graphs_own_peak() -> None:
    """Without a node that needs more, the peak is one copy and its read; padded to 512 bytes two copies are above it."""
    lines = copy(0) + copy(1)
    graph = text.parse(
        'graph "g"\n%x: f32[8] = input {role=batch}\n%w0: f32[8]@pinned = input {role=parameter, fqn="w0"}\n'
        f'%w1: f32[8]@pinned = input {{role=parameter, fqn="w1"}}\n{lines}return (%e0.0, %e1.0)\n', DEVICE)
    assert buckets(graph) == []


def test_buckets_that_are_there_at_once_are_counted_together_with_their_padding() -> None:
    """Below the peak are 1,444 bytes; two parts of 512 are 960 more than two copies of 32."""
    starts = "".join(f"%w{i}@0/in: f32[8] = fxo.swap_in %w{i}, device\n" for i in range(4))
    reads = "".join(f"%w{i}@0: f32[8] = fxo.wait %w{i}@0/in\n" for i in range(4)) + "".join(f"%e{i}: f32[8] = aten.exp %w{i}@0\n" for i in range(4))
    lines = text.render(step(starts + reads), Bounds(), columns=False).replace("8192", "400").replace("1024", "50")
    assert buckets(text.parse(lines, DEVICE), bytes=64) == [("w0@0", "w1@0")]


def test_a_large_copy_is_overtaken_by_an_eighth_of_its_bytes_at_most() -> None:
    """w1 has 1024 bytes and is too large for a bucket of 512; w0, w2 and w3 have 128, of which one may go ahead of it."""
    sizes = (32, 256, 32, 32)
    lines = copy(0, n=32) + copy(1, n=256) + copy(2, n=32) + copy(3, n=32)
    assert buckets(step(lines, sizes=sizes), bytes=512) == [("w0@0", "w2@0")]
    assert buckets(step(copy(1, n=256) + copy(2, n=32) + copy(3, n=32), sizes=sizes), bytes=512) == [("w2@0", "w3@0")]


def test_a_value_that_returns_is_in_no_bucket_and_is_not_held_up() -> None:
    sent = '%s: f32[8] = aten.sin %x\n%s^0/out: f32[8]@pinned = fxo.swap_out %s, host, "pinned"\n%s^0: f32[8]@pinned = fxo.wait %s^0/out\n'
    back = "%s@0/in: f32[8] = fxo.swap_in %s^0, device\n%s@0: f32[8] = fxo.wait %s@0/in\n%c: f32[8] = aten.neg %s@0\n"
    assert buckets(step(sent + copy(0) + back + copy(1) + copy(2))) == [("w1@0", "w2@0")]


def test_members_are_on_one_host_tier() -> None:
    graph = step(copy(0) + copy(1) + copy(2) + copy(3))
    lines = text.render(graph, Bounds(), columns=False).replace("%w2: f32[8]@pinned", "%w2: f32[8]@disk").replace("%w3: f32[8]@pinned", "%w3: f32[8]@disk")
    assert buckets(text.parse(lines, DEVICE)) == [("w0@0", "w1@0"), ("w2@0", "w3@0")]


def test_no_bucket_crosses_the_border_and_backwards_buckets_are_laid_out_as_forwards() -> None:
    lines = copy(0) + copy(1) + "fxo.backward\n" + copy(1, number=1) + copy(2) + copy(0, number=1)
    assert buckets(step(lines)) == [("w0@0", "w1@0"), ("w0@1", "w1@1", "w2@0")]


def test_a_copy_that_backward_reads_too_stays_alone() -> None:
    """It has 32 bytes, an eighth of which has no room for the copy behind it."""
    lines = copy(0) + copy(1) + copy(2) + "fxo.backward\n%late: f32[8] = aten.neg %w1@0\n" + copy(3)
    assert buckets(step(lines)) == []


def test_a_copy_that_is_returned_stays_alone() -> None:
    graph = text.render(step(copy(0) + copy(1) + copy(2)), Bounds(), columns=False).replace("return (%sum)", "return (%sum, %w2@0)")
    assert buckets(text.parse(graph, DEVICE)) == [("w0@0", "w1@0")]


@pytest.mark.parametrize("n_bytes", [16 << 20, 8 << 10])
def test_a_real_step_keeps_its_peak_its_bits_and_its_saved_values(n_bytes: int) -> None:
    before = text.parse(samples.llama().unmerged, DEVICE)
    bounds = text.parse_bounds(samples.llama().unmerged)
    names = f"plan-buckets{{bytes={n_bytes}}},bucket-transfers,insert-release"
    pipeline: Pipeline = parse_pipeline(names)
    after = pipeline.run(before, Context(bounds, device=DEVICE))
    assert verify(after, bounds).peak_bytes == verify(before, bounds).peak_bytes
    assert starts(after) < starts(before)
    assert_same_results(before, after)


def starts(graph: fx.Graph) -> int:
    return sum(len(graph.find_nodes(op="call_function", target=op)) for op in (ops.swap_in, ops.swap_in_many))
