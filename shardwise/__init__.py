# SPDX-License-Identifier: Apache-2.0
"""shardwise: sharded training (ZeRO, FSDP, HSDP) with whole-matrix optimizers such as Muon.

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
import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.api import *  # noqa: F403

__version__ = "0.2.0"
TORCH = (2, 11)  # the oldest torch that is tested


def check_torch() -> None:
    """Raise ``ImportError``, in one line, if torch is missing or too old, without importing torch.

    An old torch would fail later, at the first name that it lacks.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        problem = "torch is not installed"
    else:
        file = Path(spec.origin).with_name("version.py")
        text = file.read_text() if file.is_file() else ""
        version = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", text)
        if version is None or (int(version[2]), int(version[3])) >= TORCH:
            return
        problem = f"torch {version[1]} is installed"
    oldest = f"{TORCH[0]}.{TORCH[1]}"
    raise ImportError(f"pip install 'torch>={oldest}': shardwise needs it, and {problem}")


def __getattr__(name: str) -> Any:
    """A submodule (``shardwise.core.comm``), or a name of ``shardwise.api``."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    check_torch()
    if find_spec(f"shardwise.{name}") is not None:
        return importlib.import_module(f"shardwise.{name}")
    api = importlib.import_module("shardwise.api")
    if not hasattr(api, name):
        moved = [f"shardwise.core.{name}"] if find_spec(f"shardwise.core.{name}") else []
        near = ", ".join(moved or get_close_matches(name, api.__all__, cutoff=0.5))
        raise AttributeError(
            f"module 'shardwise' has no attribute {name!r}{near and f'; there are: {near}'}"
        )
    globals()[name] = found = getattr(api, name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *importlib.import_module("shardwise.api").__all__]
