# SPDX-License-Identifier: Apache-2.0
"""The library itself as one rank of a mesh that is only pretended, to be walked through a step.

    axes without a process group    collectives are counted, and go nowhere
    memory on the meta device       the ledger counts what buffers would take
    groups, units, runtime,         those that a real run has
    optimizer

What a step then holds and sends is read from the ledger and from ``comm.record()``, as in a run.
Forward is the model's own (a dry run), or a sketch of it that computes nothing (a plan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.memory import Ledger
from shardwise.mesh import PretendedMesh, Ranks
from shardwise.optim.adamw import AdamWSettings
from shardwise.optim.functions import ANY
from shardwise.optim.matrix_group import MatrixGroup
from shardwise.optim.muon import MuonSettings
from shardwise.optim.routing import Routed
from shardwise.optim.sharded import ShardedOptimizer, group_of
from shardwise.placements import SHARD
from shardwise.report.activations import Follower, following
from shardwise.report.planned import Measured, Moment, Options
from shardwise.report.units import Owner
from shardwise.shard.building import PlannedBuffer, build_unit
from shardwise.shard.data_parallel import BucketedUnit
from shardwise.shard.fully_shard import after_forward
from shardwise.shard.group import Group
from shardwise.shard.runtime import Runtime
from shardwise.shard.unit import Unit
from shardwise.shard.whole_parameter import carry_attributes
from shardwise.shard.wrapping import Found
from shardwise.streams import Lanes

META = torch.device("meta")


@dataclass(eq=False)
class BuiltUnit:
    """A unit, and the (group, index) of every parameter that its owner found."""

    owner: Owner
    unit: Unit
    where: dict[int, tuple[int, int]]

    def leaf(self, position: int) -> Any:
        """The parameter as forward sees it."""
        number, index = self.where[position]
        return self.unit.groups[number].unsharded[index]


@dataclass(eq=False)
class Engine:
    """All units of one rank. Made and run while ``ledger``, one of its own, is open."""

    options: Options
    ledger: Ledger
    units: list[BuiltUnit]
    sharded: dict[int, nn.Parameter]  # by id of the model's parameter: the one at rest
    walked: bool = False  # whether a step has been
    optimizer: ShardedOptimizer | None = None
    follower: Follower | None = None

    @property
    def root(self) -> BuiltUnit:
        return self.units[0]

    @cached_property
    def groups(self) -> list[Group]:
        return [group for built in self.units for group in built.unit.groups]

    @property
    def matrix_groups(self) -> list[MatrixGroup]:
        return [] if self.optimizer is None else list(self.optimizer._matrix_groups or ())

    def add_optimizer(self, routes: Sequence[Routed]) -> None:
        """The optimizer, as far as it sends anything or is waited for."""
        options, sharded = self.options, self.sharded
        trained = [r for r in routes if r.parameter.requires_grad and id(r.parameter) in sharded]
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}  # by whether it is a matrix
        for one in trained:
            matrix = options.optimizer not in ("adamw", "none") and one.route.kind == "matrix"
            kinds[matrix].append(sharded[id(one.parameter)])
        muon = options.optimizer in ("muon", "adamw", "none")
        settings = MuonSettings() if muon else ANY[options.optimizer](lr=0.0)
        groups = [group_of(settings, kinds[True])] if kinds[True] else []
        if options.gather_in_step and kinds[False]:
            groups.append(group_of(AdamWSettings(), kinds[False]))
        if groups:
            names = {id(sharded[id(one.parameter)]): one.name for one in trained}
            self.optimizer = ShardedOptimizer(groups, names, measured=options.measured)

    # ------------------------------------------------------------------ a step

    def measure(self, forward: Callable[[], Tensor]) -> Measured:
        """One step from rest; ``forward`` returns what backward starts from."""
        rest = self.ledger.snapshot()
        count = min(self.options.microbatches, 3)
        if self._settles and not self.walked:
            self._step(forward, count)
        self.ledger.reset_peak()
        if self.follower is not None:
            self.follower.peak = self.follower.at_peak = 0
        timeline: list[tuple[str, int]] = []

        def note(kind: str, nbytes: int) -> None:
            if nbytes:
                timeline.append((kind, nbytes))

        self.ledger.watchers.append(note)
        phases, loaded, exchanged = self._step(forward, count)
        self.ledger.watchers.remove(note)
        return Measured(
            rest=rest,
            loaded=loaded,
            peak={kind: nbytes for kind, nbytes in sorted(self.ledger.peak.items()) if nbytes},
            peak_total=self.ledger.peak_total,
            phases=phases,
            exchanged=exchanged,
            timeline=tuple(timeline),
            followed=None if self.follower is None else self.follower.peak,
            activations=0 if self.follower is None else self.follower.at_peak,
        )

    @property
    def _settles(self) -> bool:
        """Whether the first step is not like the others: it gathers weights that nobody will write,
        or that later steps gather themselves, and makes memory to decode in."""
        frozen = any(not group.trainable for group in self.groups)
        coded = any(group.format is not None for group in self.groups)
        return self.options.gather_in_step or frozen or coded

    def _step(
        self, forward: Callable[[], Tensor], count: int
    ) -> tuple[dict[Moment, Counter[comm.Call]], dict[str, int], Counter[comm.Call]]:
        """Microbatches between the first and the last are alike: one of them is run, and counted
        as often as it comes."""
        phases: dict[Moment, Counter[comm.Call]] = {"forward": Counter(), "backward": Counter()}
        for number in range(count):
            for built in self.units:
                built.unit.last = number == count - 1
            times = self.options.microbatches - 2 if 0 < number < count - 1 else 1
            with self._followed():
                with comm.record() as calls:
                    loss = forward()
                _add(phases["forward"], calls, times)
                with comm.record() as calls:
                    if loss.requires_grad:
                        _backward(loss)
                _add(phases["backward"], calls, times)
                del loss
        loaded = self.ledger.snapshot()
        self.walked = True
        with comm.record() as calls, self._followed():
            self._update()
        exchanged = Counter(call for call in calls if self._exchanges(call))
        if self.options.gather_in_step:
            phases["step"] = Counter(calls) - exchanged
        return phases, loaded, exchanged

    def _exchanges(self, call: comm.Call) -> bool:
        """Whether the matrix optimizer issued it: units gather over axes that shard main alone."""
        pairs = zip(self.options.mesh.names, self.options.placements.main, strict=True)
        replicated = {name for name, placement in pairs if placement != SHARD}
        return call.operation == "all_to_all" or not replicated.isdisjoint(call.axis.split("+"))

    def _followed(self) -> AbstractContextManager[None]:
        if self.follower is None:
            return nullcontext()
        return following(self.root.owner.module, self.follower, self.ledger)

    def _update(self) -> None:
        """Step like an optimizer, as far as buffers and ranks can tell: write the weights that have
        gradients, and drop the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
        for group in self.groups:
            if group.trainable and not self.options.gather_in_step:
                group.main.version.write()
            for parameter in group.sharded:
                parameter.grad = None

    def close(self) -> None:
        """Take the units apart: nothing of them outlives a plan."""
        for built in self.units:
            built.unit.groups.clear()
            built.unit.places.clear()
            built.unit.members = None


def _backward(loss: Tensor) -> None:
    """As ``loss.backward()``, inside of which no mode for torch's functions is asked: what is
    recomputed there must take the way that it took in forward."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip


def _add(total: Counter[comm.Call], calls: Sequence[comm.Call], times: int) -> None:
    for call, count in Counter(calls).items():
        total[call] += times * count


# ------------------------------------------------------------------------------ building


def build(
    root: Owner,
    buffers: dict[Owner, tuple[PlannedBuffer, ...]],
    options: Options,
    rank: int,
    ledger: Ledger,
    in_model: bool,
) -> Engine:
    """The units of ``rank`` at rest, outer before inner, with their runtime. ``in_model``: whether
    they put their parameters into the modules."""
    over = {ep: _ranks(options, rank, ep) for ep in {1, options.ep}}
    with META:
        units = [
            _build_unit(owner, buffers[owner], options, over, in_model) for owner in root.tree()
        ]
    lanes = Lanes(META)
    lanes.asynchronous = options.device != "cpu"
    runtime = Runtime(META, [built.unit for built in units], (), lanes=lanes)
    for built in units:
        built.unit.begin(runtime, built.owner.name, built.owner is root)
        for group in built.unit.groups:
            group.show_whole()
    sharded = {
        id(built.owner.found[position].parameter): built.unit.groups[number].sharded[index]
        for built in units
        for position, (number, index) in built.where.items()
    }
    return Engine(options, ledger, units, sharded)


def _ranks(options: Options, rank: int, ep: int) -> Ranks:
    backend = "gloo" if options.device == "cpu" else "nccl"
    mesh = options.mesh.without(ep)
    place = mesh.coordinate(rank // ep)
    pretended: Any = PretendedMesh(mesh.names, mesh.sizes, place, backend)
    others = comm.Axis.pretended("ep", ep, rank % ep, backend) if ep > 1 else None
    return Ranks(pretended, others)


def _build_unit(
    owner: Owner,
    buffers: Sequence[PlannedBuffer],
    options: Options,
    over: dict[int, Ranks],
    in_model: bool,
) -> BuiltUnit:
    kept_axis, release = after_forward(
        options.reshard_after_forward, over[min(owner.homes, default=1)]
    )
    ranks = float(options.mesh.num_ranks)  # gradients of experts are sums over the tokens of all
    unit, where = build_unit(
        Unit if options.bucket_mb is None else BucketedUnit,
        owner.name,
        [owner.module],
        owner.found if in_model else (),
        buffers,
        [_stand_in(one) for one in owner.found],
        options.placements,
        options.precision,
        META,
        ranks=over,
        divisors={ep: ranks for ep in over if ep > 1},
        release_after_forward=release,
        kept_axis=kept_axis,
        unused="error",
        options={},
        early=options.gather_in_step,
    )
    return BuiltUnit(owner, unit, where)


def _stand_in(found: Found) -> nn.Parameter:
    """A parameter without values; the model's own where that has none."""
    original = found.parameter
    if original.is_meta and type(original) is nn.Parameter:
        return original
    empty = torch.empty(found.shape, dtype=original.dtype, device=META)
    made = nn.Parameter(empty, requires_grad=original.requires_grad)
    carry_attributes(original, made)
    return made
