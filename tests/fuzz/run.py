# SPDX-License-Identifier: Apache-2.0
"""``Run`` interprets the ops over replicas of the model. On a rank there is one, wrapped; in the
reference one for each rank, in this process, whose gradients are averaged after every backward.
Both log the same things in the same order: losses, norms, gradients, parameters.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from shardwise.core.placements import STRATEGIES
from tests.fuzz.plain import Narrow, optimizer_of, plain_optimizer
from tests.fuzz.program import ROWS, WORDS, Clock, Program, build, first

Log = list[tuple[str, Any]]
NOTHING = torch.zeros(()), torch.zeros(())  # (input, loss) of a backward without a forward
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}  # else gradients are dropped


class Piece(tuple[int, int, Tensor]):
    """(low, high, values): the elements [low, high) of a tensor, which this rank holds."""


def held(value: Any, whole: bool) -> Any:
    """The values that this rank holds, without asking the others, or all of them."""
    if isinstance(value, sw.ShardedTensor):
        if not whole and value.cut.tile is None:
            return Piece((*value.cut.piece, value.to_local().detach().reshape(-1).clone()))
        value = value.full_tensor()
    return value.detach().clone()


# ------------------------------------------------------------------------------ one model


class Replica:
    """One model and its optimizer: wrapped on a rank, plain in the reference."""

    def __init__(self, program: Program, rank: int, wrapped: bool) -> None:
        self.program, self.rank, self.wrapped, self.clock = program, rank, wrapped, Clock()
        self.slots: dict[int, tuple[Tensor, Tensor]] = {}  # (input, loss) of what has no backward
        self.waiting: dict[str, Tensor] = {}  # the reference: gradients that were not averaged yet
        self.log: Log = []
        self.narrow: Narrow | None = None
        self.model: nn.Module = build(program, self.clock)
        if wrapped:
            wrap(self.model, program, program["wrap"]["strategy"])
            self.optimizer = optimizer_of(program["optimizer"], self.model)
        else:
            self.optimizer = plain_optimizer(program["optimizer"], self.model)
        # At rest: between a forward and its backward modules may hold gathered weights instead.
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self.trained = {name for name, p in self.parameters.items() if p.requires_grad}
        if not wrapped and program["wrap"]["precision"]:
            self.narrow = Narrow(self.model, sw.Precision(**program["wrap"]["precision"]))

    def moved_through_a_file(self, path: Path, strategy: str) -> None:
        """Go on as another model, wrapped in another way, that was loaded from a checkpoint."""
        sw.save(path, self.model, self.optimizer)
        self.model = build(self.program, self.clock)
        with torch.no_grad():
            for p in self.model.parameters():
                p.zero_()
        wrap(self.model, self.program, strategy)
        self.optimizer = optimizer_of(self.program["optimizer"], self.model)
        self.parameters = dict(self.model.named_parameters())
        sw.load(path, self.model, self.optimizer)

    def drop_gradients(self, none: bool = True) -> None:
        self.waiting = {}
        if self.wrapped:
            self.model.zero_grad(set_to_none=none)
        for p in () if self.wrapped else self.parameters.values():
            p.grad = None if none or p.grad is None else torch.zeros_like(p)


@cache
def mesh_of(axes: int, ranks: int) -> DeviceMesh:
    outer = 2 if ranks % 2 == 0 else 1
    shape = (ranks,) if axes == 1 else (outer, ranks // outer)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp")[-axes:])


def wrap(model: nn.Module, program: Program, strategy: str) -> None:
    """Wrap the units of a program, in its order."""
    how, placements = program["wrap"], STRATEGIES[strategy]
    options: dict[str, Any] = {
        "mesh": mesh_of(placements.num_axes, program["ranks"]),
        "placements": placements,
        "memory": how["memory"],
    }
    if how["precision"]:
        options["precision"] = sw.Precision(**how["precision"])
    if how["data_parallel"]:
        sw.data_parallel(model, bucket_mb=0.0005, overlap_gather=how["overlap"], **options)
        return
    if how["offload"]:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for number, paths in enumerate([*how["units"], [""]]):  # the root last
        modules = [model.get_submodule(path) for path in paths]
        reshard = how["reshard"][number % len(how["reshard"])] if how["reshard"] else None
        if type(reshard) is int and strategy != "zero3":
            reshard = None
        if how["precision"]:
            options["precision"] = precision_of(modules, how["precision"])
        sw.fully_shard(
            modules if len(modules) > 1 else modules[0], reshard_after_forward=reshard, **options
        )


def precision_of(modules: list[Any], wanted: dict[str, Any]) -> sw.Precision:
    """Weights in bf16 where a unit has no linear of its own that fp8 could be for."""
    linears = [m for module in modules for m in module.modules() if isinstance(m, nn.Linear)]
    if all(isinstance(linear.weight, sw.ShardedTensor) for linear in linears):
        wanted = wanted | {"weights": "bf16"}
    return sw.Precision(**wanted)


# ------------------------------------------------------------------------------ the ops


class Run:
    """The ops of a program over replicas. The reference's methods average what ranks reduce."""

    def __init__(self, program: Program, replicas: list[Replica], scratch: str) -> None:
        self.program, self.replicas, self.scratch = program, replicas, scratch
        self.sharded = replicas[0].wrapped
        self.counter = 0  # of batches
        self.sync = True  # whether a backward shows its gradients where the user looks for them
        self.strategy = program["wrap"]["strategy"]
        precision = program["wrap"]["precision"] or {}
        self.wire = torch.bfloat16 if precision.get("reduce") == "bf16" else None

    def run(self) -> None:
        for number, op in enumerate(self.program["ops"]):
            self.place = f"op {number} {op['op']}"
            getattr(self, "do_" + op["op"])(op)
        self.place = "the end"
        self.do_look({})

    def note(self, replica: Replica, what: str, value: Any) -> None:
        replica.log.append((f"{self.place}: {what}", value))

    # ------------------------------------------------------------------ forward and backward

    def call(self, replica: Replica) -> tuple[Tensor, Tensor]:
        """(input, loss) of the model on this replica's batch."""
        seed = 1000 * self.program["seed"] + 10 * self.counter + replica.rank
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.program["dtype"])
        x = torch.randn(ROWS, self.program["width"], generator=generator, dtype=dtype)
        x.requires_grad_(self.program["input_grad"])
        tokens = torch.randint(0, WORDS, (ROWS,), generator=generator)
        given = x
        if replica.narrow is not None:
            replica.narrow.refresh()
            given = x.bfloat16()
        out = first(replica.model(given, tokens))
        return x, out.to(dtype).square().mean()

    def do_forward(self, op: dict[str, Any]) -> None:
        self.counter += 1
        for replica in self.replicas:
            replica.slots[op["slot"]] = self.call(replica)
            self.note(replica, "loss", replica.slots[op["slot"]][1].detach().clone())

    def do_eval(self, op: dict[str, Any]) -> None:
        self.counter += 1
        for replica in self.replicas:
            replica.model.train(op["mode"] == "dropped")
            with MODES.get(op["mode"], nullcontext)():
                loss = self.call(replica)[1].detach().clone()
            self.note(replica, "loss", loss)
            replica.model.train()

    def do_grad(self, op: dict[str, Any]) -> None:
        """The gradient of the input alone."""
        for replica in self.replicas:
            x, loss = replica.slots.get(op["slot"], NOTHING)
            if loss.requires_grad and x.requires_grad:
                (found,) = torch.autograd.grad(loss, [x], retain_graph=True, allow_unused=True)
                self.note(replica, "gradient of x", found)

    def do_backward(self, op: dict[str, Any]) -> None:
        losses = []
        for replica in self.replicas:
            _, loss = replica.slots.get(op["slot"], NOTHING)
            if not op["keep"]:
                replica.slots.pop(op["slot"], None)
            losses += [loss] if loss.requires_grad else []
        if losses and self.sharded:
            losses[0].backward(retain_graph=op["keep"])
        elif losses:
            self.averaged(losses, op["keep"])

    def averaged(self, losses: list[Tensor], keep: bool) -> None:
        """The reference: a backward of each replica, and the mean of what all have brought."""
        before = []
        for replica, loss in zip(self.replicas, losses, strict=True):
            named, narrow = replica.parameters, replica.narrow
            before.append(taken(named))
            loss.backward(retain_graph=keep)
            for name, grad in taken(narrow.copies if narrow else named).items():
                grad = grad.to(named[name].dtype)
                replica.waiting[name] = replica.waiting.get(name, 0.0) + grad
        came = [replica.waiting for replica in self.replicas]
        for replica, old in zip(self.replicas, before, strict=True):
            for name, p in replica.parameters.items():
                p.grad = old.get(name)
                parts = [w[name].to(self.wire) for w in came if name in w]
                if not self.sync or not parts:
                    continue
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad.add_(torch.stack(parts).sum(0) / len(self.replicas))
            if self.sync:
                replica.waiting = {}

    # ------------------------------------------------------------------ gradients

    def do_switch(self, op: dict[str, Any]) -> None:
        """One switch alone lets gradients wait under strategies that reduce in every backward."""
        waits = op["name"] == "set_requires_gradient_sync"
        waits |= self.strategy not in ("zero2", "zero3")
        self.sync = op["on"] or not waits
        if self.sharded:
            getattr(self.replicas[0].model, op["name"])(op["on"])

    def do_scale(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            for p in replica.parameters.values():
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def do_clip(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            clip = getattr(replica.optimizer, "clip_grad_norm", None)
            own = replica.parameters.values()
            norm = nn.utils.clip_grad_norm_(own, 0.1) if clip is None else clip(0.1)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.note(replica, "norm", norm.clone())

    def do_step(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.optimizer.step()
            replica.clock.step += 1

    def do_zero_grad(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.drop_gradients(op["none"])

    # ------------------------------------------------------------------ weights

    def do_freeze(self, op: dict[str, Any]) -> None:
        """What was trained at the beginning is trained no more, or again."""
        inside = op["path"] + "." if op["path"] else ""
        for replica in self.replicas:
            for name, p in replica.parameters.items():
                if name.startswith(inside) and (not op["half"] or p.dim() > 1):
                    p.requires_grad_(op["on"] and name in replica.trained)

    def do_edit(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            found = list(replica.parameters.values())
            p = found[op["number"] % len(found)]
            with torch.no_grad():
                if op["how"] == "local" and isinstance(p, sw.ShardedTensor):
                    p.to_local().mul_(1.5)
                    sw.mark_written(replica.model)
                else:
                    (p.data if op["how"] == "data" else p).mul_(1.5)

    def do_unit(self, op: dict[str, Any]) -> None:
        """A method of a wrapped module, which changes no values."""
        module = self.replicas[0].model.get_submodule(op["path"])
        if isinstance(module, sw.ShardedModule):
            name, *values = op["call"]
            getattr(module, name)(*values)

    def do_roundtrip(self, op: dict[str, Any]) -> None:
        """Values go out and come back: the reference does nothing."""
        for replica in self.replicas if op["how"] == "checkpoint" else ():
            self.strategy = op["strategy"]
            replica.slots.clear()
            replica.drop_gradients()
            for name, p in replica.parameters.items():  # as they are built
                p.requires_grad_(name in replica.trained)
        for replica in self.replicas if self.sharded else ():
            model, optimizer = replica.model, replica.optimizer
            match op["how"]:
                case "state_dict":
                    model.load_state_dict(model.state_dict())
                case "full":
                    sw.load_full_state_dict(model, sw.full_state_dict(model))
                case "optimizer":
                    optimizer.load_state_dict(optimizer.state_dict())
                case "checkpoint":
                    path = Path(self.scratch) / self.place.replace(" ", "-")
                    replica.moved_through_a_file(path, op["strategy"])

    def do_look(self, op: dict[str, Any]) -> None:
        whole = self.place == "the end"
        for replica in self.replicas:
            for name, p in replica.parameters.items():
                self.note(replica, name, held(p, whole))
                if self.sync:
                    grad = None if p.grad is None else held(p.grad, whole)
                    self.note(replica, f"gradient of {name}", grad)


def taken(named: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients that are here, which are here no more."""
    found = {name: p.grad for name, p in named.items() if p.grad is not None}
    for p in named.values():
        p.grad = None
    return found
