"""`fxoffload check`: what this machine offers, and what would stop a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Optional

import typer

from fxoffload.sizes import format_bytes

Facts = dict[str, str | int | float | bool | None]
PACKAGES = ("fxoffload", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors")
DISK_PROBE_BYTES = 64 * 2**20  # enough for a rate within some 10 %, short even on a slow disk


def run(
    json: Annotated[Optional[Path], typer.Option(help="Write the facts as JSON.")] = None,
    disk_dir: Annotated[Path, typer.Option(help="The folder whose disk is measured (64 MiB, removed again).")] = Path("."),
) -> int:
    """Show versions, driver, limits and disk speed."""
    from fxoffload.native import library
    from fxoffload.training.files import write_json

    facts = _versions() | {"evaluator_in_cpp": library() is not None} | _accelerator() | _host_memory() | _bitsandbytes() | _disk(disk_dir)
    _print(facts)
    if json is not None:
        write_json(json, facts)
    return 0


def _versions() -> Facts:
    facts: Facts = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    return facts


def _accelerator() -> Facts:
    import torch

    used_before = _nvidia_smi("memory.used")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    facts: Facts = {"accelerator": None if accelerator is None else str(accelerator), "driver": _nvidia_smi("driver_version")}
    if accelerator is None:
        return facts | {"pinning_works": None}
    facts["pinning_works"] = _pinning_works()
    if accelerator.type != "cuda":
        return facts
    torch.zeros(1, device=accelerator)
    free, total = torch.cuda.mem_get_info()
    facts |= {"device_name": torch.cuda.get_device_name(), "device_total_bytes": total, "device_free_bytes": free}
    used_after = _nvidia_smi("memory.used")
    if used_before is not None and used_after is not None:  # MiB; on a shared device others' changes are in it too
        facts["context_bytes"] = (int(used_after) - int(used_before)) * 2**20 - torch.cuda.memory_reserved()
    return facts


def _nvidia_smi(query: str) -> str | None:
    """The first GPU's value; None without a driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def _pinning_works() -> bool:
    import torch

    try:
        return torch.empty(2**20, dtype=torch.uint8).pin_memory().is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def _host_memory() -> Facts:
    import psutil

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = psutil.virtual_memory()
    return {
        "memlock_soft_bytes": None if soft == resource.RLIM_INFINITY else soft,  # None: no limit
        "memlock_hard_bytes": None if hard == resource.RLIM_INFINITY else hard,
        "host_total_bytes": memory.total, "host_available_bytes": memory.available, "host_limit_bytes": _cgroup_limit(),
        "cpu_count": os.cpu_count(),
    }


def _cgroup_limit() -> int | None:
    """Bytes this container may use (cgroup v2); None: no limit."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _bitsandbytes() -> Facts:
    """Whether nf4 weights quantize and come back on the CPU, which planning and CPU runs need."""
    import torch

    try:
        import bitsandbytes.functional

        weight = torch.linspace(-1, 1, 4096).reshape(64, 64)
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        error = (bitsandbytes.functional.dequantize_4bit(packed, state) - weight).abs().max().item()
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as problem:
        return {"bitsandbytes_cpu_works": False, "bitsandbytes_problem": " ".join(str(problem).split())[:200]}
    return {"bitsandbytes_cpu_works": error < 0.2}  # nf4's widest gap between levels is 0.304 (QLoRA, appendix E), so 0.152


def _disk(folder: Path) -> Facts:
    from fxoffload.calibration.host import disk

    written, read = disk(folder, DISK_PROBE_BYTES)
    return {
        "disk_dir": str(folder.resolve()), "disk_free_bytes": shutil.disk_usage(folder).free, "disk_write_bytes_per_s": written,
        "disk_read_bytes_per_s": read,
    }


def _print(facts: Facts) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fact", "value")
    for name, value in facts.items():
        table.add_row(name.removesuffix("_bytes").replace("_bytes_per_s", "").replace("_", " "), _show(name, value))
    Console().print(table)


def _show(name: str, value: str | int | float | bool | None) -> str:
    if value is None:
        return "no limit" if name.startswith("memlock") or name == "host_limit_bytes" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(int(value))}/s"
    return format_bytes(int(value)) if name.endswith("_bytes") else str(value)
