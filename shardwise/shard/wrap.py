# SPDX-License-Identifier: Apache-2.0
"""Wrapping: find the parameters of modules, pack them in groups, and give the modules their class
and hooks. ``fully_shard`` and ``data_parallel`` decide which parameters share a buffer; everything
else that the two calls do is here."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.core import comm
from shardwise.core.agreement import raise_together
from shardwise.core.compat import register_with_torch
from shardwise.core.hooks import OWNER
from shardwise.core.layout import ROW, TENSOR, Grain, Layout, tensor_fraction
from shardwise.core.mesh import Ranks
from shardwise.core.placements import Placements
from shardwise.core.tile import tile_of
from shardwise.core.uncompiled import uncompiled
from shardwise.precision import Precision
from shardwise.shard.formats import codec_of, stored_as, warn_of_decoding
from shardwise.shard.found import Found, experts_text, find_parameters, outermost, spread_linear
from shardwise.shard.group import Group
from shardwise.shard.model import LEFT_ALONE
from shardwise.shard.module import ShardedModule
from shardwise.shard.state_dict import full_state_dict
from shardwise.shard.unit import Unit

logger = logging.getLogger(__name__)

# "tensor" promises that no matrix is cut; fully_shard refuses it if padding would be too much.
GrainChoice = Grain | Callable[[str, nn.Parameter], Grain] | Literal["tensor"]


def grain_of(found: Found, choice: GrainChoice | None) -> Grain:
    """The grain of one parameter, by the ``grain`` that the user passed."""
    if choice is None or isinstance(choice, Grain):
        return choice or ROW
    if choice == "tensor":
        shape = found.parameter.shape
        if len(shape) > 2:
            return tensor_fraction(shape[0])
        return TENSOR if len(shape) == 2 else ROW
    return choice(found.name, found.parameter)


def wrap_units(model: nn.Module) -> list[nn.Module]:
    """The modules to wrap, inner before outer: the blocks of the outermost lists, then the model.

    A block is an entry of a ``ModuleList`` that has parameters. Lists inside a block, such as a
    list of experts, belong to the block.
    """
    blocks: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.ModuleList):
            blocks += [block for block in module if any(True for _ in block.parameters())]
        else:
            waiting += list(module.children())[::-1]
    return [*outermost(blocks), model]


def _experts_axis(found: Sequence[Found]) -> comm.Axis | None:
    """The axis over which the experts among the parameters of one mesh are spread."""
    linears = [spread_linear(f) for f in found]
    return next((x.axis for x in linears if x is not None and x.axis is not None), None)


class PlannedBuffer(NamedTuple):
    """Parameters that will share a buffer, as positions among all parameters of the call."""

    members: tuple[int, ...]
    layout: Layout
    home: DeviceMesh  # the mesh that the parameters are sharded over


class Wrapping:
    """The modules and parameters of one wrapping call, with the mesh of each parameter.

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
        self.placements, self.precision, self.device = placements, precision, _device_of(mesh)
        self.ignored = ignored or set()
        self.found = find_parameters(self.roots, self.ignored)
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
            if not positions:
                problems.append(f"meshes: {pattern!r} matches no parameter")
            elif not isinstance(home, DeviceMesh):
                problems.append(f"meshes: {pattern!r} gets {home!r}, which is no DeviceMesh")
            elif home.get_coordinate() is None:
                problems.append(f"meshes: this rank is not part of the mesh {home} of {pattern!r}")
            for position in positions if not problems else ():
                if self.homes[position] not in (self.mesh, home):
                    name = self.found[position].name
                    problems.append(f"'{name}' matches two patterns of meshes; narrow one of them")
                self.homes[position] = home
        return problems

    @cached_property
    def ranks(self) -> dict[DeviceMesh, Ranks]:
        """This rank's place on each mesh, and the axis of spread experts on that mesh."""
        pairs = list(zip(self.found, self.homes, strict=True))
        return {
            mesh: Ranks(mesh, _experts_axis([f for f, home in pairs if home == mesh]))
            for mesh in dict.fromkeys([self.mesh, *self.homes])
        }

    def num_shards(self, home: DeviceMesh) -> int:
        """The number of shards of main weights over a mesh."""
        return self.ranks[home].num_shards(self.placements.main)

    def refuse(self, problems: Sequence[str], options: str, notes: Sequence[str]) -> None:
        """Raise on all ranks if any rank has a problem, or if ranks wrap different things.
        ``options`` and ``notes`` (one for each parameter) must be equal on all ranks too."""
        lines = [f"{self.placements} {self.precision} {options}"]
        for f, home, note in zip(self.found, self.homes, notes, strict=True):
            experts = experts_text(f) if home == self.mesh else ""  # others hold other experts
            lines.append(f"{_described(f)} {note} {experts}")
        axes = self.ranks[self.mesh].axes
        raise_together(self.verb, problems, lines, axes, same="wrap the same module")

    def install(
        self,
        buffers: Sequence[PlannedBuffer],
        divisors: Mapping[DeviceMesh, float],
        *,
        offload: bool = False,
        pin: bool = False,
        **options: Any,
    ) -> Unit:
        """Make a unit of the modules. ``divisors``: what to divide the sum of gradients by, for
        meshes where this is not the number of ranks. ``options`` are passed to the unit."""
        tiles = [tile_of(f.parameter, home) for f, home in zip(self.found, self.homes, strict=True)]
        groups: list[Group] = []
        where: dict[int, tuple[int, int]] = {}  # by position: (group, index in the group)
        for buffer in buffers:
            for index, position in enumerate(buffer.members):
                where[position] = (len(groups), index)
            group = Group(
                buffer.layout,
                [self.found[position].local for position in buffer.members],
                self.ranks[buffer.home],
                self.placements,
                self.precision,
                self.device,
                tiles=[tiles[position] for position in buffer.members],
                codec=codec_of(self.stored[buffer.members[0]], self.precision),
                divisor=divisors.get(buffer.home),
                offload=offload,
                pin=pin,
            )
            # Where main is replicated, one broadcast makes all copies equal; where it is sharded
            # there are no copies.
            group.broadcast()
            groups.append(group)
        places = [
            (parameters, local, *where[position])
            for position, f in enumerate(self.found)
            for parameters, local in f.places
        ]
        name = type(self.roots[0]).__name__
        unit = Unit(name, self.roots, groups, places, precision=self.precision, **options)
        unit.verb = self.verb
        unit.stored = {where[position]: stored for position, stored in enumerate(self.stored)}
        if any(stored.format for stored in self.stored):
            warn_of_decoding(self.precision, self.device, self.mesh)
        _install(self.roots, unit, self.device)
        for f in self.found:
            setattr(f.parameter, OWNER, f.name)
        for parameter in self.ignored:
            setattr(parameter, LEFT_ALONE, True)
        return unit


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a parameter or of a module above it, or is a part of
    such a name between dots."""
    below = fnmatch.fnmatchcase(name, f"{pattern}.*") or f".{pattern}." in f".{name}"
    return below or fnmatch.fnmatchcase(name, pattern)


def _described(found: Found) -> str:
    """A parameter in words, which must be the same on all ranks."""
    parameter = found.parameter
    placed = f" {parameter.placements}" if isinstance(parameter, DTensor) else ""
    trained = "trainable" if parameter.requires_grad else "frozen"
    return f"{found.name} {list(parameter.shape)}{placed} {parameter.dtype} {trained}"


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


# ------------------------------------------------------------------------------ class and hooks


def _install(roots: Sequence[nn.Module], unit: Unit, device: torch.device) -> None:
    """Show the parameters at rest, move buffers, change classes and add hooks."""
    classes = [_wrapped_class(type(root)) for root in roots]  # may raise: nothing has changed yet
    unit.shown = True
    unit.hide()
    for root, wrapped in zip(roots, classes, strict=True):
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
        root.__class__ = wrapped
        # Past __setattr__: an OptimizedModule would set the attribute of the module inside.
        vars(root)["_shardwise_unit"] = unit
        register_with_torch(root, unit)
        root.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
        root.register_forward_hook(_post_forward, always_call=True)
        root.register_state_dict_pre_hook(_before_state_dict)
        root.register_state_dict_post_hook(_after_state_dict)
        root.register_load_state_dict_pre_hook(_before_load)
        root.register_load_state_dict_post_hook(_after_load)


_classes: dict[type, type] = {}


def _wrapped_class(original: type) -> type:
    if original not in _classes:
        more = {"save_pretrained": _save_pretrained} if hasattr(original, "save_pretrained") else {}
        _classes[original] = type(f"FSDP{original.__name__}", (ShardedModule, original), more)
    return _classes[original]


def _save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of transformers and peft, with whole weights. All ranks call it, and
    rank 0 writes."""
    if kwargs.get("state_dict") is None:
        kwargs["state_dict"] = full_state_dict(self, only_first_rank=True)
    kwargs.setdefault("is_main_process", torch.distributed.get_rank() == 0)
    return super(ShardedModule, self).save_pretrained(*args, **kwargs)  # type: ignore[misc]


# The hooks are on wrapped modules only, so their module always has a unit.


@uncompiled
def _pre_forward(module: Any, args: Any, kwargs: Any) -> Any:
    return module._shardwise_unit.pre_forward(module, args, kwargs)


@uncompiled
def _post_forward(module: Any, args: Any, output: Any) -> Any:
    # After a forward that raised, torch calls this with None: there is no output to watch then.
    return module._shardwise_unit.post_forward(module, output)


def _before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
    """Show the parameters at rest to the state dict, even while whole weights are gathered."""
    unit: Unit = module._shardwise_unit
    unit.hide_at_rest()
    unit.shown_again = unit.shown  # inside a forward or backward
    unit.hide()


def _after_state_dict(module: Any, *_: Any) -> None:
    unit: Unit = module._shardwise_unit
    if unit.shown_again:
        unit.show()


def _before_load(module: Any, *_: Any) -> None:
    module._shardwise_unit.hide()


def _after_load(module: Any, keys: Any) -> None:
    """Take the tensors that ``assign=True`` put in place of parameters into the flat buffers."""
    module._shardwise_unit.take_assigned()
