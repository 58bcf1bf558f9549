"""What we do for some versions of torch and transformers only: needed by these, and by no other we run with."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from functorch.compile import default_partition
from torch._functorch._aot_autograd import graph_compile
from transformers.integrations import moe  # noqa: F401  (declares the grouped product)

from fxoffload.integrations import transformers
from fxoffload.torch_compat import CAPTURE_FAILURES, Half, aot_backend


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def product_and_gradients(multiply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    out = multiply(rows, weight, offs=torch.tensor([2, 2, 6], dtype=torch.int32))
    return [out, *torch.autograd.grad(out, (rows, weight), torch.randn(6, 5))]


@pytest.mark.unit
def test_our_grouped_product_is_there_when_transformers_gradient_cannot_be_traced() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def theirs(*args: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(*args, offs=offs)  # type: ignore[no-any-return]

    needed = torch.ops.transformers.grouped_mm_fallback in transformers.traceable()
    with pytest.raises(Exception, match="data-dependent") if needed else contextlib.nullcontext():
        product_and_gradients(theirs)


@pytest.mark.unit
def test_our_grouped_product_gives_the_bits_of_transformers_and_can_be_traced() -> None:
    plain = product_and_gradients(torch.ops.transformers.grouped_mm_fallback)
    for ours in (transformers._grouped_product, torch.compile(transformers._grouped_product, backend="aot_eager", fullgraph=True)):
        assert all(torch.equal(a, b) for a, b in zip(plain, product_and_gradients(ours), strict=True))


@pytest.mark.unit
def test_dynamo_traces_the_check_of_a_tensor_from_torch_2_13_on_which_reads_it_on_the_host() -> None:
    """In 2.11 the symbol of the value it reads belongs to no node, and the next op fails. Ours is asserted on the device in either."""
    @torch.compile(backend="eager", fullgraph=True)
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > 0)
        return x * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        with contextlib.nullcontext() if torch.__version__ >= "2.13" else pytest.raises(CAPTURE_FAILURES):
            checked(torch.ones(3))


@pytest.mark.unit
def test_autograd_prints_graphs_that_nobody_reads_and_halves_print_where_somebody_does() -> None:
    printed: list[str] = []

    class Noting(Half):
        def print_readable(self, print_output: bool = True, *args: Any, **options: Any) -> str:
            printed.append(super().print_readable(print_output, *args, **options))
            return printed[-1]

    def partition(*args: Any, **options: Any) -> tuple[fx.GraphModule, ...]:
        return tuple(Noting(half, half.graph) for half in default_partition(*args, **options))

    def called(gm: fx.GraphModule, _: Any) -> Any:
        return torch._dynamo.disable(gm.forward)

    def square(x: torch.Tensor) -> torch.Tensor:
        return x.square()

    for level, is_read in ((logging.WARNING, False), (logging.INFO, True)):
        printed.clear()
        torch._dynamo.reset()
        before = graph_compile.aot_graphs_log.level
        graph_compile.aot_graphs_log.setLevel(level)
        try:
            torch.compile(square, backend=aot_backend(called, called, called, partition))(torch.ones(2, requires_grad=True)).sum().backward()
        finally:
            graph_compile.aot_graphs_log.setLevel(before)
        assert printed and all(bool(text) is is_read for text in printed)
