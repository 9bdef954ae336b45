# SPDX-License-Identifier: Apache-2.0
"""shardwise: sharded training with whole-matrix optimizers, as configurations of one idea.

import shardwise as sw

mesh = sw.init_mesh(dp=8)
for block in model.blocks:
    sw.fully_shard(block, mesh=mesh, placements=sw.zero(3))
sw.fully_shard(model, mesh=mesh, placements=sw.zero(3))
optimizer = torch.optim.AdamW(model.parameters())

``shardwise.api`` lists the public names. They are imported on first use: ``shardwise --help`` needs
no torch.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """A submodule (``shardwise.comm``), or a name of ``shardwise.api``."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    if find_spec(f"shardwise.{name}") is not None:
        return importlib.import_module(f"shardwise.{name}")
    found = getattr(importlib.import_module("shardwise.api"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module("shardwise.api").__all__]
