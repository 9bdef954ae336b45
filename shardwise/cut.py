# SPDX-License-Identifier: Apache-2.0
"""Cut: where the pieces of one tensor lie, and the two collectives that need to know it.

A parameter is packed with others in a flat buffer, so its pieces are as long as the layout made
them: uneven, on some ranks none, and with an element grain even cut inside a row.

    shard    |        0         |        1         |        2        |
    buffer   | wq rows 0-3 | wk rows 0-1 | 2-4 | wv rows 0-3 |..pad..|
    wk       |             | rows 0-1    | 2-4 |                          pieces [0,2) [2,5) [5,5)

``gather`` makes the whole tensor of them, ``reduce`` makes one value of every rank's values. Both
run over the sharded axes alone: ranks of a replicated axis hold the same bytes already.

Replicas may also *divide* a tensor: of what they would all hold, each holds what it works on. That
is how gradients and momenta of whole matrices lie under ``hsdp()``, while the weights are
replicated:

    weights     replica 0 | A | B | C |     replica 1 | A | B | C |
    momenta     replica 0 | A |   | C |     replica 1 |   | B |   |     ranges of A ((0, n), (0, 0))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise import comm
from shardwise.layout import Layout
from shardwise.mesh import PretendedMesh
from shardwise.placements import REPLICATE, SHARD, ReplicaRanges, shard_range


@dataclass(eq=False)
class Version:
    """Counts the writes to a buffer: those that go through its ShardedTensors, and every step of an
    optimizer.

    ``reading`` is set while a gather on another lane reads the buffer, and makes a writer wait for
    that gather.

    ``on_stepped`` is told when an optimizer has written all that it will write in this step, on
    every rank in the same order: whoever wants the new weights early may begin to gather them.

    ``replica_ranges``, by item: the elements that each replica's optimizer works on. The gradient
    is reduced to that replica alone. Set by the optimizer, as a new dictionary each time, on every
    rank alike.

    ``waiting`` is set while gradients of earlier microbatches wait to be reduced (no ``.grad``
    shows them), and drops them: an optimizer refuses to step then, and ``zero_grad`` calls it.

    ``unsynced``: the values were made after wrapping (meta device), and may differ between replicas
    until the first forward takes the first one's.
    """

    count: int = 0
    on_stepped: Callable[[], None] | None = None
    replica_ranges: dict[int, ReplicaRanges] = field(default_factory=dict)
    reading: Callable[[], None] | None = None
    waiting: Callable[[], None] | None = None
    unsynced: bool = False

    def await_readers(self) -> None:
        """Wait, before a write, for gathers that still read the buffer."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading()

    def write(self) -> None:
        """Count a write that comes next, and wait for gathers that still read the buffer."""
        self.count += 1
        if self.reading is not None:
            self.await_readers()

    def __deepcopy__(self, memo: dict[int, Any]) -> Version:
        # Nobody has asked about the copy, but its gradient is copied with it.
        copied = memo[id(self)] = Version(self.count, replica_ranges=self.replica_ranges)
        return copied


class Rows(Shard):
    """``Shard(0)`` over uneven rows: equal to it in name, right in the sizes it reports.

    torch computes from ``placements`` which rows of a full tensor a rank should copy into
    ``to_local()`` (``set_model_state_dict(broadcast_from_rank0=True)`` does). ``torch.chunk``'s
    answer would be other rows than ours, silently. ``distribute_tensor`` and ``from_local`` over
    it make ShardedTensors (tensor.py); a plain DTensor that got hold of it is refused.
    """

    cut: Cut
    rows: tuple[int, int] | None  # of this rank, [begin, end); None where rows are cut
    last: bool

    def __init__(self, cut: Cut, rows: tuple[int, int] | None, *, last: bool) -> None:
        super().__init__(0)
        # torch's placements refuse attributes in some versions (frozen dataclasses).
        self.__dict__.update(cut=cut, rows=rows, last=last)

    @property
    def name(self) -> str:
        return self.cut.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return self  # a value

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        if self.rows is None:
            raise NotImplementedError(
                f"'{self.name}' is cut inside its rows, so no block of rows is this rank's piece; "
                f"copy the full tensor into the parameter (every rank takes its piece), for "
                f"example with full_state_dict=True and broadcast_from_rank0=False"
            )
        # All sharded axes cut the same rows, so one of them can tell: the last.
        begin, end = self.rows if self.last else (0, curr_local_size)
        return end - begin, begin

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the rows of '{self.name}' lie unevenly over the ranks, which a plain DTensor cannot "
            f"move; use the ShardedTensor's full_tensor()"
        )

    def _shard_tensor(
        self, tensor: Tensor, mesh: Any, mesh_dim: int, src_data_rank: Any = 0
    ) -> Tensor:
        """This rank's rows for ``distribute_tensor``, of the first rank's values, as torch does."""
        axis = comm.mesh_axes(mesh)[mesh_dim]
        if src_data_rank is not None and axis.size > 1 and not tensor.is_meta:
            tensor = tensor.detach().contiguous().clone()
            comm.broadcast(tensor, axis).wait()
        return self.cut.take(tensor).contiguous() if self.last else tensor

    _split_tensor = _select_split_tensor = _to_replicate_tensor = _refuse
    _replicate_to_shard = _reduce_shard_tensor = _to_new_shard_dim = _refuse


@dataclass(frozen=True, eq=False)
class Cut:
    """The pieces of item ``index`` of a layout over a mesh; one object serves a parameter, its
    gradient and its optimizer states. A rank holds ``layout.num_shards // num_holders`` consecutive
    shards, so the buffer may be cut finer than the mesh."""

    layout: Layout
    index: int
    mesh: DeviceMesh
    sharded: tuple[bool, ...]  # per mesh axis, outer to inner; the True ones are a suffix
    replica_ranges: ReplicaRanges | None = None  # of the axes that cut nothing: see :meth:`divided`
    others: comm.Axis | None = None  # ranks outside the mesh that hold other experts, each its own

    def __post_init__(self) -> None:
        name = self.layout.items[self.index].name
        if len(self.sharded) != self.mesh.ndim:
            raise ValueError(
                f"'{name}': sharded={self.sharded} for a mesh of {self.mesh.ndim} axes; "
                f"give one entry per axis"
            )
        if list(self.sharded) != sorted(self.sharded):
            raise ValueError(
                f"'{name}': sharded={self.sharded}: sharded axes must be the inner ones, so that a "
                f"rank's part is one contiguous range"
            )
        if self.layout.num_shards % self._num_runs:
            raise ValueError(
                f"'{name}': {self.layout.num_shards} shards over {self._num_runs} ranks; plan "
                f"the layout with a multiple of {self._num_runs} shards"
            )
        if self.mesh.get_coordinate() is None:
            raise ValueError(f"'{name}': this rank is not in the mesh {self.mesh}; leave it out")

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        return self  # a value, and its mesh can't be copied

    # ------------------------------------------------------------------ where the pieces lie

    @property
    def name(self) -> str:
        return self.layout.items[self.index].name

    @cached_property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout.items[self.index].shape)

    @cached_property
    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @cached_property
    def numel(self) -> int:
        return self.shape.numel()

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None, "checked in __post_init__"
        return tuple(coordinate)

    @cached_property
    def num_holders(self) -> int:
        return math.prod(
            self.mesh.size(axis) for axis, sharded in enumerate(self.sharded) if sharded
        )

    @property
    def _num_runs(self) -> int:
        """Into how many runs of shards the layout is cut; replicas may divide each."""
        return self.num_holders // len(self.replica_ranges or (None,))

    def divided(self, ranges: ReplicaRanges) -> Cut:
        """The same, with the pieces divided between replicas: each rank holds something else."""
        assert len(ranges) * self.num_holders == self.mesh.size() and self.replica_ranges is None
        if ranges not in self._divided:
            every = (True,) * self.mesh.ndim
            self._divided[ranges] = replace(self, sharded=every, replica_ranges=ranges)
        return self._divided[ranges]

    @cached_property
    def _divided(self) -> dict[ReplicaRanges, Cut]:
        return {}

    def viewed(self, first: int, shape: tuple[int, ...]) -> Cut:
        """The cut of a run of elements, from ``first`` on, as a tensor of another shape."""
        return replace(self, layout=self.layout.window(self.index, first, shape), index=0)

    @cached_property
    def shard_index(self) -> int:
        """Which of ``num_holders`` parts this rank holds."""
        placements = [SHARD if sharded else REPLICATE for sharded in self.sharded]
        sizes = [self.mesh.size(axis) for axis in range(self.mesh.ndim)]
        return shard_range(placements, sizes, self.coordinate, self.num_holders)[0]

    def piece_of(self, holder: int) -> tuple[int, int]:
        """The elements [lo, hi) that a holder has; (0, 0) where it has none."""
        count = self.layout.num_shards // self._num_runs
        run, replica = divmod(holder, len(self.replica_ranges or (None,)))
        lo, hi = self.layout.piece(self.index, run * count, count)
        if self.replica_ranges is not None:
            first, last = self.replica_ranges[replica]
            lo, hi = max(lo, first), min(hi, last)
        return (lo, hi) if lo < hi else (0, 0)

    @cached_property
    def piece(self) -> tuple[int, int]:
        return self.piece_of(self.shard_index)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.piece_of(holder) for holder in range(self.num_holders))

    @cached_property
    def local_shape(self) -> torch.Size:
        return torch.Size(self.layout.piece_shape(self.index, *self.piece))

    @cached_property
    def in_rows(self) -> bool:
        """Whether every holder has whole rows: the same answer on every rank."""
        row = math.prod(self.shape[1:])
        return len(self.shape) > 0 and not any(lo % row or hi % row for lo, hi in self.pieces)

    @cached_property
    def boxes(self) -> tuple[tuple[torch.Size, torch.Size], ...]:
        """This rank's piece as (offsets, sizes) boxes of the whole tensor, for checkpoints."""
        lo, hi = self.piece
        found = self.layout.chunks(self.index, lo, hi) if lo < hi else ()
        return tuple((torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in found)

    def matches(self, other: Cut) -> bool:
        """Whether both put the same elements on the same ranks."""
        if self is other:
            return True
        if self.sharded != other.sharded or self.mesh != other.mesh:
            return False
        same = self.index == other.index and self.replica_ranges == other.replica_ranges
        if self.layout is other.layout and same:
            return True
        return self.shape == other.shape and self.pieces == other.pieces

    def take(self, full: Tensor) -> Tensor:
        """This rank's piece of a full tensor, as a view where it can be one."""
        lo, hi = self.piece
        if len(self.shape) and self.local_shape[1:] == self.shape[1:]:
            row = math.prod(self.shape[1:])
            return full[lo // row : hi // row]
        return full.reshape(-1)[lo:hi].view(self.local_shape)

    def within(self, coarse: Cut, local: Tensor) -> Tensor:
        """This rank's piece as a view of ``local``, which is its piece under ``coarse``."""
        if self.matches(coarse):
            return local
        (lo, hi), (begin, end) = self.piece, coarse.piece
        if lo == hi:
            return local.new_empty(self.local_shape)
        if not begin <= lo < hi <= end:
            raise RuntimeError(
                f"'{self.name}': elements {lo} to {hi} are wanted of a tensor that has {begin} to "
                f"{end} here: it was made for another optimizer. Call zero_grad() after building "
                f"one, and run backward again"
            )
        return local.reshape(-1)[lo - begin : hi - begin].view(self.local_shape)

    def spec(self, dtype: torch.dtype) -> DTensorSpec | None:
        """The whole tensor as torch's DTensor describes it; None in a plan, where nobody asks."""
        if isinstance(self.mesh, PretendedMesh):
            return None
        spec = self._specs.get(dtype)
        if spec is None:
            meta = TensorMeta(self.shape, self.stride, dtype)
            spec = self._specs[dtype] = DTensorSpec(self.mesh, self._placements, tensor_meta=meta)
        return spec

    @cached_property
    def _specs(self) -> dict[torch.dtype, DTensorSpec]:
        return {}

    @cached_property
    def _placements(self) -> tuple[Replicate | Shard, ...]:
        rows = None
        if self.in_rows:
            row = math.prod(self.shape[1:])
            rows = (self.piece[0] // row, self.piece[1] // row)
        last = len(self.sharded) - 1
        return tuple(
            Rows(self, rows, last=axis == last) if sharded else Replicate()
            for axis, sharded in enumerate(self.sharded)
        )

    # ------------------------------------------------------------------ collectives

    @cached_property
    def axes(self) -> tuple[comm.Axis, ...]:
        """The axes to communicate over, outer to inner."""
        axes = zip(comm.mesh_axes(self.mesh), self.sharded, strict=True)
        return tuple(axis for axis, sharded in axes if sharded and axis.size > 1)

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor in new memory, on every rank (collective over the sharded axes).

            rank 0 | a a . |                             | a a . | b b b | c . . |
            rank 1 | b b b |  pieces padded to equal  ->  | a a . | b b b | c . . |  ->  a a b b b c
            rank 2 | c . . |                             | a a . | b b b | c . . |

        The outer axis comes first, which joins neighbours. Where padding would more than double the
        tensor (one owner among 1024 ranks has it all), everybody adds up a tensor of zeros but for
        its piece instead, in integers, so that no bit changes.
        """
        if local.is_meta:
            return local.new_empty(self.shape)
        if not self.axes:
            return local.detach().clone().view(self.shape)
        flat = local.detach().reshape(-1).to(self.mesh.device_type)
        longest = max(hi - lo for lo, hi in self.pieces)
        if longest * self.num_holders <= 2 * self.numel:
            full = self._gather_padded(flat, longest)
        else:
            full = self._sum_pieces(flat)
        return full.view(self.shape).to(local.device)

    def _gather_padded(self, flat: Tensor, longest: int) -> Tensor:
        padded = flat.new_empty(longest)
        padded[: flat.numel()] = flat
        # As bytes, because not every backend carries every dtype.
        part = padded.view(torch.uint8)
        for axis in self.axes:
            joined = part.new_empty(part.numel() * axis.size)
            comm.all_gather(joined, part, axis).wait()
            part = joined
        held = zip(self.pieces, part.view(flat.dtype).split(longest), strict=True)
        in_order = sorted(held, key=lambda piece: piece[0])  # replicas divide a tensor in any order
        return torch.cat([one[: hi - lo] for (lo, hi), one in in_order if lo < hi])

    def _sum_pieces(self, flat: Tensor) -> Tensor:
        num_bytes = self.numel * flat.element_size()
        words = torch.zeros(-(-num_bytes // 4), dtype=torch.int32, device=flat.device)
        full = words.view(torch.uint8)[:num_bytes].view(flat.dtype)
        full[slice(*self.piece)] = flat
        for axis in self.axes:
            comm.all_reduce(words, axis).wait()
        return full

    @cached_property
    def replica_axes(self) -> tuple[comm.Axis, ...]:
        """The axes whose ranks hold the same bytes, outer to inner."""
        axes = zip(comm.mesh_axes(self.mesh), self.sharded, strict=True)
        return tuple(axis for axis, sharded in axes if not sharded and axis.size > 1)

    @cached_property
    def norm_axes(self) -> tuple[comm.Axis, ...]:
        """The axes that a norm is taken over. That of experts which are spread over ranks is the
        norm of the experts of all ranks: a total norm is then the same on every rank."""
        return self.axes if self.others is None else (*self.axes, self.others)

    def reduce(
        self,
        values: Tensor,
        op: Literal["sum", "max", "min"],
        axes: tuple[comm.Axis, ...] | None = None,
    ) -> Tensor:
        """Every rank's ``values`` (one dimension) made one (collective over ``axes``; None: the
        sharded ones).

        A maximum is taken of gathered values: NCCL's own drops a NaN, torch's keeps it.
        """
        axes = self.axes if axes is None else axes
        if values.is_meta or not axes:
            return values
        result = values.to(self.mesh.device_type)
        for axis in axes:
            if op == "sum":
                comm.all_reduce(result, axis).wait()
            else:
                gathered = result.new_empty(axis.size * result.numel())
                comm.all_gather(gathered, result.contiguous(), axis).wait()
                by_rank = gathered.view(axis.size, -1)
                result = by_rank.amax(0) if op == "max" else by_rank.amin(0)
        return result.to(values.device)
