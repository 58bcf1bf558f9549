"""DeviceMeter counts on plain "cpu" what the simulated device's allocator counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from fxoffload.testing.meter import DeviceMeter
from fxoffload.testing.simulated_device import SimulatedDevice


def test_a_storage_counts_until_its_last_view_is_gone() -> None:
    with DeviceMeter() as meter:
        base = torch.ones(100)
        view = base[10:]
        base.add_(1)
        assert (meter.current_bytes, meter.peak_bytes) == (400, 400)
        del base
        assert meter.current_bytes == 400
        del view
        assert (meter.current_bytes, meter.peak_bytes) == (0, 400)
        meter.reset_peak()
        assert meter.peak_bytes == 0


def test_storages_from_before_count_only_when_included() -> None:
    old = torch.ones(10)
    with DeviceMeter() as meter:
        old.mul_(2)
        assert meter.current_bytes == 0
        meter.include(old)
        meter.include(old[3:])
        assert meter.current_bytes == 40
    del old
    assert meter.current_bytes == 0


def test_host_tier_storages_do_not_count() -> None:
    with DeviceMeter(is_host=lambda tensor: tensor.dtype == torch.float64) as meter:
        told = torch.ones(10)
        meter.ignore(told)
        told.add_(1)
        seen = told.double()
        seen.add_(1)
        assert meter.current_bytes == 0
        kept = told * 2
        assert meter.current_bytes == kept.nbytes


def test_a_resized_storage_counts_at_its_new_size() -> None:
    with DeviceMeter() as meter:
        tensor = torch.empty(10)
        tensor.resize_(100)
        assert meter.current_bytes == 400


def test_allocations_of_backward_are_seen() -> None:
    weight = torch.ones(10, requires_grad=True)
    with DeviceMeter() as meter:
        (weight * 2).sum().backward()
        assert meter.current_bytes == 40
        weight.grad = None
        assert meter.current_bytes == 0


def small_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, use_cache=False, attn_implementation="eager", **sizes)
    return LlamaForCausalLM(config)


def step_peaks(model: nn.Module, ids: torch.Tensor, peak_bytes: Callable[[], int]) -> list[int]:
    """The peak bytes of forward, backward and optimizer step, twice."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    peaks = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        peaks.append(peak_bytes())
        loss.backward()
        peaks.append(peak_bytes())
        del loss
        optimizer.step()
        peaks.append(peak_bytes())
        optimizer.zero_grad()
    return peaks


def test_a_llama_training_step_has_the_peaks_of_the_simulated_device_to_the_byte(
    simulated_device: SimulatedDevice,
) -> None:
    on_cpu, ids = small_llama(), torch.arange(32).view(2, 16)
    before = simulated_device.memory_allocated()
    on_device = copy.deepcopy(on_cpu).to("fxsim")

    def device_peak_bytes() -> int:
        n_bytes = simulated_device.max_memory_allocated() - before
        simulated_device.reset_peak_memory_stats()
        return n_bytes

    on_device_ids = ids.to("fxsim")
    device_peak_bytes()
    expected = step_peaks(on_device, on_device_ids, device_peak_bytes)
    with DeviceMeter() as meter:
        for tensor in (*on_cpu.parameters(), *on_cpu.buffers(), ids):
            meter.include(tensor)

        def meter_peak_bytes() -> int:
            n_bytes = meter.peak_bytes
            meter.reset_peak()
            return n_bytes

        meter_peak_bytes()
        assert step_peaks(on_cpu, ids, meter_peak_bytes) == expected
