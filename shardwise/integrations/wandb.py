# SPDX-License-Identifier: Apache-2.0
"""``shardwise train --loggers wandb``: a Weights & Biases run (WANDB_MODE=offline works too)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.train.logs import Event, scalars
from shardwise.train.tokenise import require


class Sink:
    """Receives the events of a run and forwards its scalars."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        wandb = require("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            dir=str(folder), name=folder.name, project="shardwise", config=config
        )

    def log(self, event: Event) -> None:
        values = scalars(event)
        if values:
            self._run.log(values, step=event["step"])

    def close(self) -> None:
        self._run.finish()
