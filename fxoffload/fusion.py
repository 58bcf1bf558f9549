"""`fxo.fused`: elementwise ops, casts, sums of rows and the views between them as one call, whose program is text.

A program has the form of a Graph's text without types, its lines joined by "; ": operands are %a0, %a1, ..., and %s0, %s1, ... the sizes and
whole numbers that a batch may decide. So it is the same for every layer, and for captures at any sizes and on any device. The op's own
kernel runs it op by op and gives, bit for bit, what the ops do that it stands for; `runtime/fused.py` has one kernel made of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.fx as fx

from .graph import Bounds
from .torch_compat import Size

_LIBRARY = torch.library.Library("fxo", "FRAGMENT")
_END = "; "

Program = Callable[..., list[torch.Tensor]]


def program_text(lines: Sequence[str]) -> str:
    """The text of a program of these lines."""
    return _END.join(lines)


@functools.lru_cache(maxsize=4096)
def program(text: str) -> Program:
    """What a program's text says, as a function of its operands and sizes. Raises ValueError for what is none."""
    from .text_reader import Reader

    reader = Reader(Bounds(), torch.device("cpu"))
    for line in text.split(_END):
        reader.line(line)
    return fx.GraphModule(torch.nn.Module(), reader.graph).forward  # type: ignore[return-value]


def sums_rows(text: str) -> bool:
    """Whether a program sums over the last dimension of something."""
    return "= aten.sum.dim_IntList %" in text or "= aten.mean.dim %" in text


def run_program(values: Sequence[torch.Tensor], text: str, sizes: Sequence[Size]) -> list[torch.Tensor]:
    """The program's results, op by op."""
    return program(text)(*values, *sizes)


_LIBRARY.define("fused(Tensor[] operands, str program, SymInt[] sizes) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("fused", run_program, "CompositeExplicitAutograd")
torch.library.register_fake("fxo::fused", run_program, lib=_LIBRARY)
fused: torch._ops.OpOverload = torch.ops.fxo.fused.default


def _write(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return out.copy_(value)


# What a kernel does with a result: `copy_`, but Inductor computes the value there and in no buffer of its own
# (`torch_compat.compiled_by_inductor`).
_LIBRARY.define("write(Tensor(a!) out, Tensor value) -> Tensor(a!)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("write", _write, "CompositeExplicitAutograd")
torch.library.register_fake("fxo::write", lambda out, value: out, lib=_LIBRARY)
write: torch._ops.OpOverload = torch.ops.fxo.write.default
