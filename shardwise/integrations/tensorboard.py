# SPDX-License-Identifier: Apache-2.0
"""``shardwise train --loggers tensorboard``: scalars under the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.train.logs import Event, scalars
from shardwise.train.tokenise import require


class Sink:
    """Receives the events of a run and writes ``tensorboard/`` beside them."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]

    def log(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])
        if event["kind"] == "sample":
            self._writer.add_text("sample", event["text"])

    def close(self) -> None:
        self._writer.close()
