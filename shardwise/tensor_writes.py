# SPDX-License-Identifier: Apache-2.0
"""Record in-place writes to sharded weights and gradients, so that ranks can compare them.

    rank 0   p.data.mul_(0.5)     journal: "aten.mul_.Tensor on 'head.weight' with 0.5"
    rank 1   (nothing)            journal: nothing       -> both raise at the end of a backward

Each rank writes its own pieces. If only some ranks run an operation, or run it with another number,
the pieces no longer belong together, and nothing else would notice. Tensors remember the numbers
that they were made with (``p.grad * coefficient``) until they are written to a weight or set as a
gradient. Operands on a GPU are not read: the host would have to wait for them.
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

# The optimizer that steps now, if any. A step is noted as a whole, and not its operations.
stepping: list[Any] = []


def note(func: Any, targets: Sequence[Any], operands: Sequence[Any]) -> None:
    """Count a write that comes next, wait for gathers that still read, and note the operation.

    During a backward (gradients of a penalty on weights, hooks of gradients) only operations with
    plain tensors are noted: a mask is the same on all ranks, a rank's own gradient is not.
    """
    for target in targets:
        target.version.write()
    in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
    if stepping or (in_backward and not any(type(x) is Tensor and x.ndim for x in operands)):
        return
    axes = [axis for axis in targets[0].cut.ranks.axes if axis.size > 1]
    words = _words(func, targets, operands) if axes else ""
    for axis in axes:
        axis.journal.add(STEP, words)


def note_gradient(name: str, axes: Iterable[Axis], gradient: Any) -> None:
    """Note that a gradient is set to values that this rank computed from pieces and numbers."""
    words = _value(gradient) if isinstance(gradient, DTensor) else ""
    for axis in axes if words else ():
        axis.journal.add(STEP, f"the gradient of '{name}' set to {words}")


def remember(func: Any, operands: Iterable[Any], result: Any) -> None:
    """Mark the pieces that an operation has made or written with a checksum of the numbers that
    went into it. Weights and gradients at rest get no mark: writes to them are noted."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    marked = [x for x in results if hasattr(x, "version") and x.version is None]
    values = [_value(x) for x in operands if marked and x is not False]  # pin_memory=False
    if any(values):
        checksum = zlib.crc32(f"{func} {values}".encode())
        for pieces in marked:
            pieces.__dict__["made"] = checksum


def _words(func: Any, targets: Sequence[Any], operands: Iterable[Any]) -> str:
    others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
    values = ", ".join(filter(None, map(_value, operands)))
    return f"{func} on '{targets[0].cut.name}'{others}{values and f' with {values}'}"


def _value(operand: Any) -> str:
    """A number, or a checksum of a plain tensor; for pieces, of the numbers that made them."""
    if isinstance(operand, bool | int | float):
        return f"{operand:.6g}"
    if isinstance(operand, DTensor):
        made = operand.__dict__.get("made")
        return "" if made is None else f"pieces made with numbers {made:08x}"
    if isinstance(operand, Tensor):
        if isinstance(operand, FakeTensor) or operand.device.type != "cpu":
            return ""
        if operand.numel() == 1 and not operand.is_complex():
            return f"{operand.item():.6g}"
        return f"values {sketch(operand):08x}"
    if isinstance(operand, (list, tuple)):
        values = [_value(x) for x in operand]
        return f"values {zlib.crc32(repr(values).encode()):08x}" if any(values) else ""
    return ""


def sketch(tensor: Tensor, start: int = 0) -> int:
    """A checksum of some elements of a tensor, the same on ranks that have the same values."""
    if not tensor.numel() or tensor.is_meta or not tensor.is_contiguous():
        return start
    some = tensor.detach().view(-1)[:: tensor.numel() // 64 + 1]
    return zlib.crc32(some.cpu().clone().view(torch.uint8).numpy().tobytes(), start)
