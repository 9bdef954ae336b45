# SPDX-License-Identifier: Apache-2.0
"""Experts, each stored under its number over all ranks, whatever layout and ranks hold them.

    rank 0   fc1.weight [2, out, in]   experts 0, 1         stored   fc1.weight0   [out, in]
    rank 1   fc1.weight [2, out, in]   experts 2, 3    <-->          fc1.weight1
                                                                     fc1.weight2   any layout, any
    or       fc1.weight0, .weight1, ...                              fc1.weight3   number of ranks

Optimizer states follow their parameters; a count beside them is stored with every expert. The order
of gate and up is recorded, and a load into another order permutes rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.pieces import Piece
from shardwise.layout import Shape
from shardwise.moe.activation import convert_gate_up
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear
from shardwise.moe.keys import indexed_keys

Rename = Callable[[str], str]


@dataclass(frozen=True)
class Stack:
    """The stored tensors of a parameter of this rank, or of a state beside one: one per expert."""

    here: tuple[str, ...]  # names, in order; one where every expert has a parameter of its own
    everywhere: tuple[str, ...]  # names of the experts of all ranks
    grouped: bool  # whether dimension 0 counts experts
    order: str | None = None  # name of the extra state that holds the order of gate and up
    block: int = 0  # their order on this rank

    def renamed(self, rename: Rename) -> Stack:
        here, everywhere = map(rename, self.here), map(rename, self.everywhere)
        return replace(self, here=tuple(here), everywhere=tuple(everywhere))

    @property
    def spread(self) -> bool:
        """Whether other ranks have other experts."""
        return len(self.everywhere) > len(self.here)

    def state(self, key: str, keys: Iterable[str]) -> tuple[Stack, str]:
        """The stack of one of the states ``keys`` of this parameter, and its key beside the
        parameter of each expert. A state of one expert has the expert's number in its key, as
        optimizers of whole matrices give it: ``left.3`` is ``left`` of the fourth."""
        base, _, number = key.rpartition(".")
        alike = sum(other.rpartition(".")[0] == base for other in keys)
        if not self.grouped or not base or not number.isdigit() or alike % len(self.here):
            return self, key
        count = alike // len(self.here)  # matrices of one expert
        expert, matrix = divmod(int(number), count)
        alone = replace(
            self,
            here=self.here[expert : expert + 1],
            everywhere=self.everywhere[expert :: len(self.here)],
            grouped=False,
        )
        return alone, base if count == 1 else f"{base}.{matrix}"

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of one expert's tensor; a count has no dimension to take away."""
        return shape[1:] if self.grouped and shape else shape

    def live_shape(self, stored: Shape) -> Shape:
        return (len(self.here), *stored) if self.grouped and stored else stored

    def pieces(self, piece: Piece) -> list[Piece]:
        """The stored pieces of a piece of the live tensor, as views of it."""
        offsets, data, shape = piece.offsets, piece.data, self.stored_shape(piece.shape)
        if not self.grouped:
            return [Piece(self.here[0], shape, offsets, data)]
        if not data.dim():
            return [Piece(name, shape, (), data) for name in self.here]
        names = self.here[offsets[0] : offsets[0] + len(data)]
        return [Piece(key, shape, offsets[1:], one) for key, one in zip(names, data, strict=True)]

    def reorders(self, extra_states: Mapping[str, Any]) -> bool:
        """Whether a checkpoint holds gate and up in another order."""
        return self.order is not None and self._stored_block(extra_states) != self.block

    def stored_rows(self, num_rows: int, extra_states: Mapping[str, Any]) -> Tensor | None:
        """The row in the checkpoint of each row here; None where all are the same."""
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
            raise DamagedError(f"'{self.order}' in the checkpoint holds no order") from error
        return block


def stacks_of(model: nn.Module, clean: Rename) -> dict[str, Stack]:
    """The stacks of all expert parameters of a model, by name of the parameter."""
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
