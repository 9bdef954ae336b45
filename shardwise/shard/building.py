# SPDX-License-Identifier: Apache-2.0
"""Building a unit: planned buffers become groups, and the groups a unit of the modules.

``fully_shard`` and ``data_parallel`` decide which parameters share a buffer; both check and wrap
here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.agreement import raise_together
from shardwise.layout import Layout
from shardwise.mesh import Ranks
from shardwise.placements import Placements
from shardwise.precision import Precision
from shardwise.precision.fp8_products import native_problem
from shardwise.precision.fp8_tensor import Format
from shardwise.shard.checks import (
    described,
    experts_axis,
    held_by,
    share_of,
    warn_of_views,
    wrapping_problems,
)
from shardwise.shard.formats import stored_as, tell_of_decoding
from shardwise.shard.fp8_group import GROUPS
from shardwise.shard.group import Group
from shardwise.shard.initial_values import checksum, same_values
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import device_of, find_parameters, install, outermost, own_buffers
from shardwise.tensor_steps import LEFT_ALONE
from shardwise.tile import tile_of


class PlannedBuffer(NamedTuple):
    """Parameters that will share a buffer: positions in a list of all, and their layout."""

    members: tuple[int, ...]
    layout: Layout
    format: Format | None
    home: DeviceMesh  # the mesh that the parameters are spread over


class Wrapping:
    """The modules of one call, their parameters, and how these will be spread and stored: all is
    checked, on all ranks, before anything changes."""

    def __init__(
        self,
        verb: str,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        placements: Placements,
        precision: Precision,
        ignored: set[nn.Parameter] | None,
    ) -> None:
        self.verb, self.roots, self.mesh = verb, outermost(modules), mesh
        self.placements, self.precision, self.device = placements, precision, device_of(mesh)
        self.ignored = ignored or set()
        self.found = find_parameters(self.roots, self.ignored)
        self.buffers = own_buffers(self.roots)
        self.held = held_by(self.found, self.buffers)
        if not all(f.local.is_meta for f in self.found):  # else there is nothing to view
            warn_of_views(self.found, own_buffers(self.roots, attributes=True), mesh)
        self.homes = [mesh] * len(self.found)  # the mesh of each parameter
        self.stored = [stored_as(f, precision) for f in self.found]

    def spread(self, meshes: Any) -> list[str]:
        """Give some parameters a mesh of their own, by patterns of names. Returns the problems."""
        patterns = meshes if isinstance(meshes, Mapping) else {}
        problems = [] if meshes in (None, patterns) else [
            f"meshes={meshes!r}: a mapping from name patterns to meshes"
        ]  # fmt: skip
        for pattern, home in patterns.items():
            here = [number for number, f in enumerate(self.found) if _matches(f.name, pattern)]
            for name in [self.found[number].name for number in here]:
                if not isinstance(home, DeviceMesh):
                    problems.append(f"meshes gives '{name}' {home!r}, which is no DeviceMesh")
                elif home.get_coordinate() is None:
                    problems.append(f"this rank is not part of the mesh {home} of '{name}'")
            if not here:
                problems.append(f"meshes: {pattern!r} matches no parameter")
            for number in here if not problems else ():
                if self.homes[number] not in (self.mesh, home):
                    name = self.found[number].name
                    problems.append(f"'{name}' matches two patterns of meshes; narrow one")
                self.homes[number] = home
            self.buffers = [one for one in self.buffers if not _matches(one[0], pattern)]
        return problems

    @cached_property
    def ranks(self) -> dict[DeviceMesh, Ranks]:
        """By home; the axis of experts that are spread is known with it."""
        pairs = list(zip(self.found, self.homes, strict=True))
        return {
            home: Ranks(home, experts_axis([f for f, at in pairs if at == home]))
            for home in dict.fromkeys([self.mesh, *self.homes])
        }

    def num_shards(self, home: DeviceMesh) -> int:
        """Into how many shards main weights are cut over a mesh."""
        return self.ranks[home].num_shards(self.placements.main)

    def refuse(self, problems: Sequence[str], options: str, notes: Sequence[str]) -> None:
        """Raise the problems of any rank, of this call and of any wrapping, on all ranks; or that
        ranks wrap different things. ``notes``: a text for each parameter, beside what it is. The
        same exchange says whether all ranks have the same values."""
        every = list(zip(self.found, self.homes, strict=True))
        meshes = list(self.ranks)
        found = wrapping_problems(self.roots, every, meshes, self.placements, self.held)
        native = native_problem(self.device) if self.precision.products == "native" else None
        found += [] if native is None else [f"Precision(products='native'): {native}"]
        mine = [f"{self.placements} {self.precision} {options}"]
        for (f, home), one, note in zip(every, self.stored, notes, strict=True):
            share = share_of(f) if home == self.mesh else ""  # elsewhere ranks have other experts
            mine.append(f"{described(f, one)} {note} {share}")
        mine += [f"buffer {name} {list(one.shape)} {one.dtype}" for name, one in self.buffers]
        found += problems
        values = [f.local for f, home in every if home == self.mesh]
        values += [one for _, one in self.buffers]
        self.alike = raise_together(
            self.verb,
            found,
            mine,
            self.ranks[self.mesh].axes,
            same="wrap the same module",
            facts=[checksum(value) for value in values] if not found else None,
        )

    def install(
        self,
        kind: type[Unit],
        buffers: Sequence[PlannedBuffer],
        divisors: Mapping[DeviceMesh, float],
        *,
        offload: bool = False,
        pin: bool = False,
        **options: Any,
    ) -> None:
        """Make a unit of the modules, with the same values on every rank.

        ``divisors`` of the gradients' sum, by home, where these are not the number of ranks.
        ``options`` are the unit's own.
        """
        values: dict[int, Tensor] = {}
        for home, over in self.ranks.items():
            chosen = [position for position, other in enumerate(self.homes) if other == home]
            named = [(self.found[position].name, self.found[position].local) for position in chosen]
            beside = self.buffers if home == self.mesh else []
            if home == self.mesh and self.alike:
                same = [value for _, value in named]
            else:
                same = same_values(named, over, self.device, beside)
            values.update(zip(chosen, same, strict=True))
        tiles = [tile_of(one.parameter, at) for one, at in zip(self.found, self.homes, strict=True)]
        groups: list[Group] = []
        where: dict[int, tuple[int, int]] = {}  # by position: group, index
        for buffer in buffers:
            for index, position in enumerate(buffer.members):
                where[position] = (len(groups), index)
            group = GROUPS[buffer.format](
                buffer.layout,
                [values[position] for position in buffer.members],
                self.ranks[buffer.home],
                self.placements,
                self.precision,
                self.device,
                tiles=[tiles[position] for position in buffer.members],
                offload=offload,
                pin=pin,
            )
            group.gradients.divisor = divisors.get(buffer.home)
            groups.append(group)
        places = [
            (parameters, local, *where[position])
            for position, one in enumerate(self.found)
            for parameters, local in one.places
        ]
        name = type(self.roots[0]).__name__ if self.roots else "empty"
        unit = kind(name, self.roots, groups, places, precision=self.precision, **options)
        unit.stored = {where[position]: one for position, one in enumerate(self.stored)}
        install(self.roots, unit, self.device, self.found)
        unit.held = self.held
        for one in self.ignored:
            setattr(one, LEFT_ALONE, True)
        if any(one.format for one in self.stored):
            tell_of_decoding(self.precision, self.device, self.mesh)


def _matches(name: str, pattern: str) -> bool:
    """A pattern for names of parameters or of modules above them, or a part of such a name."""
    below = fnmatch.fnmatchcase(name, f"{pattern}.*") or f".{pattern}." in f".{name}"
    return below or fnmatch.fnmatchcase(name, pattern)
