from __future__ import annotations

import samples
import torch

from fxoffload import ops, text
from fxoffload.pipeline import Context, parse_pipeline
from fxoffload.testing.golden import DEVICE
from fxoffload.testing.twins import assert_same_results
from fxoffload.verify import verify


def test_a_real_step_keeps_its_peak_and_its_bits_and_has_more_neighbouring_starts() -> None:
    before = text.parse(samples.llama().after, DEVICE)
    for release in before.find_nodes(op="call_function", target=ops.release):
        before.erase_node(release)
    bounds = text.parse_bounds(samples.llama().after)
    after = parse_pipeline("bucket-transfers,insert-release").run(before, Context(bounds, device=DEVICE))
    assert verify(after, bounds).peak_bytes == verify(before, bounds).peak_bytes
    assert neighbours(after) > neighbours(before)
    assert_same_results(before, after)


def test_a_group_ends_at_the_size_that_the_option_gives() -> None:
    lines = "".join(f'%w{i}: f32[8]@pinned = input {{role=parameter, fqn="w{i}"}}\n' for i in range(4))
    lines += "".join(f"%c{i}: f32[8] = fxo.swap_in %w{i}, device\n%r{i}: f32[8] = fxo.wait %c{i}\n%e{i}: f32[8] = aten.exp %r{i}\n" for i in range(4))
    given = f'graph "g"\n{lines}%wide: f32[4096] = aten.repeat %e3, [512]\nreturn (%wide)\n'
    graph = parse_pipeline("bucket-transfers{bytes=64}").run(text.parse(given, DEVICE))
    starts = [i for i, node in enumerate(n for n in graph.nodes if n.op == "call_function") if node.target is ops.swap_in]
    assert [b - a for a, b in zip(starts, starts[1:])] == [1, 5, 1]


def neighbours(graph: torch.fx.Graph) -> int:
    return sum(node.next.target is ops.swap_in for node in graph.nodes if node.target is ops.swap_in)
