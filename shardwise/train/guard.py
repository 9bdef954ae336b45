# SPDX-License-Identifier: Apache-2.0
"""Guard: requests to stop a run, and numbers that are not finite.

    SIGTERM, SIGHUP, SIGINT, SIGUSR1 \\
    the file $SHARDWISE_STOP      > finish the step, write a checkpoint, exit with code 0
    ...on any one rank           /
    a gradient that is not finite    skip the step on every rank; after too many in a row, an error
    a weight that is not finite      save nothing; earlier checkpoints stay
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import SaveError
from shardwise.core import comm
from shardwise.optim.storage import local_of
from shardwise.train.world import stop_files

logger = logging.getLogger(__name__)


def stop_signals() -> list[signal.Signals]:
    """The signals by which a user, a closed terminal or a batch system stops a run, without those
    that this process ignores (``nohup`` ignores SIGHUP)."""
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


class Guard:
    """Records requests to stop, in the main thread, while the context is open."""

    def __init__(self) -> None:
        self.heard: str | None = None
        self._files = stop_files()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Guard:
        faulthandler.enable()
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.heard == "SIGINT":
            raise KeyboardInterrupt  # the second Ctrl-C: end at once, without a checkpoint
        self.heard = signal.Signals(number).name

    @property
    def asked(self) -> str | None:
        """The request to stop that this rank has received, or None."""
        if self.heard is None and any(map(os.path.exists, self._files)):
            self.heard = "a stop request"
        return self.heard


class BrokenGradientError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


class Skips:
    """Counts the steps that were skipped because of their gradient."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row, self.total = limit, 0, 0

    def good(self) -> None:
        self.in_a_row = 0

    def broken(self, step: int, norm: float, where: list[str]) -> None:
        """Count a skipped step; raise if there are too many in a row.

        ``where`` describes the gradients that are not finite.
        """
        self.in_a_row += 1
        self.total += 1
        for line in where[:4]:
            logger.warning("step %d: %s", step, line)
        if self.in_a_row > self.limit:
            raise BrokenGradientError(
                f"step {step}: the gradient's norm is {norm}, and was not finite in "
                f"{self.in_a_row} steps in a row; "
                f"{'; '.join(where[:4]) or 'other ranks have the broken gradients'}. Lower the "
                f"learning rates, check the data, or raise max_skipped"
            )


def refuse_broken_weights(model: nn.Module, axis: comm.Axis) -> None:
    """Raise on every rank where a trained weight of any rank is not finite (collective)."""
    trained = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
    pieces = [piece for p in trained if (piece := local_of(p).detach()).numel()]
    norms = [norm.float() for norm in torch._foreach_norm(pieces, math.inf)] if pieces else []
    finite = not norms or bool(torch.stack(norms).isfinite().all())
    if not all(comm.agree(finite, axis)):
        raise SaveError(
            "weights are not finite: an update was too large. Resume from the last checkpoint "
            "(--resume) with lower learning rates"
        )
