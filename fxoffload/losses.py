"""Where a Graph computes a cross-entropy over logits it multiplies out first, and whether rows of it can be computed apart.

Between the product with the head and `nll_loss` stand only ops that treat every row by itself (casts, soft-capping, log-softmax), and
the backward of each likewise: then any split of the rows gives the same loss and gradients up to the order of fp32 sums. What reads
the logits beside that (a z-loss, label smoothing, the caller) needs them whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from .graph import Bounds, border_of, name_of

_aten = torch.ops.aten
# With one value of logits' size and numbers, or two such values.
ROW_WISE = frozenset({
    _aten._to_copy.default, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.neg.default, _aten.tanh.default,
    _aten.tanh_backward.default,
})
_SHADOW = _aten.new_empty.default
_MEAN, _SUM = 1, 2


@dataclass(frozen=True, slots=True)
class Loss:
    """One cross-entropy that can be computed in chunks of rows.

    `start`: the product with the head, or, without a backward, a value of the logits that others read whole (`is_product` False).
    `forward`: the row-wise ops after it, to the log-softmax; `backward`: those from `nll_loss_backward` to the gradient of the product's
    result; () without a backward. `source_of`: for each reshape among them what it looks at. `hidden_gradients`: products of that
    gradient with the head's weight; `weight_gradients`: with the product's rows. `shadows`: ops that read the shape of logits alone.
    `nodes`: all that the chunks take the place of, in graph order.
    """

    nll: fx.Node
    start: fx.Node
    is_product: bool
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    source_of: dict[fx.Node, fx.Node]
    hidden_gradients: tuple[fx.Node, ...]
    weight_gradients: tuple[fx.Node, ...]
    shadows: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def log_softmax(self) -> fx.Node:
        """What `nll_loss` reads."""
        return self.forward[-1]

    @property
    def is_mean(self) -> bool:
        """Whether the loss is divided by the number of targets that count."""
        return bool(self.nll.args[3] == _MEAN)

    @property
    def source(self) -> fx.Node:
        """What is split into rows."""
        return _operand(self.start, 0) if self.is_product else self.start

    def shape(self, bounds: Bounds) -> tuple[int, int, int]:
        """Rows, classes and the length of a row of the source at the bounds."""
        rows, classes = bounds.shape_of(self.log_softmax.meta["val"])
        return rows, classes, bounds.shape_of(self.source.meta["val"])[-1]

    def logits_bytes(self, bounds: Bounds) -> int:
        """Bytes of all log-probabilities."""
        return bounds.bytes_of(self.log_softmax.meta["val"])


@dataclass(frozen=True, slots=True)
class Whole:
    """A cross-entropy that stays as it is, and why, in words."""

    nll: fx.Node
    reason: str


def find_losses(graph: fx.Graph) -> list[Loss | Whole]:
    """Every cross-entropy of a canonical graph, in graph order. One whose log-probabilities are read by other ops is a Whole too."""
    at = {node: i for i, node in enumerate(graph.nodes)}
    ends = graph.find_nodes(op="call_function", target=_aten.nll_loss_forward.default)
    read = {end.args[0] for end in ends}
    stray = [n for n in graph.find_nodes(op="call_function", target=_aten._log_softmax.default) if n not in read]
    found: list[Loss | Whole] = [_Finder(graph, at, end).find() for end in ends]
    found += [Whole(n, "its log-probabilities are not read by nll_loss alone (label smoothing, a distillation loss)") for n in stray]
    return sorted(found, key=lambda one: at[one.nll])


class _Unfit(Exception):
    """The reason why a loss stays whole; never leaves this module."""


class _Finder:
    """Walks from one `nll_loss_forward` up to the head's product and down through backward."""

    def __init__(self, graph: fx.Graph, at: dict[fx.Node, int], nll: fx.Node) -> None:
        self.at, self.nll = at, nll
        self.border = border_of(graph)
        self.source_of: dict[fx.Node, fx.Node] = {}

    def find(self) -> Loss | Whole:
        """The Loss, or why it is none."""
        try:
            return self._found()
        except _Unfit as why:
            return Whole(self.nll, str(why))

    def _found(self) -> Loss:
        log_softmax = self._checked_end()
        start, forward = self._forward(log_softmax)
        for value in (start, *forward):
            self._note_reshapes(value)
        self._check_forward(start, forward)
        backward = self._backward(log_softmax, forward)
        hidden, weight, transposes = self._ends(backward[-1], start) if backward else ((), (), ())
        inside = {start, *forward, *backward, *self.source_of, *transposes, self.nll, *hidden, *weight}
        outside = self._outside(inside, {self.nll, *hidden, *weight})
        is_product = start.target is _aten.mm.default and not outside
        if any(n.meta["val"].dtype is torch.float16 for n in backward):
            raise _Unfit("their gradient is fp16, which has no room for it before the loss's scale is known")
        if backward and not is_product:
            raise _Unfit(_reader(outside) if outside else f"{name_of(start)} stands between the product with the head and the loss")
        if not is_product:
            start, forward, inside = self._behind(start, forward, outside)
        nodes = tuple(sorted(inside, key=self.at.__getitem__))
        return Loss(
            self.nll, start, is_product, forward, backward, self.source_of, hidden, weight, self._shadows(inside) if is_product else (), nodes)

    def _behind(
        self, start: fx.Node, forward: tuple[fx.Node, ...], outside: list[tuple[fx.Node, fx.Node]],
    ) -> tuple[fx.Node, tuple[fx.Node, ...], set[fx.Node]]:
        """The last value that is read outside, the ops after it, and what the chunks take the place of."""
        chain = [start, *forward]
        last = max((chain.index(self._base(value)) for value, _ in outside), default=0)
        if last == len(forward):
            raise _Unfit(_reader(outside))
        behind = set(chain[last + 1 :])
        return chain[last], forward[last:], {*behind, *(r for r in self.source_of if self._base(r) in behind), self.nll}

    def _base(self, node: fx.Node) -> fx.Node:
        """What a reshape looks at in the end."""
        while node in self.source_of:
            node = self.source_of[node]
        return node

    def _checked_end(self) -> fx.Node:
        """The log-softmax that `nll_loss` reads, along rows and in fp32 or fp64."""
        if self.border is not None and self.at[self.nll] > self.at[self.border]:
            raise _Unfit("it is computed in backward")
        log_softmax, target, weight, reduction = self.nll.args[:4]
        assert isinstance(log_softmax, fx.Node) and isinstance(target, fx.Node)
        value = log_softmax.meta["val"]
        if weight is not None:
            raise _Unfit("classes have weights")
        if reduction not in (_MEAN, _SUM) or value.dim() != 2:
            raise _Unfit("the losses of tokens are read one by one")
        if log_softmax.target is not _aten._log_softmax.default or log_softmax.args[1] not in (1, -1):
            raise _Unfit(f"{name_of(log_softmax)} is no log-softmax over classes")
        if value.dtype not in (torch.float32, torch.float64):
            raise _Unfit("the loss is not computed in fp32: its sums in chunks would be rounded")
        if not isinstance(value.shape[1], int):
            raise _Unfit("the number of classes is a symbol")
        return log_softmax

    def _forward(self, log_softmax: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """What is no row-wise op, the head's product it should be, and the row-wise ops after it."""
        found = [log_softmax]
        while True:
            above = self._resolved(_operand(found[-1], 0), found[-1])
            if above.target not in ROW_WISE or len(above.all_input_nodes) > 1:
                return above, tuple(reversed(found))
            found.append(above)

    def _check_forward(self, start: fx.Node, forward: tuple[fx.Node, ...]) -> None:
        """Raises _Unfit when forward or the caller reads the logits and a backward follows: what backward shows of it says less."""
        if self.border is None:
            return
        known = {start, *forward, *self.source_of, self.nll}
        end = self.at[self.border]
        readers = [(v, user) for v, user in self._outside(known, {self.nll}) if user.op == "output" or self.at[user] < end]
        if readers:
            raise _Unfit(_reader(readers))

    def _backward(self, log_softmax: fx.Node, forward: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """The row-wise ops of backward; () when the graph has none."""
        first = [n for n in log_softmax.users if n.target is _aten.nll_loss_backward.default]
        if not first:
            return ()
        found = [self._only(first, "log-softmax")]
        if found[0].args[2:6] != self.nll.args[1:5]:
            raise _Unfit(f"{name_of(found[0])} is no gradient of {name_of(self.nll)}")
        softmax = self._only(list(found[0].users), "the gradient of nll_loss")
        if softmax.target is not _aten._log_softmax_backward_data.default or softmax.args[:2] != (found[0], log_softmax):
            raise _Unfit(f"{name_of(softmax)} reads the gradient of nll_loss")
        found.append(softmax)
        while True:
            below = [n for n in self._readers(found[-1]) if n.target in ROW_WISE]
            if not below:
                return tuple(found)
            self._check_row_wise(self._only(below, f"the gradient {name_of(found[-1])}"), (found[-1], *forward))
            found.append(below[0])

    def _check_row_wise(self, node: fx.Node, known: tuple[fx.Node, ...]) -> None:
        """Raises _Unfit when the op reads something else than the values `known`."""
        for operand in node.all_input_nodes:
            if self._resolved(operand, node) not in known:
                raise _Unfit(f"{name_of(node)} reads {name_of(operand)} too")

    def _ends(self, gradient: fx.Node, start: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...], tuple[fx.Node, ...]]:
        """The products of the gradient of the head's result: with the weight, with the rows; and its transposes on the way."""
        rows = start.args[0]
        hidden, weight, transposes = [], [], []
        for reader in self._readers(gradient):
            if reader.target is _aten.mm.default and self._base(_operand(reader, 0)) is gradient and self._is_there(_operand(reader, 1)):
                hidden.append(reader)
                continue
            if reader.target is not _aten.t.default:
                raise _Unfit(f"{name_of(reader)} reads the gradient of the logits")
            transposes.append(reader)
            for user in reader.users:
                if user.target is not _aten.mm.default or user.args != (reader, rows):
                    raise _Unfit(f"{name_of(user)} reads the gradient of the logits")
                weight.append(user)
        return tuple(hidden), tuple(weight), tuple(transposes)

    def _is_there(self, node: fx.Node) -> bool:
        """Whether the value exists where the loss is computed."""
        return node.op == "placeholder" or self.at[node] < self.at[self.nll]

    def _resolved(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """What `node`, a chain of reshapes that keep the rows' length, looks at."""
        while node.target is _aten.reshape.default:
            source = _operand(node, 0)
            if _last(source) != _last(node):
                raise _Unfit(f"{name_of(node)} changes rows before {name_of(reader)}")
            self.source_of[node] = source
            node = source
        return node

    def _readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """Who reads the value, reshapes of it that keep the rows' length passed through."""
        for user in value.users:
            if user.target is _aten.reshape.default and _last(user) == _last(value):
                self.source_of[user] = value
                yield from self._readers(user)
            else:
                yield user

    def _note_reshapes(self, value: fx.Node) -> None:
        """Remembers which reshapes look at the value: who reads one of them reads the value, the caller too."""
        for _ in self._readers(value):
            pass

    def _only(self, nodes: list[fx.Node], what: str) -> fx.Node:
        if len(nodes) != 1:
            raise _Unfit(f"{what} is read {len(nodes)} times")
        return nodes[0]

    def _outside(self, inside: set[fx.Node], results: set[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
        """Each value of logits' size that something else reads, with the reader; reading its shape alone is no reading."""
        values = sorted(inside - results, key=self.at.__getitem__)
        return [(v, user) for v in values for user in v.users if user not in inside and user.target is not _SHADOW]

    def _shadows(self, inside: set[fx.Node]) -> tuple[fx.Node, ...]:
        found = {user for value in inside for user in value.users if user.target is _SHADOW}
        return tuple(sorted(found, key=self.at.__getitem__))


def _reader(outside: list[tuple[fx.Node, fx.Node]]) -> str:
    _, user = outside[0]
    return "the logits are an output" if user.op == "output" else f"{name_of(user)} reads the logits too"


def _operand(node: fx.Node, position: int) -> fx.Node:
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return operand


def _last(node: fx.Node) -> object:
    shape = node.meta["val"].shape
    return shape[-1] if len(shape) else None
