from __future__ import annotations

import pytest
import torch.fx as fx

from fxoffload import ops, text
from fxoffload.graph import name_of
from fxoffload.pipeline import Context, parse_pipeline
from fxoffload.plans import Bucket, GraphPlan, Prediction
from fxoffload.testing.golden import DEVICE

TWO = """\
graph "two"
%x: f32[4,8] = input {role=batch}
%w: f32[8,8]@pinned = input {role=parameter, fqn="w"}
%u: f32[8,8]@pinned = input {role=parameter, fqn="u"}
%w@0/in: f32[8,8] = fxo.swap_in %w, device
%w@0: f32[8,8] = fxo.wait %w@0/in
%a: f32[4,8] = aten.mm %x, %w@0
%a^0/out: f32[4,8]@pinned = fxo.swap_out %a, host, "pinned"
%a^0: f32[4,8]@pinned = fxo.wait %a^0/out
%u@0/in: f32[8,8] = fxo.swap_in %u, device
%u@0: f32[8,8] = fxo.wait %u@0/in
%b: f32[4,8] = aten.mm %a, %u@0
%a@0/in: f32[4,8] = fxo.swap_in %a^0, device
%a@0: f32[4,8] = fxo.wait %a@0/in
%c: f32[4,8] = aten.mul.Tensor %a@0, %b
return (%c)
"""


def bucketed(*values: str) -> fx.Graph:
    plan = GraphPlan("", (Bucket(values),), (), Prediction(0, 0))
    return parse_pipeline("bucket-transfers,insert-release").run(text.parse(TWO, DEVICE), Context(plan=plan, device=DEVICE))


def test_the_parts_lie_in_the_order_of_the_decision_and_keep_their_names() -> None:
    graph = bucketed("u@0", "w@0")
    (start,) = graph.find_nodes(op="call_function", target=ops.swap_in_many)
    assert [name_of(source) for source in start.all_input_nodes] == ["u", "w"]
    assert {name_of(p): p.args[1] for p in graph.find_nodes(op="call_function", target=ops.part)} == {"w@0": 512, "u@0": 0}


def test_a_bucket_has_one_release_behind_the_last_read_of_any_part() -> None:
    graph = bucketed("w@0", "u@0")
    (release,) = [n for n in graph.find_nodes(op="call_function", target=ops.release) if "bucket" in name_of(n)]
    assert name_of(release.prev) == "b"


@pytest.mark.parametrize("value", ["nobody@0", "a@0", "b", "a^0", "w@0/in"])
def test_what_is_no_copy_of_an_input_to_the_device_is_refused_by_name(value: str) -> None:
    with pytest.raises(ValueError, match=f"bucket: '{value.replace('^', '.')}' is no copy of an input"):
        bucketed("w@0", value)
