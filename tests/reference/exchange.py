# SPDX-License-Identifier: Apache-2.0
"""The elements that a rank sends for an exchange, counted piece by piece from the ownership."""

from __future__ import annotations

from shardwise.optim.ownership import Ownership


def sent(ownership: Ownership, replica: int, rank: int) -> tuple[int, int]:
    """Elements that a rank sends to owners, and back to holders, in one step."""
    to_owners = back = 0
    for matrix, (computed_by, owner) in zip(ownership.matrices, ownership.owners, strict=True):
        for holder, lo, hi in matrix.pieces:
            if computed_by == replica and holder != owner:
                to_owners += (hi - lo) * (holder == rank)
                back += (hi - lo) * (owner == rank)
    return to_owners, back


def sent_to_replicas(ownership: Ownership, replica: int, rank: int) -> int:
    """Elements that a rank sends to the other replicas in one step."""
    stored = sum(
        hi - lo
        for matrix, (computed_by, _) in zip(ownership.matrices, ownership.owners, strict=True)
        for holder, lo, hi in matrix.pieces
        if computed_by == replica and holder == rank
    )
    return stored * (ownership.num_replicas - 1)
