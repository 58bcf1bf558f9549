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

import bisect
import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .donation import given_away
from .graph import Bounds, output_of, tensors_in
from .liveness import Kind, LiveCurve, Liveness, live_curve, liveness
from .sizes import format_bytes
from .text_neutral import NeutralWriter
from .text_reader import Reader
from .text_words import HEADER
from .text_writer import Writer
from .torch_compat import symbol_hints

# Meta key on the output node: what the header calls the graph.
LABEL = "fxo_label"
# Meta key on the output node: the Bounds the graph was planned at.
BOUNDS = "fxo_bounds"
COLUMNS = (Kind.PARAMETER, Kind.ACTIVATION, Kind.GRADIENT)
COLUMN_PREFIX = re.compile(r"^(?:\s*[\d.]+ [KMGTPE]?i?[Bb]\w*\s*\|){3} ?")


def render(graph: fx.Graph, bounds: Bounds | None = None, columns: bool = True, offsets: bool = False) -> str:
    """The text of `graph`, ending in a newline. With `columns`, each line starts with the device bytes of parameters, activations
    and gradients alive at the node (after it, for a release); with `offsets` types say where in its memory a view begins. `bounds`
    default to the hints of the graph's symbols.

    Raises ValueError naming the node for what has no text (higher-order ops, submodules), KeyError for a symbol without maximum.
    """
    bounds = bounds or hint_bounds(graph)
    live = liveness(graph, bounds if columns else _NoBytes())
    writer = Writer(graph, live, offsets)
    lines = [writer.line(node) for node in graph.nodes]
    header = _header(output_of(graph).meta.get(LABEL, "graph"), bounds)
    if not columns:
        return "\n".join([header, *lines]) + "\n"
    columned = _with_columns(lines, live_curve(live, given=given_away(live)))
    return "\n".join([header, "// bytes on the device: parameters | activations | gradients", *columned]) + "\n"


def fingerprint(graph: fx.Graph) -> str:
    """sha256 of the graph's neutral text: equal for captures of one model on any device and at any sizes."""
    return hashlib.sha256(neutral_text(graph).encode()).hexdigest()


def neutral_text(graph: fx.Graph) -> str:
    """What the sizes of a batch do not decide (see `text_neutral`), without header and columns. Raises ValueError like `render`."""
    return "\n".join(NeutralWriter(graph, liveness(graph, _NoBytes())).lines(graph)) + "\n"


def diff(a: str, b: str) -> str:
    """Unified diff of two texts, byte columns left out; "" when they are equal."""
    before, after = ([COLUMN_PREFIX.sub("", line) for line in text.splitlines()] for text in (a, b))
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
    writer = Writer(graph, live)
    return "\n".join(
        ("> " if shown is node else "  ") + _line_or_raw(writer, shown) for shown in nodes[first : at + radius + 1]
    )


def hint_bounds(graph: fx.Graph) -> Bounds:
    """The Bounds the graph was planned at, else the sizes it was captured (or parsed) with; unbacked symbols have none."""
    planned = output_of(graph).meta.get(BOUNDS) if len(graph.nodes) else None
    if isinstance(planned, Bounds):
        return planned
    maxima: dict[str, int] = {}
    for node in graph.nodes:
        for size in _sizes(node.meta.get("val")):
            hints = symbol_hints(size.node.shape_env)
            maxima |= {str(symbol): int(hints[symbol]) for symbol in size.node.expr.free_symbols & hints.keys()}
    return Bounds(dict(sorted(maxima.items())))


def parse(text: str, device: torch.device | None = None, mode: FakeTensorMode | None = None) -> fx.Graph:
    """The graph a text describes, with fake values whose compute device is `device`.

    Default "cpu:0": a compute device that every machine has and that differs from the host's "cpu". Symbols get a fresh
    ShapeEnv with their maxima as hints; with `mode`, a capture's, they are its symbols of the same names, and values are of that mode.
    Raises ValueError with the line that cannot be read.
    """
    reader = Reader(parse_bounds(text), device or torch.device("cpu", 0), mode)
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
        match = HEADER.fullmatch(line)
        if match is None:
            raise ValueError(f'a graph starts with graph "label" (s0 <= 4), not {line!r}')
        return Bounds({name: int(value) for name, value in re.findall(r"(\w+) <= (\d+)", match.group(2) or "")})
    raise ValueError("the text is empty")


class _NoBytes(Bounds):
    """Bounds for a liveness that is asked for tiers only: no size is evaluated."""

    def of(self, size: int | torch.SymInt) -> int:
        return 0


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
        code = COLUMN_PREFIX.sub("", line).strip()
        if code and not code.startswith("//"):
            yield number, code


def _line_or_raw(writer: Writer, node: fx.Node) -> str:
    try:
        return writer.line(node)
    except ValueError:
        return node.format_node() or f"return {node.args}"


def _sizes(value: object) -> Iterator[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        yield value
    for tensor in tensors_in(value):
        yield from (size for size in (*tensor.shape, *tensor.stride()) if isinstance(size, torch.SymInt))


class _LineMatcher(difflib.SequenceMatcher[str]):
    """Matches lines that occur once in each text, in a longest increasing run: O(n log n) where difflib takes 14 s at 10k nodes."""

    a: Sequence[str]
    b: Sequence[str]

    def get_matching_blocks(self) -> list[difflib.Match]:
        place = {line: j for j, line in enumerate(self.b)}
        blocks: list[difflib.Match] = []
        for i, j in _increasing([(i, place[line]) for i, line in enumerate(self.a) if line in place]):
            last = blocks[-1] if blocks else difflib.Match(-1, -1, 0)
            if (last.a + last.size, last.b + last.size) == (i, j):
                blocks[-1] = last._replace(size=last.size + 1)
            else:
                blocks.append(difflib.Match(i, j, 1))
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
