# SPDX-License-Identifier: Apache-2.0
"""Muon as a textbook would write it: whole matrices, float64, one loop after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.kernels.polynomials import Polynomial


def polar_factor(matrix: Tensor) -> Tensor:
    """U V' of the singular value decomposition, in float64."""
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ v


def exact_newton_schulz(matrix: Tensor, preset: Polynomial) -> Tensor:
    """The result of exact Newton-Schulz: the polynomials applied to the singular values."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    order = {"frobenius": 2, "schatten4": 4}[preset.norm]
    s = s / (s.pow(order).sum().pow(1 / order) * preset.safety)
    for step in preset.coefficients:
        s = torch.stack([value * s ** (2 * k + 1) for k, value in enumerate(step)]).sum(0)
    return (u * s) @ v


class SlowMuon:
    """Muon on whole matrices; ``rows_of[name]`` lists each matrix of a fused weight as index lists
    (rows, columns) of the two-dimensional weight."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        rows_of: dict[str, list[tuple[list[int], list[int]]]],
        preset: Polynomial,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        nesterov: bool = True,
        cautious: bool = False,
        scale: str = "original",
    ) -> None:
        self.weights = {name: value.double().clone() for name, value in weights.items()}
        self.buffers = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.rows_of, self.preset, self.scale = rows_of, preset, scale
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.nesterov, self.cautious = nesterov, cautious

    def step(self, grads: dict[str, Tensor]) -> None:
        mu = self.momentum
        for name, weight in self.weights.items():
            grad, buffer = grads[name].double(), self.buffers[name]
            fresh = grad * (1 - mu)
            buffer.copy_(mu * buffer + fresh)
            update = buffer.clone()
            if self.nesterov:
                update = mu * buffer + fresh
            whole = torch.zeros_like(update)
            for rows, columns in self.rows_of[name]:
                matrix = update[rows][:, columns]
                result = exact_newton_schulz(matrix, self.preset)
                factor = self.factor(len(rows), len(columns))
                for i, row in enumerate(rows):
                    for j, column in enumerate(columns):
                        whole[row, column] = factor * result[i, j]
            decayed = weight * self.lr * self.weight_decay
            if self.cautious:
                decayed = decayed * (weight * whole > 0)
            weight.sub_(decayed).sub_(self.lr * whole)

    def factor(self, rows: int, columns: int) -> float:
        if self.scale == "original":
            return math.sqrt(max(1, rows / columns))
        if self.scale == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        if self.scale == "unit_rms_norm":
            return math.sqrt(rows / columns)
        if self.scale == "max_side":
            return math.sqrt(max(rows, columns))
        return 1.0
