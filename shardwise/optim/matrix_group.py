# SPDX-License-Identifier: Apache-2.0
"""A group of parameters that share an exchange, and a step over their matrices, round by round.

    begin       element by element, on the pieces that this rank updates     -> values to exchange
    exchange    whole matrices, one owner each                               -> updates
    apply       decay and update, on the pieces that this rank stores

The memory of a step is bounded (``step_bytes``): the values of a round are made when it begins, and
freed when its weights are written. Subclasses compute the updates: Muon (muon_step.py) and
functions (function_step.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.division import ByMatrix, Division
from shardwise.core.tensor import ShardedTensor
from shardwise.kernels.newton_schulz import uses_kernels
from shardwise.optim.blocks import Blocks
from shardwise.optim.exchange import Batch, Exchange, Span
from shardwise.optim.gradients import divide, gradient_of, state_cut
from shardwise.optim.ownership import assign_owners
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
)

States = dict[Tensor, dict[str, Any]]
# Matrices of parameters that are cut and priced alike, which are made once. A value holds its
# pieces, whose id is part of the key.
Known = dict[Any, tuple[Sequence[Piece], list[Matrix]]]

# Settings that all parameters of an exchange have in common.
_SHARED_SETTINGS = ("form", "scale", "wire", "replicas", "tensor_parallel", "step_bytes", "kind",
                    "function")  # fmt: skip


def planned_settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of a parameter group that the plan of its exchange depends on."""
    return (polynomial_of(group.get("preset", DEFAULT)), *map(group.get, _SHARED_SETTINGS))


def kernels_everywhere(device: torch.device, axes: Sequence[comm.Axis]) -> bool:
    """Whether every rank of the axes has kernels, so that all ranks price matrices as measured.

    Collective on GPUs, because a cluster may have several kinds. In a plan, "nccl" as the backend
    stands for GPUs with kernels.
    """
    if device.type == "meta":
        return any(axis.backends.get("meta") == "nccl" for axis in axes)
    if device.type != "cuda":
        return False
    everywhere = uses_kernels(device)
    for axis in axes:
        everywhere = all(comm.agree(everywhere, axis))
    return everywhere


@dataclass(eq=False)
class MatrixParameter:
    """One parameter of a matrix optimizer: a matrix, or several."""

    name: str
    parameter: Tensor
    route: Route
    group: dict[str, Any]  # the parameter group of the optimizer

    @cached_property
    def split_here(self) -> tuple[Split | None, bool]:
        """The split of this rank's block (without tensor parallelism, of the parameter), and
        whether the matrices in it are whole."""
        sharding, split = sharding_of(self.parameter), self.route.split
        if split is None or not any(sharding.blocked):
            return split, not any(sharding.blocked)
        count = sharding.count(sharding.blocked)
        shape = tuple(self.parameter.shape)
        within = split.within(shape, sharding.block_dim, count, sharding.block)
        assert within is not None, "refused at construction"
        return within

    def matrices(
        self,
        position: int,
        *,
        measured: bool,
        known: Known,
        divided: Sequence[Piece] | None,
    ) -> list[Matrix]:
        """The matrices of the parameter, with pieces and prices. ``position``: that of the
        parameter in its group. ``divided``: the pieces that each rank updates, where these are not
        all that it stores."""
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
        if key not in known:
            cost = partial(
                price, polynomial=polynomial, form=group.get("form", "auto"), measured=measured
            )
            matrices = matrices_of(shape, self.split_here[0])
            known[key] = pieces, stored_matrices(matrices, pieces, cost, pinned=pinned)
        return [
            replace(matrix, name=self.name + matrix.name, parameter=position)
            for matrix in known[key][1]
        ]


class StepValues(NamedTuple):
    """The values of one step."""

    states: States
    given: list[bool]  # by member: whether it has a gradient
    clip: Tensor | None  # see ``Clip.on_device``; with kernels only


class MatrixGroup:
    """Parameters of one Sharding and of equal settings, and their exchange. A subclass computes the
    matrices and stores their states."""

    fused = False  # whether the step runs by kernels, which also clip
    blocks: Blocks | None  # how tensor parallelism cuts the matrices; None: they are whole here

    def __init__(self, sharding: Sharding, members: Sequence[MatrixParameter]) -> None:
        """Collective where the parameters are sharded."""
        self.sharding, self.members = sharding, list(members)
        self.spread: Spread | None = None
        first = members[0].group
        locals_ = [local_of(member.parameter) for member in members]
        device = locals_[0].device
        shards = sharding.axis(sharding.sharded)
        spreads = first.get("replicas", "spread") == "spread"
        replicas = sharding.axis(sharding.replicated) if spreads else None
        axes = sharding.ranks.axes if sharding.mesh is not None else ()
        measured = kernels_everywhere(device, axes)
        known: Known = {}
        self._prepare(locals_, measured)
        matrices = self._matrices(measured, known)
        options = self._exchange_options(matrices)
        if replicas is not None:
            self.spread = self._spread(matrices, shards, replicas, options)
        if self.spread is not None:
            self.sharding = self.spread.sharding
            matrices = self._matrices(measured, known)
            shards, replicas = self.sharding.axis(self.sharding.sharded), None
        self.exchange = Exchange(
            matrices,
            shards,
            replicas,
            device,
            wire=first["wire"],
            step_bytes=first.get("step_bytes"),
            **options,
        )
        self.exchange.agree()
        self._divide_between_replicas(sharding)
        self._plan_step()

    def _blocks(self, mode: str) -> Blocks | None:
        """How tensor parallelism cuts the matrices; None: they are whole here."""
        axis = self.sharding.axis(self.sharding.blocked)
        if axis is None or self.members[0].split_here[1]:
            return None
        return Blocks(axis, self.sharding.block_dim, mode)

    def _matrices(self, measured: bool, known: Known) -> list[Matrix]:
        return [
            matrix
            for position, member in enumerate(self.members)
            for matrix in member.matrices(
                position,
                measured=measured,
                known=known,
                divided=None if self.spread is None else self.spread.pieces[position],
            )
        ]

    def _spread(
        self,
        matrices: Sequence[Matrix],
        shards: comm.Axis | None,
        replicas: comm.Axis,
        options: dict[str, Any],
    ) -> Spread | None:
        """The even division between replicas, if it costs less than a division by matrix."""
        width = options.get("results", torch.float32).itemsize
        num_shards = shards.size if shards is not None else 1
        plan = assign_owners(matrices, num_shards, replicas.size, result_width=width)
        parameters = [member.parameter for member in self.members]
        dense = all(local_of(parameter).is_contiguous() for parameter in parameters)
        if not dense or not evenly_is_cheaper(plan):
            return None
        return spread_evenly(self.sharding, parameters)

    @property
    def divides(self) -> bool:
        """Whether replicas divide the matrices between them."""
        return self.spread is not None or self.exchange.replicas is not None

    def _mine(self, position: int, local: Tensor) -> Tensor:
        """The flat part of ``local`` that this rank updates."""
        flat = local.view(-1)
        return flat if self.spread is None else self.spread.take(position, flat)

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

    # ------------------------------------------------------------------ by optimizer

    # Take the settings of the optimizer: (local weights, whether all ranks have kernels).
    _prepare: Callable[[Sequence[Tensor], bool], None]
    # The state of a parameter, new or as it was, where it is needed (collective if it moves).
    state_of: Callable[[MatrixParameter, dict[str, Any]], dict[str, Any]]
    # Write the values from which a round is computed into the given memory: zeros where there is no
    # gradient.
    _begin: Callable[[StepValues, Sequence[Span], Sequence[Tensor]], None]
    # The updates of whole matrices that this rank owns.
    _compute: Callable[[StepValues, Batch], Tensor]
    # Decay and update weights of one parameter group, with the updates multiplied by ``scale``:
    # (step, parameter group, weights, updates, scale).
    _apply_group: Callable[[StepValues, dict[str, Any], list[Tensor], list[Tensor], float], None]

    def _exchange_options(self, matrices: Sequence[Matrix]) -> dict[str, Any]:
        """``results`` and ``work`` of :class:`Exchange`, if these differ from the defaults."""
        return {}

    def _plan_step(self) -> None:
        """Prepare the parts of a step that follow from the exchange."""

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        """By owner (replica, rank): the bytes of states that lie there, not with the weights."""
        return Counter()

    def _scale_left(self, span: Span) -> float:
        """The factor by which the updates of a span must still be multiplied."""
        return 1.0

    def _advance_others(self, now: StepValues) -> None:
        """Advance states on this rank whose weights another replica updates."""

    def _step_local(self, now: StepValues, positions: Sequence[int]) -> None:
        """Update parameters that skip the exchange."""

    def launch_ahead(self) -> None:
        """Launch the kernels of a step that clips, for tensors without memory: the kernels of
        matrices that skip the exchange, and of Newton-Schulz."""

    # ------------------------------------------------------------------ a step

    def step(self, states: States, clip: Tensor | None = None) -> list[Tensor]:
        """One step; returns the parameters that it has written.

        A parameter that has no gradient, on this rank and on all others, is skipped. The exchange
        stays as planned, with zeros in its place, unless no parameter has a gradient.
        """
        given = [member.parameter.grad is not None for member in self.members]
        now = StepValues(states, given, clip)
        self._advance_others(now)
        positions = [position for position, has in enumerate(given) if has]
        self._step_local(now, positions)
        if positions:
            begin, compute = partial(self._begin, now), partial(self._compute, now)
            for spans, updates in self.exchange.run(begin, compute):
                self._apply(now, spans, updates)
                del updates
        if self.spread is not None:
            weights = [local_of(member.parameter) for member in self.members]
            self.spread.gather(positions, weights)
        return [self.members[position].parameter for position in positions]

    def _by_group(self, spans: Sequence[Span], given: Sequence[bool]) -> list[list[int]]:
        """The numbers of spans whose parameters have gradients, by parameter group and scale."""
        numbers: dict[tuple[int, float], list[int]] = {}
        for number, span in enumerate(spans):
            if given[span.parameter]:
                key = id(self.members[span.parameter].group), self._scale_left(span)
                numbers.setdefault(key, []).append(number)
        return list(numbers.values())

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


def matrix_groups(
    members: Sequence[MatrixParameter],
    class_of: Callable[[str], Callable[..., MatrixGroup]],
) -> list[MatrixGroup]:
    """One group per Sharding and settings, in order of first appearance, which is the same on every
    rank. ``class_of``: the class of a group, by the kind of its parameter groups.

    Collective where parameters are sharded.
    """
    members_of: dict[Any, list[MatrixParameter]] = {}
    for member in members:
        key = (
            sharding_of(member.parameter),
            planned_settings(member.group),
            member.split_here[1],
            str(local_of(member.parameter).device),
        )
        members_of.setdefault(key, []).append(member)
    return [
        class_of(members[0].group["kind"])(sharding, members)
        for (sharding, *_), members in members_of.items()
    ]
