"""A Machine: bandwidths, rates and capacities as data. Unknown is None, never zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path

from .effects import Channel

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """`flops_per_s`: matrix rate by dtype word ("bf16", "fp32"). `channel_bytes_per_s`: copy rate by channel.

    `overhead_bytes`: device bytes that no graph value owns (library workspaces). `overlaps`: transfers run beside compute.
    `source`: where the numbers come from ("measured ..." or "datasheet ...").
    """

    name: str
    source: str
    device_type: str
    device_capacity_bytes: int | None
    flops_per_s: Mapping[str, float]
    device_bytes_per_s: float
    channel_bytes_per_s: Mapping[str, float]
    op_latency_s: float = 0.0
    transfer_latency_s: float = 0.0
    overhead_bytes: int = 0
    overlaps: bool = True
    allocation_bytes: int = 1
    host_optimizer_params_per_s: float | None = None
    notes: tuple[str, ...] = field(default=())

    def transfer_s(self, n_bytes: int, channel: Channel) -> float:
        """Seconds to copy `n_bytes` on `channel`. Model: latency + bytes / bandwidth (Hockney). Raises KeyError when unknown."""
        return self.transfer_latency_s + n_bytes / self.channel_bytes_per_s[channel.value]


def load_machine(machine: Machine | str | Path) -> Machine:
    """A Machine, a shipped name ("h200") or a JSON file. Raises ValueError naming the field that is missing or unknown."""
    if isinstance(machine, Machine):
        return machine
    shipped = resources.files("fxoffload.machines").joinpath(f"{machine}.json")
    if shipped.is_file():
        return machine_from(json.loads(shipped.read_text()), f"machine {machine!r}")
    path = Path(machine)
    if not path.is_file():
        raise ValueError(f"machine: {str(machine)!r} is neither a file nor one of: {', '.join(shipped_machines())}")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"machine: {path} is not JSON: {error}") from None
    return machine_from(raw, str(path))


def shipped_machines() -> list[str]:
    """Names of the machine files that ship with the package."""
    folder = resources.files("fxoffload.machines")
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def machine_from(raw: object, source: str) -> Machine:
    """A Machine from parsed JSON. Raises ValueError naming `source` and the field."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"{source}: not a machine file of schema {SCHEMA}")
    known = {f.name for f in fields(Machine)}
    values = {k: v for k, v in raw.items() if k != "schema"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{source}: unknown field {unknown[0]!r}")
    try:
        machine = Machine(**{**values, "notes": tuple(values.get("notes", ()))})
    except TypeError as error:
        raise ValueError(f"{source}: {error}") from None
    for rate, value in [("device_bytes_per_s", machine.device_bytes_per_s), *machine.channel_bytes_per_s.items(), *machine.flops_per_s.items()]:
        if not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{source}: {rate} must be a positive number, got {value!r}")
    return machine


def default_machine(device_type: str) -> Machine:
    """The shipped machine for a device type: the H200 for CUDA, the two-core host for everything that runs on the CPU."""
    return load_machine("h200" if device_type == "cuda" else "cpu")
