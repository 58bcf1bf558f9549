"""Triton kernels as Python launches them: which arguments one writes, by its source, and launches that are only noted.

A launch is noted where tensors have no values, or no device that Triton knows: a kernel's source says all that a graph must know of it.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .torch_compat import triton_kernel_classes

_READS = frozenset({"load"})


def _writes(word: str) -> bool:
    """Whether a function of `triton.language`, or a descriptor's method, of that name writes where its pointer points."""
    return "store" in word or "scatter" in word or word.startswith("atomic_")


def is_kernel(value: object) -> bool:
    """Whether `value` is what @triton.jit, or what tunes one, leaves in a function's place."""
    return isinstance(value, triton_kernel_classes())


def is_constant(value: object) -> bool:
    """Whether `value` is a `triton.language.constexpr`."""
    return type(value).__name__ == "constexpr" and type(value).__module__.startswith("triton.")


def kernel_function(kernel: Any) -> Callable[..., Any]:
    """The Python function of a kernel."""
    while not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel  # type: ignore[no-any-return]


def written_parameters(kernel: Any) -> frozenset[str]:
    """The parameters of a kernel whose memory it may write: those that a pointer of a store may come from, however it got there. More than
    are written where the source does not tell: a function that is not known, and assembly, writes all it is given, a kernel without a
    source all its parameters. What lies at an address that a kernel has loaded is none of its parameters'."""
    return _written(kernel_function(kernel))


@functools.cache
def _written(function: Callable[..., Any]) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return frozenset(inspect.signature(function).parameters)
    assert isinstance(tree, ast.FunctionDef)
    return _Source(tree, _names_of(function)).written()


def _names_of(function: Callable[..., Any]) -> Mapping[str, object]:
    closed = inspect.getclosurevars(function).nonlocals
    return {**vars(builtins), **function.__globals__, **closed}


class _Source:
    """A kernel's source: what each of its names may point into."""

    def __init__(self, tree: ast.FunctionDef, names: Mapping[str, object]) -> None:
        self.tree, self.names = tree, names
        every = [*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs]
        self.points: dict[str, frozenset[str]] = {a.arg: frozenset({a.arg}) for a in every}

    def written(self) -> frozenset[str]:
        """The parameters that may be written."""
        while self._assigned():
            pass
        found: frozenset[str] = frozenset()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                found |= self._written_by(node)
        return found

    def _assigned(self) -> bool:
        """Follows every assignment once; True where a name may now point into more than before."""
        before = dict(self.points)
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self._follow(name.id, node.value)
            elif isinstance(node, ast.For):
                for name in ast.walk(node.target):
                    if isinstance(name, ast.Name):
                        self._follow(name.id, node.iter)
        return self.points != before

    def _follow(self, name: str, value: ast.AST) -> None:
        self.points[name] = self.points.get(name, frozenset()) | self._of(value)

    def _of(self, expression: ast.AST) -> frozenset[str]:
        """What an expression may point into: all that its names do, but for what is loaded."""
        if isinstance(expression, ast.Name):
            return self.points.get(expression.id, frozenset())
        if isinstance(expression, ast.Call) and self._word(expression) in _READS:
            return frozenset()
        return frozenset().union(*map(self._of, ast.iter_child_nodes(expression)))

    def _word(self, call: ast.Call) -> str:
        """The name of what is called, whatever name the kernel has for it."""
        own = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
        called = self._value(call.func)
        return str(getattr(called, "__name__", own)) if getattr(called, "__module__", None) else own

    def _written_by(self, call: ast.Call) -> frozenset[str]:
        word = self._word(call)
        if _writes(word) and not (is_kernel(self._value(call.func)) and not _is_tritons(self._value(call.func))):
            if isinstance(call.func, ast.Attribute) and not isinstance(self._value(call.func.value), ModuleType):
                return self._of(call.func.value)  # a tensor descriptor's method
            return self._of(call.args[0] if call.args else call.keywords[0].value)
        called = self._value(call.func)
        if is_kernel(called) and not _is_tritons(called):
            return self._through(call, kernel_function(called))
        if called is not None and _is_tritons(called) and "inline_asm" not in word:
            return frozenset()
        # Of a method of a value, as `x.to(...)`, what it is given; so too of what is not known.
        return frozenset().union(*map(self._of, [*call.args, *(k.value for k in call.keywords)]))

    def _through(self, call: ast.Call, function: Callable[..., Any]) -> frozenset[str]:
        """What a call of another kernel function writes."""
        if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
            return frozenset().union(*map(self._of, [*call.args, *(k.value for k in call.keywords)]))
        given = dict(zip(inspect.signature(function).parameters, call.args)) | {str(k.arg): k.value for k in call.keywords}
        return frozenset().union(*(self._of(given[name]) for name in _written(function) if name in given))

    def _value(self, expression: ast.AST) -> object:
        """The Python object that a dotted name is outside the kernel; None for all else."""
        if isinstance(expression, ast.Name):
            return None if expression.id in self.points else self.names.get(expression.id)
        if isinstance(expression, ast.Attribute):
            return getattr(self._value(expression.value), expression.attr, None)
        return None


def _is_tritons(called: Any) -> bool:
    """Whether what is called is Triton's own, or a builtin."""
    owner = kernel_function(called) if is_kernel(called) else called
    return str(getattr(owner, "__module__", "")).partition(".")[0] in ("triton", "builtins")


# Launches -------------------------------------------------------------------------------------------------------------

_noting = threading.local()


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was only noted: the tensors that the kernel was given, and those of them that it writes."""

    tensors: list[torch.Tensor]
    written: list[torch.Tensor]


@contextlib.contextmanager
def launches_noted() -> Iterator[list[Launch]]:
    """Launches by this thread run nothing. Gives them as they come."""
    _stand_in()
    outer, _noting.launches = getattr(_noting, "launches", None), []
    try:
        yield _noting.launches
    finally:
        _noting.launches = outer


@functools.cache
def _stand_in() -> None:
    """From here on every launch asks first whether its thread only notes."""
    for one in triton_kernel_classes():
        if "run" in vars(one):
            one.run = _asking(one.run)


def _asking(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches = getattr(_noting, "launches", None)
        if launches is None:
            return run(self, *args, **kwargs)
        given = dict(zip(inspect.signature(kernel_function(self)).parameters, args)) | kwargs
        tensors = {name: _tensors_of(value) for name, value in given.items()}
        written = written_parameters(self)
        launches.append(Launch([t for some in tensors.values() for t in some], [t for name in tensors if name in written for t in tensors[name]]))
        return None

    return asked


def _tensors_of(argument: Any) -> list[torch.Tensor]:
    """The tensors of a kernel's argument: itself, those of a tuple, that of a descriptor."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, (tuple, list)):
        return [t for one in argument for t in _tensors_of(one)]
    base = getattr(argument, "base", None)
    return [base] if isinstance(base, torch.Tensor) else []


# Functions that launch ------------------------------------------------------------------------------------------------


def launches(function: Callable[..., Any]) -> bool:
    """Whether a Python function launches a kernel, by itself or in a function that it calls by name."""
    return _launches(inspect.unwrap(function), set())


def _launches(function: Any, seen: set[int]) -> bool:
    function = inspect.unwrap(function)
    if id(function) in seen or not inspect.isfunction(function) or function.__module__.partition(".")[0] in ("torch", "triton"):
        return False
    seen.add(id(function))
    closed = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    return any(is_kernel(value) or _launches(value, seen) for value in [*_named_in(function), *closed])


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _named_in(function: Any) -> Iterator[object]:
    """The globals that a function's code names, and what it names of modules among them."""
    codes = [function.__code__]
    for code in codes:
        codes.extend(c for c in code.co_consts if inspect.iscode(c))
    names = {name for code in codes for name in code.co_names}
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    yield from found
    for module in found:
        if isinstance(module, ModuleType):
            yield from (vars(module)[name] for name in names if name in vars(module))
