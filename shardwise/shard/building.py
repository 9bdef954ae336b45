# SPDX-License-Identifier: Apache-2.0
"""Building a unit: planned buffers become groups, and the groups a unit of the modules.

``fully_shard``, ``data_parallel`` and plans decide which parameters share a buffer. All three build
here, and the two public functions wrap here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout import Layout
from shardwise.mesh import Ranks
from shardwise.placements import Placements
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Format
from shardwise.precision.policy import Stored
from shardwise.shard.fp8_group import GROUPS
from shardwise.shard.group import Group
from shardwise.shard.initial_values import same_values
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import Found, install
from shardwise.tile import Tile, tile_of

U = TypeVar("U", bound=Unit)


class PlannedBuffer(NamedTuple):
    """Parameters that will share a buffer: positions in a list of all, and their layout."""

    members: tuple[int, ...]
    layout: Layout
    format: Format | None
    home: Any  # the mesh that the parameters are spread over, in whatever words the planner has


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
    ranks: Mapping[Any, Ranks],
    divisors: Mapping[Any, float],
    tiles: Sequence[Tile | None] | None = None,
    stored: Sequence[Stored] = (),
    offload: bool = False,
    pin: bool = False,
    **options: Any,
) -> tuple[U, dict[int, tuple[int, int]]]:
    """A unit at rest, and the (group, index) of each parameter.

    ``values``, ``tiles`` and ``stored`` are by parameter. By home of a buffer: ``ranks``, and
    ``divisors`` of the gradients' sum where these are not the number of ranks. ``options`` are the
    unit's own.
    """
    groups: list[Group] = []
    where: dict[int, tuple[int, int]] = {}
    for buffer in buffers:
        for index, position in enumerate(buffer.members):
            where[position] = (len(groups), index)
        group = GROUPS[buffer.format](
            buffer.layout,
            [values[position] for position in buffer.members],
            ranks[buffer.home],
            placements,
            precision,
            device,
            tiles=[tiles[position] for position in buffer.members] if tiles else None,
            offload=offload,
            pin=pin,
        )
        group.gradients.divisor = divisors.get(buffer.home)
        groups.append(group)
    places = [
        (parameters, local, *where[position])
        for position, one in enumerate(found)
        for parameters, local in one.places
    ]
    unit = kind(name, roots, groups, places, precision=precision, **options)
    unit.stored = {where[position]: one for position, one in enumerate(stored)}
    return unit, where


def wrap(
    kind: type[Unit],
    roots: Sequence[nn.Module],
    found: Sequence[Found],
    homes: Sequence[DeviceMesh],
    buffers: Sequence[PlannedBuffer],
    placements: Placements,
    precision: Precision,
    device: torch.device,
    *,
    ranks: Mapping[DeviceMesh, Ranks],
    **options: Any,
) -> None:
    """Make a unit of the modules ``roots``, with the same values on every rank, and install it.

    ``homes``: the mesh of each parameter. The rest is given to :func:`build_unit`.
    """
    values: dict[int, Tensor] = {}
    for home, over in ranks.items():
        chosen = [position for position, other in enumerate(homes) if other == home]
        same = same_values([found[position] for position in chosen], over, device)
        values.update(zip(chosen, same, strict=True))
    unit, _ = build_unit(
        kind,
        type(roots[0]).__name__ if roots else "empty",
        roots,
        found,
        buffers,
        [values[position] for position in range(len(found))],
        placements,
        precision,
        device,
        ranks=ranks,
        tiles=[tile_of(one.parameter, home) for one, home in zip(found, homes, strict=True)],
        **options,
    )
    install(roots, unit, device, found)
