from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxoffload import ops
from fxoffload.effects import Alloc, Await, Borrow, Channel, Free, Read, Tier

CPU = torch.device("cpu")

# What the design gives every op: effects, channel, logical or not, may be removed when unused or not.
EXPECTED = {
    "gather": ((Read("src"), Alloc("result", Tier.DEVICE)), Channel.H2D, True, True),
    "sink": ((Read("src"), Alloc("result", Tier.PINNED)), Channel.D2H, True, True),
    "checkpoint": ((Read("src"),), Channel.COMPUTE, True, True),
    "swap_in": ((Borrow("src"), Alloc("result", Tier.DEVICE, pending=True)), Channel.H2D, False, True),
    "swap_out": ((Borrow("src"), Alloc("result", "tier", pending=True)), Channel.D2H, False, True),
    "swap_in_many": ((Borrow("src"), Alloc("result", Tier.DEVICE, pending=True)), Channel.H2D, False, True),
    "lookup": ((Read("table"), Read("indices"), Alloc("result", Tier.DEVICE)), Channel.COMPUTE, False, True),
    "part": ((Read("flat"),), Channel.COMPUTE, False, True),
    "wait": ((Await("src"),), Channel.COMPUTE, False, True),
    "release": ((Free("src"),), Channel.COMPUTE, False, False),
    "rng_state": ((Alloc("result", Tier.PAGEABLE),), Channel.HOST, False, False),
    "swap_rng_state": ((Read("state"), Alloc("result", Tier.PAGEABLE)), Channel.HOST, False, False),
    "backward": ((), Channel.COMPUTE, False, False),
}


def test_every_op_has_the_effects_the_design_gives_it() -> None:
    got = {spec.name: (spec.effects, spec.channel, spec.logical, spec.pure) for spec in ops.SPECS.values()}
    assert got == EXPECTED


def test_effects_name_arguments_of_the_schema_or_the_result() -> None:
    for spec in ops.SPECS.values():
        arguments = {argument.name for argument in spec.op._schema.arguments}
        for effect in spec.effects:
            assert effect.value in arguments | {"result"}
            if isinstance(effect, Alloc) and not isinstance(effect.tier, Tier):
                assert effect.tier in arguments
        assert spec.alias_of is None or spec.alias_of in arguments


@pytest.mark.parametrize("op", [ops.gather, ops.sink, ops.swap_in])
def test_a_copy_on_one_device_is_a_new_tensor_with_the_same_layout(op: torch._ops.OpOverload) -> None:
    source = torch.arange(6.0).reshape(2, 3).t()
    copied = op(source, CPU)
    assert torch.equal(copied, source) and copied.stride() == source.stride()
    assert copied.data_ptr() != source.data_ptr()


def bucket_members() -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3).t(), torch.arange(300, dtype=torch.bfloat16), torch.tensor([True, False]), torch.ones(1, 1, 2)]


def test_a_bucket_is_one_memory_and_each_part_of_it_is_its_member_at_an_aligned_offset() -> None:
    members = bucket_members()
    flat = ops.swap_in_many(members, CPU)
    assert (flat.dtype, flat.shape) == (torch.uint8, (512 + 1024 + 512 + 512,))
    for member, offset in zip(members, (0, 512, 1536, 2048)):
        part = ops.part(flat, offset, member.shape, member.stride(), member.dtype)
        assert torch.equal(part, member) and part.stride() == member.stride() and part.dtype is member.dtype
        assert part.data_ptr() == flat.data_ptr() + offset


def test_a_fake_bucket_has_the_size_of_a_real_one() -> None:
    real = ops.swap_in_many(bucket_members(), CPU)
    with FakeTensorMode() as mode:
        fake = ops.swap_in_many([mode.from_tensor(member) for member in bucket_members()], CPU)
        part = ops.part(fake, 512, [10, 30], [30, 1], torch.bfloat16)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    assert (part.shape, part.dtype, part.untyped_storage().nbytes()) == ((10, 30), torch.bfloat16, real.nbytes)


def test_a_fake_copy_is_on_the_device_it_names() -> None:
    with FakeTensorMode():
        source = torch.empty(2, 3)
        assert ops.swap_out(source, torch.device("meta"), "pinned").device == torch.device("meta")


@pytest.mark.parametrize("op", [ops.wait, ops.checkpoint])
def test_an_alias_shares_its_sources_memory(op: torch._ops.OpOverload) -> None:
    source = torch.ones(3)
    assert op(source).data_ptr() == source.data_ptr()


def test_a_replayed_generator_draws_the_same_numbers_and_returns_to_its_place() -> None:
    torch.manual_seed(1)
    state = ops.rng_state(CPU)
    first = torch.rand(4)
    now = ops.swap_rng_state(state, CPU)
    assert torch.equal(torch.rand(4), first)
    ops.swap_rng_state(now, CPU)
    follows = torch.rand(4)
    torch.manual_seed(1)
    torch.rand(4)
    assert torch.equal(torch.rand(4), follows)
    assert state.numel() <= ops.RNG_STATE_BYTES


def test_dead_code_elimination_keeps_memory_nodes_with_effects_and_drops_pure_ones() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(ops.swap_in, (x, CPU))
    graph.call_function(ops.release, (x,))
    graph.call_function(ops.backward)
    graph.output(x)
    graph.eliminate_dead_code()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ops.release, ops.backward]


def test_an_argument_is_found_by_position_keyword_or_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(ops.swap_out, (x,), {"device": CPU, "tier": "pinned"})
    spec = ops.spec_of(node)
    assert spec is not None and ops.spec_of(x) is None
    assert (spec.argument(node, "src"), spec.argument(node, "tier")) == (x, "pinned")
    assert spec.nodes(node, "src") == (x,) and spec.nodes(node, "tier") == ()
    many = graph.call_function(ops.swap_in_many, ([x, node], CPU))
    assert ops.SPECS[ops.swap_in_many].nodes(many, "src") == (x, node)
    with pytest.raises(KeyError, match="swap_out has no argument 'speed'"):
        spec.argument(node, "speed")
