"""Graphs as text, both ways. One node is one line; `parse(render(graph))` is the same graph, fake values included.

    graph "step" (s0 <= 4)
    %x: f32[s0,8] = input {role=batch}
    %w: f32[8,8]@pinned = input {role=parameter, fqn="w"}
    %w/in: f32[8,8] = fxo.swap_in %w, device
    %w@0: f32[8,8] = fxo.wait %w/in
    %y: f32[s0,8] = aten.mm %x, %w@0
    fxo.release %w/in
    return %y

`%name` is the canonical name. A type is dtype[sizes], dtype[sizes;strides] when not contiguous, and the tier when it is not the
device. Symbolic sizes are expressions of the symbols in the header. Devices are the words `device` and `host`, so the text of a
graph does not depend on where it was captured. Void ops print their name only when it is not "<operand>/<op>".
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import difflib
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from . import ops
from .effects import Alloc, Tier
from .graph import INFO, Bounds, NodeInfo, Role, info, name_of, op_name, output_of, tensors_in
from .liveness import Kind, LiveCurve, Liveness, live_curve, liveness
from .sizes import format_bytes

# Meta key on the output node: what the header calls the graph.
LABEL = "fxo_label"
COLUMNS = (Kind.PARAMETER, Kind.ACTIVATION, Kind.GRADIENT)

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.complex64: "c64", torch.complex128: "c128", torch.bool: "b8",
}  # fmt: skip
_LAYOUTS = {torch.strided: "strided", torch.sparse_coo: "sparse_coo", torch.sparse_csr: "sparse_csr"}
_FORMATS = {
    torch.contiguous_format: "contiguous_format", torch.preserve_format: "preserve_format",
    torch.channels_last: "channels_last", torch.channels_last_3d: "channels_last_3d",
}  # fmt: skip
_CONSTANTS = {"none": None, "true": True, "false": False, "inf": math.inf, "nan": math.nan, "-inf": -math.inf}
_MODULES = {"operator": operator, "math": math, "torch": torch}
_PLAIN_NAME = re.compile(r'[^\s,()\[\]{}"=:|<>]+')
_COLUMN_PREFIX = re.compile(r"^(?:\s*[\d.]+ [KMGTPE]?i?[Bb]\w*\s*\|){3} ?")


def render(graph: fx.Graph, bounds: Bounds | None = None, columns: bool = True) -> str:
    """The text of `graph`, ending in a newline. With `columns`, each line starts with the device bytes of parameters, activations
    and gradients alive at the node (after it, for a release). `bounds` default to the hints of the graph's symbols.

    Raises ValueError naming the node for what has no text (higher-order ops, submodules), KeyError for a symbol without maximum.
    """
    bounds = bounds or hint_bounds(graph)
    live = liveness(graph, bounds if columns else _NO_BYTES)
    writer = _Writer(graph, live)
    lines = [writer.line(node) for node in graph.nodes]
    header = _header(output_of(graph).meta.get(LABEL, "graph"), bounds)
    if not columns:
        return "\n".join([header, *lines]) + "\n"
    return "\n".join([header, "// bytes on the device: parameters | activations | gradients", *_with_columns(lines, live_curve(live))]) + "\n"


def fingerprint(graph: fx.Graph) -> str:
    """sha256 of the graph's neutral text: equal for captures of one model on any device, whatever its symbols are called."""
    return hashlib.sha256(neutral_text(graph).encode()).hexdigest()


def neutral_text(graph: fx.Graph) -> str:
    """The text without header and columns, symbols renamed in order of appearance. Raises ValueError like `render`."""
    writer = _Writer(graph, liveness(graph, _NO_BYTES), rename_symbols=True)
    return "\n".join(writer.line(node) for node in graph.nodes) + "\n"


def diff(a: str, b: str) -> str:
    """Unified diff of two texts, byte columns left out; "" when they are equal."""
    before, after = ([_COLUMN_PREFIX.sub("", line) for line in text.splitlines()] for text in (a, b))
    lines: list[str] = []
    for group in _LineMatcher(None, before, after, autojunk=False).get_grouped_opcodes():
        lines.append(f"@@ -{group[0][1] + 1} +{group[0][3] + 1} @@")
        for tag, a0, a1, b0, b1 in group:
            if tag == "equal":
                lines += [f" {line}" for line in before[a0:a1]]
                continue
            lines += [f"-{line}" for line in before[a0:a1]] + [f"+{line}" for line in after[b0:b1]]
    return "".join(f"{line}\n" for line in lines)


def excerpt(graph: fx.Graph, node: fx.Node, live: Liveness | None = None, radius: int = 2) -> str:
    """The lines around `node`, which is marked; fx's own form of a node stands where it has no text."""
    nodes = list(graph.nodes)
    at = nodes.index(node)
    first = max(0, at - radius)
    writer = _Writer(graph, live)
    return "\n".join(
        ("> " if shown is node else "  ") + _line_or_raw(writer, shown) for shown in nodes[first : at + radius + 1]
    )


class _LineMatcher(difflib.SequenceMatcher[str]):
    """Matches lines that occur once in each text, in a longest increasing run: O(n log n) where difflib takes 14 s at 10k nodes."""

    def get_matching_blocks(self) -> list[difflib.Match]:
        place = {line: j for j, line in enumerate(self.b)}
        pairs = [(i, place[line]) for i, line in enumerate(self.a) if line in place]
        blocks = [difflib.Match(i, j, 1) for i, j in _increasing(pairs)]
        return [*blocks, difflib.Match(len(self.a), len(self.b), 0)]


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A longest subsequence of `pairs`, sorted by first, that is strictly increasing in the second (patience sorting)."""
    tops: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for k, (_, j) in enumerate(pairs):
        pile = bisect.bisect_left(tops, j)
        before.append(ends[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [j]
        ends[pile : pile + 1] = [k]
    found: list[tuple[int, int]] = []
    k = ends[-1] if ends else -1
    while k >= 0:
        found.append(pairs[k])
        k = before[k]
    return found[::-1]


def hint_bounds(graph: fx.Graph) -> Bounds:
    """Bounds at the sizes the graph was captured (or parsed) with; unbacked symbols have none."""
    maxima: dict[str, int] = {}
    for node in graph.nodes:
        for size in _sizes(node.meta.get("val")):
            hints = _hints(size.node.shape_env)
            maxima |= {str(symbol): int(hints[symbol]) for symbol in size.node.expr.free_symbols & hints.keys()}
    return Bounds(dict(sorted(maxima.items())))


def parse(text: str, device: torch.device | None = None) -> fx.Graph:
    """The graph a text describes, with fake values whose compute device is `device`.

    Default "cpu:0": a compute device that every machine has and that differs from the host's "cpu". Symbols get a fresh
    ShapeEnv with their maxima as hints. Raises ValueError with the line that cannot be read.
    """
    reader = _Reader(parse_bounds(text), device or torch.device("cpu", 0))
    for number, line in _code_lines(text):
        try:
            reader.line(line)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"line {number}: {error}\n  {line}") from None
    if reader.label is not None:
        output_of(reader.graph).meta[LABEL] = reader.label
    return reader.graph


def parse_bounds(text: str) -> Bounds:
    """The maxima in a text's header. Raises ValueError when the text has none."""
    for _, line in _code_lines(text):
        match = _HEADER.fullmatch(line)
        if match is None:
            raise ValueError(f'a graph starts with graph "label" (s0 <= 4), not {line!r}')
        return Bounds({name: int(value) for name, value in re.findall(r"(\w+) <= (\d+)", match.group(2) or "")})
    raise ValueError("the text is empty")


_HEADER = re.compile(r'graph ("(?:[^"\\]|\\.)*")(?: \(([^)]*)\))?')


class _NoBytes(Bounds):
    """Bounds for a liveness that is asked for tiers only: no size is evaluated."""

    def of(self, size: int | torch.SymInt) -> int:
        return 0


_NO_BYTES = _NoBytes()


def _header(label: str, bounds: Bounds) -> str:
    maxima = ", ".join(f"{name} <= {value}" for name, value in sorted(bounds.maxima.items()))
    return f"graph {json.dumps(label)}" + (f" ({maxima})" if maxima else "")


def _with_columns(lines: Sequence[str], curve: LiveCurve) -> Iterator[str]:
    words: dict[int, str] = {}
    for i, line in enumerate(lines):
        cells = [curve.by_kind[kind][i] for kind in COLUMNS]
        for n_bytes in cells:
            if n_bytes not in words:
                words[n_bytes] = f"{format_bytes(n_bytes):>10} | "
        yield "".join([words[n_bytes] for n_bytes in cells]) + line


def _code_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        code = _COLUMN_PREFIX.sub("", line).strip()
        if code and not code.startswith("//"):
            yield number, code


def _line_or_raw(writer: _Writer, node: fx.Node) -> str:
    try:
        return writer.line(node)
    except ValueError:
        return node.format_node() or f"return {node.args}"


def _sizes(value: object) -> Iterator[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        yield value
    for tensor in tensors_in(value):
        yield from (size for size in (*tensor.shape, *tensor.stride()) if isinstance(size, torch.SymInt))


def _is_void(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not target._schema.returns


def _void_name(node: fx.Node) -> str:
    operand = node.args[0] if node.args else None
    return f"{name_of(operand)}/{op_name(node)}" if isinstance(operand, fx.Node) else op_name(node)


def _compute_device(graph: fx.Graph) -> torch.device | None:
    """Where the graph computes: what its copies to the device name, else the device of its first fake tensor that is on it."""
    for node in graph.nodes:
        spec = ops.spec_of(node)
        if spec is not None and _device_word(spec) == "device":
            return torch.device(spec.argument(node, "device"))  # type: ignore[arg-type]
    for node in graph.nodes:
        tensors = tensors_in(node.meta.get("val"))
        if tensors and info(node).tier is Tier.DEVICE:
            return tensors[0].device
    return None


def _device_word(spec: ops.Spec) -> str | None:
    """What a memory op's device argument stands for; None for an op without one."""
    if all(argument.name != "device" for argument in spec.op._schema.arguments):
        return None
    to_host = any(isinstance(e, Alloc) and e.tier is not Tier.DEVICE for e in spec.effects)
    # The generator's state lives on the host, the generator it names on the device.
    return "host" if to_host and "rng_state" not in spec.name else "device"


class _Writer:
    """Writes the lines of one graph."""

    def __init__(self, graph: fx.Graph, live: Liveness | None, rename_symbols: bool = False) -> None:
        self._of = live.of if live is not None else {}
        self._device = _compute_device(graph)
        self._rename = rename_symbols
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._types: dict[object, str] = {}
        self._targets: dict[object, str] = {}
        self._names: dict[fx.Node, str] = {}

    def line(self, node: fx.Node) -> str:
        entry = info(node)
        if node.op == "output":
            return f"return {self._value(node, node.args[0])}" + _attributes(node, entry, entry.name != "output")
        if node.op == "call_function" and _is_void(node.target):
            return self._call(node) + _attributes(node, entry, entry.name != _void_name(node))
        return self._name(node) + self._annotation(node) + " = " + self._body(node) + _attributes(node, entry, False)

    def _body(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "input"
        if node.op == "get_attr" and node.meta.get("val") is not None:
            return f"attr {json.dumps(node.target)}"
        if node.op == "call_function":
            return self._call(node)
        raise ValueError(f"{name_of(node)}: a {node.op} of {node.target} has no text")

    def _call(self, node: fx.Node) -> str:
        target = self._targets.get(node.target)
        if target is None:
            target = self._targets[node.target] = _target_word(node)
        arguments = [self._value(node, value) for value in node.args]
        arguments += [f"{key}={self._value(node, value)}" for key, value in node.kwargs.items()]
        return f"{target} {', '.join(arguments)}" if arguments else target

    def _name(self, node: fx.Node) -> str:
        known = self._names.get(node)
        if known is None:
            name = name_of(node)
            known = self._names[node] = "%" + (name if _PLAIN_NAME.fullmatch(name) else json.dumps(name))
        return known

    def _annotation(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if value is None:
            return ""
        storages = self._of.get(node, ())
        tier = storages[0].tier if storages else info(node).tier
        return f": {self._type(node, value)}" + (f"@{tier.value}" if tier is not Tier.DEVICE else "")

    def _type(self, node: fx.Node, value: object) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor_type(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{_SYM_WORDS[type(value)]}({self._expr(value.node.expr)})"
        if isinstance(value, (bool, int, float)):
            return f"{type(value).__name__}({_literal(value)})"
        if isinstance(value, (tuple, list)):
            items = ",".join("none" if item is None else self._type(node, item) for item in value)
            return f"({items})" if isinstance(value, tuple) else f"[{items}]"
        raise ValueError(f"{name_of(node)}: a value of {type(value).__name__} has no text")

    def _tensor_type(self, tensor: torch.Tensor) -> str:
        shape = tuple(_expr_of(size) for size in tensor.shape)
        stride = tuple(_expr_of(size) for size in tensor.stride())
        key = (tensor.dtype, shape, stride)
        if key not in self._types:
            sizes = ",".join(map(self._expr, shape))
            strides = "" if stride == _contiguous(shape) else ";" + ",".join(map(self._expr, stride))
            self._types[key] = f"{_dtype_word(tensor.dtype)}[{sizes}{strides}]"
        return self._types[key]

    def _expr(self, expr: int | sympy.Basic) -> str:
        if isinstance(expr, int):
            return str(expr)
        if self._rename:
            for symbol in sorted(expr.free_symbols - self._symbols.keys(), key=str):
                self._symbols[symbol] = sympy.Symbol(f"s{len(self._symbols)}", positive=True, integer=True)
            expr = expr.xreplace(self._symbols)
        return str(expr).replace(" ", "")

    def _value(self, node: fx.Node, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, (list, tuple)):
            items = ", ".join([self._value(node, item) for item in value])
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if isinstance(value, torch.device):
            return self._device_value(node, value)
        if isinstance(value, slice):
            return "slice" + self._value(node, (value.start, value.stop, value.step))
        if isinstance(value, torch.SymInt):
            return f"int({json.dumps(self._expr(value.node.expr))})"
        return _constant(node, value)

    def _device_value(self, node: fx.Node, device: torch.device) -> str:
        spec = ops.spec_of(node)
        word = _device_word(spec) if spec is not None else None
        if word is not None:
            return word
        # A 0-dim tensor may be on either side; tracing on an accelerator leaves some on the host, tracing on the CPU cannot.
        value = node.meta.get("val")
        is_scalar = isinstance(value, torch.Tensor) and value.dim() == 0
        same = self._device is None or is_scalar or _same_device(device, self._device)
        return "device" if same else "host"


_SYM_WORDS = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}


def _expr_of(size: int | torch.SymInt) -> int | sympy.Basic:
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_Integer else expr


def _contiguous(shape: Sequence[int | sympy.Basic]) -> tuple[int | sympy.Basic, ...]:
    strides: list[int | sympy.Basic] = []
    step: int | sympy.Basic = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (1 if size == 0 else size)
    return tuple(reversed(strides))


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a == b or (a.type == b.type and a.type != "cpu")


def _dtype_word(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def _target_word(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::", 1)
        overload = target._overloadname
        return f"{namespace}.{name}" + ("" if overload == "default" else f".{overload}")
    if target is operator.getitem:
        return "getitem"
    name = getattr(target, "__name__", "")
    for word, module in _MODULES.items():
        if name and getattr(module, name, None) is target:
            return f"{word}.{name}"
    raise ValueError(f"{name_of(node)}: a call of {target} has no text")


def _constant(node: fx.Node, value: object) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return _literal(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, torch.dtype):
        return _dtype_word(value)
    if isinstance(value, (torch.memory_format, torch.layout)):
        word = _FORMATS.get(value) or _LAYOUTS.get(value)
        if word is not None:
            return word
    if isinstance(value, complex):
        return f"complex({_literal(value.real)}, {_literal(value.imag)})"
    if value is Ellipsis:
        return "..."
    raise ValueError(f"{name_of(node)}: an argument of {type(value).__name__} has no text: {value!r}")


def _literal(value: bool | int | float | None) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def _attributes(node: fx.Node, entry: NodeInfo, with_name: bool) -> str:
    shown = {"name": entry.name} if with_name else {}
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        # an input's tier is part of its type
        if field.name == "name" or (field.name == "tier" and node.op == "placeholder"):
            continue
        if value != field.default:
            shown[field.name] = value
    if not shown:
        return ""
    return " {" + ", ".join(f"{k}={_attribute(v)}" for k, v in shown.items()) + "}"


def _attribute(value: object) -> str:
    return value.value if isinstance(value, Enum) else json.dumps(value)


_TOKEN = re.compile(
    r"""\s*(?:(?P<name>%(?:"(?:[^"\\]|\\.)*"|[^\s,()\[\]{}"=:|<>]+))
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<number>-?(?:\d[\d.]*(?:e[-+]?\d+)?|inf\b))
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<mark>\.\.\.|[()\[\]{},=]))""",
    re.VERBOSE,
)
_DTYPE_OF = {word: dtype for dtype, word in _DTYPES.items()}
_WORDS: Mapping[str, object] = {
    **_CONSTANTS,
    **{word: value for value, word in _FORMATS.items()},
    **{word: value for value, word in _LAYOUTS.items()},
}
_ENUMS: Mapping[str, Callable[[str], Enum]] = {"role": Role, "tier": Tier}


class _Reader:
    """Reads the lines of one text into one graph."""

    def __init__(self, bounds: Bounds, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.label: str | None = None
        self._device, self._host = device, torch.device("cpu")
        self._nodes: dict[str, fx.Node] = {}
        self._values = _Values(bounds)
        self._tokens: list[tuple[str, str]] = []

    def line(self, line: str) -> None:
        """Adds the node of one line (or takes the label of the header)."""
        header = _HEADER.fullmatch(line) if line.startswith("graph ") else None
        if header is not None:
            self.label = json.loads(header.group(1))
            return
        name, annotation, body = _split_line(line)
        self._tokens = list(_tokens(body))[::-1]
        node = self._node(name)
        attributes = self._attributes()
        if self._tokens:
            raise ValueError(f"cannot read {self._tokens[-1][1]!r}")
        tier = self._annotate(node, annotation)
        canonical = name or attributes.pop("name", None) or ("output" if node.op == "output" else _void_name(node))
        if node.op == "placeholder":
            attributes["tier"] = tier
        if canonical in self._nodes:
            raise ValueError(f"two nodes are called {canonical!r}")
        node.meta[INFO] = NodeInfo(canonical, **attributes)  # type: ignore[arg-type]
        self._nodes[canonical] = node

    def _node(self, name: str | None) -> fx.Node:
        word = self._take("word")
        if word == "return":
            return self.graph.create_node("output", "output", (self._value(),))
        hint = re.sub(r"\W+", "_", name or word.rsplit(".", 1)[-1])
        if word == "input":
            return self.graph.create_node("placeholder", hint, name=hint)
        if word == "attr":
            return self.graph.create_node("get_attr", json.loads(self._take("string")), name=hint)
        args, kwargs = self._arguments()
        return self.graph.create_node("call_function", _target_of(word), args, kwargs, name=hint)

    def _arguments(self) -> tuple[tuple[object, ...], dict[str, object]]:
        args: list[object] = []
        kwargs: dict[str, object] = {}
        while self._tokens and self._tokens[-1] != ("mark", "{"):
            if len(self._tokens) > 1 and self._tokens[-2] == ("mark", "="):
                key = self._take("word")
                self._take("mark", "=")
                kwargs[key] = self._value()
            else:
                args.append(self._value())
            if not self._accept(","):
                break
        return tuple(args), kwargs

    def _value(self) -> object:
        kind, text = self._tokens.pop() if self._tokens else ("end", "the end of the line")
        if kind == "name":
            return self._operand(_unquote(text))
        if kind == "string":
            return json.loads(text)
        if kind == "number":
            return _number(text)
        if text == "[":
            return self._items("]")
        if text == "(":
            return tuple(self._items(")"))
        if text == "...":
            return ...
        if kind == "word":
            return self._word(text)
        raise ValueError(f"expected a value, found {text}")

    def _items(self, end: str) -> list[object]:
        items: list[object] = []
        while not self._accept(end):
            items.append(self._value())
            if not self._accept(","):
                self._take("mark", end)
                break
        return items

    def _word(self, word: str) -> object:
        if word in _WORDS:
            return _WORDS[word]
        if word in ("device", "host"):
            return self._device if word == "device" else self._host
        if word in ("slice", "complex"):
            self._take("mark", "(")
            return {"slice": slice, "complex": complex}[word](*self._items(")"))
        if word == "int":
            self._take("mark", "(")
            size = self._values.size(json.loads(self._take("string")))
            self._take("mark", ")")
            return size
        return _dtype_of(word)

    def _operand(self, name: str) -> fx.Node:
        if name not in self._nodes:
            raise ValueError(f"%{name} is not defined before this line")
        return self._nodes[name]

    def _attributes(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if not self._accept("{"):
            return found
        while not self._accept("}"):
            key = self._take("word")
            self._take("mark", "=")
            found[key] = _ENUMS[key](self._take("word")) if key in _ENUMS else self._value()
            self._accept(",")
        return found

    def _annotate(self, node: fx.Node, annotation: str) -> Tier:
        type_text, _, tier_text = annotation.partition("@")
        tier = Tier(tier_text) if tier_text else Tier.DEVICE
        if type_text:
            node.meta["val"] = self._values.make(type_text, self._host if tier.on_host else self._device)
        return tier

    def _accept(self, mark: str) -> bool:
        if self._tokens and self._tokens[-1] == ("mark", mark):
            self._tokens.pop()
            return True
        return False

    def _take(self, kind: str, text: str | None = None) -> str:
        found = self._tokens.pop() if self._tokens else ("end", "the end of the line")
        if found[0] != kind or (text is not None and found[1] != text):
            raise ValueError(f"expected {text or 'a ' + kind}, found {found[1]}")
        return found[1]


def _split_line(line: str) -> tuple[str | None, str, str]:
    """Name, type and body of a line; a void op's line has only a body."""
    match = re.match(r'(%(?:"(?:[^"\\]|\\.)*"|[^\s:=]+))(?:: (\S+))? = ', line)
    if match is None:
        return None, "", line
    return _unquote(match.group(1)), match.group(2) or "", line[match.end() :]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"cannot read {text[position:]!r}")
        yield match.lastgroup, match.group(match.lastgroup)
        position = match.end()


def _unquote(name: str) -> str:
    return str(json.loads(name[1:])) if name.startswith('%"') else name[1:]


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _dtype_of(word: str) -> torch.dtype:
    dtype = _DTYPE_OF.get(word) or getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown word {word!r}")
    return dtype


def _target_of(word: str) -> Callable[..., object]:
    if word == "getitem":
        return operator.getitem
    parts = word.split(".")
    if len(parts) == 2 and parts[0] in _MODULES:
        target = getattr(_MODULES[parts[0]], parts[1], None)
    else:
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None) if len(parts) in (2, 3) else None
        target = getattr(packet, parts[2] if len(parts) == 3 else "default", None)
    if target is None:
        raise ValueError(f"unknown op {word!r}")
    return target  # type: ignore[no-any-return]


class _Values:
    """Makes fake values from type text, in one FakeTensorMode with one ShapeEnv whose hints are the maxima."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._symbols = {name: _declare(self._env, name, maximum) for name, maximum in bounds.maxima.items()}
        self._exprs: dict[str, int | torch.SymInt] = {}
        self._layouts: dict[str, tuple[list[int | torch.SymInt], list[int | torch.SymInt]]] = {}

    def make(self, text: str, device: torch.device) -> object:
        """The fake value of a type; tensors are on `device`. Raises ValueError for what is not a type."""
        if text == "none":
            return None
        if text[0] in "([" and text[-1] in ")]":
            items = [self.make(item, device) for item in _split(text[1:-1], ",")]
            return tuple(items) if text[0] == "(" else items
        match = re.fullmatch(r"(\w+)\[(.*)\]", text)
        if match is not None:
            return self._tensor(_dtype_of(match.group(1)), match.group(2), device)
        match = re.fullmatch(r"(int|float|bool)\((.*)\)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a type")
        return self._scalar(match.group(1), match.group(2))

    def _tensor(self, dtype: torch.dtype, text: str, device: torch.device) -> torch.Tensor:
        if text not in self._layouts:
            self._layouts[text] = self._layout(*_split(text, ";"))
        with self._mode:
            return torch.empty_strided(*self._layouts[text], dtype=dtype, device=device)

    def _layout(self, sizes: str = "", strides: str | None = None) -> tuple[list[int | torch.SymInt], list[int | torch.SymInt]]:
        shape = [self.size(item) for item in _split(sizes, ",")]
        if strides is not None:
            return shape, [self.size(item) for item in _split(strides, ",")]
        return shape, [self._sym(expr) for expr in _contiguous([_expr_of(size) for size in shape])]

    def _scalar(self, word: str, text: str) -> object:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if word == "int":
            return self.size(text)
        expr = self._read(ast.parse(text, mode="eval").body)
        if isinstance(expr, (int, float)):
            return float(expr)
        hint = expr.xreplace({symbol: self._bounds.maxima[str(symbol)] for symbol in expr.free_symbols})
        if word == "float":
            return self._env.create_symfloatnode(expr, hint=float(hint))
        return self._env.create_symboolnode(expr)

    def size(self, text: str) -> int | torch.SymInt:
        """The size an expression stands for."""
        if text not in self._exprs:
            self._exprs[text] = int(text) if text.isdigit() else self._sym(self._read(ast.parse(text, mode="eval").body))
        return self._exprs[text]

    def _sym(self, expr: int | float | sympy.Basic) -> int | torch.SymInt:
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        hint = int(expr.xreplace({symbol: self._bounds.maxima[str(symbol)] for symbol in expr.free_symbols}))
        return self._env.create_symintnode(expr, hint=hint)

    def _read(self, node: ast.expr) -> int | float | sympy.Basic:
        """Arithmetic over the header's symbols and torch's own sympy functions; nothing is evaluated as Python."""
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in self._symbols:
                raise ValueError(f"the header has no maximum of {node.id}")
            return self._symbols[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._read(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self._read(node.left), self._read(node.right))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            return _OPERATORS[type(node.ops[0])](self._read(node.left), self._read(node.comparators[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            function = getattr(sympy_functions, node.func.id, None) or getattr(sympy, node.func.id, None)
            if isinstance(function, type) and issubclass(function, sympy.Basic):
                return function(*map(self._read, node.args))
        raise ValueError(f"{ast.unparse(node)!r} is not a size")


_OPERATORS: Mapping[type, Callable[..., sympy.Basic]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: sympy_functions.FloorDiv, ast.Mod: sympy_functions.Mod,
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
}  # fmt: skip


def _hints(env: ShapeEnv) -> Mapping[sympy.Symbol, sympy.Integer]:
    # torch 2.13 renamed the attribute and warns on the old name.
    return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val


def _declare(env: ShapeEnv, name: str, maximum: int) -> sympy.Symbol:
    symbol = sympy.Symbol(name, positive=True, integer=True)
    # torch 2.13 renamed the method and warns on the old name.
    (getattr(env, "add_backed_var_to_val", None) or env.add_var_to_val)(symbol, maximum)
    # torch's own range of a size symbol; a maximum of 1 must not contradict it
    env.var_to_range[symbol] = ValueRanges(min(2, maximum), int_oo)
    return symbol


def _split(text: str, separator: str) -> list[str]:
    """Parts of `text` between separators outside of brackets; [] for empty text."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text else []
