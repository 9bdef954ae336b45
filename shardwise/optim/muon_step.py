# SPDX-License-Identifier: Apache-2.0
"""Muon's step over the matrices of an optimizer, wherever they are stored.

On a GPU with kernels, matrices that this rank owns and stores whole skip the exchange: three
kernels lead from gradients to weights (``muon.step_by_kernels``).

Momentum is stored like the gradient, so it is saved and resharded like any other tensor. The
gradient is stored like the weight, but on one replica alone where replicas divide the matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import Tensor

from shardwise.core.memory import counted, held
from shardwise.kernels.tables import Matrices
from shardwise.optim import muon
from shardwise.optim.exchange import KIND, Batch, Span
from shardwise.optim.gradients import division_of, gradient_of, moved_state, zero_state
from shardwise.optim.matrix_group import MatrixGroup, MatrixParameter, StepValues
from shardwise.optim.presets import newton_schulz, polynomial_of
from shardwise.optim.split import Matrix
from shardwise.optim.storage import Written, local_of


class MuonGroup(MatrixGroup):
    """Parameters of one Sharding that Muon updates, and their exchange."""

    def _prepare(self, locals_: Sequence[Tensor], measured: bool) -> None:
        first = self.members[0].group
        self.polynomial = polynomial_of(first["preset"])
        self.form, self.scale = first["form"], first["scale"]
        self.blocks = self._blocks(first["tensor_parallel"])
        # ``packs``: kernels compute in fp16, on all ranks or on none, and results travel in fp16.
        wide = all(local.dtype == torch.float32 for local in locals_)
        self.packs = measured and wide and self.blocks is None and self.form == "auto"
        self.fused = measured and wide if locals_[0].is_meta else muon.kernels_fit(locals_)

    def _exchange_options(self, matrices: Sequence[Matrix]) -> dict[str, Any]:
        # Results are scaled when they are applied, so all blocks of a matrix need the same scale.
        scales = (set(map(self._scale, matrix.shapes)) for matrix in matrices)
        self.packs = self.packs and all(len(different) == 1 for different in scales)
        if not self.packs:
            return {}

        def work(matrix: Matrix) -> int:
            shapes = matrix.shapes
            return sum(muon.workspace_bytes(1, *shape, self.polynomial, True) for shape in shapes)

        return {"results": torch.float16, "work": work}

    def _scale(self, shape: tuple[int, int]) -> float:
        return muon.scale_of(self.scale, *shape)

    def _plan_step(self) -> None:
        # By position of a parameter that skips the exchange (with kernels): where its matrices
        # begin in this rank's part of it, by shape.
        self.local: dict[int, dict[tuple[int, int], numpy.ndarray]] = {}
        if self.fused and self.blocks is None:
            local = self._local_matrices()
            self.exchange.exclude(index for indices in local.values() for index in indices)
            self.local = {position: self._begins_of(of) for position, of in local.items()}
        self._others = self._updated_elsewhere()

    def state_of(self, member: MatrixParameter, before: dict[str, Any]) -> dict[str, Any]:
        if not before:
            return {"momentum_buffer": zero_state(member.parameter)}
        momentum = moved_state(member.parameter, before["momentum_buffer"])
        return before | {"momentum_buffer": momentum}

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

    def _updated_elsewhere(self) -> dict[int, list[tuple[int, int]]]:
        """By position: elements whose momentum this rank stores and whose weights another replica
        updates. They occur in parameters of other libraries alone: every replica has all states of
        these."""
        if not self.divides:
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

    def _begins_of(self, indices: Sequence[int]) -> dict[tuple[int, int], numpy.ndarray]:
        """The places where matrices begin in this rank's part of their parameter, by shape."""
        begins: dict[tuple[int, int], list[int]] = {}
        for index in indices:
            matrix = self.exchange.matrices[index]
            begins.setdefault((matrix.rows, matrix.cols), []).append(self.exchange.offsets[index])
        return {shape: numpy.array(places, numpy.int64) for shape, places in begins.items()}

    # ------------------------------------------------------------------ a step

    def _begin(self, now: StepValues, spans: Sequence[Span], places: Sequence[Tensor]) -> None:
        """Advance the momentum of a round, and write the updates to orthogonalise to ``places``:
        zeros where there is no gradient."""
        pairs = zip(spans, places, strict=True)
        absent = [place for span, place in pairs if not now.given[span.parameter]]
        if absent:
            torch._foreach_zero_(absent)
        for numbers in self._by_group(spans, now.given):
            written, buffers = Written(), []
            for number in numbers:
                parameter = self.members[spans[number].parameter].parameter
                momentum = local_of(now.states[parameter]["momentum_buffer"])
                buffers.append(self._piece(spans[number], written.flat(momentum)))
            grads = [self._gradient(spans[number]) for number in numbers]
            group = self.members[spans[numbers[0]].parameter].group
            self._advance(now, group, buffers, grads, [places[number] for number in numbers])
            written.finish()

    def _advance(self, now: StepValues, group: dict[str, Any], *tensors: list[Tensor]) -> None:
        """``tensors``: momenta, gradients, and places of updates."""
        buffers, grads, places = tensors
        if self.fused:
            muon.update_momentum_by_kernels(buffers, grads, places, group, now.clip)
            return
        updates = muon.update_momentum(buffers, grads, group)
        torch._foreach_copy_(places, [counted(update, KIND) for update in updates])

    def _advance_others(self, now: StepValues) -> None:
        for position, parts in self._others.items():
            member = self.members[position]
            grad = gradient_of(member.parameter)
            if grad is not None:
                written, flat = Written(), grad.reshape(-1)
                momentum = written.flat(local_of(now.states[member.parameter]["momentum_buffer"]))
                buffers = [momentum[lo:hi] for lo, hi in parts]
                unused = [torch.empty_like(buffer) for buffer in buffers]
                grads = [flat[lo:hi] for lo, hi in parts]
                self._advance(now, member.group, buffers, grads, unused)
                written.finish()

    def _compute(self, now: StepValues, batch: Batch) -> Tensor:
        """[count, rows, cols], orthogonalised; and scaled by the shape of the whole matrix, unless
        ``packs``: see ``_scale_left``."""
        if self.packs:
            packed = muon.packed(batch.take())  # this frees the memory of the batch
            with self._works(batch):
                return muon.orthogonalise(packed, self.polynomial)
        rows, cols = batch.shape[-2:]
        with self._works(batch):
            values = batch.take()
            if values.is_meta:  # a plan, which has no values
                return torch.empty_like(values)
            if self.blocks is None:
                result = newton_schulz(values, self.polynomial, form=self.form)
            else:
                result = self.blocks.orthogonalise(values, self.polynomial, self.form)
                rows, cols = self.blocks.whole_shape(rows, cols)
            return result.mul_(self._scale((rows, cols)))

    def _works(self, batch: Batch) -> AbstractContextManager[None]:
        """Count the memory in which a batch is orthogonalised."""
        count, rows, cols = batch.shape
        return held(muon.workspace_bytes(count, rows, cols, self.polynomial, self.fused), KIND)

    def _scale_left(self, span: Span) -> float:
        return self._scale(self.exchange.matrices[span.matrix].shapes[0]) if self.packs else 1.0

    def _apply_group(
        self, now: StepValues, group: dict[str, Any], weights: Any, updates: Any, scale: float
    ) -> None:
        if self.fused:
            muon.apply_update_by_kernels(weights, updates, group, now.clip, scale)
            return
        if self.packs:
            updates = [update.float().mul_(scale) for update in updates]
        muon.apply_update(weights, updates, group)

    def _step_local(self, now: StepValues, positions: Sequence[int]) -> None:
        """Update whole matrices that skip the exchange, shape by shape, without a workspace."""
        # By parameter group, dtype and shape: the group; flat gradients, momenta and weights; and
        # where matrices begin in each.
        batches: dict[Any, tuple[dict[str, Any], list[list[Tensor]], list[numpy.ndarray]]] = {}
        for position in positions:
            if position not in self.local:
                continue
            member = self.members[position]
            grad = gradient_of(member.parameter)
            assert grad is not None
            momentum = local_of(now.states[member.parameter]["momentum_buffer"])
            locals_ = (grad.contiguous(), momentum, local_of(member.parameter))
            flat = [self._mine(position, local) for local in locals_]
            for shape, begins in self.local[position].items():
                key = (id(member.group), grad.dtype, *shape)
                group, kinds, places = batches.setdefault(key, (member.group, [[], [], []], []))
                for kind, tensor in zip(kinds, flat, strict=True):
                    kind.append(tensor)
                places.append(begins)
        for (_, _, rows, cols), (group, kinds, places) in batches.items():
            state = [Matrices(kind, places, rows, cols) for kind in kinds]
            self._step_matrices(group, state, now.clip)

    def _step_matrices(self, group: dict[str, Any], state: Sequence[Matrices], clip: Any) -> None:
        """Update matrices of one shape. ``state``: their gradients, momenta and weights."""
        grads, momenta, weights = state
        scale = self._scale((weights.rows, weights.columns))
        most_bytes = self.exchange.ownership.step_bytes // (2 if self.exchange.communicates else 1)
        muon.step_by_kernels(
            grads, momenta, weights, group, self.polynomial, scale, most_bytes, clip
        )

    def launch_ahead(self) -> None:
        counts: Counter[tuple[int, int]] = Counter()
        for begins in self.local.values():
            counts.update({shape: len(places) for shape, places in begins.items()})
        for (rows, cols), count in counts.items():  # as if all were of one parameter group
            flat = torch.empty(count * rows * cols, device="meta")
            matrices = Matrices([flat], [numpy.arange(count) * (rows * cols)], rows, cols)
            self._step_matrices(self.members[0].group, [matrices] * 3, flat.new_empty(2))
        for round_ in self.exchange.rounds if self.packs else ():
            for shape, keys in round_.batches:
                batch = torch.empty(len(keys), *shape, device="meta")
                muon.orthogonalise(muon.packed(batch), self.polynomial)
