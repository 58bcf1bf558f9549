"""Steps that the device is told once: what a lowered graph issues is recorded and issued again by one call: what computes as CUDA graphs,
and its copies between them.

A recording holds addresses, so it is good for as long as all it reads and writes lies where it lay: values at their offsets in the arena,
parameters and host memory where they are. What comes anew in every step (the batch, tangents) is copied to where the recording reads it,
and what the caller gets on the device (losses, gradients) is copied out of it. What he gets on the host (gradients) he gets as it is: as
long as he has it, the step is called.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from ..graph import Role, info, name_of
from ..layout import extent_bytes
from ..replays import comes_anew, host_draw, is_read
from .begun import Pair
from .device_arena import DeviceArena
from .early import Batch, writes_inputs
from .host_memory import HostMemory
from .recordings import Boxed, Given, Recordings, Results
from .room import Room
from .transfers import Recorded, unowned

log = logging.getLogger("fxoffload")

End = Callable[[], None]

# Calls alike before one is recorded: by then kernels are loaded and libraries have their memory.
WARM_CALLS = 2
# In a look, what comes before the arguments.
_N_SETTINGS = 3
# Recordings that are made in vain for the same arguments, or backwards called beside a recorded forward, before no more are made.
_MOST_LOST = 3


@dataclass(slots=True)
class _Lent:
    """Host memory that a recording writes and the caller gets; `n_uses`: how many look into it while he does not."""

    flat: torch.Tensor
    n_uses: int = 0

    @property
    def address(self) -> int:
        return self.flat.data_ptr()

    def counted(self) -> None:
        """The caller does not look into it now."""
        self.n_uses = _n_uses(self.flat.untyped_storage())

    def is_used(self) -> bool:
        return _n_uses(self.flat.untyped_storage()) > self.n_uses


@dataclass(slots=True)
class _Recording:
    """`look`: what it was made for; `inputs`: positions of arguments that come anew, and where each is read; `outputs`: one way per
    result to give it to the caller; `copied`: results that are copied out, and `fresh`, their copies of the step at work; `in_arena`: how many
    results lie there; `passed`: results that come anew and are kept for backward; `lent`: host memory that the caller gets."""

    look: tuple[object, ...]
    replay: Callable[[], None]
    recorded: Recorded
    inputs: list[tuple[int, torch.Tensor]]
    outputs: list[Callable[[Given], object]] = field(default_factory=list)
    copied: list[torch.Tensor] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)
    in_arena: int = 0
    passed: list[int] = field(default_factory=list)
    lent: list[_Lent] = field(default_factory=list)

    def is_free(self) -> bool:
        """Nobody looks into the host memory that it writes."""
        return not any(one.is_used() for one in self.lent)

    def renew(self, memory: HostMemory) -> bool:
        """Has what others look into written elsewhere from now on; False where that cannot be."""
        used = [one for one in self.lent if one.is_used()]
        if any(one.address not in self.recorded.leaving for one in used):
            return False
        for one in used:
            leaving = self.recorded.leaving.pop(one.address)
            new = memory.empty_like(leaving.out, leaving.tier)
            leaving.out = unowned(new)
            self.recorded.held.pop(one.address)
            self.recorded.held[new.data_ptr()], self.recorded.leaving[new.data_ptr()] = new, leaving
            one.flat = _flat(new)
            del new
            one.counted()
        return True


@dataclass(frozen=True, slots=True)
class _Last:
    """The arguments of a replay; in place of those `of_batch`, positions with their names, nothing. `names`: of all that the batch had."""

    arguments: list[object]
    of_batch: list[tuple[int, str]]
    names: set[str]


class Replay:
    """A boxed function that calls `call` until it was called with the like of its arguments twice in a row, and then replays a recording.

    `call`: the function of `graph`, which waits for none of its copies; `end`: called when it returns, to wait for those that it must;
    `begins`: it is a step's first graph, and may be issued before its call is checked; `room`: what the step needs; `pair`: what it shares
    with the step's other graph; `grown_bytes`: by how much the recordings' memory grew for its own.
    """

    def __init__(
        self, graph: fx.Graph, call: Boxed, arena: DeviceArena, room: Room, recordings: Recordings, end: End | None, begins: bool,
        pair: Pair | None = None,
    ) -> None:
        self._call, self._arena, self._room, self._recordings, self._engine = call, arena, room, recordings, recordings.engine
        self._end = end if end is not None else _nothing
        inputs = graph.find_nodes(op="placeholder")
        roles = [info(node).role for node in inputs]
        self._anew, self._is_tangent = list(map(comes_anew, roles)), [role is Role.TANGENT for role in roles]
        # What no node reads (transformers keeps a tensor of its last call, and returns it) may lie anywhere in any call.
        self._unread = [i for i, node in enumerate(inputs) if not is_read(node) and not self._is_tangent[i]]
        self.pair = pair if pair is not None else Pair()
        self.grown_bytes = 0
        if not begins:
            self.pair.backward = weakref.ref(self)
        self._stay: list[tuple[int, torch.Tensor]] = []
        self._begun: Hashable = None
        self._alike: tuple[object, ...] | None = None
        self._n_alike = self._n_lost = 0
        self._recording: _Recording | None = None
        self._begins = begins
        self._may_start = begins and not writes_inputs(graph)
        self._names = [info(node).name.removeprefix("batch.") for node in inputs]
        self._last: _Last | None = None
        drawn = host_draw(graph)
        self._is_called = drawn is not None
        if drawn is not None:
            log.warning("a step is called op by op and not recorded: %s draws random numbers on the host", name_of(drawn))
        recordings.add(self)

    @property
    def is_recorded(self) -> bool:
        """Whether it can be replayed."""
        return self._recording is not None

    def forget(self) -> None:
        """Gives the recording's memory back; it may be made again."""
        self._alike = None
        self._forget_recording()

    def _forget_recording(self) -> None:
        if self._recording is not None:
            self._recording.outputs.clear()  # they know of it: its memory would be the collector's to free
            self._recordings.changed()
        self._recording, self._last, self._stay, self.grown_bytes = None, None, [], 0
        if self._begins:
            self.pair.fixed.clear()

    def start(self, batch: Batch) -> Hashable:
        """See `early.Starting`. The arguments are those of the last replay, and tensors of the batch where those were."""
        recording, last = self._recording, self._last
        if recording is None or last is None or last.names != set(batch) or not recording.is_free():
            return None
        if not self._arena.suits(self._room) or not self._recordings.has_room(self._room, self.pair) or not self._arena.take(self._room):
            return None
        arguments = list(last.arguments)
        for i, name in last.of_batch:
            arguments[i] = batch[name]
        anew, place = self._come_anew(arguments)
        look = self._look(arguments, anew, place)
        if look != recording.look:
            return None
        self._issue(recording, arguments)
        return look, _state(anew, arguments)

    def __call__(self, arguments: list[object]) -> Results:
        if self._is_called or self._recordings.given_up:
            self._recordings.early.drop()
            if self._begins:
                self._recordings.make_room(self._room)
            return self._called(arguments)
        read = self._read(arguments)
        anew, place = self._come_anew(read)
        alike = self._look(read, anew, place)
        early = self._recordings.early
        if early.waits and early.claim(self, (alike, _state(anew, read))) and self._recording is not None:
            self._recordings.is_replayed = True
            return self._results(self._recording, arguments)
        if self._begun is not None:
            return self._results(self._claimed(alike, anew, read), arguments)
        if self._like(alike, read) != self._alike:
            self.forget()
            self._alike, self._n_alike = self._like(alike, read), 0
        elif self._recording is not None and alike != self._recording.look:
            self._lose()
        if self._recording is None:
            self._n_alike += 1
            if self._n_alike > WARM_CALLS and (self._begins or self._recordings.is_replayed) and not self._recordings.given_up:
                self._recordings.make_room(self._room, self.pair)
                self._recording = self._recorded(arguments, anew, place, alike)
        is_called = self._recording is None or not self._is_free(self._recording)
        if self._begins:
            self._recordings.is_replayed = not is_called
            self._recordings.make_room(self._room, None if self._recording is None else self.pair)
        if is_called:
            self._note_mixed()
            return self._called(arguments)
        assert self._recording is not None
        self._issue(self._recording, arguments)
        self._note(anew, read)
        return self._results(self._recording, arguments)

    def begin(self, passed: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> bool:
        """See `begun.Beginning`. What is not given lies where it did, or is the same parameter."""
        recording, place = self._recording, self._arena.extent()
        anew = [i for i, _ in recording.inputs] if recording is not None else []
        # Tangents are the last arguments.
        if recording is None or [self._is_tangent[i] for i in anew] != [False] * len(passed) + [True] * len(gradients):
            return False
        given = dict(zip(anew, (*passed, *gradients), strict=True))
        now: dict[int, object] = {_N_SETTINGS + i: value.data_ptr() for i, value in self._stay}
        now |= {_N_SETTINGS + i: _form(value) for i, value in given.items()}
        if recording.look[:_N_SETTINGS] != _settings(place) or any(recording.look[i] != value for i, value in now.items()):
            return False
        if not recording.is_free() and not recording.renew(self._engine.memory):
            return False
        self._issue(recording, given)
        self._begun = _written([*passed, *gradients])
        return True

    def end_begun(self) -> None:
        """See `begun.Beginning`. What was begun and not run has overwritten what forward has kept."""
        if self._begun is not None:
            self._begun, self._recordings.is_spoiled = None, True

    def _claimed(self, look: tuple[object, ...], anew: Sequence[int], arguments: Given) -> _Recording:
        """The recording that was begun for these arguments."""
        begun, recording = self._begun, self._recording
        if recording is None or look != recording.look or begun != _written([arguments[i] for i in anew]):
            raise RuntimeError("a backward was begun with other gradients or parameters than it was run with")
        self._begun = None
        self._recordings.n_begun += 1
        return recording

    def _like(self, look: tuple[object, ...], arguments: Given) -> tuple[object, ...]:
        """A look without where the step's first graph put what is not in the arena: elsewhere in every step, until that is recorded."""
        if self._begins:
            return look
        fixed, place = list(look), self._arena.extent()
        for i, (may, value) in enumerate(zip(self._anew, arguments, strict=True)):
            if may and not self._is_tangent[i] and isinstance(value, torch.Tensor) and not place[0] <= value.data_ptr() < place[1]:
                fixed[_N_SETTINGS + i] = None
        return tuple(fixed)

    def _is_free(self, recording: _Recording) -> bool:
        """Whether a recording may write. What it gave to the caller it writes elsewhere; what forward keeps for a backward that has not run
        it cannot, and a gradient that no copy brought has no elsewhere: then no step is recorded any more."""
        if recording.is_free():
            return True
        if self._begins:
            return False
        if not recording.renew(self._engine.memory):
            log.warning("steps are called op by op and recorded no more: a gradient is kept that a recording cannot write elsewhere")
            self._recordings.give_up()
            return False
        return True

    def _note_mixed(self) -> None:
        """A backward is called beside a recorded forward. Where that happens again and again, calls come in another order than a step's graphs."""
        if self._begins or not self._recordings.is_replayed or self._recordings.given_up:
            return
        self._recordings.n_mixed += 1
        if self._recordings.n_mixed >= _MOST_LOST:
            log.warning("steps are called op by op and recorded no more: backward is not what followed the recorded forward before")
            self._recordings.give_up()

    def _lose(self) -> None:
        """Forgets a recording whose host memory lies elsewhere by now. Where that happens again and again, calls come in another order than
        a step's graphs."""
        self._n_lost += 1
        self._n_alike = 0
        self._forget_recording()
        if self._n_lost >= _MOST_LOST:
            log.warning("steps are called op by op and recorded no more: their host memory lies elsewhere in each")
            self._recordings.give_up()

    def _read(self, arguments: Given) -> list[object]:
        """The arguments, with their form alone in place of those that are not read."""
        read = list(arguments)
        for i in self._unread:
            read[i] = _form(read[i]) if isinstance(read[i], torch.Tensor) else read[i]
        return read

    def _come_anew(self, arguments: Given) -> tuple[list[int], tuple[int, int]]:
        """Positions of arguments that lie elsewhere in every step, and where the arena is."""
        place, fixed = self._arena.extent(), self.pair.fixed if not self._begins else ()
        return [
            i for i, (may, value) in enumerate(zip(self._anew, arguments, strict=True))
            if may and _is_elsewhere(value, place) and value.data_ptr() not in fixed], place  # type: ignore[attr-defined]

    def _note(self, anew: Sequence[int], arguments: Given) -> None:
        """Remembers what `start` needs, if all that comes anew is the batch's."""
        batch = self._recordings.early.batch_of(self) if self._may_start else None
        of_batch = [(i, self._names[i]) for i in anew]
        if batch is None or any(name not in batch for _, name in of_batch):
            self._last = None
            return
        kept = list(arguments)
        for i in anew:
            kept[i] = None
        self._last = _Last(kept, of_batch, set(batch))

    def _called(self, arguments: list[object]) -> Results:
        results = self._call(arguments)
        self._end()
        return results

    def _look(self, arguments: Given, anew: Sequence[int], place: tuple[int, int]) -> tuple[object, ...]:
        """All that a recording depends on: equal looks, and it may be replayed."""
        look = [*_settings(place), *(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments)]
        for i in anew:
            look[_N_SETTINGS + i] = _form(arguments[i])
        return tuple(look)

    def _recorded(self, arguments: Given, anew: Sequence[int], place: tuple[int, int], look: tuple[object, ...]) -> _Recording | None:
        given = list(arguments)
        for i in anew:
            given[i] = _copy_of(given[i])
        known = {id(value): i for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
        held_bytes = self._recordings.held_bytes()
        try:
            with self._engine.recorded() as recorded:
                results, replay = self._recordings.record(self._call, given, recorded)
        except RuntimeError as error:
            log.warning("a step cannot be recorded and is called op by op: %s", str(error).splitlines()[0])
            failed = True
        else:
            failed = False
        if failed:  # what the error kept of the recording has ended with it
            self._recordings.give_up()
            return None
        self._recordings.changed()
        self.grown_bytes = max(self._recordings.held_bytes() - held_bytes, 0)
        recording = _Recording(look, replay, recorded, [(i, _flat(given[i])) for i in anew])
        has_arena = any(self._is_in_arena(result, place) for result in results)
        for i, result in enumerate(results):
            recording.outputs.append(self._output(recording, result, known, place, has_arena and i >= self.pair.n_returned))
        recording.passed = [i for i, one in enumerate(results) if i >= self.pair.n_returned and known.get(id(one)) in anew]
        results, result = (), None
        read = self._read(arguments)
        self._stay = [(i, value) for i, (may, value) in enumerate(zip(self._anew, read)) if not may and isinstance(value, torch.Tensor)]
        for lent in recording.lent:
            lent.counted()
        return recording

    def _is_lent(self, result: torch.Tensor, known: dict[int, int]) -> bool:
        return result.device.type == "cpu" and id(result) not in known

    @staticmethod
    def _is_in_arena(result: object, place: tuple[int, int]) -> bool:
        # Not by where its elements are: it may have none.
        return isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() == place[0]

    def _output(
        self, recording: _Recording, result: Any, known: dict[int, int], place: tuple[int, int], is_kept: bool,
    ) -> Callable[[Given], object]:
        """How a result is given. `is_kept`: for backward, which has read it before the recording, that writes it where it is, runs again."""
        if not isinstance(result, torch.Tensor):
            return lambda _: result
        if id(result) in known:
            position = known[id(result)]
            return lambda given: given[position]
        shape, stride, dtype = result.shape, result.stride(), result.dtype
        if self._is_lent(result, known):
            lent = _Lent(_flat(result))
            recording.lent += [lent] if result.numel() else []
            return lambda _: _over(lent.flat, shape, stride)
        if self._is_in_arena(result, place):
            offset, arena = int(result.storage_offset()) * dtype.itemsize, self._arena
            recording.in_arena += 1
            if recording.in_arena == 1:  # while it lives, the step has the arena
                return lambda _: arena.strided(offset, shape, stride, dtype)
            return lambda _: arena.lasting(offset, shape, stride, dtype)
        if is_kept:
            there = _over(_flat(result), shape, stride)
            self.pair.fixed.add(there.data_ptr())
            return lambda _: there
        position = len(recording.copied)
        if torch.ops.aten.is_non_overlapping_and_dense(result):
            recording.copied.append(_over(_flat(result), shape, stride))
            return lambda _: recording.fresh[position]
        recording.copied.append(_flat(result))
        return lambda _: _over(recording.fresh[position], shape, stride)

    def _issue(self, recording: _Recording, arguments: Given | Mapping[int, object]) -> None:
        with torch.no_grad():
            if recording.inputs:
                torch._foreach_copy_([there for _, there in recording.inputs], [_flat(arguments[i]) for i, _ in recording.inputs])
            recording.replay()
            recording.fresh = [torch.empty_like(one) for one in recording.copied]  # of the same strides: all are dense
            if recording.fresh:
                torch._foreach_copy_(recording.fresh, recording.copied)

    def _results(self, recording: _Recording, arguments: list[object]) -> Results:
        given = list(arguments)
        arguments.clear()
        with torch.no_grad():
            results = [output(given) for output in recording.outputs]
        recording.fresh = []
        if self._begins:
            passed: list[Any] = [results[i] for i in recording.passed]
            self._recordings.expected = partial(self.pair.begun, passed)
        self._engine.replayed(recording.recorded)
        self._end()
        return results


def _nothing() -> None:
    """The end of what waits for nothing."""


def _is_elsewhere(value: object, place: tuple[int, int]) -> bool:
    """True for a tensor of the device that is not in the arena."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu" and not place[0] <= value.data_ptr() < place[1]


def _settings(place: tuple[int, int]) -> tuple[object, ...]:
    return place, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


def _form(value: Any) -> tuple[object, ...]:
    return value.shape, value.stride(), value.dtype


def _state(anew: Sequence[int], arguments: Given) -> Hashable:
    """Where each argument that comes anew lies, and how often each argument was written."""
    return tuple(arguments[i].data_ptr() for i in anew), tuple(map(_version, arguments))  # type: ignore[attr-defined]


def _written(values: Sequence[Any]) -> Hashable:
    """Where each lies, and how often it was written."""
    return tuple((value.data_ptr(), _version(value)) for value in values)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _n_uses(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


def _flat(tensor: Any) -> torch.Tensor:
    """All bytes from a tensor's first element to its last, as one row of its dtype."""
    return tensor.as_strided((extent_bytes(tensor) // tensor.element_size(),), (1,))  # type: ignore[no-any-return]


def _copy_of(tensor: Any) -> torch.Tensor:
    """A tensor of the same shape, stride and values, in memory of its own."""
    return _over(_flat(tensor).clone(), tensor.shape, tensor.stride())


def _over(flat: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A tensor over the bytes of `flat` that is no view of it."""
    empty = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), flat.storage_offset(), shape, stride)  # type: ignore[call-overload,no-any-return]
