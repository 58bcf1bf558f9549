"""A Graph is a plain `fx.Graph` whose node order is the schedule; this module says what its nodes stand for.

One `NodeInfo` per node under the meta key "fxo" carries what fx itself has no place for. Graphs that were not captured by
fxoffload have none; then the node's own name and its position speak.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar, cast

import torch
import torch.fx as fx
from torch.fx.node import Argument, map_arg

from . import ops
from .effects import Tier
from .torch_compat import same_nodes, without_modes

Told = TypeVar("Told")
INFO = "fxo"
# Names that no module path and no op can have.
BORDER, OUTPUT = "/backward", "/output"
_CONSTANT = "fxo_constant"


class Role(str, Enum):
    """What an input of a Graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    TANGENT = "tangent"
    SYMBOL = "symbol"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """`name`: canonical, unique, stable across captures of the same model. `fqn`: the parameter or buffer of an input.

    `tier`: where an input's bytes live. `origin`: canonical name of the node this one is a clone of.
    `grad_of`: on an output gradient's node, the parameter it belongs to. `offset`: where in the arena the node's Storage begins, in
    bytes, where memory is planned by offsets. `pages`: where it does not lie in one piece, the offset and the bytes of each.
    `written`: an input that the caller of forward writes an output into before backward begins (a running mean).
    """

    name: str
    role: Role | None = None
    fqn: str | None = None
    tier: Tier = Tier.DEVICE
    trainable: bool = False
    origin: str | None = None
    offset: int | None = None
    pages: tuple[tuple[int, int], ...] = ()
    written: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest value of every symbolic dimension, by symbol name; a Graph is planned at them and valid below."""

    maxima: Mapping[str, int] = field(default_factory=dict)
    _bytes: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict, compare=False, repr=False)
    _shapes: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = field(default_factory=dict, compare=False, repr=False)
    _sizes: dict[object, int] = field(default_factory=dict, compare=False, repr=False)
    _told: dict[tuple[object, ...], tuple[object, object]] = field(default_factory=dict, compare=False, repr=False)

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """Bytes of the Storage a fresh tensor of this shape and stride needs; remembered, since passes share fake tensors."""
        known = self._bytes.get(id(tensor))
        if known is None:
            # The entry holds the tensor, so that its id cannot become another's.
            known = self._bytes[id(tensor)] = (tensor, _storage_bytes(tensor, self))
        return known[1]

    def shape_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The tensor's sizes; remembered like its bytes."""
        known = self._shapes.get(id(tensor))
        if known is None:
            known = self._shapes[id(tensor)] = (tensor, tuple(self.of(size) for size in tensor.shape))
        return known[1]

    def told(self, tell: Callable[[fx.Node, Bounds], Told], node: fx.Node) -> Told:
        """`tell(node, self)`, remembered for all copies of the node: they share its target, and its own and its operands' fake values."""
        values = [operand.meta.get("val") for operand in node.all_input_nodes]
        target, value = node.target, node.meta.get("val")
        key = (id(tell), id(target), id(value), *map(id, values))
        known = self._told.get(key)
        if known is None:
            known = self._told[key] = ((tell, target, value, *values), tell(node, self))
        return cast(Told, known[1])

    def once(self, make: Callable[[], Told], *of: object) -> Told:
        """What `make` gives, made once of the objects `of`, which tell all that it depends on."""
        key = tuple(map(id, of))
        known = self._told.get(key)
        if known is None:
            # The entry holds the objects, so that their ids cannot become others'.
            known = self._told[key] = (of, make())
        return cast(Told, known[1])

    def of(self, size: int | torch.SymInt) -> int:
        """`size` as an int at the maxima. Raises KeyError for a symbol without a maximum."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        known = self._sizes.get(expr)
        if known is None:
            values = {symbol: self.maxima[str(symbol)] for symbol in expr.free_symbols}
            known = self._sizes[expr] = int(expr.xreplace(values))
        return known


def info(node: fx.Node) -> NodeInfo:
    """The node's NodeInfo; for a node fxoffload has not named, one made of its fx name."""
    known = node.meta.get(INFO)
    if isinstance(known, NodeInfo):
        return known
    return NodeInfo(OUTPUT if node.op == "output" else node.name, Role.BATCH if node.op == "placeholder" else None)


def set_info(node: fx.Node, **changes: object) -> None:
    """Replaces fields of the node's NodeInfo."""
    node.meta[INFO] = replace(info(node), **changes)  # type: ignore[arg-type]


def name_of(node: fx.Node) -> str:
    """The node's canonical name."""
    known = node.meta.get(INFO)
    return known.name if type(known) is NodeInfo else info(node).name


def set_constant(node: fx.Node, value: torch.Tensor) -> None:
    """Makes `value` what a `get_attr` node gives, under a target that only depends on the bytes."""
    with without_modes():
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode() + content).hexdigest()
    node.target = f"constant_{digest[:16]}"
    node.meta[_CONSTANT] = value


def constant_of(node: fx.Node) -> torch.Tensor:
    """The tensor a `get_attr` node gives. Raises ValueError when it gives something else."""
    value = node.meta.get(_CONSTANT)
    if value is None and node.graph.owning_module is not None:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if type(value) is not torch.Tensor:  # a submodule, or a fake tensor of an unfinished capture
        raise ValueError(f"{node.target} is no constant tensor")
    return value


def root_of(graph: fx.Graph) -> torch.nn.Module:
    """A module with the graph's constants, to make a GraphModule of it."""
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        root.register_buffer(str(node.target), constant_of(node), persistent=False)
    return root


def has_fixed_layout(node: fx.Node) -> bool:
    """True when no size or stride of the node's tensor is a symbol."""
    value = node.meta["val"]
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def by_name(graph: fx.Graph) -> dict[str, fx.Node]:
    """Every node under its canonical name."""
    return {name_of(node): node for node in graph.nodes}


def copy_node(graph: fx.Graph, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy of `node` at the insertion point of `graph`, with other operands and the same values."""
    # A name of its own beside the original: torch 2.11 tries one number after the other for a name that is taken.
    name = f"{node.name}_again" if graph is node.graph else node.name
    new = graph.create_node(node.op, node.target, name=name, type_expr=node.type)
    if node.args:
        _set_argument(new, "args", map_arg(node.args, operand))
    if node.kwargs:
        _set_argument(new, "kwargs", map_arg(node.kwargs, operand))
    new.meta.update(node.meta)
    return new


def call(graph: fx.Graph, op: torch._ops.OpOverload, *args: object) -> fx.Node:
    """A call of one of our ops at the insertion point of `graph`."""
    new = graph.create_node("call_function", op, name=ops.SPECS[op].name)
    _set_argument(new, "args", args)
    return new


def _set_argument(node: fx.Node, which: str, value: object) -> None:
    """Gives a new node its `args` or `kwargs`. Not create_node, which looks for symbols in all it is given, which takes longer than the rest of
    it; and past Node.__setattr__, which takes the node out of the graph's index by target and puts it back whatever is set."""
    object.__setattr__(node, which, value)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy that shares fake values but no node."""
    return same_nodes(graph)


def border_of(graph: fx.Graph) -> fx.Node | None:
    """The `fxo.backward` node, None in a graph without a backward."""
    found = graph.find_nodes(op="call_function", target=ops.backward)
    return found[0] if found else None


def output_of(graph: fx.Graph) -> fx.Node:
    """The output node."""
    return next(iter(reversed(graph.nodes)))


def returned(graph: fx.Graph) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """What a Step returns, in order: forward's outputs, then the gradients. Each is a node, or a constant such as None."""
    outputs, gradients = cast("tuple[tuple[Argument, ...], tuple[Argument, ...]]", output_of(graph).args[0])
    return outputs, gradients


def is_step(graph: fx.Graph) -> bool:
    """Whether the graph returns what a Step does: forward's outputs and the gradients, a tuple each."""
    sides = output_of(graph).args[0]
    return isinstance(sides, (tuple, list)) and len(sides) == 2 and all(isinstance(side, (tuple, list)) for side in sides)


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose forward made the node ("" for the root or when unknown)."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return _plain_path(str(list(stack.values())[-1][0]))


@functools.lru_cache(maxsize=None)
def _plain_path(raw: str) -> str:
    """ "L['module']._modules['a'].b" as "a.b": Dynamo's source expression without the traced function's own local."""
    words = re.findall(r"\['([^']+)'\]|\[(\d+)\]|([A-Za-z_]\w*)|(?<=\.)(\d+)", raw)
    path = [next(filter(None, found)) for found in words]
    path = [word for word in path if word not in ("L", "G", "_modules", "__dict__")]
    return ".".join(path[1:] if path and path[0] in ("module", "self") else path)


def remembered(told: Callable[[object], Told]) -> Callable[[object], Told]:
    """`told`, asked once of every target. Targets are told apart by identity: torch computes an op's hash in Python."""
    known: dict[int, tuple[object, Told]] = {}

    @functools.wraps(told)
    def ask(target: object) -> Told:
        found = known.get(id(target))
        if found is None:
            # The entry holds the target, so that its id cannot become another's.
            found = known[id(target)] = (target, told(target))
        return found[1]

    return ask


def op_name(node: fx.Node) -> str:
    """Short name of what the node does: "mm", "swap_in", "getitem"."""
    return _target_name(node.target)


@remembered
def _target_name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name.split("::", 1)[1])
    return str(getattr(target, "__name__", target))


class Names:
    """Gives canonical names: "module path/op#index", unique within one Graph."""

    def __init__(self, graph: fx.Graph | None = None, nodes: Mapping[str, fx.Node] | None = None) -> None:
        self._graph, self._nodes, self._counts = graph, nodes, Counter[str]()

    @functools.cached_property
    def _taken(self) -> set[str]:
        """Names that the graph has when the first one is asked for, or those of its `nodes` where they are known; and those given since."""
        if self._nodes is not None:
            return set(self._nodes)
        return {name_of(node) for node in self._graph.nodes} if self._graph is not None else set()

    def fresh(self, stem: str, separator: str = "#") -> str:
        """`stem` + separator + the next free index."""
        while True:
            name = f"{stem}{separator}{self._counts[stem + separator]}"
            self._counts[stem + separator] += 1
            if name not in self._taken:
                self._taken.add(name)
                return name


def is_random(node: fx.Node) -> bool:
    """True when the op draws from a device's default generator."""
    return draws(node.target)


@remembered
def draws(target: object) -> bool:
    """True when a call of `target` draws from a device's default generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_symbol(node: fx.Node) -> bool:
    """True for a symbolic size among the inputs and for arithmetic on sizes: the node's value is a number."""
    return info(node).role is Role.SYMBOL or isinstance(node.meta.get("val"), _NUMBERS)


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes `node` reads, each once, in argument order."""
    return node.all_input_nodes


def erase_unread(graph: fx.Graph, node: object) -> None:
    """Erases a node that nothing reads any more, then its operands; inputs stay."""
    if not isinstance(node, fx.Node) or node.users or node.op != "call_function":
        return
    read = operands(node)
    graph.erase_node(node)
    for operand in read:
        erase_unread(graph, operand)


def is_returned(node: fx.Node) -> bool:
    """True when the caller gets the value: memory of its own, as the program says."""
    return any(user.op == "output" for user in node.users)


def same_form(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values have one device, dtype, shape and stride, so that each element of one lies where the other's does."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)) or (x.dtype, x.device) != (y.dtype, y.device):
        return False
    return _expressions(x) == _expressions(y)


def _expressions(tensor: torch.Tensor) -> list[object]:
    """Sizes and strides, symbols as expressions: comparing those sets no guard."""
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in (*tensor.shape, *tensor.stride())]


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of a node's fake value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def tensor_bytes(tensor: torch.Tensor, bounds: Bounds) -> int:
    """Bytes of the Storage a fresh tensor of this shape and stride needs, at the bounds."""
    return bounds.bytes_of(tensor)


def _storage_bytes(tensor: torch.Tensor, bounds: Bounds) -> int:
    extent = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        n = bounds.of(size)
        if n == 0:
            return 0
        extent += (n - 1) * bounds.of(stride)
    return extent * tensor.element_size()
