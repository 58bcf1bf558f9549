"""Writes a Graph so that captures of one model at any sizes, with symbols or without, on any device, read the same.

Left out is which kernel computes attention, and what the sizes of a batch decide: sizes of all values but parameters and buffers, numbers in size arguments, the
arithmetic of symbols, and views, whose place is taken by what they look into.
"""

from __future__ import annotations

import re

import torch
import torch.fx as fx

from .attention import operands_of
from .graph import Role, info, is_symbol, remembered, tensors_in
from .liveness import is_view, view_source
from .text_writer import Writer

# In a schema's text: names of arguments that may hold a size. (torch's own type objects call SymInt an int.)
_SIZES = re.compile(r"(?:SymInt|Scalar|Tensor)[^ ]* (\w+)")

_ASSERTIONS = (torch.ops.aten._assert_scalar.default, torch.ops.aten.sym_constrain_range_for_size.default)


class NeutralWriter(Writer):
    """Writes the lines of one graph, sizes left out."""

    def lines(self, graph: fx.Graph) -> list[str]:
        """One line per node that is no view, no symbol and no assertion about symbols."""
        return [self.line(node) for node in graph.nodes if not (is_view(node) or is_symbol(node) or node.target in _ASSERTIONS)]

    def _value(self, node: fx.Node, value: object) -> str:
        if node.op == "output" and isinstance(value, (list, tuple)):
            # A symbol among the inputs has no gradient: what is missing is left out, whichever input it belongs to.
            return f"({', '.join(self._value(node, item) for item in value if item is not None)})"
        return super()._value(node, value)

    def _name(self, node: fx.Node) -> str:
        known = self._names.get(node)
        if known is None:
            known = self._names[node] = "_" if is_symbol(node) else self._name(view_source(node)) if is_view(node) else super()._name(node)
        return known

    def _annotation(self, node: fx.Node) -> str:
        if info(node).role in (Role.PARAMETER, Role.BUFFER):
            return super()._annotation(node)
        return ": " + ",".join(f"{self._dtype(t)}[{t.dim()}]" for t in tensors_in(node.meta.get("val")))

    def _call(self, node: fx.Node) -> str:
        positions, keywords = size_arguments(node.target)
        arguments = [self._argument(node, value, positions.get(i, False)) for i, value in enumerate(operands_of(node))]
        arguments += [f"{key}={self._argument(node, value, keywords.get(key, False))}" for key, value in node.kwargs.items()]
        return f"{self._target(node)} {', '.join(arguments)}"

    def _argument(self, node: fx.Node, value: object, may_be_size: bool) -> str:
        if may_be_size and isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(node, item, True) for item in value)}]"
        if may_be_size and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return "_"
        return self._value(node, value)


@remembered
def size_arguments(target: object) -> tuple[dict[int, bool], dict[str, bool]]:
    """Which arguments of an op may be sizes, by position and by name."""
    schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
    sizes = set(_SIZES.findall(str(schema)))
    found = [(a.name, a.name in sizes) for a in (schema.arguments if schema is not None else ())]
    return {i: yes for i, (_, yes) in enumerate(found)}, dict(found)
