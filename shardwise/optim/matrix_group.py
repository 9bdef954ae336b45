# SPDX-License-Identifier: Apache-2.0
"""A group of parameters that share an exchange, and a step of their rule, round by round.

    before      element by element, on the pieces that this rank updates     -> values to exchange
    exchange    whole matrices, one owner each: compute                      -> updates
    after       element by element, on the pieces that this rank stores

The values of a round are made when it begins, and freed when its weights are written, so a few
rounds bound the memory of a step. Matrices that a rank with kernels owns and stores whole skip the
exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from shardwise.core.agreement import raise_together
from shardwise.core.division import ByMatrix
from shardwise.core.tensor import ShardedTensor
from shardwise.kernels import newton_schulz
from shardwise.kernels.tables import Matrices
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import Batch, Exchange, Span
from shardwise.optim.gradients import (
    divide,
    division_of,
    gradient_of,
    moved_state,
    state_cut,
    zero_state,
)
from shardwise.optim.ownership import WIDTH, assign_owners
from shardwise.optim.replicas import Spread, evenly_is_cheaper, spread_evenly
from shardwise.optim.rules import MatrixParameter, Piece, State, Step
from shardwise.optim.split import Matrix, matrices_of, stored_matrices
from shardwise.optim.states import AGE, WholeStates, part_of, selected, store
from shardwise.optim.storage import Sharding, block_shape, local_of, pieces_of, sharding_of

States = dict[Tensor, dict[str, Any]]
LEAST_BYTES = 16 << 20  # less memory for matrices that skip the exchange is not worth more launches


def has_kernels(device: torch.device, sharding: Sharding) -> bool:
    """Whether the ranks compute by kernels. In a plan, "nccl" as the backend stands for GPUs."""
    if device.type == "meta":
        axes = () if sharding.mesh is None else sharding.ranks.axes  # those of one rank, too
        return any(axis.backends.get("meta") == "nccl" for axis in axes)
    return newton_schulz.uses_kernels(device)


class Now(NamedTuple):
    """The values of one step."""

    states: States
    given: list[bool]  # by member: whether it has a gradient
    ages: list[int]  # by member: the steps that it has had, where the rule counts them
    clip: Tensor | None  # see ``Clip.on_device``; with kernels only


class MatrixGroup:
    """Parameters of one Sharding and of rules that are exchanged together."""

    def __init__(self, sharding: Sharding, members: Sequence[MatrixParameter]) -> None:
        """Collective where the parameters are sharded."""
        self.sharding, self.members = sharding, list(members)
        self.rule, parameters = members[0].rule, [member.parameter for member in members]
        locals_ = [local_of(parameter) for parameter in parameters]
        device = locals_[0].device
        self.blocks = self._blocks()
        self.spread: Spread | None = None
        matrices = self._matrices()
        # ``fused``: the hooks run by kernels. ``narrow``: results travel in fp16, and are scaled
        # when they are applied. All blocks of a matrix need the same scale.
        wide = all(local.dtype == torch.float32 for local in locals_)
        same = all(len(set(matrix.shapes)) == 1 for matrix in matrices)
        self.fused = wide and self.rule.has_kernels and has_kernels(device, sharding)
        self.narrow = self.fused and same and self.blocks is None and self.rule.keeps("compute")
        results = torch.float16 if self.narrow else torch.float32
        shards, replicas = sharding.axis(sharding.sharded), sharding.axis(sharding.replicated)
        begins = [
            _begin(parameter, shards.rank if shards is not None else 0) for parameter in parameters
        ]
        # Parameters of other libraries have all of a replica's states on each replica.
        if replicas is not None and all(isinstance(one, ShardedTensor) for one in parameters):
            size = shards.size if shards is not None else 1
            plan = assign_owners(matrices, size, replicas.size)
            if evenly_is_cheaper(plan, results.itemsize):
                self.spread = spread_evenly(sharding, parameters)  # type: ignore[arg-type]
                self.sharding = self.spread.sharding
                matrices = self._matrices()
                shards, replicas = self.sharding.axis(self.sharding.sharded), None
        groups = list({id(member.group): None for member in members})
        apart = [groups.index(id(member.group)) for member in members]
        self.exchange = Exchange(matrices, shards, replicas, device, results=results, apart=apart)
        self.exchange.agree()
        self._divide_between_replicas(sharding)
        # By parameter: the first element that this rank stores, of the weight and of its states.
        self.begins = [
            (begin, state_cut(p).piece[0] if division_of(p) is not None else begin)  # type: ignore[arg-type]
            for p, begin in zip(parameters, begins, strict=True)
        ]
        # Rounding of a batched product on a CPU may depend on the other matrices of the batch.
        self.one_by_one = device.type == "cpu"
        self.whole_states: WholeStates | None = None
        if self.rule.has_whole_states:
            self.whole_states = WholeStates(
                self.rule, self.sharding, self.members, self.exchange, self.blocks
            )
        # Matrices that skip the exchange (with kernels): where they begin in their parameters, by
        # parameter group and shape, and by parameter.
        self.local: dict[tuple[int, int, int], dict[int, numpy.ndarray]] = {}
        if self.fused and self.blocks is None and self.rule.keeps("before", "compute", "after"):
            self._take_local_matrices()

    def _blocks(self) -> Blocks | None:
        """How tensor parallelism cuts the matrices; None: they are whole here, or each block counts
        as a matrix."""
        axis = self.sharding.axis(self.sharding.blocked)
        mode = self.members[0].group.get("tensor_parallel", "duplicated")
        if axis is None or self.members[0].split_here[1] or mode == "blockwise":
            return None
        return Blocks(axis, self.sharding.block_dim, mode)

    def _matrices(self) -> list[Matrix]:
        # Matrices of parameters that are cut and priced alike are made once. A value holds its
        # pieces, whose id is part of the key.
        known: dict[Any, Any] = {}
        matrices: list[Matrix] = []
        for position, member in enumerate(self.members):
            division = None if self.spread is None else self.spread.divisions[position]
            pieces = pieces_of(member.parameter, division)
            shape = member.route.shape_of(block_shape(member.parameter))
            split, pinned = member.split_here[0], member.pinned and self.spread is None
            key = (id(pieces), shape, split, pinned, id(member.group))
            if key not in known:
                cost = partial(member.rule.cost, settings=member.group)
                made = stored_matrices(matrices_of(shape, split), pieces, cost, pinned=pinned)
                known[key] = pieces, made
            matrices += [
                replace(matrix, name=member.name + matrix.name, parameter=position)
                for matrix in known[key][1]
            ]
        return matrices

    @property
    def divides(self) -> bool:
        """Whether replicas divide the matrices between them."""
        return self.spread is not None or self.exchange.replicas is not None

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        """By owner (replica, rank): the bytes of states that lie there, not with the weights."""
        return Counter() if self.whole_states is None else self.whole_states.owned_bytes

    def _divide_between_replicas(self, sharding: Sharding) -> None:
        """Have each gradient reduced to the replicas that compute its matrices."""
        places = sharding.places(sharding.replicated) if self.exchange.replicas else []
        by_place = sorted(range(len(places)), key=places.__getitem__)
        for position, member in enumerate(self.members):
            if self.spread is not None:
                divide(member.parameter, self.spread.divisions[position])
            elif places:
                ranges = self.exchange.ownership.replica_ranges[position]
                divide(member.parameter, ByMatrix(tuple(ranges[rank] for rank in by_place)))
            else:
                divide(member.parameter, None)

    def state_of(self, position: int, before: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, new or as it was, where it is needed (collective if it
        moves)."""
        parameter, state = self.members[position].parameter, {}
        for name in self.rule.row_states:
            old = before.get(name)
            state[name] = zero_state(parameter) if old is None else moved_state(parameter, old)
        if self.whole_states is None:
            return before | state
        return state | self.whole_states.of(position, before)

    # ------------------------------------------------------------------ matrices that stay

    def _take_local_matrices(self) -> None:
        """Take the parameters of which this rank stores only whole plain matrices, and owns them,
        out of the exchange."""
        exchange = self.exchange
        stored: dict[int, list[int]] = {}  # by parameter: its matrices here
        for index, parts in enumerate(exchange.stored):
            if parts:
                stored.setdefault(exchange.matrices[index].parameter, []).append(index)
        local = {
            position: indices
            for position, indices in stored.items()
            if all(exchange.is_local(n) and not exchange.matrices[n].sizes for n in indices)
        }
        found: dict[tuple[int, int, int], dict[int, list[int]]] = {}
        for position, indices in local.items():
            for matrix in (exchange.matrices[index] for index in indices):
                key = (id(self.members[position].group), *matrix.shapes[0])
                found.setdefault(key, {}).setdefault(position, []).append(matrix.start)
        for key, starts in found.items():
            self.local[key] = {n: numpy.array(each, numpy.int64) for n, each in starts.items()}
        exchange.exclude(index for indices in local.values() for index in indices)

    @property
    def local_bytes(self) -> int:
        """The memory for matrices that skip the exchange: as much as their momentum, so that states
        and step together take no more than AdamW's states."""
        numels = (
            rows * cols * sum(map(len, starts.values()))
            for (_, rows, cols), starts in self.local.items()
        )
        return max(LEAST_BYTES, WIDTH * sum(numels))

    def _step_local(self, now: Now) -> None:
        """Update whole matrices that skip the exchange, shape by shape."""
        names = self.rule.row_states
        for (_, rows, cols), starts in self.local.items():
            by_dtype: dict[torch.dtype, list[int]] = {}  # of gradients
            for position in starts:
                if now.given[position]:
                    by_dtype.setdefault(self._gradient(position).dtype, []).append(position)
            for chosen in by_dtype.values():
                columns: list[list[Tensor]] = []
                for position in chosen:
                    (first, state_first), states = (
                        self.begins[position],
                        self._states(now, position),
                    )
                    weight = self._weight(position)[state_first - first :]
                    columns.append([self._gradient(position), weight, *states.values()])
                places = [starts[position] - self.begins[position][1] for position in chosen]
                gradients, weights, *rest = (
                    Matrices(column, places, rows, cols) for column in zip(*columns, strict=True)
                )
                by_name = dict(zip(names, rest, strict=True))
                group = self.members[chosen[0]].group
                step = Step(settings=group, clip=now.clip, by_kernels=True)
                self.rule.whole(gradients, by_name, weights, self.local_bytes, step)

    # ------------------------------------------------------------------ a step

    def step(self, states: States, clip: Tensor | None = None) -> list[Tensor]:
        """One step; returns the parameters that it has written.

        A parameter that has no gradient, on this rank and on all others, is skipped. The exchange
        stays as planned, with zeros in its place, unless no parameter has a gradient.
        """
        given = [member.parameter.grad is not None for member in self.members]
        written = [m.parameter for m, has in zip(self.members, given, strict=True) if has]
        if not written:
            return []
        ages = [int(states[member.parameter].get(AGE, 0)) for member in self.members]
        now = Now(states, given, ages, clip)
        self._step_local(now)
        before, compute = partial(self._before, now), partial(self._compute, now)
        for spans, updates in self.exchange.run(before, compute):
            self._after(now, spans, updates)
            del updates
        if self.spread is not None:
            wanted = {number for number, has in enumerate(given) if has}
            self.spread.gather(wanted, [member.parameter for member in self.members])  # type: ignore[misc]
        if self.whole_states is not None:
            for parameter in written:
                states[parameter][AGE] += 1
        return written

    def _alike(self, now: Now, spans: Sequence[Span]) -> list[tuple[list[int], Step]]:
        """The numbers of spans whose parameters have gradients, by parameter group, scale and
        dtype of the gradients, each with what the rule is told."""
        numbers: dict[Any, list[int]] = {}
        for number, span in enumerate(spans):
            if now.given[span.parameter]:
                member, scale = self.members[span.parameter], 1.0
                if self.narrow:
                    shape = self.exchange.matrices[span.matrix].shapes[0]
                    scale = self.rule.factor(*shape, member.group)
                dtype = member.parameter.grad.dtype  # type: ignore[union-attr]
                numbers.setdefault((id(member.group), scale, dtype), []).append(number)
        return [
            (
                same,
                Step(
                    settings=self.members[spans[same[0]].parameter].group,
                    clip=now.clip,
                    by_kernels=self.fused,
                    scale=scale,
                    pieces=partial(self._pieces, [spans[number] for number in same]),
                ),
            )
            for (_, scale, _), same in numbers.items()
        ]

    def _pieces(self, spans: Sequence[Span]) -> list[Piece]:
        """Where spans lie in their parameters (in their tiles, under tensor parallelism)."""
        return [Piece(self.members[one.parameter].name, one.begin, one.end) for one in spans]

    def _before(self, now: Now, spans: Sequence[Span], places: Sequence[Tensor]) -> None:
        """Write the values from which a round is computed to ``places``: zeros where there is no
        gradient. States here of matrices that another replica computes advance, too."""
        pairs = list(zip(spans, places, strict=False))
        absent = [place for span, place in pairs if not now.given[span.parameter]]
        if absent:
            torch._foreach_zero_(absent)
        if self.rule.row_states:  # of other libraries, which have all states on each replica
            members, device = self.members, self.exchange.device
            elsewhere = (
                span
                for span in spans[len(places) :]
                if division_of(members[span.parameter].parameter) is None
            )
            pairs += [(span, torch.empty(span.numel, device=device)) for span in elsewhere]
        for numbers, step in self._alike(now, [span for span, _ in pairs]):
            mine = [pairs[number] for number in numbers]
            states: dict[str, list[Tensor]] = {name: [] for name in self.rule.row_states}
            for span, _ in mine:
                for name, state in self._states(now, span.parameter).items():
                    states[name].append(self._piece(span, state))
            gradients = [self._piece(span, self._gradient(span.parameter)) for span, _ in mine]
            self.rule.before(gradients, states, [place for _, place in mine], step)

    def _compute(self, now: Now, batches: list[Batch]) -> list[Tensor]:
        """The updates of the matrices that this rank owns, batch by batch."""
        begins = any(has and not age for has, age in zip(now.given, now.ages, strict=True))
        first = self.whole_states is not None and begins
        # Most functions that cannot work fail in their first step, and on an owner alone.
        axes = [axis for axis in self.sharding.axes if first and not axis.pretends]
        problems, results = [], []
        try:
            results = [self._updates(now, batch) for batch in batches]
        except Exception as error:
            if not axes:
                raise
            problems.append(str(error))
        if axes:
            raise_together("the first step failed", problems, (), axes, same="")
        return results

    def _updates(self, now: Now, batch: Batch) -> Tensor:
        """The updates of matrices of one shape and parameter group. With whole states, the rule is
        called for those of one age that have gradients, and on a CPU for one matrix at a time."""
        keys, whole, blocks = batch.keys, self.whole_states, self.blocks
        settings = self.members[self.exchange.matrices[keys[0][0]].parameter].group
        step = Step(settings=settings, narrow=self.narrow, by_kernels=self.fused)
        if whole is None and blocks is None:
            return self.rule.compute(batch.take(), {}, step)
        if whole is None and blocks is not None:
            if blocks.mode == "distributed":
                return self.rule.compute_blocks(batch.take(), blocks, step)
            compute = partial(self.rule.compute, state={}, step=step)
            return blocks.divided(batch.take(), compute, turn=keys[0][0])
        assert whole is not None
        values = batch.take() if blocks is None else blocks.gather(batch.take())
        updates, stack = torch.zeros_like(values), whole.stacks[keys[0]]
        calls: dict[Any, list[int]] = {}
        for number, (index, _) in enumerate(keys):
            position = self.exchange.matrices[index].parameter
            if now.given[position]:
                alone = number if self.one_by_one else -1
                calls.setdefault((now.ages[position], alone), []).append(number)
        for (age, _), numbers in calls.items():
            given: State = selected(stack, numbers) if age else {}
            left, part = dict(given), part_of(numbers)
            told = Step(settings=settings, age=age)
            try:
                updates[part] = self.rule.compute(values[part], left, told)
            except Exception as error:
                name = self.exchange.matrices[keys[numbers[0]][0]].name
                raise RuntimeError(f"'{name}': {type(error).__name__}: {error}") from error
            if not values.is_meta:
                store(stack, numbers, given, left)
        return updates if blocks is None else blocks.take(updates)

    def _after(self, now: Now, spans: Sequence[Span], updates: Sequence[Tensor]) -> None:
        """Decay and update the weights of a round."""
        for numbers, step in self._alike(now, spans):
            weights = []
            for span in (spans[number] for number in numbers):
                first = self.begins[span.parameter][0]
                weights.append(self._weight(span.parameter)[span.begin - first : span.end - first])
            self.rule.after(weights, [updates[number] for number in numbers], step)

    def _weight(self, position: int) -> Tensor:
        return local_of(self.members[position].parameter).view(-1)

    def _states(self, now: Now, position: int) -> dict[str, Tensor]:
        """The row states of a parameter, flat."""
        state = now.states[self.members[position].parameter]
        return {name: local_of(state[name]).view(-1) for name in self.rule.row_states}

    def _gradient(self, position: int) -> Tensor:
        grad = gradient_of(self.members[position].parameter)
        assert grad is not None
        return grad.reshape(-1)

    def _piece(self, span: Span, flat: Tensor) -> Tensor:
        """The elements of a span in a flat state or gradient."""
        first = self.begins[span.parameter][1]
        return flat[span.begin - first : span.end - first]


def _begin(parameter: Tensor, rank: int) -> int:
    """The first element that a rank of the shard axis stores."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.piece[0]
    return next((low for holder, low, _ in pieces_of(parameter) if holder == rank), 0)


def matrix_groups(members: Sequence[MatrixParameter]) -> list[MatrixGroup]:
    """One group per Sharding and rule, in order of first appearance, which is the same on every
    rank. Collective where parameters are sharded."""
    members_of: dict[Any, list[MatrixParameter]] = {}
    for member in members:
        key = (
            sharding_of(member.parameter),
            member.rule.exchange,
            member.split_here[1],
            str(local_of(member.parameter).device),
        )
        members_of.setdefault(key, []).append(member)
    return [MatrixGroup(sharding, same) for (sharding, *_), same in members_of.items()]
