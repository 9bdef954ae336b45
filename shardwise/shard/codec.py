# SPDX-License-Identifier: Apache-2.0
"""Codecs: how compute weights are stored and sent.

A group gathers buffers; only the codec knows what is in them. Several buffers (codes and scales)
are gathered as one collective. A format in fp8 is one more codec:

    room      the buffers: a dtype, and the elements that a shard has there
    encode    a rank's part of main -> its part of each buffer
    view      gathered buffers -> one parameter, as modules see it

If shards cut what is encoded together, numbers are gathered (``staged_because``), and every rank
encodes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.layout import Layout


class Codec(Protocol):
    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values that modules see."""

    @property
    def format(self) -> str | None:
        """The name of a format in fp8; None for numbers."""

    def room(self, layout: Layout) -> Sequence[tuple[torch.dtype, int]]:
        """For each buffer that is gathered: its dtype, and its elements for each shard."""

    def staged_because(self, layout: Layout) -> str:
        """The reason why shards cannot be encoded one by one; "" if they can."""

    def encode(self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int) -> None:
        """Write whole shards of main, from ``first`` on, to the same shards of each buffer."""

    def view(self, buffers: Sequence[Tensor], layout: Layout, index: int) -> Tensor:
        """One parameter, as a view of the gathered buffers."""

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether main weights of this dtype can be sent as they lie."""


@dataclass(frozen=True)
class Cast:
    """Numbers of one dtype."""

    dtype: torch.dtype
    format = None

    def room(self, layout: Layout) -> Sequence[tuple[torch.dtype, int]]:
        return [(self.dtype, layout.shard_size)]

    def staged_because(self, layout: Layout) -> str:
        return ""

    def encode(self, main: Tensor, outs: Sequence[Tensor], layout: Layout, first: int) -> None:
        outs[0].copy_(main, non_blocking=True)

    def view(self, buffers: Sequence[Tensor], layout: Layout, index: int) -> Tensor:
        shape = layout.items[index].shape
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return buffers[0].as_strided(shape, strides, layout.starts[index])

    def is_plain(self, dtype: torch.dtype) -> bool:
        return dtype == self.dtype
