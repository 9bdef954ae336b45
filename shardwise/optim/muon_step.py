# SPDX-License-Identifier: Apache-2.0
"""Muon's step over the matrices of an optimizer, wherever they are stored.

    grad, momentum     element by element, on the pieces that this rank updates   -> updates
    exchange           whole matrices, one owner each                             -> updates
    weight             decay and update, on the pieces that are stored here

Round by round, so that the memory of a step is bounded (``step_bytes``): a round's updates are made
when it begins, and gone when its weights are written.

On a GPU with kernels, matrices that this rank owns and stores whole skip the exchange: three
kernels go from gradients to weights (``muon.step_by_kernels``).

Momentum is stored like the gradient, which is stored like the weight (on one replica, where
replicas divide the matrices), so it is saved and resharded like any other tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise import comm
from shardwise.division import ByMatrix, Division
from shardwise.kernels.newton_schulz import uses_kernels
from shardwise.kernels.tables import Matrices
from shardwise.memory import counted, held
from shardwise.optim import muon
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import KIND, Exchange, Key, Span
from shardwise.optim.gradients import (
    divide,
    division_of,
    gradient_of,
    moved_state,
    state_cut,
    zero_state,
)
from shardwise.optim.matrix_parameter import Known, MatrixParameter
from shardwise.optim.ownership import assign_owners, update_order
from shardwise.optim.presets import DEFAULT, newton_schulz, polynomial_of
from shardwise.optim.replicas import Spread, evenly_is_cheaper, spread_evenly
from shardwise.optim.split import Matrix
from shardwise.optim.storage import (
    Sharding,
    Written,
    local_of,
    sharding_of,
    version_of,
)
from shardwise.tensor import ShardedTensor

States = dict[Tensor, dict[str, Any]]

_ALIKE = (
    *("form", "scale", "wire", "replicas", "tensor_parallel"),
    *("step_bytes", "kind", "function"),
)  # settings of parameters that one exchange works on


def momentum_state(parameter: Tensor, before: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter, new or as it was, stored where it is needed (collective then)."""
    if not before:
        return {"momentum_buffer": zero_state(parameter)}
    return before | {"momentum_buffer": moved_state(parameter, before["momentum_buffer"])}


def kernels_everywhere(device: torch.device, axes: Iterable[comm.Axis | None]) -> bool:
    """Whether every rank of the axes has kernels, so that all price matrices as measured.

    Collective on GPUs, of which a cluster may have several kinds.
    """
    if device.type != "cuda":
        return False
    found = uses_kernels(device)
    for axis in axes:
        if axis is not None:
            found = all(comm.agree(found, axis))
    return found


class MatrixGroup:
    """Parameters of one Sharding and of equal settings, and their exchange."""

    def __init__(
        self,
        sharding: Sharding,
        members: Sequence[MatrixParameter],
        measured: bool | None = None,
    ) -> None:
        """Collective where the parameters are sharded."""
        self.sharding, self.members = sharding, list(members)
        self.spread: Spread | None = None
        first = members[0].group
        locals_ = [local_of(one.parameter) for one in members]
        device = locals_[0].device
        shards = sharding.axis(sharding.sharded)
        spreads = first.get("replicas", "spread") == "spread"
        replicas = sharding.axis(sharding.replicated) if spreads else None
        if measured is None:
            measured = kernels_everywhere(device, (shards, sharding.axis(sharding.replicated)))
        known: Known = {}
        orders = self._orders()
        # Positions of members, by part of the step: what is updated, and can be gathered, together.
        self.parts = [
            [position for position, at in enumerate(orders) if at == order]
            for order in sorted(set(orders))
        ]
        matrices = self._matrices(measured, orders, known)
        self.spread = self._spread(matrices, shards, replicas)
        if self.spread is not None:
            self.sharding = self.spread.sharding
            matrices = self._matrices(measured, orders, known)
            shards, replicas = self.sharding.axis(self.sharding.sharded), None
        self.exchange = Exchange(
            matrices,
            shards,
            replicas,
            device,
            wire=first["wire"],
            step_bytes=first.get("step_bytes"),
        )
        self._stored = [self._weight(position).numel() > 0 for position in range(len(members))]
        self.exchange.agree()
        of_round = [orders[self._parameter(index)] for index, *_ in self.exchange.ownership.rounds]
        self._num_rounds = [of_round.count(order) for order in sorted(set(orders))]
        self._divide_between_replicas(sharding)
        self._prepare(locals_, measured)

    def _prepare(self, locals_: Sequence[Tensor], measured: bool) -> None:
        """The parts of a step that are Muon's own."""
        first = self.members[0].group
        self.polynomial = polynomial_of(first["preset"])
        self.form, self.scale = first["form"], first["scale"]
        self.blocks = self._blocks(first["tensor_parallel"])
        narrow = any(local.dtype != torch.float32 for local in locals_)
        planned = measured and not narrow  # as kernels would, on the device that is planned for
        self.fused = planned if locals_[0].is_meta else muon.kernels_fit(locals_)
        # With kernels: by position, the matrices of parameters that skip the exchange.
        self.local: dict[int, list[int]] = {}
        if self.fused and self.blocks is None:
            self.local = self._local_matrices()
            skipped = [index for indices in self.local.values() for index in indices]
            self.exchange.excluded = frozenset(skipped)
        self._begins = {position: self._begins_of(of) for position, of in self.local.items()}
        self.others = self._updated_elsewhere()

    def _blocks(self, mode: str) -> Blocks | None:
        """How tensor parallelism cuts the matrices; None: they are whole here."""
        axis = self.sharding.axis(self.sharding.blocked)
        if axis is None or self.members[0].split_here[1]:
            return None
        return Blocks(axis, self.sharding.block_dim, mode)

    def _matrices(self, measured: bool, orders: Sequence[int], known: Known) -> list[Matrix]:
        return [
            matrix
            for position, one in enumerate(self.members)
            for matrix in one.matrices(
                position,
                measured=measured,
                order=orders[position],
                known=known,
                divided=None if self.spread is None else self.spread.pieces[position],
            )
        ]

    def _spread(
        self, matrices: Sequence[Matrix], shards: comm.Axis | None, replicas: comm.Axis | None
    ) -> Spread | None:
        """The even division between replicas, where that is cheaper than one by matrix."""
        if replicas is None:
            return None
        plan = assign_owners(matrices, shards.size if shards is not None else 1, replicas.size)
        parameters = [one.parameter for one in self.members]
        dense = all(local_of(parameter).is_contiguous() for parameter in parameters)
        return (
            spread_evenly(self.sharding, parameters) if dense and evenly_is_cheaper(plan) else None
        )

    def state_of(self, one: MatrixParameter, before: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, new or as it was, stored where it is needed (collective
        then)."""
        return momentum_state(one.parameter, before)

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        """Bytes of state that lie on owners (replica, rank), not beside the weights."""
        return Counter()

    @property
    def divides(self) -> bool:
        """Whether replicas divide the matrices between them, and store what they work on."""
        return self.spread is not None or self.exchange.replicas is not None

    def _weight(self, position: int) -> Tensor:
        """The elements of a weight that this rank updates."""
        return self._mine(position, local_of(self.members[position].parameter))

    def _mine(self, position: int, local: Tensor) -> Tensor:
        """The part of ``local`` that this rank updates; flat where replicas divide a parameter
        evenly."""
        return local if self.spread is None else self.spread.take(position, local.view(-1))

    def _parameter(self, index: int) -> int:
        return self.exchange.matrices[index].parameter

    def _orders(self) -> list[int]:
        """The part of the step in which each parameter is updated: one part for all, where no unit
        gathers weights during the step."""
        versions = [version_of(one.parameter) for one in self.members]
        if not any(version is not None and version.on_stepped is not None for version in versions):
            return [0] * len(versions)
        sizes = [one.parameter.numel() for one in self.members]
        return update_order([id(version) for version in versions], sizes)

    def _divide_between_replicas(self, sharding: Sharding) -> None:
        """Have each gradient reduced to the replicas that compute its matrices."""
        ownership = self.exchange.ownership
        places = sharding.places(sharding.replicated) if self.exchange.replicas else []
        by_place = sorted(range(len(places)), key=places.__getitem__)
        for position, one in enumerate(self.members):
            division: Division | None = None
            if self.spread is not None:
                division = self.spread.divisions[position]
            elif places:
                by_rank = ownership.replica_ranges[position]
                division = ByMatrix(tuple(by_rank[rank] for rank in by_place))
            divide(one.parameter, division)

    def _local_matrices(self) -> dict[int, list[int]]:
        """By position: the matrices of parameters whose pieces here are whole plain matrices that
        this rank owns."""
        exchange = self.exchange
        found: dict[int, list[int]] = {}
        for index, parts in enumerate(exchange.stored):
            if parts:
                found.setdefault(self._parameter(index), []).append(index)
        return {
            position: indices
            for position, indices in found.items()
            if not any(exchange.matrices[index].sizes for index in indices)
            and all(exchange.is_local(index) for index in indices)
        }

    def _updated_elsewhere(self) -> dict[int, list[tuple[int, int]]]:
        """By position: elements whose momentum is stored here, and whose weights another replica
        updates. A parameter of another library is not divided: every replica has its states."""
        exchange = self.exchange
        mine: list[list[tuple[int, int]]] = [[] for _ in self.members]
        if self.spread is not None:
            mine = [[one] for one in self.spread.mine]
        else:
            for index, (replica, _) in enumerate(exchange.ownership.owners):
                if replica == exchange.replica:
                    begin = exchange.offsets[index]
                    parts = [(begin + lo, begin + hi) for lo, hi in exchange.stored[index]]
                    mine[self._parameter(index)] += parts
        found: dict[int, list[tuple[int, int]]] = {}
        for position, one in enumerate(self.members) if self.divides else ():
            if division_of(one.parameter) is None:
                end = local_of(one.parameter).numel()
                bounds = [0, *(bound for part in sorted(mine[position]) for bound in part), end]
                gaps = zip(bounds[::2], bounds[1::2], strict=True)
                found[position] = [(lo, hi) for lo, hi in gaps if lo < hi]
        return {position: gaps for position, gaps in found.items() if gaps}

    def _begins_of(self, indices: Sequence[int]) -> dict[tuple[int, int], numpy.ndarray]:
        """The places where matrices begin in this rank's part of their parameter, by shape."""
        found: dict[tuple[int, int], list[int]] = {}
        for index in indices:
            matrix = self.exchange.matrices[index]
            found.setdefault((matrix.rows, matrix.cols), []).append(self.exchange.offsets[index])
        return {shape: numpy.array(begins, numpy.int64) for shape, begins in found.items()}

    # ------------------------------------------------------------------ a step

    def step(self, states: States, clip: Tensor | None = None) -> Iterator[list[Tensor]]:
        """One step, part by part; yields the parameters that each part has written.

        ``clip``: see ``Clip.on_device``; with kernels only.

        A parameter without a gradient, which no other rank has then either, is skipped. The
        exchange stays as planned, with zeros in its place, unless no parameter has a gradient.
        """
        given = [one.parameter.grad is not None for one in self.members]
        here = [p for p, has in enumerate(given) if has and p in self.local and self._stored[p]]
        self._advance_others(states, given, clip)
        rounds = self.exchange.run(partial(self._begin, states, given, clip), self._compute)
        for part, count in zip(self.parts, self._num_rounds, strict=True):
            self._step_local([p for p in here if p in part], states, clip)
            for _ in range(count if any(given) else 0):
                spans, updates = next(rounds)
                self._check()
                self._apply(spans, updates, given, clip)
                del updates
            if self.spread is not None:
                weights = [local_of(one.parameter) for one in self.members]
                self.spread.gather([p for p in part if given[p]], weights)
            yield [self.members[position].parameter for position in part if given[position]]

    def _by_group(self, spans: Sequence[Span], given: Sequence[bool]) -> list[list[int]]:
        """The numbers of spans whose parameters have gradients, by parameter group."""
        found: dict[int, list[int]] = {}
        for number, span in enumerate(spans):
            if given[span.parameter]:
                group = self.members[span.parameter].group
                found.setdefault(id(group), []).append(number)
        return list(found.values())

    def _check(self) -> None:
        """Raise on every rank what went wrong on one; Newton-Schulz cannot."""

    def _begin(
        self,
        states: States,
        given: Sequence[bool],
        clip: Tensor | None,
        spans: Sequence[Span],
    ) -> list[Tensor]:
        """Advance the momentum of a round; returns the updates to orthogonalise: zeros without a
        gradient, and nothing where another replica computes."""
        found = [self._nothing(span, given[span.parameter]) for span in spans]
        for numbers in self._by_group(spans, given):
            numbers = [number for number in numbers if spans[number].mine]
            written = Written()
            buffers, grads = [], []
            for number in numbers:
                span = spans[number]
                parameter = self.members[span.parameter].parameter
                momentum = local_of(states[parameter]["momentum_buffer"])
                buffers.append(self._piece(span, written.flat(momentum)))
                grads.append(self._gradient(span))
            if not numbers:
                continue
            group = self.members[spans[numbers[0]].parameter].group
            updates = self._advance(buffers, grads, group, clip)
            written.finish()
            for number, update in zip(numbers, updates, strict=True):
                found[number] = counted(update, KIND)
        return found

    def _advance(
        self,
        buffers: list[Tensor],
        grads: list[Tensor],
        group: dict[str, Any],
        clip: Tensor | None,
    ) -> list[Tensor]:
        if self.fused:
            return muon.update_momentum_by_kernels(buffers, grads, group, clip)
        return muon.update_momentum(buffers, grads, group)

    def _advance_others(self, states: States, given: Sequence[bool], clip: Tensor | None) -> None:
        """Advance momenta that are stored here, of weights that another replica updates."""
        for position, parts in self.others.items():
            one = self.members[position]
            grad = gradient_of(one.parameter) if given[position] else None
            if grad is not None:
                written, flat = Written(), grad.reshape(-1)
                momentum = written.flat(local_of(states[one.parameter]["momentum_buffer"]))
                buffers = [momentum[lo:hi] for lo, hi in parts]
                self._advance(buffers, [flat[lo:hi] for lo, hi in parts], one.group, clip)
                written.finish()

    def _nothing(self, span: Span, given: bool) -> Tensor:
        """Zeros for a span without a gradient, which its owner computes all the same; else
        nothing."""
        local = local_of(self.members[span.parameter].parameter)
        if given or not span.mine:
            return local.new_empty(0)
        return counted(local.new_zeros(span.end - span.begin), KIND)

    def _piece(self, span: Span, state: Tensor) -> Tensor:
        """The elements of a span in a flat state, or gradient: it begins where this replica's part
        of the parameter does."""
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

    def _compute(self, batch: Tensor, keys: Sequence[Key]) -> Tensor:
        """[count, rows, cols], orthogonalised and scaled by the whole matrix's shape."""
        rows, cols = batch.shape[-2:]
        with held(muon.workspace_bytes(len(batch), rows, cols, self.polynomial, self.fused), KIND):
            if batch.is_meta:  # a plan, which has no values
                return batch
            if self.blocks is None:
                result = newton_schulz(batch, self.polynomial, form=self.form)
            else:
                result = self.blocks.orthogonalise(batch, self.polynomial, self.form)
                rows, cols = self.blocks.whole_shape(rows, cols)
            return result.mul_(muon.scale_of(self.scale, rows, cols))

    def _apply(
        self,
        spans: Sequence[Span],
        updates: Sequence[Tensor],
        given: Sequence[bool],
        clip: Tensor | None,
    ) -> None:
        """Decay and update the weights of a round."""
        for numbers in self._by_group(spans, given):
            group = self.members[spans[numbers[0]].parameter].group
            written = Written()
            weights = [self._stored_piece(spans[number], written) for number in numbers]
            self._apply_group(weights, [updates[number] for number in numbers], group, clip)
            written.finish()

    def _stored_piece(self, span: Span, written: Written) -> Tensor:
        """The elements of a span in the weight that is stored here."""
        flat = written.flat(local_of(self.members[span.parameter].parameter))
        if self.spread is not None:
            flat = self.spread.take(span.parameter, flat)
        return flat[span.begin : span.end]

    def _apply_group(
        self,
        weights: list[Tensor],
        updates: list[Tensor],
        group: dict[str, Any],
        clip: Tensor | None,
    ) -> None:
        if self.fused:
            muon.apply_update_by_kernels(weights, updates, group, clip)
        else:
            muon.apply_update(weights, updates, group)

    def _step_local(self, positions: Sequence[int], states: States, clip: Tensor | None) -> None:
        """Update whole matrices that skip the exchange, shape by shape, without a workspace."""
        # By parameter group, dtype and shape: flat gradients, momenta, weights; their matrices.
        batches: dict[Any, tuple[dict[str, Any], list[list[Tensor]], list[numpy.ndarray]]] = {}
        for position in positions:
            one = self.members[position]
            weight, grad = self._weight(position).view(-1), gradient_of(one.parameter)
            assert grad is not None
            given = self._mine(position, grad.contiguous()).view(-1)
            momentum = local_of(states[one.parameter]["momentum_buffer"])
            momentum = self._mine(position, momentum).view(-1)
            for shape, begins in self._begins[position].items():
                key = (id(one.group), given.dtype, *shape)
                batch = batches.setdefault(key, (one.group, [[], [], []], []))
                for flats, flat in zip(batch[1], (given, momentum, weight), strict=True):
                    flats.append(flat)
                batch[2].append(begins)
        for (_, _, rows, cols), (group, kinds, places) in batches.items():
            grads, momenta, weights = (Matrices(kind, places, rows, cols) for kind in kinds)
            scale = muon.scale_of(self.scale, rows, cols)
            most = self.exchange.ownership.step_bytes // (2 if self.exchange.moves else 1)
            muon.step_by_kernels(grads, momenta, weights, group, self.polynomial, scale, most, clip)


def matrix_groups(
    members: Sequence[MatrixParameter],
    measured: bool | None = None,
    class_of: Callable[[str], Callable[..., MatrixGroup]] = lambda kind: MatrixGroup,
) -> list[MatrixGroup]:
    """One group per Sharding and settings, in order of first appearance: alike on every rank.
    ``measured``: whether matrices are priced as measured on GPUs; None: if the ranks have kernels.
    ``class_of``: the class of a group, by kind of its parameter groups.

    Collective where parameters are sharded.
    """
    found: dict[Any, tuple[Sharding, list[MatrixParameter]]] = {}
    for one in members:
        sharding, group = sharding_of(one.parameter), one.group
        alike = (polynomial_of(group.get("preset", DEFAULT)), *map(group.get, _ALIKE))
        key = (sharding, alike, one.split_here[1], str(local_of(one.parameter).device))
        found.setdefault(key, (sharding, []))[1].append(one)
    return [
        class_of(members[0].group["kind"])(sharding, members, measured)
        for sharding, members in found.values()
    ]
