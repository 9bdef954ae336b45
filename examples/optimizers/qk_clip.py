# SPDX-License-Identifier: Apache-2.0
"""Muon that shortens queries and keys where attention logits grow too large (QK-clip).

torchrun --standalone --nproc-per-node 2 examples/optimizers/qk_clip.py
"""

from __future__ import annotations

from typing import ClassVar

import torch
from common import train
from torch import Tensor

import shardwise as sw
from shardwise.optim.rules import Step


class QKClip(sw.muon):
    # By parameter: the shape of a head, and a factor for each of its heads, which forward writes.
    heads: ClassVar[dict[str, tuple[tuple[int, int], Tensor]]] = {}

    def after(self, weights: list[Tensor], updates: list[Tensor], step: Step) -> None:
        super().after(weights, updates, step)
        for weight, piece in zip(weights, step.pieces(), strict=True):
            if piece.name in self.heads:
                (rows, columns), factors = self.heads[piece.name]
                elements = torch.arange(piece.begin, piece.end)  # of the parameter; they lie here
                weight.mul_(factors[elements // (rows * columns)])


def main() -> float:
    QKClip.heads["0.weight"] = (16, 32), torch.tensor([1.0, 1.0, 0.99, 1.0])
    return train(QKClip(lr=0.02))


if __name__ == "__main__":
    main()
