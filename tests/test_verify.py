from __future__ import annotations

from collections.abc import Callable

import pytest
import samples
import torch
import torch.fx as fx
from hypothesis import HealthCheck, assume, given, settings

from fxoffload import ops, text
from fxoffload.errors import VerifyError
from fxoffload.graph import Bounds, border_of, by_name, output_of
from fxoffload.liveness import Kind, live_curve, liveness
from fxoffload.effects import Tier
from fxoffload.pipeline import Context, get_pass
from fxoffload.twin import run_twin
from fxoffload.verify import FACTS, holds, verify

# The samples' values are too small to be placed, but for the buckets.
ALL_FACTS = frozenset(FACTS) - {"placed"}
BOUNDS = Bounds({"s0": 4})
INPUTS = '%x: f32[8] = input {role=batch}\n%w: f32[8]@pinned = input {role=parameter, fqn="w"}\n'
START = "%a: f32[8] = fxo.swap_in %w, device\n"
READY = "%b: f32[8] = fxo.wait %a\n"


def graph_of(lines: str) -> fx.Graph:
    return text.parse('graph "g"\n' + INPUTS + lines)


def complaint(lines: str, facts: frozenset[str] = frozenset(), budget: int | None = None) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(graph_of(lines), BOUNDS, facts, budget)
    return str(caught.value)


# --- the samples -------------------------------------------------------------------------------------------------------------


def test_the_lowered_sample_keeps_every_fact() -> None:
    verify(text.parse(samples.LOWERED), BOUNDS, ALL_FACTS, 1 << 20)


def test_the_lowered_sample_peaks_where_it_says_with_the_bytes_it_says() -> None:
    curve = verify(text.parse(samples.LOWERED), BOUNDS, frozenset({"released"}))
    row, weight = 4 * 8 * 4, 8 * 8 * 4
    inputs = 2 * row
    # the relu's backward reads g and the returned a, makes gh, and the weight is on its way; y is returned
    assert (curve.peak_bytes, curve.peak_node) == (inputs + 4 * row + weight, "gh")
    assert curve.total_bytes[-1] == inputs + 2 * row


def test_the_lowered_sample_computes_what_plain_autograd_computes() -> None:
    inputs = samples.sample_inputs()
    (y,), (gx, gw) = run_twin(text.parse(samples.LOWERED), inputs)  # type: ignore[misc]
    for got, expected in zip((y, gx, gw), samples.sample_results(*inputs)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_sample_with_buckets_keeps_every_fact_and_computes_what_plain_autograd_computes() -> None:
    graph = text.parse(samples.BUCKETS)
    curve = verify(graph, BOUNDS, ALL_FACTS, 1 << 20)
    row, bucket = 4 * 8 * 4, 1024
    # all of a bucket is there while its last part is read: in forward beside x, h and y, in backward beside x, y, t, gh and ga
    assert (curve.total_bytes[11], curve.peak_bytes, curve.peak_node) == (3 * row + bucket, 5 * row + bucket, "ga")
    x, w, t = samples.sample_inputs()
    u = w[3] + 1
    (y,), (gx, _, _) = run_twin(graph, (x, w, u, t))  # type: ignore[misc]
    leaf = x.clone().requires_grad_()
    expected = (-leaf @ w) * u
    assert torch.equal(y, expected) and torch.equal(gx, torch.autograd.grad(expected, leaf, t)[0])


def test_a_bucket_round_trips_as_text_with_its_parts() -> None:
    graph = text.parse(samples.BUCKETS)
    again = text.parse(text.render(graph, BOUNDS))
    assert text.render(again, BOUNDS, columns=False) == samples.BUCKETS
    (first, _) = again.find_nodes(op="call_function", target=ops.swap_in_many)
    assert [n.meta["fxo"].name for n in first.all_input_nodes] == ["w", "u"]


def test_the_logical_sample_is_valid_but_not_lowered() -> None:
    graph = text.parse(samples.LOGICAL)
    verify(graph, BOUNDS, frozenset({"functional", "resident", "awaited"}))
    assert not holds(graph, BOUNDS, "lowered")


def test_the_logical_sample_returns_its_weights_gradient_on_the_host() -> None:
    live = liveness(text.parse(samples.LOGICAL), BOUNDS)
    (_, (gx, gw)) = output_of(live.nodes[0].graph).args[0]  # type: ignore[misc]
    assert [[s.tier for s in live.of[node]] for node in (gx, gw)] == [[Tier.DEVICE], [Tier.PINNED]]


def test_the_logical_sample_keeps_nothing_that_it_checkpoints() -> None:
    graph = get_pass("recompute").run(text.parse(samples.LOGICAL), Context(BOUNDS))
    live = liveness(graph, BOUNDS)
    border = live.index[border_of(graph)]  # type: ignore[index]
    kept = {s.name for s in live.first if not s.is_input and live.first[s] < border < live.last[s] and s not in live.escapes}
    assert "a" not in kept and "h" in kept
    inputs = samples.sample_inputs()
    (y,), (gx, gw) = run_twin(graph, inputs)  # type: ignore[misc]
    for got, expected in zip((y, gx, gw), samples.sample_results(*inputs)):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


# --- one rule, one test ------------------------------------------------------------------------------------------------------


def test_a_read_of_a_pending_value_is_refused() -> None:
    message = complaint(START + "%c: f32[8] = aten.relu %a\n" + READY + "return (%b, %c)")
    assert message.startswith("%c reads %a (32 B, device) before a wait: %a is pending")


def test_a_transfer_from_a_pending_value_is_refused() -> None:
    assert "%c reads %a" in complaint(START + '%c: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n' + READY + "%d: f32[8]@pinned = fxo.wait %c\nreturn (%d)")


def test_a_view_of_a_pending_value_is_no_read() -> None:
    verify(graph_of(START + "%v: f32[2,4] = aten.view %a, [2, 4]\n" + READY + "%c: f32[2,4] = aten.neg %v\nreturn (%c)"))


def test_a_read_of_a_released_value_is_refused() -> None:
    message = complaint("%a: f32[8] = aten.relu %x\nfxo.release %a\n%b: f32[8] = aten.neg %a\nreturn (%b)")
    assert message.startswith("%b reads %a (32 B, device), which %a/release has freed")


def test_a_read_through_a_view_of_a_released_value_is_refused() -> None:
    lines = "%a: f32[8] = aten.relu %x\n%v: f32[2,4] = aten.view %a, [2, 4]\nfxo.release %a\n%b: f32[2,4] = aten.neg %v\nreturn (%b)"
    assert complaint(lines).startswith("%b reads %a")


def test_a_view_of_a_released_value_is_refused() -> None:
    assert complaint("%a: f32[8] = aten.relu %x\nfxo.release %a\n%v: f32[2,4] = aten.view %a, [2, 4]\nreturn ()").startswith("%v reads %a")


def test_returning_a_released_value_is_refused() -> None:
    assert "%/output reads %a" in complaint("%a: f32[8] = aten.relu %x\nfxo.release %a\nreturn (%a)")


def test_a_release_while_a_transfer_borrows_is_refused() -> None:
    lines = '%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\nfxo.release %a\n%h: f32[8]@pinned = fxo.wait %o\nreturn (%h)'
    assert complaint(lines).startswith("%a/release releases %a (32 B, device) while %o borrows it")


def test_a_host_copy_released_between_swap_in_and_its_wait_is_refused() -> None:
    lines = (
        '%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%h: f32[8]@pinned = fxo.wait %o\n'
        "%i: f32[8] = fxo.swap_in %h, device\nfxo.release %o\n%b: f32[8] = fxo.wait %i\nreturn (%b)"
    )
    assert complaint(lines).startswith("%o/release releases %o (32 B, pinned) while %i borrows it")


BUCKET = '%u: f32[8]@pinned = input {role=parameter, fqn="u"}\n%i: u8[1024] = fxo.swap_in_many [%w, %u], device\n'
PART = "f32[8] = fxo.part %b, 512, [8], [1], f32\n"


def test_a_part_before_the_wait_is_refused() -> None:
    lines = BUCKET + "%p: f32[8] = fxo.part %i, 0, [8], [1], f32\n%b: u8[1024] = fxo.wait %i\nreturn (%p)"
    assert complaint(lines).startswith("%p reads %i (1.00 KiB, device) before a wait: %i is pending")


def test_a_bucket_released_before_its_last_part_is_read_is_refused() -> None:
    lines = BUCKET + f"%b: u8[1024] = fxo.wait %i\n%p: {PART}fxo.release %b\n%c: f32[8] = aten.neg %p\nreturn (%c)"
    assert complaint(lines).startswith("%c reads %i (1.00 KiB, device), which %b/release has freed")


def test_a_part_of_a_released_bucket_is_refused() -> None:
    lines = BUCKET + f"%b: u8[1024] = fxo.wait %i\nfxo.release %b\n%p: {PART}return ()"
    assert complaint(lines).startswith("%p reads %i (1.00 KiB, device), which %b/release has freed")


def test_every_source_of_a_bucket_is_borrowed_until_its_wait() -> None:
    sent = '%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%h: f32[8]@pinned = fxo.wait %o\n'
    for sources in ("%w, %h", "%h, %w"):
        start, wait = f"%i: u8[1024] = fxo.swap_in_many [{sources}], device\n", "%b: u8[1024] = fxo.wait %i\n"
        early = f"{sent}{start}fxo.release %o\n{wait}return (%b)"
        assert complaint(early).startswith("%o/release releases %o (32 B, pinned) while %i borrows it")
        verify(graph_of(f"{sent}{start}{wait}fxo.release %o\nreturn (%b)"), BOUNDS)


def test_a_bucket_that_nobody_awaits_is_refused() -> None:
    assert "ends with an open Transfer: nothing waits for %i" in complaint(BUCKET + "return ()")


def test_a_release_is_allowed_only_after_the_last_of_two_borrowers_is_awaited() -> None:
    lines = (
        '%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n'
        '%p: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%h: f32[8]@pinned = fxo.wait %o\n'
    )
    rest = "%q: f32[8]@pinned = fxo.wait %p\n"
    assert "while %p borrows it" in complaint(lines + "fxo.release %a\n" + rest + "return (%h, %q)")
    verify(graph_of(lines + rest + "fxo.release %a\nreturn (%h, %q)"))


def test_writing_into_a_value_that_a_transfer_borrows_is_refused() -> None:
    lines = '%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%b: f32[8] = aten.neg_ %a\n%h: f32[8]@pinned = fxo.wait %o\nreturn (%h)'
    assert complaint(lines).startswith("%b writes %a (32 B, device) while %o borrows it")


def test_a_second_wait_is_refused() -> None:
    message = complaint(START + READY + "%c: f32[8] = fxo.wait %a\nreturn (%b, %c)")
    assert message.startswith("%c awaits %a (32 B, device), which is not pending: %b has awaited it")


def test_a_wait_for_what_no_transfer_makes_is_refused() -> None:
    assert "no Transfer makes it" in complaint("%b: f32[8] = fxo.wait %x\nreturn (%b)")


def test_a_transfer_left_open_at_the_end_is_refused() -> None:
    message = complaint(START + "return ()")
    assert message.startswith("the program ends with an open Transfer: nothing waits for %a")


def test_a_second_release_is_refused() -> None:
    message = complaint('%a: f32[8] = aten.relu %x\nfxo.release %a\nfxo.release %a {name="again"}\nreturn ()')
    assert message.startswith("%again releases %a (32 B, device), which %a/release has freed")


def test_a_release_of_an_input_is_refused() -> None:
    assert complaint("fxo.release %x\nreturn ()").startswith("%x/release releases the input %x")


def test_a_release_of_a_pending_value_is_refused() -> None:
    assert complaint(START + "fxo.release %a\nreturn ()").startswith("%a/release releases %a (32 B, device) before a wait")


def test_a_device_op_on_a_host_value_is_refused() -> None:
    host = '%o: f32[8]@pinned = fxo.swap_out %x, host, "pinned"\n%h: f32[8]@pinned = fxo.wait %o\n'
    message = complaint(host + "%a: f32[8] = aten.mul.Tensor %x, %h\nreturn (%a)")
    assert message.startswith("%a reads %h on the host beside %x on the device")


def test_a_host_input_may_be_read_on_the_device_until_the_graph_claims_to_be_resident() -> None:
    lines = "%a: f32[8] = aten.mul.Tensor %x, %w\nreturn (%a)"
    verify(graph_of(lines))
    assert complaint(lines, frozenset({"resident"})).startswith("%a computes on %w, which is on the host")


def test_a_host_scalar_may_join_a_device_op() -> None:
    scalar = "%s: f32[] = input {role=buffer}\n" + '%o: f32[]@pageable = fxo.swap_out %s, host, "pageable"\n%h: f32[]@pageable = fxo.wait %o\n'
    verify(graph_of(scalar + "%a: f32[8] = aten.mul.Tensor %x, %h\nreturn (%a)"))


def test_asking_for_the_size_of_a_host_or_pending_value_is_no_read() -> None:
    verify(graph_of(START + "%n: int(8) = aten.sym_size.int %w, 0\n%m: int(8) = aten.sym_size.int %a, 0\n" + READY + "return (%b, %n, %m)"))


def test_more_bytes_than_the_budget_are_refused_at_the_peak() -> None:
    lines = "%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\n%c: f32[8] = aten.neg %b\nreturn (%c)"
    assert complaint(lines, budget=95).startswith("%b needs 96 bytes on the device, the budget is 95: 1 B too much")
    assert verify(graph_of(lines), device_budget_bytes=96).peak_bytes == 96


def test_a_use_before_the_definition_is_refused() -> None:
    graph = graph_of("%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\nreturn (%b)")
    nodes = by_name(graph)
    nodes["a"].prepend(nodes["b"])
    with pytest.raises(VerifyError, match="%b uses %a before it is defined"):
        verify(graph)


def test_two_nodes_of_one_name_are_refused() -> None:
    graph = graph_of("%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\nreturn (%b)")
    nodes = by_name(graph)
    nodes["b"].meta["fxo"] = nodes["a"].meta["fxo"]
    with pytest.raises(VerifyError, match="two nodes are called %a"):
        verify(graph)


def test_an_error_shows_the_lines_around_the_bad_one() -> None:
    lines = "%a: f32[8] = aten.relu %x\nfxo.release %a\n%b: f32[8] = aten.neg %a\n%c: f32[8] = aten.exp %b\nreturn (%c)"
    shown = complaint(lines).splitlines()[1:]
    assert shown == [
        "  %a: f32[8] = aten.relu %x",
        "  fxo.release %a",
        "> %b: f32[8] = aten.neg %a",
        "  %c: f32[8] = aten.exp %b",
        "  return (%c)",
    ]


def test_an_error_is_shown_even_beside_what_has_no_text() -> None:
    graph = graph_of("%a: f32[8] = aten.relu %x\nfxo.release %a\n%b: f32[8] = aten.neg %a\nreturn (%b)")
    with graph.inserting_before(by_name(graph)["b"]):
        graph.call_function(torch.ops.higher_order.cond, (True, None, None, []))
    with pytest.raises(VerifyError, match="cond"):
        verify(graph)


# --- facts -------------------------------------------------------------------------------------------------------------------


def test_functional_allows_writes_into_inputs_only_by_copy() -> None:
    verify(graph_of("%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.copy_ %x, %a\nreturn ()"), facts=frozenset({"functional"}))
    message = complaint("%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.add_.Tensor %a, %x\nreturn (%b)", frozenset({"functional"}))
    assert message.startswith("%b writes %a in place")


def test_resident_refuses_compute_on_the_host_that_the_machine_allows() -> None:
    lines = "%a: f32[8]@pageable = aten.relu %w\n%b: f32[8]@pinned = aten.view %w, [8]\nreturn (%a, %b)"
    verify(graph_of(lines))
    assert complaint(lines, frozenset({"resident"})).startswith("%a computes on %w")


@pytest.mark.parametrize("op", ["gather", "sink", "checkpoint"])
def test_lowered_refuses_logical_ops(op: str) -> None:
    lines = {
        "gather": "%a: f32[8] = fxo.gather %w, device\nreturn (%a)",
        "sink": "%a: f32[8]@pinned = fxo.sink %x, host\nreturn (%a)",
        "checkpoint": "%a: f32[8] = fxo.checkpoint %x\nreturn (%a)",
    }[op]
    assert complaint(lines, frozenset({"lowered"})).startswith(f"%a is a logical {op}")


def test_awaited_counts_the_waits_of_a_transfer_itself() -> None:
    lines = START + "%v: f32[2,4] = aten.view %a, [2, 4]\n%b: f32[2,4] = fxo.wait %v\nreturn (%b)"
    verify(graph_of(lines))
    assert complaint(lines, frozenset({"awaited"})).startswith("%a has 0 waits instead of one")


PLACED = """\
%a: f32[256] = aten.relu %big {{offset={a}}}
%b: f32[256] = aten.neg %a {{offset={b}}}
fxo.release %a
%c: f32[256] = aten.relu %b {{offset={c}}}
fxo.release %b
return ()"""


def placed(a: int, b: int, c: int) -> str:
    return graph_text(PLACED.format(a=a, b=b, c=c))


def graph_text(lines: str) -> str:
    return f'graph "placed"\n%big: f32[256] = input {{role=batch}}\n{lines}\n'


def test_placed_wants_an_offset_for_each_value_and_no_overlap_while_both_are_there() -> None:
    facts = frozenset({"placed"})
    verify(text.parse(placed(0, 1024, 0)), facts=facts)
    verify(text.parse(placed(4096, 0, 1024)), facts=facts)
    with pytest.raises(VerifyError, match=r"%b \(1.00 KiB, device\) at 512 overlaps %a, which lies from 0 to 1024"):
        verify(text.parse(placed(0, 512, 2048)), facts=facts)
    with pytest.raises(VerifyError, match="%c .* at 1536 overlaps %b, which lies from 1024 to 2048"):
        verify(text.parse(placed(0, 1024, 1536)), facts=facts)
    with pytest.raises(VerifyError, match="of %b has no offset"):
        verify(text.parse(graph_text("%a: f32[256] = aten.relu %big\n%b: f32[256] = aten.neg %a\nreturn ()")), facts=facts)


def test_released_wants_one_release_for_each_device_value_that_is_not_returned() -> None:
    lines = "%a: f32[8] = aten.relu %x\n%b: f32[8] = aten.neg %a\nreturn (%b)"
    assert complaint(lines, frozenset({"released"})).startswith("%a (32 B, device) of %a has 0 releases instead of one")
    verify(graph_of(lines.replace("return", "fxo.release %a\nreturn")), facts=frozenset({"released"}))


def test_fits_needs_a_budget() -> None:
    with pytest.raises(ValueError, match="needs a device budget"):
        verify(graph_of("return ()"), facts=frozenset({"fits"}))


def test_an_unknown_fact_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="unknown fact 'loverd'"):
        verify(graph_of("return ()"), facts=frozenset({"loverd"}))


# --- the curve ---------------------------------------------------------------------------------------------------------------


def test_the_curve_is_the_same_by_last_use_and_by_release() -> None:
    """Where releases stand right after last uses, they and last uses say the same at every compute op."""
    graph = text.parse(samples.LOWERED)
    for node in graph.find_nodes(op="call_function", target=ops.release):
        graph.erase_node(node)
    implicit = verify(graph, BOUNDS)
    explicit = verify(text.parse(samples.LOWERED), BOUNDS)
    by_node = dict(zip(explicit.names, explicit.total_bytes))
    assert {name: by_node[name] for name in implicit.names} == dict(zip(implicit.names, implicit.total_bytes))


def test_the_curve_of_a_kind_sums_up_to_the_total() -> None:
    curve = verify(text.parse(samples.LOWERED), BOUNDS)
    assert curve.total_bytes == tuple(sum(column) for column in zip(*(curve.by_kind[kind] for kind in Kind)))


def test_the_curve_of_another_tier_counts_that_tier() -> None:
    curve = live_curve(liveness(text.parse(samples.LOWERED), BOUNDS), Tier.PINNED)
    assert curve.peak_bytes == 8 * 8 * 4 + max(4 * 8 * 4, 8 * 8 * 4)


# --- the verifier against the twin -------------------------------------------------------------------------------------------


def checked_against_twin(program: str, rewrite: Callable[[fx.Graph], fx.Graph] = lambda graph: graph) -> bool:
    """True when the verifier takes the program; then the twin must compute what its plain form computes."""
    try:
        graph = rewrite(text.parse(program))
        verify(graph)
    except (ValueError, VerifyError):
        return False
    inputs = [torch.full((4, 4), 0.25), torch.arange(16.0).reshape(4, 4) / 16]
    plain = fx.GraphModule({}, _without_memory_ops(text.parse(program)))
    torch.testing.assert_close(run_twin(graph, inputs), plain(*inputs), rtol=0, atol=0, equal_nan=True)
    return True


def _without_memory_ops(graph: fx.Graph) -> fx.Graph:
    for node in list(graph.nodes):
        if ops.spec_of(node) is not None:
            if node.args:
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
    return graph


@given(samples.programs(transfers=True))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_verifier_accepts_the_twin_computes_right(program: str) -> None:
    assume(checked_against_twin(program))


@given(samples.programs())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_inserted_releases_are_verified_and_change_no_result(program: str) -> None:
    release = get_pass("insert-release")
    assert checked_against_twin(program, lambda graph: release.run(graph, Context()))
    verify(release.run(text.parse(program), Context()), facts=frozenset({"released"}))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_captured_step_with_releases_computes_what_pytorch_computes_at_another_size(mode: str) -> None:
    graph, inputs, expected = samples.captured_step(mode)
    released = get_pass("insert-release").run(graph, Context(text.hint_bounds(graph)))
    verify(released, text.hint_bounds(graph), frozenset({"functional", "released"}))
    for got, want in zip(run_twin(released, inputs), expected):  # type: ignore[call-overload]
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# --- the twin ----------------------------------------------------------------------------------------------------------------


def twin(lines: str, w: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.ones(8)
    return run_twin(graph_of(lines), [x, x if w is None else w])[0]  # type: ignore[index, no-any-return]


def test_the_twin_shows_a_read_before_the_wait_as_nan() -> None:
    assert twin(START + "%c: f32[8] = aten.neg %a\n" + READY + "return (%c, %b)").isnan().all()


def test_the_twin_raises_for_integers_read_before_the_wait() -> None:
    with pytest.raises(VerifyError, match="integers of %a"):
        twin(START + "%c: f32[8] = aten.neg %a\n" + READY + "return (%c, %b)", torch.arange(8))


def test_the_twin_raises_for_a_read_of_released_memory() -> None:
    with pytest.raises(VerifyError, match="%b reads %a, which %a/release has released"):
        twin("%a: f32[8] = aten.relu %x\nfxo.release %a\n%b: f32[8] = aten.neg %a\nreturn (%b)")


def test_the_twin_raises_for_a_source_released_before_the_copy() -> None:
    with pytest.raises(VerifyError, match="%h reads %o, which %a/release has released"):
        twin('%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\nfxo.release %a\n%h: f32[8]@pinned = fxo.wait %o\nreturn (%h)')


def test_the_twin_raises_for_a_source_of_a_bucket_released_before_the_copy_and_for_a_part_read_before_it() -> None:
    sent = '%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%h: f32[8]@pinned = fxo.wait %o\n'
    start, wait = "%i: u8[1024] = fxo.swap_in_many [%w, %h], device\n", "%b: u8[1024] = fxo.wait %i\n"
    with pytest.raises(VerifyError, match="%b reads %i, which %o/release has released"):
        twin(f"{sent}{start}fxo.release %o\n{wait}return (%b)")
    with pytest.raises(VerifyError, match="%p reads the integers of %i before a wait"):
        twin(f"{sent}{start}%p: f32[8] = fxo.part %i, 0, [8], [1], f32\n{wait}return (%p)")
    part = "%p: f32[8] = fxo.part %b, 512, [8], [1], f32\n"
    assert twin(f"{sent}{start}{wait}{part}return (%p)").tolist() == [1.0] * 8


def test_the_twin_copies_at_the_wait_and_so_sees_a_write_in_between() -> None:
    assert (twin('%a: f32[8] = aten.relu %x\n%o: f32[8]@pinned = fxo.swap_out %a, host, "pinned"\n%b: f32[8] = aten.neg_ %a\n%h: f32[8]@pinned = fxo.wait %o\nreturn (%h)') == -1).all()


def test_the_twin_fills_released_memory_so_that_a_kept_view_turns_to_nan() -> None:
    graph = graph_of("%a: f32[8] = aten.relu %x\n%v: f32[2,4] = aten.view %a, [2, 4]\nfxo.release %a\nreturn ()")
    kept: list[torch.Tensor] = []
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = lambda a, shape: kept.append(a.view(shape))  # type: ignore[assignment]
    run_twin(graph, [torch.ones(8), torch.ones(8)])
    assert kept[0].isnan().all()


def test_the_twin_raises_for_a_transfer_left_open_and_a_wait_that_is_not_due() -> None:
    with pytest.raises(VerifyError, match="still open"):
        twin(START + "return ()")
    with pytest.raises(VerifyError, match="no open Transfer"):
        twin("%b: f32[8] = fxo.wait %x\nreturn (%b)")


def test_the_twin_wants_one_value_per_input() -> None:
    with pytest.raises(ValueError, match="2 inputs, 1 were given"):
        run_twin(graph_of("return ()"), [torch.ones(8)])
