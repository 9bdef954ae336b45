# SPDX-License-Identifier: Apache-2.0
"""Run the suite on ``shardwise.engine`` (issue 41), until it takes ``shardwise.shard``'s place:

SHARDWISE_ENGINE=new python -m pytest tests/parity/test_one_process.py
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

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
    api.fully_shard = _without(api.fully_shard, "gather_in_step")
    api.data_parallel = _without(api.data_parallel, "gather_in_step", overlap_gather={"step": True})
    from tests import ranks

    if patience := os.environ.get("SHARDWISE_PATIENCE"):
        ranks.run_ranks.__kwdefaults__["timeout"] = float(patience)


def _without(verb: Any, *gone: str, **other: dict[Any, Any]) -> Any:
    """The verb, for calls with arguments that the new engine has given up."""

    @functools.wraps(verb)
    def call(*args: Any, **options: Any) -> Any:
        for name in gone:
            options.pop(name, None)
        for name, values in other.items():
            if name in options:
                options[name] = values.get(options[name], options[name])
        return verb(*args, **options)

    return call


IS_NEW = os.environ.get("SHARDWISE_ENGINE") == "new"
if IS_NEW:
    install()
