# SPDX-License-Identifier: Apache-2.0
"""Pieces: the boxes of tensors that a rank holds, which of them it writes, and their host copies.

DCP's planner gathers the boxes of all ranks on one rank, removes duplicates and scatters the rest.
shardwise knows from the layout which boxes a rank holds and which ranks hold the same boxes. So
all ranks compute the same division, without a message:

    hsdp, 2 x 2 ranks        rank 0   rank 1   rank 2   rank 3
    holds                    A B C    D E F    A B C    D E F      A, D... boxes of tensors
    replicas of its boxes    0, 2     1, 3     0, 2     1, 3
    writes                   A C      D F      B        E          the largest box first, to the
                                                                   replica with the fewest bytes

Each expert is stored under its number over all ranks, in any layout and on any number of ranks:

    rank 0   fc1.weight [2, out, in]   experts 0, 1         stored   fc1.weight0   [out, in]
    rank 1   fc1.weight [2, out, in]   experts 2, 3    <-->          fc1.weight1
                                                                     fc1.weight2   any layout, any
    or       fc1.weight0, .weight1, ...                              fc1.weight3   number of ranks

Optimizer states are stored like their parameters, and a step count with every expert. The order of
gate and up is stored too, and a load into another order permutes rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.errors import DamagedError
from shardwise.core.layout import Shape
from shardwise.core.streams import Lanes
from shardwise.core.tensor import ShardedTensor
from shardwise.moe.activation import convert_gate_up
from shardwise.moe.grouped_linear import GateUpLinear, GroupedLinear
from shardwise.moe.keys import indexed_keys

_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor."""

    key: str
    shape: Shape  # of the whole tensor
    offsets: Shape
    data: Tensor  # a view of the live tensor, or its copy in host memory


def local_pieces(key: str, tensor: Tensor) -> list[Piece]:
    """This rank's boxes of a tensor, as views: a save reads them, a load writes them."""
    shape = tuple(tensor.shape)
    if isinstance(tensor, ShardedTensor):
        views = tensor.cut.views(tensor.to_local().detach())
        return [
            Piece(key, shape, tuple(offsets), view)
            for (offsets, _), view in zip(tensor.cut.boxes, views, strict=True)
        ]
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []  # this rank is not on the mesh of the tensor
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        data = tensor.to_local().detach()
        return [Piece(key, shape, tuple(chunk.offsets), data)] if data.numel() else []
    return [Piece(key, shape, (0,) * tensor.dim(), tensor.detach())]


def pieces_to_write(
    tensors: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    *,
    first_only: Collection[str] = (),
    on_every_rank: Collection[str] = (),
) -> list[Piece]:
    """The pieces that this rank writes, largest first; every piece has one writer.

    Args:
        first_only: keys that only rank 0 writes: tensors that may differ between ranks.
        on_every_rank: keys of plain tensors that every rank writes, because they have other names
            in the checkpoint on other ranks.
    """

    def replicas(key: str, tensor: Tensor) -> tuple[int, ...]:
        if key in first_only:
            return (0,)
        if isinstance(tensor, DTensor):
            return replicas_of(tensor)
        return (rank,) if key in on_every_rank else tuple(range(world_size))

    offers = []
    for key, tensor in tensors.items():
        if holders := replicas(key, tensor):
            pieces = local_pieces(key, tensor)
            offers.append((-sum(piece.data.nbytes for piece in pieces), key, holders, pieces))
    written: list[Piece] = []
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # heaps of (bytes, rank)
    # Ranks with the same replicas have the same tensors of the same sizes: all choose the same.
    for negative_size, _, holders, pieces in sorted(offers, key=lambda offer: offer[:2]):
        heap = loads.setdefault(holders, [(0, holder) for holder in holders])
        load, writer = heap[0]
        heapq.heapreplace(heap, (load + 1 - negative_size, writer))  # 1: for empty tensors
        if writer == rank:
            written += pieces
    return written


def replicas_of(tensor: DTensor) -> tuple[int, ...]:
    """The ranks that hold the same boxes of a tensor as this rank, this rank included."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    # Every placement that does not replicate cuts: torch's strided shards are no ``Shard``.
    where = tuple(
        slice(None) if placement.is_replicate() else position
        for position, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return tuple(sorted(torch.atleast_1d(mesh.mesh[where]).flatten().tolist()))


# ------------------------------------------------------------------------------ host memory


class Staging:
    """Host memory from which a background save writes while training changes the tensors.

    device   | weight | exp_avg | ...           copied once, then training continues
    host     |weight|exp_avg|..... one block, kept from save to save .....|
                ^ a tensor whose storage is exactly its bytes: torch.save writes whole storages
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # grows to the largest save

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy the pieces to host memory. The copies are complete on return."""
        begins, end = [], 0
        for piece in pieces:
            begins.append(end)
            end += -(-piece.data.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {piece.data.device for piece in pieces if piece.data.device.type == "cuda"}
        if self._block.numel() < end:
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old one first
            pinned = bool(devices)
            self._block = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        staged = []
        for piece, begin in zip(pieces, begins, strict=True):
            host = _own_storage(self._block[begin : begin + piece.data.nbytes], piece.data)
            host.copy_(piece.data, non_blocking=True)
            staged.append(replace(piece, data=host))
        for device in devices:
            Lanes(device).synchronize()
        return staged


def on_host(data: Tensor) -> Tensor:
    """The tensor in host memory with a storage of exactly its bytes, copied only if necessary."""
    data = data.detach().resolve_conj().resolve_neg()
    if data.device.type != "cpu" or not data.is_contiguous():
        return data.to("cpu").contiguous()
    if data.untyped_storage().nbytes() == data.nbytes:
        return data
    return _own_storage(data.reshape(-1).view(torch.uint8), data)


def _own_storage(memory: Tensor, like: Tensor) -> Tensor:
    """Bytes of a larger block as a tensor whose storage is these bytes alone; no copy."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    # Through numpy: a view made by torch would share, and save, the storage of the whole block.
    return torch.from_numpy(memory.numpy()).view(like.dtype).view(like.shape)


Rename = Callable[[str], str]


@dataclass(frozen=True)
class Stack:
    """The stored tensors, one per expert, of a parameter of this rank or of a state of it."""

    here: tuple[str, ...]  # names of this rank's experts; a single name if not ``grouped``
    everywhere: tuple[str, ...]  # names of the experts of all ranks
    grouped: bool  # whether dimension 0 counts experts
    order: str | None = None  # name of the extra state that holds the order of gate and up
    block: int = 0  # the order of gate and up on this rank

    def renamed(self, rename: Rename) -> Stack:
        here, everywhere = map(rename, self.here), map(rename, self.everywhere)
        return replace(self, here=tuple(here), everywhere=tuple(everywhere))

    @property
    def spread(self) -> bool:
        """Whether other ranks have other experts."""
        return len(self.everywhere) > len(self.here)

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
            here=self.here[expert : expert + 1],
            everywhere=self.everywhere[expert :: len(self.here)],
            grouped=False,
        )
        return stack, base if num_matrices == 1 else f"{base}.{matrix}"

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape of one expert's tensor. A step count has no dimension of experts."""
        return shape[1:] if self.grouped and shape else shape

    def live_shape(self, stored: Shape) -> Shape:
        return (len(self.here), *stored) if self.grouped and stored else stored

    def pieces(self, piece: Piece) -> list[Piece]:
        """The stored pieces of a piece of the live tensor, as views of it."""
        offsets, data, shape = piece.offsets, piece.data, self.stored_shape(piece.shape)
        if not self.grouped:
            return [Piece(self.here[0], shape, offsets, data)]
        if not data.dim():
            return [Piece(name, shape, (), data) for name in self.here]
        names = self.here[offsets[0] : offsets[0] + len(data)]
        experts = zip(names, data, strict=True)
        return [Piece(name, shape, offsets[1:], expert) for name, expert in experts]

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
        for name, layout in module.layouts.items():
            everywhere = tuple(indexed_keys(prefix, name, module.total_experts))
            here = tuple(indexed_keys(prefix, name, module.num_experts, module.first_expert))
            if layout == "grouped":
                stacks[f"{prefix}{name}"] = Stack(here, everywhere, True, order, block)
                continue
            for index, stored in enumerate(here):
                same_index = everywhere[index :: module.num_experts]  # of all ranks
                stacks[f"{prefix}{name}{index}"] = Stack((stored,), same_index, False, order, block)
    return stacks
