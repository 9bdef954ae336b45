# SPDX-License-Identifier: Apache-2.0
"""The step of a matrix optimizer that is a function: gradients to owners, updates back.

A state is a tensor of its own for each matrix (``left``, or ``left.0``, ``left.1`` where a
parameter has several), whole on the owner, where the function reads and writes it, and empty
elsewhere: a :class:`ShardedTensor`, which is saved and resharded like any other. An error on one
owner is raised on every rank, before the weights of its round change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise import comm
from shardwise.cut import Cut
from shardwise.division import ByMatrix
from shardwise.layout import ELEMENT, Item, Layout
from shardwise.mesh import Ranks
from shardwise.optim.exchange import Batch, Key, Span
from shardwise.optim.matrix_function import State, function_of, problem_of, template_of
from shardwise.optim.matrix_group import MatrixGroup, MatrixParameter, States, StepValues
from shardwise.optim.muon_step import MuonGroup
from shardwise.optim.storage import cut_into_pieces, local_of
from shardwise.placements import joint_places, ranks_by
from shardwise.streams import read_later
from shardwise.tensor import ShardedTensor
from shardwise.tile import replicated_tile

STEPS = "steps"  # the state that counts the steps of a matrix


class FunctionGroup(MatrixGroup):
    """Parameters of one Sharding that one function updates, and their exchange."""

    def _prepare(self, locals_: Sequence[Tensor], measured: bool) -> None:
        self.function = function_of(self.members[0].group)
        self.blocks = self._blocks("duplicated")  # every rank of tensor parallelism computes it all
        self.reads_late = locals_[0].device.type == "cuda"  # the host does not wait for the device

    def _plan_step(self) -> None:
        self._refuse_other_matrices()
        self._mesh = self._data_mesh()
        self._states: States = {}
        self._problem: str | None = None
        # Updates of the last step on a GPU: a matrix of each, and what reads whether it is finite.
        self._unread: list[tuple[Key, Callable[[], list[float]]]] = []
        self._seen: dict[Key, int] = {}  # versions of step counters that are known not to be 0
        # The blocks of each parameter: (matrix, number within it), in order.
        self.blocks_of: list[list[Key]] = [[] for _ in self.members]
        for index, matrix in enumerate(self.exchange.matrices):
            self.blocks_of[matrix.parameter] += [(index, n) for n in range(len(matrix.shapes))]
        self._places = self._owner_places()

    def _refuse_other_matrices(self) -> None:
        """States have one name on all ranks, so ranks of tensor parallelism can't have matrices of
        their own."""
        for one in self.members:
            if self.blocks is None and not cut_into_pieces(one.parameter):
                raise ValueError(
                    f"'{one.name}' is cut between its matrices by tensor parallelism, and the "
                    f"states of {one.group['function']} would be others on every rank: use "
                    f"sw.muon for it, or leave it whole over the tensor-parallel axis"
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

    def state_of(self, one: MatrixParameter, before: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, new or as it was, on the owners (collective if it moves)."""
        found: dict[str, Any] = {}
        position = self.members.index(one)
        for key in self.blocks_of[position]:
            template = template_of(*self._shape(key), one.group) | {STEPS: ((), torch.float32)}
            for name, (shape, dtype) in template.items():
                full = self._named(position, name, key)
                made = self._zeros(f"{one.name}.{full}", shape, dtype, key, one.parameter)
                old = before.get(full)
                if isinstance(old, ShardedTensor) and isinstance(made, ShardedTensor):
                    same = old.cut.matches(made.cut) and old.dtype == dtype
                    same = same and old.device == made.device
                    found[full] = old if same else made.copy_(old.to(dtype))
                else:
                    found[full] = made if old is None else old.to(made)
        self._seen.clear()
        self._unread.clear()
        return found

    def _named(self, position: int, name: str, key: Key) -> str:
        """The states of a parameter's matrices are numbered: of several, and of a stack."""
        blocks, one = self.blocks_of[position], self.members[position]
        single = len(blocks) == 1 and len(one.route.shape_of(tuple(one.parameter.shape))) == 2
        return name if single else f"{name}.{blocks.index(key)}"

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
        others, over = None, self.sharding.mesh or mesh
        if isinstance(parameter, ShardedTensor):
            others, over = parameter.cut.ranks.others, parameter.cut.full_mesh
        layout, ranks = Layout((item,), 1, item.numel, (0,)), Ranks(mesh, others)
        tile = replicated_tile(shape, mesh, over)
        whole = Cut(layout, 0, ranks, (False,) * mesh.ndim, tile=tile)
        place = self._places[self.exchange.ownership.owners[key[0]]]
        ranges = [(0, 0)] * mesh.size()
        ranges[place] = (0, item.numel)
        cut = whole.divided(ByMatrix(tuple(ranges)))
        return ShardedTensor(torch.zeros(cut.local_shape, dtype=dtype, device=device), cut)

    @property
    def owned_bytes(self) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for one, keys in zip(self.members, self.blocks_of, strict=True):
            for key in keys:
                for shape, dtype in template_of(*self._shape(key), one.group).values():
                    owner = self.exchange.ownership.owners[key[0]]
                    found[owner] += math.prod(shape) * dtype.itemsize
        return found

    def _owner_places(self) -> dict[tuple[int, int], int]:
        """By owner (replica, rank on the shard axis): its place as divisions count."""
        sizes = Ranks(self._mesh).sizes if self._mesh is not None else ()
        cuts = zip(self.sharding.sharded, self.sharding.blocked, strict=True)
        sharded = [shards for shards, blocks in cuts if not blocks][: len(sizes)]
        ranks = ranks_by(sizes, sharded)
        return dict(zip(ranks, joint_places(list(sizes)), strict=True))

    # ------------------------------------------------------------------ a step

    def step(self, states: States, clip: Tensor | None = None) -> Iterator[list[Tensor]]:
        self._states = states
        for key, largest in self._unread:
            problem = self._not_finite(key, largest(), "the last")
            if problem is not None and self._problem is None:
                name = self.exchange.matrices[key[0]].name
                self._problem = f"'{name}': {problem}; the weights have that update already"
        self._unread.clear()
        return super().step(states, clip)

    def _begin(self, now: StepValues, spans: Sequence[Span], places: Sequence[Tensor]) -> None:
        """Write the gradients of a round to their places, in fp32."""
        for span, place in zip(spans, places, strict=True):
            if now.given[span.parameter]:
                place.copy_(self._gradient(span))
            else:
                place.zero_()

    def _compute(self, now: StepValues, taken: Batch) -> Tensor:
        """The updates of matrices of one shape that this rank owns. Without a gradient the function
        is not called, and its state stays."""
        batch, keys = taken.take(), taken.keys
        if batch.is_meta:  # a plan, which has no values
            return torch.zeros_like(batch)
        if self.blocks is not None:
            batch = self.blocks.gather(batch)
        result = torch.zeros_like(batch)
        runs: dict[Any, list[int]] = {}
        for number, key in enumerate(keys):
            if not now.given[self._parameter(key[0])]:
                continue
            alone = number if batch.device.type == "cpu" else -1
            group = self.members[self._parameter(key[0])].group
            runs.setdefault((id(group), self._is_first(key), alone), []).append(number)
        for (_, first, _), numbers in runs.items():
            try:
                result[numbers] = self._run(batch[numbers], [keys[n] for n in numbers], first)
            except Exception as error:
                if self._problem is None:
                    name = self.exchange.matrices[keys[numbers[0]][0]].name
                    self._problem = f"'{name}': {type(error).__name__}: {error}"
        return result if self.blocks is None else self.blocks.take(result)

    def _run(self, batch: Tensor, keys: Sequence[Key], first: bool) -> Tensor:
        position = self._parameter(keys[0][0])
        group = self.members[position].group
        _, rows, cols = batch.shape
        template = template_of(rows, cols, group)
        stored = {name: [self._state(key, name) for key in keys] for name in template}
        state: State = {}
        if not first:
            state = {name: torch.stack(values) for name, values in stored.items()}
        update = self.function.run(batch, state, group)
        problem = problem_of(self.function.name, batch, update, state, template)
        if problem is None:
            norms = [torch.linalg.vector_norm(one, math.inf) for one in (update, batch)]
            largest = read_later(torch.stack(norms))
            if first or not self.reads_late:
                problem = self._not_finite(keys[0], largest(), "its first" if first else "this")
            else:  # read in the next step
                self._unread.append((keys[0], largest))
        if problem is not None:
            raise ValueError(problem)
        for name, values in stored.items():
            torch._foreach_copy_(values, list(state[name]))
        for key in keys:
            steps = self._state(key, STEPS).add_(1)
            self._seen[key] = steps._version
        return update

    def _not_finite(self, key: Key, largest: Sequence[float], step: str) -> str | None:
        """``largest``: the largest elements of an update and of the gradients it was made from."""
        update, gradient = map(math.isfinite, largest)
        if update:
            return None
        kind = "finite" if gradient else "NaN or infinite"
        return (
            f"{self.function.name}, for {kind} gradients {list(self._shape(key))}, returned NaN or "
            f"infinity in {step} step: look at its divisions and roots, or at the loss"
        )

    def _state(self, key: Key, name: str) -> Tensor:
        position = self._parameter(key[0])
        states = self._states[self.members[position].parameter]
        return local_of(states[self._named(position, name, key)])

    def _is_first(self, key: Key) -> bool:
        """Whether a matrix has had no step; its counter is read again where a load wrote to it."""
        steps = self._state(key, STEPS)
        if self._seen.get(key) == steps._version:
            return False
        return float(steps) == 0

    def _check(self) -> None:
        """Raise on every rank what went wrong on one (collective)."""
        problem, self._problem = self._problem, None
        wrong, axes = problem is not None, self.sharding.axes
        for axis in axes:
            wrong = bool(comm.any_rank(numpy.array([wrong]), axis)[0])
        if not wrong:
            return
        for axis in axes:
            problem = next((one for one in comm.agree(problem, axis) if one is not None), None)
        raise RuntimeError(f"the step stopped before it changed this weight: {problem}")

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
