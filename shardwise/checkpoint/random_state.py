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


class States:
    """The generators' states of one rank as a checkpoint holds them: checked, not yet set."""

    def __init__(self, saved: Any, where: str) -> None:
        self._saved, self._where = saved, where
        try:
            sound = _try(saved)
        except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DamagedError(f"{where}: the random states can't be used: {error}") from error
        if not sound:
            raise DamagedError(f"{where}: the random states are not what shardwise writes")

    def restore(self) -> None:
        """Put the generators back."""
        saved = self._saved
        random.setstate(saved["python"])
        numpy.random.set_state(saved["numpy"])
        torch.set_rng_state(saved["torch"])
        if saved["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(saved["cuda"])
        elif saved["cuda"] is not None:
            log.warning("%s holds a GPU's random state; there is no GPU here for it", self._where)

    def reseed(self, rank: int, world_size: int) -> int:
        """Seed all generators for a world of another size; the same seed whenever it is done."""
        basis = to_bytes([self._saved, rank, world_size], "the random states")
        seed = int.from_bytes(hashlib.sha256(basis).digest()[:8], "big")
        random.seed(seed)
        numpy.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)  # of the device too
        return seed


def _try(saved: Any) -> bool:
    """Set the states of generators made for it; False, or any error, where they are none."""
    if type(saved) is not dict:
        return False
    random.Random().setstate(saved["python"])
    torch.Generator().set_state(saved["torch"])
    if (cuda := saved["cuda"]) is not None:
        if type(cuda) is not torch.Tensor or cuda.dtype != torch.uint8 or cuda.dim() != 1:
            return False
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(cuda)
    *_, next_gauss = saved["python"]
    return (next_gauss is None or type(next_gauss) is float) and _try_numpy(saved["numpy"])


def _try_numpy(state: Any) -> bool:
    """numpy takes any position in its key, and would read from there, wherever that is."""
    if type(state) is tuple:
        _, key, position, has_gauss, gauss = state
        numbers = (position, has_gauss)
        if any(type(n) is not int for n in numbers) or type(gauss) not in (int, float):
            return False
        if not isinstance(key, numpy.ndarray) or not 0 <= position <= len(key):
            return False
    elif type(state) is not dict or state["bit_generator"] not in ("PCG64", "PCG64DXSM", "SFC64"):
        return False
    generator = type(numpy.random.get_bit_generator())()  # type: ignore[attr-defined]
    numpy.random.RandomState(generator).set_state(state)
    return True
