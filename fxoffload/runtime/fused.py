"""Fused programs as kernels: Inductor compiles each program once per form of its operands, and it writes where its results are to lie.

A program is one kernel without memory of its own, or it is refused: what it takes is in no plan.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import sympy
import torch
import torch.fx as fx

from ..errors import PlanError
from ..fusion import fused, program, run_program, sums_rows, write
from ..graph import name_of
from ..text_words import expr_of
from ..torch_compat import compiled_by_inductor, fake_mode_of, fake_tensor, has_inductor, shape_env_of, traced_program
from .device_arena import DeviceArena
from .loops import in_finest_sizes

log = logging.getLogger("fxoffload")

Kernel = Callable[[list[Any]], object]
Layout = tuple[tuple[int, ...], tuple[int, ...]]

# Kernels of programs without symbols, and per ShapeEnv of those with: a kernel is made for what is known of its symbols.
_STATIC: dict[object, Kernel] = {}
_SYMBOLIC: weakref.WeakKeyDictionary[Any, dict[object, Kernel]] = weakref.WeakKeyDictionary()
_told: set[str] = set()


def fused_call(node: fx.Node, offsets: Mapping[int, int] = {}, arena: DeviceArena | None = None) -> Callable[..., Sequence[torch.Tensor]]:
    """What to call in a `fxo.fused` node's place. `offsets`: of the results that lie in the arena, by their index.

    Where Inductor has no backend for the device the program runs op by op, which is logged. Raises PlanError for a program that is more than
    one kernel on an accelerator.
    """
    device = node.meta["val"][0].device
    if has_inductor(device):
        return FusedCall(Form(node), offsets, arena)
    if device.type not in _told:
        _told.add(device.type)
        log.warning("Inductor has no backend for %s: fused programs run op by op", device.type)
    return run_program if arena is None else _RunThere(offsets, arena)


def kernel_calls(graphs: Iterable[fx.Graph]) -> Counter[object]:
    """How often each kernel is called in the graphs. Two calls of one program, of operands that lie alike, are of one kernel."""
    return Counter(Form(node).key() for graph in graphs for node in graph.find_nodes(op="call_function", target=fused))


class _RunThere:
    """A program op by op, its results copied to their places."""

    def __init__(self, offsets: Mapping[int, int], arena: DeviceArena) -> None:
        self.__name__ = self.__qualname__ = "fused"
        self.__module__ = __name__
        self._offsets, self._arena = offsets, arena

    def __call__(self, values: Sequence[torch.Tensor], text: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        made = run_program(values, text, sizes)
        return [
            self._arena.strided(self._offsets[i], v.shape, v.stride(), v.dtype).copy_(v) if i in self._offsets else v
            for i, v in enumerate(made)]


class FusedCall:
    """A call of a program's kernel: the one of the operands' layouts, which need not be those that tracing assumed. (The gradients that memory-efficient
    attention gives lie otherwise than their operands, say.)"""

    def __init__(self, form: Form, offsets: Mapping[int, int], arena: DeviceArena | None) -> None:
        self.__name__ = self.__qualname__ = "fused"
        self.__module__ = __name__
        self._form, self._arena = form, arena
        self._kernel, self._layouts = form.kernel(), form.layouts()
        self._kernels: dict[object, Kernel] = {}
        self._numbers = form.symbolic_sizes
        self._results = tuple((offsets.get(i), v.dtype, v.device) for i, v in enumerate(form.results))

    def __call__(self, values: Sequence[torch.Tensor], text: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        lie, outs = tuple([(v.shape, v.stride()) for v in values]), []
        kernel = self._kernels.get(lie)
        if kernel is None:
            kernel = self._kernels[lie] = self._kernel_of(values, sizes)
        for (offset, dtype, device), (shape, stride) in zip(self._results, self._layouts(values, sizes)):
            if offset is None or self._arena is None:
                outs.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
            else:
                outs.append(self._arena.strided(offset, shape, stride, dtype))
        kernel([*values, *(sizes[i] for i in self._numbers), *outs])
        return outs

    def _kernel_of(self, values: Sequence[torch.Tensor], sizes: Sequence[int]) -> Kernel:
        """The kernel for operands that lie as these do."""
        assumed = self._form.strides()(values, sizes)
        if all(_lies_so(v, stride) for v, stride in zip(values, assumed, strict=True)):
            return self._kernel
        return self._form.lying(values, assumed).kernel()


def _lies_so(value: torch.Tensor, stride: Sequence[int]) -> bool:
    """Whether the strides lead to the value's elements."""
    return not value.numel() or all(n == 1 or a == b for n, a, b in zip(value.shape, value.stride(), stride, strict=True))


class Form:
    """A fused node's program with the fake values of its operands and results."""

    def __init__(self, node: fx.Node) -> None:
        operands, self.text, sizes = cast("tuple[Sequence[fx.Node], str, Sequence[Any]]", node.args)
        self.name = name_of(node)
        self.operands: list[torch.Tensor] = [o.meta["val"] for o in operands]
        self.sizes = [s.meta["val"] if isinstance(s, fx.Node) else s for s in sizes]
        self.results: list[torch.Tensor] = list(node.meta["val"])
        self.symbolic_sizes = [i for i, s in enumerate(self.sizes) if not isinstance(s, int)]

    def kernel(self) -> Kernel:
        """The kernel, compiled where none is known for this form."""
        env = shape_env_of(self._inputs())
        known = _STATIC if env is None else _SYMBOLIC.setdefault(env, {})
        key = self.key()
        if key not in known:
            known[key] = self._compiled()
        return known[key]

    def key(self) -> object:
        """Equal for what one kernel computes, where the symbols are those of one capture."""
        described = [(str(v.dtype), v.device, tuple(_words(v.shape)), tuple(_words(v.stride())), _offset(v)) for v in (*self.operands, *self.results)]
        return self.text, tuple(described), tuple(_words(self.sizes))

    def lying(self, values: Sequence[torch.Tensor], assumed: Sequence[Sequence[int]]) -> Form:
        """The form of these operands: those that do not lie as `assumed` have the strides that they have."""
        form, mode = copy.copy(self), fake_mode_of(self._inputs())
        form.operands = [
            fake if _lies_so(v, stride) else fake_tensor(mode, fake.shape, v.stride(), fake.storage_offset(), fake.dtype, fake.device)
            for fake, v, stride in zip(self.operands, values, assumed, strict=True)]
        return form

    def traced(self, device: torch.device | None = None) -> tuple[fx.GraphModule, list[Any]]:
        """The program as Inductor gets it and its inputs: operands, sizes, and what it writes to. `device`: another than the values'.

        Raises PlanError for sizes that no kernel can be made for.
        """
        self._check_symbols()
        n, run, sizes, inputs = len(self.operands), program(self.text), list(self.sizes), self._inputs_apart(device)

        def body(*inputs: Any) -> tuple[()]:
            given = list(sizes)
            for i, number in zip(self.symbolic_sizes, inputs[n:]):
                given[i] = number
            outs = inputs[n + len(self.symbolic_sizes) :]
            for out, made in zip(outs, run(*inputs[:n], *given), strict=True):
                write(out, made)
            return ()

        traced = traced_program(body, inputs)
        traced.graph = in_finest_sizes(traced.graph)
        stored = [p.meta["val"] for p in traced.graph.nodes if p.op == "placeholder"][-len(self.results) :]
        inputs[-len(self.results) :] = stored
        return traced, inputs

    def _check_symbols(self) -> None:
        """Raises PlanError where a kernel could not tell the symbols of its sizes from those that it is given: 2*s0*s1 alone says neither."""
        given = [expr_of(n) for v in self._inputs() for n in (v.shape if isinstance(v, torch.Tensor) else (v,))]
        known: set[sympy.Symbol] = set()
        unknown = [n.free_symbols for n in given if isinstance(n, sympy.Expr) and n.free_symbols]
        while found := {s for symbols in unknown if len(symbols - known) == 1 for s in symbols - known}:
            known |= found
        missing = sorted(set().union(*unknown) - known, key=str)
        if missing:
            raise PlanError(
                f"{self.name}: its operands have sizes of several symbols ({', '.join(map(str, missing))}) and none of one, which no kernel can be "
                'made for; use dynamic=False or executor="eager"')

    def _inputs(self) -> list[Any]:
        return [*self.operands, *(self.sizes[i] for i in self.symbolic_sizes), *self.results]

    def _inputs_apart(self, device: torch.device | None) -> list[Any]:
        """The inputs, each with memory of its own: a graph may have one fake value for several nodes, and a tracer tells inputs by it."""
        mode = fake_mode_of(self._inputs())
        return [
            fake_tensor(mode, v.shape, v.stride(), v.storage_offset(), v.dtype, device or v.device) if isinstance(v, torch.Tensor) else v
            for v in self._inputs()]

    def _compiled(self) -> Kernel:
        traced, inputs = self.traced()
        kernel, n_kernels, n_allocations = compiled_by_inductor(traced, inputs, sums_rows(self.text), write)
        if self.results[0].device.type != "cpu" and (n_kernels != 1 or n_allocations):
            raise PlanError(
                f"{self.name}: Inductor makes {n_kernels} kernels and {n_allocations} allocations of a program that is planned as one kernel "
                f'without memory of its own; use executor="eager", and report this program: {self.text}')
        return kernel

    def layouts(self) -> Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[Layout]]:
        """A function of operands and sizes that gives each result's shape and stride."""
        numbers = self._numbers([n for v in self.results for n in (*v.shape, *v.stride())])

        def of(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[Layout]:
            rest = iter(numbers(values, sizes))
            return [(tuple(islice(rest, v.dim())), tuple(islice(rest, v.dim()))) for v in self.results]

        return of

    def strides(self) -> Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[tuple[int, ...]]]:
        """A function of operands and sizes that gives the strides that tracing assumed of each operand."""
        numbers = self._numbers([n for v in self.operands for n in v.stride()])

        def of(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[tuple[int, ...]]:
            rest = iter(numbers(values, sizes))
            return [tuple(islice(rest, v.dim())) for v in self.operands]

        return of

    def _numbers(self, sizes: Iterable[Any]) -> Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[int]]:
        """A function of operands and sizes that gives the numbers which some sizes of fake values stand for."""
        wanted = [expr_of(n) for n in sizes]
        if all(isinstance(n, int) for n in wanted):
            fixed = cast("list[int]", wanted)
            return lambda values, sizes: fixed
        where: dict[sympy.Symbol, Callable[[Sequence[torch.Tensor], Sequence[int]], int]] = {}
        for i, v in enumerate(self.operands):
            for d, size in enumerate(v.shape):
                expr = expr_of(size)
                if isinstance(expr, sympy.Symbol):
                    where.setdefault(expr, functools.partial(_size_of, i, d))
        for i in self.symbolic_sizes:
            expr = expr_of(self.sizes[i])
            if isinstance(expr, sympy.Symbol):
                where.setdefault(expr, functools.partial(_number, i))
        free = sorted(set().union(*(n.free_symbols for n in wanted if not isinstance(n, int))), key=str)
        missing = [s for s in free if s not in where]
        if missing:
            raise PlanError(f'{self.name}: no operand has the size {missing[0]} of its values; use executor="eager"')
        evaluate = sympy.lambdify(free, wanted, modules=[_FUNCTIONS, "math"])
        reads = [where[s] for s in free]
        return lambda values, sizes: [int(n) for n in evaluate(*(read(values, sizes) for read in reads))]


_FUNCTIONS = {"FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod, "CleanDiv": operator.floordiv}


def _size_of(operand: int, dim: int, values: Sequence[torch.Tensor], sizes: Sequence[int]) -> int:
    return values[operand].shape[dim]


def _number(i: int, values: Sequence[torch.Tensor], sizes: Sequence[int]) -> int:
    return sizes[i]


def _words(sizes: Sequence[Any]) -> list[str]:
    return [str(expr_of(n)) for n in sizes]


def _offset(value: torch.Tensor) -> str:
    return str(expr_of(value.storage_offset()))
