"""The numeric twin: a reference runtime on the CPU that does everything as late, and forgets everything as soon, as the graph allows.

A Transfer copies *at* its wait; until then its destination is 0xFF bytes, which is NaN in floating types. A release fills the
memory with 0xFF bytes. So a wrong order shows as NaN or as VerifyError, on every run, with no accelerator and no race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
import torch.fx as fx

from . import ops
from .errors import VerifyError
from .graph import constant_of, name_of, tensors_in
from .layout import extent_bytes, part_of, side_by_side

CPU = torch.device("cpu")


@torch.no_grad()
def run_twin(graph: fx.Graph, inputs: Sequence[object]) -> object:
    """What the output node returns, run on CPU tensors; `inputs` are the placeholders' values in order, of any size the graph
    allows. Devices in the graph all mean the CPU.

    Raises VerifyError for a read of released memory, a read of pending integers, a wait that is not due and a Transfer left open;
    ValueError when the number of inputs is wrong.
    """
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise ValueError(f"the graph has {len(placeholders)} inputs, {len(inputs)} were given")
    twin = _Twin(dict(zip(placeholders, inputs)))
    for node in graph.nodes:
        if node.op == "output":
            twin.end(node)
            return twin.value(node.args[0])
        twin.run(node)
    return None


@dataclass(frozen=True, slots=True)
class _Open:
    """A Transfer whose copies, from a source to a destination each, are still to come."""

    started: fx.Node
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]


class _Twin:
    def __init__(self, inputs: Mapping[fx.Node, object]) -> None:
        self._values: dict[fx.Node, object] = dict(inputs)
        self._symbols = _symbol_values(inputs)
        self._open: dict[int, _Open] = {}
        # the released tensor is kept so that no new memory gets its address
        self._released: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        self._special: Mapping[object, Callable[[fx.Node], object]] = {
            ops.swap_in: self._start,
            ops.swap_out: self._start,
            ops.swap_in_many: self._start_many,
            ops.wait: self._wait,
            ops.release: self._release,
        }

    def run(self, node: fx.Node) -> None:
        """Runs one node other than the output."""
        if node.op == "placeholder":
            return
        if node.op == "get_attr":
            self._values[node] = constant_of(node)
            return
        if node.op != "call_function":
            raise ValueError(f"{name_of(node)}: the twin cannot run a {node.op}")
        self._values[node] = self._special.get(node.target, self._compute)(node)

    def end(self, output: fx.Node) -> None:
        """What must hold when the program ends."""
        self._check_readable(output)
        for transfer in self._open.values():
            raise VerifyError(f"%{name_of(transfer.started)} is still open at the end: nothing waits for it")

    def value(self, argument: object) -> object:
        """`argument` with nodes, symbols and devices replaced by what they stand for here."""
        if isinstance(argument, fx.Node):
            return self._values[argument]
        if isinstance(argument, (list, tuple)):
            return type(argument)(map(self.value, argument)) if type(argument) in (list, tuple) else [*map(self.value, argument)]
        if isinstance(argument, torch.device):
            return CPU
        if isinstance(argument, torch.SymInt):
            return int(argument.node.expr.xreplace(self._symbols))
        return argument

    def _compute(self, node: fx.Node) -> object:
        self._check_readable(node)
        kwargs = {key: self.value(value) for key, value in node.kwargs.items() if key != "pin_memory"}
        return node.target(*[self.value(value) for value in node.args], **kwargs)  # type: ignore[operator]

    def _start(self, node: fx.Node) -> torch.Tensor:
        source = self._tensor(node.args[0])
        destination = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
        return self._begin(node, destination, ((source, destination),))

    def _start_many(self, node: fx.Node) -> torch.Tensor:
        sources = [self._tensor(source) for source in node.args[0]]  # type: ignore[union-attr]
        offsets, n_bytes = side_by_side(map(extent_bytes, sources))
        flat = torch.empty(n_bytes, dtype=torch.uint8)
        parts = [part_of(flat, offset, s.shape, s.stride(), s.dtype) for offset, s in zip(offsets, sources)]
        return self._begin(node, flat, tuple(zip(sources, parts)))

    def _begin(self, node: fx.Node, destination: torch.Tensor, copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> torch.Tensor:
        self._check_readable(node)
        _poison(destination)
        if _address(destination):  # all empty memory has address 0: nothing to copy, nothing to wait for
            self._open[_address(destination)] = _Open(node, copies)
        return destination

    def _wait(self, node: fx.Node) -> torch.Tensor:
        waited = self._tensor(node.args[0])
        transfer = self._open.pop(_address(waited), None)
        if transfer is None and waited.numel():
            raise VerifyError(f"%{name_of(node)} waits for %{name_of(node.all_input_nodes[0])}, which no open Transfer makes")
        if transfer is not None:
            for source, destination in transfer.copies:
                self._check_not_released(node, source, name_of(transfer.started))
                destination.copy_(source)
        self._check_not_released(node, waited, name_of(node.all_input_nodes[0]))
        return waited

    def _release(self, node: fx.Node) -> None:
        value = self._tensor(node.args[0])
        self._check_not_released(node, value, name_of(node.all_input_nodes[0]))
        _poison(value)
        if value.untyped_storage().nbytes():
            self._released[_address(value)] = (node, value)

    def _tensor(self, argument: object) -> torch.Tensor:
        value = self.value(argument)
        assert isinstance(value, torch.Tensor)
        return value

    def _check_readable(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            for tensor in tensors_in(self._values[operand]):
                self._check_not_released(node, tensor, name_of(operand))
                if _address(tensor) in self._open and not tensor.is_floating_point():
                    raise VerifyError(f"%{name_of(node)} reads the integers of %{name_of(operand)} before a wait for them")

    def _check_not_released(self, node: fx.Node, tensor: torch.Tensor, name: str) -> None:
        if _address(tensor) in self._released:
            releaser = self._released[_address(tensor)][0]
            raise VerifyError(f"%{name_of(node)} reads %{name}, which %{name_of(releaser)} has released")


def _address(tensor: torch.Tensor) -> int:
    """The same for all views of one memory; 0 for empty memory."""
    return tensor.untyped_storage().data_ptr()


def _poison(tensor: torch.Tensor) -> None:
    memory = tensor.untyped_storage()
    if memory.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(memory).fill_(0xFF)


def _symbol_values(inputs: Mapping[fx.Node, object]) -> dict[sympy.Basic, int]:
    """Symbols that are an input, or a size of one, with their values in this run."""
    found: dict[sympy.Basic, int] = {}
    for node, value in inputs.items():
        for size, actual in _sizes(node.meta.get("val"), value):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, actual)
    return found


def _sizes(fake: object, value: object) -> Iterator[tuple[object, int]]:
    if isinstance(value, int):
        yield fake, value
    elif isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor):
        yield from zip(fake.shape, value.shape)
