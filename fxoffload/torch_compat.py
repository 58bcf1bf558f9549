"""Every private torch import, with the versions it was seen in: 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd as _aot_autograd


def boxed_codegen() -> fx.CodeGen:
    """Code whose function takes one list and empties it (torch.fx.graph._BoxedCodeGen)."""
    return torch.fx.graph._BoxedCodeGen()


def aot_backend(
    forward: Callable[..., Any], backward: Callable[..., Any], inference: Callable[..., Any], partition: Callable[..., Any]
) -> Callable[..., Any]:
    """A Dynamo backend from compilers of the joint graph's halves (torch._dynamo.backends.common.aot_autograd)."""
    return _aot_autograd(  # type: ignore[no-any-return]
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
    )


@contextlib.contextmanager
def capture_config() -> Iterator[None]:
    """Settings of our own compile: logging calls do not break graphs, scalars are captured, backward runs without autocast as in
    eager."""

    ignored = {getattr(logging.Logger, n) for n in ("warning_once", "info_once") if hasattr(logging.Logger, n)}
    dynamo = torch._dynamo.config.patch(
        ignore_logging_functions=ignored, capture_scalar_outputs=True, recompile_limit=64, accumulated_recompile_limit=4096
    )
    with dynamo, torch._functorch.config.patch(backward_pass_autocast="off"):
        yield


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Asks for a symbolic size; a model that needs the number still gets it."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def source_names(gm: fx.GraphModule) -> list[str | None]:
    """For every input of a Dynamo graph the Python expression it came from; None for symbols."""
    names: list[str | None] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if source is None:
            names.append(None)
            continue
        name = source.name
        names.append(name() if callable(name) else name)
    return names
