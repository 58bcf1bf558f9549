"""executor="inductor": fused graphs plan, fit and train; op by op they give the bits of the ops they stand for, compiled they give its losses."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.fx as fx
from runs import FRACTIONS, Row, fault, rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from zoo import FAMILIES, llama, lora, qwen3

import fxoffload
from fxoffload import text
from fxoffload.api import captured, planning_options
from fxoffload.errors import PlanError
from fxoffload.fusion import fused, run_program
from fxoffload.graph import INFO, NodeInfo
from fxoffload.machine import load_machine
from fxoffload.pipeline import Context, get_pass
from fxoffload.runtime.fused import Form, FusedCall, kernel_calls
from fxoffload.testing.simulated_device import SimulatedDevice

_QUICK = ("lora",)


def unlike(row: Row, free: Row) -> str:
    """`fault`, but a loss in chunks may have other bits."""
    found = fault(row, free)
    return "" if found.startswith("other bits") and (row.decisions or {}).get("chunk") else found


@pytest.mark.integration
@pytest.mark.parametrize("family", [*_QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n not in _QUICK)])
def test_fused_programs_op_by_op_train_bit_equal_inside_the_budget(family: str, simulated_device: SimulatedDevice) -> None:
    """The simulated device has no Inductor: programs run op by op."""
    found = list(rows(family, "fxsim", simulated_device, (FRACTIONS[0], FRACTIONS[-1]), numerics="reordered", executor="inductor"))
    assert len(found) == 2
    for row in found:
        assert not unlike(row, found[0]), (unlike(row, found[0]), row)


@pytest.mark.slow
@pytest.mark.integration
def test_kernels_of_fused_programs_give_the_losses_of_plain_pytorch() -> None:
    """Compiled for the CPU, sizes symbolic, a smaller batch among the steps; a model that norms its heads, whose sizes the kernels take apart."""
    plain = qwen3()
    model, batch = copy.deepcopy(plain.model), plain.batch
    fxoffload.compile(model, batch, device="cpu", device_budget="1GiB", numerics="reordered", executor="inductor")
    graph = next(iter(model.fxoffload.graphs.values()))  # type: ignore[union-attr]
    calls = Counter(node.args[1] for node in graph.find_nodes(op="call_function", target=fused))
    assert sum(calls.values()) > len(calls) and max(calls.values()) > 1, "two layers share their programs"
    losses: list[list[float]] = []
    for one in (plain.model, model):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
        losses.append([])
        for step in range(6):
            given = {k: v[:1] if step == 3 else v for k, v in batch.items()}
            loss = one(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    model.fxoffload.close()  # type: ignore[union-attr, operator]


def test_a_plan_for_one_executor_is_none_for_the_other() -> None:
    made = lora()
    plan = fxoffload.plan(made.model, made.batch, device_budget="1GiB", machine="h200", numerics="reordered", executor="inductor")
    with pytest.raises(fxoffload.PlanError, match="does not cover"):
        fxoffload.compile(
            made.model, made.batch, device="cpu", device_budget="1GiB", numerics="reordered", machine="h200", plan=plan, replan=False)


def test_a_deeper_model_has_more_calls_and_no_more_kernels() -> None:
    found = []
    for n_layers in (2, 4):
        made = lora(num_hidden_layers=n_layers)
        options = planning_options(made.model, load_machine("h200"), "1GiB", None, 0, "adamw", "auto", None, "reordered", (), None, "inductor")
        with captured(made.model, made.batch, options, load_machine("h200")) as session:
            assert session.captured is not None
            found.append(kernel_calls([session.captured.graph]))
    shallow, deep = found
    assert len(deep) == len(shallow) > 0 and deep.total() > 1.5 * shallow.total()


def test_values_read_before_and_behind_a_turn_are_made_by_calls_apart_and_those_read_behind_it_alone_by_one() -> None:
    class Turned(torch.nn.Module):
        def __init__(self, reads_before: bool) -> None:
            super().__init__()
            self.first, self.second, self.reads_before = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), reads_before

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            doubled = self.first(x).sin() * 2
            turned = (doubled.transpose(0, 1) * 3).cos()
            before = self.second(doubled).sum() if self.reads_before else 0
            return {"loss": self.second(turned).sum() + before}

    found = []
    for reads_before in (True, False):
        model = Turned(reads_before).requires_grad_(False)
        with torch.no_grad():
            options = planning_options(
                model, load_machine("h200"), "1GiB", None, 0, "adamw", "auto", None, "reordered", (), None, "inductor")
            with captured(model, {"x": torch.randn(4, 6, 8)}, options, load_machine("h200")) as session:
                assert session.captured is not None
                calls = session.captured.graph.find_nodes(op="call_function", target=fused)
                found.append([("sin" in node.args[1], "cos" in node.args[1]) for node in calls])
    apart, together = found
    assert (True, True) not in apart and (True, True) in together


def test_inductor_needs_reordered_numerics() -> None:
    made = lora()
    with pytest.raises(ValueError, match='executor: "inductor".*reordered'):
        fxoffload.compile(made.model, made.batch, device="cpu", device_budget="1GiB", executor="inductor")


def test_a_program_runs_as_it_reads() -> None:
    x = torch.randn(3, 4)
    text = "%a0 = input; %s0 = input; %v0 = aten.mul.Tensor %a0, 2.0; %v1 = aten.reshape %v0, [%s0, 2]; return [%v0, %v1]"
    doubled, turned = run_program([x], text, [6])
    assert torch.equal(doubled, x * 2) and turned.shape == (6, 2)


def test_a_call_whose_operands_sizes_say_no_single_symbol_is_refused_by_its_name() -> None:
    """Rows of a mixture of experts, at symbolic sizes: as many as tokens have experts, and nothing of the batch's own sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    ids = mode.from_tensor(torch.empty(3, 5), symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2))
    batch, length = ids.shape
    with mode:
        rows, tokens = torch.empty(2 * batch * length, 8), torch.empty(batch, length, 8)

    def form(*operands: torch.Tensor) -> Form:
        graph = fx.Graph()
        nodes = [graph.placeholder(f"x{i}") for i in range(len(operands))]
        for node, value in zip(nodes, operands, strict=True):
            node.meta["val"] = value
        call = graph.call_function(fused, (nodes, "%a0 = input; %v0 = aten.mul.Tensor %a0, 2.0; return [%v0]", []))
        call.meta |= {"val": [operands[0]], INFO: NodeInfo("call")}
        return Form(call)

    with pytest.raises(PlanError, match=r"call: its operands have sizes of several symbols .* use dynamic=False"):
        form(rows).traced()
    form(rows, tokens[:, 0, 0], tokens[0, :, 0])._check_symbols()


ROTATED = """\
graph "rotated"
%x: f32[2,4,8,16] = input {role=batch}
%y: f32[2,4,8,16] = input {role=batch}
%a: f32[2,4,8,16] = aten.mul.Tensor %x, %y
%b: f32[2,4,8,16] = aten.add.Tensor %a, %x
return (%b)
"""


def test_a_kernel_reads_operands_where_they_lie_and_not_where_tracing_assumed_them() -> None:
    """The gradients of memory-efficient attention lie otherwise than its operands: a kernel for these strides would read others' elements."""
    graph = get_pass("fuse").run(text.parse(ROTATED, device=torch.device("cpu")), Context())
    assert isinstance(graph, fx.Graph)
    (node,) = graph.find_nodes(op="call_function", target=fused)
    call = FusedCall(Form(node), {}, None)
    x, y = torch.randn(2, 8, 4, 16).transpose(1, 2), torch.randn(2, 4, 8, 16)
    for values in ((x, y), (x.contiguous(), y), (x, y), (y, x)):
        assert torch.equal(call(values, node.args[1], node.args[2])[0], values[0] * values[1] + values[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [True, False])
def test_gradients_on_a_card_are_those_of_plain_pytorch(dtype: torch.dtype, dynamic: bool) -> None:
    """Of every parameter: a loss hardly shows what is wrong with the queries' and keys'. In bf16 within a few times what plain PyTorch is off itself."""
    case = llama(hidden_size=256, intermediate_size=512)
    batch = {name: value.cuda() for name, value in case.batch.items()}

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**batch).loss.backward()
        return {name: p.grad.detach().float().cpu() for name, p in model.named_parameters()}

    exact = gradients(copy.deepcopy(case.model).cuda())
    plain = gradients(copy.deepcopy(case.model).to("cuda", dtype))
    model = fxoffload.compile(
        case.model.to(dtype), case.batch, device="cuda", device_budget="256MiB", executor="inductor", numerics="reordered", dynamic=dynamic,
        pins=[fxoffload.pin("*", "host")])
    for _ in range(4):  # called, then replayed
        found = gradients(model)
        for name, expected in exact.items():
            own, off = ((one[name] - expected).norm() / expected.norm() for one in (plain, found))
            assert off <= max(3 * own, 1e-4), (name, float(off), float(own))
    model.fxoffload.close()  # type: ignore[operator, union-attr]
