"""The bytes an optimizer keeps per parameter are those its own code allocates."""

from __future__ import annotations

import logging
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.training_args import OptimizerNames

import fxoffload
from fxoffload.account import OptimizerStep
from fxoffload.machine import load_machine
from fxoffload.optimizer_states import Coded, optimizer_states

SHAPES = [(96, 64), (64,), (5000,), (4, 33, 9)]


def predicted(optimizer: Any, parameter: nn.Parameter) -> int:
    states = optimizer_states(optimizer)
    assert states is not None
    return states.bytes_of(parameter.shape, parameter.element_size())


def kept(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Bytes of the state's tensors; counters, norms and tables that all parameters share apart."""
    tensors = {k: v for k, v in optimizer.state[parameter].items() if isinstance(v, torch.Tensor) and not k.startswith("qmap")}
    return sum(v.nbytes for v in tensors.values() if v.numel() > 1)


def stepped(kind: Any, parameter: nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    optimizer = kind([parameter], lr=1e-3, **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


TORCH: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}), (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adam, {}), (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}), (torch.optim.Adamax, {}), (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}), (torch.optim.RMSprop, {}), (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}), (torch.optim.Adadelta, {}),
    (torch.optim.ASGD, {}), (torch.optim.Rprop, {}), (transformers.Adafactor, {"relative_step": False}),
    (transformers.Adafactor, {"relative_step": False, "beta1": 0.9}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), TORCH, ids=lambda v: getattr(v, "__name__", str(v)))
def test_an_instance_keeps_what_is_said(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    for shape in SHAPES:
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = stepped(kind, parameter, **options)
        assert predicted(optimizer, parameter) == kept(optimizer, parameter), shape
        assert predicted(kind, parameter) >= kept(optimizer, parameter) or options, shape


BITSANDBYTES = ["AdamW", "AdamW8bit", "PagedAdamW32bit", "PagedAdamW8bit", "Lion", "Lion8bit", "PagedLion8bit", "AdEMAMix", "AdEMAMix8bit",
                "RMSprop8bit", "SGD8bit", "Adagrad32bit", "LAMB8bit", "LARS"]


@pytest.mark.parametrize("name", BITSANDBYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitsandbytes_states_are_as_large_as_it_makes_them(name: str, dtype: torch.dtype) -> None:
    import bitsandbytes

    kind = getattr(bitsandbytes.optim, name)
    for shape in SHAPES:
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = kind([parameter], lr=1e-3, **({"momentum": 0.9} if name in ("SGD8bit", "LARS") else {}))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Paged optimizers")
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
        assert predicted(optimizer, parameter) == predicted(kind, parameter) == kept(optimizer, parameter), shape


def test_the_trainers_8_bit_optimizers_keep_embeddings_in_fp32() -> None:
    import bitsandbytes

    embedding = nn.Embedding(512, 64).to(torch.bfloat16)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    optimizer = bitsandbytes.optim.AdamW8bit([embedding.weight], lr=1e-3)
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    try:
        optimizer.check_overrides()
        optimizer.init_state(optimizer.param_groups[0], embedding.weight, 0, 0)
        for told in (optimizer, "adamw_bnb_8bit"):
            states = optimizer_states(told)
            assert states is not None and states.bytes_of((512, 64), 2, embedding=True) == kept(optimizer, embedding.weight)
    finally:
        manager.module_weight_config_triple.clear()
        manager.initialize()
    plans = [
        fxoffload.plan(nn.Sequential(embedding), torch.zeros(2, 4, dtype=torch.int64), device_budget="1MiB", machine="cpu", optimizer=name)
        for name in (bitsandbytes.optim.AdamW8bit, "adamw_bnb_8bit")
    ]
    assert plans[1].predicted.host_peak_bytes - plans[0].predicted.host_peak_bytes == 2 * 512 * (4 * 64 - 64 - 64 * 4 // 256)


@pytest.mark.parametrize("name", [o.value for o in OptimizerNames])
def test_every_name_of_hugging_face_is_known_in_any_case(name: str) -> None:
    assert optimizer_states(name) == optimizer_states(name.upper()) is not None


@pytest.mark.parametrize(("name", "bytes_per_element"), [
    ("adamw_torch_fused", 4), ("adamw_bnb_8bit", 2 + 8 / 256), ("paged_adamw_8bit", 2 + 8 / 256), ("paged_adamw_32bit", 8),
    ("lion_8bit", 1 + 4 / 256), ("sgd", 2), ("ademamix_8bit", 3 + 12 / 256), ("adafactor", 4 / 1024 + 4 / 512),
    ("adamw_torch_4bit", 1 + 8 / 128 + 128 / 2**19),
])
def test_names_stand_for_bytes_of_a_bf16_matrix(name: str, bytes_per_element: float) -> None:
    assert optimizer_states(name).bytes_of((512, 1024), 2) == bytes_per_element * 512 * 1024  # type: ignore[union-attr]


def test_what_blocks_do_not_divide_is_not_coded() -> None:
    assert Coded(8, 256).bytes_of((4099,), 2) == 2 * 2 * 4099


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="^optimizer: unknown name 'adamwww'.*adamw_torch_fused.*paged_lion_8bit"):
        optimizer_states("adamwww")
    with pytest.raises(ValueError, match="^optimizer: expected"):
        optimizer_states(5)


class Homemade(torch.optim.Optimizer):
    pass


class Derived(torch.optim.AdamW):
    pass


def test_an_unknown_class_is_taken_for_the_most_with_a_warning_and_a_derived_one_for_its_base(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxoffload"):
        assert optimizer_states(Derived) == optimizer_states("adamw") and not caplog.records
        assert optimizer_states(Homemade).bytes_of((8, 8), 2) == 3 * 4 * 64  # type: ignore[union-attr]
    assert "Homemade is not known" in caplog.text


def test_seconds_of_an_optimizer_nobody_knows_are_finite_not_zero_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = torch.nn.Linear(64, 64), torch.zeros(2, 64)
    with caplog.at_level(logging.WARNING, "fxoffload"):
        plans = [fxoffload.plan(model, batch, device_budget="1GiB", machine="cpu", optimizer=one) for one in ("adamw", Homemade, None)]
    known, homemade, none = (plan.longest.reasons.optimizer_s for plan in plans)  # type: ignore[union-attr]
    assert none is None and known is not None and homemade == pytest.approx(2 * known)
    assert "seconds are unknown and counted as twice AdamW's" in caplog.text


def test_seconds_are_those_of_the_kernels_that_step() -> None:
    weight, rates = nn.Parameter(torch.zeros(8, 8)), {"fused_fp32": 4e9, "foreach_fp32": 1e9}
    measured = replace(load_machine("h200"), optimizer_params_per_s={"host": rates, "device": rates})
    for optimizer, seconds in (
            ("adamw", 1.0), ("adamw_torch_fused", 0.25), (torch.optim.AdamW([weight]), 1.0), (torch.optim.AdamW([weight], fused=True), 0.25)):
        step = OptimizerStep((("weight", 10**9, "fp32"),), optimizer_states(optimizer), measured)
        assert step.seconds(frozenset()) == pytest.approx(seconds)
        assert step.seconds(frozenset({"weight"})) == pytest.approx(seconds + measured.memory["copy"].latency_s)


def test_the_host_peak_knows_fp32_states_of_bf16_parameters() -> None:
    def host_peak(optimizer: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(torch.bfloat16)
        plan = fxoffload.plan(model, torch.zeros(4, 64, dtype=torch.bfloat16), device_budget="1MiB", machine="cpu", optimizer=optimizer,
                              pins=[fxoffload.pin("*", "host")])
        return plan.predicted.host_peak_bytes

    n = 2 * (64 * 64 + 64)
    assert host_peak("paged_adamw_32bit") - host_peak("adamw") == 4 * n
    assert host_peak("adamw") - host_peak(None) == host_peak("adamw") - host_peak("none") == 4 * n


class Alive(TorchDispatchMode):
    """The most bytes at once of what ops make inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes, self.most_bytes, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.data_ptr() not in given | self.known:
                self.known.add(made.data_ptr())
                self.now_bytes += made.nbytes
                self.most_bytes = max(self.most_bytes, self.now_bytes)
                weakref.finalize(made, self.gone, made.data_ptr(), made.nbytes)
        return out

    def gone(self, pointer: int, n_bytes: int) -> None:
        self.known.discard(pointer)
        self.now_bytes -= n_bytes


@pytest.mark.parametrize("kind", [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta,
    torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD, torch.optim.ASGD])
def test_a_step_of_foreach_kernels_makes_no_more_for_itself_than_is_known(kind: type[torch.optim.Optimizer]) -> None:
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(6)]
    optimizer = kind(weights, lr=0.1, foreach=True)  # type: ignore[call-arg]
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        with Alive() as alive:
            optimizer.step()
    states = optimizer_states(kind)
    assert states is not None
    n_bytes, few = sum(weight.nbytes for weight in weights), 4096
    assert alive.most_bytes <= states.temporaries * n_bytes + few
    assert kind is not torch.optim.AdamW or alive.most_bytes >= n_bytes
