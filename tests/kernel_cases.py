# SPDX-License-Identifier: Apache-2.0
"""Polynomials, spectra and the yardstick that the kernel tests on CPU and GPU share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shardwise.kernels.forms import Polynomial
from shardwise.optim import newton_schulz as optim

PRESETS = {name: preset.polynomial for name, preset in optim.PRESETS.items()}


def singular_values(kind: str, rows: int, columns: int) -> Tensor:
    """ "even": from 1 to 1/50; "power": 1/i."""
    short = min(rows, columns)
    if kind == "even":
        return torch.linspace(1, 0.02, short, dtype=torch.float64)
    return 1 / torch.arange(1, short + 1, dtype=torch.float64)


@functools.cache
def spectrum(kind: str, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(matrix, U, V), fp64, with ``singular_values``."""
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    u, v = (
        torch.linalg.qr(torch.randn(side, min(rows, columns), generator=generator).double())[0]
        for side in (rows, columns)
    )
    return u @ torch.diag(singular_values(kind, rows, columns)) @ v.mT, u, v


def gains_of(polynomial: Polynomial, values: Tensor, factor: float = 1.0) -> Tensor:
    """Where the polynomial takes singular values: normalised, then off by ``factor``."""
    order = 2 if polynomial.norm == "frobenius" else 4
    s = factor * values / (values.pow(order).sum().pow(1 / order) * polynomial.safety)
    for step in polynomial.coefficients:
        s = sum(value * s ** (2 * power + 1) for power, value in enumerate(step))  # type: ignore[assignment]
    return s


def band(polynomial: Polynomial, values: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest, highest) gain of singular values that rounding has moved by up to 2 %.

    Steep polynomials such as Keller's magnify the rounding of what they are given.
    """
    factors = torch.linspace(0.98, 1.02, 41).tolist()
    gains = torch.stack([gains_of(polynomial, values, factor) for factor in factors])
    return gains.amin(0), gains.amax(0)


def quality(found: Tensor, u: Tensor, v: Tensor) -> tuple[float, Tensor]:
    """(share of the result off the input's singular directions, its gains along them)."""
    gains = u.mT @ found.double() @ v
    diagonal = gains.diagonal()
    total = gains.square().sum()
    rotation = ((total - diagonal.square().sum()).clamp(min=0) / total).sqrt()
    return float(rotation), diagonal
