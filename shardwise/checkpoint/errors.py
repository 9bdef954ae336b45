# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a checkpoint, by kind: what to do next differs."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that can't be saved, read or used as asked."""


class DamagedError(CheckpointError):
    """Bytes are missing, too few, or not those that were written: take an older checkpoint."""


class UnsafeError(CheckpointError):
    """A file asks for more than numbers: code to run, or a path outside. Never load it."""


class MismatchError(CheckpointError):
    """A sound checkpoint of another model or optimizer: nothing of it was loaded."""


class SaveError(RuntimeError):
    """A checkpoint that was under way has failed; the ones before it are untouched."""
