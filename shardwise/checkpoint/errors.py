# SPDX-License-Identifier: Apache-2.0
"""The errors of checkpoints: a class for each thing that a user can do next, raised by all ranks
together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shardwise.core import agreement, comm

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint can't be saved, read or used as asked."""


class DamagedError(CheckpointError):
    """Bytes are missing, or are not what shardwise writes: use an older checkpoint."""


class MismatchError(CheckpointError):
    """The checkpoint is of another model or optimizer; nothing was loaded."""


class SaveError(RuntimeError):
    """A save has failed; earlier checkpoints are untouched."""


def joint_error(kinds: set[str], text: str) -> Exception:
    """The error that all ranks raise when some of them raised errors of the classes ``kinds``.
    Damage comes first: another problem may come from it, and a load then tries an older one."""
    if "DamagedError" in kinds:
        return DamagedError(text)
    for kind in (MismatchError, SaveError):
        if kinds == {kind.__name__}:
            return kind(text)
    known = len(kinds) > 1 or "CheckpointError" in kinds
    return CheckpointError(text if known else f"{kinds.pop()}: {text}")


def ranks_with_data() -> comm.Axis:
    """The axis of all ranks; raises a ``CheckpointError`` with the fake backend of torch."""
    axis = agreement.all_ranks()
    if axis.pretends:
        raise CheckpointError(
            f"one process poses as rank {axis.rank} of {axis.size} (the fake backend): no other "
            f"rank's shards exist"
        )
    return axis


def together(
    work: Callable[[], T], axis: comm.Axis, *, facts: Callable[[T], Any] = lambda result: None
) -> tuple[T, list[Any]]:
    """Call ``agreement.together`` with the errors of this module."""
    return agreement.together(work, axis, facts=facts, error=joint_error)


def shown(value: Any) -> str:
    """A short text for a value from a file. A container is not walked: it may be huge."""
    if value is None or type(value) in (bool, int, float, str):
        return f"{value!r:.80}"
    return f"of type {type(value).__name__}"


def listed(headline: str, problems: list[str]) -> str:
    """The headline and one line for each of the first problems."""
    found = list(dict.fromkeys(problems))
    more = [f"and {len(found) - 40} more"] if len(found) > 40 else []
    return "\n  ".join([headline, *found[:40], *more])
