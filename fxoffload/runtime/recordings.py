"""What the recordings of one Session share, and what they are made of."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from ..torch_compat import clear_workspaces, end_failed_capture, ends_empty, saved_tensors_are_hooked, when_backward_begins
from .begun import Pair
from .device_arena import DeviceArena
from .early import EarlyStarts
from .room import Room
from .transfers import Recorded, StreamEngine, SynchronousEngine

Boxed = Callable[[list[object]], Sequence[object]]
Results = Sequence[object]
Given = Sequence[object]

# The priority of a recording's stream, the higher the lower the number. A step is issued far ahead of the device. At the usual priority each
# segment of a stream that far ahead began up to 0.5 ms after what it waited for had ended (H200): 60 to 100 ms of a step.
_URGENT = -1

class Recordable(Protocol):
    """A graph that is recorded or is to be (`replay.Replay`). `grown_bytes`: by how much the recordings' memory grew for its recording."""

    pair: Pair
    grown_bytes: int

    @property
    def is_recorded(self) -> bool:
        """Whether it can be replayed."""

    def forget(self) -> None:
        """Gives the recording's memory back; it may be made again."""


class Recordings:
    """What the recordings of one Session share: the engine of their copies, the stream they are made on, the arena, and the memory of what lies
    in none. `early`: those that are issued before their call is checked; `given_up`: no step is recorded any more; `is_replayed`: the first
    graph of the step at work was; `expected`: what the backward runs in of the forward that was replayed last, until its call ends;
    `n_begun`: backwards that were issued before they had their arguments; `is_spoiled`: a backward that was begun was not run, and the arena
    holds nothing that another could read.

    What a recorded step makes for itself lies in the recordings' memory, what a called one makes beside it, and a plan has room for one of
    the two, and for no other recording. So a step's graphs are recorded in one step, or none is, and before a step runs for which there is
    no room beside other recordings, these are forgotten.
    """

    given_up = is_replayed = is_spoiled = False
    expected: Callable[[Sequence[object]], contextlib.AbstractContextManager[None]] | None = None
    n_mixed = n_begun = 0
    _held_bytes: int | None = None

    def __init__(self, device: torch.device, engine: StreamEngine, arena: DeviceArena) -> None:
        self.device, self.engine, self.arena, self.early = device, engine, arena, EarlyStarts(device)
        arena.moves = self.forget
        self._stream = torch.cuda.Stream(device, priority=_URGENT)
        self._pool = torch.cuda.graph_pool_handle()
        self._replays: weakref.WeakSet[Recordable] = weakref.WeakSet()

    def add(self, replay: Recordable) -> None:
        """`release` is to know of it."""
        self._replays.add(replay)

    def record(self, call: Boxed, given: Given, recorded: Recorded) -> tuple[Results, Callable[[], None]]:
        """The results of a call, whose work is not done, and what does it. Raises RuntimeError where some of it cannot be recorded."""
        if not any(replay.is_recorded for replay in self._replays):
            # A pool that no recording uses any more is gone, or going with the last value in it, and cannot be recorded in again.
            self._pool = torch.cuda.graph_pool_handle()
        # The pool is apart from the memory that calls have left cached.
        torch.cuda.synchronize(self.device)
        clear_workspaces()
        torch.cuda.empty_cache()
        current, segments = torch.cuda.current_stream(self.device), Segments(self.device, self._pool)
        recorded.between = segments.cut
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            with segments.captured():
                results = call(list(given))
        # Those of this recording lie in the pool, where the next one can use them: recordings run one after the other.
        clear_workspaces()
        current.wait_stream(self._stream)
        return results, lambda: self._issued(segments)

    def _issued(self, segments: Segments) -> None:
        """Issues all of a recording on the stream of recordings, between what the current stream was told and what it will be."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            segments.replay()
        current.wait_stream(self._stream)

    def expect(self, results: object) -> None:
        """A call of the model returns these: if it was replayed, so is its backward, as soon as it is known what it begins with; not where hooks
        pack what was kept for it, which then is not where it was."""
        begun, self.expected = self.expected, None
        if begun is not None and not saved_tensors_are_hooked():
            for node in {leaf.grad_fn for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)} - {None}:
                when_backward_begins(node, begun)

    def has_room(self, room: Room, pair: Pair | None = None) -> bool:
        """Whether a step may run beside the recordings that there are; with `pair`: of other steps, since it is to be replayed."""
        others = [replay for replay in self._replays if replay.is_recorded and replay.pair is not pair]
        if not others:
            return True
        own = sum(replay.grown_bytes for replay in self._replays if replay.is_recorded and replay.pair is pair)
        return room.has(self.arena.held_bytes + self.held_bytes() - own)

    def make_room(self, room: Room, pair: Pair | None = None) -> None:
        """Gives the memory of other steps' recordings back where a step that is about to run has no room beside them; with `pair` as above."""
        if not self.has_room(room, pair):
            self.forget(pair)

    def forget(self, but: Pair | None = None) -> None:
        """Gives the memory of all recordings back, but of that pair's."""
        recorded = [replay for replay in self._replays if replay.is_recorded and (but is None or replay.pair is not but)]
        if not recorded:
            return
        torch.accelerator.synchronize(self.device)
        self.early.forget()
        for replay in recorded:
            replay.forget()
        torch.accelerator.empty_cache()

    def held_bytes(self) -> int:
        """Of the memory that recordings lie in."""
        if self._held_bytes is None:
            segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)
            self._held_bytes = sum(segment["total_size"] for segment in segments)
        return self._held_bytes

    def changed(self) -> None:
        """A recording was made or forgotten."""
        self._held_bytes = None

    def release(self) -> None:
        """Forgets every recording."""
        self.early.forget()
        for replay in list(self._replays):
            replay.forget()

    def give_up(self) -> None:
        """From here on every step is called."""
        torch.accelerator.synchronize(self.device)
        self.given_up = True
        self.release()
        torch.accelerator.empty_cache()


class Segments:
    """What a call issues, in order: CUDA graphs, and between them copies and waits. In one graph with kernels, copies ran at 48 GB/s on an
    H200 where they run at 55 beside the same kernels on a stream of their own."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.acts: list[Callable[[], None]] = []
        self._device, self._pool = device, pool
        self._open: torch.cuda.CUDAGraph | None = None
        self._empty: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, what goes to the current stream becomes a segment."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._abandon)
            self._begin()
            yield
            undo.pop_all()
        self._end()

    def cut(self, act: Callable[[], None]) -> None:
        """`act` comes between what was issued so far and what will be."""
        self._end()
        self.acts.append(act)
        self._begin()

    def replay(self) -> None:
        """Issues all of it again, on the current stream."""
        for act in self.acts:
            act()

    def _begin(self) -> None:
        self._open = torch.cuda.CUDAGraph()  # also what fails to begin is to be ended
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        graph, self._open = self._open, None
        if graph is None:  # its end has failed
            return
        try:
            if ends_empty(graph):
                # The pool must be in use when the next capture begins.
                self._empty.append(graph)
                return
        except RuntimeError:
            end_failed_capture(self._device, self._pool)
            raise
        self.acts.append(graph.replay)

    def _abandon(self) -> None:
        with contextlib.suppress(RuntimeError):  # what went wrong first is what is told
            self._end()


def recordings_for(device: torch.device, engine: SynchronousEngine | StreamEngine, arena: DeviceArena | None) -> Recordings | None:
    """Recordings where a device can be told a step once: CUDA, with memory planned by offsets."""
    if device.type != "cuda" or arena is None or not isinstance(engine, StreamEngine):
        return None
    return Recordings(device, engine, arena)
