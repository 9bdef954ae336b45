# SPDX-License-Identifier: Apache-2.0
"""The units of a plan: a copy of the model on the meta device, wrapped for a pretended mesh.

    Model                         root      embedding, norm, head
      embedding                   block 0   every parameter below blocks.0
      blocks  [0] [1] [2]   -->   block 1   alike: laid out once
      norm, head                  block 2

``fully_shard`` and ``data_parallel`` wrap the copy, so a plan has the units of a run.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.comm import Axis
from shardwise.core.mesh import Ranks
from shardwise.core.tensor import ShardedTensor
from shardwise.moe.grouped_linear import GroupedLinear
from shardwise.planning.compiled import Kept, stand_in
from shardwise.planning.planned import Options
from shardwise.planning.pretended import PretendedMesh
from shardwise.shard.data_parallel import data_parallel
from shardwise.shard.found import find_parameters, spread_linear
from shardwise.shard.fully_shard import fully_shard
from shardwise.shard.module import ShardedModule, unit_of, units_of
from shardwise.shard.parameter import carry_attributes
from shardwise.shard.unit import Unit
from shardwise.shard.wrap import GrainChoice, wrap_units

META = torch.device("meta")


def spread_over(model: nn.Module) -> int:
    """The number of ranks over which the experts of a model are spread."""
    linears = [module for module in model.modules() if isinstance(module, GroupedLinear)]
    return max((linear.total_experts // linear.num_experts for linear in linears), default=1)


def recomputed_modules(model: nn.Module) -> frozenset[int]:
    """The ids of all modules that run forward again in backward. A model with activation
    checkpointing lists these modules in an attribute ``recomputed``."""
    again = getattr(model, "recomputed", ())
    return frozenset(id(part) for module in again for part in module.modules())


# ------------------------------------------------------------------------------ wrapping a copy


def modules_to_wrap(model: nn.Module, wrap: Sequence[nn.Module] | None) -> list[nn.Module]:
    """The modules for ``fully_shard``, inner before outer, and the model last. ``wrap`` None: the
    modules that are wrapped already, or else those of :func:`wrap_units`."""
    units = {id(module): unit for module in model.modules() if (unit := unit_of(module))}
    if units:
        if wrap is not None or id(model) not in units or not _replannable(list(units.values())):
            raise ValueError(
                f"{type(model).__name__} is wrapped already. A wrapped model can be planned only "
                f"without wrap, if fully_shard wrapped single modules and the model last, and main "
                f"weights kept the dtypes of the parameters: plan the model before wrapping, built "
                f"under torch.device('meta')"
            )
        wrap = [module for module in model.modules() if id(module) in units]
    chosen = {id(module) for module in (wrap_units(model) if wrap is None else wrap)}
    unknown = chosen - {id(module) for module in model.modules()}
    if unknown:
        raise ValueError(
            f"{len(unknown)} of the modules in wrap are not part of the model: take modules from "
            f"model.modules()"
        )
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    outer_first = [m for m in model.modules() if id(m) in chosen and m is not model]
    return [*outer_first[::-1], model]


def _replannable(units: Sequence[Unit]) -> bool:
    """Whether units contain all facts for a plan: each unit wraps one module, and parameters at
    rest have their original dtypes."""
    single = len({id(unit) for unit in units}) == len(units)
    return single and not any(
        unit.verb == "data_parallel"
        or any(group.main.dtype != group.parameter_dtype for group in unit.groups)
        for unit in units
    )


def wrapped_copy(
    model: nn.Module,
    modules: Sequence[nn.Module],
    options: Options,
    rank: int,
    ignored: Sequence[nn.Parameter],
    grain: GrainChoice | None,
    compiled: Mapping[nn.Module, Kept],
) -> nn.Module:
    """A copy of the model for one rank of the mesh: wrapped, and without values. ``modules`` are
    given to ``fully_shard``."""
    copied, copies = _copied(model)
    for original, kept in compiled.items():
        vars(copies[id(original)])["forward"] = partial(stand_in, copies[id(original)], kept)
    data, experts = (ranks_at(options, rank, ep) for ep in (1, options.ep))
    for module in copied.modules():
        if isinstance(module, GroupedLinear) and module.is_spread:
            module.axis = experts.others
    common: dict[str, Any] = {
        "placements": options.placements,
        "precision": options.precision,
        "ignored_params": {copies[id(p)] for p in ignored if id(p) in copies},
        "grain": grain,
    }
    names: list[str] = []
    for original in modules if options.bucket_mb is None else [model]:
        module = copies[id(original)]
        found = find_parameters([module], common["ignored_params"])
        names += [f.name for f in found]
        spread = {f.name: experts.mesh for f in found if spread_linear(f) is not None}
        alone = len(spread) == len(found) > 0  # a unit of experts alone
        common["mesh"] = experts.mesh if alone else data.mesh
        common["meshes"] = spread if spread and not alone else None
        if options.bucket_mb is None:
            fully_shard(module, reshard_after_forward=options.reshard_after_forward, **common)
        else:
            data_parallel(module, bucket_mb=options.bucket_mb, **common)
    if problems := options.precision.unmatched(names):
        raise ValueError(
            f"plan: {'; '.join(problems)} (parameters have their names in the modules of wrap)"
        )
    return copied


def ranks_at(options: Options, rank: int, ep: int) -> Ranks:
    """One rank's place on the mesh of the parameters that are spread over ``ep`` ranks."""
    mesh, backend = options.mesh.without(ep), "gloo" if options.device == "cpu" else "nccl"
    pretended = PretendedMesh(mesh.names, mesh.sizes, mesh.coordinate(rank // ep), backend)
    others = None if ep == 1 else Axis.pretended("ep", ep, rank % ep, backend)
    return Ranks(pretended, others)


def _copied(model: nn.Module) -> tuple[nn.Module, Mapping[int, Any]]:
    """A copy of a model, unwrapped and on the meta device; and the copies of its modules and
    parameters, by the ids of the originals."""
    units = list(units_of(model))
    for unit in units:
        unit.hide()  # show the parameters at rest: their original names, shapes and dtypes
    copies: dict[int, Any] = {id(unit): None for unit in units}
    modules = list(model.modules())
    for module in modules:  # wrapped modules refuse to be copied: create the original class
        kind = type(module).__mro__[ShardedModule._orig_cls_mro_index if unit_of(module) else 0]
        copies[id(module)] = object.__new__(kind)
    values = [value for module in modules for value in vars(module).values()]
    for tensor in (*model.buffers(), *(value for value in values if isinstance(value, Tensor))):
        copies[id(tensor)] = torch.empty_like(tensor, device=META)
    copies |= {id(parameter): _stand_in(parameter) for parameter in model.parameters()}
    for module in modules:
        copied = vars(copies[id(module)])
        for name, value in vars(module).items():
            if type(value) in (dict, OrderedDict, set) and not value:  # faster: 15 for hooks alone
                copied[name] = copies.setdefault(id(value), type(value)())
            elif name != "_compiled_call_impl":  # the result of module.compile() needs values
                try:
                    copied[name] = copy.deepcopy(value, copies)
                except Exception:  # a process group or a lock: the copy shares it
                    copied[name] = copies[id(value)] = value
    return copies[id(model)], copies


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter without values, of the shape that the layout sees."""
    shape: Sequence[int] = parameter.shape
    if isinstance(parameter, ShardedTensor):
        shape = parameter.cut.item_shape
    empty = torch.empty(shape, dtype=parameter.dtype, device=META)
    stand_in = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    carry_attributes(parameter, stand_in)
    return stand_in


# ------------------------------------------------------------------------------ a walk over units


@dataclass(eq=False)
class Own:
    """A parameter of a unit, and the modules that register it."""

    leaf: Any  # the parameter as forward sees it
    modules: list[nn.Module]

    @property
    def is_written(self) -> bool:
        """Whether a kernel of its modules writes the gradient itself."""
        return any(getattr(type(module), "writes_main_grad", False) for module in self.modules)


@dataclass(eq=False)
class Branch:
    """A wrapped module, and its parts in the order of registration: lists of its own parameters,
    and the wrapped modules inside it."""

    module: nn.Module
    unit: Unit
    parts: list[list[Own] | Branch]


def branch_of(module: nn.Module) -> Branch:
    unit = unit_of(module)
    assert unit is not None
    branch = Branch(module, unit, [])
    places = {(id(holder), name): place for holder, name, *place in unit.places}
    known: dict[int, Own] = {}  # by the leaf: a tied parameter has several places
    seen = {module}

    def visit(inner: nn.Module) -> None:
        for name in inner._parameters:
            place = places.get((id(inner._parameters), name))
            if place is None:
                continue  # an ignored parameter
            leaf = unit.groups[place[0]].unsharded[place[1]]
            if id(leaf) in known:
                known[id(leaf)].modules.append(inner)
                continue
            if not branch.parts or isinstance(branch.parts[-1], Branch):
                branch.parts.append([])
            own = known[id(leaf)] = Own(leaf, [inner])
            branch.parts[-1].append(own)  # type: ignore[union-attr]
        for child in inner.children():
            if child in seen:
                continue
            seen.add(child)
            if unit_of(child) is not None:
                branch.parts.append(branch_of(child))
            else:
                visit(child)

    visit(module)
    return branch
