"""Two graphs on the numeric twin: the same random inputs, the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from .. import text
from ..graph import Bounds
from ..twin import run_twin


def assert_same_results(before: fx.Graph, after: fx.Graph, seed: int = 0) -> None:
    """Both graphs return the same bits for the same random inputs, leave the same in their inputs and draw the same random numbers.

    Raises AssertionError naming the first output that differs, VerifyError where the twin refuses a graph.
    """
    bounds = text.hint_bounds(before)
    expected, got = (_run(graph, random_inputs(before, bounds, seed), seed) for graph in (before, after))
    assert len(expected) == len(got), f"{len(expected)} results before, {len(got)} after"
    for i, (a, b) in enumerate(zip(expected, got)):
        assert _same_bits(a, b), f"result {i} differs: {a} before, {b} after"


def random_inputs(graph: fx.Graph, bounds: Bounds, seed: int = 0) -> list[object]:
    """One value per input of `graph`, at its largest size: normal floats, integers below 4 (valid as small indices), symbols."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(node.meta.get("val"), bounds, generator) for node in graph.find_nodes(op="placeholder")]


def _random(fake: object, bounds: Bounds, generator: torch.Generator) -> object:
    if isinstance(fake, torch.SymInt):
        return bounds.of(fake)
    if not isinstance(fake, torch.Tensor):
        return fake
    shape, stride = ([bounds.of(n) for n in sizes] for sizes in (fake.shape, fake.stride()))
    value = torch.empty_strided(shape, stride, dtype=fake.dtype)
    if fake.dtype.is_floating_point or fake.dtype.is_complex:
        return value.normal_(generator=generator)
    return value.random_(0, 2 if fake.dtype is torch.bool else 4, generator=generator)


def _run(graph: fx.Graph, inputs: list[object], seed: int) -> list[object]:
    """Flat results, then the inputs as the run left them, then what the generator draws next."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        results = list(_flat(run_twin(graph, inputs)))
        return [*results, *inputs, torch.rand(1)]


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _same_bits(a: object, b: object) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals itself and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
