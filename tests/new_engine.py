# SPDX-License-Identifier: Apache-2.0
"""Run the suite on ``shardwise.engine`` (issue 41), until it takes the place of ``shardwise.shard``:

    SHARDWISE_ENGINE=new python -m pytest tests/parity/test_one_process.py
"""

from __future__ import annotations

import importlib
import os

NAMES = {
    "fully_shard": "fully_shard",
    "data_parallel": "data_parallel",
    "module": "ShardedModule mark_written",
}


def install() -> None:
    """Let ``shardwise`` show the new engine, in this process."""
    api = importlib.import_module("shardwise.api")
    for file, names in NAMES.items():
        made = importlib.import_module(f"shardwise.engine.{file}")
        for name in names.split():
            setattr(api, name, getattr(made, name))
    from tests import ranks

    if patience := os.environ.get("SHARDWISE_PATIENCE"):
        ranks.run_ranks.__kwdefaults__["timeout"] = float(patience)


IS_NEW = os.environ.get("SHARDWISE_ENGINE") == "new"
if IS_NEW:
    install()
