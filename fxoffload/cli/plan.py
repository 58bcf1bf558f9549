"""`fxoffload plan`: what training would need, before anything is loaded."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fxoffload.cli.options import Numbers, parse_lora, parse_numbers
from fxoffload.cli.sweep import run_sweep
from fxoffload.errors import PlanError
from fxoffload.sizes import parse_budget, parse_bytes

if TYPE_CHECKING:
    import transformers

    from fxoffload.plans import Plan


class LoadIn(str, Enum):
    """How bitsandbytes stores the frozen base."""

    four_bit = "4bit"
    eight_bit = "8bit"


class Numerics(str, Enum):
    """Whether the step gives plain PyTorch's bits, or may add in another order."""

    bitwise = "bitwise"
    reordered = "reordered"


class Executor(str, Enum):
    """Of `--executor`."""

    eager = "eager"
    inductor = "inductor"


class Thoroughness(str, Enum):
    """Of `--search`."""

    quick = "quick"
    thorough = "thorough"


class Dtype(str, Enum):
    """The dtype of the weights."""

    bf16 = "bf16"
    fp32 = "fp32"


def run(
    model: Annotated[Path, typer.Option(help="A model folder or a bare config.json; no weights are read.")],
    batch: Annotated[Numbers, typer.Option(parser=parse_numbers, metavar="N", help="Rows of one batch. With --sweep several: 1,2,4.")],
    seq: Annotated[Numbers, typer.Option(parser=parse_numbers, metavar="N", help="Tokens of one row. With --sweep several.")],
    device_budget: Annotated[
        str, typer.Option(help='Bytes of device memory, for example 24GiB. With --sweep several; "card" is all of the machine\'s.')],
    host_budget: Annotated[Optional[str], typer.Option(help="Bytes of host memory. Default: not limited.")] = None,
    lora: Annotated[Optional[str], typer.Option(help="LoRA adapters: r=16[,alpha=32,targets=q_proj+v_proj,dora=true].")] = None,
    load_in: Annotated[Optional[LoadIn], typer.Option(help="Quantize the frozen base with bitsandbytes; needs --lora.")] = None,
    machine: Annotated[
        Optional[str], typer.Option(help="A machine file or a shipped name, for example rtx3090. With --sweep several.")] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer whose states are planned.")] = "adamw",
    dtype: Annotated[Dtype, typer.Option(help="The dtype of the weights.")] = Dtype.bf16,
    numerics: Annotated[Numerics, typer.Option(
        help="bitwise: plain PyTorch's bits. reordered: fp32 sums may be added in another order (logits in chunks).")] = Numerics.bitwise,
    executor: Annotated[Executor, typer.Option(
        help="eager: PyTorch's kernels. inductor: elementwise ops fused, one kernel each; needs --numerics reordered.")] = Executor.eager,
    search: Annotated[Thoroughness, typer.Option(
        help="thorough: rungs of memory are half as far apart, which takes longer.")] = Thoroughness.quick,
    save: Annotated[Optional[Path], typer.Option(help="Write the plan, to replay with fxoffload.compile(plan=...).")] = None,
    json: Annotated[Optional[Path], typer.Option(help="Write the numbers as JSON.")] = None,
    html: Annotated[Optional[Path], typer.Option(help="Write the memory timeline, or the sweep, as a page.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say what binds, what more would give, or what would fit.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Plan every batch x seq x machine x device budget: a table.")] = False,
) -> int:
    """Plan a fine-tune: no weights, no accelerator needed."""
    if load_in is not None and lora is None:
        raise ValueError("--load-in: a quantized base is frozen, so something else must train; add --lora r=16")
    axes: dict[str, Any] = {
        "batch": batch, "sequence": seq, "device_budget": device_budget.split(","), "machine": (machine or "h200").split(","),
    }
    _check_budgets(device_budget.split(","), sweep)
    if sweep:
        if save is not None or explain:
            raise ValueError("--sweep: makes many plans; --save and --explain are for one")
        shared = _plan_options(host_budget, lora, load_in, optimizer, dtype, numerics, executor, search)
        return run_sweep(_model_config(model, dtype), axes, shared, json, html)
    several = [f"--{name.replace('_', '-').replace('sequence', 'seq')}" for name, values in axes.items() if len(values) > 1]
    if several:
        raise ValueError(f"{several[0]}: several values need --sweep")
    options = _plan_options(host_budget, lora, load_in, optimizer, dtype, numerics, executor, search) | {
        "device_budget": parse_budget(device_budget, "--device-budget"), "machine": machine, "report": html, "explain": explain}
    return _run_one(_model_config(model, dtype), (batch[0], seq[0]), options, save, json)


def _check_budgets(budgets: list[str], sweep: bool) -> None:
    for budget in budgets:
        if not (sweep and budget == "card"):
            parse_budget(budget, "--device-budget")


def _run_one(
    config: transformers.PretrainedConfig, shape: tuple[int, int], options: dict[str, Any], save: Path | None, json: Path | None,
) -> int:
    """One plan, printed and written where asked."""
    from fxoffload.training.files import write_json

    started, n_tokens = time.perf_counter(), shape[0] * shape[1]
    try:
        plan = _call_plan(config, shape, options)
    except PlanError as error:
        if json is not None:
            write_json(json, _refusal(error, time.perf_counter() - started))
        raise
    plan_s = time.perf_counter() - started
    _print(plan, n_tokens, plan_s, options["explain"])
    if save is not None:
        plan.save(save)
    if json is not None:
        write_json(json, _numbers(plan, n_tokens, plan_s))
    return 0


def _call_plan(config: transformers.PretrainedConfig, shape: tuple[int, int], options: dict[str, Any]) -> Plan:
    """fxoffload.plan, imported when called."""
    import fxoffload

    return fxoffload.plan(config, shape, **options)


def _plan_options(
    host_budget: str | None, lora: str | None, load_in: LoadIn | None, optimizer: str, dtype: Dtype, numerics: Numerics,
    executor: Executor, search: Thoroughness,
) -> dict[str, Any]:
    from fxoffload.training.config import QuantizationOptions
    from fxoffload.training.model import lora_config, quantization_config

    return {
        "optimizer": optimizer,
        "numerics": numerics.value,
        "executor": executor.value,
        "search": search.value,
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
        "n_decisions": len(plan.decisions), "plan_s": plan_s, "physical_limit_s": plan.physical_limit_s,
    }


def _refusal(error: PlanError, plan_s: float) -> dict[str, object]:
    return {
        "fits": False, "shortfall_bytes": error.shortfall_bytes, "reason": " ".join(str(error).split()), "device_peak_bytes": None,
        "host_peak_bytes": None, "step_s": None, "tokens_per_s": None, "n_decisions": 0, "plan_s": plan_s,
        "remedies": list(error.remedies),
    }
