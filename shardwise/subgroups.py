# SPDX-License-Identifier: Apache-2.0
"""Axes made of others: the same ranks on a communicator of their own, or runs of neighbours."""

from __future__ import annotations

import torch.distributed as dist

from shardwise import comm
from shardwise.agreement import all_ranks
from shardwise.lockstep import Journal


def separate(axis: comm.Axis) -> comm.Axis:
    """The same ranks on a communicator of their own (collective over the default group): two
    collectives on one NCCL communicator never overlap, on two streams or not."""
    return _subgroup(axis, axis.peers, axis.name)


def split(axis: comm.Axis, size: int) -> comm.Axis:
    """This rank's run of ``size`` neighbours on the axis (collective over the default group)."""
    first, name = axis.rank // size * size, f"{axis.name}/{size}"
    if axis.group is None:
        return comm.Axis.pretended(name, size, axis.rank - first, axis.backends["meta"])
    key = (axis, size)
    if key not in _SPLITS:
        _SPLITS[key] = _subgroup(axis, axis.peers[first : first + size], name)
    return _SPLITS[key]


_SPLITS: dict[tuple[comm.Axis, int], comm.Axis] = {}


def _subgroup(axis: comm.Axis, mine: tuple[int, ...], name: str) -> comm.Axis:
    groups = {mine[0]: list(mine)}
    if not axis.pretends:  # a rank names the first of its group: all of them would be ranks^2
        firsts = comm.agree(mine[0], all_ranks())
        groups = {first: [] for first in sorted(firsts)}
        for rank, first in enumerate(firsts):
            groups[first].append(rank)
    group = None
    for first, peers in groups.items():  # every rank makes every group, in one order
        made = dist.new_group(peers)
        group = made if first == mine[0] else group
    rank = mine.index(axis.peers[axis.rank])
    journal = Journal(group, rank, len(mine))
    return comm.Axis(name, group, len(mine), rank, axis.backends, mine, journal)
