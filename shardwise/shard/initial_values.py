# SPDX-License-Identifier: Apache-2.0
"""The same values on all ranks: parameters that ranks initialised differently get the values of the
first rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise import comm
from shardwise.mesh import Ranks
from shardwise.notices import warn_once
from shardwise.shard.group import Group
from shardwise.shard.whole_parameter import carry_attributes

logger = logging.getLogger(__name__)


def same_values(
    parameters: Sequence[tuple[str, Tensor]],
    ranks: Ranks,
    device: torch.device,
    buffers: Sequence[tuple[str, Tensor]] = (),
) -> list[Tensor]:
    """The values of parameters that are about to be wrapped, made the same on every data-parallel
    rank. Buffers are made the same in place."""
    named = [*parameters, *buffers]
    names, values = [name for name, _ in named], [value for _, value in named]
    checksums: Sequence[int] = [checksum(value) for value in values]
    for axis in ranks.axes:
        differing, checksums = _compare(names, checksums, axis)
        for position in differing:
            original = values[position]
            value = original.detach().to(device, copy=True).contiguous()
            comm.broadcast(_bits(value).view(torch.uint8), axis).wait()
            if position >= len(parameters):
                original.copy_(value)
                continue
            values[position] = value.requires_grad_(original.requires_grad)
            carry_attributes(original, values[position])
    return values[: len(parameters)]


def same_over_tiles(groups: Iterable[Group]) -> None:
    """Make main weights the same on ranks of tensor parallelism that hold copies of them: plain
    tensors that were not parallelised, and replicated DTensors that got values after wrapping."""
    for axis, copies in _copies(groups):
        names = [group.items[index].name for group, index in copies]
        values = [group.main.view(index) for group, index in copies]
        for position in _compare(names, [checksum(value) for value in values], axis)[0]:
            comm.broadcast(values[position], axis).wait()
            copies[position][0].main.version.write()


def _copies(groups: Iterable[Group]) -> Iterator[tuple[comm.Axis, list[tuple[Group, int]]]]:
    """(axis of tensor parallelism, the parameters that all its ranks hold, as (group, index))."""
    groups = [g for g in groups if g.ranks.others is None and not g.main.flat.is_meta]
    tiles = [tile for group in groups for tile in group.tiles if tile is not None]
    axes = [axis for tile in tiles for cut in (True, False) for axis in tile.axes(cut=cut)]
    for axis in dict.fromkeys(axes):
        copies = [
            (group, index)
            for group in groups
            for index, tile in enumerate(group.tiles)
            if tile is None or axis in tile.axes(cut=False)
        ]
        yield axis, copies


def _compare(
    names: Sequence[str], checksums: Sequence[int], axis: comm.Axis
) -> tuple[list[int], Sequence[int]]:
    """(positions whose checksums differ between ranks of the axis, checksums of its first rank).
    Warns once if any differ."""
    everyone = comm.agree(checksums, axis)
    first, others = everyone[0], [theirs for theirs in everyone if theirs != everyone[0]]
    differing = [
        position
        for position in range(len(checksums))
        if any(theirs[position] != first[position] for theirs in others)
    ]
    if differing:
        warn_once(
            logger,
            "ranks of axis '%s' initialised values differently (first: '%s'); all get the values "
            "of the axis's rank 0, in this unit and the units that follow. Seed all ranks alike to "
            "avoid the broadcast",
            axis.name,
            names[differing[0]],
            about="initial values",  # once for all units of a model
            first=axis.rank == 0,  # the job's rank 0 may be on another axis of this name
        )
    return differing, first


def checksum(value: Tensor) -> int:
    """A checksum of the bits and their order; 0 for a parameter that has no values yet."""
    if value.is_meta:
        return 0
    total, first = 0, 1
    for part in _bits(value).split(1 << 22):  # in parts, because positions take memory
        positions = torch.arange(first, first + part.numel(), device=part.device)
        total += int((part.to(torch.int64) * positions).sum().item())
        first += part.numel()
    return total % (1 << 63)


def _bits(value: Tensor) -> Tensor:
    """A value as integers of at most 4 bytes, in one row; a view where it is contiguous."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    return flat.view(width[flat.element_size()])
