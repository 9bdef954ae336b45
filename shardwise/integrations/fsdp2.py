# SPDX-License-Identifier: Apache-2.0
"""For frameworks that call torch's ``fully_shard`` themselves: accelerate, transformers.Trainer.

with in_place_of_torch():                          # or in_place_of_torch(placements=sw.zero(2))
    model, optimizer = accelerator.prepare(model, optimizer)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed import fsdp

from shardwise.shard.fully_shard import fully_shard


@contextmanager
def in_place_of_torch(**options: Any) -> Iterator[None]:
    """Replace torch's ``fully_shard`` by shardwise's inside the block, in every module that has
    imported it or imports it there. ``options``: arguments that the framework does not pass."""

    @wraps(fully_shard)
    def ours(*args: Any, **given: Any) -> Any:
        return fully_shard(*args, **options | given)

    theirs = fsdp.fully_shard
    try:
        _swap(theirs, ours)
        yield
    finally:
        _swap(ours, theirs)  # also where it was imported inside the block


def _swap(one: Any, other: Any) -> None:
    """Put ``other`` in the place of ``one`` in every module that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("fully_shard") is one:
            vars(module)["fully_shard"] = other
