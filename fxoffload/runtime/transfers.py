"""Moving bytes: one engine per kind of device. It obeys the graph's order and decides nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..effects import Tier
from ..torch_compat import unowned
from .host_memory import HostMemory


Copy = tuple[torch.Tensor, torch.Tensor]
"""Where bytes go, and where they are."""

New = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Memory on the device for a tensor of that shape, stride and dtype."""


class Engine(Protocol):
    """What lowered graphs call. `moved_bytes`, `copies`: bytes, and calls that moved them, per channel since the engine was made."""

    moved_bytes: Counter[str]
    copies: Counter[str]

    def swap_in(self, src: torch.Tensor, new: New | None = None) -> object:
        """`new`: where the bytes go; None where the allocator puts them."""

    def swap_in_many(self, src: Sequence[torch.Tensor], new: New | None = None) -> object:
        """A bucket: one allocation, one event, and one copy for each run of members that are neighbours on the host as they are in it."""

    def swap_out(self, src: torch.Tensor, tier: str) -> object: ...

    def wait(self, transfer: object) -> torch.Tensor: ...

    def lookup(self, table: torch.Tensor, indices: torch.Tensor, on_host: bool, new: New | None = None) -> torch.Tensor:
        """Rows of a table, on the device. `on_host`: the table is not there."""

    def finish(self) -> None:
        """Returns when every byte sent to the host is readable there."""

    def settle(self) -> None:
        """Returns when, besides, host memory that was copied to the device may be written."""


class SynchronousEngine:
    """Devices without streams ("cpu", a simulated device): a transfer is done when its start returns."""

    overlaps = False

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self.device, self.memory = device, memory
        self.moved_bytes: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def swap_in(self, src: torch.Tensor, new: New | None = None) -> torch.Tensor:
        out = (new or self._new)(src.shape, src.stride(), src.dtype)
        out.copy_(src)
        self._count("h2d", out, 1)
        return out

    def swap_in_many(self, src: Sequence[torch.Tensor], new: New | None = None) -> torch.Tensor:
        flat, copies = bucket(src, self.memory, new or self._new)
        for out, one in copies:
            out.copy_(one)
        self._count("h2d", flat, len(copies))
        return flat

    def swap_out(self, src: torch.Tensor, tier: str) -> torch.Tensor:
        out = self.memory.empty_like(src, Tier(tier))
        out.copy_(src)
        self._count("d2h", out, 1)
        return out

    def lookup(self, table: torch.Tensor, indices: torch.Tensor, on_host: bool, new: New | None = None) -> torch.Tensor:
        out = _rows(table, indices, new or self._new)
        out.copy_(torch.embedding(table, indices.to(table.device)))
        if on_host:
            self._count("h2d", out, 1)
        return out

    def _new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def _count(self, channel: str, out: torch.Tensor, n_copies: int) -> None:
        self.moved_bytes[channel] += out.nbytes
        self.copies[channel] += n_copies

    @staticmethod
    def wait(transfer: torch.Tensor) -> torch.Tensor:
        return transfer

    def finish(self) -> None:
        pass

    def settle(self) -> None:
        pass


@dataclass(slots=True)
class Transfer:
    """Copies in flight: where they go, the event that ends them, and the sources they borrow."""

    out: torch.Tensor
    done: torch.Event
    borrowed: Sequence[torch.Tensor]


@dataclass(slots=True)
class Leaving:
    """A copy to the host that is made again at each replay: from `src` to `out`, neither of which it keeps alive."""

    out: torch.Tensor
    src: torch.Tensor
    tier: Tier


@dataclass(slots=True)
class Recorded:
    """Bytes and number of copies per channel, as the engine counts them, and the host memory that they write: it is theirs.

    `between`: takes what is to be issued at this point of each replay. `leaving`: the copies to the host, by the address they write; each may
    be given another `out` to write.
    """

    moved_bytes: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    held: dict[int, torch.Tensor] = field(default_factory=dict)
    leaving: dict[int, Leaving] = field(default_factory=dict)
    between: Callable[[Callable[[], None]], None] = lambda act: None


class StreamEngine:
    """Devices with streams: one side stream per direction.

    The destination is allocated on the compute stream and the side stream waits for it, so the caching allocator never hands the
    bytes out while a copy uses them; the source is held until the wait for the same reason. No record_stream.
    """

    overlaps = True

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        self.device, self.memory = device, memory
        self.module = torch.get_device_module(device)
        self.h2d, self.d2h = self.module.Stream(device), self.module.Stream(device)
        self.moved_bytes: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        # The copies of a direction end in order, and so do lookups: the last event ends them all.
        self._last_in: torch.Event | None = None
        self._last_look: torch.Event | None = None
        self._last_out: torch.Event | None = None
        self._recorded: Recorded | None = None

    def swap_in(self, src: torch.Tensor, new: New | None = None) -> Transfer:
        out = (new or self._new)(src.shape, src.stride(), src.dtype)
        return self._to_device(out, ((out, src),), (src,))

    def swap_in_many(self, src: Sequence[torch.Tensor], new: New | None = None) -> Transfer:
        flat, copies = bucket(src, self.memory, new or self._new)
        return self._to_device(flat, copies, src)

    def swap_out(self, src: torch.Tensor, tier: str) -> Transfer:
        out = self.memory.empty_like(src, Tier(tier))
        self.moved_bytes["d2h"] += out.nbytes
        self.copies["d2h"] += 1
        # The host block may be one that a copy to the device read before: its wait is behind us on the compute stream, which the
        # side stream waits for.
        if self._recorded is None:
            self._last_out = self._copied(((out, src),), self.d2h)
        else:
            address, leaving = out.data_ptr(), Leaving(unowned(out), unowned(src), Tier(tier))
            self._recorded.held[address], self._recorded.leaving[address] = out, leaving
            self._last_out = self._copied_each_time(lambda: [(leaving.out, leaving.src)], self.d2h)
        return Transfer(out, self._last_out, (src,))

    def wait(self, transfer: Transfer) -> torch.Tensor:
        done = transfer.done
        self._now_or_again(lambda: self.module.current_stream(self.device).wait_event(done))
        transfer.borrowed = ()
        return transfer.out

    def lookup(self, table: torch.Tensor, indices: torch.Tensor, on_host: bool, new: New | None = None) -> torch.Tensor:
        out = _rows(table, indices, new or self._new)
        there = unowned(table, self.device) if on_host else table
        torch.index_select(there, 0, indices.reshape(-1), out=out.view(-1, table.shape[1]))
        if on_host:
            self.moved_bytes["h2d"] += out.nbytes
            self.copies["h2d"] += 1
            if self._recorded is None:
                self._last_look = self.module.Event()
                self._last_look.record(self.module.current_stream(self.device))
        return out

    def finish(self) -> None:
        if self._last_out is not None:
            self._last_out.synchronize()
            self._last_out = None

    def settle(self) -> None:
        self.finish()
        for event in (self._last_in, self._last_look):
            if event is not None:
                event.synchronize()
        self._last_in = self._last_look = None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Recorded]:
        """Inside, copies and waits are handed to `Recorded.between` and not made: nothing of them is to be waited for afterwards."""
        before = self.moved_bytes.copy(), self.copies.copy(), self._last_in, self._last_out
        found = self._recorded = Recorded()
        try:
            yield found
        finally:
            found.moved_bytes, found.copies = self.moved_bytes - before[0], self.copies - before[1]
            self.moved_bytes, self.copies, self._last_in, self._last_out = before
            self._recorded = None

    def replayed(self, recorded: Recorded) -> None:
        """Notes copies that were replayed on the current stream: they end with it, as far as it was told by now."""
        self.moved_bytes.update(recorded.moved_bytes)
        self.copies.update(recorded.copies)
        if recorded.copies:
            done = self.module.Event()
            done.record(self.module.current_stream(self.device))
            self._last_in, self._last_out = done, done if recorded.held else self._last_out

    def _new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def _to_device(self, out: torch.Tensor, copies: Sequence[Copy], borrowed: Sequence[torch.Tensor]) -> Transfer:
        self.moved_bytes["h2d"] += out.nbytes
        self.copies["h2d"] += len(copies)
        self._last_in = self._copied(copies, self.h2d)
        return Transfer(out, self._last_in, borrowed)

    def _copied(self, copies: Iterable[Copy], stream: torch.Stream) -> torch.Event:
        """The event that ends the copies, which wait for what compute was told so far."""
        made = list(copies) if self._recorded is None else [(unowned(out), unowned(src)) for out, src in copies]
        return self._copied_each_time(lambda: made, stream)

    def _copied_each_time(self, copies: Callable[[], Iterable[Copy]], stream: torch.Stream) -> torch.Event:
        done = self.module.Event()

        def copy() -> None:
            stream.wait_stream(self.module.current_stream(self.device))
            with self.module.stream(stream):
                for out, src in copies():
                    out.copy_(src, non_blocking=True)
            done.record(stream)

        self._now_or_again(copy)
        return done  # type: ignore[no-any-return]

    def _now_or_again(self, act: Callable[[], None]) -> None:
        """Does it, or leaves it to the replays of what is recorded."""
        (self._recorded.between if self._recorded is not None else _called)(act)


def _rows(table: torch.Tensor, indices: torch.Tensor, new: New) -> torch.Tensor:
    """Memory on the device for rows of a table."""
    shape = (*indices.shape, table.shape[1])
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return new(shape, stride, table.dtype)


def _called(act: Callable[[], None]) -> None:
    act()


def bucket(src: Sequence[torch.Tensor], memory: HostMemory, new: New) -> tuple[torch.Tensor, list[Copy]]:
    """The bytes of a bucket on the device, not yet filled, and the copies that fill them."""
    n_bytes, runs = memory.runs(src)
    flat = new((n_bytes,), (1,), torch.uint8)
    return flat, [(flat[run.offset : run.offset + run.n_bytes], run.bytes()) for run in runs]


def engine_for(device: torch.device, memory: HostMemory) -> SynchronousEngine | StreamEngine:
    """The engine of a device type: streams where its module has them."""
    if device.type == "cpu":
        return SynchronousEngine(device, memory)
    module = torch.get_device_module(device)
    return StreamEngine(device, memory) if hasattr(module, "Stream") else SynchronousEngine(device, memory)
