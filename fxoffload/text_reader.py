"""Reads lines of text into a Graph with fake values (the form is described in `text`)."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum

import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from . import functions, fusion, neutral, products  # noqa: F401  (define the ops that texts name)
from .effects import Tier
from .graph import INFO, OUTPUT, Bounds, NodeInfo, Role
from .torch_compat import Size, fake_tensor, symbol_hints
from .text_words import CONSTANTS, DTYPES, FORMATS, HEADER, LAYOUTS, MODULES, contiguous_strides, expr_of, void_name

_TOKEN = re.compile(
    r"""\s*(?:(?P<name>%(?:"(?:[^"\\]|\\.)*"|[^\s,()\[\]{}"=:|<>]+))
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<number>-?(?:\d[\d.]*(?:e[-+]?\d+)?|inf\b))
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<mark>\.\.\.|[()\[\]{},=]))""",
    re.VERBOSE,
)
_DTYPE_OF = {word: dtype for dtype, word in DTYPES.items()}
_WORDS: Mapping[str, object] = {
    **CONSTANTS,
    **{word: value for value, word in FORMATS.items()},
    **{word: value for value, word in LAYOUTS.items()},
}
_ENUMS: Mapping[str, Callable[[str], Enum]] = {"role": Role, "tier": Tier}


# Sizes, strides and the element at which a tensor begins.
Layout = tuple[list[Size], list[Size], Size]


class Reader:
    """Reads the lines of one text into one graph."""

    def __init__(self, bounds: Bounds, device: torch.device, mode: FakeTensorMode | None = None) -> None:
        self.graph = fx.Graph()
        self.label: str | None = None
        self._device, self._host = device, torch.device("cpu")
        self._nodes: dict[str, fx.Node] = {}
        self._values = _Values(bounds) if mode is None else _SharedValues(bounds, mode)
        self._tokens: list[tuple[str, str]] = []

    def line(self, line: str) -> None:
        """Adds the node of one line (or takes the label of the header)."""
        header = HEADER.fullmatch(line) if line.startswith("graph ") else None
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
        default = OUTPUT if node.op == "output" else void_name(node)
        canonical = name or str(attributes.pop("name", default))
        if node.op == "placeholder":
            attributes["tier"] = tier
        if canonical in self._nodes:
            raise ValueError(f"two nodes are called {canonical!r}")
        node.meta[INFO] = NodeInfo(canonical, **attributes)  # type: ignore[arg-type]
        self._nodes[canonical] = node

    def _node(self, name: str | None) -> fx.Node:
        word = self._take("word")
        if word == "return":
            return self.graph.create_node("output", "output", (self._value(),))  # type: ignore[arg-type]
        hint = re.sub(r"^(?=\d)", "_", re.sub(r"\W+", "_", name or word.rsplit(".", 1)[-1]))
        if word == "input":
            made = self.graph.create_node("placeholder", hint, name=hint)
            made.target = made.name  # the name of a parameter of the function: no other input's
            return made
        if word == "attr":
            return self.graph.create_node("get_attr", json.loads(self._take("string")), name=hint)
        args, kwargs = self._arguments()
        return self.graph.create_node("call_function", _target_of(word), args, kwargs, name=hint)  # type: ignore[arg-type]

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
            if key == "pages":
                found[key] = tuple(map(tuple, found[key]))  # type: ignore[call-overload]
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
    if len(parts) == 2 and parts[0] in MODULES:
        target = getattr(MODULES[parts[0]], parts[1], None)
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
        self._layouts: dict[str, Layout] = {}

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
        return fake_tensor(self._mode, *self._layouts[text], dtype, device)

    def _layout(self, sizes: str = "", strides: str = "", offset: str = "0") -> Layout:
        shape = [self.size(item) for item in _split(sizes, ",")]
        if strides:
            return shape, [self.size(item) for item in _split(strides, ",")], self.size(offset)
        return shape, [self._sym(expr) for expr in contiguous_strides([expr_of(size) for size in shape])], self.size(offset)

    def _scalar(self, word: str, text: str) -> object:
        if text in CONSTANTS:
            return CONSTANTS[text]
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

    def _sym(self, expr: int | sympy.Basic) -> int | torch.SymInt:
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


class _SharedValues(_Values):
    """Fake values in a capture's own mode, of its own symbols: one for all nodes of a type."""

    def __init__(self, bounds: Bounds, mode: FakeTensorMode) -> None:
        env = mode.shape_env
        assert env is not None
        known = {str(symbol): symbol for symbol in env.var_to_range}
        missing = sorted(set(bounds.maxima) - set(known))
        if missing:
            raise ValueError(f"the capture has no symbol {missing[0]}")
        self._bounds, self._env, self._mode = bounds, env, mode
        self._symbols = {name: known[name] for name in bounds.maxima}
        self._exprs, self._layouts = {}, {}
        self._tensors: dict[tuple[torch.dtype, str, torch.device], torch.Tensor] = {}

    def _tensor(self, dtype: torch.dtype, text: str, device: torch.device) -> torch.Tensor:
        key = (dtype, text, device)
        if key not in self._tensors:
            self._tensors[key] = super()._tensor(dtype, text, device)
        return self._tensors[key]

    def _sym(self, expr: int | sympy.Basic) -> int | torch.SymInt:
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        return self._env.create_symintnode(expr, hint=int(expr.xreplace(symbol_hints(self._env))))


_OPERATORS: Mapping[type, Callable[..., sympy.Basic]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.FloorDiv: sympy_functions.FloorDiv, ast.Mod: sympy_functions.Mod,
    ast.Lt: sympy.Lt, ast.LtE: sympy.Le, ast.Gt: sympy.Gt, ast.GtE: sympy.Ge,
}  # fmt: skip


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
