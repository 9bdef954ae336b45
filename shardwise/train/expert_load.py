# SPDX-License-Identifier: Apache-2.0
"""ExpertLoad: how much each expert had to do in a step, for the metrics and for the next step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.moe import mixtures_of
from shardwise.moe.router import statistics_of


class ExpertLoad:
    """The routers of a model; nothing where it has none. Counts are those of the last step."""

    def __init__(self, model: nn.Module) -> None:
        self.routers = [layer.router for layer in mixtures_of(model)]
        self.counts: list[list[int]] = []  # [layer][expert]: choices, dropped ones too
        self.dropped: list[int] = []  # [layer]

    def tally(self) -> list[float]:
        """This rank's counts since the last step, to be summed over the ranks."""
        if not self.routers:
            return []
        return torch.stack([router.tally() for router in self.routers]).flatten().tolist()

    def after_step(self, *, moved: bool) -> None:
        """Move the routers' biases if weights were moved, and count anew (collective)."""
        for router in self.routers:
            if moved:
                router.update_bias()
            else:
                router.forget_load()

    def figures(self, total: Tensor) -> dict[str, Any]:
        """Of the tallies of all ranks: a step's numbers, each the layers' worst."""
        if not self.routers:
            return {}
        layers = total.view(len(self.routers), -1)  # [layers, experts + 1]
        counts, dropped = layers[:, :-1], layers[:, -1]
        self.counts = [[int(count) for count in layer] for layer in counts.tolist()]
        self.dropped = [int(count) for count in dropped.tolist()]
        found = statistics_of(counts, dropped, counts.sum(-1))
        return {f"expert_{name}": float(value.max()) for name, value in found.items()}
