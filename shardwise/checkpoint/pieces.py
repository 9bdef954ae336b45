# SPDX-License-Identifier: Apache-2.0
"""Pieces: the part of each tensor that a rank holds, which of them it writes, their host copies.

The layout says which ranks hold the same piece. So all ranks choose the same writer, without a
message, and the first rank of a tile describes where all of its elements are:

    hsdp, 2 x 2 ranks        rank 0   rank 1   rank 2   rank 3
    holds                    A' B'    A" B"    A' B'    A" B"     ' and ": the halves of A and B
    writes                   A'       A"       B'       B"        the largest tensor first, to the
                                                                  replicas with the fewest bytes
    describes                A: rank 0, rank 1;  B: rank 2, rank 3

Experts of all ranks are stored as one tensor if a rank holds them as one, and else one by one:

    rank 0   fc1.weight [2, out, in]   experts 0, 1   -->   stored   fc1.weight [4, out, in]
    rank 1   fc1.weight [2, out, in]   experts 2, 3

    or       fc1.weight0, fc1.weight1, ...            -->            fc1.weight0, fc1.weight1, ...

A load finds an expert in either form, by its number over all ranks. Optimizer states are stored
like their parameters, and a step count for every expert. The order of gate and up is stored too,
and a load into another order permutes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.errors import DamagedError
from shardwise.checkpoint.table import Tile, first_element, piece_name, runs_of
from shardwise.core.cut import Cut
from shardwise.core.layout import Shape
from shardwise.core.streams import Lanes
from shardwise.core.tensor import ShardedTensor
from shardwise.moe.activation import convert_gate_up
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear
from shardwise.moe.keys import indexed_keys

_ALIGNMENT = 64
Rename = Callable[[str], str]


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor that a load fills."""

    name: str  # of the parameter or buffer
    state: str | None  # the key of the state of that parameter
    shape: Shape  # of the whole tensor
    offsets: Shape
    data: Tensor  # a view of the live tensor


def local_boxes(tensor: Tensor) -> list[tuple[Shape, Tensor]]:
    """(offsets, view) of this rank's boxes of a tensor."""
    if isinstance(tensor, ShardedTensor):
        views = tensor.cut.views(tensor.to_local().detach())
        boxes = zip(tensor.cut.boxes, views, strict=True)
        return [(tuple(offsets), view) for (offsets, _), view in boxes]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []  # this rank is not on the mesh of the tensor
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        data = tensor.to_local().detach()
        return [(tuple(chunk.offsets), data)] if data.numel() else []
    return [((0,) * tensor.dim(), tensor.detach())]


# ------------------------------------------------------------------------------ writers


@dataclass(frozen=True)
class Part:
    """A tile of a stored tensor, and the ranks in whose files its elements are."""

    key: str
    dtype: torch.dtype
    shape: Shape
    tile: Tile
    sharded: bool  # else every rank has all of it, and may say so


@dataclass
class Division:
    """What this rank writes, and what it describes."""

    written: dict[str, Tensor] = field(default_factory=dict)  # by name in the file
    parts: list[Callable[[], Part]] = field(default_factory=list)  # described later, in any thread
    starts: dict[str, str] = field(default_factory=dict)  # by key: the piece that begins a tile


def divide(
    tensors: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    *,
    first_only: Collection[str] = (),
    members: Mapping[str, Stack] | None = None,
) -> Division:
    """Divide the tensors among the ranks. Every piece has one writer.

    ``first_only``: keys that rank 0 writes: tensors that may differ between ranks. ``members``: how
    tensors of experts are stored.
    """
    members = members or {}
    everyone = _Holders(numpy.arange(world_size).reshape(1, -1))
    first = _Holders(numpy.zeros((1, 1), int))
    alone = _Holders(numpy.full((1, 1), rank))
    known: dict[Any, _Holders | None] = {}  # ranks of equal meshes share the count of bytes

    def equal(ranks: Any) -> _Holders | None:
        if ranks is None:
            return None
        same = ranks.shape, ranks.tobytes()
        return known.get(same) or known.setdefault(same, _Holders(ranks))

    def holders(key: str, tensor: Tensor) -> _Holders | None:
        if key in first_only:
            return first
        if isinstance(tensor, ShardedTensor):
            tile = tensor.cut.tile
            dims = None if tile is None else tuple(dim is None for dim in tile.dims)
            mesh = id(tensor.cut.full_mesh), tensor.cut.sharded, dims
            if mesh not in known:
                known[mesh] = equal(_holders_of(tensor))
            return known[mesh]
        if isinstance(tensor, DTensor):
            return equal(_holders_of(tensor))
        return alone if key in members and members[key].spread else everyone

    offers = []
    for key, tensor in tensors.items():
        if (of := holders(key, tensor)) is not None:
            offers.append((-_nbytes(tensor), key, of))
    division = Division()
    # Ranks with the same holders have the same tensors of the same sizes: all choose the same.
    for _, key, of in sorted(offers, key=lambda offer: offer[:2]):
        _add(division, key, tensors[key], of, rank, members.get(key))
    return division


class _Holders:
    """The ranks that hold a tensor: a row for each piece, a column for each replica."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks
        self._loads = numpy.zeros(ranks.shape, numpy.int64)  # bytes that each rank writes

    def writers(self, first: int, nbytes: Any) -> Any:
        """The writer of each of the pieces from ``first`` on: the replica with the fewest bytes."""
        rows = numpy.arange(first, first + len(nbytes))
        if self.ranks.shape[1] == 1:
            return self.ranks[rows, 0]
        columns = self._loads[rows].argmin(1)
        self._loads[rows, columns] += nbytes + 1  # 1: for empty tensors
        return self.ranks[rows, columns]


def _holders_of(tensor: DTensor) -> Any:
    """The ranks that hold a DTensor, as in ``_Holders``; for torch's own, whose other pieces are
    not known here, the ranks that hold this rank's piece. None: this rank is not on the mesh."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return None
    grid = mesh.mesh.cpu().numpy()
    if not isinstance(tensor, ShardedTensor):
        # Every placement that does not replicate cuts: torch's strided shards are no ``Shard``.
        where = tuple(
            slice(None) if placement.is_replicate() else position
            for position, placement in zip(place, tensor.placements, strict=True)
        )
        return numpy.sort(grid[where].reshape(1, -1))
    cut, data_axes = tensor.cut, len(tensor.cut.sharded)
    dims = () if cut.tile is None else cut.tile.dims
    cut_axes = tuple(
        slice(None) if dim is None else place[data_axes + axis] for axis, dim in enumerate(dims)
    )
    grid = grid[(slice(None),) * data_axes + cut_axes]
    # The inner axis is the major one, as in ``shard_range``.
    sharded = [axis for axis in reversed(range(data_axes)) if cut.sharded[axis]]
    rest = [axis for axis in range(grid.ndim) if axis not in sharded]
    return grid.transpose(*sharded, *rest).reshape(cut.num_holders, -1)


def _add(
    division: Division, key: str, tensor: Tensor, of: _Holders, rank: int, stack: Stack | None
) -> None:
    """Add a tensor to what this rank writes and describes."""
    shape, sharded = tuple(tensor.shape), isinstance(tensor, DTensor)
    data, low = tensor.detach(), 0
    offsets, sizes = (0,) * len(shape), shape
    held = None  # the pieces of a tile: the number of the first holder, the elements of each
    if isinstance(tensor, ShardedTensor):
        data, low = tensor.to_local().detach(), tensor.cut.piece[0]
        held = _held(tensor.cut)
        if tensor.cut.tile is not None:
            offsets, sizes = tensor.cut.tile.box
    elif isinstance(tensor, DTensor):
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        data, offsets, sizes = tensor.to_local().detach(), tuple(chunk.offsets), tuple(chunk.sizes)
    if stack is not None:
        key = stack.key
        if stack.grouped:
            if not shape:  # one count for all experts of this rank: stored for each
                data, offsets, sizes = data.expand(len(stack.here)), (0,), (len(stack.here),)
            shape = (len(stack.everywhere), *shape[1:])
            offsets = (offsets[0] + stack.first, *offsets[1:])
    first, lengths = held or (0, numpy.array([math.prod(sizes)]))
    writers = of.writers(first, lengths * tensor.dtype.itemsize)
    whole = data.numel() == math.prod(shape)
    if (data.numel() or whole) and rank in writers:
        name = piece_name(key, first_element(shape, offsets, sizes, low), whole)
        division.written[name] = data
        if sharded and low == 0:
            division.starts[key] = name
    # The first rank of a tile describes it. Of torch's DTensors each piece is a tile.
    if rank == of.ranks[0, 0]:
        dtype = tensor.dtype

        def describe() -> Part:
            order = slice(None) if held is None else _order(tensor.cut)  # type: ignore[attr-defined]
            runs = runs_of(writers[order], lengths[order])
            return Part(key, dtype, shape, Tile(offsets, sizes, tuple(runs)), sharded)

        division.parts.append(describe)


def _held(cut: Cut) -> tuple[int, Any]:
    """(first, lengths) of a tile's pieces: holder ``first + i`` has ``lengths[i]`` elements."""
    if cut.division is not None:
        lengths = numpy.zeros(cut.num_holders, numpy.int64)
        for holder, (low, high) in cut.held():
            lengths[holder] = high - low
        return 0, lengths
    part = cut.layout.numel // cut.num_holders  # elements of the buffer that each rank holds
    start, numel = cut.layout.starts[cut.index], cut.layout.items[cut.index].numel
    first, last = start // part, (start + numel - 1) // part
    lengths = numpy.full(last - first + 1, part)
    lengths[0] -= start - first * part
    lengths[-1] -= (last + 1) * part - (start + numel)
    return first, lengths


def _order(cut: Cut) -> Any:
    """The order of a tile's pieces, of those that ``_held`` lists: replicas divide in any order."""
    if cut.division is None:
        return slice(None)
    begins = {holder: low for holder, (low, high) in cut.held() if low < high}
    return sorted(begins, key=begins.__getitem__)


# ------------------------------------------------------------------------------ host memory


class Staging:
    """Host memory from which a background save writes while training changes the tensors.

    device   | weight | exp_avg | ...           copied once, then training continues
    host     |weight|exp_avg|..... one block, kept from save to save .....|
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # grows to the largest save

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors to host memory. The copies are complete on return."""
        begins, end = [], 0
        for tensor in tensors.values():
            begins.append(end)
            end += -(-_nbytes(tensor) // _ALIGNMENT) * _ALIGNMENT
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        if self._block.numel() < end:
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one first
            pinned = bool(devices)
            self._block = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        staged = {}
        for (name, tensor), begin in zip(tensors.items(), begins, strict=True):
            host = self._block[begin : begin + _nbytes(tensor)].view(tensor.dtype)
            staged[name] = host.view(tensor.shape).copy_(tensor, non_blocking=True)
        for device in devices:
            Lanes(device).synchronize()
        return staged


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


# ------------------------------------------------------------------------------ experts


@dataclass(frozen=True)
class Stack:
    """The experts of a parameter of this rank, or of a state of it, as they are stored."""

    name: str  # of the stored parameter: of all experts if ``grouped``, else of this one
    here: tuple[str, ...]  # names of this rank's experts; a single name if not ``grouped``
    everywhere: tuple[str, ...]  # names of the experts of all ranks
    grouped: bool  # whether dimension 0 counts experts
    first: int  # number of the first expert of this rank
    order: str | None = None  # name of the extra state that holds the order of gate and up
    block: int = 0  # the order of gate and up on this rank
    key: str = ""  # of the stored tensor

    @property
    def spread(self) -> bool:
        """Whether other ranks have other experts."""
        return len(self.everywhere) > len(self.here)

    @property
    def stored(self) -> tuple[str, ...]:
        """The names under which all ranks together store these experts."""
        return (self.name,) if self.grouped else self.everywhere

    def state(self, key: str, keys: Iterable[str]) -> tuple[Stack, str]:
        """The stack of the state ``key`` of this parameter, and the key of the state of a stored
        expert. ``keys`` are those of all states of the parameter. Optimizers of whole matrices have
        a state for each expert, with the number of the matrix in the key: ``left.3``."""
        base, _, number = key.rpartition(".")
        num_states = sum(other.rpartition(".")[0] == base for other in keys)
        if not self.grouped or not base or not number.isdigit() or num_states % len(self.here):
            return self, key
        num_matrices = num_states // len(self.here)  # of one expert
        expert, matrix = divmod(int(number), num_matrices)
        stack = replace(
            self,
            name=self.here[expert],
            here=self.here[expert : expert + 1],
            everywhere=self.everywhere[expert :: len(self.here)],
            grouped=False,
        )
        return stack, base if num_matrices == 1 else f"{base}.{matrix}"

    def expert_shape(self, shape: Shape) -> Shape:
        """The shape of one expert's tensor. A step count has no dimension of experts."""
        return shape[1:] if self.grouped and shape else shape

    def live_shape(self, of_one: Shape) -> Shape:
        return (len(self.here), *of_one) if self.grouped and of_one else of_one

    def pieces(self, state: str | None, shape: Shape, offsets: Shape, data: Tensor) -> list[Piece]:
        """The boxes of single experts in a box of the live tensor."""
        of_one = self.expert_shape(shape)
        if not self.grouped or not data.dim():
            return [Piece(self.here[0], state, of_one, offsets, data)]
        names = self.here[offsets[0] : offsets[0] + len(data)]
        experts = zip(names, data, strict=True)
        return [Piece(name, state, of_one, offsets[1:], expert) for name, expert in experts]

    def reorders(self, extra_states: Mapping[str, Any]) -> bool:
        """Whether a checkpoint holds gate and up in another order."""
        return self.order is not None and self._stored_block(extra_states) != self.block

    def stored_rows(self, num_rows: int, extra_states: Mapping[str, Any]) -> Tensor | None:
        """For each row of the live tensor the row in the checkpoint; None if all are equal."""
        if not self.reorders(extra_states):
            return None
        stored = self._stored_block(extra_states)
        try:
            return convert_gate_up(torch.arange(num_rows, device="cpu"), stored, self.block, 0)
        except (ValueError, RuntimeError) as error:
            raise DamagedError(f"'{self.order}' in the checkpoint: {error}") from error

    def _stored_block(self, extra_states: Mapping[str, Any]) -> int:
        assert self.order is not None
        try:
            block: int = extra_states[self.order]["gate_up_block"]
        except (LookupError, TypeError) as error:
            raise DamagedError(f"'{self.order}' in the checkpoint holds no order") from error
        return block


def stacks_of(model: nn.Module, clean: Rename) -> dict[str, Stack]:
    """The stacks of all expert parameters of a model, by name of the parameter."""
    stacks: dict[str, Stack] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, GroupedLinear):
            continue
        prefix = clean(f"{path}.") if path else ""
        order, block = None, 0
        if isinstance(module, GateUpLinear):
            order, block = f"{prefix}_extra_state", module.gate_up_block
        first = module.first_expert
        for kind, layout in module.layouts.items():
            everywhere = tuple(indexed_keys(prefix, kind, module.total_experts))
            here = tuple(indexed_keys(prefix, kind, module.num_experts, first))
            name = f"{prefix}{kind}"
            if layout == "grouped":
                stacks[name] = Stack(name, here, everywhere, True, first, order, block)
                continue
            for index, stored in enumerate(here):
                same_index = everywhere[index :: module.num_experts]  # of all ranks
                number = first + index
                stacks[f"{name}{index}"] = Stack(
                    stored, (stored,), same_index, False, number, order, block
                )
    return stacks
