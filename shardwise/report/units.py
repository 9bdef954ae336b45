# SPDX-License-Identifier: Apache-2.0
"""The units of a model that nobody has wrapped yet: who owns which parameter, and where it lies.

    Model                         root      embedding, norm, head
      embedding                   block 0   every parameter below blocks.0
      blocks  [0] [1] [2]   -->   block 1   alike: laid out once
      norm, head                  block 2

Groups, buckets and layouts are made by the functions that ``fully_shard`` and ``data_parallel``
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.optim.muon import MuonSettings
from shardwise.optim.routing import Routed
from shardwise.report.planned import Options
from shardwise.shard.building import PlannedBuffer
from shardwise.shard.checks import spread_linear
from shardwise.shard.data_parallel import BucketedUnit, planned_buckets
from shardwise.shard.formats import stored_as
from shardwise.shard.fully_shard import planned_groups
from shardwise.shard.module import unit_of
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import (
    Found,
    GrainChoice,
    grain_of,
    parameters_and_units,
    wrap_units,
)


@dataclass(eq=False)
class Owner:
    """One module to be wrapped. ``parts``, in the order in which they are registered: runs of its
    own parameters (positions in ``found``), and the wrapped modules inside it."""

    name: str
    module: nn.Module
    found: list[Found] = field(default_factory=list)
    parts: list[list[int] | Owner] = field(default_factory=list)

    @property
    def homes(self) -> list[int]:
        """By parameter: over how many ranks its experts are spread."""
        linears = map(spread_linear, self.found)
        return [1 if one is None else one.total_experts // one.num_experts for one in linears]

    def tree(self) -> Iterator[Owner]:
        yield self
        for part in self.parts:
            if isinstance(part, Owner):
                yield from part.tree()


def recomputed_modules(model: nn.Module) -> frozenset[int]:
    """The ids of all modules that run forward once more in backward. A model that checkpoints tells
    by an attribute ``recomputed``: the modules that it does so with."""
    again = getattr(model, "recomputed", ())
    return frozenset(id(part) for module in again for part in module.modules())


def owners(model: nn.Module, wrap: Sequence[nn.Module] | None, ignored: set[nn.Parameter]) -> Owner:
    """The root, with the wrapped modules inside it, in registration order."""
    units = {id(module): unit for module in model.modules() if (unit := unit_of(module))}
    if units:
        if wrap is not None or id(model) not in units or not _replannable(list(units.values())):
            raise ValueError(
                f"{type(model).__name__} is wrapped already, and that can be planned only where "
                f"fully_shard took single modules and the model last, and main weights have the "
                f"dtypes that parameters came with: "
                f"plan the model before wrapping, built anew under torch.device('meta')"
            )
        for unit in units.values():
            unit.hide()  # the parameters at rest: names, shapes and dtypes as they were
        wrap = [module for module in model.modules() if id(module) in units and module is not model]
    wrapped = {id(module) for module in (wrap_units(model) if wrap is None else wrap)}
    strangers = wrapped - {id(module) for module in model.modules()}
    if strangers:
        raise ValueError(f"{len(strangers)} of the modules in wrap are not part of the model")
    root = Owner(type(model).__name__, model)
    keepers: dict[int, Owner] = {}
    tied: list[str] = []

    def fill(owner: Owner, prefix: str) -> None:
        """Find what one unit owns; ``prefix``: of the names in the model."""

        def is_inner(module: nn.Module) -> bool:
            return id(module) in wrapped and module is not owner.module

        for one in parameters_and_units([owner.module], ignored, is_inner):
            if not isinstance(one, Found):
                path, module = one
                inner = Owner(f"{prefix}{path}"[:-1], module)
                owner.parts.append(inner)
                fill(inner, f"{prefix}{path}")
                continue
            keeper = keepers.setdefault(id(one.parameter), owner)
            if keeper is not owner:
                tied.append(f"'{prefix}{one.name}' belongs to unit '{keeper.name}' too")
            if not owner.parts or isinstance(owner.parts[-1], Owner):
                owner.parts.append([])
            owner.parts[-1].append(len(owner.found))  # type: ignore[union-attr]
            owner.found.append(one)

    fill(root, "")
    if tied:
        raise ValueError(
            f"{'; '.join(tied)} (tied weights in two units): wrap neither, so that the root owns "
            f"both"
        )
    if not keepers:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    return root


def _replannable(units: Sequence[Unit]) -> bool:
    """Whether units say all that a plan needs: one for each module, and their parameters at rest
    have the dtypes that they came with."""
    alone = len({id(unit) for unit in units}) == len(units)
    return alone and not any(
        isinstance(unit, BucketedUnit)
        or any(group.main.dtype != group.parameter_dtype for group in unit.groups)
        for unit in units
    )


def planned_buffers(
    root: Owner, options: Options, grain: GrainChoice | None, routes: Sequence[Routed]
) -> dict[Owner, tuple[PlannedBuffer, ...]]:
    """The buffers of every unit: the same object for units that are alike, which are laid out once.
    The home of a buffer is over how many ranks its experts are spread."""
    chosen = {id(one.parameter): one.route for one in routes}
    precision, main = options.precision, options.placements.main
    shards = {ep: options.mesh.without(ep).num_shards(main) for ep in (1, options.ep)}
    if options.bucket_mb is not None:  # one unit; its buckets as backward fills them
        formats = [stored_as(one, precision).format for one in root.found]
        size, measured = options.bucket_mb, options.measured
        buckets = planned_buckets(
            root.found, chosen, root.homes, formats, shards, MuonSettings(), size, measured, grain
        )
        return {root: tuple(buckets)}
    known: dict[Any, tuple[PlannedBuffer, ...]] = {}
    found: dict[Owner, tuple[PlannedBuffer, ...]] = {}
    for owner in root.tree():
        facts = tuple(
            (
                one.name,
                (one.shape, one.uneven),
                one.parameter.dtype,
                one.parameter.requires_grad,
                grain_of(one, grain),
                stored_as(one, precision).format,
                (route := chosen.get(id(one.parameter))) and route.kind,
            )
            for one in owner.found
        )
        key = tuple(homes := owner.homes), facts
        if key not in known:
            known[key] = tuple(planned_groups(owner.found, shards, grain, precision, homes))
        found[owner] = known[key]
    return found


def price_of_whole(root: Owner, options: Options, routes: Sequence[Routed]) -> str:
    """What it would cost to have every matrix whole: why ``data_parallel`` cuts some."""
    try:
        (buffers,) = planned_buffers(root, options, "tensor", routes).values()
    except ValueError:
        return "grain='tensor' is refused: whole matrices would pad over an eighth"
    sizes = [buffer.layout.payload for buffer in buffers]
    largest, padding = max(sizes), sum(buffer.layout.padding for buffer in buffers)
    return (
        f"grain='tensor' would have {100 * largest / sum(sizes):.0f} % of the model in one bucket, "
        f"{100 * padding / sum(sizes):.1f} % padding"
    )
