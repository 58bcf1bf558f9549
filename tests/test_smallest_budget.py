"""The smallest budget that is accepted lies near what one operation alone needs: nothing else has to stay on the device.

The bound is computed here from the text of the un-lowered step: storages that an operation reads and makes, told apart by aliases.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import zoo
from zoo import FAMILIES, Case

import fxoffload
from fxoffload import composed, text
from fxoffload.graph import Bounds
from fxoffload.testing.simulated_device import SimulatedDevice

pytestmark = pytest.mark.integration
LIMIT = 1.3


def lora() -> Case:
    return zoo._lora(zoo._bf16(one_layer()))


def one_layer() -> Case:
    return zoo.llama(num_hidden_layers=1)


@pytest.mark.parametrize("make", [one_layer, pytest.param(zoo.bert, marks=pytest.mark.slow), lora], ids=lambda make: make.__name__)
def test_the_smallest_accepted_budget_is_near_the_largest_operation(make: Any, tmp_path: Path) -> None:
    smallest, largest = smallest_and_largest(make, "cpu", tmp_path)
    assert largest <= smallest * LIMIT and smallest <= LIMIT * largest


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_smallest_accepted_budget_of_every_family_is_near_the_largest_operation(family: str, tmp_path: Path) -> None:
    smallest, largest = smallest_and_largest(FAMILIES[family], "cpu", tmp_path)
    assert smallest <= LIMIT * largest


@pytest.mark.parametrize("make", [one_layer, pytest.param(zoo.bert, marks=pytest.mark.slow)], ids=lambda make: make.__name__)
def test_so_it_is_on_the_simulated_device(make: Any, tmp_path: Path, simulated_device: SimulatedDevice) -> None:
    smallest, largest = smallest_and_largest(make, "fxsim", tmp_path)
    assert smallest <= LIMIT * largest


def test_attention_of_several_operations_needs_what_it_takes_when_it_runs_alone(tmp_path: Path, simulated_device: SimulatedDevice) -> None:
    """Where it is the largest by far, no budget is near its operands and results: between them it has values of length x length."""
    smallest, largest = smallest_and_largest(few_words, "fxsim", tmp_path)
    case = few_words()
    batch = sum(t.nbytes for t in case.batch.values())
    assert largest < smallest <= LIMIT * (attention_alone_bytes(case.model.config, simulated_device) + batch)


def few_words() -> Case:
    case = zoo.llama(num_hidden_layers=1, vocab_size=32)
    return replace(case, batch={name: t % 32 for name, t in case.batch.items()})


def smallest_and_largest(make: Any, device: str, folder: Path) -> tuple[int, int]:
    """The smallest budget that trains, and the largest operation's bytes with the batch and the outputs."""
    torch._dynamo.reset()
    with pytest.raises(fxoffload.PlanError) as refused:
        compiled(make(), device, 1, folder)
    assert refused.value.shortfall_bytes is not None
    smallest = 1 + refused.value.shortfall_bytes
    torch._dynamo.reset()
    case = make()
    model: Any = compiled(case, device, smallest, folder)
    with autocast(case, device):
        loss = model(**{name: t.to(device) for name, t in case.batch.items()}).loss
    loss.backward()
    model.fxoffload.close()
    (written,) = (folder / "train").glob("00-*.ir")
    graph, bounds = text.parse(written.read_text()), text.parse_bounds(written.read_text())
    outputs = sum(n_bytes(n, bounds) for n in graph.output_node().args[0][0] if isinstance(n, fx.Node))  # type: ignore[index,union-attr]
    return smallest, max(operation_bytes(n, bounds) for n in graph.nodes) + sum(t.nbytes for t in case.batch.values()) + outputs


def compiled(case: Case, device: str, budget: int, folder: Path) -> Any:
    with autocast(case, device):
        return fxoffload.compile(case.model, case.batch, device=device, device_budget=budget, dump_dir=folder, dynamic=False)


def autocast(case: Case, device: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device, dtype=case.autocast) if case.autocast else contextlib.nullcontext()


def operation_bytes(node: fx.Node, bounds: Bounds) -> int:
    """Bytes of the different storages a node reads, and of those it makes; 0 for inputs and views."""
    if node.op != "call_function" or storage_of(node) != node.name:
        return 0
    read: dict[str, int] = {}
    for operand in node.all_input_nodes:
        name = storage_of(operand)
        read[name] = max(read.get(name, 0), n_bytes(operand, bounds))
    return sum(read.values()) + n_bytes(node, bounds)


def storage_of(node: fx.Node) -> str:
    """The name of the node that made the memory; an element of a tuple is its own."""
    if node.target is operator.getitem:
        return f"{storage_of(node.args[0])}[{node.args[1]}]"  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and (schema.name in ("aten::reshape", "aten::_unsafe_view") or any(r.alias_info for r in schema.returns))
    return storage_of(node.args[0]) if is_view else node.name  # type: ignore[arg-type]


def n_bytes(node: fx.Node, bounds: Bounds) -> int:
    def of(value: object) -> int:
        if isinstance(value, (tuple, list)):
            return sum(map(of, value))
        return bounds.bytes_of(value) if isinstance(value, torch.Tensor) else 0

    return of(node.meta.get("val"))


def attention_alone_bytes(config: Any, device: SimulatedDevice) -> int:
    """The peak of a device that computes the gradients of one causal attention and nothing else."""
    before = device.memory_allocated()
    heads, dim = (config.num_attention_heads, config.num_key_value_heads), config.hidden_size // config.num_attention_heads
    grad, query, key, value = (torch.ones(2, heads[i // 2], 32, dim, device="fxsim") for i in range(4))
    device.reset_peak_memory_stats()
    results = composed.attention_gradients(grad, query, key, value, None, 0.0, True, None, True)
    assert len(results) == 3
    return device.max_memory_allocated() - before
