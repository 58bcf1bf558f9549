"""The Step of a deep model from two shallow captures.

Tracing takes most of the time of a plan, and a language model is one block many times over. Its step is captured with a few blocks and
with one period more. What the shallower capture says a further period looks like must be, word for word, what the deeper one shows; then
the deeper one is continued in the same way to the model's own depth. Where the blocks are not alike, or the two captures say otherwise,
the model is traced whole. Nothing is run on such a Step: when the model is compiled its own capture must have the plan's fingerprint.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import torch
import torch.fx as fx
from torch import nn
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten

from . import ops, text
from .captured_step import CapturedStep
from .errors import PlanError
from .graph import INFO, info, module_path, output_of, returned
from .joint import name_nodes

log = logging.getLogger("fxoffload")

# Periods of blocks in the shallower capture: the first, one to be continued, one that shows how it goes on, the last.
_PERIODS = 4
_LONGEST_PERIOD = 8
# Two captures that trace more blocks than this share of the model's are not worth it.
_WORTH = 2 / 3
# What a model raises that was cut short and does not bear it.
_CUT_SHORT = (PlanError, LookupError, ValueError, TypeError, AttributeError, RuntimeError)


@dataclass(frozen=True, slots=True)
class Stack:
    """A ModuleList under the name `path` whose blocks repeat: from number `first` on, block i is like block i + `period`."""

    path: str
    blocks: nn.ModuleList
    first: int
    period: int

    @property
    def shallow(self) -> int:
        """How many blocks the shallower capture has. What is left of the model's is whole periods."""
        return self.first + (len(self.blocks) - self.first) % self.period + _PERIODS * self.period

    @contextlib.contextmanager
    def cut(self, n_blocks: int) -> Iterator[None]:
        """Inside, the model has the first `n_blocks` only."""
        whole = self.blocks._modules
        self.blocks._modules = dict(list(whole.items())[:n_blocks])
        try:
            yield
        finally:
            self.blocks._modules = whole


def from_shallow_captures(model: nn.Module, capture: Callable[[], CapturedStep]) -> CapturedStep | None:
    """The Step of `model`, for planning; None where it has to be traced whole. `capture` traces the model as it is when it is called."""
    stack = stack_of(model)
    if stack is None:
        return None
    try:
        steps = []
        for n_blocks in (stack.shallow, stack.shallow + stack.period):
            with stack.cut(n_blocks):
                steps.append(capture())
    except _CUT_SHORT as error:
        log.info("%s cannot be captured with fewer blocks (%s); it is traced whole", stack.path, error)
        return None
    shallower, deeper = steps
    if _written(continued(shallower.graph, stack, 1)) != _written(deeper.graph):
        log.info("%s does not go on as it begins; it is traced whole", stack.path)
        return None
    graph = continued(deeper.graph, stack, (len(stack.blocks) - stack.shallow) // stack.period - 1)
    assert graph is not None, "it was continued once"
    log.info("%s: %d blocks from captures of %d and %d", stack.path, len(stack.blocks), stack.shallow, stack.shallow + stack.period)
    return CapturedStep(graph, text.fingerprint(graph), deeper.bounds, deeper.opened)


def _written(graph: fx.Graph | None) -> str | None:
    return None if graph is None else text.render(graph, columns=False)


# Blocks that are alike ------------------------------------------------------------------------------------------------


def stack_of(model: nn.Module) -> Stack | None:
    """The longest ModuleList of `model` if its blocks repeat and it is deep enough for two shallow captures to be less work."""
    lists = [(len(module), name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    n_blocks, path, blocks = max(lists, key=lambda one: one[0], default=(0, "", None))
    if n_blocks < _PERIODS or blocks is None:
        return None
    looks = _looks(model, blocks)
    found = []
    for period in range(1, _LONGEST_PERIOD + 1):
        first = next((i + 1 for i in reversed(range(n_blocks - period)) if looks[i] != looks[i + period]), 0)
        stack = Stack(path, blocks, first, period)
        if stack.shallow + period < n_blocks and 2 * stack.shallow + period <= _WORTH * n_blocks:
            found.append(stack)
    return min(found, key=lambda stack: 2 * stack.shallow + stack.period, default=None)


def _looks(model: nn.Module, blocks: nn.ModuleList) -> list[object]:
    """For each block what its graph can depend on: two with equal looks compute alike."""
    attributes = [{(name, *one): value for name, module in block.named_modules() for one, value in _told_by(module)} for block in blocks]
    numbers = {key for key, value in attributes[0].items() if type(value) is int} if attributes else set()
    # A number that grows with the block's own says which one it is.
    own = {
        key for key in numbers
        if all(key in a and a[key] == attributes[0][key] + i for i, a in enumerate(attributes))}  # type: ignore[operator]
    lists = [value for config in _configs(model) for value in vars(config).values() if isinstance(value, list)]
    listed = [one for one in lists if len(one) == len(blocks)]
    return [
        (tuple((k, repr(v)) for k, v in a.items() if k not in own), tuple(repr(one[i]) for one in listed))
        for i, a in enumerate(attributes)]


def _told_by(module: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    yield ("class", ""), f"{type(module).__module__}.{type(module).__qualname__}"
    yield ("hooks", ""), f"{[*module._forward_hooks.values(), *module._forward_pre_hooks.values()]}"
    for name, parameter in module._parameters.items():
        yield ("parameter", name), None if parameter is None else (
            tuple(parameter.shape), parameter.dtype, parameter.requires_grad, type(parameter).__name__)
    for name, buffer in module._buffers.items():
        yield ("buffer", name), None if buffer is None else (tuple(buffer.shape), buffer.dtype)
    for name, value in vars(module).items():
        if not name.startswith("_") and _is_plain(value):
            yield ("attribute", name), value


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.Size))


def _configs(model: nn.Module) -> list[Any]:
    found = {id(config): config for module in model.modules() if hasattr(config := vars(module).get("config"), "__dict__")}
    return list(found.values())


# One graph longer than the other --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node belongs: to the `group`th period, in which part of the graph, as the how manieth node there."""

    group: int
    part: int
    index: int


class _Groups:
    """A graph's nodes by period of blocks; those of blocks before the first period and of none at all have no place.

    A part is one sweep over the periods, up or down: inputs and forward have one, backward may have several.
    """

    def __init__(self, graph: fx.Graph, stack: Stack) -> None:
        self.place: dict[fx.Node, _Place] = {}
        self.nodes: dict[tuple[int, int], list[fx.Node]] = {}
        # Per part: runs of (group or None, nodes), in order.
        self.parts: list[list[tuple[int | None, list[fx.Node]]]] = []
        for nodes in _phases(graph):
            self.parts.append([])
            for group, run in self._runs(nodes, stack):
                if group is not None and (group, len(self.parts) - 1) in self.nodes:
                    self.parts.append([])
                self.parts[-1].append((group, run))
                if group is not None:
                    self.nodes[group, len(self.parts) - 1] = run
                    self.place.update({node: _Place(group, len(self.parts) - 1, i) for i, node in enumerate(run)})

    @staticmethod
    def _runs(part: list[fx.Node], stack: Stack) -> list[tuple[int | None, list[fx.Node]]]:
        """What no block made, between nodes of blocks, goes with those before it; after the last of them it stands for itself."""
        told = [_group(node, stack) for node in part]
        last = max((i for i, group in enumerate(told) if group is not None), default=-1)
        groups: list[int | None] = []
        for i, group in enumerate(told):
            groups.append(group if group is not None or not groups or i > last else groups[-1])
        return [(group, [node for _, node in run]) for group, run in groupby(zip(groups, part), key=lambda pair: pair[0])]


def _phases(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Inputs, forward, backward with its border; the output is apart."""
    inputs: list[fx.Node] = []
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    body = forward
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(node)
        elif node.op != "output":
            body = backward if node.target is ops.backward else body
            body.append(node)
    yield from (inputs, forward, backward)


def _group(node: fx.Node, stack: Stack) -> int | None:
    block = _block_of(info(node).fqn or "" if node.op == "placeholder" else module_path(node), stack)
    return None if block is None or block < stack.first else (block - stack.first) // stack.period


def _block_of(path: str, stack: Stack) -> int | None:
    found = re.match(rf"{re.escape(stack.path)}\.(\d+)(?=\.|$)", path)
    return int(found[1]) if found else None


def continued(graph: fx.Graph, stack: Stack, n_periods: int) -> fx.Graph | None:
    """A canonical Step's `graph` with `n_periods` more, which follow its second. None when its second and third are not alike."""
    groups = _Groups(graph, stack)
    if not _are_alike(groups):
        return None
    return _Continuation(graph, stack, groups, n_periods).made()


def _are_alike(groups: _Groups) -> bool:
    for part in range(len(groups.parts)):
        one, next_ = groups.nodes.get((1, part), []), groups.nodes.get((2, part), [])
        if len(one) != len(next_) or not all(_same_but_for_operands(a, b) for a, b in zip(one, next_)):
            return False
    return bool(groups.nodes)


def _same_but_for_operands(a: fx.Node, b: fx.Node) -> bool:
    if (a.op, type(a.meta.get("val"))) != (b.op, type(b.meta.get("val"))) or a.op != "placeholder" and a.target != b.target:
        return False
    (flat_a, spec_a), (flat_b, spec_b) = (tree_flatten((n.args, n.kwargs)) for n in (a, b))
    return spec_a == spec_b and all(
        type(x) is type(y) and (isinstance(x, fx.Node) or x is y or bool(x == y)) for x, y in zip(flat_a, flat_b))


class _Continuation:
    """The longer graph in the making. Periods keep their numbers up to the second; `n_periods` copies of it follow, then the others."""

    def __init__(self, graph: fx.Graph, stack: Stack, groups: _Groups, n_periods: int) -> None:
        self.old, self.stack, self.groups, self.n = graph, stack, groups, n_periods
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.copies: dict[tuple[fx.Node, int], fx.Node] = {}

    def made(self) -> fx.Graph | None:
        try:
            for runs in self.groups.parts:
                order = [group for group, _ in runs if group is not None]
                descends = order != sorted(order)
                for group, nodes in runs:
                    copies = range(1, self.n + 1) if group == 1 else ()
                    for s in reversed(copies) if descends else ():
                        self._add_copy(nodes, s)
                    for node in nodes:
                        self.new[node] = self._copy(node, self._operand_of(node, 0), self.n if (group or 0) >= 2 else 0)
                    for s in () if descends else copies:
                        self._add_copy(nodes, s)
            self._return()
        except KeyError:  # something is read before it would be made: the periods hang together in another way than one after the other
            return None
        name_nodes(self.graph)
        return self.graph

    def _add_copy(self, nodes: Sequence[fx.Node], s: int) -> None:
        for node in nodes:
            self.copies[node, s] = self._copy(node, self._operand_of(node, s), s)

    def _operand_of(self, node: fx.Node, s: int) -> Callable[[fx.Node], fx.Node]:
        """What the `s`th copy of `node` reads for each of its operands; the 0th is the node itself."""
        place = self.groups.place.get(node)
        if place is None or place.group not in (1, 2):
            return self.new.__getitem__
        twin = self.groups.nodes[3 - place.group, place.part][place.index]
        read = dict(zip(_read_by(node), _read_by(twin), strict=True))
        number = place.group + (s if place.group == 1 else self.n)

        def operand(old: fx.Node) -> fx.Node:
            other = read[old]
            there, its = self.groups.place.get(old), self.groups.place.get(other)
            if other is old or there is None or its is None:
                return self.new[old]  # both periods read the same
            away = there.group - place.group
            if its.group - (3 - place.group) != away or abs(away) > 1:
                raise KeyError(old)
            return self._at(number + away, old, there if there.group in (1, 2) else its)

        return operand

    def _at(self, number: int, old: fx.Node, place: _Place) -> fx.Node:
        """The node at a `place` of the second or third period, in period `number` of the longer graph; of others only `old` is read."""
        if 1 < number <= self.n + 1:
            return self.copies[self.groups.nodes[1, place.part][place.index], number - 1]
        group = number if number <= 1 else number - self.n
        return self.new[self.groups.nodes[group, place.part][place.index] if group in (1, 2) else old]

    def _copy(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node], periods: int) -> fx.Node:
        """`node` in the longer graph, of a block that comes `periods` later."""
        made = self.graph.create_node(node.op, node.target, name=node.name if periods == 0 else None, type_expr=node.type)
        made.args, made.kwargs = map_arg(node.args, operand), cast("dict[str, Any]", map_arg(node.kwargs, operand))
        made.meta.update(node.meta)
        if periods:
            self._rename(made, node, periods * self.stack.period)
        return made

    def _rename(self, made: fx.Node, node: fx.Node, blocks: int) -> None:
        known = info(node)
        if node.op == "placeholder":
            made.target = made.name
            made.meta[INFO] = replace(known, name=self._later(known.name, blocks), fqn=known.fqn and self._later(known.fqn, blocks))
            return
        made.meta.pop(INFO, None)
        path = module_path(node)
        if _block_of(path, self.stack) is not None:
            made.meta["nn_module_stack"] = {"": (f"L['module'].{self._later(path, blocks)}", None)}

    def _later(self, path: str, blocks: int) -> str:
        block = _block_of(path, self.stack)
        if block is None:
            return path
        head = f"{self.stack.path}."
        return f"{head}{block + blocks}{path[len(head) + len(str(block)):]}"

    def _return(self) -> None:
        """Outputs, then a gradient for every input: those of copies are copies of its gradient."""
        outputs, gradients = returned(self.old)
        gradient = dict(zip((n for n in self.old.nodes if n.op == "placeholder"), gradients))
        found: list[Any] = []
        for group, nodes in self.groups.parts[0]:
            nodes = [node for node in nodes if node in gradient]
            for s in range(self.n + 1 if group == 1 else 1):
                for node in nodes:
                    one = gradient[node]
                    found.append(one if not isinstance(one, fx.Node) else self.copies[one, s] if s else self.new[one])
        made = self.graph.output((map_arg(outputs, self.new.__getitem__), tuple(found) if gradients else ()))
        made.meta.update(output_of(self.old).meta)


def _read_by(node: fx.Node) -> list[fx.Node]:
    return [one for one in tree_flatten((node.args, node.kwargs))[0] if isinstance(one, fx.Node)]
