"""A Machine: what a card and its host do per second, as data. Unknown is None, never zero.

`fxoffload calibrate` measures one; the files that ship are measured or derived from a data sheet.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import torch

from . import rates_reader
from .effects import Channel, Tier
from .rates import AttentionRate, Contention, Curve, Host, MatrixRate, Measured, Transfers
from .rates_reader import Section

log = logging.getLogger("fxoffload")

SCHEMA = 2
# No card has less memory than this; a capacity below it is in GiB.
_LEAST_CAPACITY_BYTES = 1 << 20
# A SATA 3 disk's link, the slowest that a training host has; what an unmeasured disk is taken for.
UNMEASURED_DISK_BYTES_PER_S = 6e8


# What the host takes to issue a copy, with its events, its wait and its release, in ops. On an H200 called steps took 53 and 75 % longer than with 1
# where they wait for the host, 4 and 1 to 8 % where they mostly do not; with 6 they are 8 % below to 13 % above (bench/results/h200_plan_pairs.json).
COPY_ISSUES = 6


@dataclass(frozen=True, slots=True)
class Machine:
    """`matrix`: by dtype word ("bf16", "fp32"). `memory`: a Curve per kind of MEMORY_KINDS. `dispatch_s`: issuing one op from the CPU.

    `optimizer_params_per_s`: AdamW's rate by place ("device", "host") and "fused_fp32", "foreach_bf16", ... `overhead_bytes`: device
    bytes that no graph value owns (library workspaces); `context_bytes`: what the driver takes outside the allocator.
    `multiprocessors`: how many the card has, on which some kernels' workspace depends. `compute_capability`: (9, 0) is 9.0; which
    attention kernel torch takes depends on it. `page_bytes`: of device memory that can be mapped at several addresses at once; None where
    that is not known.
    `overlaps`: transfers run beside compute. `source`: where the numbers come from; `datasheet`: derived, not measured.
    """

    name: str
    source: str
    datasheet: bool
    measured: Measured | None
    device_type: str
    device_capacity_bytes: int | None
    overlaps: bool
    allocation_bytes: int
    multiprocessors: int | None
    matrix: Mapping[str, MatrixRate]
    attention: tuple[AttentionRate, ...]
    memory: Mapping[str, Curve]
    transfers: Transfers
    dispatch_s: float | None
    contention: Contention
    optimizer_params_per_s: Mapping[str, Mapping[str, float]]
    host: Host
    overhead_bytes: int
    context_bytes: int | None
    compute_capability: tuple[int, int] | None = None
    page_bytes: int | None = None
    notes: tuple[str, ...] = ()
    # What cost.py has computed on this machine; `dataclasses.replace` starts anew.
    known_s: dict[object, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def flops_per_s(self) -> dict[str, float]:
        """The best matrix rate per dtype word."""
        return {dtype: rate.flops_per_s for dtype, rate in self.matrix.items()}

    @property
    def device_bytes_per_s(self) -> float:
        """Bytes that a large copy on the device reads and writes per second."""
        return self.memory["copy"].per_s

    @property
    def channel_bytes_per_s(self) -> dict[str, float]:
        """Rate of a large copy per channel, from and to pinned memory where the machine has it."""
        return {c.value: self.transfers.curve(c, Tier.PINNED).per_s for c in (Channel.H2D, Channel.D2H)}

    def transfer_s(self, n_bytes: int, channel: Channel, tier: Tier = Tier.PINNED) -> float:
        """Seconds to copy `n_bytes` on `channel` from or to the host's `tier`, one way and alone. Raises KeyError for a channel that
        copies nothing. From a file: read (or written), then copied."""
        return self.transfers.curve(channel, tier).seconds(n_bytes) + n_bytes * self._file_s_per_byte(channel, tier)

    def least_s_per_byte(self, most_bytes: int, channel: Channel, tier: Tier = Tier.PINNED) -> float:
        """Seconds per byte that `transfer_s` of no copy of up to `most_bytes` is below."""
        return self.transfers.curve(channel, tier).least_s_per_unit(most_bytes) + self._file_s_per_byte(channel, tier)

    def _file_s_per_byte(self, channel: Channel, tier: Tier) -> float:
        if tier is not Tier.DISK:
            return 0.0
        rate = self.host.disk_read_bytes_per_s if channel is Channel.H2D else self.host.disk_write_bytes_per_s
        return 1 / (rate or UNMEASURED_DISK_BYTES_PER_S)


def load_machine(machine: Machine | str | Path) -> Machine:
    """A Machine, a shipped name ("h200") or a JSON file. Raises ValueError naming the field that is missing or impossible."""
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, (str, Path)):
        raise ValueError(f"machine: expected a Machine, a name or a path, got {type(machine).__name__}")
    shipped = resources.files("fxoffload.machines").joinpath(f"{machine}.json")
    if shipped.is_file():
        return machine_from(json.loads(shipped.read_text()), f"machine {machine!r}")
    path = Path(machine)
    if not path.is_file():
        raise ValueError(f"machine: {str(machine)!r} is neither a file nor one of: {', '.join(shipped_machines())}")
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"machine: {path} is not JSON: {error}") from None
    return machine_from(raw, str(path))


def shipped_machines() -> list[str]:
    """Names of the machine files that ship with the package."""
    folder = resources.files("fxoffload.machines")
    return sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))


def machine_from(raw: object, source: str) -> Machine:
    """A Machine from parsed JSON. Raises ValueError naming `source` and the field that is missing, unknown or impossible."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else None
        raise ValueError(f"{source}: not a machine file of schema {SCHEMA} (schema: {found!r}); measure one with `fxoffload calibrate`")
    section = Section(raw, source)
    section.take("schema")
    section.texts("errors")
    machine = _read(section)
    section.end()
    taken = machine.overhead_bytes + (machine.context_bytes or 0)
    if machine.device_capacity_bytes is not None and taken >= machine.device_capacity_bytes:
        raise ValueError(
            f"{source}: overhead_bytes and context_bytes leave nothing of device_capacity_bytes, {machine.device_capacity_bytes}")
    return machine


def _read(section: Section) -> Machine:
    datasheet = section.flag("datasheet")
    rates = rates_reader.datasheet_rates(section) if datasheet else rates_reader.measured_rates(section)
    return Machine(
        name=section.text("name"), source=section.text("source"), datasheet=datasheet, measured=rates_reader.measured(section),
        device_type=section.text("device_type"), device_capacity_bytes=section.maybe_whole("device_capacity_bytes", _LEAST_CAPACITY_BYTES),
        overlaps=section.flag("overlaps"), allocation_bytes=section.whole("allocation_bytes", 1),
        multiprocessors=section.maybe_whole("multiprocessors"), matrix=rates.matrix, attention=rates.attention, memory=rates.memory,
        transfers=rates.transfers, dispatch_s=rates.dispatch_s,
        contention=rates_reader.contention(section), optimizer_params_per_s=rates_reader.optimizers(section),
        host=rates_reader.host(section), overhead_bytes=section.whole("overhead_bytes"),
        context_bytes=section.maybe_whole("context_bytes"),
        compute_capability=section.maybe("compute_capability", section.version), page_bytes=section.maybe_whole("page_bytes"), notes=section.lines("notes"),
    )


def default_machine(device_type: str) -> Machine:
    """The shipped machine for a device type: the H200 for CUDA, the two-core host for everything that runs on the CPU."""
    return load_machine("h200" if device_type == "cuda" else "cpu")


def machine_for(device: torch.device) -> Machine:
    """What `fxoffload calibrate` measured of the device (`calibrated_file`), else the shipped machine of the card that is there, by its name; of a
    card that none is for, and of other devices, `default_machine`.

    A card without one is logged: its plans keep to the budget, but are made for another card's rates. Raises ValueError for a measured file that is none.
    """
    measured = calibrated_file(device)
    if os.path.isfile(measured):  # a user without a home has none, nor has one who may not look into it
        return load_machine(measured)
    if not _is_card(device):
        return default_machine(device.type)
    card = torch.cuda.get_device_properties(device)
    name = shipped_for(card.name, card.total_memory)
    if name is None:
        log.warning("no machine file ships for %s: its steps are priced as an H200's. `fxoffload calibrate` measures this one", card.name)
        return default_machine(device.type)
    return load_machine(name)


def calibrated_file(device: torch.device) -> Path:
    """Where `fxoffload calibrate` keeps what it measures of a device: a file called as the card, or as the device's type, in the folder that
    FXOFFLOAD_MACHINES names, or else in ~/.config/fxoffload/machines."""
    folder = os.environ.get("FXOFFLOAD_MACHINES") or os.path.expanduser("~/.config/fxoffload/machines")
    name = torch.cuda.get_device_properties(device).name if _is_card(device) else device.type
    words = re.findall(r"[a-z0-9]+", name.lower())
    return Path(folder) / f"{'-'.join(words)}.json"


def _is_card(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def shipped_for(card: str, n_bytes: int) -> str | None:
    """The shipped machine that is called as a card of so many bytes ("NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA GeForce RTX 4090":
    "rtx4090"), rather one all of whose name is in the card's ("NVIDIA H100 80GB HBM3": "h100-80gb-hbm3", "NVIDIA H100 PCIe": "h100");
    None when there is none."""
    words = re.findall(r"[a-z0-9]+", card.lower())
    called = {*words, *(a + b for a, b in itertools.pairwise(words))}
    alike = [load_machine(name) for name in shipped_machines() if name.partition("-")[0] in called]

    def apart(machine: Machine) -> tuple[bool, int]:
        return not called.issuperset(machine.name.split("-")), abs((machine.device_capacity_bytes or 0) - n_bytes)

    return min(alike, key=apart).name if alike else None
