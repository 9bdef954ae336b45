# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: queries and keys turned by an angle that grows with the position.

Channel i of a head turns together with channel i + width/2 (the two halves of the head, the
convention of Llama weights in the Hugging Face layout), once in 2 pi theta^(2i/width) tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.models.gpt_config import GPTConfig, RopeScaling


class Rotary:
    """The table of a model's angles, computed when it is first asked for on a device.

    No buffer: `to_empty`, which gives a model from the meta device memory but no values, would
    leave a buffer full of garbage. What is computed on demand can't be lost.
    """

    def __init__(self, config: GPTConfig) -> None:
        self.context = config.context
        self.width = config.head_width
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Cosines, and sines with the sign that :func:`rotate` needs: [2, length, 1, width]."""
        key = (device, dtype)
        if key not in self._tables:
            # The angles in fp32 whatever the dtype: position 100,000 has no exact bf16.
            positions = torch.arange(self.context, dtype=torch.float32, device=device)
            angles = torch.outer(positions, self._frequencies(device))  # [context, width / 2]
            cos, sin = angles.cos(), angles.sin()
            table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
            self._tables[key] = table.unsqueeze(2).to(dtype)  # [2, context, 1, width]
        return self._tables[key][:, :length]

    def _frequencies(self, device: torch.device) -> Tensor:
        channels = torch.arange(0, self.width, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / self.theta ** (channels / self.width)  # [width / 2]
        return frequencies if self.scaling is None else stretch(frequencies, self.scaling)


def stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies for a context ``factor`` times as long; see :class:`RopeScaling`."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: leave it alone, 0: stretch it
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """[batch, context, heads, width] turned by ``table`` [2, context, 1, width].

    With halves (a, b) the result is (a cos - b sin, b cos + a sin); rolling by half the width
    swaps the halves and the table holds the signs, which saves negating and joining copies.
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * table[0], swapped, table[1])
