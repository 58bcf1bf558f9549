"""The memory node set, declared once: schema, fake, effects and channel of every `fxo` op.

Renderer, parser, verifier, liveness, simulator and cost read only `SPECS`. At run time the executor replaces every op by a
callable bound to the Runtime; the kernels registered here are the reference: what the op means on one device, synchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from .effects import Alloc, Await, Borrow, Channel, Effect, Free, Read, Tier
from .layout import extent_bytes, part_of, side_by_side


@dataclass(frozen=True, slots=True)
class Spec:
    """What every reader of the IR needs to know of one op.

    `alias_of` names the argument whose Storage the result shares, None when the result is new or absent. `logical` ops must be
    lowered before a graph runs. `pure` ops may be removed when nothing reads their result. `arguments`: of the schema, by name, where each
    stands and its default.
    """

    name: str
    op: torch._ops.OpOverload
    effects: tuple[Effect, ...]
    channel: Channel
    alias_of: str | None = None
    logical: bool = False
    pure: bool = True
    arguments: Mapping[str, tuple[int, object]] = field(default_factory=dict)

    def argument(self, node: fx.Node, name: str) -> object:
        """The value `node` passes for the schema argument `name`, or its default. Raises KeyError for an unknown name."""
        if name not in self.arguments:
            raise KeyError(f"{self.name} has no argument {name!r}")
        position, default = self.arguments[name]
        return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)

    def nodes(self, node: fx.Node, name: str) -> tuple[fx.Node, ...]:
        """The nodes that `node` passes for the schema argument `name`: one, or those of a list."""
        value = self.argument(node, name)
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(item for item in items if isinstance(item, fx.Node))

    @property
    def starts_transfer(self) -> bool:
        """Whether the result is pending: there until a wait."""
        return any(isinstance(effect, Alloc) and effect.pending for effect in self.effects)


SPECS: dict[torch._ops.OpOverload, Spec] = {}
# Identities of the ops in it: torch computes an op's hash in Python, which is slow for the many that are not.
_OURS: set[int] = set()
_LIBRARY = torch.library.Library("fxo", "DEF")


def define(
    schema: str,
    kernel: Callable[..., object],
    fake: Callable[..., object],
    effects: tuple[Effect, ...],
    channel: Channel,
    alias_of: str | None = None,
    logical: bool = False,
    pure: bool = True,
) -> torch._ops.OpOverload:
    """Declares `fxo::schema` once for every reader of the IR and returns its overload. Raises RuntimeError when it exists."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxo::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.fxo, name).default
    arguments = {one.name: (position, one.default_value) for position, one in enumerate(op._schema.arguments)}
    SPECS[op] = Spec(name, op, effects, channel, alias_of, logical, pure, arguments)
    _OURS.add(id(op))
    if not pure:
        fx.node.has_side_effect(op)
    return op


def spec_of(node: fx.Node) -> Spec | None:
    """The Spec of a memory node, None for any other node."""
    return SPECS.get(node.target) if id(node.target) in _OURS else None  # type: ignore[call-overload]


def _copy_to(src: torch.Tensor, device: torch.device) -> torch.Tensor:
    out = torch.empty_strided(src.shape, src.stride(), dtype=src.dtype, device=device)
    return out.copy_(src)


def _empty_on(src: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(src.shape, src.stride(), dtype=src.dtype, device=device)


def _copies_to(src: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    offsets, n_bytes = side_by_side(map(extent_bytes, src))
    flat = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    for offset, one in zip(offsets, src):
        part_of(flat, offset, one.shape, one.stride(), one.dtype).copy_(one)
    return flat


def _flat_on(src: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.empty(side_by_side(map(extent_bytes, src))[1], dtype=torch.uint8, device=device)


def _rows_to(table: torch.Tensor, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.embedding(table, indices.to(table.device)).to(device)


def _rows_on(table: torch.Tensor, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty((*indices.shape, table.shape[1]), dtype=table.dtype, device=device)


def _same(src: torch.Tensor) -> torch.Tensor:
    return src.detach()


def _rng_state(device: torch.device) -> torch.Tensor:
    return get_rng_state(device)


def _swap_rng_state(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    before = get_rng_state(device)
    set_rng_state(state, device)
    return before


def get_rng_state(device: torch.device) -> torch.Tensor:
    """The state of `device`'s default generator as a host tensor."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state()  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Makes `device`'s default generator continue from `state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    torch.get_device_module(device).set_rng_state(state)


# Size of torch's CPU generator state (mt19937); accelerators need 16 bytes. An upper bound is what planning needs.
RNG_STATE_BYTES = 5056


def _fake_rng_state(*_: object) -> torch.Tensor:
    return torch.empty(RNG_STATE_BYTES, dtype=torch.uint8)


gather = define(
    "gather(Tensor src, Device device) -> Tensor",
    _copy_to, _empty_on, (Read("src"), Alloc("result", Tier.DEVICE)), Channel.H2D, logical=True,
)
sink = define(
    "sink(Tensor src, Device device) -> Tensor",
    _copy_to, _empty_on, (Read("src"), Alloc("result", Tier.PINNED)), Channel.D2H, logical=True,
)
checkpoint = define(
    "checkpoint(Tensor(a) src) -> Tensor(a)",
    _same, _same, (Read("src"),), Channel.COMPUTE, alias_of="src", logical=True,
)
swap_in = define(
    "swap_in(Tensor src, Device device) -> Tensor",
    _copy_to, _empty_on, (Borrow("src"), Alloc("result", Tier.DEVICE, pending=True)), Channel.H2D,
)
swap_out = define(
    "swap_out(Tensor src, Device device, str tier) -> Tensor",
    lambda src, device, tier: _copy_to(src, device), lambda src, device, tier: _empty_on(src, device),
    (Borrow("src"), Alloc("result", "tier", pending=True)), Channel.D2H,
)
# The members of a bucket lie in one Storage, in order, as `layout.side_by_side` says; each is read through its part.
swap_in_many = define(
    "swap_in_many(Tensor[] src, Device device) -> Tensor",
    _copies_to, _flat_on, (Borrow("src"), Alloc("result", Tier.DEVICE, pending=True)), Channel.H2D,
)
# Rows of a table wherever it lies; from the host the compute channel reads them itself.
lookup = define(
    "lookup(Tensor table, Tensor indices, Device device) -> Tensor",
    _rows_to, _rows_on, (Read("table"), Read("indices"), Alloc("result", Tier.DEVICE)), Channel.COMPUTE,
)


def only_looked_up(parameter: fx.Node) -> bool:
    """Whether all that reads the input are lookups: it is never needed on the device."""
    return bool(parameter.users) and all(user.target is lookup and user.args[0] is parameter for user in parameter.users)


part = define(
    "part(Tensor(a) flat, int offset, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor(a)",
    part_of, part_of, (Read("flat"),), Channel.COMPUTE, alias_of="flat",
)
wait = define(
    "wait(Tensor(a) src) -> Tensor(a)",
    _same, _same, (Await("src"),), Channel.COMPUTE, alias_of="src",
)
release = define(
    "release(Tensor src) -> ()",
    lambda src: None, lambda src: None, (Free("src"),), Channel.COMPUTE, pure=False,
)
rng_state = define(
    "rng_state(Device device) -> Tensor",
    _rng_state, _fake_rng_state, (Alloc("result", Tier.PAGEABLE),), Channel.HOST, pure=False,
)
swap_rng_state = define(
    "swap_rng_state(Tensor state, Device device) -> Tensor",
    _swap_rng_state, _fake_rng_state, (Read("state"), Alloc("result", Tier.PAGEABLE)), Channel.HOST, pure=False,
)
# The border between forward and backward; what lives across it is the saved set.
backward = define("backward() -> ()", lambda: None, lambda: None, (), Channel.COMPUTE, pure=False)
