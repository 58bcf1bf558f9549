"""Lowering a canonical graph, and what its lowered form saves and leaves on disk."""

from __future__ import annotations

import torch.fx as fx

from . import ops
from .effects import Tier
from .footprint import Footprint
from .graph import Bounds, border_of, info
from .pipeline import Pass, Pipeline, get_pass, pipeline_names
from .runtime.slabs import whole_pages
from .split import saved_names


def rewrites(footprint: Footprint = Footprint()) -> Pipeline:
    """The rewrites that lower a canonical graph, as one Pipeline; with those that place its values, where memory is planned by offsets."""
    return Pipeline([get_pass(name) for name in pipeline_names("lower")] + (placing(footprint) if footprint.by_offsets else []))


def placing(footprint: Footprint) -> list[Pass]:
    """The rewrites that give a lowered graph's values their places, for the footprint's pages."""
    return [
        step.with_options({"page_bytes": footprint.page_bytes}) if "page_bytes" in step.options else step
        for step in map(get_pass, pipeline_names("place"))]


def saved_of(lowered: fx.Graph) -> tuple[str, ...]:
    """Names of what forward hands to backward, inputs and symbols apart; () without a backward."""
    if border_of(lowered) is None:
        return ()
    inputs = {info(n).name for n in lowered.find_nodes(op="placeholder")}
    return tuple(n for n in saved_names(lowered) if n not in inputs)


def disk_values_bytes(lowered: fx.Graph, bounds: Bounds) -> int:
    """Bytes of a disk file that never lacks room for what the graph sends there.

    Each value has its place, each gradient two: the caller may keep the last one while the next is made.
    """
    total = 0
    for node in lowered.find_nodes(op="call_function", target=ops.swap_out):
        if node.args[2] == Tier.DISK.value:
            n_bytes = whole_pages(bounds.bytes_of(node.meta["val"]))
            total += n_bytes * (2 if info(node).name.endswith(".grad/out") else 1)
    return total
