# SPDX-License-Identifier: Apache-2.0
"""Building a unit: planned buffers become groups, and the groups a unit of the modules.

``fully_shard``, ``data_parallel`` and plans decide which parameters share a buffer; all three build
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardwise.layout import Layout
from shardwise.mesh import Ranks
from shardwise.placements import Placements
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Format
from shardwise.precision.policy import Stored
from shardwise.shard.fp8_group import GROUPS
from shardwise.shard.group import Group
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import Found
from shardwise.tile import Tile

U = TypeVar("U", bound=Unit)


class PlannedBuffer(NamedTuple):
    """Parameters that will share a buffer: positions in a list of all, and their layout."""

    members: tuple[int, ...]
    layout: Layout
    format: Format | None
    ranks: Ranks
    divisor: float | None = None  # of the gradients' sum; None: the ranks of the mesh


def build_unit(
    kind: type[U],
    name: str,
    roots: Sequence[nn.Module],
    found: Sequence[Found],
    buffers: Sequence[PlannedBuffer],
    values: Sequence[Tensor],
    placements: Placements,
    precision: Precision,
    device: torch.device,
    *,
    tiles: Sequence[Tile | None] | None = None,
    stored: Sequence[Stored] = (),
    offload: bool = False,
    pin: bool = False,
    **options: Any,
) -> tuple[U, dict[int, tuple[int, int]]]:
    """A unit at rest, and the (group, index) of each parameter. ``values``, ``tiles`` and
    ``stored`` are by parameter; ``options`` are the unit's own."""
    groups: list[Group] = []
    where: dict[int, tuple[int, int]] = {}
    for buffer in buffers:
        for index, position in enumerate(buffer.members):
            where[position] = (len(groups), index)
        group = GROUPS[buffer.format](
            buffer.layout,
            [values[position] for position in buffer.members],
            buffer.ranks,
            placements,
            precision,
            device,
            tiles=[tiles[position] for position in buffer.members] if tiles else None,
            offload=offload,
            pin=pin,
        )
        if buffer.divisor is not None:
            group.gradients.divisor = buffer.divisor
        groups.append(group)
    places = [
        (parameters, local, *where[position])
        for position, one in enumerate(found)
        for parameters, local in one.places
    ]
    unit = kind(name, roots, groups, places, precision=precision, **options)
    unit.stored = {where[position]: one for position, one in enumerate(stored)}
    return unit, where
