# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that lose nothing: atomic, hashed, loadable under any layout, and never unpickled.

``save`` and ``load`` handle one checkpoint, ``Store`` those of a run; ``verify`` needs no model.
"""

from shardwise.checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    SaveError,
)
from shardwise.checkpoint.loading import LoadReport, Verification, load, verify
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.store import Store, valid_checkpoints

__all__ = [
    "CheckpointError",
    "DamagedError",
    "LoadReport",
    "Manifest",
    "MismatchError",
    "SaveError",
    "Store",
    "Verification",
    "load",
    "save",
    "valid_checkpoints",
    "verify",
]
