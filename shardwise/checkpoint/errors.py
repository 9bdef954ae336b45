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


_KINDS = {kind.__name__: kind for kind in (DamagedError, MismatchError, SaveError)}


def joint_error(kinds: set[str], text: str) -> Exception:
    """The error that all ranks raise when some of them raised errors of the classes ``kinds``.

    If some ranks saw damage and others another problem, the error is a ``DamagedError``: the other
    problem may come from the damage, and a load then tries the next older checkpoint.
    """
    [name, *others] = sorted(kinds)
    if others:
        return DamagedError(text) if "DamagedError" in kinds else CheckpointError(text)
    if name in _KINDS:
        return _KINDS[name](text)
    return CheckpointError(text if name == "CheckpointError" else f"{name}: {text}")


def ranks_with_data() -> comm.Axis:
    """The axis of all ranks; raises a ``CheckpointError`` with the fake backend of torch."""
    axis = agreement.all_ranks()
    if axis.pretends:
        raise CheckpointError(
            f"one process poses as rank {axis.rank} of {axis.size} (the fake backend): the other "
            f"ranks' shards do not exist, so no checkpoint can be made or read"
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
