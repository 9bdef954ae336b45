# SPDX-License-Identifier: Apache-2.0
"""Host memory that a save under way writes from, while training goes on to change the tensors.

device   | weight | exp_avg | ...           one copy each, then training goes on
host     |weight|exp_avg|..... one block, kept from save to save .....|
            ^ a tensor whose storage is exactly its bytes: torch.save writes whole storages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwise.checkpoint.plan import Piece
from shardwise.streams import Lanes

_ALIGNMENT = 64


class Staging:
    """One block of host memory, as large as the largest save so far."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with their data in host memory. The copies are complete on return."""
        begins, end = [], 0
        for piece in pieces:
            begins.append(end)
            end += -(-piece.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {piece.data.device for piece in pieces if piece.data.device.type == "cuda"}
        if self._block.numel() < end:
            self._block = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._block = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
        staged = []
        for piece, begin in zip(pieces, begins, strict=True):
            host = _exactly(self._block[begin : begin + piece.data.nbytes], piece.data)
            host.copy_(piece.data, non_blocking=True)
            staged.append(replace(piece, data=host))
        for device in devices:
            Lanes(device).settle()
        return staged


def on_host(data: Tensor) -> Tensor:
    """The tensor in host memory, with a storage of exactly its bytes; copied only if it must be."""
    data = data.detach().resolve_conj().resolve_neg()
    if data.device.type != "cpu" or not data.is_contiguous():
        return data.to("cpu").contiguous()
    if data.untyped_storage().nbytes() == data.nbytes:
        return data
    return _exactly(data.reshape(-1).view(torch.uint8), data)


def _exactly(memory: Tensor, like: Tensor) -> Tensor:
    """Bytes of a larger block as a tensor of its own, in the same memory."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    # By way of numpy: a view made by torch would share, and save, the whole block's storage.
    return torch.from_numpy(memory.numpy()).view(like.dtype).view(like.shape)
