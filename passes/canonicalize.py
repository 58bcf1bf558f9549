"""canonicalize: one form for equal programs. Views become reshapes, detours and duplicates go, nodes get canonical names.

Nothing here changes a bit of any result. A reshape stands for every view because the executor must not depend on the strides
that tracing assumed: where the real tensor's strides differ, reshape copies and view would fail.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from fxoffload import joint, masks, ops
from fxoffload.graph import Role, border_of, copy_node, info, is_random, is_returned, is_symbol, operands, same_form
from fxoffload.liveness import is_view
from fxoffload.pipeline import Context, Pass
from fxoffload.text_words import expr_of

_aten = torch.ops.aten
_IDENTITIES = frozenset({_aten.detach.default, _aten.alias.default, _aten.lift_fresh_copy.default})
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_SLICES = frozenset({_aten.slice.Tensor, _aten.slice_backward.default})
_WIDER = {torch.bfloat16: (torch.float32, torch.float64), torch.float16: (torch.float32, torch.float64), torch.float32: (torch.float64,)}
# Of one tensor and numbers.
_BY_NUMBER = frozenset({_aten.mul.Scalar, _aten.div.Scalar, _aten.add.Scalar, _aten.neg.default})
_TRANSPOSES = frozenset({_aten.t.default})


def run(graph: fx.Graph, ctx: Context) -> fx.Graph:
    """The canonical form of `graph`; every node named."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            _simplify(graph, node)
    masks.say_numbers(graph)
    _merge_duplicates(graph)
    graph.eliminate_dead_code(_is_impure)
    _ask_sizes_at_once(graph)
    _getitems_follow_their_tuple(graph)
    joint.name_nodes(graph)
    return graph


def _simplify(graph: fx.Graph, node: fx.Node) -> None:
    if node.target in _VIEWS:
        node.target = _aten.reshape.default
    elif node.target is _aten.repeat_interleave.Tensor:
        _say_size(node)
    source = node.args[1 if node.target is _aten.copy.default else 0] if node.args else None
    if not isinstance(source, fx.Node):
        return
    if node.target is _aten.reshape.default:
        source = _unshaped(node, source)
    if node.target in _IDENTITIES and _same_value(node, source):
        _replace(graph, node, source)
    elif node.target in _TRANSPOSES and source.target is node.target:
        _replace(graph, node, source.args[0])  # type: ignore[arg-type]
    elif node.target in _SLICES and _is_alike(node, source):
        _replace(graph, node, source)
    elif node.target is _aten.select.int and (whole := _before_unsqueezing(node, source)) is not None:
        _replace(graph, node, whole)
    elif _may_change_nothing(node) and _is_alike(node, source) and not is_returned(node):
        _replace(graph, node, source)
    elif node.target is _aten.copy.default and same_form(node, source) and not is_returned(node):
        _replace(graph, node, source)  # what it is copied over is read no more
    elif node.target is _aten._to_copy.default:
        _drop_detour(graph, node, source)
    elif node.target in _BY_NUMBER and source.target is _aten.expand.default:
        _compute_before_expanding(graph, node, source)


def _say_size(node: fx.Node) -> None:
    """Where tracing knew how long a result is, the op is told: else it would ask the device, and wait."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(value.shape[0], int):
        node.kwargs = {**node.kwargs, "output_size": value.shape[0]}


def _unshaped(node: fx.Node, source: fx.Node) -> fx.Node:
    """What a reshape reads: where it read another reshape, now what that one reads."""
    if source.target is not _aten.reshape.default:
        return source
    unshaped = source.args[0]
    assert isinstance(unshaped, fx.Node)
    node.replace_input_with(source, unshaped)
    return unshaped


def _before_unsqueezing(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """What was unsqueezed, and perhaps expanded, where a select takes just the dimension away that this gave it."""
    if source.target is _aten.expand.default and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    if source.target is not _aten.unsqueeze.default:
        return None
    whole, n_dims = source.args[0], source.meta["val"].ndim
    assert isinstance(whole, fx.Node)
    taken, given = (at % n_dims for at in (node.args[1], source.args[1]))  # type: ignore[operator]
    return whole if taken == given and _is_alike(node, whole) else None


def _may_change_nothing(node: fx.Node) -> bool:
    return node.target is _aten.reshape.default or (node.target is _aten.pow.Tensor_Scalar and bool(node.args[1] == 1))


def _drop_detour(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """A cast to a wider dtype and back gives what was cast: every number of the narrower one is a number of the wider one."""
    if source.target is not _aten._to_copy.default or is_returned(node):
        return
    first = source.args[0]
    assert isinstance(first, fx.Node)
    a, wide, b = first.meta.get("val"), source.meta.get("val"), node.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(wide, torch.Tensor) and isinstance(b, torch.Tensor)):
        return
    if a.dtype == b.dtype and wide.dtype in _WIDER.get(a.dtype, ()) and a.device == b.device and _lies_like(a, b):
        _replace(graph, node, first)


def _lies_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    return [expr_of(n) for n in (*a.shape, *a.stride())] == [expr_of(n) for n in (*b.shape, *b.stride())]


def _compute_before_expanding(graph: fx.Graph, node: fx.Node, expanded: fx.Node) -> None:
    """An op of one tensor and numbers, on what is expanded: once per number that differs, where only elementwise ops read the result.

    (What sums over it would add in another order, and what returns it would show other strides.)
    """
    source = expanded.args[0]
    assert isinstance(source, fx.Node)
    small, wide = source.meta.get("val"), node.meta.get("val")
    if not (isinstance(small, torch.Tensor) and isinstance(wide, torch.Tensor)) or small.dtype != wide.dtype:
        return
    if not node.users or any(torch.Tag.pointwise not in getattr(user.target, "tags", ()) for user in node.users):
        return
    with graph.inserting_before(node):
        made = copy_node(graph, node, lambda n: source if n is expanded else n)
        made.meta["val"] = small.new_empty(small.shape)
        again = copy_node(graph, expanded, lambda n: made if n is source else n)
        again.meta["val"] = made.meta["val"].expand(wide.shape)
    _replace(graph, node, again)


def _is_alike(node: fx.Node, source: fx.Node) -> bool:
    """True when a value lies like its source, for any size of a symbol: nothing is cut off, and what was copied has no other strides, in whose
    order later sums would add."""
    a, b = node.meta.get("val"), source.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and _lies_like(a, b)


def _same_value(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta.get("val"), source.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype


def _ask_sizes_at_once(graph: fx.Graph) -> None:
    """Moves every question for a size, and what is computed of sizes, to where its operands are there.

    Tracing leaves those that backward needs at its beginning: there they would be readers of forward's values, and what is computed again
    would all be computed again at once.
    """
    nodes = list(graph.nodes)
    border = border_of(graph)
    place = {node: i for i, node in enumerate(nodes)}
    tangents = [i for i, node in enumerate(nodes) if info(node).role is Role.TANGENT]
    n_inputs = sum(node.op == "placeholder" for node in nodes)
    late = {node for node in nodes[tangents[0] : n_inputs]} if tangents and border is not None else set()
    follow: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op != "call_function" or not is_symbol(node):
            continue
        if any(operand in late for operand in operands(node)):
            late.add(node)
        at = max((place[operand] for operand in operands(node)), default=place[node])
        at = max(at, place[border] if node in late and border is not None else n_inputs - 1)
        if 0 <= at < place[node]:
            place[node] = at
            follow.setdefault(nodes[at], []).append(node)
    for anchor, moved in follow.items():
        for node in reversed(moved):
            anchor.append(node)


def _replace(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def _is_impure(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    spec = ops.spec_of(node)
    if spec is not None:
        return not spec.pure
    if node.target is _aten._assert_scalar.default and node.args[0] is True:
        return False
    return writes_input(node) or node.is_impure()


def writes_input(node: fx.Node) -> bool:
    """True when the op writes into an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _merge_duplicates(graph: fx.Graph) -> None:
    """Equal ops on equal operands become one. Random ops and ops that write stay; so does what only reads memory's shape."""
    seen: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or writes_input(node) or ops.spec_of(node) is not None:
            continue
        key = _key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            _replace(graph, node, first)


def _key(node: fx.Node) -> object | None:
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return None
    parts: list[object] = [node.target]
    for value in (node.args, tuple(sorted(node.kwargs.items()))):
        _flatten(value, parts)
    return tuple(parts)


def _flatten(value: object, parts: list[object]) -> None:
    if isinstance(value, (tuple, list)):
        parts.append(("(", len(value)))
        for item in value:
            _flatten(item, parts)
    elif isinstance(value, fx.Node):
        parts.append(value)
    else:
        parts.append((type(value), repr(value)))


def _getitems_follow_their_tuple(graph: fx.Graph) -> None:
    """An element of a tuple is named right after the tuple, so the tuple itself dies there."""
    for node in list(graph.nodes):
        if node.target is operator.getitem and not is_view(node.args[0]):
            source = node.args[0]
            last = source
            while last.next.target is operator.getitem and last.next.args[0] is source:
                last = last.next
            if node is not last and not (node.prev is last or _between(source, node, last)):
                last.append(node)


def _between(source: fx.Node, node: fx.Node, last: fx.Node) -> bool:
    current = source.next
    while current is not last.next:
        if current is node:
            return True
        current = current.next
    return False


PASS = Pass("canonicalize", run, requires=frozenset({"functional"}))
