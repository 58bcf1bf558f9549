"""The workloads: a model of a real shape, what is trained of it, a batch and a cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

GIB = 2**30
# Ours first, then what a peer does best: a run that is cut off has the rows that decide.
OURS = ("fxoffload-bitwise", "fxoffload-reordered", "fxoffload-inductor")
# Everything lies on the card: what fits no cap runs uncapped too, as the bar of no limit at all.
RESIDENT = ("plain@none", "compile@none", "liger@none", "plain", "compile", "checkpoint", "checkpoint-offload", "liger", "liger-checkpoint",
            "liger-tuned", "liger-checkpoint-offload", "liger-save-on-cpu", "compile-offload")
STREAMED = ("fsdp2", "fsdp2-prefetch", "fsdp2-liger", "fsdp2-liger-tuned", "zero3", "zero3-liger")
DEEPCOMPILE = ("deepcompile", "deepcompile-offload-activation", "deepcompile-offload-parameters")


@dataclass(frozen=True, slots=True)
class Row:
    """`peers`: who runs it when none is named; "@none" behind a peer's name: without the cap. `cap_bytes` None: no cap for anybody.
    `warm`, `timed`: steps before the clock starts (some peers take more), and those whose median counts. `host_bytes`: our host budget; None is what
    is free when a run starts, which depends on what runs beside it."""

    name: str
    shape: str
    trained: str
    batch: int
    length: int
    cap_bytes: int | None
    peers: tuple[str, ...]
    warm: int = 4
    timed: int = 7
    host_bytes: int | None = None

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def title(self) -> str:
        return f"{self.shape} {self.trained}, {self.batch} x {self.length}"

    @property
    def tiny(self) -> Row:
        """The same of two narrow layers and 2 x 32 tokens, which any CPU runs."""
        return replace(self, shape="tiny-qwen3" if self.shape == "32B" else "tiny-llama", batch=2, length=32, host_bytes=None)


_L1 = Row("L1", "8B", "lora", 4, 2048, 24 * GIB, (*OURS, "fxoffload-liger", *RESIDENT, *STREAMED, *DEEPCOMPILE))
_BELOW_WEIGHTS = (*OURS, "liger-checkpoint", "liger-tuned", *STREAMED)
_LONG = (*OURS, "liger-checkpoint@none", "liger-tuned@none", "liger-checkpoint", "liger-checkpoint-offload", "fsdp2-liger", "zero3-liger")
ROWS: Mapping[str, Row] = {row.name: row for row in (
    _L1,
    replace(_L1, name="L1-quarter", shape="8B-quarter", peers=(OURS[-1], "compile", "liger", "zero3-liger", *DEEPCOMPILE)),
    replace(_L1, name="L1-quarter-8", shape="8B-quarter", cap_bytes=8 * GIB, peers=(
        *OURS[1:], "fxoffload-functions", "fxoffload-functions-reordered", "plain@none", "plain-functions@none")),
    replace(_L1, name="L1b", cap_bytes=12 * GIB, peers=_BELOW_WEIGHTS),
    replace(_L1, name="L2", cap_bytes=8 * GIB, peers=_BELOW_WEIGHTS),
    Row("L3", "32B", "lora", 4, 2048, 24 * GIB, (*OURS, "fsdp2-liger", "fsdp2-liger-tuned", "zero3-liger", "fsdp2", "zero3", "liger-checkpoint"),
        timed=5),
    Row("L4", "8B", "lora", 1, 512, None, (*OURS, "plain", "compile", "compile-cudagraphs", "liger"), warm=8, timed=20),
    Row("L5-16k", "8B", "lora", 1, 16384, 24 * GIB, _LONG, timed=5),
    Row("L5-64k", "8B", "lora", 1, 65536, 24 * GIB, _LONG, warm=3, timed=5, host_bytes=80 * GIB),
    Row("F1", "3B", "full", 4, 2048, 24 * GIB, (*OURS, "liger-checkpoint", "liger-tuned", "fsdp2", "fsdp2-liger", "fsdp2-liger-tuned", "zero3",
                                                "zero3-liger", "deepcompile-offload-parameters", "liger@none"), timed=5),
)}


def limit_fields(limits: Mapping[str, Mapping[str, Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    """What a measured row says of its physical limit. `limits`: of "capped" and of "uncapped" runs (`limit.py`).

    `limit_share` is the share of it that was reached, the limit by the measured seconds, where some were measured.
    """
    found = dict(limits["uncapped" if row["cap_bytes"] is None else "capped"])
    return found | ({"limit_share": found["physical_limit_s"] / row["step_s"]} if "step_s" in row else {})
