"""Reading rows of an output that a graph has left out: a function of the rows for each expression, captured, planned and run as calls are.

The planner decides in how many chunks of rows it runs (`readings`, `passes/plan_chunks.py`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import nn

from .errors import PlanError
from .graph import Bounds
from .heads import Head
from .lazy import LazyTensor
from .recorded import LOGITS, Expression
from .torch_compat import CompiledStep, mark_dynamic

if TYPE_CHECKING:
    from .router import Generation
    from .session import Session

# As many expressions as anyone reads of one model; of more, such as one for every value of a temperature, the oldest are forgotten.
_MOST_EXPRESSIONS = 32


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where the model has a parameter."""

    owner: nn.Module
    name: str

    def now(self) -> torch.Tensor | None:
        """The parameter itself."""
        return self.owner._parameters.get(self.name)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An output that a graph has left out. `position`: of the rows among what it returns; `program`: what makes the output of them, as
    `Head.program`; `n_rows`: the most."""

    position: int
    program: fx.Graph
    n_columns: int
    dtype: torch.dtype
    n_rows: int
    parameters: tuple[Parameter, ...]

    @staticmethod
    def of(head: Head, bounds: Bounds, model: nn.Module) -> LeftOut:
        """The output of a Head in a graph with these bounds."""
        places = [fqn.rpartition(".") for fqn in head.parameters]
        value = head.output.meta["val"]
        return LeftOut(
            head.position, head.program(), value.shape[-1], value.dtype, head.n_rows(bounds),
            tuple(Parameter(model.get_submodule(path), name) for path, _, name in places))

    def lazy(self, session: Session, rows: torch.Tensor) -> LazyTensor:
        """The output, made of `rows` when it is read."""
        source = SavedRows(session, self, rows)
        return LazyTensor.of(source, source.shape, self.dtype, rows.device)


class SavedRows:
    """The Source of one output: the rows that the graph has returned. Raises RuntimeError when it is read after the head was written."""

    by_rows = True

    def __init__(self, session: Session, left_out: LeftOut, rows: torch.Tensor) -> None:
        self._session, self._left_out, self._rows = session, left_out, rows
        self._written = self._state()
        self.shape = (*rows.shape[:-1], left_out.n_columns)

    def whole(self) -> torch.Tensor:
        """The output."""
        return self.read(LOGITS, None)[0].reshape(self.shape)

    def rows(self) -> SavedRows:
        """Itself."""
        return self

    def read(self, expression: Expression, index: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """See `lazy.Rows`."""
        if self._session.closed:
            raise RuntimeError("this output was not read before close()")
        if self._written != self._state():
            raise RuntimeError("this output was not read before the parameters changed; read it before optimizer.step()")
        rows = self._rows.reshape(-1, self._rows.shape[-1])
        return self._session.reads.read(self._left_out, expression, rows, None if index is None else index.reshape(-1).contiguous())

    def _state(self) -> list[object]:
        """Differs after a write to the head. Steps are counted for trained ones alone: what is frozen no optimizer writes."""
        found = [parameter.now() for parameter in self._left_out.parameters]
        trained = any(p is not None and p.requires_grad for p in found)
        written = self._session.writes.state([p for p in found if p is not None])
        return [*map(id, found), *(written if trained else written[1:])]


class Reads:
    """The functions that read outputs of one Session, each captured once for up to as many rows as the graph returns."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._known: OrderedDict[str, list[Generation]] = OrderedDict()

    def read(self, left_out: LeftOut, expression: Expression, rows: torch.Tensor, index: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """What the expression gives of the rows, or of those that `index` names, planned before it runs."""
        program, operands = expression.program()
        scope: dict[str, object] = {
            "owners": [p.owner for p in left_out.parameters], "names": [p.name for p in left_out.parameters],
            "rows": rows, "index": index, "operands": operands,
        }
        batch = [("rows", rows), *([("index", index)] if index is not None else []), *((f"operands.{i}", t) for i, t in enumerate(operands))]
        for _, tensor in batch:
            mark_dynamic(tensor, 0)
        most = {"index": (left_out.n_rows,)} | {name: (left_out.n_rows, *tensor.shape[1:]) for name, tensor in batch}
        key = f"{left_out.program} {[id(p.owner) for p in left_out.parameters]} {program}"
        generations = self._of(key)
        make = functools.partial(_read_function, left_out.program, program)
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            return self.session.router.read(generations, make, batch, most, scope)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Forgets every function."""
        for key in list(self._known):
            self._forget(key)

    def _of(self, key: str) -> list[Generation]:
        generations = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        if len(self._known) > _MOST_EXPRESSIONS:
            self._forget(next(iter(self._known)))
        return generations

    def _forget(self, key: str) -> None:
        for generation in self._known.pop(key):
            generation.step.forget()


def _read_function(head: fx.Graph, program: fx.Graph) -> Callable[..., Any]:
    """What Dynamo traces: a function with code of its own, as of a model's call."""
    make, reduce = _forward_of(head), _forward_of(program)

    def read(owners: Any, names: Any, rows: Any, index: Any, operands: Any, variant: str) -> Any:
        if not variant or not torch.compiler.is_compiling():
            raise PlanError("capture is switched off here (torch._dynamo.disable, set_stance or a torch function mode): nothing ran")
        if index is not None:
            rows = rows.index_select(0, index)
        for operand in operands:  # else their sizes would be symbols of their own
            torch._check(operand.size(0) == rows.size(0))
        return reduce(make(rows, *[getattr(owner, name) for owner, name in zip(owners, names)]), *operands)

    return FunctionType(read.__code__.replace(), dict(read.__globals__), read.__name__, None, read.__closure__)


def _forward_of(graph: fx.Graph) -> Callable[..., Any]:
    return fx.GraphModule({}, graph).forward  # type: ignore[no-any-return]
