"""What every measurement gets: the device, its clock, a deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .timing import Clock, Deadline

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Bench:
    """`clock`: for work on the device; `copy_clock`: for copies that the host takes part in."""

    device: torch.device
    clock: Clock
    copy_clock: Clock
    deadline: Deadline
    disk_dir: Path | None = None

    @property
    def is_cuda(self) -> bool:
        """True on an accelerator with events, streams and pinned memory."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """The dtype word that memory-bound ops and attention are measured in: what training uses on the device."""
        return "bf16" if self.is_cuda else "fp32"

    def values(self, *shape: int, dtype: str | None = None) -> torch.Tensor:
        """Random numbers in [-1, 1): constant operands would let an accelerator clock higher than real ones do."""
        generator = torch.Generator(self.device).manual_seed(0)
        tensor = torch.empty(shape, dtype=DTYPES[dtype or self.dtype], device=self.device)
        return tensor.uniform_(-1, 1, generator=generator)

    def fitting(self, sizes: Sequence[int], copies: int = 1) -> list[int]:
        """The sizes in bytes that leave three quarters of the free device memory alone."""
        if not self.is_cuda:
            return list(sizes)
        free, _ = torch.cuda.mem_get_info(self.device)
        return [size for size in sizes if size * copies <= free // 4]
