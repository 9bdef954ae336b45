# SPDX-License-Identifier: Apache-2.0
"""MXFP8 by its definition, in float64 and by search: no bits, no casts, nothing shared with the
library. float64 holds every bf16 value times every power of two here exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

# e4m3: 4 bits of exponent with bias 7, 3 of mantissa; code 127 is NaN, so 448 is the largest.
E4M3: Floats = np.array(
    [
        (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ][:127]
)
MIDDLES = (E4M3[:-1] + E4M3[1:]) / 2
# What the largest magnitude of a block may be under each scale byte.
BOUNDS = 448 * 2.0 ** (np.arange(255) - 127)


def scales(largest: Floats) -> NDArray[np.int64]:
    """The scale bytes of blocks with these largest magnitudes (NaN and infinities included)."""
    found = np.searchsorted(BOUNDS, largest, side="left")  # the first that is large enough
    return np.where(np.isfinite(largest), found, 255)


def codes(values: Floats, scale: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The nearest e4m3 of ``values / 2^(scale - 127)``, ties to the even code."""
    with np.errstate(invalid="ignore"):
        scaled = np.minimum(np.abs(values) * 2.0 ** (127.0 - scale), 448)
    below = np.searchsorted(MIDDLES, scaled, side="left")
    tie = np.append(MIDDLES, np.inf)[below] == scaled
    nearest = below + (tie & (below % 2 == 1))
    signed = nearest + np.where(np.signbit(values), 128, 0)
    return np.where(scale == 255, 127, signed).astype(np.uint8)


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of [blocks, 32], one block in each row, of values as they are."""
    values = x.double().numpy()
    with np.errstate(invalid="ignore"):
        scale = scales(np.abs(values).max(1))
    found = codes(values, scale[:, None])
    return torch.from_numpy(found), torch.from_numpy(scale.astype(np.uint8))


def decode(code: NDArray[np.int64], scale: NDArray[np.int64]) -> Floats:
    magnitude = np.append(E4M3, np.nan)[code & 127]
    power = np.where(scale == 255, np.nan, 2.0 ** (scale - 127.0))
    return np.where(code & 128, -magnitude, magnitude) * power


# ----------------------------------------------------------------------------------------- inputs


def bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def every_value() -> Tensor:
    """All 65,536 of them."""
    return bf16(torch.arange(65536))


def every_value_under(scale: int) -> Tensor:
    """[blocks, 32]: every bf16 value that can stand in a block with this scale byte.

    The first of each block is the largest magnitude that has the scale, so that it has it."""
    largest = min((scale + 8) << 7 | 0x60, 0x7F7F)
    magnitudes = torch.arange(largest + 1)
    values = torch.cat([magnitudes, magnitudes | 0x8000])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31), value=largest)
    first = torch.full((len(values) // 31, 1), largest)
    return bf16(torch.cat([first, values.view(-1, 31)], 1))


def exhaustive() -> Iterator[tuple[int, Tensor]]:
    """Every value under every scale byte that a finite block can have: 8 million elements."""
    for scale in range(248):
        blocks = every_value_under(scale)
        rows = -len(blocks) % 32  # a whole number of 32 x 32 squares
        yield scale, torch.cat([blocks, blocks[:1].expand(rows, 32)])


def digest(parts: Iterator[Tensor]) -> str:
    """One number for many bytes, to compare machines and versions of torch by."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.cpu().numpy().tobytes())
    return found.hexdigest()


# Of codes then scales of each of ``exhaustive``; torch 2.13 on a CPU.
ROW_DIGEST = "a22ceb4dbb0fb50843e3b6934b73c5b0c796e96678bdcaf497a1a3d0473c63e1"
