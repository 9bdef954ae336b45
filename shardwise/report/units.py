# SPDX-License-Identifier: Apache-2.0
"""The units of a plan: a copy of the model on the meta device, wrapped for a pretended mesh.

    Model                         root      embedding, norm, head
      embedding                   block 0   every parameter below blocks.0
      blocks  [0] [1] [2]   -->   block 1   alike: laid out once
      norm, head                  block 2

``fully_shard`` and ``data_parallel`` themselves wrap the copy: a plan has the units of a run.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm import Axis
from shardwise.memory import separate_ledger
from shardwise.mesh import PretendedMesh, Ranks
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.report.planned import Options
from shardwise.shard.arrivals import Key
from shardwise.shard.checks import spread_linear
from shardwise.shard.data_parallel import BucketedUnit, data_parallel
from shardwise.shard.fully_shard import fully_shard
from shardwise.shard.group import Group
from shardwise.shard.module import ShardedModule, unit_of, units_of
from shardwise.shard.unit import Unit
from shardwise.shard.whole_parameter import carry_attributes
from shardwise.shard.wrapping import (
    UNEVEN,
    Found,
    GrainChoice,
    find_parameters,
    parameters_and_units,
    wrap_units,
)

META = torch.device("meta")


def spread_over(model: nn.Module) -> int:
    """Over how many ranks the experts of a model are spread."""
    linears = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    return max((one.total_experts // one.num_experts for one in linears), default=1)


def recomputed_modules(model: nn.Module) -> frozenset[int]:
    """The ids of all modules that run forward once more in backward. A model that checkpoints tells
    by an attribute ``recomputed``: the modules that it does so with."""
    again = getattr(model, "recomputed", ())
    return frozenset(id(part) for module in again for part in module.modules())


# ------------------------------------------------------------------------------ wrapping a copy


def modules_to_wrap(model: nn.Module, wrap: Sequence[nn.Module] | None) -> list[nn.Module]:
    """The modules for ``fully_shard``, inner before outer, and the model last. ``wrap``: None for
    those of :func:`wrap_units`, or those that are wrapped already."""
    units = {id(module): unit for module in model.modules() if (unit := unit_of(module))}
    if units:
        if wrap is not None or id(model) not in units or not _replannable(list(units.values())):
            raise ValueError(
                f"{type(model).__name__} is wrapped already, and that can be planned only where "
                f"fully_shard took single modules and the model last, and main weights have the "
                f"dtypes that parameters came with: "
                f"plan the model before wrapping, built anew under torch.device('meta')"
            )
        wrap = [module for module in model.modules() if id(module) in units]
    chosen = {id(module) for module in (wrap_units(model) if wrap is None else wrap)}
    strangers = chosen - {id(module) for module in model.modules()}
    if strangers:
        raise ValueError(f"{len(strangers)} of the modules in wrap are not part of the model")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    outer_first = [one for one in model.modules() if id(one) in chosen and one is not model]
    return [*outer_first[::-1], model]


def _replannable(units: Sequence[Unit]) -> bool:
    """Whether units say all that a plan needs: one for each module, and their parameters at rest
    have the dtypes that they came with."""
    alone = len({id(unit) for unit in units}) == len(units)
    return alone and not any(
        isinstance(unit, BucketedUnit)
        or any(group.main.dtype != group.parameter_dtype for group in unit.groups)
        for unit in units
    )


@dataclass(frozen=True)
class ToWrap:
    """A model, and all of its wrapping that the options of a plan do not say."""

    model: nn.Module
    modules: list[nn.Module]  # for fully_shard
    ignored: list[nn.Parameter]
    grain: GrainChoice | None

    def wrapped(self, options: Options, rank: int) -> nn.Module:
        """A copy of the model as one rank of the mesh has it: wrapped, and without values."""
        copied, copies = _copied(self.model)
        data, experts = (ranks_at(options, rank, ep) for ep in (1, options.ep))
        for module in copied.modules():
            if isinstance(module, GroupedLinear) and module.is_spread:
                module.axis = experts.others
        common: dict[str, Any] = {
            "placements": options.placements,
            "precision": options.precision,
            "ignored_params": {copies[id(one)] for one in self.ignored if id(one) in copies},
            "grain": self.grain,
            "unused_parameters": "error",
        }
        names: list[str] = []
        for one in self.modules if options.bucket_mb is None else [self.model]:
            module = copies[id(one)]
            found = find_parameters([module], common["ignored_params"])
            names += [f.name for f in found]
            spread = {f.name: experts.mesh for f in found if spread_linear(f) is not None}
            alone = len(spread) == len(found) > 0  # experts that are a unit by themselves
            common["mesh"] = experts.mesh if alone else data.mesh
            common["meshes"] = spread if spread and not alone else None
            if options.bucket_mb is None:
                fully_shard(
                    module,
                    reshard_after_forward=options.reshard_after_forward,
                    gather_in_step=options.gather_in_step,
                    **common,
                )
            else:
                early: Any = "step" if options.gather_in_step else False
                data_parallel(module, bucket_mb=options.bucket_mb, overlap_gather=early, **common)
        if problems := options.precision.unmatched(names):
            raise ValueError(f"plan: {'; '.join(problems)}, by their names in the modules of wrap")
        return copied


def price_of_whole(source: ToWrap, options: Options) -> str:
    """The cost of having every matrix whole: why ``data_parallel`` cuts some."""
    try:
        with separate_ledger():
            wrapped = replace(source, grain="tensor").wrapped(options, 0)
    except ValueError:
        return "grain='tensor' is refused: whole matrices would pad over an eighth"
    layouts = [group.layout for unit in units_of(wrapped) for group in unit.groups]
    sizes, padding = [one.payload for one in layouts], sum(one.padding for one in layouts)
    return (
        f"grain='tensor' would have {100 * max(sizes) / sum(sizes):.0f} % of the model in one "
        f"bucket, {100 * padding / sum(sizes):.1f} % padding"
    )


def ranks_at(options: Options, rank: int, ep: int) -> Ranks:
    """The mesh as one of its ranks sees it: that of parameters spread over ``ep`` ranks."""
    mesh, backend = options.mesh.without(ep), "gloo" if options.device == "cpu" else "nccl"
    pretended = PretendedMesh(mesh.names, mesh.sizes, mesh.coordinate(rank // ep), backend)
    others = None if ep == 1 else Axis.pretended("ep", ep, rank % ep, backend)
    return Ranks(pretended, others)


def _copied(model: nn.Module) -> tuple[nn.Module, Mapping[int, Any]]:
    """A copy of a model, not wrapped and on the meta device; and the copies of its modules and
    parameters, by the ids of these."""
    units = list(units_of(model))
    for unit in units:
        unit.hide()  # the parameters at rest: names, shapes and dtypes as they were
    copies: dict[int, Any] = {id(unit): None for unit in units}
    modules = list(model.modules())
    for module in modules:  # wrapped ones refuse to be copied: of the classes that they had
        kind = type(module).__mro__[ShardedModule._orig_cls_mro_index if unit_of(module) else 0]
        copies[id(module)] = object.__new__(kind)
    held = [one for module in modules for one in vars(module).values()]
    for tensor in (*model.buffers(), *(one for one in held if isinstance(one, Tensor))):
        copies[id(tensor)] = torch.empty_like(tensor, device=META)
    copies |= {id(parameter): _stand_in(parameter) for parameter in model.parameters()}
    for module in modules:
        made = vars(copies[id(module)])
        for name, value in vars(module).items():
            if type(value) in (dict, OrderedDict, set) and not value:  # a module has 15 for hooks
                made[name] = copies.setdefault(id(value), type(value)())
            elif name != "_compiled_call_impl":  # what module.compile() made computes with values
                try:
                    made[name] = copy.deepcopy(value, copies)
                except Exception:  # a process group, a lock: both have it
                    made[name] = copies[id(value)] = value
    return copies[id(model)], copies


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without values, of the shape that is laid out."""
    found = Found("", parameter, [])
    empty = torch.empty(found.shape, dtype=parameter.dtype, device=META)
    made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    carry_attributes(parameter, made)
    setattr(made, UNEVEN, found.uneven)
    return made


# ------------------------------------------------------------------------------ a walk over units


@dataclass(frozen=True)
class Own:
    """A parameter of a unit, and the modules that register it."""

    key: Key
    group: Group
    leaf: Any  # the parameter as forward sees it
    modules: list[nn.Module]

    @cached_property
    def is_written(self) -> bool:
        """Whether a kernel of its modules writes the gradient itself."""
        return any(getattr(type(one), "writes_main_grad", False) for one in self.modules)


@dataclass(eq=False)
class Branch:
    """A wrapped module, and its parts in the order in which they are registered: runs of its own
    parameters, and the wrapped modules inside it."""

    module: nn.Module
    unit: Unit
    parts: list[list[Own] | Branch]


def branch_of(module: nn.Module) -> Branch:
    unit = unit_of(module)
    assert unit is not None
    branch = Branch(module, unit, [])
    places = {(id(held), name): place for held, name, *place in unit.places}

    def is_inner(other: nn.Module) -> bool:
        return other is not module and unit_of(other) is not None

    for one in parameters_and_units([module], set(), is_inner):
        if not isinstance(one, Found):
            branch.parts.append(branch_of(one[1]))
            continue
        held, name = one.places[0]
        if (id(held), name) not in places:
            continue  # an ignored one
        if not branch.parts or isinstance(branch.parts[-1], Branch):
            branch.parts.append([])
        number, index = places[id(held), name]
        group = unit.groups[number]
        own = Own((number, index), group, group.unsharded[index], one.modules)
        branch.parts[-1].append(own)  # type: ignore[union-attr]
    return branch
