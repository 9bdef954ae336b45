# SPDX-License-Identifier: Apache-2.0
"""Packed: a batch of matrices of one shape, scaled for 16-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Tensor descriptors need strides of 16 bytes, so rows and columns are padded with zeros to
# multiples of 8. Newton-Schulz keeps the zeros.
GRANULE = 8
BLOCK = 4096  # elements that a program holds at a time
SAMPLES = 32  # blocks of a matrix from which its power of two is guessed
# A good guess leaves no element above fp16's largest number (the norm is a bound). It leaves the
# rms far above fp16's smallest normal number (2^-14), so that small elements keep their bits.
LARGEST_NORM = 65504.0
LEAST_RMS = 2.0**-3


@dataclass(frozen=True, kw_only=True)
class Packed:
    """``values`` times a power of two per matrix, so that no element overflows fp16.

    The power of two brings the rms of a sample into [1, 2). So the matrix is read once, and its
    norm is summed in the same pass. If the guess is bad for the whole matrix (``LARGEST_NORM``,
    ``LEAST_RMS``), the matrix is read again, and the rms of all of it is brought into [1, 2). In
    both cases the power depends on this matrix alone.

    ::

        elements   0 ........ stride ....... 2 stride ....            .... numel
        sample     [BLOCK]    [BLOCK]        [BLOCK]        ..        [BLOCK]
                   (a small matrix is its own sample)

        values  [n, rows up to 8, columns up to 8]     fp16, zeros beyond rows and columns
        inverse_norms [n]                              fp32, 1 / Frobenius norm of ``values``;
                                                       0 for a matrix of zeros
    """

    values: Tensor
    inverse_norms: Tensor
    rows: int
    columns: int

    def unpadded(self, values: Tensor) -> Tensor:
        """``values`` (or a result of the same shape) without the padding."""
        return values[:, : self.rows, : self.columns]


def empty_values(
    count: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float16
) -> Tensor:
    """Memory for ``Packed.values``; the padding, which no kernel writes, is zero."""
    shape = (count, padded(rows), padded(columns))
    if shape[1:] == (rows, columns):
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.zeros(shape, device=device, dtype=dtype)


def padded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def sample_stride(numel: int) -> int:
    """The distance between blocks of the sample. The first block is at the start of the matrix, the
    last at its end.

    The distance is a multiple of 16, for wide loads. It is seldom a multiple of a head's size, so
    that a pattern that repeats with every head does not dominate the sample.
    """
    return max(BLOCK, (numel - BLOCK) // (SAMPLES - 1) // 16 * 16)


def sample_size(numel: int) -> int:
    return min(numel, SAMPLES * BLOCK)


def scale_reference(batch: Tensor) -> tuple[Tensor, Tensor]:
    """(power of two, 1 / norm after it) of each matrix of ``batch`` [n, rows, columns]."""
    squares = batch.flatten(1).double().square()  # [n, numel]
    numel = squares.shape[1]
    starts = torch.arange(SAMPLES, device=batch.device) * sample_stride(numel)
    places = (starts[:, None] + torch.arange(BLOCK, device=batch.device)).flatten()
    sample = squares[:, places[places < numel]]  # [n, sample_size]
    total = squares.sum(1)  # [n]
    guess = power_of_two(sample.sum(1) / sample.shape[1])
    fits = total * guess.square() <= LARGEST_NORM**2
    serves = total / numel * guess.square() >= LEAST_RMS**2
    scale = torch.where((total == 0) | (fits & serves), guess, power_of_two(total / numel))
    inverse = torch.where(total == 0, 0.0, 1 / (total.sqrt() * scale))
    return scale.float(), inverse.float()


def power_of_two(mean_square: Tensor) -> Tensor:
    """The power of two that brings the rms into [1, 2), in fp64; 1 for 0."""
    _, exponent = torch.frexp(mean_square)  # mean square = mantissa in [1/2, 1) times 2^exponent
    halved = ((exponent - 1) // 2).clamp(-126, 126)
    halved = torch.where(mean_square == 0, 0, halved)
    return torch.ldexp(torch.ones_like(mean_square), -halved)
