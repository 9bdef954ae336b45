# SPDX-License-Identifier: Apache-2.0
"""In-place operations on weights and gradients at rest, noted for the ranks to compare.

    rank 0   p.data.mul_(0.5)     journal: "aten.mul_.Tensor on 'head.weight' with 0.5"
    rank 1   (nothing)            journal: nothing       -> both raise at the end of a backward

Each rank writes its own pieces, so an operation that only some ranks run, or run with another
number, leaves pieces that do not belong together, and nothing else would notice. Operands on a GPU
are not read: the host would have to wait for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from shardwise.lockstep import STEP

# The optimizer that steps now: its step is noted as a whole.
stepping: list[Any] = []


def note(func: Any, targets: Sequence[Any], operands: Iterable[Any]) -> None:
    """Count a write that comes next, wait for gathers that still read, and note the operation.

    What a backward does is not noted: gradients of a penalty on weights, hooks of gradients.
    """
    for target in targets:
        target.version.write()
    if not targets or stepping or torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        return
    first, told = targets[0].cut, ""
    for axis in first.ranks.axes:
        if axis.size > 1:
            told = told or _words(func, targets, operands)
            axis.journal.add(STEP, told)


def _words(func: Any, targets: Sequence[Any], operands: Iterable[Any]) -> str:
    others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
    values = ", ".join(told for one in operands if (told := _value(one)))
    return f"{func} on '{targets[0].cut.name}'{others}{values and f' with {values}'}"


def _value(operand: Any) -> str:
    """A number, or a checksum of a plain tensor's; nothing of what ranks have pieces of."""
    if isinstance(operand, bool | int | float):
        return f"{operand:.6g}"
    if isinstance(operand, Tensor):
        own = not isinstance(operand, DTensor | FakeTensor) and operand.device.type == "cpu"
        if own and operand.numel() == 1 and not operand.is_complex():
            return f"{operand.item():.6g}"
        return f"values {sketch(operand):08x}" if own else ""
    if isinstance(operand, (list, tuple)):
        told = [_value(one) for one in operand]
        return f"values {zlib.crc32(repr(told).encode()):08x}" if any(told) else ""
    return ""


def sketch(whole: Tensor, start: int = 0) -> int:
    """A checksum of some numbers of a whole tensor, the same on ranks that have the same values."""
    if not whole.numel() or whole.is_meta or not whole.is_contiguous():
        return start
    some = whole.detach().view(-1)[:: whole.numel() // 64 + 1]
    return zlib.crc32(torch.view_as_real(some.to(torch.complex128)).cpu().numpy().tobytes(), start)
