# SPDX-License-Identifier: Apache-2.0
"""The library itself as one rank of a pretended mesh, which runs one step.

    axes without a process group    collectives are counted and not sent
    memory on the meta device       the ledger counts the bytes that buffers would take
    groups, units, model,           the same objects as in a run
    optimizer

The bytes that a step holds and sends are read from the ledger and from ``comm.record()``, as in a
run. Forward is the model's own (a dry run), or a sketch that computes nothing (a plan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.compat import run_backward
from shardwise.core.memory import Ledger
from shardwise.core.placements import SHARD
from shardwise.core.streams import Lanes
from shardwise.optim.functions import ANY
from shardwise.optim.matrix_group import MatrixGroup
from shardwise.optim.muon import MuonSettings
from shardwise.optim.optimizers import ShardedOptimizer
from shardwise.optim.routing import Routed, routes_of
from shardwise.optim.rules import group_of
from shardwise.optim.storage import local_of
from shardwise.planning.activations import Follower, following
from shardwise.planning.planned import Measured, Options
from shardwise.planning.units import META, ranks_at
from shardwise.shard.group import Group
from shardwise.shard.model import Model
from shardwise.shard.module import units_of
from shardwise.shard.unit import Unit

_NOT_COUNTED = ("step", "steps")  # numbers in an optimizer's state


@dataclass(eq=False)
class Engine:
    """All units of one rank. ``ledger`` is a separate ledger, open while the engine is used."""

    options: Options
    ledger: Ledger
    model: nn.Module  # wrapped
    optimizer: ShardedOptimizer | None = None
    follower: Follower | None = None

    def __post_init__(self) -> None:
        root = self.units[0]
        lanes = root._comm_ctx.lanes = Lanes(META)
        lanes.asynchronous = self.options.device != "cpu"
        Model.start(root, self.model)
        self._add_optimizer()

    def pose_as(self, rank: int) -> None:
        """Become another rank than rank 0: the same units, with the pieces of that rank."""
        if rank == 0:
            return
        ranks = {ep: ranks_at(self.options, rank, ep) for ep in (1, self.options.ep)}
        for unit in self.units:
            for group in unit.groups:
                place = ranks[1 if group.ranks.others is None else self.options.ep]
                group.ranks = group.gradients.ranks = place
                group.adopt()
            unit.connect()
        self._add_optimizer()

    @cached_property
    def units(self) -> list[Unit]:
        """Outer before inner."""
        return list(units_of(self.model))

    @cached_property
    def groups(self) -> list[Group]:
        return [group for unit in self.units for group in unit.groups]

    @cached_property
    def routes(self) -> list[Routed]:
        """The routes of the wrapped parameters."""
        sharded = {id(parameter) for group in self.groups for parameter in group.sharded}
        return [route for route in routes_of(self.model) if id(route.parameter) in sharded]

    @property
    def matrix_groups(self) -> list[MatrixGroup]:
        return [] if self.optimizer is None else list(self.optimizer._matrix_groups or ())

    def _add_optimizer(self) -> None:
        """Create the optimizer of the matrices, whose step sends them."""
        chosen = self.options.optimizer
        trained = [route for route in self.routes if route.parameter.requires_grad]
        matrices = [r.parameter for r in trained if r.route.kind == "matrix"]
        if chosen in ("adamw", "none") or not matrices:
            return
        settings = MuonSettings() if chosen == "muon" else ANY[chosen](lr=0.0)
        names = {id(routed.parameter): routed.name for routed in trained}
        self.optimizer = ShardedOptimizer([group_of(settings, matrices)], names)

    def elements(self) -> dict[str, int]:
        """The elements of this rank's model by optimizer, and by format of compute weights."""
        matrices = {id(p) for g in getattr(self.optimizer, "param_groups", ()) for p in g["params"]}
        trained = [r.parameter for r in self.routes if r.parameter.requires_grad]
        own = [p.numel() for p in trained if id(p) in matrices]
        rest = sum(p.numel() for p in trained) - sum(own)
        return elements_of(self.model, {"matrix": sum(own), "elementwise": rest})

    def _state_bytes(self) -> int:
        """The bytes of optimizer state: those that the optimizer of the matrices has made, and two
        tensors for all that AdamW updates."""
        made = {} if self.optimizer is None else self.optimizer.state
        held = [v for state in made.values() for k, v in state.items() if k not in _NOT_COUNTED]
        if self.options.optimizer != "none":
            rest = (r.parameter for r in self.routes if r.parameter.requires_grad)
            held += [local_of(p) for p in rest if p not in made for _ in range(2)]
        return sum(local_of(tensor).nbytes for tensor in held)

    # ------------------------------------------------------------------ a step

    def measure(self, forward: Callable[[], Tensor]) -> Measured:
        """Run one step from rest. ``forward`` returns the tensor from which backward starts."""
        rest = self.ledger.snapshot()
        count = min(self.options.microbatches, 3)
        if any(not group.trainable for group in self.groups):
            self._step(forward, count)  # its forward gathers frozen weights that stay
        self.ledger.reset_peak()
        if self.follower is not None:
            self.follower.peak = self.follower.at_peak = 0
        calls, loaded, exchanged = self._step(forward, count)
        return Measured(
            rest=rest,
            loaded=loaded,
            peak={kind: nbytes for kind, nbytes in sorted(self.ledger.peak.items()) if nbytes},
            peak_total=self.ledger.peak_total,
            calls=calls,
            exchanged=exchanged,
            optimizer_bytes=self._state_bytes(),
            followed=None if self.follower is None else self.follower.peak,
            activations=0 if self.follower is None else self.follower.at_peak,
        )

    def _step(
        self, forward: Callable[[], Tensor], count: int
    ) -> tuple[Counter[comm.Call], dict[str, int], Counter[comm.Call]]:
        """All microbatches between the first and the last are equal: one of them runs, and counts
        as many times."""
        total: Counter[comm.Call] = Counter()
        for number in range(count):
            for unit in self.units:
                unit.last = number == count - 1
            with comm.record() as calls, self._followed():
                loss = forward()
                if loss.requires_grad:
                    run_backward(loss)  # a recomputation uses the stand-ins of forward
                del loss
            times = self.options.microbatches - 2 if 0 < number < count - 1 else 1
            for call, issued in Counter(calls).items():
                total[call] += times * issued
        loaded = self.ledger.snapshot()
        with comm.record() as calls, self._followed():
            self._update()
        return total, loaded, Counter(call for call in calls if self._exchanges(call))

    def _exchanges(self, call: comm.Call) -> bool:
        """Whether the matrix optimizer issued the call: units use only the axes that shard main."""
        pairs = zip(self.options.mesh.names, self.options.placements.main, strict=True)
        replicated = {name for name, placement in pairs if placement != SHARD}
        return call.operation == "all_to_all" or not replicated.isdisjoint(call.axis.split("+"))

    def _followed(self) -> AbstractContextManager[None]:
        if self.follower is None:
            return nullcontext()
        return following(self.model, self.follower, self.ledger)

    def _update(self) -> None:
        """Do the parts of an optimizer's step that buffers and ranks notice: write the trained
        weights and drop their gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
        for group in self.groups:
            if group.trainable:
                group.main.wrote()
            for parameter in group.sharded:
                parameter.grad = None


def elements_of(model: nn.Module, optimized: Mapping[str, int]) -> dict[str, int]:
    """Elements by kind of optimizer, as given, and by format of the compute weights of a model."""
    found = Counter({f"elements of the {kind} optimizer": n for kind, n in optimized.items() if n})
    for unit in units_of(model):
        for group in unit.groups:
            found[f"elements in {group.format or group.codec.dtype}"] += group.layout.payload
    return dict(found)
