# SPDX-License-Identifier: Apache-2.0
"""``Run`` interprets the ops over replicas of the model. On a rank there is one, wrapped; in the
reference one for each rank, in this process, whose gradients are averaged after every backward.
Both log the same things in the same order: losses, norms, gradients, parameters.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.fuzz.program import ROWS, WORDS, FuzzError, Program, build, first
from tests.fuzz.replica import Replica, full, local, sharded_optimizer, wrap

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}  # else gradients are dropped


class Run:
    """The ops of a program over replicas. The reference's methods average what ranks reduce."""

    def __init__(self, program: Program, replicas: list[Replica], scratch: str) -> None:
        self.program, self.replicas, self.scratch = program, replicas, scratch
        self.sharded = replicas[0].wrapped
        self.counter = 0
        self.number = 0  # of the op that runs
        self.sync = True  # whether a backward shows its gradients where the user looks for them
        self.waits = False  # whether gradients wait for a later backward
        self.gathered = False  # by hand
        self.strategy = program["wrap"]["strategy"]
        paths = [path for unit in program["wrap"]["units"] for path in unit]
        names = list(replicas[0].named())
        self.reduced = {n for n in names if any(not p or n.startswith(p + ".") for p in paths)}
        self.all_reduced = len(self.reduced) == len(names)
        # sw.optimizer leaves alone, with a warning, what is frozen when it is built.
        trained = {name for name, p in replicas[0].named().items() if p.requires_grad}
        self.thaws = trained if program["optimizer"] in ("muon", "sw_adamw") else set(names)
        precision = program["wrap"]["precision"] or {}
        self.wire = torch.bfloat16 if precision.get("reduce", "fp32") == "bf16" else None

    def run(self) -> None:
        ops = self.program["ops"]
        for self.number, op in enumerate(ops):
            self.place = f"op {self.number} {op['op']}"
            getattr(self, "do_" + op["op"])(op)
        self.number, self.place = len(ops), "the end"
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
        given = x
        if replica.narrow is not None:
            replica.narrow.refresh()
            given = x.bfloat16()
        out = first(module(given, tokens))
        return x, out.to(x.dtype).square().mean()

    def do_forward(self, op: dict[str, Any]) -> None:
        self.counter += 1
        for replica in self.replicas:
            penalty = self.penalty(replica) if op.get("penalty") else 0.0
            x, loss = self.call(replica, replica.model)
            replica.slots[op["slot"]] = x, loss + penalty
            self.note(replica, "loss", full(loss))

    def penalty(self, replica: Replica) -> Tensor:
        """On weights at rest."""
        terms = [0.1 * p.square().sum() for p in replica.named().values() if p.requires_grad]
        return sum(terms, torch.zeros(()))

    def do_backward(self, op: dict[str, Any]) -> None:
        losses = []
        for replica in self.replicas:
            x, loss = replica.slots.get(op["slot"], (None, None))
            if not op["keep"]:
                replica.slots.pop(op["slot"], None)
            usable = loss is not None and loss.requires_grad
            if usable and op.get("double") and x.requires_grad:
                (grad,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + grad.square().sum()
            losses.append(loss if usable else None)
        if any(loss is not None for loss in losses):
            self.backward(losses, op["keep"])

    def backward(self, losses: list[Any], keep: bool = False) -> None:
        self.waits = not self.sync
        if self.sharded:
            losses[0].backward(retain_graph=keep)
            return
        before, came = [], []
        for replica, loss in zip(self.replicas, losses, strict=True):
            before.append(self.taken(replica.named()))
            if replica.narrow is not None:
                replica.narrow.freeze()
            if loss is not None:
                loss.backward(retain_graph=keep)
            brought = self.taken(replica.named())
            if replica.narrow is not None:
                narrow = self.taken(replica.narrow.copies)
                for name, grad in narrow.items():
                    mine = brought.get(name)
                    wide = grad.to(replica.named()[name].dtype)
                    brought[name] = wide if mine is None else wide + mine
            for name, grad in brought.items():
                old = replica.waiting.get(name)
                replica.waiting[name] = local(grad) if old is None else old + local(grad)
            came.append(replica.waiting)
        names = dict.fromkeys(name for waiting in came for name in waiting)
        for replica, old in zip(self.replicas, before, strict=True):
            for name, p in replica.named().items():
                p.grad = old.get(name)
                if not self.sync or name not in names:
                    continue
                if name in self.reduced:
                    parts = [w[name].to(self.wire) for w in came if name in w]
                    new = torch.stack(parts).sum(0) / len(self.replicas)
                elif name in replica.waiting:
                    new = replica.waiting[name]
                else:
                    continue
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                with torch.no_grad():
                    local(p.grad).add_(new)
                if name in replica.hooked:
                    halve(p)
        if self.sync:
            for replica in self.replicas:
                replica.waiting = {}

    @staticmethod
    def taken(named: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that are here, which are here no more."""
        found = {name: p.grad for name, p in named.items() if p.grad is not None}
        for p in named.values():
            p.grad = None
        return found

    def do_grad(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            x, loss = replica.slots.get(op["slot"], (None, None))
            if loss is None or not loss.requires_grad or not x.requires_grad:
                continue
            (found,) = torch.autograd.grad(loss, [x], retain_graph=True, allow_unused=True)
            self.note(replica, "gradient of x", found)

    def do_raise(self, op: dict[str, Any]) -> None:
        self.counter += 1
        raised, losses = False, []
        for replica in self.replicas:
            replica.context.bombs = {op["where"]}
            kept = {} if self.sharded else self.taken(replica.named())
            try:
                losses.append(self.call(replica, replica.model)[1])
                if op["where"] == "backward" and losses[-1].requires_grad:
                    losses[-1].backward(retain_graph=not self.sharded)
            except FuzzError:
                raised = True
            replica.context.bombs = set()
            if not self.sharded:  # plain torch has added some of them
                if replica.narrow is not None:
                    self.taken(replica.narrow.copies)
                for name, p in replica.named().items():
                    p.grad = kept.get(name)
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
                    self.drop_gradients(replica)

    def do_eval(self, op: dict[str, Any]) -> None:
        self.counter += 1
        for replica in self.replicas:
            replica.model.train(op["mode"] == "dropped")
            with MODES.get(op["mode"], nullcontext)():
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
        """One switch alone lets gradients wait under strategies that reduce in every backward."""
        waits = op["name"] == "set_requires_gradient_sync"
        waits |= self.strategy not in ("zero2", "zero3")
        self.sync = op["on"] or not waits
        for unit in self.units(self.replicas[0]) if self.sharded else ():
            getattr(unit, op["name"])(op["on"])

    def do_scale(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            for p in replica.named().values():
                if p.grad is not None:
                    p.grad.mul_(0.5)

    def do_clip(self, op: dict[str, Any]) -> None:
        """Not where ranks have gradients of their own: each would have another norm."""
        for replica in self.replicas if self.all_reduced else ():
            clip = getattr(replica.optimizer, "clip_grad_norm", None)
            if clip is not None:
                norm = clip(0.1)
            else:
                norm = nn.utils.clip_grad_norm_(replica.named().values(), 0.1)
            self.note(replica, "norm", full(norm))

    def do_hook(self, op: dict[str, Any]) -> None:
        """A hook on a parameter: called once in a backward, with the reduced gradient."""
        for replica in self.replicas:
            found = [name for name, p in replica.named().items() if p.requires_grad]
            name = found[op["number"] % len(found)] if found else None
            if name is None or name in replica.hooked or name not in self.reduced:
                continue
            replica.hooked.add(name)
            if self.sharded:
                replica.named()[name].register_post_accumulate_grad_hook(halve)

    def do_step(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.optimizer.step()
            replica.context.step += 1

    def drop_gradients(self, replica: Replica, none: bool = True) -> None:
        owner = replica.model if replica.narrow is None else replica.optimizer
        owner.zero_grad(set_to_none=none)

    def do_zero_grad(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            replica.waiting = {}
            self.drop_gradients(replica, op["none"])

    def do_keep(self, op: dict[str, Any]) -> None:
        """Gradients, or values of a state dict, that somebody keeps while training goes on."""
        for replica in self.replicas:
            named = replica.named()
            if op["what"] == "gradients" and self.sync:
                found = {n: p.grad for n, p in named.items() if p.grad is not None}
            else:
                found = {name: p.detach() for name, p in named.items()}
            replica.kept = {f"{op['what']} {name}": value for name, value in found.items()}

    # ------------------------------------------------------------------ weights

    def at_rest(self, replica: Replica) -> dict[str, Tensor]:
        """The parameters at rest: after a forward that no backward followed, or ``unshard()``,
        modules hold whole ones."""
        for unit in self.units(replica) if not replica.slots else ():
            unit.reshard()
        return replica.named()

    def do_freeze(self, op: dict[str, Any]) -> None:
        """Not while gradients wait: a backward that reaches no unit reduces nothing."""
        for replica in self.replicas if not self.waits else ():
            inside = op["path"] + "." if op["path"] else ""
            for name, p in replica.named().items():
                if name.startswith(inside) and (not op.get("half") or p.dim() > 1):
                    p.requires_grad_(op["on"] and name in self.thaws)

    def do_edit(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            found = list(self.at_rest(replica).values())
            p = found[op["number"] % len(found)] if found else torch.ones(1)
            p = {"mul": lambda p: p, "data": lambda p: p.data, "local": local}[op["how"]](p)
            with torch.no_grad():
                p.mul_(1.5)
            if self.sharded and op["how"] == "local":
                sw.mark_written(replica.model)
            if replica.narrow is not None:
                replica.narrow.written = dict.fromkeys(replica.narrow.written, -1)

    def do_unit(self, op: dict[str, Any]) -> None:
        """A method of a wrapped module, which changes no values."""
        module = self.replicas[0].model.get_submodule(op["path"])
        if self.sharded and isinstance(module, sw.ShardedModule):
            self.gathered |= op["name"] == "unshard"
            handle = getattr(module, op["name"])(*op["values"])
            if handle is not None:
                handle.wait()

    def do_average(self, op: dict[str, Any]) -> None:
        """A moving average of the weights, or that average put in their place."""
        for replica in self.replicas:
            named = self.at_rest(replica)
            with torch.no_grad():
                if not replica.average:
                    replica.average = {n: copy.deepcopy(p).detach() for n, p in named.items()}
                for name, mean in replica.average.items():
                    if op["back"]:
                        named[name].copy_(mean)
                    else:
                        mean.lerp_(named[name], 0.5)

    def do_snapshot(self, op: dict[str, Any]) -> None:
        for replica in self.replicas:
            self.at_rest(replica)
            if op["load"] and replica.snapshot is not None:
                replica.load(replica.snapshot)
            elif not op["load"]:
                replica.snapshot = replica.state()

    def do_roundtrip(self, op: dict[str, Any]) -> None:
        """Values go out and come back: the reference does nothing. A checkpoint has one value of
        a parameter that no rank reduces (a warning says so)."""
        if op["how"] == "checkpoint" and not self.all_reduced:
            return
        if op["how"] == "checkpoint":
            self.strategy = op["strategy"]
            if self.program["wrap"]["how"] == "data_parallel" and self.strategy == "zero3":
                self.strategy = "zero1"
        for replica in self.replicas:
            if op["how"] == "checkpoint":
                replica.slots.clear()
                replica.kept.clear()
                replica.hooked.clear()
                self.drop_gradients(replica)
                for name, p in replica.named().items():  # before an optimizer is built
                    if self.program["optimizer"] in ("muon", "sw_adamw"):
                        p.requires_grad_(name in self.thaws)
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
            trained = {n: p.requires_grad for n, p in replica.model.named_parameters()}
            for name, p in fresh.named_parameters():
                p.requires_grad_(trained[name])
                with torch.no_grad():
                    p.zero_()
            wrap(fresh, self.program, self.program["ranks"], self.strategy)
            replica.model = fresh
            replica.optimizer = sharded_optimizer(self.program["optimizer"], fresh)
            sw.load(path, fresh, replica.optimizer)

    def do_look(self, op: dict[str, Any]) -> None:
        whole = self.place == "the end"
        for replica in self.replicas:
            for unit in self.units(replica) if self.gathered else ():
                unit.reshard()
            for name, p in replica.at_rest().items():
                self.note(replica, name, replica.shown(name, p, whole))
                if self.sync:
                    grad = None if p.grad is None else replica.shown(name, p.grad, whole)
                    self.note(replica, f"gradient of {name}", grad)
            for kind, found in (("kept", replica.kept), ("average", replica.average)):
                for name, value in found.items():
                    self.note(replica, f"{kind} {name}", replica.shown(name, value, whole))


@torch.no_grad()
def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]
