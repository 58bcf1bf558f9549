"""Every private torch import, with the versions it was seen in: 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, cast

import torch
import torch._dynamo
import torch._dynamo.eval_frame
import torch._dynamo.exc
import torch._functorch.config
import torch.fx as fx
import torch._guards
import torch.fx.experimental._config
from torch._C._dynamo.eval_frame import reset_code
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from .errors import PlanError


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
        ignore_logging_functions=ignored, capture_scalar_outputs=True, recompile_limit=64, accumulated_recompile_limit=4096,
        automatic_dynamic_shapes=False, skip_nnmodule_hook_guards=False,
    )
    # Only marked sizes are symbolic, and two that happen to be equal now are not one: what a capture is valid for depends on
    # the call alone, not on calls before it or on other models.
    shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]  # installed when it is imported
    with dynamo, shapes, torch._functorch.config.patch(backward_pass_autocast="off"):
        _METRICS_LOG.addFilter(_says_more_than_settings)
        try:
            yield
        finally:
            _METRICS_LOG.removeFilter(_says_more_than_settings)


_METRICS_LOG = logging.getLogger("torch._dynamo.metrics_context")


def _says_more_than_settings(record: logging.LogRecord) -> bool:
    """2.11 complains that it cannot write the ignored functions into its log as JSON, with a traceback per capture."""
    return "logging compilation metrics" not in record.getMessage()


def backward_without_autocast() -> contextlib.AbstractContextManager[None]:
    """AOTAutograd traces backward outside the ambient autocast, as eager runs it (torch._functorch.config)."""
    return torch._functorch.config.patch(backward_pass_autocast="off")  # type: ignore[no-any-return, no-untyped-call]


def compile_id() -> str:
    """Dynamo's number of the frame and graph being compiled, as "0-0" (torch._guards.CompileContext)."""
    return str(torch._guards.CompileContext.current_compile_id() or "0/0").replace("/", "-")


def graph_break(gm: fx.GraphModule) -> str | None:
    """Why and where a Dynamo graph ends before its frame does, None when it does not (gm.compile_subgraph_reason)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    where = f" at {reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno}" if reason.user_stack else ""
    return reason.reason.splitlines()[0] + where


def without_modes() -> contextlib.AbstractContextManager[None]:
    """Real computation inside a capture's fake mode (torch.utils._python_dispatch._disable_current_modes)."""
    return _disable_current_modes()  # type: ignore[no-any-return]


def fake_like(like: torch.Tensor, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new contiguous fake tensor where the fake tensor `like` is. Sizes may be expressions of its symbols: making it sets no guard
    on them (ShapeEnv.suppress_guards)."""
    mode = like.fake_mode  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
        return like.new_empty(shape, dtype=dtype)


def has_unbacked_sizes(value: object) -> bool:
    """Whether a fake value's sizes, or the value itself, are known only once it is there (torch.fx.experimental.symbolic_shapes)."""
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def written_inputs(joint: fx.Graph) -> list[int]:
    """Positions of the inputs that the forward of AOTAutograd's joint graph writes into (torch._functorch._aot_autograd.descriptors)."""
    outputs = joint.output_node().meta.get("desc", ())
    return [cast(PlainAOTInput, d.mutated_input).idx for d in outputs if isinstance(d, InputMutationAOTOutput)]


# Marks what an autograd.Function stashed on its context without `save_for_backward`. AOTAutograd keeps a saved value that bears it
# as long as the loss lives; without it backward frees the value (torch._functorch.autograd_function, 2.13).
STASHED = "saved_tensor_with_no_vc_check"


# Whether Dynamo can trace torch._check_tensor_all. In 2.11 the symbol of the value it reads belongs to no node, and the next op fails.
TRACES_TENSOR_CHECKS = torch.__version__ >= "2.13"


def keeps_graph() -> bool:
    """Whether the backward that runs now was called with retain_graph (torch._C._autograd._get_current_graph_task_keep_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def allow_second_backward() -> None:
    """The graph AOTAutograd is compiling now may run backward with retain_graph: our backward reuses no saved value's memory.

    Called by the forward's compiler, after the partition (torch._functorch.config.donated_buffer is read again at run time).
    """
    metadata = torch._guards.TracingContext.get().fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []


def use_expandable_segments() -> None:
    """The CUDA caching allocator grows segments in place from now on (torch._C._accelerator_setAllocatorSettings); what the process
    has in its environment stays, also when it says that they must not grow."""
    known = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" not in known:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [known, "expandable_segments:True"])))


CAPTURE_FAILURES = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def inner_error(error: BaseException) -> BaseException | None:
    """What our backend raised, or one of our ops while it was traced, when that is the failure, else None."""
    if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
        return error.inner_exception
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PlanError):
        cause = cause.__cause__ or cause.__context__
    return cause


def failure_text(error: Exception) -> str:
    """Dynamo's own words; of a hit recompile limit, those that say which."""
    limit_hit = isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit) and error.__cause__ is not None
    return str(error.__cause__ if limit_hit else error)


class WeakBackend:
    """A bound method as Dynamo's backend without keeping its object alive: Dynamo remembers every backend it has seen."""

    __name__ = "fxoffload"

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        assert method is not None, "a compiled function outlived its Session"
        return method(*args, **kwargs)


class CompiledStep:
    """`function` under torch.compile with the method `backend`, as one graph or not at all."""

    def __init__(self, function: Callable[..., Any], backend: Callable[..., Any]) -> None:
        self._backend = WeakBackend(backend)
        self._compiled = torch.compile(function, backend=self._backend, fullgraph=True)
        self._forget = weakref.finalize(self, _forget, function.__code__, id(self._backend))  # type: ignore[attr-defined]
        self._forget.atexit = False

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)

    def forget(self) -> None:
        """Dynamo remembers nothing of it any more; so too when this object ends."""
        self._forget()


def _forget(code: CodeType, backend: int) -> None:
    # Dynamo's map from compiled to original code keeps both alive, and with them everything compiled.
    reset_code(code)
    torch._dynamo.eval_frame.cached_backends.pop(backend, None)


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


def device_sleep(cycles: int) -> None:
    """Keeps the current CUDA stream busy for `cycles` of the device's clock (torch.cuda._sleep)."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
