from __future__ import annotations

import samples

from fxoffload import text
from fxoffload.effects import Tier
from fxoffload.graph import Bounds, by_name
from fxoffload.liveness import Kind, Liveness, base_nodes, live_curve, liveness


def live_of(lines: str, bounds: Bounds | None = None) -> Liveness:
    return liveness(text.parse(f'graph "g" (s0 <= 4)\n{lines}'), bounds or Bounds({"s0": 4}))


def last_use(live: Liveness) -> dict[str, str]:
    names = [node.meta["fxo"].name for node in live.nodes]
    return {storage.name: names[index] for storage, index in live.last.items()}


def test_views_waits_and_elements_share_the_storage_of_their_source() -> None:
    live = live_of(
        "%w: f32[4,4]@pinned = input\n%i: f32[4,4] = fxo.swap_in %w, device\n%r: f32[4,4] = fxo.wait %i\n%v: f32[16] = aten.view %r, [16]\n"
        "%p: (f32[8],f32[8]) = aten.split.Tensor %v, 8\n%e: f32[8] = getitem %p, 1\nreturn (%e)"
    )
    nodes = by_name(live.nodes[0].graph)
    assert {live.of[nodes[name]] for name in ("i", "r", "v", "p", "e")} == {live.of[nodes["i"]]}
    assert [s.name for s in live.of[nodes["e"]]] == ["i"]


def test_an_element_after_a_none_has_its_own_storage() -> None:
    live = live_of(
        "%x: f32[4,8] = input\n%m: f32[4,1] = input\n"
        "%b: (none,f32[8],f32[16]) = aten.native_layer_norm_backward %x, %x, [8], %m, %m, none, none, [false, true, true]\n"
        "%n = getitem %b, 0\n%w: f32[8] = getitem %b, 1\n%c: f32[16] = getitem %b, 2\nreturn (%w)"
    )
    nodes = by_name(live.nodes[0].graph)
    assert [(s.name, s.n_bytes) for s in live.of[nodes["w"]]] == [("b:1", 32)]
    assert [(s.name, s.n_bytes) for s in live.of[nodes["c"]]] == [("b:2", 64)]
    assert {s.name for s in live.escapes if not s.is_input} == {"b:1"}


def test_a_wait_is_the_last_use_of_what_its_transfer_borrows() -> None:
    live = live_of('%x: f32[8] = input\n%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%b: f32[8] = aten.neg %x\n%h: f32[8]@pinned = fxo.wait %o\nreturn (%h)')
    assert last_use(live)["a"] == "h"


def test_parts_share_the_storage_of_their_bucket_and_its_wait_is_the_last_use_of_every_source() -> None:
    live = live_of(samples.BUCKETS.split("\n", 1)[1])
    nodes = by_name(live.nodes[0].graph)
    assert {live.of[nodes[name]] for name in ("bucket#0/in", "bucket#0", "w@0", "u@0")} == {live.of[nodes["bucket#0/in"]]}
    assert last_use(live)["w"] == last_use(live)["u"] == "bucket#1"
    assert last_use(live)["bucket#0/in"] == "bucket#0/release"
    (storage,) = live.of[nodes["u@1"]]
    assert (storage.n_bytes, storage.tier, storage.kind) == (1024, Tier.DEVICE, Kind.PARAMETER)
    assert base_nodes(live)[storage] is nodes["bucket#1/in"]


def test_bytes_are_those_at_the_maxima() -> None:
    live = live_of("%x: f32[s0,8] = input\n%a: bf16[s0,8] = aten.relu %x\nreturn (%a)", Bounds({"s0": 3}))
    assert {s.name: s.n_bytes for s in live.first} == {"x": 96, "a": 48}


def test_kinds_follow_parameters_and_the_border() -> None:
    live = liveness(text.parse(samples.LOWERED), Bounds({"s0": 4}))
    kinds = {s.name: s.kind for s in live.first}
    assert (kinds["w"], kinds["w@0/in"], kinds["w@1/in"]) == (Kind.PARAMETER,) * 3
    assert (kinds["a"], kinds["a^0/out"], kinds["a@0/in"]) == (Kind.ACTIVATION,) * 3
    assert (kinds["t"], kinds["gh"], kinds["w.grad/out"]) == (Kind.GRADIENT,) * 3


def test_tiers_come_from_the_op_that_makes_the_bytes() -> None:
    host = '%x: f32[8] = input\n%o: f32[8]@disk = fxo.swap_out %x, host, "disk"\n%w: f32[8]@disk = fxo.wait %o\n'
    live = live_of(host + "%v: f32[8]@disk = aten.view %w, [8]\n%c: f32[8]@pageable = aten.relu %v\n%i: f32[8] = fxo.gather %c, device\nreturn (%i)")
    assert {s.name: s.tier for s in live.first} == {"x": Tier.DEVICE, "o": Tier.DISK, "c": Tier.PAGEABLE, "i": Tier.DEVICE}


def test_an_op_that_reads_a_host_input_will_run_on_the_device_once_it_is_gathered() -> None:
    live = live_of("%w: f32[8]@disk = input\n%c: f32[8] = aten.relu %w\nreturn (%c)")
    assert {s.name: s.tier for s in live.first} == {"w": Tier.DISK, "c": Tier.DEVICE}


def test_inputs_and_returned_values_live_to_the_end() -> None:
    live = live_of("%x: f32[8] = input\n%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\n%v: f32[2,4] = aten.view %b, [2, 4]\nreturn (%v)")
    assert {s.name for s in live.escapes} == {"x", "b"}
    assert live_curve(live).total_bytes == (32, 64, 96, 64, 64)


def test_a_module_constant_is_an_input() -> None:
    live = live_of('%c: f32[8] = attr "constant"\n%a: f32[8] = aten.neg %c\nreturn (%a)')
    assert [s.is_input for s in live.first] == [True, False]


def test_elements_that_no_getitem_takes_have_no_base_node() -> None:
    live = live_of("%x: f32[4,8] = input\n%n: (f32[4,8],f32[4,1],f32[4,1]) = aten.native_layer_norm %x, [8], none, none, 1e-05\n%y: f32[4,8] = getitem %n, 0\nreturn (%y)")
    assert {s.name: node.meta["fxo"].name for s, node in base_nodes(live).items()} == {"x": "x", "n:0": "y"}
