# SPDX-License-Identifier: Apache-2.0
"""Polynomials, spectra and the yardstick that the kernel tests on CPU and GPU share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import polynomials
from shardwise.kernels.packed import Packed
from shardwise.kernels.polynomials import Polynomial

# Those of the optimizer, and polynomials of other kinds: cubic, schatten4 with steps of degree 5.
PRESETS = polynomials.PRESETS | {
    "you": Polynomial(
        name="you",
        coefficients=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    ),
    "cubic": Polynomial(
        name="cubic",
        coefficients=(
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
    ),
    "s4": Polynomial(
        name="s4",
        coefficients=(
            (8.057942, -22.052186, 15.540709),
            (3.926349, -2.753793, 0.497354),
            (3.454472, -2.487546, 0.477513),
            (2.511527, -1.852448, 0.438833),
        ),
        norm="schatten4",
        safety=1.01,
    ),
}


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


def gains_of(
    polynomial: Polynomial,
    values: Tensor,
    factor: float | Tensor = 1.0,
    off: float | Tensor = 0.0,
) -> Tensor:
    """Images of singular values under the polynomial: normalised, then off by ``factor``.

    ``off`` is what rounding has added to the first Gram, which the polynomials see until X is
    formed anew, while X does not.
    """
    order = 2 if polynomial.norm == "frobenius" else 4
    s = factor * values / (values.pow(order).sum().pow(1 / order) * polynomial.safety)
    r, q = s * s + off, torch.ones_like(s)
    for index, step in enumerate(polynomial.coefficients):
        if index == polynomial.first_steps:
            s, q = q * s, torch.ones_like(s)
            r = s * s
        z = sum(value * r**power for power, value in enumerate(step))
        q, r = q * z, z * r * z
    return q * s


def band(polynomial: Polynomial, values: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest, highest) gain of singular values that rounding has moved by up to 2 %, or in a Gram,
    whose norm is at most 1, by up to 2e-5.

    Steep polynomials such as Keller's magnify the rounding of what they are given.
    """
    factors = torch.linspace(0.98, 1.02, 41).to(values)[:, None, None]
    offs = torch.linspace(-2e-5, 2e-5, 9).to(values)[:, None]
    gains = gains_of(polynomial, values, factors, offs)
    return gains.amin((0, 1)), gains.amax((0, 1))


def quality(found: Tensor, u: Tensor, v: Tensor) -> tuple[float, Tensor]:
    """(share of the result off the input's singular directions, its gains along them)."""
    gains = u.mT @ found.double() @ v
    diagonal = gains.diagonal()
    total = gains.square().sum()
    rotation = ((total - diagonal.square().sum()).clamp(min=0) / total).sqrt()
    return float(rotation), diagonal


def pack_reference(grads: Sequence[Tensor], states: Sequence[Tensor], **options: Any) -> Packed:
    """``muon.pack`` by definition."""
    from shardwise.kernels.muon import momentum_reference, normalise_reference

    pairs = zip(grads, states, strict=True)
    return normalise_reference(
        torch.stack([momentum_reference(*pair, **options) for pair in pairs])
    )
