# SPDX-License-Identifier: Apache-2.0
"""``Run`` interprets the ops over replicas of the model. On a rank there is one, wrapped; in the
reference one for each rank, in this process, whose gradients are averaged after every backward.
Both log the same things in the same order: losses, norms, gradients, parameters.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

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
from shardwise.placements import STRATEGIES
from tests.fuzz.program import (
    ROWS,
    WORDS,
    Context,
    FuzzError,
    Node,
    Program,
    build,
    first,
    walk,
)

Log = list[tuple[str, Any]]


@cache
def mesh_of(axes: int, ranks: int) -> DeviceMesh:
    outer = 2 if ranks % 2 == 0 else 1
    shape, names = (
        ((ranks,), ("dp",)) if axes == 1 else ((outer, ranks // outer), ("dp_outer", "dp"))
    )
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def tensor_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def wrap(model: Node, program: Program, ranks: int, strategy: str | None = None) -> None:
    """Wrap the units of a program, in its order."""
    how = program["wrap"]
    placements = STRATEGIES[strategy or how["strategy"]]
    mesh = tensor_mesh() if program["tp"] else mesh_of(placements.num_axes, ranks)
    pairs = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for path, spec in walk(program["tree"]) if program["tp"] else ():
        if spec["kind"] == "mlp":
            parallelize_module(model.get_submodule(path), mesh["tp"], pairs)
    compiled = [model.get_submodule(path) for path in program["compile"]["paths"]]
    for module in compiled if program["compile"]["first"] else ():
        module.compile(backend="aot_eager")
    _wrap(model, program, ranks, placements, mesh)
    for module in compiled if not program["compile"]["first"] else ():
        module.compile(backend="aot_eager")


def _wrap(model: Node, program: Program, ranks: int, placements: Any, mesh: DeviceMesh) -> None:
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
        sw.data_parallel(model, **options, **bucket)
        return
    if how["offload"]:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for number, paths in enumerate(how["units"]):
        modules = [model.get_submodule(path) for path in paths]
        reshard = how["reshard"][number % len(how["reshard"])]
        if type(reshard) is int and (ranks == 1 or placements != STRATEGIES["zero3"]):
            reshard = None
        options["reshard_after_forward"] = reshard
        if how["precision"]:
            options["precision"] = sw.Precision(**precision_of(modules, how["precision"]))
        sw.fully_shard(modules if len(modules) > 1 else modules[0], **options)


def precision_of(modules: list[nn.Module], wanted: dict[str, Any]) -> dict[str, Any]:
    """Weights in bf16 where a unit has no linear of its own that fp8 could be for."""
    wrapped = {
        parameter
        for module in modules
        for unit in module.modules()
        if isinstance(unit, sw.ShardedModule)
        for parameter in unit.parameters()
    }
    linears = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    own = any(linear.weight not in wrapped for linear in linears)
    return wanted if own or "fp8" not in wanted["weights"] else wanted | {"weights": "bf16"}


def optimizer_of(name: str, model: nn.Module) -> Any:
    rest = sw.adamw(lr=1e-2, eps=1e-3)
    match name:
        case "muon":
            return sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=rest)
        case "sw_adamw":
            return sw.optimizer(model, matrix=None, elementwise=rest)
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 * (name == "momentum"))


def full(value: Any) -> Tensor:
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


class Replica:
    """One model, its optimizer, and what it has under way."""

    def __init__(self, program: Program, rank: int, ranks: int, wrapped: bool, cast: Any) -> None:
        self.context = Context(rank=rank, cast=cast)
        self.model = build(program, self.context)
        if wrapped:
            wrap(self.model, program, ranks)
        self.optimizer = optimizer_of(program["optimizer"], self.model)
        self.slots: dict[int, tuple[Tensor, Tensor]] = {}
        self.waiting: dict[str, Tensor] = {}  # the reference: gradients that were not averaged yet
        self.log: Log = []


class Run:
    """The ops of a program over replicas. The reference's methods average what ranks reduce."""

    def __init__(self, program: Program, replicas: list[Replica], scratch: str) -> None:
        self.program, self.replicas, self.scratch = program, replicas, scratch
        self.sharded = len(replicas) == 1 and program["ranks"] > 1
        self.counter = 0
        self.whole = True  # gradients are where the user looks for them
        self.sync = True
        self.gathered = False  # by hand
        paths = [path for unit in program["wrap"]["units"] for path in unit]
        names = [name for name, _ in replicas[0].model.named_parameters()]
        self.all_reduced = all(any(not p or n.startswith(p + ".") for p in paths) for n in names)
        self.reduced = {n for n in names if any(not p or n.startswith(p + ".") for p in paths)}

    def run(self) -> None:
        for number, op in enumerate(self.program["ops"]):
            self.place = f"op {number} {op['op']}"
            getattr(self, "do_" + op["op"])(op)
        self.place = "the end"
        self.do_look({})

    def note(self, replica: Replica, what: str, value: Any) -> None:
        replica.log.append((f"{self.place}: {what}", value))

    def units(self, replica: Replica) -> list[Any]:
        return [m for m in replica.model.modules() if isinstance(m, sw.ShardedModule)]

    # ------------------------------------------------------------------ forward and backward

    def batch(self, replica: Replica) -> tuple[Tensor, Tensor]:
        seed = 1000 * self.program["seed"] + 10 * self.counter + replica.context.rank
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.program["dtype"])
        x = torch.randn(ROWS, self.program["width"], generator=generator, dtype=dtype)
        tokens = torch.randint(0, WORDS, (ROWS,), generator=generator)
        return x.requires_grad_(self.program["input_grad"]), tokens

    def call(self, replica: Replica, module: nn.Module) -> tuple[Tensor, Tensor]:
        """(input, loss) of a module on this replica's batch."""
        x, tokens = self.batch(replica)
        given = x if replica.context.cast is None else x.to(replica.context.cast)
        out = first(module(given, tokens))
        return x, out.to(x.dtype).square().mean()

    def do_forward(self, op: dict[str, Any]) -> None:
        self.counter += 1
        for replica in self.replicas:
            x, loss = self.call(replica, replica.model)
            replica.slots[op["slot"]] = x, loss
            self.note(replica, "loss", full(loss))

    def do_backward(self, op: dict[str, Any]) -> None:
        losses = []
        for replica in self.replicas:
            _, loss = replica.slots.get(op["slot"], (None, None))
            if not op["keep"]:
                replica.slots.pop(op["slot"], None)
            losses.append(loss if loss is not None and loss.requires_grad else None)
        if any(loss is not None for loss in losses):
            self.backward(losses, op["keep"])

    def backward(self, losses: list[Tensor | None], keep: bool = False) -> None:
        if self.sharded:
            losses[0].backward(retain_graph=keep)
            return
        before, came = [], []
        for replica, loss in zip(self.replicas, losses, strict=True):
            named = dict(replica.model.named_parameters())
            before.append({name: p.grad for name, p in named.items()})
            for p in named.values():
                p.grad = None
            if loss is not None:
                loss.backward(retain_graph=keep)
            for name, p in named.items():
                if p.grad is not None:
                    old = replica.waiting.get(name)
                    replica.waiting[name] = local(p.grad) if old is None else old + local(p.grad)
            came.append(replica.waiting)
        names = dict.fromkeys(name for waiting in came for name in waiting)
        for replica, old in zip(self.replicas, before, strict=True):
            for name, p in replica.model.named_parameters():
                p.grad = old[name]
                if not self.sync or name not in names:
                    continue
                if name in self.reduced:
                    parts = [w[name] for w in came if name in w]
                    new = torch.stack(parts).sum(0) / len(self.replicas)
                elif name in replica.waiting:
                    new = replica.waiting[name]
                else:
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                with torch.no_grad():
                    local(p.grad).add_(new)
        if self.sync:
            for replica in self.replicas:
                replica.waiting = {}

    def do_grad(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            x, loss = replica.slots.get(op["slot"], (None, None))
            if loss is None or not loss.requires_grad or not x.requires_grad:
                continue
            of = (
                [x]
                if op["of"] == "x"
                else [p for p in replica.model.parameters() if p.requires_grad]
            )
            found = torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True)
            if op["of"] == "x":
                self.note(replica, "gradient of x", found[0])
            else:
                self.note(replica, "gradients found", sum(g is not None for g in found))

    def do_raise(self, op: dict[str, Any]) -> None:
        self.counter += 1
        raised, losses = False, []
        for replica in self.replicas:
            replica.context.bombs = {op["where"]}
            kept = {name: p.grad for name, p in replica.model.named_parameters()}
            for p in replica.model.parameters() if not self.sharded else ():
                p.grad = None
            try:
                losses.append(self.call(replica, replica.model)[1])
                if op["where"] == "backward" and losses[-1].requires_grad:
                    losses[-1].backward(retain_graph=not self.sharded)
            except FuzzError:
                raised = True
            replica.context.bombs = set()
            if not self.sharded:  # plain torch has added some of them
                for name, p in replica.model.named_parameters():
                    p.grad = kept[name]
            self.note(replica, "raised", raised)
        if not raised and op["where"] == "backward":
            if not self.sharded and losses[0].requires_grad:
                self.backward(losses)
        elif raised and (op["where"] == "backward" or op["after"] != "nothing"):
            for replica in self.replicas:
                replica.slots.clear()
                replica.waiting = {}
                if op["after"] == "reset" and isinstance(replica.model, sw.ShardedModule):
                    replica.model.reset_iter_state()
                else:
                    replica.model.zero_grad()
            self.whole = self.sync  # nothing waits

    def do_eval(self, op: dict[str, Any]) -> None:
        self.counter += 1
        for replica in self.replicas:
            replica.model.train(op["mode"] == "dropped")
            grad = op["mode"] in ("eval", "dropped")
            with torch.set_grad_enabled(grad), torch.inference_mode(op["mode"] == "inference"):
                loss = full(self.call(replica, replica.model)[1])
            self.note(replica, "loss", loss)
            replica.model.train()

    def do_alone(self, op: dict[str, Any]) -> None:
        self.counter += 1
        losses: list[Any] = []
        for replica in self.replicas:
            losses.append(self.call(replica, replica.model.get_submodule(op["path"]))[1])
            self.note(replica, "loss", full(losses[-1]))
        if op["backward"] and losses[0].requires_grad:
            self.backward(losses)

    # ------------------------------------------------------------------ gradients

    def do_switch(self, op: dict[str, Any]) -> None:
        self.whole = op["on"]
        if op["name"] == "set_requires_gradient_sync":
            self.sync = op["on"]
        for unit in self.units(self.replicas[0]) if self.sharded else ():
            getattr(unit, op["name"])(op["on"])

    def do_scale(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            for p in replica.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def do_clip(self, op: dict[str, Any]) -> None:
        """Not where ranks have gradients of their own: each would have another norm."""
        for replica in self.replicas if self.all_reduced else ():
            clip = getattr(replica.optimizer, "clip_grad_norm", None)
            if clip is not None:
                norm = clip(0.1)
            else:
                norm = nn.utils.clip_grad_norm_(replica.model.parameters(), 0.1)
            self.note(replica, "norm", full(norm))

    def do_step(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.optimizer.step()
            replica.context.step += 1

    def do_zero_grad(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.waiting = {}
            replica.model.zero_grad(set_to_none=op["none"])

    # ------------------------------------------------------------------ weights

    def do_freeze(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.model.get_submodule(op["path"]).requires_grad_(op["on"])

    def do_edit(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            found = list(replica.model.parameters())
            p = found[op["number"] % len(found)] if found else torch.ones(1)
            p = {"mul": lambda p: p, "data": lambda p: p.data, "local": local}[op["how"]](p)
            with torch.no_grad():
                p.mul_(1.5)

    def do_unit(self, op: dict[str, Any]) -> None:
        """A method of a wrapped module, which changes no values."""
        module = self.replicas[0].model.get_submodule(op["path"])
        if self.sharded and isinstance(module, sw.ShardedModule):
            self.gathered |= op["name"] == "unshard"
            handle = getattr(module, op["name"])(*op["values"])
            if handle is not None:
                handle.wait()

    def do_roundtrip(self, op: dict[str, Any]) -> None:
        """Values go out and come back: the reference does nothing. A checkpoint has one value of
        a parameter that no rank reduces (a warning says so)."""
        if op["how"] == "checkpoint" and not self.all_reduced:
            return
        for replica in self.replicas:
            if op["how"] == "checkpoint":
                replica.slots.clear()
                replica.model.zero_grad()
        if not self.sharded:
            return
        replica = self.replicas[0]
        if op["how"] == "state_dict":
            replica.model.load_state_dict(replica.model.state_dict())
        elif op["how"] == "full":
            sw.load_full_state_dict(replica.model, sw.full_state_dict(replica.model))
        elif op["how"] == "optimizer":
            replica.optimizer.load_state_dict(replica.optimizer.state_dict())
        else:
            path = Path(self.scratch) / self.place.replace(" ", "-")
            sw.save(path, replica.model, replica.optimizer)
            fresh = build(self.program, replica.context)
            for ours, theirs in zip(fresh.parameters(), replica.model.parameters(), strict=True):
                ours.requires_grad_(theirs.requires_grad)
                with torch.no_grad():
                    ours.zero_()
            strategy = op["strategy"]
            if self.program["wrap"]["how"] == "data_parallel" and strategy == "zero3":
                strategy = "zero1"
            wrap(fresh, self.program, self.program["ranks"], strategy)
            replica.model = fresh
            replica.optimizer = optimizer_of(self.program["optimizer"], fresh)
            sw.load(path, fresh, replica.optimizer)

    def do_look(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            for unit in self.units(replica) if self.gathered else ():
                unit.reshard()
            for name, p in replica.model.named_parameters():
                self.note(replica, name, full(p))
                if self.whole:
                    self.note(
                        replica, f"gradient of {name}", None if p.grad is None else full(p.grad)
                    )
