"""From AOTAutograd's joint graph to our Graph: forward nodes, the border, backward nodes, inputs that say what they are."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from . import ops
from .effects import Tier
from .graph import BORDER, INFO, OUTPUT, NodeInfo, Role, constant_of, is_symbol, module_path, op_name, set_constant, tensors_in
from .errors import PlanError
from .torch_compat import has_unbacked_sizes, source_line_of, triton_kernel_of, written_inputs


@dataclass(frozen=True, slots=True)
class InputRef:
    """What a graph input is: its role, the parameter's or buffer's fqn, and whether it is trained."""

    role: Role
    name: str
    fqn: str | None = None
    trainable: bool = False


def inputs_of(primals: Sequence[object]) -> list[InputRef]:
    """InputRefs for a joint graph of unknown origin: every input is a batch tensor, named by its position."""
    return [InputRef(Role.BATCH, f"input#{i}") for i in range(len(primals))]


def step_graph(joint: fx.Graph, inputs: Sequence[InputRef], n_forward_outputs: int) -> fx.Graph:
    """The Step's Graph from a joint graph whose first placeholders are `inputs` and whose others are tangents.

    Gathers and sinks of the capture are taken out: the result speaks of values on the compute device only, the same text for
    every residency. Output: ((forward outputs), (gradients)). Raises PlanError when the placeholders do not match, for an op whose
    inside is another graph or a kernel (what it reads, writes and holds nobody tells), and for a size that is known only once other values are.
    """
    _refuse_higher_order(joint)
    _refuse_unknown_sizes(joint)
    placeholders = joint.find_nodes(op="placeholder")
    if len(placeholders) < len(inputs):
        raise PlanError(f"capture gave {len(placeholders)} inputs, {len(inputs)} were expected")
    outputs = _flat_outputs(joint)
    forward_outputs, gradients = outputs[:n_forward_outputs], outputs[n_forward_outputs:]
    forward = _forward_nodes(joint, forward_outputs)
    has_backward = any(isinstance(g, fx.Node) for g in gradients)

    graph, written = fx.Graph(), set(written_inputs(joint))
    new: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(placeholders):
        new[node] = graph.node_copy(node)
        new[node].meta = dict(node.meta)
        new[node].meta[INFO] = _input_info(position, node, inputs, position in written)
    body = [n for n in joint.nodes if n.op not in ("placeholder", "output")]
    _copy_nodes(graph, new, [n for n in body if n in forward])
    if has_backward:
        graph.call_function(ops.backward).meta[INFO] = NodeInfo(BORDER)
        _copy_nodes(graph, new, [n for n in body if n not in forward])
    lookup = lambda value: new[value] if isinstance(value, fx.Node) else value  # noqa: E731
    result = graph.output((tuple(map(lookup, forward_outputs)), tuple(map(lookup, gradients)) if has_backward else ()))
    result.meta[INFO] = NodeInfo(OUTPUT)
    return graph


def _refuse_higher_order(joint: fx.Graph) -> None:
    for node in joint.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            kernel = triton_kernel_of(node)
            what = f"calls the Triton kernel {kernel}" if kernel else f"uses {node.target.name()}"
            raise PlanError(
                f"{module_path(node) or 'the model'} {what}, which cannot be planned: make an op of what calls it (torch.library.custom_op, "
                "with register_fake and register_autograd), or have PyTorch's own ops there")


def _refuse_unknown_sizes(joint: fx.Graph) -> None:
    for node in joint.nodes:
        # a tangent has the size of the output it belongs to, which some op made
        if node.op != "placeholder" and any(map(has_unbacked_sizes, tensors_in(node.meta.get("val")))):
            place = " at ".join(filter(None, (module_path(node) or "the model", source_line_of(node))))
            raise PlanError(
                f"{place}: the result of {op_name(node)} has a size that depends on values (as of nonzero, a mask as index, a slice up to a sum), "
                "whose bytes cannot be planned: keep all rows and multiply by the mask, or use torch.where or masked_scatter")


def _flat_outputs(joint: fx.Graph) -> list[object]:
    flat: list[object] = []
    for value in joint.output_node().args[0]:  # type: ignore[union-attr]
        flat.extend(value) if isinstance(value, (list, tuple)) else flat.append(value)
    return flat


def _input_info(position: int, node: fx.Node, inputs: Sequence[InputRef], written: bool) -> NodeInfo:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return NodeInfo(f"symbol#{position}", Role.SYMBOL)
    if position >= len(inputs):
        return NodeInfo(f"tangent#{position - len(inputs)}", Role.TANGENT)
    ref = inputs[position]
    return NodeInfo(ref.name, ref.role, ref.fqn, Tier.DEVICE, ref.trainable, written=written)


def _forward_nodes(joint: fx.Graph, forward_outputs: Sequence[object]) -> set[fx.Node]:
    """Ancestors of the forward outputs and of writes into inputs, plus the getitems of their tuples."""
    found: set[fx.Node] = set()
    tangents = {n for n in joint.nodes if n.op == "placeholder" and "tangents" in n.name}
    writes = [n for n in joint.nodes if n.target is torch.ops.aten.copy_.default and not _reaches(n, tangents)]
    work = [v for v in forward_outputs if isinstance(v, fx.Node)] + writes
    while work:
        node = work.pop()
        if node in found:
            continue
        found.add(node)
        work.extend(node.all_input_nodes)
    for node in joint.nodes:
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _reaches(node: fx.Node, sources: set[fx.Node]) -> bool:
    seen: set[fx.Node] = set()
    work = [node]
    while work:
        current = work.pop()
        if current in sources:
            return True
        if current not in seen:
            seen.add(current)
            work.extend(current.all_input_nodes)
    return False


def _copy_nodes(graph: fx.Graph, new: dict[fx.Node, fx.Node], nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        if node.target in (ops.gather, ops.sink):
            source = new[node.args[0]]  # type: ignore[index]
            new[node] = source
            if node.target is ops.gather:
                source.meta["val"] = node.meta["val"]
            continue
        new[node] = graph.node_copy(node, lambda n: new[n])
        new[node].meta = dict(node.meta)
        if node.op == "get_attr":
            _note_constant(new[node], node)


def _note_constant(made: fx.Node, node: fx.Node) -> None:
    try:
        set_constant(made, constant_of(node))
    except ValueError:
        raise PlanError(f"the captured graph holds a submodule ({node.target}), which cannot be planned") from None


def name_nodes(graph: fx.Graph) -> None:
    """Gives every node that has none its canonical name: module path / op # index, in graph order.

    The arithmetic of symbols counts apart: a capture without symbols gives the other nodes the same names.
    """
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is ops.backward:
            continue
        stem = f"{module_path(node)}/{'sym_' if is_symbol(node) else ''}{op_name(node)}"
        counts[stem] = counts.get(stem, -1) + 1
        known = node.meta.get(INFO)
        named = NodeInfo(f"{stem}#{counts[stem]}")
        node.meta[INFO] = replace(known, name=named.name) if isinstance(known, NodeInfo) else named
