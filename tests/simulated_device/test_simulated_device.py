"""The simulated device behaves as an accelerator does and computes what the CPU computes."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxoffload.testing import simulated_device as simulated_device_module
from fxoffload.testing.simulated_device import NoCompilerError, SimulatedDevice, Transferred, install

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def device(simulated_device: SimulatedDevice) -> SimulatedDevice:
    torch.manual_seed(0)
    return simulated_device


def same(on_cpu: torch.Tensor, on_device: torch.Tensor) -> bool:
    assert on_device.device.type == "fxsim"
    return torch.equal(on_cpu, on_device.cpu())


def equal_gradients(on_cpu: nn.Module, on_device: nn.Module) -> bool:
    pairs = zip(on_cpu.parameters(), on_device.parameters(), strict=True)
    return all(p.grad is not None and q.grad is not None and same(p.grad, q.grad) for p, q in pairs)


# ------------------------------------------------------------------------------------------------------------- memory


def test_current_and_peak_bytes_are_exact(device: SimulatedDevice) -> None:
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    first = torch.empty(1001, dtype=torch.uint8, device="fxsim")
    second = torch.empty(3, dtype=torch.float64, device="fxsim")
    del first
    third = second + 1
    assert device.memory_allocated() - before == second.nbytes + third.nbytes == 48
    assert device.max_memory_allocated() - before == 1001 + 24
    assert device.allocation_count() == 3
    del second, third
    assert device.memory_allocated() == before


def test_host_temporaries_of_a_cpu_kernel_are_not_charged(device: SimulatedDevice) -> None:
    weight = torch.randn(64, 64, device="fxsim").t()[::2]  # not contiguous: the CPU kernel makes copies
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    result = torch.softmax(weight, 0)
    assert device.max_memory_allocated() - before == result.nbytes


def test_views_share_device_memory(device: SimulatedDevice) -> None:
    base = torch.zeros(4, 6, device="fxsim")
    before = device.memory_allocated()
    views = [base.t(), base[1:, ::2], base.view(24), base.unfold(1, 2, 2), *base.split(2), base.view(torch.int32)]
    assert device.memory_allocated() == before
    views[0].add_(1)
    assert base.sum().item() == 24


def test_above_the_capacity_the_real_out_of_memory_error_is_raised_and_the_device_stays_usable(
    device: SimulatedDevice,
) -> None:
    before = device.memory_allocated()
    device.set_capacity(before + 1000)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1001 bytes"):
        torch.empty(1001, dtype=torch.uint8, device="fxsim")
    exact_fit = torch.empty(1000, dtype=torch.uint8, device="fxsim")
    assert torch.fxsim.mem_get_info() == (0, before + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        exact_fit.repeat(2)
    del exact_fit
    assert device.memory_allocated() == before
    assert torch.ones(249, device="fxsim").sum().item() == 249


def test_out_of_memory_in_backward_reaches_the_caller_and_frees_what_it_held(device: SimulatedDevice) -> None:
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).to("fxsim")
    inputs = torch.randn(8, 64, device="fxsim")
    loss = layers(inputs).square().sum()
    device.set_capacity(device.memory_allocated() + 64 * 64 * 4)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    device.set_capacity(None)
    layers.zero_grad()
    before = device.memory_allocated()
    del loss
    assert device.memory_allocated() < before
    layers(inputs).sum().backward()


def test_resizing_charges_the_new_size(device: SimulatedDevice) -> None:
    tensor = torch.ones(2, device="fxsim")
    before = device.memory_allocated()
    tensor.resize_(100)
    assert device.memory_allocated() - before == 98 * 4
    assert tensor[:2].tolist() == [1, 1]
    tensor.untyped_storage().resize_(0)
    assert device.memory_allocated() - before == -8
    torch.add(torch.ones(5, device="fxsim"), 1, out=tensor.set_())
    assert tensor.tolist() == [2] * 5


def test_torch_accelerator_reads_the_same_counters(device: SimulatedDevice) -> None:
    kept = torch.ones(10, device="fxsim")
    assert torch.accelerator.memory_allocated() == torch.fxsim.memory_allocated() == device.memory_allocated()
    assert torch.accelerator.max_memory_allocated() == torch.fxsim.max_memory_allocated()
    assert str(torch.accelerator.current_accelerator()) == kept.device.type


# ------------------------------------------------------------------------------------------------------------- copies


def test_copies_are_counted_per_direction_in_the_dtype_of_the_device(device: SimulatedDevice) -> None:
    on_device = torch.randn(10).to("fxsim", torch.bfloat16)
    assert device.transferred() == Transferred(h2d_bytes=20, d2h_bytes=0)
    on_device.to("cpu", torch.float64)
    on_device.clone()
    assert device.transferred() == Transferred(h2d_bytes=20, d2h_bytes=20)
    on_device.sum().item()
    assert device.transferred() == Transferred(h2d_bytes=20, d2h_bytes=22)
    device.reset_transfer_stats()
    assert device.transferred() == Transferred(h2d_bytes=0, d2h_bytes=0)


def test_copies_handle_strides_dtypes_and_broadcasting() -> None:
    source = torch.randn(4, 6)
    on_device = torch.empty(6, 4, dtype=torch.float64, device="fxsim")
    on_device.t().copy_(source)
    assert same(source.t().double(), on_device)
    assert torch.equal(torch.empty(4, 6).copy_(on_device.t()), source)
    assert same(source[:1].expand(4, 6), torch.empty(4, 6, device="fxsim").copy_(source[:1]))
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert same(conjugate, conjugate.to("fxsim"))


def test_deepcopy_and_saving_keep_the_values_and_the_device() -> None:
    layer = nn.Linear(3, 3).to("fxsim")
    assert same(layer.weight.cpu(), copy.deepcopy(layer).weight)
    file = io.BytesIO()
    torch.save({name: tensor.cpu() for name, tensor in layer.state_dict().items()}, file)
    file.seek(0)
    assert same(layer.weight.cpu(), torch.load(file, map_location="fxsim")["weight"])


# -------------------------------------------------------------------------------------------------------- two devices


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: F.embedding(b.long(), a),
        lambda a, b: F.cross_entropy(a, b.argmax(1)),
        lambda a, b: torch.where(b > 0, a, a),
        lambda a, b: F.linear(a, a, b[0]),
    ],
    ids=["add", "matmul", "cat", "embedding", "cross_entropy", "where", "linear"],
)
def test_operands_on_two_devices_raise(mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(torch.randn(4, 4, device="fxsim"), torch.randn(4, 4))


def test_cpu_scalars_and_cpu_indices_are_allowed_as_on_cuda(device: SimulatedDevice) -> None:
    values = torch.randn(4, 4)
    on_device = values.to("fxsim")
    index = torch.tensor([2, 0])
    assert same(values * torch.tensor(2.0), on_device * torch.tensor(2.0))
    device.reset_transfer_stats()
    assert same(values[index], on_device[index])
    assert device.transferred().h2d_bytes == index.nbytes
    on_device[index] = torch.tensor(1.0)
    assert on_device[index].mean().item() == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.Stream(device="fxsim"),
        lambda: torch.Event(device="fxsim").record(),
        lambda: torch.accelerator.current_stream().record_event(),
    ],
    ids=["stream", "event", "record"],
)
def test_streams_and_events_are_refused_with_an_error(ask: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="Backend doesn't support"):
        ask()


def test_pinned_memory_is_ordinary_cpu_memory() -> None:
    assert not torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).pin_memory().is_pinned()


# ------------------------------------------------------------------------------------------------------------ numbers


def test_every_aten_op_with_a_cpu_kernel_runs_that_kernel() -> None:
    """A composition registered for devices without a kernel would win over the fallback, with other bits."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    compositions = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
    left = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "CPU") and any(has(name, key) for key in compositions)
        if not has(name, "PrivateUse1")
    ]
    assert left == []


def test_random_numbers_come_from_the_default_cpu_generator() -> None:
    state = torch.fxsim.get_rng_state()
    expected = torch.randn(5)
    torch.fxsim.set_rng_state(state)
    assert same(expected, torch.randn(5, device="fxsim"))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.fxsim.manual_seed(7)
    assert same(expected, torch.rand(3, device="fxsim"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_equals_the_cpu_in_forward_and_backward(dtype: torch.dtype) -> None:
    values, upstream = torch.randn(33, 65).to(dtype), torch.randn(33, 65).to(dtype)
    results = []
    for place in ("cpu", "fxsim"):
        leaf = values.clone().to(place).requires_grad_()
        torch.manual_seed(1)
        dropped = F.dropout(leaf, 0.1)
        dropped.backward(upstream.to(place))
        results.append((dropped, leaf.grad))
    (on_cpu, cpu_grad), (on_device, device_grad) = results
    assert same(on_cpu, on_device) and same(cpu_grad, device_grad)


def test_batch_norm_updates_its_running_statistics_and_convolution_equals_the_cpu() -> None:
    on_cpu = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.GroupNorm(2, 8))
    on_device = copy.deepcopy(on_cpu).to("fxsim")
    images = torch.randn(2, 3, 8, 8)
    on_cpu(images).square().sum().backward()
    on_device(images.to("fxsim")).square().sum().backward()
    assert equal_gradients(on_cpu, on_device)
    assert all(same(a, b) for a, b in zip(on_cpu.buffers(), on_device.buffers(), strict=True))
    assert on_cpu[1].num_batches_tracked.item() == 1 and on_cpu[1].running_mean.abs().sum() > 0


def test_autocast_gives_the_numbers_of_cpu_autocast() -> None:
    on_cpu = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    on_device = copy.deepcopy(on_cpu).to("fxsim")
    inputs, target = torch.randn(8, 16), torch.randn(8, 4)
    losses = []
    for model, place in ((on_cpu, "cpu"), (on_device, "fxsim")):
        with torch.autocast(place, dtype=torch.bfloat16):
            output = model(inputs.to(place))
            losses.append(F.mse_loss(output, target.to(place)))
        assert output.dtype == torch.bfloat16 and losses[-1].dtype == torch.float32
        losses[-1].backward()
    assert same(*losses) and equal_gradients(on_cpu, on_device)


def test_attention_takes_the_math_path() -> None:
    query = torch.randn(1, 2, 4, 8, device="fxsim", requires_grad=True)
    assert torch._fused_sdp_choice(query, query, query) == 0
    fused = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        leaf = query.detach().cpu()
        assert same(F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True), fused)


def adamw_losses(model: nn.Module, place: str, forward: Callable[..., nn.Module] = lambda m: m) -> list[float]:
    """Three AdamW steps of a causal LM at place."""
    model.to(place).train()
    model.tie_weights()  # .to() of an out-of-tree device makes new Parameters
    ids = torch.arange(32).view(2, 16).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        loss = forward(model)(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, attn_implementation="eager", **sizes)
    return LlamaForCausalLM(config)


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, use_cache=False, attn_implementation="eager", **sizes))


@pytest.mark.parametrize("build", [small_llama, small_gpt2], ids=["llama", "gpt2 with dropout"])
def test_three_adamw_steps_of_a_transformer_equal_the_cpu_bit_for_bit(build: Callable[[], nn.Module]) -> None:
    on_cpu = build()
    on_device = copy.deepcopy(on_cpu)
    assert adamw_losses(on_cpu, "cpu") == adamw_losses(on_device, "fxsim")
    parameters = zip(on_cpu.parameters(), on_device.parameters(), strict=True)
    assert all(same(p, q) for p, q in parameters)


def test_aot_eager_runs_on_the_device_with_the_same_losses() -> None:
    model = small_llama()
    compiled = adamw_losses(copy.deepcopy(model), "fxsim", lambda m: torch.compile(m, backend="aot_eager"))
    assert compiled == adamw_losses(model, "cpu")


def test_a_4bit_layer_of_bitsandbytes_equals_the_cpu() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    on_cpu = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    on_device = copy.deepcopy(on_cpu)
    on_device.weight = on_device.weight.to("fxsim")  # not layer.to: Module.to cannot rebuild this Parameter class
    outputs, grads = [], []
    for layer, place in ((on_cpu, "cpu"), (on_device, "fxsim")):
        inputs = torch.linspace(-1, 1, 256).view(4, 64).to(place).requires_grad_()
        outputs.append(layer(inputs))
        outputs[-1].square().sum().backward()
        grads.append(inputs.grad)
    assert same(*outputs) and same(*grads)


# ------------------------------------------------------------------------------------------------------- installation


def test_installing_twice_gives_the_same_device(device: SimulatedDevice) -> None:
    assert install() is device


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompilerError, match="no-such-compiler"):
        simulated_device_module._build(tmp_path / "fxsim.so")


def test_after_a_first_backward_the_installation_is_refused() -> None:
    program = """
import torch
from fxoffload.testing.simulated_device import install
torch.ones(1, requires_grad=True).sum().backward()
install()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "before the first backward" in done.stderr
