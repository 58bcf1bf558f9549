"""`fxoffload plan`: what training would need, before anything is loaded."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fxoffload.cli.options import parse_lora
from fxoffload.errors import PlanError
from fxoffload.sizes import parse_bytes

if TYPE_CHECKING:
    import transformers

    from fxoffload.plans import Plan


class LoadIn(str, Enum):
    """How bitsandbytes stores the frozen base."""

    four_bit = "4bit"
    eight_bit = "8bit"


class Dtype(str, Enum):
    """The dtype of the weights."""

    bf16 = "bf16"
    fp32 = "fp32"


def run(
    model: Annotated[Path, typer.Option(help="A model folder or a bare config.json; no weights are read.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of one batch.")],
    seq: Annotated[int, typer.Option(min=1, help="Tokens of one row.")],
    device_budget: Annotated[str, typer.Option(help="Bytes of device memory, for example 24GiB.")],
    host_budget: Annotated[Optional[str], typer.Option(help="Bytes of host memory. Default: not limited.")] = None,
    lora: Annotated[Optional[str], typer.Option(help="LoRA adapters: r=16[,alpha=32,targets=q_proj+v_proj,dora=true].")] = None,
    load_in: Annotated[Optional[LoadIn], typer.Option(help="Quantize the frozen base with bitsandbytes; needs --lora.")] = None,
    machine: Annotated[Optional[str], typer.Option(help="A machine file or a shipped name, for example rtx3090.")] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer whose states are planned.")] = "adamw",
    dtype: Annotated[Dtype, typer.Option(help="The dtype of the weights.")] = Dtype.bf16,
    save: Annotated[Optional[Path], typer.Option(help="Write the plan, to replay with fxoffload.compile(plan=...).")] = None,
    json: Annotated[Optional[Path], typer.Option(help="Write the numbers as JSON.")] = None,
    html: Annotated[Optional[Path], typer.Option(help="Write the memory timeline as a page.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why the plan is what it is.")] = False,
) -> int:
    """Plan a fine-tune: no weights, no accelerator needed."""
    from fxoffload.training.files import write_json

    if load_in is not None and lora is None:
        raise ValueError("--load-in: a quantized base is frozen, so something else must train; add --lora r=16")
    options = _plan_options(device_budget, host_budget, lora, load_in, machine, optimizer, dtype) | {"report": html}
    config = _model_config(model, dtype)
    started = time.perf_counter()
    try:
        plan = _call_plan(config, (batch, seq), options)
    except PlanError as error:
        if json is not None:
            write_json(json, _refusal(error, time.perf_counter() - started))
        raise
    plan_s = time.perf_counter() - started
    _print(plan, batch * seq, plan_s, explain)
    if save is not None:
        plan.save(save)
    if json is not None:
        write_json(json, _numbers(plan, batch * seq, plan_s))
    return 0


def _call_plan(config: transformers.PretrainedConfig, shape: tuple[int, int], options: dict[str, Any]) -> Plan:
    """fxoffload.plan, imported when called."""
    import fxoffload

    return fxoffload.plan(config, shape, **options)


def _plan_options(
    device_budget: str, host_budget: str | None, lora: str | None, load_in: LoadIn | None, machine: str | None, optimizer: str,
    dtype: Dtype,
) -> dict[str, Any]:
    from fxoffload.training.config import QuantizationOptions
    from fxoffload.training.model import lora_config, quantization_config

    return {
        "device_budget": parse_bytes(device_budget, "--device-budget"), "machine": machine, "optimizer": optimizer,
        "host_budget": None if host_budget is None else parse_bytes(host_budget, "--host-budget"),
        "lora": None if lora is None else lora_config(parse_lora(lora)),
        "quantization": None if load_in is None else quantization_config(QuantizationOptions(load_in.value), dtype.value),
    }


def _print(plan: Plan, n_tokens: int, plan_s: float, explain: bool) -> None:
    from rich.console import Console

    from fxoffload.cli.tables import plan_table

    Console().print(plan_table(plan, f"Fits; planned in {plan_s:.1f} s", n_tokens))
    if explain:
        print(plan.explain())


def _model_config(path: Path, dtype: Dtype) -> transformers.PretrainedConfig:
    from fxoffload.training.model import DTYPES, load_model_config

    config = load_model_config(path)
    config.dtype = DTYPES[dtype.value]
    return config


def _numbers(plan: Plan, n_tokens: int, plan_s: float) -> dict[str, object]:
    from fxoffload.cli.tables import tokens_per_s

    predicted = plan.predicted
    return {
        "fits": True, "device_peak_bytes": predicted.device_peak_bytes, "host_peak_bytes": predicted.host_peak_bytes,
        "step_s": predicted.step_s, "tokens_per_s": tokens_per_s(n_tokens, predicted.step_s),
        "n_decisions": len(plan.decisions), "plan_s": plan_s,
    }


def _refusal(error: PlanError, plan_s: float) -> dict[str, object]:
    return {
        "fits": False, "shortfall_bytes": error.shortfall_bytes, "reason": " ".join(str(error).split()), "device_peak_bytes": None,
        "host_peak_bytes": None, "step_s": None, "tokens_per_s": None, "n_decisions": 0, "plan_s": plan_s,
    }
