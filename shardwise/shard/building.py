# SPDX-License-Identifier: Apache-2.0
"""``Wrapping``: the checks of one wrapping call, and the unit that it makes of planned buffers.

``fully_shard`` and ``data_parallel`` decide which parameters share a buffer. Everything else that
the two calls do is in this class.
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
    experts_text,
    held_by,
    warn_of_views,
    wrapping_problems,
)
from shardwise.shard.formats import stored_as, warn_of_decoding
from shardwise.shard.fp8_group import GROUPS
from shardwise.shard.group import Group
from shardwise.shard.initial_values import checksum, same_values
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import device_of, find_parameters, install, outermost, own_buffers
from shardwise.tile import tile_of


class PlannedBuffer(NamedTuple):
    """Parameters that will share a buffer, as positions among all parameters of the call."""

    members: tuple[int, ...]
    layout: Layout
    format: Format | None
    home: DeviceMesh  # the mesh that the parameters are sharded over


class Wrapping:
    """The modules and parameters of one wrapping call, with the mesh and format of each parameter.

    Order of calls: ``spread``, ``refuse``, ``install``. Only ``install`` changes anything.
    """

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
        if not all(f.local.is_meta for f in self.found):  # meta tensors share no memory
            warn_of_views(self.found, own_buffers(self.roots, attributes=True), mesh)
        self.homes = [mesh] * len(self.found)  # the mesh of each parameter
        self.stored = [stored_as(f, precision) for f in self.found]

    def spread(self, meshes: Any) -> list[str]:
        """Give the parameters that match patterns of ``meshes`` other meshes; return problems."""
        if meshes is None:
            return []
        if not isinstance(meshes, Mapping):
            return [f"meshes={meshes!r}: pass a mapping from name patterns to meshes"]
        problems: list[str] = []
        for pattern, home in meshes.items():
            positions = [i for i, f in enumerate(self.found) if _matches(f.name, pattern)]
            for name in [self.found[position].name for position in positions]:
                if not isinstance(home, DeviceMesh):
                    problems.append(f"meshes gives '{name}' {home!r}, which is no DeviceMesh")
                elif home.get_coordinate() is None:
                    problems.append(f"this rank is not part of the mesh {home} of '{name}'")
            if not positions:
                problems.append(f"meshes: {pattern!r} matches no parameter")
            for position in positions if not problems else ():
                if self.homes[position] not in (self.mesh, home):
                    name = self.found[position].name
                    problems.append(f"'{name}' matches two patterns of meshes; narrow one of them")
                self.homes[position] = home
            self.buffers = [(n, b) for n, b in self.buffers if not _matches(n, pattern)]
        return problems

    @cached_property
    def ranks(self) -> dict[DeviceMesh, Ranks]:
        """This rank's place on each mesh, and the axis of spread experts on that mesh."""
        pairs = list(zip(self.found, self.homes, strict=True))
        return {
            mesh: Ranks(mesh, experts_axis([f for f, home in pairs if home == mesh]))
            for mesh in dict.fromkeys([self.mesh, *self.homes])
        }

    def num_shards(self, home: DeviceMesh) -> int:
        """The number of shards of main weights over a mesh."""
        return self.ranks[home].num_shards(self.placements.main)

    def refuse(self, problems: Sequence[str], options: str, notes: Sequence[str]) -> None:
        """Raise on all ranks if any rank has a problem, or if ranks wrap different things.

        ``problems`` are those that only one of the two calls can have; all others are found here.
        ``options`` and ``notes`` (one for each parameter) must be equal on all ranks too. The same
        exchange finds out whether all ranks have the same values (``alike``).
        """
        pairs = list(zip(self.found, self.homes, strict=True))
        all_problems = wrapping_problems(
            self.roots, pairs, list(self.ranks), self.placements, self.held
        )
        native = native_problem(self.device) if self.precision.products == "native" else None
        if native is not None:
            all_problems.append(f"Precision(products='native'): {native}")
        all_problems += problems
        lines = [f"{self.placements} {self.precision} {options}"]
        for (f, home), stored, note in zip(pairs, self.stored, notes, strict=True):
            # The ranks of another mesh hold other experts.
            experts = experts_text(f) if home == self.mesh else ""
            lines.append(f"{described(f, stored)} {note} {experts}")
        lines += [f"buffer {name} {list(b.shape)} {b.dtype}" for name, b in self.buffers]
        values = [f.local for f, home in pairs if home == self.mesh]
        values += [buffer for _, buffer in self.buffers]
        self.alike = raise_together(
            self.verb,
            all_problems,
            lines,
            self.ranks[self.mesh].axes,
            same="wrap the same module",
            facts=[checksum(value) for value in values] if not all_problems else None,
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

        ``divisors``: what to divide the sum of gradients by, for meshes where this is not the
        number of ranks. ``options`` are passed to the unit.
        """
        values: dict[int, Tensor] = {}  # by position
        for mesh, ranks in self.ranks.items():
            positions = [position for position, home in enumerate(self.homes) if home == mesh]
            named = [(self.found[i].name, self.found[i].local) for i in positions]
            if mesh != self.mesh:
                same = same_values(named, ranks, self.device)
            elif self.alike:
                same = [value for _, value in named]
            else:
                same = same_values(named, ranks, self.device, self.buffers)
            values.update(zip(positions, same, strict=True))
        tiles = [tile_of(f.parameter, home) for f, home in zip(self.found, self.homes, strict=True)]
        groups: list[Group] = []
        where: dict[int, tuple[int, int]] = {}  # by position: (group, index in the group)
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
            for position, f in enumerate(self.found)
            for parameters, local in f.places
        ]
        name = type(self.roots[0]).__name__
        unit = kind(name, self.roots, groups, places, precision=self.precision, **options)
        unit.stored = {where[position]: stored for position, stored in enumerate(self.stored)}
        install(self.roots, unit, self.device, self.found)
        unit.held = self.held
        if any(stored.format for stored in self.stored):
            warn_of_decoding(self.precision, self.device, self.mesh)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a parameter or of a module above it, or is a part of
    such a name between dots."""
    below = fnmatch.fnmatchcase(name, f"{pattern}.*") or f".{pattern}." in f".{name}"
    return below or fnmatch.fnmatchcase(name, pattern)
