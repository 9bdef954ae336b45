# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a checkpoint, by kind: what to do next differs."""

from __future__ import annotations

from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that can't be saved, read or used as asked."""


class DamagedError(CheckpointError):
    """Bytes are missing, or not those that shardwise has written: take an older checkpoint."""


class UnsafeError(DamagedError):
    """A file asks for more than numbers: code to run, or a path outside. Never load it."""


class MismatchError(CheckpointError):
    """A sound checkpoint of another model or optimizer: nothing of it was loaded."""


class SaveError(RuntimeError):
    """A checkpoint that was under way has failed; the ones before it are untouched."""


def shown(value: Any) -> str:
    """A value from a file for a message: short, and computed without walking through it."""
    if type(value) is str:
        return repr(value if len(value) <= 80 else value[:80] + "...")
    if value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 1e30):
        return repr(value)
    return f"of type {type(value).__name__}"
