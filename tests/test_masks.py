"""Masks as indices: numbers where their count is known, with the bits of plain PyTorch, and nothing that the host waits for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.fx as fx
from loops import assert_same
from torch import nn

import fxoffload
from fxoffload import masks, replays
from fxoffload.graph import INFO, NodeInfo, Role
from fxoffload.out_variants import out_variant
from fxoffload.pipeline import Context, get_pass
from fxoffload.testing.simulated_device import SimulatedDevice

aten = torch.ops.aten


class Marked(nn.Module):
    """Rows that a mask marks are read, added to, replaced and zeroed; `over`: as transformers lays a mask over all features."""

    def __init__(self, over: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.over = nn.Linear(32, 32), nn.Linear(32, 32), over

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[mask] = y[mask] + rows
        z = self.second(y)
        z[mask.logical_not()] = 0.5
        whole = mask.unsqueeze(-1)
        z = z.masked_scatter(whole.expand_as(z) if self.over else whole, self.first(rows))
        z[mask] += rows.sin()
        return z.square().mean()


def batch(n_true: int = 7, device: str = "cpu") -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(n_true)
    mask = torch.zeros(48, dtype=torch.bool)
    mask[torch.randperm(48, generator=numbers)[:n_true]] = True
    found = {"x": torch.randn(4, 12, 32, generator=numbers), "mask": mask.view(4, 12), "rows": torch.randn(n_true, 32, generator=numbers)}
    return {name: tensor.to(device) for name, tensor in found.items()}


def compiled(model: nn.Module, **options: Any) -> Any:
    made: Any = copy.deepcopy(model)
    fxoffload.compile(made, batch(), **{"device": "cpu", "device_budget": "1MiB", "dynamic": False, **options})
    return made


@pytest.mark.integration
@pytest.mark.parametrize("over", [True, False])
def test_the_bits_are_those_of_plain_pytorch_and_no_mask_is_counted(over: bool) -> None:
    plain = Marked(over)
    model = compiled(plain)
    for _ in range(2):
        plain(**batch()).backward()
        model(**batch()).backward()
    assert_same(plain, model)
    graph = model.fxoffload.graphs["train"]
    assert not any(masks.counts_true(node) for node in graph.nodes)
    assert len(graph.find_nodes(op="call_function", target=aten.nonzero_static.default)) == 1
    model.fxoffload.close()


@pytest.mark.integration
def test_a_simulated_device_takes_what_was_predicted(simulated_device: SimulatedDevice) -> None:
    plain, on_device = Marked(), batch(device="fxsim")
    model = compiled(plain, device="fxsim", device_budget="256KiB")
    plain.to("fxsim")(**on_device).backward()
    plain.cpu()
    base = simulated_device.memory_allocated()
    simulated_device.reset_peak_memory_stats()
    model(**on_device).backward()
    assert_same(plain, model)
    batch_bytes = sum(tensor.nbytes for tensor in on_device.values())
    assert simulated_device.max_memory_allocated() - base <= model.fxoffload.plan.predicted.device_peak_bytes - batch_bytes
    model.fxoffload.close()


@pytest.mark.integration
def test_kernels_of_inductor_read_the_same_rows() -> None:
    plain = Marked()
    model = compiled(plain, executor="inductor", numerics="reordered")
    plain(**batch()).backward()
    model(**batch()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    model.fxoffload.close()


@pytest.mark.integration
def test_another_number_of_true_elements_than_rows_is_an_error_as_it_is_in_plain_pytorch() -> None:
    model, wrong = compiled(Marked()), batch() | {"mask": batch(9)["mask"]}
    with pytest.raises(RuntimeError):
        Marked()(**wrong)
    with pytest.raises(RuntimeError, match="as many elements as when the graph was captured"):
        model(**wrong)
    model.fxoffload.close()


class Scattered(nn.Module):
    """More rows than the mask has true elements: the gradient of the last ones is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.masked_scatter(mask.unsqueeze(-1), self.linear(rows)).transpose(1, 2).sin().square().mean()


@pytest.mark.integration
def test_rows_that_no_true_element_takes_have_no_gradient() -> None:
    plain = Scattered()
    given = batch() | {"rows": torch.randn(11, 32, requires_grad=True)}
    again = given | {"rows": given["rows"].detach().clone().requires_grad_()}
    model: Any = copy.deepcopy(plain)
    fxoffload.compile(model, given, device="cpu", device_budget="1MiB", dynamic=False)
    plain(**given).backward()
    model(**again).backward()
    assert_same(plain, model)
    assert torch.equal(given["rows"].grad, again["rows"].grad) and not again["rows"].grad[7:].any()  # type: ignore[union-attr, index]
    assert not any(map(masks.counts_true, model.fxoffload.graphs["train"].nodes))
    model.fxoffload.close()


def indexed(target: Any, args: Any, val: torch.Tensor, *inputs: torch.Tensor) -> fx.Graph:
    """A canonical graph of one op on inputs; `args` of them."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"in{i}") for i in range(len(inputs))]
    for node, tensor in zip(nodes, inputs, strict=True):
        node.meta |= {"val": tensor.to("meta"), INFO: NodeInfo(node.name, Role.BATCH)}
    node = graph.call_function(target, args(*nodes))
    node.meta["val"] = val.to("meta")
    graph.output(((node,), ()))
    return get_pass("canonicalize").run(graph, Context())


X = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
LAST, MIDDLE, WHOLE = torch.rand(4, 5) > 0.5, torch.rand(3, 4) > 0.5, torch.rand(2, 3, 4, 5) > 0.5
BYTES = MIDDLE.to(torch.uint8) * 3


@pytest.mark.unit
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize(("x", "before", "mask"), [
    (X, 0, WHOLE), (X, 1, MIDDLE), (X, 2, LAST), (X, 1, BYTES), (X.transpose(0, 3), 0, WHOLE.transpose(0, 3)), (X.transpose(0, 1), 2, LAST)])
def test_a_mask_at_any_dimension_gives_what_it_gave_and_lies_as_it_lay(x: torch.Tensor, before: int, mask: torch.Tensor) -> None:
    indices: list[torch.Tensor | None] = [*[None] * before, mask]
    expected = aten.index.Tensor(x, indices)
    rows = torch.randn_like(expected)
    read = indexed(aten.index.Tensor, lambda a, b: (a, [*[None] * before, b]), expected, x, mask)
    found = fx.Interpreter(fx.GraphModule({}, read)).run(x, mask)[0][0]
    assert not any(map(masks.counts_true, read.nodes)) and torch.equal(found, expected) and found.stride() == expected.stride()
    for sums in (False, True):
        expected = aten.index_put.default(x, indices, rows, sums)
        put = indexed(aten.index_put.default, lambda a, b, c, sums=sums: (a, [*[None] * before, b], c, sums), expected, x, mask, rows)
        found = fx.Interpreter(fx.GraphModule({}, put)).run(x, mask, rows)[0][0]
        assert not any(map(masks.counts_true, put.nodes)) and torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.unit
@pytest.mark.parametrize("x", [X, X.transpose(1, 3)])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 1), (2, 3, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1), (4, 5), (2, 1, 4, 1)])
@pytest.mark.parametrize("spare", [0, 1])
def test_the_gradient_of_a_masked_scatter_is_the_same_whatever_the_mask_lies_over(x: torch.Tensor, shape: tuple[int, ...], spare: int) -> None:
    if x.shape[1] != 3:
        shape = tuple({3: 5, 5: 3}.get(n, n) for n in shape)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    row = x.numel() // torch.broadcast_to(mask, x.shape).numel()
    n_elements = int(torch.broadcast_to(mask, x.shape).sum()) + spare * 60 * row
    expected = aten.masked_scatter_backward.default(x, mask, [n_elements])
    graph = indexed(aten.masked_scatter_backward.default, lambda a, b: (a, b, [n_elements]), expected, x, mask)
    found = fx.Interpreter(fx.GraphModule({}, graph)).run(x, mask)[0][0]
    assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.unit
def test_one_element_put_wherever_a_mask_is_true_is_chosen_and_of_many_masks_none_is_touched() -> None:
    one = torch.tensor(3.0)
    put = indexed(aten.index_put.default, lambda a, b, c: (a, [b], c), X, X, WHOLE, one)
    assert [node.target for node in put.find_nodes(op="call_function", target=aten.where.self)]
    assert torch.equal(fx.Interpreter(fx.GraphModule({}, put)).run(X, WHOLE, one)[0][0], aten.index_put.default(X, [WHOLE], one))
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "abc"]
    for node, tensor in zip(inputs, (X.to("meta"), WHOLE, one), strict=True):  # a mask on the host chooses nothing on the device
        node.meta |= {"val": tensor, INFO: NodeInfo(node.name, Role.BATCH)}
    node = graph.call_function(aten.index_put.default, (inputs[0], [inputs[1]], inputs[2]))
    node.meta["val"] = X.to("meta")
    graph.output(((node,), ()))
    assert sum(map(masks.counts_true, get_pass("canonicalize").run(graph, Context()).nodes)) == 1
    for shape, more in (((2,), (torch.rand(3) > 2,)), ((), ())):
        left = indexed(aten.index.Tensor, lambda a, *indices: (a, [*indices]), X, X, torch.rand(shape) > 2, *more)
        assert sum(map(masks.counts_true, left.nodes)) == 1
    assert "counts the true elements" in str(replays.obstacle(left))


@pytest.mark.unit
def test_numbers_are_not_written_by_a_kernel_that_writes_them_the_wrong_way_round_on_cuda() -> None:
    assert out_variant(aten.nonzero.default) is not None and out_variant(aten.nonzero_static.default) is None


@pytest.mark.gpu
def test_such_a_step_is_recorded_on_cuda_and_has_the_bits_of_plain_pytorch() -> None:
    plain = Marked()
    model, on_device = compiled(plain, device="cuda", device_budget="1GiB"), batch(device="cuda")
    plain.cuda()
    for _ in range(6):
        plain(**on_device).backward()
        model(**on_device).backward()
    assert model.fxoffload.plan.longest.replays
    assert_same(plain.cpu(), model)
    model.fxoffload.close()
