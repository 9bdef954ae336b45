# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a wrapped model: NaN and Inf by name and rank, norms, a readable description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import comm
from shardwise.mesh import Ranks
from shardwise.placements import SHARD
from shardwise.shard.module import units_of
from shardwise.shard.unit import Unit
from shardwise.tensor import ShardedTensor
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
    """Every NaN and Inf in parameters and gradients of all ranks; the same list on every rank.

    Collective over the mesh of each unit: four counts per parameter are sent.
    """
    found = []
    for unit, names in _named_units(model):
        for number, group in enumerate(unit.groups):
            counts = torch.zeros(len(group.sharded), 2, 2, dtype=torch.int64, device="cpu")
            for index, parameter in enumerate(group.sharded):
                for kind, tensor in enumerate((parameter, parameter.grad)):
                    local = tensor.to_local() if isinstance(tensor, ShardedTensor) else tensor
                    if local is not None and local.numel() and local.is_floating_point():
                        counts[index, kind, 0] = torch.isnan(local).sum().item()
                        counts[index, kind, 1] = torch.isinf(local).sum().item()
            mesh = max((p.cut.full_mesh for p in group.sharded), key=DeviceMesh.size)  # type: ignore[attr-defined]
            tables: list[tuple[tuple[int, ...], Any]] = [((), counts.tolist())]  # of every rank
            for axis in reversed(Ranks(mesh).axes):
                everyone = enumerate(comm.agree(tables, axis))
                tables = [((rank, *at), one) for rank, theirs in everyone for at, one in theirs]
            for coordinate, table in tables:
                for index in range(len(group.sharded)):
                    for word, (nan, inf) in zip(
                        ("parameter", "gradient"), table[index], strict=True
                    ):
                        if nan or inf:
                            name = names[number, index]
                            found.append(NonFinite(name, word, coordinate, nan, inf))
    return found


def parameter_norms(model: nn.Module) -> dict[str, tuple[float, float | None]]:
    """The norm of every parameter and of its gradient (None without one), over all ranks.
    Collective."""
    names, tensors, grads = [], [], []
    for unit, labels in _named_units(model):
        for number, group in enumerate(unit.groups):
            for index, parameter in enumerate(group.sharded):
                names.append(labels[number, index])
                tensors.append(parameter.detach())
                grads.append(parameter.grad)
    with torch.no_grad():
        weights = torch._foreach_norm(tensors) if tensors else ()
        present = [grad for grad in grads if grad is not None]
        norms = iter(torch._foreach_norm(present) if present else ())
    return {
        name: (float(weight), None if grad is None else float(next(norms)))
        for name, weight, grad in zip(names, weights, grads, strict=True)
    }


def describe(model: nn.Module) -> str:
    """A readable description of this rank's units, groups, layouts and bytes."""
    lines = []
    for unit, names in _named_units(model):
        lines.append(f"unit '{unit.name}' ({unit.phase.value}, {len(unit.groups)} groups)")
        for number, group in enumerate(unit.groups):
            layout, main = group.layout, group.main
            sharded = "sharded" if SHARD in group.placements.main else "replicated"
            lines.append(
                f"  group {number}: {len(group.items)} parameters, {group.parameter_dtype}, "
                f"{layout.payload} elements + {layout.padding} padding in {layout.num_shards} "
                f"shards of {layout.shard_size}; {group.placements}"
            )
            lines.append(
                f"    main {size_text(main.block.nbytes)} {main.dtype} {sharded}; compute "
                f"{size_text(sum(block.nbytes for block in group.blocks))} "
                f"{group.format or group.whole.dtype} "
                f"{'kept' if group.persistent or group.aliased else 'gathered on use'}"
            )
            for index, item in enumerate(group.items):
                low, high, *_ = main.pieces[index]
                frozen = "" if group.unsharded[index].requires_grad else ", frozen"
                tile = group.tiles[index]
                of = "" if tile is None else f" of {list(tile.shape)} {tile.placements}"
                lines.append(
                    f"    {names[number, index]} {list(item.shape)}{of} by {item.grain}: "
                    f"elements {low} to {high} here{frozen}"
                )
            lines += ["    | " + row for row in layout.picture().splitlines()]
    return "\n".join(lines)


def _named_units(model: nn.Module) -> Iterator[tuple[Unit, dict[tuple[int, int], str]]]:
    """The units below ``model``, with the full name of each (group, index)."""
    by_place = {
        (id(module._parameters), name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._parameters
    }
    for unit in units_of(model):
        names: dict[tuple[int, int], str] = {}
        for parameters, name, number, index in unit.places:
            names.setdefault((number, index), by_place.get((id(parameters), name), name))
        yield unit, names
