# SPDX-License-Identifier: Apache-2.0
"""``Replica``: a program's model and its optimizer; wrapped on a rank, plain in the reference."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw
from shardwise.core.placements import STRATEGIES
from shardwise.core.tensor import ShardedTensor
from shardwise.moe import mixtures_of
from tests.fuzz.plain import MUON, SETTINGS, Narrow, plain_optimizer
from tests.fuzz.program import Context, Node, Program, build, walk

Log = list[tuple[str, Any]]


def full(value: Any) -> Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


class Piece(NamedTuple):
    """The elements [low, high) of a tensor, which this rank holds."""

    low: int
    high: int
    values: Tensor


def held(value: Any) -> Any:
    """The values that this rank holds, without asking the others."""
    if not isinstance(value, ShardedTensor) or value.cut.tile is not None:
        return full(value)
    return Piece(*value.cut.piece, value.to_local().detach().reshape(-1).clone())


def in_fp8(program: Program) -> bool:
    return "fp8" in (program["wrap"]["precision"] or {"weights": ""})["weights"]


class Replica:
    """One model, its optimizer, and what it has under way."""

    def __init__(self, program: Program, rank: int, ranks: int, wrapped: bool) -> None:
        self.program, self.context, self.wrapped = program, Context(rank=rank), wrapped
        self.model = build(program, self.context)
        self.narrow: Narrow | None = None
        if wrapped:
            wrap(self.model, program, ranks)
            self.optimizer = sharded_optimizer(program["optimizer"], self.model)
        else:
            if program["wrap"]["precision"]:
                precision = sw.Precision(**program["wrap"]["precision"])
                self.narrow = Narrow(self.model, precision if in_fp8(program) else None)
            self.optimizer = plain_optimizer(program["optimizer"], self.model, self.named())
        self.slots: dict[int, tuple[Tensor, Tensor]] = {}
        self.waiting: dict[str, Tensor] = {}  # the reference: gradients that were not averaged yet
        self.kept: dict[str, Tensor] = {}  # gradients and values that the user keeps
        self.average: dict[str, Tensor] = {}  # of weights
        self.snapshot: Any = None  # an earlier state of model and optimizer
        self.hooked: set[str] = set()  # parameters with a post-accumulate hook
        self.log: Log = []
        self.rest: dict[str, Tensor] = {}
        self.at_rest()

    def named(self) -> dict[str, Tensor]:
        """The parameters that the optimizer trains."""
        if self.narrow is not None:
            return self.narrow.mains
        return dict(self.model.named_parameters())

    def at_rest(self) -> dict[str, Tensor]:
        """The same. Between a forward and its backward modules hold gathered weights instead, which
        show no gradient."""
        named = self.named()
        self.rest |= {name: p for name, p in named.items() if isinstance(p, sw.ShardedTensor)}
        return {name: self.rest.get(name, p) for name, p in named.items()}

    def shown(self, name: str, value: Any, whole: bool) -> Any:
        """A value for the log, ``whole`` or as it lies; of a plain replica the experts that its
        rank has, where these are spread."""
        value = full(value) if whole else held(value)
        spread = self.program["spread"]
        if not spread or ".experts." not in name or self.wrapped:
            return value
        return value.chunk(spread)[self.context.rank % spread]

    def state(self) -> Any:
        """Copies of the model's and the optimizer's states."""
        named = {name: p.detach().clone() for name, p in self.named().items()}
        return named, _copied(self.optimizer.state_dict())

    def load(self, state: Any) -> None:
        """Go back to an earlier state, which can be loaded once more."""
        named, optimizer = state
        if self.narrow is None:
            own = {  # experts ask for the order of their gate and up
                f"{path}._extra_state": module.get_extra_state()
                for path, module in self.model.named_modules()
                if type(module).get_extra_state is not nn.Module.get_extra_state
            }
            self.model.load_state_dict(named | own, strict=False)
        else:
            with torch.no_grad():
                for name, p in self.named().items():
                    p.copy_(named[name])
        self.optimizer.load_state_dict(_copied(optimizer))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def sharded_optimizer(name: str, model: nn.Module) -> Any:
    match name:
        case "muon":
            return sw.optimizer(model, matrix=sw.muon(**MUON), elementwise=sw.adamw(**SETTINGS))
        case "sw_adamw":
            return sw.optimizer(model, matrix=None, elementwise=sw.adamw(**SETTINGS))
        case "adamw":
            return torch.optim.AdamW(model.parameters(), **SETTINGS)  # type: ignore[arg-type]
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 * (name == "momentum"))


# ------------------------------------------------------------------------------ wrapping


@cache
def mesh_of(axes: int, ranks: int) -> DeviceMesh:
    outer = 2 if ranks % 2 == 0 else 1
    shape, names = (
        ((ranks,), ("dp",)) if axes == 1 else ((outer, ranks // outer), ("dp_outer", "dp"))
    )
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def grid_of(first: int, second: int, name: str) -> DeviceMesh:
    return init_device_mesh("cpu", (first, second), mesh_dim_names=("dp", name))


def wrap(model: Node, program: Program, ranks: int, strategy: str | None = None) -> None:
    """Wrap the units of a program, in its order."""
    how = program["wrap"]
    placements = STRATEGIES[strategy or how["strategy"]]
    mesh = grid_of(2, 2, "tp") if program["tp"] else mesh_of(placements.num_axes, ranks)
    pairs = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for path, spec in walk(program["tree"]) if program["tp"] else ():
        if spec["kind"] == "mlp":
            parallelize_module(model.get_submodule(path), mesh["tp"], pairs)
    compiled = [model.get_submodule(path) for path in program["compile"]["paths"]]
    for module in compiled if program["compile"]["first"] else ():
        module.compile(backend="aot_eager")
    meshes = _spread(model, mesh, ranks, program["spread"])
    _wrap(model, program, ranks, placements, mesh, meshes)
    for module in compiled if not program["compile"]["first"] else ():
        module.compile(backend="aot_eager")


def _spread(model: Node, mesh: DeviceMesh, ranks: int, spread: int) -> dict[str, DeviceMesh]:
    """Spread experts over as many ranks; the mesh of those that hold the same."""
    if not spread:
        return {}
    grid = grid_of(ranks // spread, spread, "ep")
    axes = sw.comm.as_axis(grid.get_group("ep"), "ep"), sw.comm.as_axis(mesh.get_group(), "dp")
    for layer in mixtures_of(model):
        layer.spread(*axes)
    return {"*experts": grid["dp"]} if mixtures_of(model) else {}


def _wrap(
    model: Node,
    program: Program,
    ranks: int,
    placements: Any,
    mesh: DeviceMesh,
    meshes: dict[str, DeviceMesh],
) -> None:
    how = program["wrap"]
    options: dict[str, Any] = {
        "mesh": mesh,
        "placements": placements,
        "unused_parameters": how["unused"],
        "memory": how["memory"],
    }
    if how["precision"]:
        options["precision"] = sw.Precision(**how["precision"])
    if how["how"] == "data_parallel":
        bucket = {"bucket_mb": 0.0005, "overlap_gather": how["overlap"]}
        sw.data_parallel(model, **options, **bucket, **({"meshes": meshes} if meshes else {}))
        return
    if how["offload"]:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for number, paths in enumerate(how["units"]):
        modules = [model.get_submodule(path) for path in paths]
        reshard = how["reshard"][number % len(how["reshard"])]
        if type(reshard) is int and (ranks == 1 or placements != STRATEGIES["zero3"]):
            reshard = None
        options["reshard_after_forward"] = reshard
        wrapped = {
            parameter
            for module in modules
            for unit in module.modules()
            if isinstance(unit, sw.ShardedModule)
            for parameter in unit.parameters()
        }
        if how["precision"]:
            options["precision"] = sw.Precision(**precision_of(modules, how["precision"], wrapped))
        own = [p for module in modules for layer in mixtures_of(module) for p in
               layer.experts.parameters() if p not in wrapped]  # fmt: skip
        options["meshes"] = meshes if own else None
        sw.fully_shard(modules if len(modules) > 1 else modules[0], **options)


def precision_of(
    modules: list[nn.Module], wanted: dict[str, Any], wrapped: set[Tensor]
) -> dict[str, Any]:
    """Weights in bf16 where a unit has no linear of its own that fp8 could be for."""
    linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    own = any(linear.weight not in wrapped for linear in linears)
    return wanted if own or "fp8" not in wanted["weights"] else wanted | {"weights": "bf16"}
