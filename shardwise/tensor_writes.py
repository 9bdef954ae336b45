# SPDX-License-Identifier: Apache-2.0
"""In-place operations on weights and gradients at rest, noted for the ranks to compare.

    rank 0   p.data.mul_(0.5)     journal: "aten.mul_.Tensor on 'head.weight' with 0.5"
    rank 1   (nothing)            journal: nothing       -> both raise at the end of a backward

Each rank writes its own pieces, so an operation that only some ranks run, or run with another
number, leaves pieces that do not belong together, and nothing else would notice. Tensors remember
the numbers that they were made with (``p.grad * coefficient``) until they are written somewhere or
set as a gradient. Operands on a GPU are not read: the host would have to wait for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from shardwise.lockstep import STEP, Axis

# The optimizer that steps now: its step is noted as a whole.
stepping: list[Any] = []


def note(func: Any, targets: Sequence[Any], operands: Sequence[Any]) -> None:
    """Count a write that comes next, wait for gathers that still read, and note the operation.

    Of what a backward does (gradients of a penalty on weights, hooks of gradients) only operations
    with plain tensors are: a mask is the same on all ranks, a gradient of one's own is not.
    """
    for target in targets:
        target.version.write()
    in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
    if stepping or (in_backward and not any(type(one) is Tensor and one.ndim for one in operands)):
        return
    first, told = targets[0].cut, ""
    for axis in first.ranks.axes:
        if axis.size > 1:
            told = told or _words(func, targets, operands)
            axis.journal.add(STEP, told)


def note_gradient(name: str, axes: Iterable[Axis], gradient: Any) -> None:
    """Note a gradient that is set to what this rank computed from pieces and numbers."""
    if isinstance(gradient, DTensor) and (told := _value(gradient)):
        for axis in axes:
            axis.journal.add(STEP, f"the gradient of '{name}' set to {told}")


def remember(func: Any, operands: Iterable[Any], made: Any) -> None:
    """Mark pieces that an operation has made, or written, with a checksum of the numbers that went
    into it; not weights and gradients at rest, whose writes are noted."""
    made = made if isinstance(made, (list, tuple)) else (made,)
    ours = [one for one in made if getattr(one, "version", stepping) is None]
    values = [_value(one) for one in operands if ours and one is not False]  # pin_memory=False
    if any(values):
        known = zlib.crc32(f"{func} {values}".encode())
        for one in ours:
            one.__dict__["made"] = known


def _words(func: Any, targets: Sequence[Any], operands: Iterable[Any]) -> str:
    others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
    values = ", ".join(told for one in operands if (told := _value(one)))
    return f"{func} on '{targets[0].cut.name}'{others}{values and f' with {values}'}"


def _value(operand: Any) -> str:
    """A number, or a checksum of a plain tensor's; of pieces, of the numbers that made them."""
    if isinstance(operand, bool | int | float):
        return f"{operand:.6g}"
    if isinstance(operand, DTensor):
        made = operand.__dict__.get("made")
        return "" if made is None else f"pieces made with numbers {made:08x}"
    if isinstance(operand, Tensor):
        own = not isinstance(operand, FakeTensor) and operand.device.type == "cpu"
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
    return zlib.crc32(some.cpu().clone().view(torch.uint8).numpy().tobytes(), start)
