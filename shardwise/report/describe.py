# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a wrapped model: NaN and Inf by name and rank, norms, a readable description."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.core import comm
from shardwise.core.mesh import Ranks
from shardwise.core.placements import SHARD
from shardwise.core.tensor import ShardedTensor
from shardwise.shard.module import units_of
from shardwise.words import size_text


@dataclass(frozen=True)
class NonFinite:
    """NaN or infinite elements of one tensor on one rank."""

    name: str
    kind: str  # "parameter" or "gradient"
    coordinate: tuple[int, ...]  # the rank on the mesh, outer to inner axis
    num_nan: int
    num_inf: int

    def __str__(self) -> str:
        return (
            f"{self.kind} '{self.name}' on rank {self.coordinate}: "
            f"{self.num_nan} NaN, {self.num_inf} infinite"
        )


def find_nonfinite(model: nn.Module) -> list[NonFinite]:
    """All tensors with NaN or infinite elements among parameters and gradients of all ranks.

    All ranks must call it together, and all get the same list.
    """
    parameters = _at_rest(model)
    if not parameters:
        return []
    ranks = Ranks(max((p.cut.full_mesh for p in parameters.values()), key=lambda m: m.size()))
    found = []
    for name, parameter in parameters.items():
        for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
            if local is not None and local.is_floating_point() and not local.isfinite().all():
                nan, inf = int(local.isnan().sum()), int(local.isinf().sum())
                found.append(NonFinite(name, kind, ranks.coordinate, nan, inf))
    for axis in ranks.axes:
        found = [each for theirs in comm.agree(found, axis) for each in theirs]
    return found


def parameter_norms(model: nn.Module) -> dict[str, tuple[float, float | None]]:
    """The norm of every parameter and of its gradient (None without a gradient), over all ranks.

    All ranks must call it together.
    """
    parameters = _at_rest(model)
    with torch.no_grad():
        weights = torch._foreach_norm(list(parameters.values())) if parameters else ()
        grads = [p.grad for p in parameters.values() if p.grad is not None]
        grad_norms = iter(torch._foreach_norm(grads) if grads else ())
    return {
        name: (float(norm), None if parameter.grad is None else float(next(grad_norms)))
        for (name, parameter), norm in zip(parameters.items(), weights, strict=True)
    }


def describe(model: nn.Module) -> str:
    """A readable description of this rank's units, groups, layouts and bytes."""
    names = {id(parameter): name for name, parameter in _at_rest(model).items()}
    lines = []
    for unit in units_of(model):
        lines.append(f"unit '{unit.name}' ({unit.backward} backward, {len(unit.groups)} groups)")
        for number, group in enumerate(unit.groups):
            layout, main = group.layout, group.main
            sharded = "sharded" if SHARD in group.placements.main else "replicated"
            kept = "kept" if group.persistent or group.aliased else "gathered on use"
            lines.append(
                f"  group {number}: {len(group.items)} parameters, {group.parameter_dtype}, "
                f"{layout.payload} elements + {layout.padding} padding in {layout.num_shards} "
                f"shards of {layout.shard_size}; {group.placements}\n"
                f"    main {size_text(main.block.nbytes)} {main.dtype} {sharded}; compute "
                f"{size_text(sum(block.nbytes for block in group.blocks))} "
                f"{group.format or group.codec.dtype} {kept}"
            )
            for index, (item, parameter) in enumerate(zip(group.items, group.sharded, strict=True)):
                low, high, *_ = main.pieces[index]
                frozen = "" if parameter.requires_grad else ", frozen"
                tile = group.tiles[index]
                whole = "" if tile is None else f" of {list(tile.shape)} {tile.placements}"
                lines.append(
                    f"    {names.get(id(parameter), item.name)} {list(item.shape)}{whole} by "
                    f"{item.grain}: elements {low} to {high} here{frozen}"
                )
    return "\n".join(lines)


def _at_rest(model: nn.Module) -> dict[str, ShardedTensor]:
    """The parameters of all units, by name."""
    for unit in units_of(model):
        unit.hide_at_rest()
    return {name: p for name, p in model.named_parameters() if isinstance(p, ShardedTensor)}
