"""What CUDA kernels take for themselves is what a plan counts for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.fx as fx

from fxoffload.graph import Bounds
from fxoffload.workspace import Workspace

aten = torch.ops.aten
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
# Rows, columns, bytes that a card of 132 multiprocessors was seen to take (H200, torch 2.11).
SEEN = {"sum": ((1, 4096, 2048), 67_108_864), "embedding": ((1, 4096, 2048, 128256), 36_904_960)}
SUMS = [((8192, 4096), (0,)), ((4, 2048, 2048), (0, 1)), ((1, 4096, 2048), (0, 1)), ((8192, 130), (0,)), ((700, 4096), (0,)),
        ((8192, 4096), (1,)), ((16384, 14336), (0,)), ((2, 8, 1024, 128), (0, 2)), ((100000, 3), (0,)), ((8192, 4096), (0, 1))]
EMBEDDINGS = [(1, 4096, 2048, 128256), (4, 2048, 2048, 128256), (2, 1024, 512, 1000), (8, 2048, 100, 300)]


def planned(target: Callable[..., object], *args: object, device_type: str = "cuda", multiprocessors: int = 132) -> int:
    graph = fx.Graph()
    nodes = []
    for arg in args:
        nodes.append(graph.placeholder("x") if isinstance(arg, torch.Tensor) else arg)
        if isinstance(arg, torch.Tensor):
            nodes[-1].meta["val"] = arg
    node = graph.call_function(target, tuple(nodes))
    return Workspace(Bounds({}), device_type, multiprocessors)(node)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_a_sum_over_rows_and_an_embedding_s_gradient_are_planned_with_what_was_seen() -> None:
    shape, seen = SEEN["sum"]
    assert planned(aten.sum.dim_IntList, empty(*shape), [0, 1]) == seen
    (batch, length, width, n_weights), seen = SEEN["embedding"]
    ids = empty(batch, length, dtype=torch.int64)
    assert seen <= planned(aten.embedding_dense_backward.default, empty(batch, length, width), ids, n_weights, -1, False) <= 1.01 * seen


def test_what_takes_nothing_is_planned_with_nothing() -> None:
    assert planned(aten.sum.dim_IntList, empty(8192, 4096), [1]) == 0, "along the columns"
    assert planned(aten.sum.dim_IntList, empty(512, 4096), [0]) == 0, "few rows"
    assert planned(aten.sum.dim_IntList, empty(8192, 4096), [0], device_type="cpu") == 0
    assert planned(aten.embedding_dense_backward.default, empty(1, 1024, 64), empty(1, 1024, dtype=torch.int64), 500, -1, False) == 0


def test_more_multiprocessors_share_a_sum_among_more() -> None:
    few, many = (planned(aten.sum.dim_IntList, empty(8192, 4096), [0], multiprocessors=n) for n in (66, 132))
    assert many == 2 * few == 4 * 4096 * 66 * 128


@pytest.fixture
def taken() -> Iterator[Callable[[Callable[[], torch.Tensor]], int]]:
    """Bytes that a function asks of the allocator at once beyond its result, the second time it is called."""

    def measure(function: Callable[[], torch.Tensor]) -> int:
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            made = function()
            torch.cuda.synchronize()
            n_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - made.nbytes
            del made
        return n_bytes

    yield measure


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "dims"), SUMS, ids=str)
def test_a_sum_takes_no_more_than_is_planned(
    shape: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, taken: Callable[..., int]
) -> None:
    src = torch.zeros(shape, device="cuda", dtype=dtype)
    found = taken(lambda: aten.sum.dim_IntList(src, list(dims)))
    bound = planned(aten.sum.dim_IntList, src, list(dims), multiprocessors=torch.cuda.get_device_properties().multi_processor_count)
    assert found <= bound + 64 * 1024
    assert bound <= found + 64 * 1024, "and not much more is planned than it takes"


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", EMBEDDINGS, ids=str)
def test_an_embedding_s_gradient_takes_no_more_than_is_planned(
    shape: tuple[int, int, int, int], dtype: torch.dtype, taken: Callable[..., int]
) -> None:
    batch, length, width, n_weights = shape
    grad = torch.zeros(batch, length, width, device="cuda", dtype=dtype)
    ids = torch.randint(0, n_weights, (batch, length), device="cuda")
    args = grad, ids, n_weights, -1, False
    found = taken(lambda: aten.embedding_dense_backward.default(*args))
    bound = planned(aten.embedding_dense_backward.default, *args)
    assert found <= bound + 64 * 1024
    assert bound <= 1.1 * found + (2 << 20), "and not much more is planned than it takes"
