# SPDX-License-Identifier: Apache-2.0
"""The routing report: every parameter, where it goes, and what looks wrong about it.

    parameter                optimizer  as orthogonalised   scale  grain  owner  why
    blocks.0.wq.weight       muon       64x64               1      row    0      matrix
    blocks.0.w13.weight      muon       2 of 128x64         1.41   row    1, 0   chosen by ...
    embedding.weight         adamw      -                   -      row    -      embedding

Most reported bugs of Muon are that it did not run: a parameter went to AdamW in silence, or a fused
weight was not split. This report is where to look first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shardwise.kernels.newton_schulz import uses_kernels
from shardwise.optim.matrix_parameter import MatrixParameter
from shardwise.optim.muon import MuonSettings, muon, scale_of
from shardwise.optim.ownership import assign_owners
from shardwise.optim.routing import Routed, routes_of
from shardwise.optim.sharded import group_of
from shardwise.optim.split import matrices_of
from shardwise.optim.storage import Sharding, sharding_of
from shardwise.tensor import ShardedTensor
from shardwise.words import aligned


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    optimizer: str
    matrices: tuple[tuple[int, int], ...]  # shapes as orthogonalised
    scales: tuple[float, ...]
    grain: str
    owners: tuple[str, ...]  # by matrix: the rank on the shard axis, "replica.rank" over replicas
    why: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class RoutingReport:
    """Rows in registration order; printable."""

    rows: tuple[Row, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{row.name} {warning}" for row in self.rows for warning in row.warnings)

    def __str__(self) -> str:
        titles = ("parameter", "optimizer", "as orthogonalised", "scale", "grain", "owner", "why")
        lines = aligned([titles, *(_cells(row) for row in self.rows)])
        numbers = Counter(row.optimizer for row in self.rows)
        matrices = sum(len(row.matrices) for row in self.rows)
        counts = ", ".join(f"{count} parameters to {name}" for name, count in numbers.items())
        lines.append(f"{counts}; {matrices} matrices are orthogonalised in each step")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def routing_report(model: nn.Module, matrix: MuonSettings | None = None) -> RoutingReport:
    """The route of every parameter, with the settings that decide scales and owners.

    The report says what ``sw.optimizer(model, matrix=matrix, ...)`` will do, without
    communication.
    """
    settings = matrix or muon()
    found = routes_of(model)
    owners = _owners([one for one in found if _orthogonalised(one)], settings)
    rows = []
    for one in found:
        shape = tuple(one.parameter.shape)
        shapes: tuple[tuple[int, int], ...] = ()
        if _orthogonalised(one):
            matrices = matrices_of(one.route.shape_of(shape), one.route.split)
            shapes = tuple(each for matrix in matrices for each in matrix.shapes)
        frozen = not one.parameter.requires_grad
        rows.append(
            Row(
                name=one.name,
                shape=shape,
                optimizer="frozen" if frozen else "muon" if shapes else "adamw",
                matrices=shapes,
                scales=tuple(scale_of(settings.scale, *each) for each in shapes),
                grain=_grain(one.parameter),
                owners=owners.get(id(one.parameter), ()),
                why=one.route.reason,
                warnings=() if frozen else one.warnings,
            )
        )
    return RoutingReport(tuple(rows))


def _orthogonalised(one: Routed) -> bool:
    return one.route.kind == "matrix" and one.parameter.requires_grad


def _grain(parameter: Tensor) -> str:
    if isinstance(parameter, ShardedTensor):
        return str(parameter.cut.layout.items[parameter.cut.index].grain)
    return "-"


def _owners(found: Sequence[Routed], settings: MuonSettings) -> dict[int, tuple[str, ...]]:
    """By id of the parameter: the owners of its matrices, as the optimizer assigns them."""
    group = group_of(settings, [])
    alike: dict[Sharding, list[MatrixParameter]] = {}
    for one in found:
        member = MatrixParameter(one.name, one.parameter, one.route, group)
        alike.setdefault(sharding_of(one.parameter), []).append(member)
    result: dict[int, tuple[str, ...]] = {}
    for sharding, members in alike.items():
        if sharding.mesh is None:
            continue
        replicas = sharding.count(sharding.replicated) if settings.replicas == "spread" else 1
        measured = uses_kernels(members[0].parameter.device)  # as everywhere, on GPUs of one kind
        matrices = [
            matrix
            for position, one in enumerate(members)
            for matrix in one.matrices(position, measured=measured)
        ]
        ownership = assign_owners(matrices, sharding.count(sharding.sharded), replicas)
        for matrix, (replica, rank) in zip(matrices, ownership.owners, strict=True):
            label = f"{replica}.{rank}" if replicas > 1 else str(rank)
            key = id(members[matrix.parameter].parameter)
            result[key] = (*result.get(key, ()), label)
    return result


def _cells(row: Row) -> tuple[str, ...]:
    shapes = Counter(row.matrices)
    seen = ", ".join(
        f"{rows}x{cols}" if count == 1 else f"{count} of {rows}x{cols}"
        for (rows, cols), count in shapes.items()
    )
    scales = ", ".join(f"{scale:.3g}" for scale in dict.fromkeys(row.scales))
    owners = ", ".join(row.owners if len(row.owners) <= 4 else [*row.owners[:3], "..."])
    return (row.name, row.optimizer, seen or "-", scales or "-", row.grain, owners or "-", row.why)
