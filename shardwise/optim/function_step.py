# SPDX-License-Identifier: Apache-2.0
"""The step of a matrix optimizer that is a function: gradients to owners, updates back.

Each matrix has its own state tensors (``left``; ``left.0``, ``left.1`` where a parameter has
several matrices). A state is a :class:`ShardedTensor` that is whole on the owner, where the
function reads and writes it, and empty on all other ranks. It is saved and resharded like any other
tensor. An error on one owner is raised on every rank, before the weights of its round change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.cut import Cut
from shardwise.core.division import ByMatrix
from shardwise.core.layout import ELEMENT, Item, Layout
from shardwise.core.mesh import Ranks
from shardwise.core.placements import joint_places, ranks_by
from shardwise.core.streams import read_later
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tile import replicated_tile
from shardwise.optim.exchange import Batch, Key, Span
from shardwise.optim.matrix_function import State, function_of, problem_of, template_of
from shardwise.optim.matrix_group import MatrixGroup, MatrixParameter, States, StepValues
from shardwise.optim.muon_step import MuonGroup
from shardwise.optim.storage import cut_into_pieces, local_of

STEPS = "steps"  # the state that counts the steps of a matrix


class FunctionGroup(MatrixGroup):
    """Parameters of one Sharding that one function updates, and their exchange."""

    def _prepare(self, locals_: Sequence[Tensor], measured: bool) -> None:
        self.function = function_of(self.members[0].group)
        # Every rank of tensor parallelism computes the whole matrices.
        self.blocks = self._blocks("duplicated")
        self.reads_late = locals_[0].device.type == "cuda"  # the host does not wait for the device

    def _plan_step(self) -> None:
        self._refuse_other_matrices()
        self._mesh = self._data_mesh()
        self._states: States = {}
        # Batches of the last step on a GPU whose updates were not yet checked: the first matrix of
        # each, and a function that reads the largest elements of the update and of the gradient.
        self._unread: list[tuple[Key, Callable[[], list[float]]]] = []
        self._seen: dict[Key, int] = {}  # versions of step counters that are known not to be 0
        # By parameter: the keys of its matrices, in order.
        self.keys_of: list[list[Key]] = [[] for _ in self.members]
        for index, matrix in enumerate(self.exchange.matrices):
            self.keys_of[matrix.parameter] += [(index, n) for n in range(len(matrix.shapes))]
        self._places = self._owner_places()

    def _refuse_other_matrices(self) -> None:
        """Raise where ranks of tensor parallelism have different matrices of a parameter: a state
        must have the same name and meaning on all ranks."""
        for member in self.members:
            if self.blocks is None and not cut_into_pieces(member.parameter):
                raise ValueError(
                    f"tensor parallelism cuts '{member.name}' between its matrices, so each rank "
                    f"would have other states of {member.group['function']}: use sw.muon for it, "
                    f"or leave it whole over the tensor-parallel axis"
                )

    def _data_mesh(self) -> DeviceMesh | None:
        """The axes over which matrices have owners: all but those of tensor parallelism."""
        mesh, parameter = self.sharding.mesh, self.members[0].parameter
        if isinstance(parameter, ShardedTensor):
            return parameter.cut.mesh
        if mesh is None or not any(self.sharding.blocked):
            return mesh
        names = zip(mesh.mesh_dim_names or (), self.sharding.blocked, strict=True)
        return mesh[tuple(name for name, blocks in names if not blocks)]

    # ------------------------------------------------------------------ states

    def state_of(self, member: MatrixParameter, before: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, new or as it was, on the owners (collective if it moves)."""
        states: dict[str, Any] = {}
        position = self.members.index(member)
        for key in self.keys_of[position]:
            template = template_of(*self._shape(key), member.group) | {STEPS: ((), torch.float32)}
            for name, (shape, dtype) in template.items():
                full_name = self._state_name(position, name, key)
                zeros = self._zeros(
                    f"{member.name}.{full_name}", shape, dtype, key, member.parameter
                )
                old = before.get(full_name)
                if isinstance(old, ShardedTensor) and isinstance(zeros, ShardedTensor):
                    same = old.cut.matches(zeros.cut) and old.dtype == dtype
                    same = same and old.device == zeros.device
                    states[full_name] = old if same else zeros.copy_(old.to(dtype))
                else:
                    states[full_name] = zeros if old is None else old.to(zeros)
        self._seen.clear()
        self._unread.clear()
        return states

    def _state_name(self, position: int, name: str, key: Key) -> str:
        """The name of a state in the optimizer's state: numbered for a stack, and where a parameter
        has several matrices."""
        keys, member = self.keys_of[position], self.members[position]
        single = len(keys) == 1 and len(member.route.shape_of(tuple(member.parameter.shape))) == 2
        return name if single else f"{name}.{keys.index(key)}"

    def _shape(self, key: Key) -> tuple[int, int]:
        """The (rows, columns) of the matrix that the function sees."""
        shape = self.exchange.matrices[key[0]].shapes[key[1]]
        return shape if self.blocks is None else self.blocks.whole_shape(*shape)

    def _zeros(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, key: Key, parameter: Tensor
    ) -> Tensor:
        device, mesh = local_of(parameter).device, self._mesh
        if mesh is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        item = Item(name, shape, ELEMENT)
        others, full_mesh = None, self.sharding.mesh or mesh
        if isinstance(parameter, ShardedTensor):
            others, full_mesh = parameter.cut.ranks.others, parameter.cut.full_mesh
        layout, ranks = Layout((item,), 1, item.numel, (0,)), Ranks(mesh, others)
        tile = replicated_tile(shape, mesh, full_mesh)
        whole = Cut(layout, 0, ranks, (False,) * mesh.ndim, tile=tile)
        place = self._places[self.exchange.ownership.owners[key[0]]]
        ranges = [(0, 0)] * mesh.size()
        ranges[place] = (0, item.numel)
        cut = whole.divided(ByMatrix(tuple(ranges)))
        return ShardedTensor(torch.zeros(cut.local_shape, dtype=dtype, device=device), cut)

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        nbytes: Counter[tuple[int, int]] = Counter()
        for member, keys in zip(self.members, self.keys_of, strict=True):
            for key in keys:
                for shape, dtype in template_of(*self._shape(key), member.group).values():
                    owner = self.exchange.ownership.owners[key[0]]
                    nbytes[owner] += math.prod(shape) * dtype.itemsize
        return nbytes

    def _owner_places(self) -> dict[tuple[int, int], int]:
        """By owner (replica, rank on the shard axis): its place in the order of ``ByMatrix``."""
        sizes = Ranks(self._mesh).sizes if self._mesh is not None else ()
        cuts = zip(self.sharding.sharded, self.sharding.blocked, strict=True)
        sharded = [shards for shards, blocks in cuts if not blocks][: len(sizes)]
        ranks = ranks_by(sizes, sharded)
        return dict(zip(ranks, joint_places(list(sizes)), strict=True))

    # ------------------------------------------------------------------ a step

    def step(self, states: States, clip: Tensor | None = None) -> list[Tensor]:
        self._states = states
        for key, read_largest in self._unread:
            problem = self._not_finite(key, read_largest(), "the last")
            if problem is not None:
                name = self.exchange.matrices[key[0]].name
                raise RuntimeError(f"'{name}': {problem}; the weights have that update already")
        self._unread.clear()
        return super().step(states, clip)

    def _begin(self, now: StepValues, spans: Sequence[Span], places: Sequence[Tensor]) -> None:
        """Write the gradients of a round to ``places``, in fp32: zeros where there are none."""
        for span, place in zip(spans, places, strict=True):
            if now.given[span.parameter]:
                place.copy_(self._gradient(span))
            else:
                place.zero_()

    def _compute(self, now: StepValues, batch: Batch) -> Tensor:
        """The updates of matrices of one shape that this rank owns. The function is not called for
        a matrix without a gradient, whose state stays."""
        gradients, keys = batch.take(), batch.keys
        if gradients.is_meta:  # a plan, which has no values
            return torch.zeros_like(gradients)
        if self.blocks is not None:
            gradients = self.blocks.gather(gradients)
        updates = torch.zeros_like(gradients)
        # The matrices of each call of the function: those of one parameter group that all have, or
        # all have not, had a step; on a CPU, one matrix.
        calls: dict[Any, list[int]] = {}
        for number, key in enumerate(keys):
            if not now.given[self._parameter(key[0])]:
                continue
            alone = number if gradients.device.type == "cpu" else -1
            group = self.members[self._parameter(key[0])].group
            calls.setdefault((id(group), self._is_first(key), alone), []).append(number)
        for (_, first, _), numbers in calls.items():
            try:
                updates[numbers] = self._call(gradients[numbers], [keys[n] for n in numbers], first)
            except Exception as error:
                name = self.exchange.matrices[keys[numbers[0]][0]].name
                raise RuntimeError(f"'{name}': {type(error).__name__}: {error}") from error
        return updates if self.blocks is None else self.blocks.take(updates)

    def _call(self, gradients: Tensor, keys: Sequence[Key], first: bool) -> Tensor:
        """Call the function for some matrices, and store their new states."""
        group = self.members[self._parameter(keys[0][0])].group
        _, rows, cols = gradients.shape
        template = template_of(rows, cols, group)
        stored = {name: [self._state(key, name) for key in keys] for name in template}
        state: State = {}
        if not first:
            state = {name: torch.stack(values) for name, values in stored.items()}
        update = self.function.run(gradients, state, group)
        problem = problem_of(self.function.name, gradients, update, state, template)
        if problem is None:
            norms = [torch.linalg.vector_norm(values, math.inf) for values in (update, gradients)]
            read_largest = read_later(torch.stack(norms))
            if first or not self.reads_late:
                step = "its first" if first else "this"
                problem = self._not_finite(keys[0], read_largest(), step)
            else:  # read in the next step
                self._unread.append((keys[0], read_largest))
        if problem is not None:
            raise ValueError(problem)
        for name, values in stored.items():
            torch._foreach_copy_(values, list(state[name]))
        for key in keys:
            steps = self._state(key, STEPS).add_(1)
            self._seen[key] = steps._version
        return update

    def _not_finite(self, key: Key, largest: Sequence[float], step: str) -> str | None:
        """The problem of an update that is not finite, or None. ``largest``: the largest elements
        of the update and of the gradients that it was made from."""
        update_is_finite, gradient_is_finite = map(math.isfinite, largest)
        if update_is_finite:
            return None
        kind = "finite" if gradient_is_finite else "NaN or infinite"
        return (
            f"{self.function.name}, for {kind} gradients {list(self._shape(key))}, returned NaN or "
            f"infinity in {step} step: look at its divisions and roots, or at the loss"
        )

    def _state(self, key: Key, name: str) -> Tensor:
        position = self._parameter(key[0])
        states = self._states[self.members[position].parameter]
        return local_of(states[self._state_name(position, name, key)])

    def _is_first(self, key: Key) -> bool:
        """Whether a matrix has had no step. Its counter is read again only after a load has written
        to it."""
        steps = self._state(key, STEPS)
        return self._seen.get(key) != steps._version and float(steps) == 0

    def _apply_group(
        self, now: StepValues, group: dict[str, Any], weights: Any, updates: Any, scale: float
    ) -> None:
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - float(group["lr"]) * group["weight_decay"])
        pairs = zip(updates, weights, strict=True)
        torch._foreach_sub_(weights, [update.to(weight.dtype) for update, weight in pairs])


def group_class(kind: str) -> Callable[..., MatrixGroup]:
    """The class that steps the parameter groups of a kind."""
    return FunctionGroup if kind == "function" else MuonGroup
