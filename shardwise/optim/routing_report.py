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

from torch import nn

from shardwise.core.tensor import ShardedTensor
from shardwise.optim.muon import SCALES, MuonSettings, muon
from shardwise.optim.routing import routes_of
from shardwise.optim.split import matrices_of
from shardwise.words import aligned, count_text


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter."""

    name: str
    numel: int
    optimizer: str
    matrices: tuple[tuple[int, int], ...]  # shapes as orthogonalised
    scales: tuple[float, ...]
    grain: str
    why: str
    looks_fused: bool

    @property
    def cells(self) -> tuple[str, ...]:
        shapes = ", ".join(
            f"{rows}x{cols}" if count == 1 else f"{count} of {rows}x{cols}"
            for (rows, cols), count in Counter(self.matrices).items()
        )
        scales = ", ".join(f"{scale:.3g}" for scale in dict.fromkeys(self.scales))
        return self.name, self.optimizer, shapes or "-", scales or "-", self.grain, self.why


@dataclass(frozen=True)
class RoutingReport:
    """Rows in registration order; printable."""

    rows: tuple[Row, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        text = "looks like a fused weight and has no split"
        return tuple(f"{row.name} {text}" for row in self.rows if row.looks_fused)

    def __str__(self) -> str:
        titles = ("parameter", "optimizer", "as orthogonalised", "scale", "grain", "why")
        lines = aligned([titles, *(row.cells for row in self.rows)])
        for name, number in Counter(row.optimizer for row in self.rows).items():
            elements = sum(row.numel for row in self.rows if row.optimizer == name)
            lines.append(f"{name}: {number} parameters of {count_text(elements)} elements")
        matrices = sum(len(row.matrices) for row in self.rows)
        lines.append(f"{matrices} matrices are orthogonalised")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def routing_report(model: nn.Module, matrix: MuonSettings | None = None) -> RoutingReport:
    """What ``sw.optimizer(model, matrix=matrix, ...)`` would do with every parameter."""
    settings = matrix or muon()
    rows = []
    for entry in routes_of(model):
        parameter, route = entry.parameter, entry.route
        trained, shapes, grain = parameter.requires_grad, [], "-"
        if trained and route.kind == "matrix":
            matrices = matrices_of(route.shape_of(parameter.shape), route.split)
            shapes = [shape for matrix in matrices for shape in matrix.shapes]
        if isinstance(parameter, ShardedTensor):
            grain = str(parameter.cut.layout.items[parameter.cut.index].grain)
        rows.append(
            Row(
                name=entry.name,
                numel=parameter.numel(),
                optimizer="muon" if shapes else "adamw" if trained else "frozen",
                matrices=tuple(shapes),
                scales=tuple(SCALES[settings.scale](*shape) for shape in shapes),
                grain=grain,
                why=route.reason,
                looks_fused=trained and entry.looks_fused,
            )
        )
    return RoutingReport(tuple(rows))
