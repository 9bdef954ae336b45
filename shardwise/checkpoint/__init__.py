# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that lose nothing: atomic, hashed, loadable under any layout, and never run.

``save`` and ``load`` for one; ``Store`` for a run; ``verify`` and ``export`` for one that is there.
"""

from shardwise.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    SaveError,
    UnsafeError,
)
from shardwise.checkpoint.exporting import export
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.store import Store, valid_checkpoints
from shardwise.checkpoint.verifying import Report, verify

__all__ = [
    "CheckpointError",
    "DamagedError",
    "Manifest",
    "MismatchError",
    "Report",
    "SaveError",
    "Store",
    "UnsafeError",
    "export",
    "load",
    "save",
    "valid_checkpoints",
    "verify",
]
