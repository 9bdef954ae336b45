# SPDX-License-Identifier: Apache-2.0
"""Experts are stored one by one, under their numbers over all ranks, whatever holds them.

    rank 0   fc1.weight [2, out, in]   experts 0, 1         stored   fc1.weight0   [out, in]
    rank 1   fc1.weight [2, out, in]   experts 2, 3    <-->          fc1.weight1
                                                                     fc1.weight2   any layout, any
    or       fc1.weight0, .weight1, ...                              fc1.weight3   number of ranks

Optimizer states follow their parameters; a count beside them is stored with every expert. Gate and
up stay in the order they have; it is recorded, and a load in another order permutes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.plan import Piece
from shardwise.layout import Shape
from shardwise.moe.activation import convert_gate_up
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear
from shardwise.moe.keys import indexed_keys

Rename = Callable[[str], str]


@dataclass(frozen=True)
class Stack:
    """How a parameter of this rank, or a state beside one, is stored: experts by name."""

    here: tuple[str, ...]  # in order; a single one where every expert has a parameter of its own
    everywhere: tuple[str, ...]  # of all ranks
    grouped: bool  # whether dimension 0 counts experts
    order: str | None = None  # the extra state that says in which order gate and up stand
    block: int = 0  # in which they stand here

    def renamed(self, rename: Rename) -> Stack:
        here, everywhere = map(rename, self.here), map(rename, self.everywhere)
        return replace(self, here=tuple(here), everywhere=tuple(everywhere))

    @property
    def spread(self) -> bool:
        """Whether other ranks have other experts."""
        return len(self.everywhere) > len(self.here)

    def stored_shape(self, shape: Shape) -> Shape:
        """Of one expert; a count has no dimension to take away."""
        return shape[1:] if self.grouped and shape else shape

    def live_shape(self, stored: Shape) -> Shape:
        return (len(self.here), *stored) if self.grouped and stored else stored

    def split(
        self, offsets: Shape, sizes: Shape, data: Tensor
    ) -> list[tuple[str, Shape, Shape, Tensor]]:
        """A box of the live tensor as boxes of stored ones: (name, offsets, sizes, data)."""
        if not self.grouped:
            return [(self.here[0], offsets, sizes, data)]
        if not sizes:
            return [(name, (), (), data) for name in self.here]
        names = self.here[offsets[0] : offsets[0] + sizes[0]]
        return [
            (name, offsets[1:], sizes[1:], part) for name, part in zip(names, data, strict=True)
        ]

    def reorders(self, extra_states: Mapping[str, Any]) -> bool:
        """Whether gate and up stand in another order in a checkpoint."""
        return self.order is not None and self._stored_block(extra_states) != self.block

    def stored_rows(self, num_rows: int, extra_states: Mapping[str, Any]) -> Tensor | None:
        """For each row here, which row it is in the checkpoint; None where they are the same."""
        if not self.reorders(extra_states):
            return None
        stored = self._stored_block(extra_states)
        try:
            return convert_gate_up(torch.arange(num_rows), stored, self.block, 0)
        except (ValueError, RuntimeError) as error:
            raise DamagedError(f"'{self.order}' in the checkpoint: {error}") from error

    def _stored_block(self, extra_states: Mapping[str, Any]) -> int:
        assert self.order is not None
        try:
            block: int = extra_states[self.order]["gate_up_block"]
        except (LookupError, TypeError) as error:
            raise DamagedError(f"'{self.order}' in the checkpoint tells no order") from error
        return block


def stacks_of(model: nn.Module, clean: Rename) -> dict[str, Stack]:
    """By the name of the parameter, for all expert parameters of a model."""
    found: dict[str, Stack] = {}
    for path, module in model.named_modules():
        if not isinstance(module, GroupedLinear):
            continue
        prefix = clean(f"{path}.") if path else ""
        gated = isinstance(module, GateUpLinear)
        order = f"{prefix}_extra_state" if gated else None
        block = module.gate_up_block if isinstance(module, GateUpLinear) else 0
        for name, layout in module.layouts.items():
            everywhere = indexed_keys(prefix, name, module.total_experts)
            here = indexed_keys(prefix, name, module.num_experts, module.first_expert)
            if layout == "grouped":
                found[f"{prefix}{name}"] = Stack(tuple(here), tuple(everywhere), True, order, block)
                continue
            for index, stored in enumerate(here):
                alike = tuple(everywhere[index :: module.num_experts])
                found[f"{prefix}{name}{index}"] = Stack((stored,), alike, False, order, block)
    return found


def one_by_one(piece: Piece, stack: Stack | None) -> list[Piece]:
    """What is written for a piece of a live tensor."""
    if stack is None:
        return [piece]
    shape = stack.stored_shape(piece.shape)
    split = stack.split(piece.offsets, tuple(piece.data.shape), piece.data)
    return [Piece(key, shape, offsets, data) for key, offsets, _, data in split]
