"""A Session's way through the compile cache: an entry in place of tracing, planning and lowering, or those, and an entry for next time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch.fx as fx

from ..torch_compat import has_plain_wrappers, returned_gradients, symbol_facts, tracing_mode, wrapper_facts
from .describe import Json, Unstored, described
from .files import Files
from .key import key_of
from .lowered import restored, written
from .stand_in import outputs_of, stand_in

if TYPE_CHECKING:
    from ..session import Session

log = logging.getLogger("fxoffload")

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Stale(Exception):
    """An entry does not fit what it was read for, and is made anew."""


@dataclass
class Storing:
    """What a capture that is traced, planned and lowered leaves for its entry. `missing`: why there will be none.

    `symbols`: what was known of its sizes when it was traced and lowered, before kernels were made of it. Inductor adds that a card's kernel
    indexes with 32 bits; it does so again in a start that loads the kernel.
    """

    session: Session
    body: dict[str, Json] | None = None
    facts: dict[str, Any] | None = None
    symbols: dict[str, Any] | None = None
    missing: str = "it was not lowered"

    def lowered(self, label: str, graph: fx.Graph) -> None:
        """Notes the lowered graph and the plan, which now covers it."""
        session = self.session
        try:
            if not session.planning.is_repeatable():
                raise Unstored("what lies on disk was decided by the memory that was free")
            planning, graph_json = session.planning.state(), written(graph, session.options.device, tracing_mode())
        except Unstored as reason:
            self.missing = str(reason)
            return
        self.body = {"label": label, "graph": cast(Json, graph_json), "planning": cast(Json, planning)}

    def wrapped(self) -> None:
        """Notes what AOTAutograd's wrappers are made from."""
        self.facts, self.symbols = wrapper_facts(), symbol_facts()


@dataclass
class Restoring:
    """An entry in the place of a trace. `adopted`: the Session has taken it."""

    session: Session
    entry: dict[str, Any]
    graph: fx.Graph
    adopted: bool = False

    def lowered(self, joint: fx.Graph) -> fx.Graph:
        """The stored graph for the joint graph of its stand-in. Raises Stale when the two have other inputs."""
        there, here = (len(graph.find_nodes(op="placeholder")) for graph in (self.graph, joint))
        if there != here:
            raise Stale(f"the stored graph has {there} inputs, the captured one {here}")
        return self.graph

    def wrapped(self) -> None:
        """Gives the Session what the entry has, if AOTAutograd's wrappers are those it was stored with, else raises Stale."""
        if self.adopted:
            return
        if described(wrapper_facts()) != self.entry["facts"]:
            raise Stale("AOTAutograd wraps it in another way")
        if described(symbol_facts()) != self.entry["symbols"]:
            raise Stale("the capture knows something else about its sizes")
        self.session.adopt(self.entry["label"], self.graph, self.entry["planning"])
        self.adopted = True


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Entries in a folder for the captures of Sessions."""

    files: Files

    def compiled(self, session: Session, gm: fx.GraphModule, inputs: Sequence[Any], compile: Compile) -> Callable[..., Any]:
        """What `compile` makes of the Dynamo graph, from an entry where there is one."""
        try:
            key = cast(Json, key_of(gm, inputs, session))
        except Unstored as reason:
            log.info("compile cache: this graph is not looked up: %s", reason)
            return compile(gm, inputs)
        entry = self.files.read(key)
        if entry is not None:
            run = self._restored(session, gm, inputs, compile, entry)
            if run is not None:
                return run
        return self._stored(session, gm, inputs, compile, key)

    def _restored(
        self, session: Session, gm: fx.GraphModule, inputs: Sequence[Any], compile: Compile, entry: dict[str, Any]
    ) -> Callable[..., Any] | None:
        try:
            one_node, session.restoring = _read(session, gm, entry)
            run = compile(one_node, inputs)
        except Stale as reason:
            log.warning("compile cache: an entry is not used: %s", reason)
            return None
        finally:
            session.restoring = None
        log.info("compile cache: graph %s was not traced and not planned again", entry["label"])
        return run

    def _stored(
        self, session: Session, gm: fx.GraphModule, inputs: Sequence[Any], compile: Compile, key: Json
    ) -> Callable[..., Any]:
        storing, before = Storing(session), symbol_facts()
        session.storing = storing
        try:
            run = compile(gm, inputs)
        finally:
            session.storing = None
        try:
            self.files.write(key, _entry(storing, gm, before))
        except Unstored as reason:
            log.info("compile cache: this graph is not stored: %s", reason)
        return run


def _read(session: Session, gm: fx.GraphModule, entry: dict[str, Any]) -> tuple[fx.GraphModule, Restoring]:
    """The graph to trace in place of `gm`, and what it stands for. Raises Stale."""
    try:
        if not session.planning.covers(entry["planning"]):
            raise Stale("less host memory is free than it needs")
        graph = restored(entry["graph"], session.options.device, tracing_mode())
        return stand_in(gm, entry["outputs"]), Restoring(session, entry, graph)
    except (KeyError, TypeError, ValueError) as error:
        raise Stale(f"it cannot be read: {error!r}") from None


def _entry(storing: Storing, gm: fx.GraphModule, before: Mapping[str, object]) -> dict[str, Json]:
    body, facts = storing.body, storing.facts
    if body is None or facts is None:
        raise Unstored(storing.missing)
    if not has_plain_wrappers(facts):
        raise Unstored("it writes inputs, or returns views of what it reads")
    if storing.symbols != before:
        raise Unstored("its trace found out more about its sizes than its capture")
    return {
        **body, "facts": described(facts), "outputs": cast(Json, outputs_of(gm, returned_gradients(facts))),
        "symbols": described(storing.symbols),
    }
