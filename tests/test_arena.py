"""Host tensors side by side: where they lie, what they count for, and the copies that a bucket of them takes."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fxoffload.effects import Tier
from fxoffload.layout import part_of, side_by_side
from fxoffload.runtime.host_memory import HostMemory
from fxoffload.runtime.transfers import Recorded, StreamEngine, SynchronousEngine

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")


def sources() -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3).t(), torch.arange(300, dtype=torch.bfloat16), torch.tensor([7], dtype=torch.int64)]


def housed(memory: HostMemory, tier: Tier = Tier.PAGEABLE) -> list[torch.Tensor]:
    like = sources()
    return [place.copy_(one) for place, one in zip(memory.empty_together(like, tier), like)]


def in_bucket(engine: SynchronousEngine, src: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    flat = engine.swap_in_many(src)
    offsets, n_bytes = side_by_side(s.untyped_storage().nbytes() for s in src)
    assert flat.nbytes == n_bytes
    return [part_of(flat, offset, s.shape, s.stride(), s.dtype) for offset, s in zip(offsets, src)]


@pytest.fixture(params=[Tier.PAGEABLE, Tier.PINNED, Tier.DISK], ids=str)
def tier(request: pytest.FixtureRequest) -> Tier:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def memory(tmp_path: Path) -> HostMemory:
    return HostMemory(disk_dir=str(tmp_path), disk_bytes=1 << 16)


def test_members_lie_in_order_at_the_offsets_of_a_bucket_and_own_their_storage(memory: HostMemory, tier: Tier) -> None:
    members = housed(memory, tier)
    addresses = [m.data_ptr() for m in members]
    assert [a - addresses[0] for a in addresses] == [0, 512, 1536] and addresses[0] % 4096 == 0
    assert [m.untyped_storage().nbytes() for m in members] == [24, 600, 8]
    assert [m.stride() for m in members] == [s.stride() for s in sources()]
    assert all(map(torch.equal, members, sources())) and all(map(memory.owns, members))


def test_a_bucket_of_neighbours_is_one_copy_and_bit_equal(memory: HostMemory, tier: Tier) -> None:
    engine = SynchronousEngine(CPU, memory)
    assert all(map(torch.equal, in_bucket(engine, housed(memory, tier)), sources()))
    assert engine.copies == {"h2d": 1} and engine.moved_bytes == {"h2d": 2048}


@pytest.mark.parametrize(("order", "copies"), [((0, 1, 2), 1), ((1, 2), 1), ((0, 1), 1), ((2, 1, 0), 3), ((0, 2), 2), ((1, 2, 0), 2), ((1, 1), 2)])
def test_members_that_follow_each_other_in_both_places_are_one_copy(memory: HostMemory, order: tuple[int, ...], copies: int) -> None:
    engine, members = SynchronousEngine(CPU, memory), housed(memory)
    got = in_bucket(engine, [members[i] for i in order])
    assert all(map(torch.equal, got, (sources()[i] for i in order))) and engine.copies["h2d"] == copies


def test_a_member_that_was_moved_away_is_read_where_it_is(memory: HostMemory) -> None:
    engine, members = SynchronousEngine(CPU, memory), housed(memory)
    members[1].data = torch.arange(300, dtype=torch.bfloat16) + 1
    got = in_bucket(engine, members)
    assert torch.equal(got[1], sources()[1] + 1) and torch.equal(got[2], sources()[2]) and engine.copies["h2d"] == 3


def test_sources_of_any_kind_make_a_bucket(memory: HostMemory) -> None:
    """Views into larger memory, which no arena holds."""
    engine, whole = SynchronousEngine(CPU, memory), torch.arange(100.0)
    flat = engine.swap_in_many([whole[10:20], whole.reshape(10, 10)[:, 3]])
    assert torch.equal(part_of(flat, 0, (10,), (1,), torch.float32), whole[10:20])
    assert torch.equal(part_of(flat, 512, (10,), (10,), torch.float32), whole.reshape(10, 10)[:, 3])
    assert engine.copies["h2d"] == 2


def test_two_arenas_are_two_copies_even_where_they_touch(memory: HostMemory) -> None:
    engine = SynchronousEngine(CPU, memory)
    memory.reserve_disk(1 << 14)
    like = [torch.zeros(1024)]
    (first,), (second,) = memory.empty_together(like, Tier.DISK), memory.empty_together(like, Tier.DISK)
    assert second.data_ptr() - first.data_ptr() == 4096, "the two are neighbours in the file"
    in_bucket(engine, [first, second])
    assert engine.copies["h2d"] == 2


def test_an_arena_counts_what_it_takes_and_goes_with_its_last_member(memory: HostMemory, tier: Tier) -> None:
    members = housed(memory, tier)
    assert memory.live_bytes[tier] == memory.peak_bytes[tier] == 2048
    del members[0]
    gc.collect()
    assert memory.live_bytes[tier] == 1536 and memory._arenas
    members.clear()
    gc.collect()
    assert memory.live_bytes[tier] == 0 and not memory._arenas


def test_a_freed_arena_is_given_out_again(memory: HostMemory) -> None:
    memory.reserve_disk(4096)
    for _ in range(3):
        members = housed(memory, Tier.DISK)
        del members
        gc.collect()
    assert len(memory._disk) == 1


def test_members_are_saved_copied_and_pickled_each_for_itself(memory: HostMemory, tmp_path: Path) -> None:
    members = {str(i): member for i, member in enumerate(housed(memory))}
    safetensors.torch.save_file({"1": members["1"], "2": members["2"]}, tmp_path / "file")
    loaded = safetensors.torch.load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], members[name]) for name in loaded)
    stream = io.BytesIO()
    torch.save(members["2"], stream)
    assert len(stream.getvalue()) < 2048
    twin = copy.deepcopy(members["1"])
    assert twin.untyped_storage().nbytes() == 600 and torch.equal(twin, members["1"])


class Streams:
    """A device module whose streams run at once and whose events are written down."""

    def __init__(self) -> None:
        self.recorded = self.synchronized = 0
        self.waited: list[object] = []

    def Stream(self, device: torch.device) -> Streams:
        return self

    def Event(self) -> Streams:
        return self

    def current_stream(self, device: torch.device) -> Streams:
        return self

    def stream(self, stream: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def record(self, stream: object) -> None:
        self.recorded += 1

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        self.synchronized += 1


def test_a_step_waits_once_for_what_goes_to_the_host_and_only_a_caller_who_writes_for_what_left_it(
        memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    engine, weight = StreamEngine(CPU, memory), torch.ones(3)
    engine.swap_in(weight)
    engine.finish()
    assert streams.synchronized == 0, "nothing went to the host"
    for _ in range(2):
        engine.swap_out(weight, Tier.PAGEABLE)
    engine.finish()
    engine.finish()
    assert streams.synchronized == 1
    engine.settle()
    engine.settle()
    assert streams.synchronized == 2
    engine.replayed(Recorded(Counter(h2d=12), Counter(h2d=1)))
    engine.finish()
    assert streams.synchronized == 2 and engine.moved_bytes["h2d"] == 24
    engine.replayed(Recorded(Counter(d2h=12), Counter(d2h=1), [weight]))
    engine.finish()
    assert streams.synchronized == 3


def test_an_engine_with_streams_ends_a_bucket_with_one_event_and_holds_its_sources_until_the_wait(
        memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    engine, members = StreamEngine(CPU, memory), housed(memory)
    apart = [*members, torch.ones(3)]
    transfer = engine.swap_in_many(apart)
    assert (engine.copies["h2d"], streams.recorded, engine.moved_bytes["h2d"]) == (2, 1, 2048 + 512)
    assert list(transfer.borrowed) == apart
    flat = engine.wait(transfer)
    assert len(streams.waited) == 1 and not transfer.borrowed
    assert torch.equal(part_of(flat, 512, (300,), (1,), torch.bfloat16), sources()[1])
    engine.settle()
    assert engine._last_in is None
