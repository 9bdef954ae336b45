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
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.agreement import raise_together
from shardwise.core.division import ByMatrix, Division
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
from shardwise.optim.matrices import Known, MatrixParameter
from shardwise.optim.ownership import WIDTH, assign_owners
from shardwise.optim.replicas import Spread, evenly_is_cheaper, spread_evenly
from shardwise.optim.rules import Piece, State, Step
from shardwise.optim.split import Matrix
from shardwise.optim.states import AGE, WholeStates, part_of, selected, store
from shardwise.optim.storage import Sharding, Written, local_of, sharding_of

States = dict[Tensor, dict[str, Any]]
LEAST_BYTES = 16 << 20  # less memory for matrices that skip the exchange is not worth more launches


def has_kernels(device: torch.device, axes: Sequence[comm.Axis]) -> bool:
    """Whether the ranks compute by kernels. In a plan, "nccl" as the backend stands for GPUs."""
    if device.type == "meta":
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
        self.rule, first = members[0].rule, members[0].group
        self.spread: Spread | None = None
        locals_ = [local_of(member.parameter) for member in members]
        device = locals_[0].device
        shards = sharding.axis(sharding.sharded)
        spreads = first.get("replicas", "spread") == "spread"
        replicas = sharding.axis(sharding.replicated) if spreads else None
        by_kernels = has_kernels(device, sharding.axes)
        self.blocks = self._blocks(first.get("tensor_parallel", "duplicated"))
        known: Known = {}
        matrices = self._matrices(known)
        wide = all(local.dtype == torch.float32 for local in locals_)
        # ``fused``: the hooks run by kernels here. ``narrow``: on all ranks, so results travel in
        # fp16 and are scaled when they are applied. All blocks of a matrix need the same scale.
        same = all(len(set(matrix.shapes)) == 1 for matrix in matrices)
        fits = self.rule.has_kernels and wide
        narrows = by_kernels and self.blocks is None and self.rule.keeps("compute")
        self.narrow = fits and narrows and same
        dense = all(local.is_contiguous() for local in locals_)
        self.fused = fits and by_kernels and (dense or device.type == "meta")
        results = torch.float16 if self.narrow else torch.float32
        if replicas is not None and dense:
            num_shards = shards.size if shards is not None else 1
            plan = assign_owners(matrices, num_shards, replicas.size, result_width=results.itemsize)
            if evenly_is_cheaper(plan):
                parameters = [member.parameter for member in members]
                self.spread = spread_evenly(sharding, parameters)
        if self.spread is not None:
            self.sharding = self.spread.sharding
            matrices = self._matrices(known)
            shards, replicas = self.sharding.axis(self.sharding.sharded), None
        groups = list({id(member.group): None for member in members})
        apart = [groups.index(id(member.group)) for member in members]
        self.exchange = Exchange(
            matrices,
            shards,
            replicas,
            device,
            results=results,
            apart=apart if self.rule.has_whole_states else (),
        )
        self.exchange.agree()
        self._divide_between_replicas(sharding)
        # Rounding of a batched product on a CPU may depend on the other matrices of the batch.
        self.one_by_one = device.type == "cpu"
        self.whole_states: WholeStates | None = None
        if self.rule.has_whole_states:
            self.whole_states = WholeStates(
                self.rule, self.sharding, self.members, self.exchange, self.blocks
            )
        # By position of a parameter that skips the exchange (with kernels): where its matrices
        # begin in this rank's part of it, by shape.
        self.local: dict[int, dict[tuple[int, int], numpy.ndarray]] = {}
        if self.fused and self.blocks is None and self.rule.keeps("before", "compute", "after"):
            local = self._local_matrices()
            self.exchange.exclude(index for indices in local.values() for index in indices)
            self.local = {position: self._begins_of(of) for position, of in local.items()}
        self._others = self._updated_elsewhere()

    def _blocks(self, mode: str) -> Blocks | None:
        """How tensor parallelism cuts the matrices; None: they are whole here, or each block counts
        as a matrix."""
        axis = self.sharding.axis(self.sharding.blocked)
        if axis is None or self.members[0].split_here[1] or mode == "blockwise":
            return None
        return Blocks(axis, self.sharding.block_dim, mode)

    def _matrices(self, known: Known) -> list[Matrix]:
        return [
            matrix
            for position, member in enumerate(self.members)
            for matrix in member.matrices(
                position,
                known,
                None if self.spread is None else self.spread.pieces[position],
            )
        ]

    @property
    def divides(self) -> bool:
        """Whether replicas divide the matrices between them."""
        return self.spread is not None or self.exchange.replicas is not None

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        """By owner (replica, rank): the bytes of states that lie there, not with the weights."""
        return Counter() if self.whole_states is None else self.whole_states.owned_bytes

    def _parameter(self, index: int) -> int:
        """The position of the parameter of a matrix."""
        return self.exchange.matrices[index].parameter

    def _divide_between_replicas(self, sharding: Sharding) -> None:
        """Have each gradient reduced to the replicas that compute its matrices."""
        ownership = self.exchange.ownership
        places = sharding.places(sharding.replicated) if self.exchange.replicas else []
        by_place = sorted(range(len(places)), key=places.__getitem__)
        for position, member in enumerate(self.members):
            division: Division | None = None
            if self.spread is not None:
                division = self.spread.divisions[position]
            elif places:
                ranges = ownership.replica_ranges[position]
                division = ByMatrix(tuple(ranges[rank] for rank in by_place))
            divide(member.parameter, division)

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

    def _local_matrices(self) -> dict[int, list[int]]:
        """The matrices of each parameter (by position) of which this rank stores only whole plain
        matrices, and owns them."""
        exchange = self.exchange
        stored: dict[int, list[int]] = {}
        for index, parts in enumerate(exchange.stored):
            if parts:
                stored.setdefault(self._parameter(index), []).append(index)
        return {
            position: indices
            for position, indices in stored.items()
            if not any(exchange.matrices[index].sizes for index in indices)
            and all(map(exchange.is_local, indices))
        }

    def _begins_of(self, indices: Sequence[int]) -> dict[tuple[int, int], numpy.ndarray]:
        """The places where matrices begin in this rank's part of their parameter, by shape."""
        begins: dict[tuple[int, int], list[int]] = {}
        for index in indices:
            matrix = self.exchange.matrices[index]
            begins.setdefault((matrix.rows, matrix.cols), []).append(self.exchange.offsets[index])
        return {shape: numpy.array(places, numpy.int64) for shape, places in begins.items()}

    @cached_property
    def local_bytes(self) -> int:
        """The memory for matrices that skip the exchange: as much as their momentum, so that states
        and step together take no more than AdamW's states."""
        numel = sum(
            len(begins) * rows * cols
            for by_shape in self.local.values()
            for (rows, cols), begins in by_shape.items()
        )
        return max(LEAST_BYTES, WIDTH * numel)

    def _step_local(self, now: Now) -> None:
        """Update whole matrices that skip the exchange, shape by shape."""
        # By parameter group, dtype and shape: the group; flat gradients, weights and states; and
        # where matrices begin in each.
        batches: dict[Any, tuple[dict[str, Any], list[list[Tensor]], list[numpy.ndarray]]] = {}
        names = self.rule.row_states
        for position, begins_of in self.local.items():
            if not now.given[position]:
                continue
            member = self.members[position]
            grad = gradient_of(member.parameter)
            assert grad is not None
            states = [local_of(now.states[member.parameter][name]) for name in names]
            flat = [
                local.view(-1)
                if self.spread is None
                else self.spread.take(position, local.view(-1))
                for local in (grad.contiguous(), local_of(member.parameter), *states)
            ]
            for shape, begins in begins_of.items():
                key = (id(member.group), grad.dtype, *shape)
                empty: list[list[Tensor]] = [[] for _ in flat]
                group, kinds, places = batches.setdefault(key, (member.group, empty, []))
                for kind, tensor in zip(kinds, flat, strict=True):
                    kind.append(tensor)
                places.append(begins)
        for (_, _, rows, cols), (group, kinds, places) in batches.items():
            grads, weights, *rest = (Matrices(kind, places, rows, cols) for kind in kinds)
            step = Step(settings=group, clip=now.clip, by_kernels=True)
            by_name = dict(zip(names, rest, strict=True))
            self.rule.whole(grads, by_name, weights, self.local_bytes, step)

    def _updated_elsewhere(self) -> dict[int, list[tuple[int, int]]]:
        """By position: elements whose states this rank stores and whose weights another replica
        updates. They occur in parameters of other libraries alone: every replica has all states of
        these."""
        if not self.divides or not self.rule.row_states:
            return {}
        exchange = self.exchange
        mine: list[list[tuple[int, int]]] = [[] for _ in self.members]
        if self.spread is not None:
            mine = [[span] for span in self.spread.mine]
        else:
            for index, (replica, _) in enumerate(exchange.ownership.owners):
                if replica == exchange.replica:
                    begin = exchange.offsets[index]
                    parts = [(begin + lo, begin + hi) for lo, hi in exchange.stored[index]]
                    mine[self._parameter(index)] += parts
        elsewhere: dict[int, list[tuple[int, int]]] = {}
        for position, member in enumerate(self.members):
            if division_of(member.parameter) is None:
                end = local_of(member.parameter).numel()
                bounds = [0, *(bound for part in sorted(mine[position]) for bound in part), end]
                gaps = zip(bounds[::2], bounds[1::2], strict=True)
                elsewhere[position] = [(lo, hi) for lo, hi in gaps if lo < hi]
        return {position: gaps for position, gaps in elsewhere.items() if gaps}

    def _advance_others(self, now: Now) -> None:
        """Advance states on this rank whose weights another replica updates."""
        for position, parts in self._others.items():
            member = self.members[position]
            grad = gradient_of(member.parameter)
            if grad is not None:
                written, flat = Written(), grad.reshape(-1)
                state = now.states[member.parameter]
                whole = {n: written.flat(local_of(state[n])) for n in self.rule.row_states}
                states = {n: [values[lo:hi] for lo, hi in parts] for n, values in whole.items()}
                grads = [flat[lo:hi] for lo, hi in parts]
                unused = [torch.empty_like(piece, dtype=torch.float32) for piece in grads]
                step = Step(settings=member.group, clip=now.clip, by_kernels=self.fused)
                self.rule.before(grads, states, unused, step)
                written.finish()

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
        self._advance_others(now)
        self._step_local(now)
        before, compute = partial(self._before, now), partial(self._compute_round, now)
        for spans, updates in self.exchange.run(before, compute):
            self._after(now, spans, updates)
            del updates
        if self.spread is not None:
            weights = [local_of(member.parameter) for member in self.members]
            positions = [position for position, has in enumerate(given) if has]
            self.spread.gather(positions, weights)
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
        offsets = [self.exchange.begins[span.parameter] for span in spans]
        return [
            Piece(self.members[span.parameter].name, at + span.begin, at + span.end)
            for span, at in zip(spans, offsets, strict=True)
        ]

    def _before(self, now: Now, spans: Sequence[Span], places: Sequence[Tensor]) -> None:
        """Write the values from which a round is computed to ``places``: zeros where there is no
        gradient."""
        pairs = zip(spans, places, strict=True)
        absent = [place for span, place in pairs if not now.given[span.parameter]]
        if absent:
            torch._foreach_zero_(absent)
        for numbers, step in self._alike(now, spans):
            written, mine = Written(), [spans[number] for number in numbers]
            states: dict[str, list[Tensor]] = {name: [] for name in self.rule.row_states}
            for span in mine:
                state = now.states[self.members[span.parameter].parameter]
                for name, pieces in states.items():
                    pieces.append(self._piece(span, written.flat(local_of(state[name]))))
            gradients = [self._gradient(span) for span in mine]
            self.rule.before(gradients, states, [places[number] for number in numbers], step)
            written.finish()

    def _compute_round(self, now: Now, batches: list[Batch]) -> list[Tensor]:
        """The updates of the matrices that this rank owns, batch by batch."""
        begins = any(has and not age for has, age in zip(now.given, now.ages, strict=True))
        first = self.whole_states is not None and begins
        axes = [axis for axis in self.sharding.axes if not axis.pretends]
        if not first or not axes:
            return [self._compute(now, batch) for batch in batches]
        # Most functions that cannot work fail in their first step, and on an owner alone.
        problems, results = [], []
        try:
            results = [self._compute(now, batch) for batch in batches]
        except Exception as error:
            problems.append(str(error))
        raise_together("the first step failed", problems, (), axes, same="")
        return results

    def _compute(self, now: Now, batch: Batch) -> Tensor:
        """The updates of matrices of one shape, call by call of the rule: those of parameter groups
        that are alike; with whole states, of one age that have gradients, and one matrix alone on a
        CPU."""
        keys, whole = batch.keys, self.whole_states
        calls: dict[Any, list[int]] = {}
        for number, key in enumerate(keys):
            position = self._parameter(key[0])
            if whole is None:
                alike = self.rule.alike(self.members[position].group)
                calls.setdefault(alike, []).append(number)
            elif now.given[position]:
                alone = number if self.one_by_one else -1
                calls.setdefault((now.ages[position], alone), []).append(number)
        if whole is None and len(calls) == 1:
            return self._call(now, keys, batch.take(), {})
        values = batch.take()
        if whole is not None and self.blocks is not None:
            values = self.blocks.gather(values)
        updates = torch.zeros_like(values, dtype=self.exchange.results)
        for numbers in calls.values():
            mine, part = [keys[number] for number in numbers], part_of(numbers)
            if whole is None:
                updates[part] = self._call(now, mine, values[part], {})
                continue
            stack = whole.stacks[keys[0]]
            age = now.ages[self._parameter(mine[0][0])]
            given: State = selected(stack, numbers) if age else {}
            left = dict(given)
            try:
                updates[part] = self._call(now, mine, values[part], left)
            except Exception as error:
                name = self.exchange.matrices[mine[0][0]].name
                raise RuntimeError(f"'{name}': {type(error).__name__}: {error}") from error
            if not values.is_meta:
                store(stack, numbers, given, left)
        return updates if whole is None or self.blocks is None else self.blocks.take(updates)

    def _call(self, now: Now, keys: Sequence[Any], values: Tensor, state: State) -> Tensor:
        """One call of the rule."""
        position = self._parameter(keys[0][0])
        step = Step(
            settings=self.members[position].group,
            age=now.ages[position],
            narrow=self.narrow,
            by_kernels=self.fused,
        )
        if self.blocks is None or self.whole_states is not None:
            return self.rule.compute(values, state, step)
        if self.blocks.mode == "distributed":
            return self.rule.compute_blocks(values, self.blocks, step)
        compute = partial(self.rule.compute, state=state, step=step)
        return self.blocks.divided(values, compute, turn=keys[0][0])

    def _after(self, now: Now, spans: Sequence[Span], updates: Sequence[Tensor]) -> None:
        """Decay and update the weights of a round."""
        for numbers, step in self._alike(now, spans):
            written, weights = Written(), []
            for span in (spans[number] for number in numbers):
                flat = written.flat(local_of(self.members[span.parameter].parameter))
                flat = flat if self.spread is None else self.spread.take(span.parameter, flat)
                weights.append(flat[span.begin : span.end])
            self.rule.after(weights, [updates[number] for number in numbers], step)
            written.finish()

    def _piece(self, span: Span, state: Tensor) -> Tensor:
        """The elements of a span in a flat state or gradient, which begins at this replica's part
        of the parameter."""
        parameter, begin = self.members[span.parameter].parameter, 0
        if self.spread is not None:
            state = self.spread.take(span.parameter, state)
        elif isinstance(parameter, ShardedTensor):
            begin = max(0, state_cut(parameter).piece[0] - parameter.cut.piece[0])
        return state[span.begin - begin : span.end - begin]

    def _gradient(self, span: Span) -> Tensor:
        grad = gradient_of(self.members[span.parameter].parameter)
        assert grad is not None
        return self._piece(span, grad.reshape(-1))


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
