"""A deep model's step from two shallow captures is the step that tracing it whole gives, to the letter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
import zoo
from torch import nn
from zoo import VOCAB, Case

import fxoffload
from fxoffload import depth, text
from fxoffload.api import captured, planning_options
from fxoffload.machine import load_machine

pytestmark = pytest.mark.integration
slow = pytest.mark.slow


def of_family(name: str, n_layers: int, **changes: Any) -> Case:
    """The zoo's model with more layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo._SIZES, "num_hidden_layers", n_layers)
        for key, value in changes.items():
            patch.setitem(zoo._SIZES, key, value)
        return zoo.FAMILIES[name]()


def of(config: Any, cls: str, batch: dict[str, torch.Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(getattr(tf, cls)(config).train(), batch)


def gpt2() -> Case:
    return zoo._causal(tf.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=VOCAB, n_positions=128))


def scaled_gpt2() -> Case:
    """Every layer divides by its own number."""
    return zoo._causal(tf.GPT2Config(
        n_embd=64, n_layer=6, n_head=4, vocab_size=VOCAB, n_positions=128, scale_attn_by_inverse_layer_idx=True, attn_pdrop=0.0))


def mamba() -> Case:
    return zoo._causal(tf.MambaConfig(hidden_size=64, num_hidden_layers=6, vocab_size=VOCAB, state_size=8), length=8)


def t5() -> Case:
    return of(tf.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=6, num_decoder_layers=3, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0),
        "T5ForConditionalGeneration", zoo.t5().batch)


def whisper() -> Case:
    return of(tf.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=6, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, vocab_size=VOCAB, max_source_positions=50, max_target_positions=64, num_mel_bins=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None),
        "WhisperForConditionalGeneration", zoo.whisper().batch)


def bert() -> Case:
    return of(tf.BertConfig(hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, vocab_size=VOCAB, num_labels=3,
                            problem_type="single_label_classification"), "BertForSequenceClassification", zoo.bert().batch)


def vit() -> Case:
    return of(tf.ViTConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, image_size=32, patch_size=8,
                           num_labels=5, problem_type="single_label_classification"), "ViTForImageClassification", zoo.vit().batch)


def shared_head() -> Case:
    """Adapters on some of the projections, the embedding trained too and tied to the head."""
    case = of_family("llama", 6, tie_word_embeddings=True)
    return zoo._lora(case, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens"])


def half_trained() -> Case:
    """The first layers frozen: their backward is not there."""
    case = of_family("llama", 9)
    for layer in case.model.model.layers[:3]:
        layer.requires_grad_(False)
    return case


CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: of_family("llama", 7), "lora": lambda: of_family("lora", 6), "qlora": lambda: of_family("qlora", 6),
    "dora": lambda: of_family("dora", 6), "lora_dropout": lambda: of_family("lora_bf16", 6), "autocast": lambda: of_family("autocast", 6),
    "checkpointed": lambda: of_family("gradient_checkpointing", 6), "shared_head": shared_head, "half_trained": half_trained,
    "qwen3": lambda: of_family("qwen3", 6), "phi3": lambda: of_family("phi3", 6), "gemma2": lambda: of_family("gemma2", 13),
    "mixtral": lambda: of_family("mixtral", 6), "qwen3_moe": lambda: of_family("qwen3_moe", 6), "gpt2": gpt2, "mamba": mamba, "t5": t5,
    "whisper": whisper, "bert": bert, "vit": vit, "llava": lambda: of_family("llava", 6),
}
QUICK = ("llama",)


def traced(model: nn.Module, batch: Any, autocast: torch.dtype | None = None) -> str:
    """What is planned, as text."""
    machine = load_machine("h200")
    options = planning_options(model, machine, "1GiB", None, 0, "adamw", "auto", None, "bitwise", ())
    with torch.autocast("cpu", autocast or torch.bfloat16, autocast is not None), captured(model, batch, options, machine) as session:
        assert session.captured is not None
        assert session.captured.fingerprint == text.fingerprint(session.captured.graph)
        return text.render(session.captured.graph, session.captured.bounds, columns=False)


@pytest.fixture
def as_deep(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Models of a few layers are deep enough."""
    monkeypatch.setattr(depth, "_WORTH", 9)
    return monkeypatch


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else slow) for name in CASES])
def test_a_deep_step_is_the_one_that_tracing_gives(name: str, as_deep: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]()
    with caplog.at_level("INFO", "fxoffload"):
        found = traced(case.model, case.batch, case.autocast)
    assert "blocks from captures of" in caplog.text
    as_deep.setattr(depth, "stack_of", lambda model: None)
    assert found == traced(case.model, case.batch, case.autocast)


class Deep(nn.Module):
    """Linear layers in a list; `step` is what is done with each."""

    def __init__(self, step: Callable[[torch.Tensor, list[torch.Tensor], nn.Module, int], torch.Tensor], by_number: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.head = nn.Linear(8, 1)
        self._step, self._by_number = step, by_number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = [x]
        for i in range(12 if self._by_number else len(self.layers)):
            before.append(self._step(before[-1], before, self.layers[i], i))
        return self.head(before[-1]).sum()


STEPS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "the first is added to each": (lambda x, before, layer, i: layer(x) + before[1] if i else layer(x), "12 blocks from captures of 4 and 5"),
    "two back": (lambda x, before, layer, i: layer(x) + before[max(i - 1, 0)], "does not go on as it begins"),
    "all of them": (lambda x, before, layer, i: layer(torch.stack(before).sum(0)), "does not go on as it begins"),
    "its number": (lambda x, before, layer, i: layer(x) * (i + 1), "does not go on as it begins"),
    "others from the fifth": (lambda x, before, layer, i: layer(x).relu() if i > 3 else layer(x), "does not go on as it begins"),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_does_not_go_on_is_traced_whole(name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    step, said = STEPS[name]
    monkeypatch.setattr(depth, "_WORTH", 1)
    model, batch = Deep(step), torch.zeros(4, 8)
    with caplog.at_level("INFO", "fxoffload"):
        found = traced(model, batch)
    assert said in caplog.text
    assert len(model.layers) == 12
    monkeypatch.setattr(depth, "stack_of", lambda model: None)
    assert found == traced(model, batch)


def test_a_model_that_does_not_bear_fewer_layers_is_traced_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "_WORTH", 1)
    model = Deep(lambda x, before, layer, i: layer(x), by_number=True)
    with caplog.at_level("INFO", "fxoffload"):
        assert "layers.11" in traced(model, torch.zeros(4, 8))
    assert "cannot be captured with fewer blocks" in caplog.text
    assert len(model.layers) == 12


def test_a_plan_that_went_on_wrongly_is_refused_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Which layer is another is told by nothing that can be looked at, and comes after what is captured.
    monkeypatch.setattr(depth, "_WORTH", 1)
    model, batch = Deep(lambda x, before, layer, i: layer(x).relu() if i > 8 else layer(x)), torch.zeros(4, 8)
    plan = fxoffload.plan(model, batch, device_budget="1MiB", machine="cpu")
    with pytest.raises(fxoffload.PlanError, match="graph"):
        fxoffload.compile(model, batch, device="cpu", device_budget="1MiB", plan=plan, replan=False)


def test_pins_and_dumps_are_of_the_whole_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "_WORTH", 1)
    model, batch = Deep(lambda x, before, layer, i: layer(x)), torch.zeros(4, 8)
    plan = fxoffload.plan(
        model, batch, device_budget="256MiB", machine="h200", pins=[fxoffload.pin("layers.10.weight", "device")], dump_dir=tmp_path)
    assert [r.value for r in plan.residency if str(r.tier) == "device" and ".10." in r.value] == ["layers.10.weight"]
    assert all("layers.11" in file.read_text() for file in (tmp_path / "train").glob("*.ir"))


def like(blocks: list[nn.Module]) -> depth.Stack | None:
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    return depth.stack_of(model)


def test_periods_are_found_and_what_differs_is_seen() -> None:
    def numbered(i: int, **attributes: Any) -> nn.Module:
        block = nn.Linear(4, 4)
        block.layer_idx = i
        for name, value in attributes.items():
            setattr(block, name, value)
        return block

    same = like([numbered(i) for i in range(40)])
    assert same is not None
    assert (same.path, same.first, same.period, same.shallow) == ("layers", 0, 1, 4)
    every_third = like([numbered(i, wide=i % 3 == 2) for i in range(80)])
    assert every_third is not None
    assert (every_third.first, every_third.period, every_third.shallow) == (0, 3, 14), "80 are 26 periods and 2"
    first_two = like([numbered(i, dense=i < 2) for i in range(40)])
    assert first_two is not None
    assert (first_two.first, first_two.period) == (2, 1)
    assert like([numbered(i, wide=i == 39) for i in range(40)]) is None
    assert like([numbered(i).requires_grad_(i > 20) for i in range(40)]) is None, "what is trained differs, late"
    assert like([numbered(i) for i in range(8)]) is None, "two captures would trace more"


def test_a_list_in_the_config_tells_layers_apart() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(60))
    model.config = tf.PretrainedConfig()
    model.config.kinds = ["sliding" if i % 2 else "full" for i in range(60)]
    stack = depth.stack_of(model)
    assert stack is not None
    assert stack.period == 2
