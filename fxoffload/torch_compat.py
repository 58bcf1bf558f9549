"""Every private torch import, with the versions it was seen in: 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, cast

import sympy
import torch
import torch._dynamo
import torch._dynamo.eval_frame
import torch._dynamo.exc
import torch._functorch._aot_autograd.graph_compile
import torch._functorch.config
import torch.fx as fx
import torch._guards
import torch.fx.experimental._config
import torch.nn.attention
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg
from torch._C._dynamo.eval_frame import reset_code
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from .errors import PlanError

Size = int | torch.SymInt


def boxed_codegen() -> fx.CodeGen:
    """Code whose function takes one list and empties it (torch.fx.graph._BoxedCodeGen)."""
    return torch.fx.graph._BoxedCodeGen()


def same_nodes(graph: fx.Graph) -> fx.Graph:
    """A graph of the same nodes, under their names, with the same meta: what create_node does one by one (the name space, the list, the index by
    target and the length of torch.fx.Graph), but for asking whether a name is taken."""
    result, made = fx.Graph(), dict[fx.Node, fx.Node]()
    names, table, copy_of = result._graph_namespace, result._find_nodes_lookup_table.table, made.__getitem__
    for node in graph.nodes:
        op, target = node.op, node.target
        copy = fx.Node(result, node.name, op, target, map_arg(node.args, copy_of), map_arg(node.kwargs, copy_of) if node.kwargs else {}, node.type)
        made[node] = copy
        copy.meta.update(node.meta)
        names._obj_to_name[copy] = node.name
        result._insert(copy)
        table[op, target if op == "call_function" else None][copy] = None
    names._used_names.update(graph._graph_namespace._used_names)
    names._base_count.update(graph._graph_namespace._base_count)
    result._len = len(made)
    return result


def aot_backend(
    forward: Callable[..., Any], backward: Callable[..., Any], inference: Callable[..., Any], partition: Callable[..., Any]
) -> Callable[..., Any]:
    """A Dynamo backend from compilers of the joint graph's halves (torch._dynamo.backends.common.aot_autograd)."""
    return _aot_autograd(  # type: ignore[no-any-return]
        fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
    )


class Half(_LazyGraphModule):
    """A graph for AOTAutograd to hand on to its compilers: Python code is made of it only when it is called, and text only where torch's log
    of these graphs is read (AOTAutograd prints them whether it is or not)."""

    def print_readable(self, print_output: bool = True, *args: Any, **options: Any) -> str:
        """The graph as text; none where nobody would see it."""
        is_read = print_output or _TRACE_LOG.handlers or _GRAPHS_LOG.isEnabledFor(logging.INFO)
        return super().print_readable(print_output, *args, **options) if is_read else ""


_TRACE_LOG, _GRAPHS_LOG = torch._logging._internal.trace_log, torch._functorch._aot_autograd.graph_compile.aot_graphs_log


@contextlib.contextmanager
def capture_config() -> Iterator[None]:
    """Settings of our own compile: logging calls do not break graphs, scalars are captured, backward runs without autocast as in
    eager. Both halves are compiled before either runs: what one needs of the arena is known when the other takes it."""

    ignored = {getattr(logging.Logger, n) for n in ("warning_once", "info_once") if hasattr(logging.Logger, n)}
    # That one object is found in two places is guarded either way: by Python code, which Dynamo takes long to write, or in C++.
    dynamo = torch._dynamo.config.patch(
        ignore_logging_functions=ignored, capture_scalar_outputs=True, recompile_limit=64, accumulated_recompile_limit=4096,
        automatic_dynamic_shapes=False, skip_nnmodule_hook_guards=False, use_lamba_guard_for_object_aliasing=False,
    )
    # Only marked sizes are symbolic, and two that happen to be equal now are not one: what a capture is valid for depends on
    # the call alone, not on calls before it or on other models.
    shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]  # installed when it is imported
    functorch = torch._functorch.config.patch(backward_pass_autocast="off", force_non_lazy_backward_lowering=True)
    with dynamo, shapes, functorch, _known_values():
        _METRICS_LOG.addFilter(_says_more_than_settings)
        try:
            yield
        finally:
            _METRICS_LOG.removeFilter(_says_more_than_settings)


# As many values of a tensor that is made from numbers are known while a step is captured, and of what is computed from it alone; torch knows one.
_KNOWN_VALUES = 1 << 16
# Its package has a function of this name in its place.
_FAKE_TENSOR: Any = importlib.import_module("torch._subclasses.fake_tensor")


@contextlib.contextmanager
def _known_values() -> Iterator[None]:
    """What is cut by numbers that a graph has as constants has sizes that are known (FakeTensor.constant)."""
    before = _FAKE_TENSOR.CONSTANT_NUMEL_LIMIT
    _FAKE_TENSOR.CONSTANT_NUMEL_LIMIT = _KNOWN_VALUES
    try:
        yield
    finally:
        _FAKE_TENSOR.CONSTANT_NUMEL_LIMIT = before


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
    if isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides:  # of many tensors this is what takes no time
        return False
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def source_line_of(node: fx.Node) -> str:
    """File and line of the model's own code that made the node, "" when unknown. torch.fx keeps the stack as Python's traceback writes it."""
    calls = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(calls[-1]) if calls else ""


def written_inputs(joint: fx.Graph) -> list[int]:
    """Positions of the inputs that the forward of AOTAutograd's joint graph writes into (torch._functorch._aot_autograd.descriptors)."""
    outputs = joint.output_node().meta.get("desc", ())
    written = [d.mutated_input for d in outputs if isinstance(d, InputMutationAOTOutput)]
    return [one.idx for one in written if isinstance(one, PlainAOTInput)]


# Marks what an autograd.Function stashed on its context without `save_for_backward`. AOTAutograd keeps a saved value that bears it
# as long as the loss lives; without it backward frees the value (torch._functorch.autograd_function, 2.13).
STASHED = "saved_tensor_with_no_vc_check"


def keeps_graph() -> bool:
    """Whether the backward that runs now was called with retain_graph (torch._C._autograd._get_current_graph_task_keep_graph)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saved_tensors_are_hooked() -> bool:
    """Whether what autograd keeps now is packed by hooks (torch._C._autograd._top_saved_tensors_default_hooks), `save_on_cpu` for one."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def when_backward_begins(node: Any, begun: Callable[[Sequence[object]], contextlib.AbstractContextManager[None]]) -> None:
    """The backward of AOTAutograd's `node` runs inside `begun` of the gradients that it is given; nothing happens for a node of others.

    torch has no hook there: pre-hooks of a node may be followed by others that change what it is given.
    """
    function: Any = getattr(node, "_forward_cls", None)
    if not hasattr(function, "_aot_id"):
        return
    if _BEGUN not in vars(function):
        setattr(function, _BEGUN, True)
        function.backward = staticmethod(_beginning(function.backward))
    setattr(node, _BEGUN, begun)


_BEGUN = "_fxoffload_begun"


def _beginning(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def begins(ctx: Any, *given: Any) -> Any:
        begun = vars(ctx).pop(_BEGUN, None)
        if begun is None:
            return backward(ctx, *given)
        # From 2.13 on the gradients come as one list, which is emptied.
        with begun(list(given[0]) if len(given) == 1 and isinstance(given[0], list) else given):
            return backward(ctx, *given)

    return begins


def allow_second_backward() -> None:
    """The graph AOTAutograd is compiling now may run backward with retain_graph: our backward reuses no saved value's memory.

    Called by the forward's compiler, after the partition (torch._functorch.config.donated_buffer is read again at run time).
    """
    metadata = torch._guards.TracingContext.get().fw_metadata
    if metadata is not None:
        metadata.bw_donated_idxs = []


def attention_order() -> tuple[int, ...]:
    """The numbers of attention's kernels (torch.nn.attention.SDPBackend) in the order in which torch asks them
    (torch._C._get_sdp_priority_order). On CUDA torch settles it when it first asks."""
    return tuple(torch._C._get_sdp_priority_order())


# What Dynamo's graph calls where a model enters or leaves `torch.nn.attention.sdpa_kernel` (torch.nn.attention._sdpa_kernel).
SWITCH_KERNELS = torch.nn.attention._sdpa_kernel


def use_expandable_segments() -> None:
    """The CUDA caching allocator grows segments in place from now on (torch._C._accelerator_setAllocatorSettings); what the process
    has in its environment stays, also when it says that they must not grow."""
    known = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" not in known:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [known, "expandable_segments:True"])))


# The last is a branch on a size that depends on values; Dynamo lets it through as it is.
CAPTURE_FAILURES = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit, GuardOnDataDependentSymNode)


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
        self.traced: ShapeEnv | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        assert method is not None, "a compiled function outlived its Session"
        self.traced = tracing_mode().shape_env
        return method(*args, **kwargs)


class CompiledStep:
    """`function` under torch.compile with the method `backend`, as one graph or not at all."""

    def __init__(self, function: Callable[..., Any], backend: Callable[..., Any]) -> None:
        self._backend = WeakBackend(backend)
        self._compiled = torch.compile(function, backend=self._backend, fullgraph=True)
        self._forget = weakref.finalize(self, _forget, function.__code__, id(self._backend))  # type: ignore[attr-defined]
        self._forget.atexit = False

    def __call__(self, *args: Any) -> Any:
        try:
            return self._compiled(*args)
        finally:
            if self._backend.traced is not None:
                _release(self._backend.traced)
                self._backend.traced = None

    def forget(self) -> None:
        """Dynamo remembers nothing of it any more; so too when this object ends."""
        self._forget()


def _release(env: ShapeEnv) -> None:
    """Lets go of what would keep a ShapeEnv for good once its capture has ended: the fake inputs that it tracks, whose sizes hold it in
    C++, where the collector does not see them, and torch's unbounded caches of its methods."""
    env.tracked_fakes = None
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


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


def dict_versions(tables: Iterable[dict[str, Any]]) -> list[int] | None:
    """One number per table, which differs after every write into it; None where this torch or Python cannot tell."""
    return None if _dict_version is None else list(map(_dict_version, tables))


try:
    from torch._C._dynamo.guards import dict_version as _dict_version
except ImportError:
    _dict_version = None  # type: ignore[assignment]


def device_sleep(cycles: int) -> None:
    """Keeps the current CUDA stream busy for `cycles` of the device's clock (torch.cuda._sleep)."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def clear_workspaces() -> None:
    """Gives the memory that cuBLAS has per thread and stream back to the allocator; what needs it next gets it anew."""
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]


def has_pool_allocators() -> bool:
    """Whether torch's caching allocator takes memory for a pool from functions of ours."""
    return hasattr(torch._C, "_cuda_customAllocator")


def pool_allocator(allocate: int, free: int) -> Any:
    """What a memory pool's segments come from: the addresses of C functions (bytes, device index, stream) -> address, and (address, bytes,
    device index, stream)."""
    return torch._C._cuda_customAllocator(allocate, free)  # type: ignore[attr-defined]


def unowned(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The same bytes, whose memory the result does not keep: it must not outlive their owner. As a tensor of `device`, which can reach them
    there: page-locked host memory has one address for the host and for CUDA devices."""
    storage, device = tensor.untyped_storage(), device or tensor.device
    again = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), device, storage.nbytes())  # type: ignore[attr-defined]
    out = torch.empty(0, dtype=tensor.dtype, device=device)
    return out.set_(again, tensor.storage_offset(), tensor.shape, tensor.stride())


def ends_empty(graph: torch.cuda.CUDAGraph) -> bool:
    """Ends the graph's capture. True when nothing was captured, which torch says in a warning alone."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        graph.capture_end()
    others = [one for one in said if "Graph is empty" not in str(one.message)]
    for one in others:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return len(others) < len(said)


def end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Ends what a CUDA graph's capture into `pool` leaves begun when its end fails, on a stream that is not the default one.

    torch ends neither the pool's turn in the allocator, which from then on waits with what streams have used, nor the capture of the
    device's generator, which draws no more. A capture that works ends the latter.
    """
    with contextlib.suppress(RuntimeError):  # it has ended, where the failure came later
        torch._C._cuda_endAllocateToPool(device.index, pool)  # type: ignore[attr-defined]
        torch._C._cuda_releasePool(device.index, pool)  # type: ignore[attr-defined]
    word, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    word.zero_()
    graph.capture_end()


def ambient_settings(device: torch.device) -> dict[str, object]:
    """Every process-wide choice that tracing, or what a trace is planned to run on, depends on."""
    cuda, types = torch.backends.cuda, sorted({"cpu", "cuda", device.type})
    return {
        "modes": {
            "grad": torch.is_grad_enabled(), "inference": torch.is_inference_mode_enabled(), "anomaly": torch.is_anomaly_enabled(),
            "function modes": torch._C._len_torch_function_stack(), "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "autocast": {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types},
            "autocast cache": torch.is_autocast_cache_enabled(),
        },
        "numerics": {
            "default dtype": torch.get_default_dtype(), "default device": torch.get_default_device(),
            "matmul": torch.get_float32_matmul_precision(), "tf32": (cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
            "reduced": (cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction),
            "deterministic": (
                torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
                torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
            "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
            "mkldnn": torch.backends.mkldnn.enabled,  # type: ignore[attr-defined]
        },
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
            cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "card": _card(device),
        "tracing": _settings_of(torch._functorch.config), "symbols": _settings_of(torch.fx.experimental._config),
    }


def _card(device: torch.device) -> object:
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    return (card.name, card.major, card.minor, card.multi_processor_count, card.total_memory, torch.version.cuda)


def _settings_of(config: Any) -> dict[str, object]:
    """All settings of one of torch's config modules (torch.utils._config_module), private ones apart."""
    return {name: value for name, value in config.get_config_copy().items() if not name.startswith("_")}


def symbol_hints(env: ShapeEnv) -> Mapping[sympy.Symbol, sympy.Integer]:
    """The value of every backed symbol at capture. torch 2.13 renamed the attribute and warns on the old name."""
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def tracing_mode() -> Any:
    """The FakeTensorMode of the capture that is going on, with its ShapeEnv (torch._guards.TracingContext)."""
    return torch._guards.TracingContext.get().fake_mode


def is_tracing() -> bool:
    """Whether a capture is going on."""
    return torch._guards.TracingContext.try_get() is not None


def fake_mode_of(values: Iterable[object]) -> Any:
    """The FakeTensorMode of fake values (torch._guards.detect_fake_mode)."""
    return torch._guards.detect_fake_mode(list(values))


def fake_tensor(
    mode: Any, shape: Sequence[Size], stride: Sequence[Size], offset: Size, dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:
    """A fake tensor of `mode` that has memory of its own, `offset` elements into it. No guard is set."""
    quiet = mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
    with mode, quiet:
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
        steps = 0 if 0 in [n for n in shape if isinstance(n, int)] else sum((n - 1) * step for n, step in zip(shape, stride))
        return torch.empty(offset + steps + 1, dtype=dtype, device=device).as_strided(tuple(shape), tuple(stride), offset)


def copy_origin(made: fx.GraphModule, gm: fx.GraphModule) -> None:
    """`made`, with the inputs of the Dynamo graph `gm`, counts as Dynamo's too: AOTAutograd's guards name where inputs come from
    (torch._dynamo.backends.distributed.propagate_dynamo_metadata)."""
    made.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        made._param_name_to_source = gm._param_name_to_source
    for node, copy in zip(gm.graph.find_nodes(op="placeholder"), made.graph.find_nodes(op="placeholder"), strict=True):
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source


def symbol_facts() -> dict[str, object]:
    """What the going capture has found out about its symbols: every guard, replacement and range (ShapeEnv)."""
    env = tracing_mode().shape_env
    return {
        "guards": [str(guard.expr) for guard in env.guards],
        "replacements": sorted((str(symbol), str(expr)) for symbol, expr in env.replacements.items()),
        "ranges": sorted((str(symbol), str(bounds)) for symbol, bounds in env.var_to_range.items()),
        "assertions": sorted(str(symbol) for symbol in env.deferred_runtime_asserts),
    }


# What AOTAutograd notes of a step beside what its wrappers do: where it was traced, and what is found out after the partition.
_PASSING = frozenset({
    "traced_tangents_descs", "tangent_source_stack_traces", "compile_id_str", "bw_donated_idxs", "dynamic_saved_tensors_idxs"})


def triton_kernel_of(node: fx.Node) -> str | None:
    """The name of the user's Triton kernel that a node launches (torch._higher_order_ops.triton_kernel_wrap); None for all else."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    if node.target not in (wrap.triton_kernel_wrapper_mutation, wrap.triton_kernel_wrapper_functional):
        return None
    kernel: Any = wrap.kernel_side_table.get_kernel(cast(int, node.kwargs["kernel_idx"]))
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):  # what tunes it stands around it
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", kernel))


@functools.cache
def triton_kernel_classes() -> tuple[type[Any], ...]:
    """The classes of what launches a Triton kernel (triton.runtime): none where Triton is not installed."""
    try:
        from triton.runtime import Autotuner, Heuristics, JITFunction
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return ()
    return (JITFunction, Autotuner, Heuristics, InterpretedFunction)


def is_left_whole(function: Callable[..., Any]) -> bool:
    """Dynamo leaves calls of a function or an autograd Function as they are, for AOTAutograd to call."""
    return bool(torch._dynamo.trace_rules.is_callable_allowed(function))


def leave_whole(function: Callable[..., Any]) -> None:
    """From now on it does so (torch.compiler.allow_in_graph)."""
    torch._dynamo.allow_in_graph(function)


def trace_again(function: Callable[..., Any]) -> None:
    """Dynamo goes into calls of it as it does by default."""
    if is_left_whole(function):
        torch._dynamo.trace_rules._allowed_callable_ids.remove(id(function))


def wrapper_facts() -> dict[str, object] | None:
    """What AOTAutograd's run-time wrappers of the step it is compiling are made from, as plain values: of two steps with equal facts
    they are the same. None before it is known (ViewAndMutationMeta; asked by the compilers of forward and inference)."""
    metadata = torch._guards.TracingContext.get().fw_metadata
    if metadata is None:
        return None
    return {f.name: _facts_of(getattr(metadata, f.name)) for f in dataclasses.fields(metadata) if f.name not in _PASSING}


def _facts_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value.dtype), [str(n) for n in value.shape], [str(n) for n in value.stride()],
                str(value.device), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [_facts_of(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, dict):
        return sorted((str(key), _facts_of(item)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _facts_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value.__qualname__ if isinstance(value, type) else value if isinstance(value, (bool, int)) else str(value)


def has_plain_wrappers(facts: dict[str, Any]) -> bool:
    """Whether AOTAutograd's wrappers of a step (`wrapper_facts`) only pass values on: no input is written, no output is a view."""
    written = any(
        one[name] for one in facts["input_info"] for name in ("mutates_data", "mutates_metadata", "mutates_storage_metadata"))
    views = any(one["output_type"] != "OutputType.non_alias" for one in facts["output_info"])
    return not (written or views or facts["num_intermediate_bases"] or facts["tokens"])


def returned_gradients(facts: dict[str, Any]) -> list[bool]:
    """For each output of a step (`wrapper_facts`) whether it takes part in backward."""
    return [bool(one["requires_grad"]) for one in facts["output_info"]]


# Inductor -------------------------------------------------------------------------------------------------------------


def has_inductor(device: torch.device) -> bool:
    """Whether Inductor compiles kernels for the device's type."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    return device.type != "mps" and get_scheduling_for_device(device.type) is not None


def shape_env_of(values: Iterable[object]) -> ShapeEnv | None:
    """The ShapeEnv of the symbols in fake values and sizes; None where there are none."""
    for value in values:
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return cast(ShapeEnv, size.node.shape_env)
    return None


# One kernel of a program, without memory of its own: nothing is put down in between, and no sum is split in two. No kernel is chosen by
# timing several at its first call: that takes memory that no plan has, and may choose other sums in the next process.
_ONE_KERNEL = {
    "realize_reads_threshold": 1 << 20, "realize_opcount_threshold": 1 << 20, "realize_acc_reads_threshold": 1 << 20,
    "max_pointwise_cat_inputs": 8, "split_reductions": False, "size_asserts": False, "max_fusion_size": 1 << 10, "triton.cudagraphs": False,
    "benchmark_fusion": False, "unroll_reductions_threshold": 1, "deterministic": True, "triton.autotune_pointwise": False,
}


def traced_program(body: Callable[..., object], inputs: Sequence[Any]) -> fx.GraphModule:
    """`body` (of fake tensors and symbols; what it writes to are inputs) in the ops that Inductor lowers."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), _disable_current_modes(), cast(Any, fake_mode_of(inputs)):
        return make_fx(body, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)


def kernel_options(sums_rows: bool) -> dict[str, Any]:
    """Inductor's options for a fused program.

    `sums_rows`: its sums and what is made of them step through their elements in one order, that of their sizes. Otherwise each loop may
    have the order of its memory, and loops of two orders are two kernels where one needs another's sum.
    """
    from torch._inductor import config

    wanted = {**_ONE_KERNEL, "pick_loop_orders": not sums_rows}
    return {name: value for name, value in wanted.items() if hasattr(config, name) or "." in name}


def lower_in_place(write: torch._ops.OpOverload) -> None:
    """Has Inductor lower `write(out, value)` to a loop that computes the value in `out`.

    Its `copy_` first puts down a value that reads several others, in loops of that value's order, and then copies it. Which of the loops
    become one kernel, and whether the memory between them is one too many, depends on sizes and on what else reads the value.
    """
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import lowerings, mutate_to, register_lowering

    if write in lowerings:
        return

    def lowered(out: Any, value: Any) -> Any:
        there = Pointwise.create(device=out.get_device(), dtype=out.get_dtype(), inner_fn=value.make_loader(), ranges=out.get_size())
        return mutate_to(out, there, unsafe_alias=True)  # nothing else reads what was made just now

    register_lowering(write, type_promotion_kind=None)(lowered)


def compiled_by_inductor(
    traced: fx.GraphModule, inputs: Sequence[Any], sums_rows: bool, write: torch._ops.OpOverload
) -> tuple[Callable[[list[Any]], object], int, int]:
    """A traced program of such inputs as a function of a list, the kernels that it calls and the allocations that it makes. `write`: the op
    that puts a value into an input."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    lower_in_place(write)
    context = torch._guards.TracingContext(fake_mode_of(inputs))
    with torch._guards.tracing(context), torch.no_grad(), config.patch(kernel_options(sums_rows)), _disable_current_modes():
        compiled = cast(Any, compile_fx_inner(traced, list(inputs)))
    source = str(compiled.source_code)
    n_kernels = source.count(".run(")
    return compiled, n_kernels, source.count("= empty_strided_")
