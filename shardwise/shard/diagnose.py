# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a wrapped model: NaN and Inf by name and rank, norms, a readable description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core import comm
from shardwise.core.mesh import Ranks
from shardwise.core.placements import SHARD
from shardwise.core.tensor import ShardedTensor
from shardwise.shard.module import units_of
from shardwise.shard.unit import Unit
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

    All ranks must call it together, and all get the same list. It sends four counts for each
    parameter over the mesh of the parameter.
    """
    found = []
    for unit, names in _named_units(model):
        for number, group in enumerate(unit.groups):
            counts = torch.zeros(len(group.sharded), 2, 2, dtype=torch.int64, device="cpu")
            for index, parameter in enumerate(group.sharded):
                for row, tensor in enumerate((parameter, parameter.grad)):
                    local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
                    if local is not None and local.numel() and local.is_floating_point():
                        counts[index, row, 0] = torch.isnan(local).sum().item()
                        counts[index, row, 1] = torch.isinf(local).sum().item()
            mesh = max((p.cut.full_mesh for p in group.sharded), key=DeviceMesh.size)  # type: ignore[attr-defined]
            # (coordinate, counts) of this rank, then of all ranks of one more axis, and so on.
            tables: list[tuple[tuple[int, ...], Any]] = [((), counts.tolist())]
            for axis in reversed(Ranks(mesh).axes):
                everyone = enumerate(comm.agree(tables, axis))
                tables = [((rank, *at), table) for rank, theirs in everyone for at, table in theirs]
            for coordinate, table in tables:
                for index, of_both in enumerate(table):
                    for kind, (nan, inf) in zip(("parameter", "gradient"), of_both, strict=True):
                        if nan or inf:
                            name = names[number, index]
                            found.append(NonFinite(name, kind, coordinate, nan, inf))
    return found


def parameter_norms(model: nn.Module) -> dict[str, tuple[float, float | None]]:
    """The norm of every parameter and of its gradient (None without a gradient), over all ranks.

    All ranks must call it together.
    """
    parameters = [
        (names[number, index], parameter)
        for unit, names in _named_units(model)
        for number, group in enumerate(unit.groups)
        for index, parameter in enumerate(group.sharded)
    ]
    weights = [parameter.detach() for _, parameter in parameters]
    grads = [parameter.grad for _, parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        weight_norms = torch._foreach_norm(weights) if weights else ()
        grad_norms = iter(torch._foreach_norm(grads) if grads else ())
    return {
        name: (float(norm), None if parameter.grad is None else float(next(grad_norms)))
        for (name, parameter), norm in zip(parameters, weight_norms, strict=True)
    }


def describe(model: nn.Module) -> str:
    """A readable description of this rank's units, groups, layouts and bytes."""
    lines = []
    for unit, names in _named_units(model):
        lines.append(f"unit '{unit.name}' ({unit.backward} backward, {len(unit.groups)} groups)")
        for number, group in enumerate(unit.groups):
            layout, main = group.layout, group.main
            sharded = "sharded" if SHARD in group.placements.main else "replicated"
            lines.append(
                f"  group {number}: {len(group.items)} parameters, {group.parameter_dtype}, "
                f"{layout.payload} elements + {layout.padding} padding in {layout.num_shards} "
                f"shards of {layout.shard_size}; {group.placements}"
            )
            kept = "kept" if group.persistent or group.aliased else "gathered on use"
            lines.append(
                f"    main {size_text(main.block.nbytes)} {main.dtype} {sharded}; compute "
                f"{size_text(sum(block.nbytes for block in group.blocks))} "
                f"{group.format or group.codec.dtype} {kept}"
            )
            for index, item in enumerate(group.items):
                low, high, *_ = main.pieces[index]
                frozen = "" if group.unsharded[index].requires_grad else ", frozen"
                tile = group.tiles[index]
                whole = "" if tile is None else f" of {list(tile.shape)} {tile.placements}"
                lines.append(
                    f"    {names[number, index]} {list(item.shape)}{whole} by {item.grain}: "
                    f"elements {low} to {high} here{frozen}"
                )
            lines += ["    | " + row for row in layout.picture().splitlines()]
    return "\n".join(lines)


def _named_units(model: nn.Module) -> Iterator[tuple[Unit, dict[tuple[int, int], str]]]:
    """The units below ``model``, with the full name of each parameter by (group, index)."""
    full_names = {
        (id(module._parameters), name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._parameters
    }
    for unit in units_of(model):
        names: dict[tuple[int, int], str] = {}
        for parameters, name, number, index in unit.places:
            names.setdefault((number, index), full_names.get((id(parameters), name), name))
        yield unit, names
