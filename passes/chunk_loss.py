"""chunk-loss: a cross-entropy's logits are made, read and forgotten a chunk of rows at a time.

What stood between the head's product and the loss is computed for each chunk in turn, and its gradient in the same place: the loss is
linear in its tangent, so forward makes the gradient for the tangent 1 and backward multiplies by the tangent. So no second product with
the head, and backward needs neither logits nor head. What is saved is of the size of the head's input, and of the head's gradient, which
is summed in fp32 (`fxo.add_product`), block by block of classes, so that one sum and its next are there twice for one block only.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx

from fxoffload.errors import PlanError
from fxoffload.graph import INFO, NodeInfo, Names, by_name, name_of, op_name
from fxoffload.losses import Loss, find_losses
from fxoffload.pipeline import Context, Pass
from fxoffload.plans import Chunk
from fxoffload.products import add_product, sum_dtype
from fxoffload.torch_compat import fake_like

_aten = torch.ops.aten
_SUM = 2
Size = int | torch.SymInt


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """`graph` with every loss of a Chunk decision in chunks. Raises PlanError for one that cannot be computed so."""
    decisions = {d.value: d for d in (ctx.plan.decisions if ctx.plan is not None else ()) if isinstance(d, Chunk)}
    nodes = by_name(graph) if decisions else {}
    decisions = {name: d for name, d in decisions.items() if name not in nodes or nodes[name].target is not _aten.mm.default}
    losses = {name_of(one.nll): one for one in find_losses(graph)} if decisions else {}
    for name in decisions:
        loss = losses.get(name)
        if not isinstance(loss, Loss):
            raise PlanError(f"the plan computes the loss {name} in chunks: " + ("no such loss" if loss is None else loss.reason))
        _Chunks(graph, loss, decisions[name]).rewrite()
    return graph


class _Chunks:
    """One loss in `decision.chunks` chunks."""

    def __init__(self, graph: fx.Graph, loss: Loss, decision: Chunk) -> None:
        self.graph, self.loss, self.decision = graph, loss, decision
        self.names = Names(graph)
        self.path = name_of(loss.nll).rpartition("/")[0]
        self.target = loss.nll.args[1]
        self.value = loss.log_softmax.meta["val"]
        self.classes = self.value.shape[1]
        # By the product it replaces: the parts of its rows, or the sums of its blocks.
        self.hidden: dict[fx.Node, list[fx.Node]] = {product: [] for product in loss.hidden_gradients}
        self.sums: dict[fx.Node, list[fx.Node]] = {product: [] for product in loss.weight_gradients}

    def rewrite(self) -> None:
        """Puts the chunks where the loss is computed, and what is left of backward where backward computed it."""
        with self.graph.inserting_before(self.loss.nll):
            self._forward()
        for product, parts in self.hidden.items():
            with self.graph.inserting_before(product):
                product.replace_all_uses_with(self._scaled([self._cat(parts, product)], product))
        for product, sums in self.sums.items():
            with self.graph.inserting_before(product):
                product.replace_all_uses_with(self._scaled(sums, product))
        for shadow in self.loss.shadows:
            shadow.kwargs = {**shadow.kwargs, "dtype": shadow.meta["val"].dtype}
            shadow.args = (self.loss.source, *shadow.args[1:])
        for node in reversed(self.loss.nodes):
            for element in list(node.users) if node is self.loss.nll else ():
                self.graph.erase_node(element)
            self.graph.erase_node(node)

    # Forward ----------------------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        n_targets = self._n_targets() if self._needs_count() else None
        losses: list[fx.Node] = []
        tangent: fx.Node | None = None
        for rows, target in zip(self._split(self._rows()), self._split(self.target)):
            values = self._logits(rows)
            ends = self._call(_aten.nll_loss_forward.default, (values[self.loss.log_softmax], target, None, _SUM, self.loss.nll.args[4]),
                              (self._scalar(), self._scalar()))
            part, n_part = (self._call(operator.getitem, (ends, i), self._scalar()) for i in (0, 1))
            losses.append(part if not losses else self._call(_aten.add.Tensor, (losses[-1], part), self._scalar()))
            if self.loss.backward:
                tangent = tangent or self._call(_aten.ones_like.default, (part,), self._scalar())
                self._gradients(values, rows, (tangent, values[self.loss.log_softmax], target, n_targets or n_part))
        loss = losses[-1]
        if self.loss.is_mean:
            loss = self._call(_aten.div.Tensor, (loss, n_targets), self._scalar())
        for element in self.loss.nll.users:
            replacement = loss if element.args[1] == 0 else n_targets
            if replacement is not None:  # else only this loss's own backward, which goes, reads the number of targets
                element.replace_all_uses_with(replacement)

    def _rows(self) -> fx.Node:
        """The source as rows."""
        source = self.loss.source
        if source.meta["val"].dim() == 2:
            return source
        value = self._fake(tuple(self.value.shape), source.meta["val"].dtype)
        return self._call(_aten.reshape.default, (source, [-1, self.classes]), value)

    def _needs_count(self) -> bool:
        """Whether the number of targets that count is needed before the last chunk, or by anything but this loss's gradient."""
        counts = [n for n in self.loss.nll.users if n.args[1] == 1]
        return self.loss.is_mean or any(user not in self.loss.backward for n in counts for user in n.users)

    def _n_targets(self) -> fx.Node:
        """How many targets count, in the loss's dtype."""
        fake = self.target.meta["val"]  # type: ignore[union-attr]
        counted = self._call(_aten.ne.Scalar, (self.target, self.loss.nll.args[4]), self._fake(tuple(fake.shape), torch.bool))
        n_counted = self._call(_aten.sum.default, (counted,), self._fake((), torch.int64))
        return self._call(_aten._to_copy.default, (n_counted,), self._scalar(), {"dtype": self.value.dtype})

    def _logits(self, rows: fx.Node) -> dict[fx.Node, fx.Node]:
        """A chunk's value of each row-wise op up to the log-softmax."""
        start = self.loss.start
        values = {start: self._clone(start, (rows, *start.args[1:]), rows) if self.loss.is_product else rows}
        for node in self.loss.forward:
            values[node] = self._clone(node, tuple(self._there(a, values) for a in node.args), rows)
        return values

    def _gradients(self, values: dict[fx.Node, fx.Node], rows: fx.Node, end: tuple[fx.Node, fx.Node, fx.Node, fx.Node]) -> None:
        """A chunk's part of the gradients, for the tangent 1."""
        tangent, log_softmax, target, n_targets = end
        first, *others = self.loss.backward
        values[first] = self._clone(first, (tangent, log_softmax, target, *first.args[3:6], n_targets), rows)
        for node in others:
            values[node] = self._clone(node, tuple(self._there(a, values) for a in node.args), rows)
        gradient = values[self.loss.backward[-1]]
        for product, parts in self.hidden.items():
            parts.append(self._clone(product, (gradient, product.args[1]), rows))
        for sums in self.sums.values():
            self._add_to(sums, gradient, rows)

    def _add_to(self, sums: list[fx.Node], gradient: fx.Node, rows: fx.Node) -> None:
        """Adds a chunk's products to the sums, or makes the first of them."""
        fake, dtype = rows.meta["val"], gradient.meta["val"].dtype
        turned = self._call(_aten.t.default, (gradient,), self._fake((self.classes, fake.shape[0]), dtype))
        for i, block in enumerate(self._split(turned, self.decision.blocks)):
            value = self._fake((block.meta["val"].shape[0], fake.shape[1]), sum_dtype(dtype))
            total = self._call(add_product, (block, rows, sums[i] if i < len(sums) else None), value)
            sums[i : i + 1] = [total]

    def _there(self, argument: object, values: dict[fx.Node, fx.Node]) -> object:
        """The chunk's part of an operand; reshapes are left out, chunks are always rows x classes."""
        while isinstance(argument, fx.Node) and argument in self.loss.source_of:
            argument = self.loss.source_of[argument]
        return values[argument] if isinstance(argument, fx.Node) else argument

    # Backward ---------------------------------------------------------------------------------------------------------

    def _scaled(self, parts: Sequence[fx.Node], product: fx.Node) -> fx.Node:
        """The parts times the tangent, as one value of the product's dtype. In the dtype of the loss: the tangent is not rounded."""
        dtype = product.meta["val"].dtype
        made = []
        for part in parts:
            shape = tuple(part.meta["val"].shape)
            wide = self._converted(part, self.value.dtype)
            scaled = self._call(_aten.mul.Tensor, (wide, self.loss.backward[0].args[0]), self._fake(shape, self.value.dtype))
            made.append(self._converted(scaled, dtype))
        return self._cat(made, product)

    def _converted(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        value = node.meta["val"]
        if value.dtype is dtype:
            return node
        return self._call(_aten._to_copy.default, (node,), self._fake(tuple(value.shape), dtype), {"dtype": dtype})

    def _cat(self, parts: Sequence[fx.Node], product: fx.Node) -> fx.Node:
        value = product.meta["val"]
        if len(parts) == 1:
            return parts[0]
        return self._call(_aten.cat.default, (list(parts),), self._fake(tuple(value.shape), parts[0].meta["val"].dtype))

    # Nodes ------------------------------------------------------------------------------------------------------------

    def _split(self, node: object, n: int | None = None) -> list[fx.Node]:
        """Views of `n` parts of the first dimension that differ by one at most and, where it is short, may be empty."""
        assert isinstance(node, fx.Node)
        n = n or self.decision.chunks
        length, *rest = node.meta["val"].shape
        fakes = [self._fake((size, *rest), node.meta["val"].dtype) for size in _sizes(length, n)]
        parts = self._call(_aten.tensor_split.sections, (node, n), fakes)
        return [self._call(operator.getitem, (parts, i), fake) for i, fake in enumerate(fakes)]

    def _clone(self, node: fx.Node, args: tuple[object, ...], rows: fx.Node) -> fx.Node:
        """`node` on one chunk: as many rows as `rows`, all columns."""
        value = node.meta["val"]
        made = self._call(
            node.target, args, self._fake((rows.meta["val"].shape[0], value.shape[-1]), value.dtype), dict(node.kwargs), name_of(node))
        made.meta |= {key: node.meta[key] for key in ("nn_module_stack", "fwd_nn_module_stack") if key in node.meta}
        return made

    def _call(self, target: object, args: tuple[object, ...], value: object, kwargs: dict[str, object] | None = None, name: str = "") -> fx.Node:
        made = self.graph.call_function(target, args, kwargs or {})  # type: ignore[arg-type]
        fresh = self.names.fresh(name, "+") if name else self.names.fresh(f"{self.path}/{op_name(made)}")
        made.meta = {"val": value, INFO: NodeInfo(fresh)}
        return made

    def _scalar(self) -> torch.Tensor:
        return self._fake((), self.value.dtype)

    def _fake(self, shape: tuple[Size, ...], dtype: torch.dtype) -> torch.Tensor:
        return fake_like(self.value, shape, dtype)


def _sizes(length: Size, n: int) -> Iterator[Size]:
    """What `tensor_split` makes of a length: the first parts are the longer ones."""
    return ((length - i + n - 1) // n for i in range(n))


PASS = Pass("chunk-loss", run, requires=frozenset({"functional"}), breaks=frozenset({"released", "fits", "placed"}))
