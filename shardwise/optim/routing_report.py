# SPDX-License-Identifier: Apache-2.0
"""The routing report: every parameter, its optimizer, and warnings.

    parameter                optimizer  as orthogonalised   scale  grain  why
    blocks.0.wq.weight       muon       64x64               1      row    matrix
    blocks.0.w13.weight      muon       2 of 128x64         1.41   row    chosen by ...
    embedding.weight         adamw      -                   -      row    embedding

Most reported bugs of Muon are that it did not run: a parameter went to AdamW silently, or a fused
weight was not split. Look at this report first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from shardwise.core.tensor import ShardedTensor
from shardwise.optim.muon import SCALES, MuonSettings, muon
from shardwise.optim.routing import routes_of
from shardwise.optim.split import matrices_of
from shardwise.words import aligned, count_text


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    optimizer: str
    matrices: tuple[tuple[int, int], ...]  # shapes as orthogonalised
    scales: tuple[float, ...]
    grain: str
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
        titles = ("parameter", "optimizer", "as orthogonalised", "scale", "grain", "why")
        lines = aligned([titles, *(_cells(row) for row in self.rows)])
        for name, number in Counter(row.optimizer for row in self.rows).items():
            elements = sum(prod(row.shape) for row in self.rows if row.optimizer == name)
            lines.append(f"{name}: {number} parameters of {count_text(elements)} elements")
        matrices = sum(len(row.matrices) for row in self.rows)
        lines.append(f"{matrices} matrices are orthogonalised in each step")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def routing_report(model: nn.Module, matrix: MuonSettings | None = None) -> RoutingReport:
    """The route of every parameter, with the settings that decide scales.

    The report says what ``sw.optimizer(model, matrix=matrix, ...)`` will do, without
    communication.
    """
    settings = matrix or muon()
    rows = []
    for entry in routes_of(model):
        parameter, route = entry.parameter, entry.route
        shape = tuple(parameter.shape)
        shapes: tuple[tuple[int, int], ...] = ()
        optimizer = "adamw" if parameter.requires_grad else "frozen"
        if route.kind == "matrix" and parameter.requires_grad:
            optimizer = "muon"
            matrices = matrices_of(route.shape_of(shape), route.split)
            shapes = tuple(matrix_shape for matrix in matrices for matrix_shape in matrix.shapes)
        rows.append(
            Row(
                name=entry.name,
                shape=shape,
                optimizer=optimizer,
                matrices=shapes,
                scales=tuple(SCALES[settings.scale](*matrix_shape) for matrix_shape in shapes),
                grain=_grain(parameter),
                why=route.reason,
                warnings=entry.warnings if parameter.requires_grad else (),
            )
        )
    return RoutingReport(tuple(rows))


def _grain(parameter: Tensor) -> str:
    if isinstance(parameter, ShardedTensor):
        return str(parameter.cut.layout.items[parameter.cut.index].grain)
    return "-"


def _cells(row: Row) -> tuple[str, ...]:
    shapes = ", ".join(
        f"{rows}x{cols}" if count == 1 else f"{count} of {rows}x{cols}"
        for (rows, cols), count in Counter(row.matrices).items()
    )
    scales = ", ".join(f"{scale:.3g}" for scale in dict.fromkeys(row.scales))
    return row.name, row.optimizer, shapes or "-", scales or "-", row.grain, row.why
