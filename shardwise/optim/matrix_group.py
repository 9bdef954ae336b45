# SPDX-License-Identifier: Apache-2.0
"""Matrices that one exchange works on: who computes them, and a step over them, round by round.

    begin       element by element, on the pieces that this rank updates     -> places of a round
    exchange    whole matrices, one owner each                               -> updates
    apply       decay and update, on the pieces that are stored here

The memory of a step is bounded (``step_bytes``): a round's updates are made when it begins, and
gone when its weights are written. Muon (muon_step.py) and functions (function_step.py) say what is
computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise import comm
from shardwise.division import ByMatrix, Division
from shardwise.kernels.newton_schulz import uses_kernels
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import Batch, Exchange, Span
from shardwise.optim.gradients import divide, gradient_of, state_cut
from shardwise.optim.ownership import assign_owners, update_order
from shardwise.optim.presets import DEFAULT, polynomial_of, price
from shardwise.optim.replicas import Spread, evenly_is_cheaper, spread_evenly
from shardwise.optim.routing import Route
from shardwise.optim.split import Matrix, Piece, Split, matrices_of, stored_matrices
from shardwise.optim.storage import (
    Sharding,
    Written,
    block_shape,
    local_of,
    pieces_of,
    sharding_of,
    version_of,
)
from shardwise.tensor import ShardedTensor

States = dict[Tensor, dict[str, Any]]
Known = dict[Any, tuple[Sequence[Piece], list[Matrix]]]

_ALIKE = (
    *("form", "scale", "wire", "replicas", "tensor_parallel"),
    *("step_bytes", "kind", "function"),
)  # settings of parameters that one exchange works on


def planned_settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of a parameter group that the plan of its exchange depends on."""
    return (polynomial_of(group.get("preset", DEFAULT)), *map(group.get, _ALIKE))


def kernels_everywhere(device: torch.device, axes: Sequence[comm.Axis]) -> bool:
    """Whether every rank of the axes has kernels, so that all price matrices as measured.

    Collective on GPUs, of which a cluster may have several kinds. A plan's ranks have what their
    backend stands for.
    """
    if device.type == "meta":
        return any(axis.backends.get("meta") == "nccl" for axis in axes)
    if device.type != "cuda":
        return False
    found = uses_kernels(device)
    for axis in axes:
        found = all(comm.agree(found, axis))
    return found


@dataclass(eq=False)
class MatrixParameter:
    """One parameter that Muon updates: a matrix, or several."""

    name: str
    parameter: Tensor
    route: Route
    group: dict[str, Any]  # its parameter group: learning rate and all

    @cached_property
    def split_here(self) -> tuple[Split | None, bool]:
        """The split of what shards cut (a block, under tensor parallelism), and whether matrices
        are whole in it."""
        sharding, split = sharding_of(self.parameter), self.route.split
        if split is None or not any(sharding.blocked):
            return split, not any(sharding.blocked)
        count = sharding.count(sharding.blocked)
        shape = tuple(self.parameter.shape)
        found = split.within(shape, sharding.block_dim, count, sharding.block)
        assert found is not None, "refused at construction"
        return found

    def matrices(
        self,
        position: int,
        *,
        measured: bool,
        order: int = 0,
        known: Known | None = None,
        divided: Sequence[Piece] | None = None,
    ) -> list[Matrix]:
        """Its matrices with pieces and prices; ``position`` is the parameter's in the group.
        ``known``: those of parameters that are cut and priced alike, which are made once.
        ``divided``: the pieces that ranks update, where those are not all that they store."""
        known = {} if known is None else known
        parameter, group = self.parameter, self.group
        shape = self.route.shape_of(block_shape(parameter))
        polynomial = polynomial_of(group.get("preset", DEFAULT))
        pinned = False  # whether the layout stores every matrix on one rank on purpose
        if isinstance(parameter, ShardedTensor) and divided is None:
            grain = parameter.cut.layout.items[parameter.cut.index].grain
            # A stack [n, rows, cols] is cut between its matrices.
            pinned = grain.kind == "tensor" and (grain.count == 1 or len(shape) == 3)
        pieces = pieces_of(parameter) if divided is None else divided
        key = (id(pieces), shape, self.split_here[0], pinned)
        if key not in known:  # with the pieces, whose id is part of the key
            cost = partial(
                price, polynomial=polynomial, form=group.get("form", "auto"), measured=measured
            )
            matrices = matrices_of(shape, self.split_here[0])
            known[key] = pieces, stored_matrices(matrices, pieces, cost, pinned=pinned)
        return [
            replace(matrix, name=self.name + matrix.name, parameter=position, order=order)
            for matrix in known[key][1]
        ]


class StepValues(NamedTuple):
    """The values of one step."""

    states: States
    given: list[bool]  # by member: whether it has a gradient
    clip: Tensor | None  # see ``Clip.on_device``; with kernels only


class MatrixGroup:
    """Parameters of one Sharding and of equal settings, and their exchange.

    A subclass says how a matrix is computed, and what is stored for it.
    """

    fused = False  # whether the step runs by kernels, which clip on the way
    blocks: Blocks | None  # how tensor parallelism cuts the matrices

    def __init__(
        self,
        sharding: Sharding,
        members: Sequence[MatrixParameter],
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
        ranks = sharding.ranks.axes if sharding.mesh is not None else ()
        measured = kernels_everywhere(device, ranks)
        known: Known = {}
        orders = self._orders()
        # Positions of members, by part of the step: what is updated, and can be gathered, together.
        self.parts = [
            [position for position, at in enumerate(orders) if at == order]
            for order in sorted(set(orders))
        ]
        self._prepare(locals_, measured)
        matrices = self._matrices(measured, orders, known)
        computed = self._computed(matrices)
        self.spread = self._spread(matrices, shards, replicas, computed)
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
            **computed,
        )
        self._stored = [self._weight(position).numel() > 0 for position in range(len(members))]
        self.exchange.agree()
        of_round = [orders[self._parameter(index)] for index, *_ in self.exchange.ownership.rounds]
        self._num_rounds = [of_round.count(order) for order in sorted(set(orders))]
        self._divide_between_replicas(sharding)
        self._plan_step()

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
        self,
        matrices: Sequence[Matrix],
        shards: comm.Axis | None,
        replicas: comm.Axis | None,
        computed: dict[str, Any],
    ) -> Spread | None:
        """The even division between replicas, where that is cheaper than one by matrix."""
        if replicas is None:
            return None
        width = computed.get("results", torch.float32).itemsize
        ranks = shards.size if shards is not None else 1
        plan = assign_owners(matrices, ranks, replicas.size, result_width=width)
        parameters = [one.parameter for one in self.members]
        dense = all(local_of(parameter).is_contiguous() for parameter in parameters)
        return (
            spread_evenly(self.sharding, parameters) if dense and evenly_is_cheaper(plan) else None
        )

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

    # ------------------------------------------------------------------ by optimizer

    # Take the settings of the optimizer: (local weights, whether all ranks have kernels).
    _prepare: Callable[[Sequence[Tensor], bool], None]
    # The state of a parameter, new or as it was, stored where it is needed (collective then).
    state_of: Callable[[MatrixParameter, dict[str, Any]], dict[str, Any]]
    # Write what the matrices of a round are computed from to its places: zeros without a gradient.
    _begin: Callable[[StepValues, Sequence[Span], Sequence[Tensor]], None]
    # The updates of whole matrices that this rank owns.
    _compute: Callable[[StepValues, Batch], Tensor]
    # Decay and update weights of one parameter group; updates still lack the factor ``scale``:
    # (step, parameter group, weights, updates, scale).
    _apply_group: Callable[[StepValues, dict[str, Any], list[Tensor], list[Tensor], float], None]

    def _computed(self, matrices: Sequence[Matrix]) -> dict[str, Any]:
        """How the exchange computes, where that is not in fp32: see ``Exchange``."""
        return {}

    def _plan_step(self) -> None:
        """Prepare what follows from the exchange."""

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        """Bytes of state that lie on owners (replica, rank), not beside the weights."""
        return Counter()

    def _check(self) -> None:
        """Raise on every rank what went wrong on one."""

    def _scale_left(self, span: Span) -> float:
        """The factor that the updates of a span still lack."""
        return 1.0

    def _advance_others(self, now: StepValues) -> None:
        """Advance states that are stored here, of weights that another replica updates."""

    def _step_local(self, now: StepValues, positions: Sequence[int]) -> None:
        """Update parameters that skip the exchange."""

    def launch_ahead(self) -> None:
        """Launch the kernels of a step that clips on tensors without memory: those of matrices that
        skip the exchange, and of Newton-Schulz."""

    # ------------------------------------------------------------------ a step

    def step(self, states: States, clip: Tensor | None = None) -> Iterator[list[Tensor]]:
        """One step, part by part; yields the parameters that each part has written.

        A parameter without a gradient, which no other rank has then either, is skipped. The
        exchange stays as planned, with zeros in its place, unless no parameter has a gradient.
        """
        now = StepValues(states, [one.parameter.grad is not None for one in self.members], clip)
        self._advance_others(now)
        rounds = self.exchange.run(partial(self._begin, now), partial(self._compute, now))
        for part, count in zip(self.parts, self._num_rounds, strict=True):
            positions = [position for position in part if now.given[position]]
            self._step_local(now, positions)
            for _ in range(count if any(now.given) else 0):
                spans, updates = next(rounds)
                self._check()
                self._apply(now, spans, updates)
                del updates
            if self.spread is not None:
                self.spread.gather(positions, [local_of(one.parameter) for one in self.members])
            yield [self.members[position].parameter for position in positions]

    def _by_group(self, spans: Sequence[Span], given: Sequence[bool]) -> list[list[int]]:
        """The numbers of spans whose parameters have gradients, by parameter group and scale."""
        found: dict[tuple[int, float], list[int]] = {}
        for number, span in enumerate(spans):
            if given[span.parameter]:
                key = id(self.members[span.parameter].group), self._scale_left(span)
                found.setdefault(key, []).append(number)
        return list(found.values())

    def _apply(self, now: StepValues, spans: Sequence[Span], updates: Sequence[Tensor]) -> None:
        """Decay and update the weights of a round."""
        for numbers in self._by_group(spans, now.given):
            first, written, weights = spans[numbers[0]], Written(), []
            for span in (spans[number] for number in numbers):
                flat = written.flat(local_of(self.members[span.parameter].parameter))
                flat = flat if self.spread is None else self.spread.take(span.parameter, flat)
                weights.append(flat[span.begin : span.end])
            group, scale = self.members[first.parameter].group, self._scale_left(first)
            self._apply_group(now, group, weights, [updates[number] for number in numbers], scale)
            written.finish()

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


def matrix_groups(
    members: Sequence[MatrixParameter],
    class_of: Callable[[str], Callable[..., MatrixGroup]],
) -> list[MatrixGroup]:
    """One group per Sharding and settings, in order of first appearance: alike on every rank.
    ``class_of``: the class of a group, by kind of its parameter groups.

    Collective where parameters are sharded.
    """
    found: dict[Any, tuple[Sharding, list[MatrixParameter]]] = {}
    for one in members:
        sharding, alike = sharding_of(one.parameter), planned_settings(one.group)
        key = (sharding, alike, one.split_here[1], str(local_of(one.parameter).device))
        found.setdefault(key, (sharding, []))[1].append(one)
    return [
        class_of(members[0].group["kind"])(sharding, members)
        for sharding, members in found.values()
    ]
