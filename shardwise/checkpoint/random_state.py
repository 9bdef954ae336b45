# SPDX-License-Identifier: Apache-2.0
"""The random generators of one rank: Python's, numpy's, torch's on the CPU and on the device.

With as many ranks as at the time of the save, each gets its own states back and the streams go on
as if nothing had happened. With another number no stream can go on: every rank is then seeded
from rank 0's saved state, its own rank and the number of ranks. That is deterministic, different on
every rank, and different from what a fresh run with the same seed would draw.
"""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

import numpy
import torch

from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.values import to_bytes

log = logging.getLogger(__name__)


def capture() -> dict[str, Any]:
    """The states of all generators, drawing from none."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        # A process drives one device; asking would start a driver that nobody uses yet.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore(state: dict[str, Any], where: str) -> None:
    """Put the generators back."""
    try:
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        elif state["cuda"] is not None:
            log.warning("%s holds a GPU's random state; there is no GPU here to take it", where)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DamagedError(f"{where}: the random states can't be used: {error}") from error


def reseed(first_rank: dict[str, Any], rank: int, world_size: int) -> int:
    """Seed all generators for a world of another size; the same seed whenever it is done."""
    basis = to_bytes([first_rank, rank, world_size], "the random states")
    seed = int.from_bytes(hashlib.sha256(basis).digest()[:8], "big")
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)  # of the device too
    return seed
