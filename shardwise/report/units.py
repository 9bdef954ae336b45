# SPDX-License-Identifier: Apache-2.0
"""The units of a model that nobody has wrapped yet: who owns which parameter, and where it lies.

    Model                         root      embedding, norm, head
      embedding                   block 0   every parameter below blocks.0
      blocks  [0] [1] [2]   -->   block 1   alike: laid out once, counted three times
      norm, head                  block 2

The grouping and the layouts are made by the same functions that ``fully_shard`` calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.layout import Grain, Layout
from shardwise.moe import mixtures_of
from shardwise.placements import Placements
from shardwise.precision import Precision
from shardwise.precision.mxfp8_tensor import Format
from shardwise.report.footprint import Footprint, Mesh, footprint
from shardwise.report.simulate import SimulatedUnit, Step
from shardwise.shard.bucketed import BucketedUnit
from shardwise.shard.formats import stored_as
from shardwise.shard.fully_shard import planned_groups as group_parameters
from shardwise.shard.module import unit_of
from shardwise.shard.unit import Unit
from shardwise.shard.wrapping import Found, GrainChoice, grain_of, wrap_units


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """Parameters that share a buffer: where each lies, and what the buffer costs."""

    layout: Layout
    footprint: Footprint
    dtype: torch.dtype  # of the main weight
    stored: str  # the format or the dtype of the compute weight; "main" where that is read itself
    matrices: tuple[bool, ...]  # per item: does a matrix optimizer take it?

    def state_bytes(self, states: tuple[int, int]) -> list[int]:
        """Bytes of optimizer state beside each shard; padding has none.

        ``states``: tensors per matrix, and per any other parameter, in main's dtype.
        """
        per_shard = [0] * self.layout.num_shards
        for index, matrix in enumerate(self.matrices if self.footprint.trainable else ()):
            width = states[0 if matrix else 1] * self.dtype.itemsize
            for shard in self.layout.holders(index):
                low, high = self.layout.piece(index, shard)
                per_shard[shard] += (high - low) * width
        return per_shard


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """Wrapped modules that are all alike."""

    names: tuple[str, ...]
    groups: tuple[PlannedGroup, ...]
    ep: int = 1  # over how many ranks its experts are spread; figures are of one share

    @property
    def name(self) -> str:
        count = len(self.names)
        name = self.names[0] if count == 1 else f"{self.names[0]} and {count - 1} alike"
        return name if self.ep == 1 else f"{name} (one of {self.ep} shares)"


@dataclass(eq=False)
class Owner:
    """One module to be wrapped: its own parameters, and the wrapped modules inside it."""

    name: str
    found: list[Found]
    inner: list[Owner] = field(default_factory=list)
    trains_first: int = 0  # how many parameters it trains that come before the units inside
    ep: int = 1  # over how many ranks its experts are spread
    recomputed: frozenset[int] = frozenset()  # of a root: modules that backward runs once more

    def tree(self) -> Iterator[Owner]:
        yield self
        for owner in self.inner:
            yield from owner.tree()

    @property
    def trainable(self) -> bool:
        return any(found.parameter.requires_grad for found in self.found)


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
    spread = [layer.experts for layer in mixtures_of(model) if layer.experts.ep > 1]
    wrapped = {id(module) for module in ([*wrap_units(model), *spread] if wrap is None else wrap)}
    if any(id(experts) not in wrapped for experts in spread):
        raise ValueError(
            "experts that are spread over ranks are cut over other ranks than what is around them: "
            "put them (the experts of each MixtureOfExperts) into wrap, each a unit of its own"
        )
    strangers = wrapped - {id(module) for module in model.modules()}
    if strangers:
        raise ValueError(f"{len(strangers)} of the modules in wrap are not part of the model")
    root = Owner(type(model).__name__, [], recomputed=recomputed_modules(model))
    keepers: dict[int, Owner] = {}
    entries: dict[int, Found] = {}
    skipped = {id(parameter) for parameter in ignored}
    seen: set[int] = set()
    tied: list[str] = []

    def descend(module: nn.Module, path: str, prefix: str, owner: Owner) -> None:
        """The order and the names of ``find_parameters``, for all units in one walk."""
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            keeper = keepers.setdefault(id(parameter), owner)
            if keeper is not owner:
                tied.append(f"'{path}{name}' belongs to unit '{keeper.name}' too")
                continue
            if id(parameter) not in entries:
                entries[id(parameter)] = Found(prefix + name, parameter, [])
                owner.found.append(entries[id(parameter)])
                owner.trains_first += parameter.requires_grad and not owner.inner
            entries[id(parameter)].modules.append(module)
        for name, child in module.named_children():
            if id(child) in wrapped:
                inner = Owner(f"{path}{name}", [], ep=getattr(child, "ep", 1))
                owner.inner.append(inner)
                descend(child, f"{path}{name}.", "", inner)
            else:
                descend(child, f"{path}{name}.", f"{prefix}{name}.", owner)

    descend(model, "", "", root)
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


def lay_out(
    root: Owner,
    mesh: Mesh,
    placements: Placements,
    precision: Precision,
    *,
    grain: GrainChoice | None = None,
    kept_ranks: int | None = None,
    matrices: set[int] = frozenset(),  # type: ignore[assignment]
) -> dict[Owner, tuple[PlannedGroup, ...]]:
    """The groups of every unit. Units whose parameters are alike share theirs."""
    known: dict[Any, tuple[PlannedGroup, ...]] = {}
    result = {}
    for owner in root.tree():
        ranks = mesh.without(owner.ep)
        kept = None if kept_ranks == ranks.sizes[-1] else kept_ranks
        facts = tuple(facts_of(f, precision, matrices, grain, root.recomputed) for f in owner.found)
        if (owner.ep, facts) not in known:
            known[owner.ep, facts] = tuple(
                planned_group(
                    [facts[member] for member in members],
                    layout,
                    format,
                    ranks,
                    placements,
                    precision,
                    kept,
                    divided=owner.ep > 1,
                )
                for members, layout, format in group_parameters(
                    owner.found, ranks.num_shards(placements.main), grain, precision
                )
            )
        result[owner] = known[owner.ep, facts]
    return result


class Facts(NamedTuple):
    """All that a plan reads of a parameter: parameters with the same are alike."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    grain: Grain
    matrix: bool  # a matrix optimizer takes it
    format: Format | None
    by_kernel: bool  # a kernel writes its gradient
    recomputed: bool  # backward runs its module's forward once more


def facts_of(
    found: Found,
    precision: Precision,
    matrices: set[int],
    grain: GrainChoice | None = None,
    recomputed: frozenset[int] = frozenset(),
) -> Facts:
    parameter = found.parameter
    return Facts(
        name=found.name,
        shape=tuple(parameter.shape),
        dtype=parameter.dtype,
        trainable=parameter.requires_grad,
        grain=grain_of(found, grain),
        matrix=id(parameter) in matrices,
        format=stored_as(found, precision).format,
        by_kernel=any(getattr(owner, "writes_main_grad", False) for owner in found.owners),
        recomputed=any(id(module) in recomputed for module in found.modules),
    )


def planned_group(
    chosen: Sequence[Facts],
    layout: Layout,
    format: Format | None,
    mesh: Mesh,
    placements: Placements,
    precision: Precision,
    kept_ranks: int | None = None,
    *,
    divided: bool,
) -> PlannedGroup:
    """``chosen``: the facts of its parameters."""
    dtype = chosen[0].dtype
    size = footprint(
        layout,
        mesh,
        placements,
        precision,
        dtype,
        format=format,
        trainable=any(fact.trainable for fact in chosen),
        kept_ranks=kept_ranks,
        divided=divided,
    )
    return PlannedGroup(
        layout=layout,
        footprint=replace(
            size,
            opens_early=size.trainable and any(fact.by_kernel for fact in chosen),
            reads_again=any(fact.recomputed for fact in chosen),
        ),
        dtype=precision.main_dtype(dtype, size.trainable),
        stored=_stored(size, format, precision.compute_dtype(dtype)),
        matrices=tuple(fact.matrix for fact in chosen),
    )


def _stored(size: Footprint, format: Format | None, dtype: torch.dtype) -> str:
    return "main" if size.aliased else format or str(dtype).removeprefix("torch.")


def folded(root: Owner, groups: dict[Owner, tuple[PlannedGroup, ...]]) -> tuple[PlannedUnit, ...]:
    """Units with the same groups as one, in the order of their first."""
    alike: dict[int, list[Owner]] = {}
    for owner in root.tree():
        alike.setdefault(id(groups[owner]), []).append(owner)
    return tuple(
        PlannedUnit(
            names=tuple(owner.name for owner in same), groups=groups[same[0]], ep=same[0].ep
        )
        for same in alike.values()
    )


def simulated(
    root: Owner,
    sizes: Mapping[Owner, Sequence[Footprint]],
    step: Step,
    releases_after_forward: bool | None,
) -> SimulatedUnit:
    """The same units, to be played through a step."""
    flows = False  # does what a unit gets need a gradient?

    def build(owner: Owner) -> SimulatedUnit:
        nonlocal flows
        flows = flows or owner.trains_first > 0
        inner = []
        for child in owner.inner:
            inner.append(build(child))
        flows = flows or owner.trainable
        is_root = owner is root
        return SimulatedUnit(
            owner.name,
            step,
            sizes[owner],
            inner=inner,
            releases_after_forward=not is_root
            if releases_after_forward is None
            else releases_after_forward,
            # Token ids need no gradient, so the root is done when its last parameter is.
            completes_first=is_root and owner.trainable and not owner.trains_first,
            trains_last=owner.trains_first,
            reached=flows,
        )

    return build(root)


def buffers_of(root: Owner, where: Mapping[int, tuple[PlannedGroup, int]]) -> dict[int, Hashable]:
    """The buffer of every parameter, by id: units that are alike share a group and no buffer."""
    return {
        id(one.parameter): (id(owner), id(where[id(one.parameter)][0]))
        for owner in root.tree()
        for one in owner.found
    }


def optimizer_bytes(units: Sequence[PlannedUnit], states: tuple[int, int]) -> list[int]:
    """Optimizer state beside each shard."""
    totals: list[int] = []
    for unit in units:
        for group in unit.groups:
            here = group.state_bytes(states)
            totals = totals or [0] * len(here)
            totals = [a + len(unit.names) * b for a, b in zip(totals, here, strict=True)]
    return totals


def places(
    root: Owner, groups: dict[Owner, tuple[PlannedGroup, ...]]
) -> dict[int, tuple[PlannedGroup, int]]:
    """The group of every parameter and its place in it, by id."""
    found = {}
    for owner in root.tree():
        by_name = {
            item.name: (group, index)
            for group in groups[owner]
            for index, item in enumerate(group.layout.items)
        }
        for one in owner.found:
            found[id(one.parameter)] = by_name[one.name]
    return found
