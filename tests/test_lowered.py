"""A really captured and lowered training step of a two-layer Llama: what must be true of it, line by line.

`mutants.py` damages the text of this graph one line at a time; each mutant must fail a test here.
"""

from __future__ import annotations

import pytest
import samples
import torch.fx as fx

from fxoffload import ops, text
from fxoffload.effects import Tier
from fxoffload.graph import Role, info, name_of, output_of
from fxoffload.liveness import Kind, is_view, liveness
from fxoffload.plans import Bucket, Gather, Recompute, SwapIn, SwapOut
from fxoffload.split import split
from fxoffload.testing.golden import DEVICE
from fxoffload.testing.twins import assert_same_results
from fxoffload.verify import verify

pytestmark = pytest.mark.integration


def lowered() -> fx.Graph:
    return text.parse(samples.llama().after, DEVICE)


def count(graph: fx.Graph, op: object) -> int:
    return len(graph.find_nodes(op="call_function", target=op))


def test_the_lowered_step_keeps_every_rule_of_memory_and_every_fact_in_its_budget() -> None:
    facts = frozenset({"functional", "resident", "lowered", "awaited", "released", "fits"})
    verify(lowered(), text.parse_bounds(samples.llama().after), facts, samples.llama().device_budget_bytes)


def test_the_lowered_step_computes_the_same_bits_as_the_captured_one() -> None:
    assert_same_results(text.parse(samples.llama().before, DEVICE), lowered())


def test_the_lowered_step_saves_what_the_plan_says_and_nothing_else() -> None:
    graph = lowered()
    inputs = {name_of(n) for n in graph.find_nodes(op="placeholder")}
    assert tuple(n for n in split(graph).saved if n not in inputs) == samples.llama().plan.saved


def test_a_parameter_is_saved_for_backward_as_a_whole_or_gathered_again_and_never_as_a_view() -> None:
    graph = lowered()
    live = liveness(graph, text.parse_bounds(samples.llama().after))
    gathered = [s for s in live.first if s.kind is Kind.PARAMETER and s.tier is Tier.DEVICE and not s.is_input]
    in_forward, in_backward = ({_fqn(s.name) for s in gathered if (live.first[s] > live.border) is late} for late in (False, True))
    assert in_forward & in_backward, "no parameter is gathered in both halves: nothing says that saving was avoided"
    nodes = {name_of(node): node for node in graph.nodes}
    saved = [nodes[name] for name in split(graph).saved if set(live.of[nodes[name]]) & set(gathered)]
    assert all(node.target is ops.wait for node in saved), saved
    read = {node for node in graph.nodes for s in live.of.get(node, ()) if s in gathered and is_view(node) and node.target is not ops.wait}
    assert read, "the step reads no parameter through a view"


def _fqn(name: str) -> str:
    return name.rpartition("@")[0]


def test_every_gradient_of_a_host_parameter_is_returned_on_the_host() -> None:
    graph = lowered()
    gradients = output_of(graph).args[0][1]  # type: ignore[index]
    owners = [info(n) for n in graph.find_nodes(op="placeholder")]
    trained = [(o, g) for o, g in zip(owners, gradients) if o.role is Role.PARAMETER and o.trainable and o.tier is not Tier.DEVICE]
    assert trained
    assert [name_of(g) for _, g in trained] == [f"{o.fqn}.grad" for o, _ in trained]
    assert all(g.target is ops.wait and g.args[0].target is ops.swap_out for _, g in trained)


def test_every_decision_of_the_plan_is_a_node() -> None:
    graph, decisions = lowered(), samples.llama().plan.decisions
    kinds = {kind: sum(isinstance(d, kind) for d in decisions) for kind in (Gather, SwapIn, SwapOut, Recompute)}
    assert min(kinds.values()) > 0
    buckets = [d for d in decisions if isinstance(d, Bucket)]
    merged = sum(len(bucket.values) for bucket in buckets)
    sunk = sum(info(n).name.endswith(".grad") for n in graph.nodes)
    assert merged > len(buckets) > 0
    assert (count(graph, ops.swap_in_many), count(graph, ops.part)) == (len(buckets), merged)
    assert count(graph, ops.swap_in) == kinds[Gather] + kinds[SwapIn] - merged
    assert count(graph, ops.swap_out) == kinds[SwapOut] + sunk
    assert count(graph, ops.wait) == sum(count(graph, op) for op in (ops.swap_in, ops.swap_in_many, ops.swap_out))
    assert {d.value for d in decisions if isinstance(d, Recompute)} <= {info(n).origin for n in graph.nodes}
