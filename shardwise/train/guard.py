# SPDX-License-Identifier: Apache-2.0
"""Guard: requests to stop a run, and numbers that are not finite.

    SIGTERM, SIGHUP, SIGINT, SIGUSR1 \\
    the file $SHARDWISE_STOP      > the step is finished, a checkpoint written, exit code 0
    ...on any one rank           /
    a gradient that is not finite    the step is dropped, on every rank; too many in a row: an error
    a weight that is not finite      nothing is saved: the checkpoints before stay
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

from shardwise import comm
from shardwise.checkpoint import SaveError
from shardwise.optim.storage import local_of
from shardwise.train.world import stop_files

logger = logging.getLogger(__name__)


def stop_signals() -> list[signal.Signals]:
    """The signals of a user, a closed terminal or a batch system that mean stop, without those that
    this process ignores (``nohup`` ignores SIGHUP)."""
    found = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
    return [number for number in found if signal.getsignal(number) is not signal.SIG_IGN]


class Guard:
    """Notes requests to stop while it is open, in the main thread."""

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
            raise KeyboardInterrupt  # the second request: end at once, without a checkpoint
        self.heard = signal.Signals(number).name

    @property
    def asked(self) -> str | None:
        """The request to stop that this rank got, if any."""
        if self.heard is None and any(map(os.path.exists, self._files)):
            self.heard = "a stop request"
        return self.heard


class BrokenGradientError(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


class Skips:
    """Counts steps that were dropped because of their gradient."""

    def __init__(self, limit: int) -> None:
        self.limit, self.in_a_row, self.total = limit, 0, 0

    def good(self) -> None:
        self.in_a_row = 0

    def broken(self, step: int, norm: float, where: list[str]) -> None:
        """Count one more step without weights having moved; raise if there are too many in a row.

        ``where``: the gradients of this rank that are not finite.
        """
        self.in_a_row += 1
        self.total += 1
        for line in where[:4]:
            logger.warning("step %d: %s", step, line)
        if self.in_a_row > self.limit:
            raise BrokenGradientError(
                f"step {step}: the gradient's norm is {norm}, in {self.in_a_row} steps in a row; "
                f"{'; '.join(where[:4]) or 'seen by other ranks'}. Lower the learning rates, "
                f"look at the data, or raise max_skipped"
            )


def refuse_broken_weights(model: nn.Module, axis: comm.Axis) -> None:
    """Raise on every rank where a trained weight of any rank is not finite (collective)."""
    trained = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
    pieces = [piece for p in trained if (piece := local_of(p).detach()).numel()]
    norms = [norm.float() for norm in torch._foreach_norm(pieces, math.inf)] if pieces else []
    finite = not norms or bool(torch.stack(norms).isfinite().all())
    if not all(comm.agree(finite, axis)):
        raise SaveError(
            "weights are not finite: an update was too large. --resume goes on from the "
            "checkpoint before: give it lower learning rates"
        )
