"""The key of a captured step: all that decides its lowered graph and its Plan, written out."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import sys
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from ..graph import module_path
from ..places import named_constants, named_weights
from ..torch_compat import ambient_settings, source_names
from .describe import Json, Unstored, described

if TYPE_CHECKING:
    from ..session import Session

# The form of keys and entries. Another form is another key.
FORMAT = 1
# Packages whose code traces, plans or names what is stored.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "numpy", "sympy", "networkx", "scipy")
# What Dynamo notes on its nodes; it decides nothing but for module paths, which are in the key.
_NOTES = frozenset({
    "nn_module_stack", "source_fn_stack", "stack_trace", "example_value", "grapharg", "tensor_dict", "creation_timestamp", "val"})


def key_of(gm: fx.GraphModule, inputs: Sequence[object], session: Session) -> dict[str, Json]:
    """The key of a Dynamo graph, made neutral, that `session` is about to plan. Raises Unstored for what it cannot tell."""
    held = [name for name, _ in (*gm.named_parameters(), *gm.named_buffers())]
    if held:
        raise Unstored(f"the graph holds {held[0]}")
    return {
        "format": FORMAT,
        "versions": _versions(),
        "sources": _sources_digest(),
        "settings": described(ambient_settings(session.options.device)),
        "graph": _graph(gm),
        "inputs": _inputs(gm, inputs),
        "references": described(list(session._refs)),
        "session": _session(session),
        "planning": _planning(session),
    }


# Code ---------------------------------------------------------------------------------------------------------------------


def _versions() -> Json:
    return {
        "python": sys.version, "processor": platform.machine(), "torch": torch.__version__, "torch git": torch.version.git_version,
        "passes": _foreign_passes(), "packages": {name: _version(name) for name in _PACKAGES},
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _foreign_passes() -> str:
    return str(sorted((e.name, e.value, e.dist.version if e.dist else "") for e in metadata.entry_points(group="fxoffload.passes")))


@functools.cache
def _sources_digest() -> str:
    """sha256 of this package's own sources and data."""
    root = Path(str(resources.files("fxoffload")))
    folders = (root, Path(str(resources.files("fxoffload.passes"))))
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".json", ".cpp")}
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: (p.name, str(p))):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


# The graph ------------------------------------------------------------------------------------------------------------


def _graph(gm: fx.GraphModule) -> Json:
    return [_node(gm, node) for node in gm.graph.nodes]


def _node(gm: fx.GraphModule, node: fx.Node) -> Json:
    strange = sorted(set(node.meta) - _NOTES)
    if strange:
        raise Unstored(f"node {node.name} has a note of an unknown kind, {strange[0]!r}")
    if node.op == "call_module":
        raise Unstored(f"node {node.name} calls a module")
    target = _attribute(gm, str(node.target)) if node.op == "get_attr" else described(node.target)
    notes = described(node.meta.get("tensor_dict"))
    return [node.op, node.name, target, described(node.args), described(dict(node.kwargs)), module_path(node), notes]


def _attribute(gm: fx.GraphModule, name: str) -> Json:
    value: Any = gm
    for word in name.split("."):
        value = getattr(value, word)
    if isinstance(value, fx.GraphModule):
        return ["graph", name, _graph(value)]
    raise Unstored(f"the graph holds {name}, a {type(value).__name__}")


def _inputs(gm: fx.GraphModule, inputs: Sequence[object]) -> Json:
    storages: dict[int, int] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise Unstored(f"the graph has {len(placeholders)} inputs and was given {len(inputs)}")
    return [
        [source, _input(node.meta.get("example_value"), value, storages)]
        for source, node, value in zip(source_names(gm), placeholders, inputs)]


def _input(fake: object, value: object, storages: dict[int, int]) -> Json:
    if isinstance(fake, torch.SymInt):
        return {"symbol": str(fake.node.expr), "hint": int(fake.node.hint)}
    if not isinstance(fake, torch.Tensor) or not isinstance(value, torch.Tensor):
        raise Unstored(f"an input is a {type(value).__name__}")
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(value):
        raise Unstored(f"an input is of the tensor subclass {type(value).__name__}")
    storage = value.untyped_storage()
    return {
        "class": f"{type(value).__module__}.{type(value).__qualname__}", "dtype": str(fake.dtype), "device": str(fake.device),
        "shape": [described(n) for n in fake.shape], "stride": [described(n) for n in fake.stride()],
        "offset": described(fake.storage_offset()), "trained": fake.requires_grad, "leaf": fake.is_leaf,
        # Which inputs share memory, and every property that torch dispatches on.
        "storage": storages.setdefault(storage._cdata, len(storages)), "storage bytes": described(_symbolic_bytes(fake, storage)),
        "keys": str(torch._C._dispatch_keys(value)),
    }


def _symbolic_bytes(fake: torch.Tensor, storage: torch.UntypedStorage) -> int | None:
    """Bytes of a parameter's storage; None for a batch, whose sizes are symbols."""
    return None if any(isinstance(n, torch.SymInt) for n in fake.shape) else storage.nbytes()


# What is asked of it --------------------------------------------------------------------------------------------------


def _session(session: Session) -> Json:
    told = {f.name: getattr(session.options, f.name) for f in dataclasses.fields(session.options)}
    for name in ("dump_dir", "disk_dir", "cache_dir", "states"):  # where files lie; the states are among `planning`
        told.pop(name)
    if not session.options.host_budget_named:
        told.pop("host_budget_bytes")  # what was free: `entry` looks at it when it is read
    router = session.router
    return described({
        **told, "maxima": router.maxima, "shadows": router.shadows, "settled": session.places.settled,
        "training": [module.training for module in session.model.modules()],
        "classes": [f"{type(m).__module__}.{type(m).__qualname__}" for m in session.model.modules()],
    })


def _planning(session: Session) -> Json:
    planning = session.planning
    told = {f.name: getattr(planning, f.name) for f in dataclasses.fields(planning)}
    for name in ("model", "dump_dir", "plan"):
        told.pop(name)
    if not planning.budgets.host_named:
        told["budgets"] = dataclasses.replace(planning.budgets, host_bytes=None)
    return described({
        **told, "plan": None if planning.plan is None else planning.plan.to_json(), "parameters": planning.parameters(),
        "weights": [_tensor(name, p) for name, p in named_weights(planning.model)],
        "constants": [_tensor(name, b) for name, b in named_constants(planning.model)],
    })


def _tensor(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    return name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.nbytes
