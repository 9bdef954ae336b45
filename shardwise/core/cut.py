# SPDX-License-Identifier: Apache-2.0
"""Cut: where the pieces of one tensor lie, and the collectives that use this.

A parameter is packed with others in a flat buffer, so the layout decides how long its pieces are:
they are uneven, some ranks have none, and with an element grain a cut can be inside a row.

    shard    |        0         |        1         |        2        |
    buffer   | wq rows 0-3 | wk rows 0-1 | 2-4 | wv rows 0-3 |..pad..|
    wk       |             | rows 0-1    | 2-4 |                          pieces [0,2) [2,5) [5,5)

``gather`` makes the whole tensor from the pieces, ``reduce`` makes one value from the values of all
ranks. Both run over the axes that cut the tensor: ranks of the other axes hold the same bytes.

Under tensor parallelism the layout's item is a *tile* of the whole tensor (see tile.py). Pieces
count the elements of the tile; shapes, boxes, ``gather``, ``take`` and ``reduce`` are about the
whole tensor.

Replicas may also *divide* a tensor (division.py): instead of the same piece, each replica holds the
part that it works on. Under ``hsdp()`` the gradients and momenta of whole matrices are divided so,
while the weights are replicated.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardwise.core import comm
from shardwise.core.compat import BEFORE_2_13, DTensorSpec, TensorMeta
from shardwise.core.division import Division
from shardwise.core.layout import Box, Layout, Shape
from shardwise.core.mesh import Ranks
from shardwise.core.placements import REPLICATE, SHARD, Placement
from shardwise.core.tile import Tile

Op = Literal["sum", "max", "min"]


class Backing:
    """The memory behind ShardedTensors (a ``Buffer``), and what its writers must know of each
    other. Ranks count the same writes: operations on parameters at rest, steps, loads, moves."""

    def __init__(self) -> None:
        self.writes = 0
        # For each divided item, the elements that each replica's optimizer works on. The gradient
        # is reduced to these only. The optimizer sets it, alike on every rank, always as a new
        # dictionary.
        self.divisions: dict[int, Division] = {}
        # The items whose earlier microbatches wait to be reduced: no optimizer may step then.
        # Setting ``.grad`` removes the item, and the next backward drops what waited.
        self.waiting: set[int] = set()
        # Made after wrapping (on the meta device): replicas may differ until the first forward.
        self.unsynced = False
        # Makes a writer wait for another lane that reads the memory, or reduces into it.
        self.reading: Callable[[], None] | None = None
        self.before_step: Callable[[], Any] = bool  # called before an optimizer writes

    def await_readers(self) -> None:
        """Wait, before a write, for gathers that still read the memory."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading()

    def wrote(self) -> None:
        """Count a write that comes next or has just come, and wait for gathers that still read."""
        self.writes += 1
        self.await_readers()

    def __deepcopy__(self, memo: dict[int, Any]) -> Backing:
        """A copied gradient needs the divisions. The rest belongs to the unit, which is not
        copied."""
        copied = memo[id(self)] = Backing()
        copied.writes, copied.divisions = self.writes, self.divisions
        return copied


class Rows(Shard):
    """``Shard(0)`` over uneven rows, with their true sizes.

    torch computes from ``placements`` which rows of a full tensor a rank should copy into
    ``to_local()`` (``set_model_state_dict(broadcast_from_rank0=True)`` does). The rows of
    ``torch.chunk`` would be wrong, without an error. A DTensor that ``distribute_tensor`` or
    ``from_local`` made with this placement can be copied or added to a ShardedTensor. Its other
    operations are torch's own, and those that move rows are refused.
    """

    cut: Cut
    rows: tuple[int, int] | None  # of this rank, [begin, end); None if cuts are inside rows
    last: bool  # whether this is the last axis that cuts the rows

    def __init__(self, cut: Cut, rows: tuple[int, int] | None, *, last: bool) -> None:
        super().__init__(0)
        # torch's placements refuse attributes in some versions (frozen dataclasses).
        self.__dict__.update(cut=cut, rows=rows, last=last)

    def __eq__(self, other: object) -> bool:
        """Equal to the same rows on the same ranks alone: torch caches the placements of results,
        and must not give one tensor other rows. Torch before 2.13 asks for ``Shard(0)`` when it
        checks a new DTensor."""
        if BEFORE_2_13 and sys._getframe(1).f_code.co_name == "_verify_shard_order":
            return not self != other
        return isinstance(other, Rows) and self.cut.matches(other.cut)

    def __ne__(self, other: object) -> bool:
        """No other than ``Shard(0)``, for torch's check of a new DTensor."""
        if isinstance(other, Rows):
            return not self.cut.matches(other.cut)
        return not (type(other) is Shard and other.dim == 0)

    def __hash__(self) -> int:
        return hash((Rows, self.cut.shape, self.cut.sharded))

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return self  # a value

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, Any]:
        if self.rows is None:
            raise NotImplementedError(
                f"'{self.cut.name}' is cut inside its rows, so no block of rows is this rank's "
                f"piece: copy the full tensor into the parameter (every rank takes its piece), for "
                f"example with full_state_dict=True and broadcast_from_rank0=False"
            )
        # All sharded axes cut the same rows: the last one reports them, the others report all.
        begin, end = self.rows if self.last else (0, curr_local_size)
        return end - begin, begin

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"the rows of '{self.cut.name}' lie unevenly over the ranks, and a plain DTensor "
            f"cannot move them: use the ShardedTensor's full_tensor()"
        )

    def _shard_tensor(
        self, tensor: Tensor, mesh: Any, mesh_dim: int, src_data_rank: Any = 0
    ) -> Tensor:
        """This rank's rows of the first rank's values, for ``distribute_tensor``."""
        if self.cut.tile is not None:  # torch would go on to cut these rows over the other axes
            self._refuse()
        axis = Ranks(mesh).axes[mesh_dim]
        if src_data_rank is not None and axis.size > 1 and not tensor.is_meta:
            tensor = tensor.detach().contiguous().clone()
            comm.broadcast(tensor, axis).wait()
        return self.cut.take(tensor).contiguous() if self.last else tensor

    _split_tensor = _select_split_tensor = _to_replicate_tensor = _refuse
    _replicate_to_shard = _reduce_shard_tensor = _to_new_shard_dim = _refuse


@dataclass(frozen=True, eq=False)
class Cut:
    """The pieces of item ``index`` of a layout over a mesh. A parameter, its gradient and its
    optimizer states share one object. A rank holds a run of consecutive shards, so the buffer may
    be cut finer than the mesh."""

    layout: Layout
    index: int
    ranks: Ranks
    sharded: tuple[bool, ...]  # per mesh axis, outer to inner; the True ones are a suffix
    division: Division | None = None  # between replicas: see :meth:`divided`
    tile: Tile | None = None  # None: the item is the whole tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        return self  # a value, and its mesh can't be copied

    # ------------------------------------------------------------------ where the pieces lie

    @property
    def name(self) -> str:
        return self.layout.items[self.index].name

    @cached_property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.item_shape if self.tile is None else self.tile.shape)

    @property
    def mesh(self) -> DeviceMesh:
        """The data-parallel mesh."""
        return self.ranks.mesh

    @property
    def full_mesh(self) -> DeviceMesh:
        """The mesh of the DTensors: ``mesh``, and the axes of the tile inside of it."""
        return self.mesh if self.tile is None else self.tile.mesh

    @property
    def item_shape(self) -> Shape:
        """The shape of the item in the layout: the whole tensor, or its tile."""
        return self.layout.items[self.index].shape

    @cached_property
    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @cached_property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def _placed(self) -> list[Placement]:
        return [SHARD if sharded else REPLICATE for sharded in self.sharded]

    @cached_property
    def num_holders(self) -> int:
        return self.ranks.num_shards(self._placed)

    @property
    def _num_replicas(self) -> int:
        """The number of replicas that divide each run of shards."""
        return 1 if self.division is None else len(self.division)

    @property
    def _num_runs(self) -> int:
        """The number of runs of shards that the layout is cut into."""
        return self.num_holders // self._num_replicas

    def divided(self, division: Division) -> Cut:
        """This cut with the pieces divided between replicas, so each rank holds another part."""
        assert len(division) * self.num_holders == self.mesh.size() and self.division is None
        if division not in self._divided:
            all_axes = (True,) * self.mesh.ndim
            self._divided[division] = replace(self, sharded=all_axes, division=division)
        return self._divided[division]

    @cached_property
    def _divided(self) -> dict[Division, Cut]:
        return {}

    @cached_property
    def shard_index(self) -> int:
        """The number of this rank's part, among ``num_holders``."""
        return self.ranks.held(self._placed, self.num_holders)[0]

    @property
    def _run_length(self) -> int:
        """The number of shards in a run."""
        return self.layout.num_shards // self._num_runs

    @cached_property
    def piece(self) -> tuple[int, int]:
        """The elements [lo, hi) of the item that this rank holds; (0, 0) for none."""
        length = self._run_length
        run, replica = divmod(self.shard_index, self._num_replicas)
        lo, hi = self.layout.piece(self.index, run * length, length)
        if self.division is not None:
            return self.division.part(replica, run, lo, hi)
        return (lo, hi) if lo < hi else (0, 0)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The piece of every holder."""
        pieces = [(0, 0)] * self.num_holders
        for holder, piece in self.held():
            pieces[holder] = piece
        return tuple(pieces)

    def held(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """(holder, piece) for each holder that has elements: few of thousands of ranks may."""
        length, shards = self._run_length, self.layout.holders(self.index)
        for run in range(shards[0] // length, shards[-1] // length + 1):
            lo, hi = self.layout.piece(self.index, run * length, length)
            if self.division is None:
                yield run, (lo, hi)
                continue
            for replica, piece in self.division.parts(run, lo, hi):
                yield run * len(self.division) + replica, piece

    @cached_property
    def local_shape(self) -> torch.Size:
        return torch.Size(self.layout.piece_shape(self.index, *self.piece))

    @cached_property
    def in_rows(self) -> bool:
        """Whether every holder has whole rows (the same answer on every rank)."""
        row = math.prod(self.item_shape[1:])
        return len(self.shape) > 0 and not any(lo % row or hi % row for _, (lo, hi) in self.held())

    @cached_property
    def _chunks(self) -> tuple[Box, ...]:
        """This rank's piece as (offsets, sizes) boxes of the item."""
        lo, hi = self.piece
        return self.layout.chunks(self.index, lo, hi) if lo < hi else ()

    @cached_property
    def boxes(self) -> tuple[tuple[torch.Size, torch.Size], ...]:
        """This rank's piece as (offsets, sizes) boxes of the whole tensor, for checkpoints."""
        first = (0,) * len(self.shape) if self.tile is None else self.tile.box[0]
        return tuple(
            (torch.Size(map(sum, zip(first, offsets, strict=True))), torch.Size(sizes))
            for offsets, sizes in self._chunks
        )

    def views(self, local: Tensor) -> list[Tensor]:
        """The memory of each of these boxes in ``local``, this rank's piece."""
        shapes = [sizes for _, sizes in self._chunks]
        parts = local.view(-1).split([math.prod(sizes) for sizes in shapes])  # in order, adjacent
        return [part.view(sizes) for part, sizes in zip(parts, shapes, strict=True)]

    def matches(self, other: Cut) -> bool:
        """Whether both cuts put the same elements on the same ranks."""
        if self is other:
            return True
        if (self.sharded, self.mesh, self.tile) != (other.sharded, other.mesh, other.tile):
            return False
        same = self.index == other.index and self.division == other.division
        if self.layout is other.layout and same:
            return True
        return self.shape == other.shape and self.pieces == other.pieces

    def is_part_of(self, other: Cut) -> bool:
        """Whether the cuts match, or would if replicas divided ``other`` as they divide this."""
        if self.division is None or other.division is not None:
            return self.matches(other)
        return self.layout is other.layout and self.index == other.index

    def take(self, full: Tensor) -> Tensor:
        """This rank's piece of a full tensor, as a view if possible."""
        lo, hi = self.piece
        if self.tile is not None:
            full = self.tile.take(full)
        if len(self.shape) and self.local_shape[1:] == self.item_shape[1:]:
            row = math.prod(self.item_shape[1:])
            return full[lo // row : hi // row]
        return full.reshape(-1)[lo:hi].view(self.local_shape)

    def within(self, coarse: Cut, local: Tensor) -> Tensor:
        """This rank's piece as a view of ``local``, this rank's piece under the cut ``coarse``."""
        if self.matches(coarse):
            return local
        (lo, hi), (begin, end) = self.piece, coarse.piece
        if lo == hi:
            return local.new_empty(self.local_shape)
        if not begin <= lo < hi <= end:
            raise RuntimeError(
                f"'{self.name}': elements {lo} to {hi} are needed from a tensor that has {begin} "
                f"to {end} on this rank: it was made for another optimizer. Call zero_grad() after "
                f"building an optimizer, and run backward again"
            )
        return local.reshape(-1)[lo - begin : hi - begin].view(self.local_shape)

    def spec(self, dtype: torch.dtype) -> DTensorSpec | None:
        """The whole tensor as torch's DTensor describes it; None in a plan, which needs none."""
        spec = self._specs.get(dtype)
        if spec is None and self.mesh.device_type == "meta":
            return None
        if spec is None:
            meta = TensorMeta(self.shape, self.stride, dtype)
            placements = self._placements
            spec = self._specs[dtype] = DTensorSpec(self.full_mesh, placements, tensor_meta=meta)
        return spec

    @cached_property
    def _specs(self) -> dict[torch.dtype, DTensorSpec]:
        return {}

    @cached_property
    def _placements(self) -> tuple[Replicate | Shard, ...]:
        dims = [0 if sharded else None for sharded in self.sharded]
        rows, first = None, 0
        if self.tile is not None:
            dims += self.tile.dims
            first = self.tile.box[0][0] if self.shape else 0
        if self.in_rows:
            row = math.prod(self.item_shape[1:])
            rows = (first + self.piece[0] // row, first + self.piece[1] // row)
        placements: list[Replicate | Shard] = [
            Replicate() if dim is None else Shard(dim) for dim in dims
        ]
        over_rows = [axis for axis, dim in enumerate(dims) if dim == 0]
        for axis in over_rows:
            placements[axis] = Rows(self, rows, last=axis == over_rows[-1])
        return tuple(placements)

    # ------------------------------------------------------------------ collectives

    @cached_property
    def _piece_axes(self) -> tuple[comm.Axis, ...]:
        """The data-parallel axes whose ranks hold different elements."""
        return self.ranks.chosen(self.sharded)

    @cached_property
    def axes(self) -> tuple[comm.Axis, ...]:
        """The axes whose ranks hold different elements, outer to inner."""
        return self._piece_axes + (self.tile.axes(cut=True) if self.tile is not None else ())

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor in new memory, on every rank (collective over ``axes``).

            rank 0 | a a . . . . |
            rank 1 | . . b b b . |  added up as integers, so that no bit changes  ->  a a b b b c
            rank 2 | . . . . . c |

        Pieces are uneven, and one rank may have everything: padding them to equal lengths for an
        all-gather could take as many times the memory as there are ranks.
        """
        if local.is_meta:
            return local.new_empty(self.shape)
        if not self.axes:
            return local.detach().clone().view(self.shape)
        flat = local.detach().reshape(-1).to(self.mesh.device_type)
        if self._piece_axes:
            nbytes = math.prod(self.item_shape) * flat.element_size()
            words = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=flat.device)
            whole = words.view(torch.uint8)[:nbytes].view(flat.dtype)
            whole[slice(*self.piece)] = flat
            for axis in self._piece_axes:
                comm.all_reduce(words, axis).wait()
            flat = whole
        full = flat.view(self.item_shape)
        return (full if self.tile is None else self.tile.join(full)).to(local.device)

    @cached_property
    def replica_axes(self) -> tuple[comm.Axis, ...]:
        """The axes whose ranks hold the same bytes, outer to inner."""
        tiles = self.tile.axes(cut=False) if self.tile is not None else ()
        return self.ranks.chosen(not sharded for sharded in self.sharded) + tiles

    @cached_property
    def norm_axes(self) -> tuple[comm.Axis, ...]:
        """The axes over which a norm is summed. The norm of spread experts includes the experts of
        other ranks, so that a total norm is the same on every rank."""
        others = self.ranks.others
        return self.axes if others is None else (*self.axes, others)

    def reduce(self, values: Tensor, op: Op, axes: tuple[comm.Axis, ...] | None = None) -> Tensor:
        """:func:`reduced` over ``axes``; None: over the axes that cut the tensor."""
        axes = self.axes if axes is None else axes
        if values.is_meta or not axes:
            return values
        return reduced(values.to(self.mesh.device_type), op, axes).to(values.device)


def reduced(values: Tensor, op: Op, axes: Sequence[comm.Axis]) -> Tensor:
    """The sum, maximum or minimum over ranks of ``values`` (one dimension), perhaps in place
    (collective). A maximum is taken from gathered values: NCCL's own drops a NaN, torch's does not.
    """
    for axis in axes:
        if op == "sum":
            comm.all_reduce(values, axis).wait()
        else:
            gathered = values.new_empty(axis.size * values.numel())
            comm.all_gather(gathered, values.contiguous(), axis).wait()
            by_rank = gathered.view(axis.size, -1)
            values = by_rank.amax(0) if op == "max" else by_rank.amin(0)
    return values
