"""Memory planned in pages: places that need no more than is live, and steps whose values lie in pieces, at addresses of their own."""

from __future__ import annotations

import ctypes
import lzma
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Row, fault, rows
from test_offsets import lifetimes
from zoo import llama

import fxoffload
from fxoffload import text
from fxoffload.errors import PlanError, VerifyError
from fxoffload.footprint import Footprint
from fxoffload.graph import info
from fxoffload.machine import load_machine
from fxoffload.offsets import Lifetime, live_bytes
from fxoffload.pages import place
from fxoffload.runtime.cuda_pages import CudaPages, page_bytes_of
from fxoffload.runtime.device_arena import DeviceArena, for_device
from fxoffload.testing.mapped_pages import MappedPages
from fxoffload.testing.simulated_device import SimulatedDevice
from fxoffload.verify import verify

PAGE_BYTES = 4096


@given(st.lists(lifetimes(), max_size=40), st.sampled_from([64, 512, 1024]))
@settings(deadline=None)
def test_what_is_there_at_the_same_time_has_no_byte_in_common(found: list[Lifetime], page_bytes: int) -> None:
    places, n_bytes = place(found, page_bytes)
    whole = []
    for one, runs in zip(found, places, strict=True):
        assert sum(n for _, n in runs) >= one.n_bytes and all(0 <= offset and offset + n <= n_bytes for offset, n in runs)
        if len(runs) > 1 or runs[0][1] % page_bytes == 0:
            assert all(offset % page_bytes == n % page_bytes == 0 for offset, n in runs)
            whole.append(Lifetime(one.begin, one.end, sum(n for _, n in runs)))
    for i, one in enumerate(found):
        for k in range(i):
            if one.begin < found[k].end and found[k].begin < one.end:
                assert all(a + n <= b or b + m <= a for a, n in places[i] for b, m in places[k]), (one, found[k])
    assert place(found, page_bytes) == (places, n_bytes)


@given(st.lists(st.builds(lambda one, n: Lifetime(one.begin, one.end, n * PAGE_BYTES), lifetimes(), st.integers(1, 9)), max_size=40))
@settings(deadline=None)
def test_values_of_whole_pages_need_what_is_live_at_once(found: list[Lifetime]) -> None:
    assert place(found, PAGE_BYTES)[1] == -(-live_bytes(found) // PAGE_BYTES) * PAGE_BYTES


def test_a_step_of_8b_width_needs_little_more_than_is_live_and_few_second_addresses() -> None:
    found = [Lifetime(*map(int, row.split(","))) for row in lzma.decompress(
        (Path(__file__).parent / "lifetimes_8b_lora.csv.xz").read_bytes()).decode().split()[1:]]
    places, n_bytes = place(found, 2 << 20)
    assert n_bytes <= 1.002 * live_bytes(found)
    assert sum(len(runs) > 1 for runs in places) < len(places) / 20


SPLIT = """\
graph "split"
%x: f32[1024] = input {{role=batch}}
%a: f32[1024] = aten.neg %x {{offset=0}}
%b: f32[2048] = aten.cat [%a, %x] {{offset=4096, pages=[[4096, {first}], [{second}, 4096]]}}
fxo.release %a
%c: f32[2048] = aten.neg %b {{offset=16384}}
fxo.release %b
%d: f32[2048] = aten.neg %c
fxo.release %c
return (%d)
"""


def test_pieces_are_part_of_a_graphs_text_and_are_verified() -> None:
    graph = text.parse(SPLIT.format(first=4096, second=12288))
    assert [info(node).pages for node in graph.nodes if info(node).pages] == [((4096, 4096), (12288, 4096))]
    assert text.render(text.parse(text.render(graph))) == text.render(graph)
    verify(graph, facts=frozenset({"placed"}))
    for first, second, message in ((4096, 0, "overlaps"), (4096, 16384, "overlaps"), (2048, 12288, "fewer in its pages")):
        with pytest.raises(VerifyError, match=message):
            verify(text.parse(SPLIT.format(first=first, second=second)), facts=frozenset({"placed"}))


def test_pages_have_several_addresses() -> None:
    pages = MappedPages(4 * PAGE_BYTES, 1 << 30, [[(PAGE_BYTES, PAGE_BYTES), (3 * PAGE_BYTES, PAGE_BYTES)]])
    whole, alias = (
        torch.frombuffer((ctypes.c_ubyte * (n * PAGE_BYTES)).from_address(pages.address + begin), dtype=torch.uint8)
        for n, begin in ((4, 0), (2, 1 << 30)))
    alias.copy_(torch.arange(2 * PAGE_BYTES) // PAGE_BYTES + 1)
    assert whole.view(4, PAGE_BYTES)[:, ::1024].tolist() == [[0] * 4, [1] * 4, [0] * 4, [2] * 4]
    del whole, alias
    pages.close()


@pytest.fixture
def by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has its memory planned in pages."""
    monkeypatch.setattr(Footprint, "planned", staticmethod(lambda machine: Footprint(by_offsets=True, page_bytes=PAGE_BYTES)))


@pytest.mark.integration
@pytest.mark.usefixtures("by_pages")
@pytest.mark.parametrize("family", [
    "llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "lora_bf16", "bert", "t5", "mamba", "qwen3_moe", "autocast"))])
def test_five_steps_in_pages_are_bit_equal_and_take_what_was_predicted(
    family: str, simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    aliases = []
    allocate = DeviceArena._allocate
    monkeypatch.setattr(DeviceArena, "_allocate", lambda arena, n: (allocate(arena, n), aliases.append(len(arena._aliases)))[0])
    found: list[Row] = list(rows(family, "fxsim", simulated_device, (1.0, 0.5)))
    for row in found:
        assert not row.refused and not fault(row, found[0]), (fault(row, found[0]), row)
    assert max(aliases) > 0, "nothing lay in pieces"


@pytest.mark.integration
@pytest.mark.usefixtures("by_pages")
def test_what_the_last_step_left_stays_mapped_until_nothing_looks_into_it(simulated_device: SimulatedDevice) -> None:
    made = llama()
    model = fxoffload.compile(made.model, made.batch, device="fxsim", device_budget="500KiB", dynamic=False)
    model(**made.batch).loss.backward()
    arena = model.fxoffload.arena
    assert arena.n_bytes > 0 and arena._mapped is not None and arena.take()
    value = arena.strided(0, (4,), (1,), torch.float32)
    expected, before = value.cpu(), simulated_device.memory_allocated()
    model.fxoffload.close()
    assert torch.equal(value.cpu(), expected) and DeviceArena._left
    held = simulated_device.memory_allocated()
    del value
    DeviceArena._close_left()
    assert not DeviceArena._left and simulated_device.memory_allocated() <= held - arena._held_bytes < before


@pytest.mark.integration
def test_where_a_device_cannot_map_pages_twice_a_line_says_so_and_values_lie_in_one_piece(
    simulated_device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, machine = torch.device("fxsim"), replace(load_machine("h200"), page_bytes=PAGE_BYTES)
    assert for_device(machine, device) is machine and not caplog.records
    monkeypatch.delattr(type(torch.get_device_module("fxsim")), "map_pages")
    assert for_device(machine, device) == replace(machine, page_bytes=None)
    assert "fxsim cannot map pages of 4096 bytes at several addresses: each value is planned to lie in one piece" in caplog.text
    made = llama()
    model = fxoffload.compile(made.model, made.batch, device="fxsim", device_budget="200MiB", machine=machine, dynamic=False)
    model(**made.batch).loss.backward()
    arena = model.fxoffload.arena
    assert arena.n_bytes > 0 and arena._mapped is None and not arena._aliases


@pytest.mark.gpu
def test_pages_of_a_card_are_counted_limited_and_given_back() -> None:
    device, page = torch.device("cuda", torch.cuda.current_device()), 2 << 20
    assert page_bytes_of(device) == page
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((before + (256 << 20)) / total)
    try:
        pages = CudaPages(device, 100 * page, 1 << 30, [[(3 * page, 2 * page), (0, page)], [(99 * page, page)]])
        assert torch.cuda.memory_reserved() - before == 100 * page
        storage = torch._C._construct_storage_from_data_pointer(pages.address, device, pages.n_bytes)

        def words(offset: int, n_pages: int) -> torch.Tensor:
            return torch.empty(0, dtype=torch.int32, device=device).set_(storage, offset // 4, (n_pages, page // 4), (page // 4, 1))

        whole = words(0, 100)
        whole.copy_(torch.arange(100, dtype=torch.int32, device=device)[:, None].expand_as(whole))
        assert words(1 << 30, 4).amax(1).tolist() == words(1 << 30, 4).amin(1).tolist() == [3, 4, 0, 99]
        words(1 << 30, 4).mul_(2)
        assert whole[:, 7].tolist() == [0, 1, 2, 6, 8, *range(5, 99), 198]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(100 << 20, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            CudaPages(device, 50 * page, 1 << 30, [])
        del whole, storage
        pages.close()
        assert torch.cuda.memory_reserved() == before
        with pytest.raises(PlanError, match="cuMemMap: the driver's status is"):
            CudaPages(device, 20 * page, (1 << 30) + 512, [[(0, page)]])
        assert torch.cuda.memory_reserved() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_pages_are_taken_while_other_threads_use_the_allocator() -> None:
    device, done = torch.device("cuda", torch.cuda.current_device()), threading.Event()

    def others() -> None:
        while not done.is_set():
            del [torch.empty(4 << 20, device=device) for _ in range(8)][:]

    threads = [threading.Thread(target=others) for _ in range(4)]
    for one in threads:
        one.start()
    try:
        for _ in range(20):
            CudaPages(device, 64 << 20, 1 << 30, [[(0, 4 << 20)]]).close()
    finally:
        done.set()
        for one in threads:
            one.join()


def test_a_machine_file_may_say_how_large_pages_are() -> None:
    assert load_machine("h200").page_bytes == 2 << 20 and load_machine("cpu").page_bytes is None
    assert Footprint(by_offsets=True, page_bytes=PAGE_BYTES).needed_bytes(1280) == 1290
    for budget in (0, 1, 1290, 10**9 + 7):
        footprint = Footprint(by_offsets=True, page_bytes=PAGE_BYTES)
        assert footprint.needed_bytes(footprint.live_bytes(budget)) <= budget
