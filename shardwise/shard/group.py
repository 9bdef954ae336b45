# SPDX-License-Identifier: Apache-2.0
"""Group: parameters alike in one flat buffer, and the life of their weights.

    main      fp32, placements.main      the source of all others; parameters at rest are DTensors
                                         over it
    staged    bf16, placements.compute   kept only where making it again from main would take a
                                         collective over one axis more each time (hfsdp)
    whole     bf16, all replicated       what forward and backward read, from gather to release; or
                                         fp8 codes, which the group's codec makes and reads

    zero(3)   main |##|  --encode + all-gather, each forward and backward-->  whole |########|
    zero(1)   main |##|  --encode + all-gather, once per optimizer step---->  whole |########| kept
    zero(0)   main |########|  is the whole weight itself, where the dtypes agree

A group does not know modules. ``gather`` is the only place where a compute weight is made from main
weights. It compares the number of writes to main, which all ranks count alike: steps of an
optimizer, operations on parameters at rest, loads, moves, and ``mark_written``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.buffer import Buffer
from shardwise.core.compat import plain_attributes
from shardwise.core.layout import Layout
from shardwise.core.memory import Block
from shardwise.core.mesh import Ranks
from shardwise.core.placements import REPLICATE, SHARD, Placement, Placements, steps
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tile import Tile
from shardwise.precision import Precision
from shardwise.shard.codec import Cast, Codec
from shardwise.shard.flow import Flow
from shardwise.shard.gradient import Gradients
from shardwise.shard.parameter import AnyLeaf, carry_attributes, leaf_over


class Planes:
    """The weights of a group at one placement, as a codec stores them: one block of memory for each
    buffer of the codec. They are made from a source: main, or other planes.

        main --encode--> | part | --gather over each axis--> | whole buffers |
    """

    def __init__(
        self,
        source: Buffer | Planes,
        codec: Codec,
        placements: Sequence[Placement],
        device: torch.device,
        kind: str = "compute",
    ) -> None:
        self.source, self.codec, self.placements = source, codec, tuple(placements)
        self.layout: Layout = source.layout
        self.ranks: Ranks = source.ranks
        self.dtype = codec.dtype
        self.first_shard, count = self.ranks.held(self.placements, self.layout.num_shards)
        room = codec.room(self.layout)
        self.sizes = [size for _, size in room]  # of a shard, in each buffer
        self.blocks = [Block(count * n, dtype, device, kind) for dtype, n in room]
        # How often main had been written when these were made; None: never, or released since.
        self.made_from: int | None = None
        self._steps: _Steps | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [block.tensor for block in self.blocks]

    @property
    def live(self) -> bool:
        return self.blocks[0].live

    def acquire(self) -> None:
        for block in self.blocks:
            block.acquire()

    def release(self) -> None:
        for block in self.blocks:
            block.release()
        self.made_from = None

    def make(self, writes: int) -> comm.Pending:
        """Make the weights from a main that was written so often; the caller waits for the last
        collective. (Each collective sends what the one before it received.)"""
        source, pending = self.source, comm.Pending()
        passing = isinstance(source, Planes) and not source.live
        if isinstance(source, Planes) and source.made_from != writes:
            source.acquire()
            source.make(writes).wait()
        if self._steps is None:
            self._steps = self._planned()
        encoded, stages = self._steps
        if encoded is not None:
            numbers = source.tensors[0] if isinstance(source, Planes) else source.flat
            self.codec.encode(numbers, encoded, self.layout, source.first_shard)
        for pairs, axis in stages:
            pending.wait()
            pending = comm.all_gather_together(pairs, axis)
        if passing:
            source.release()  # type: ignore[union-attr]
        self.made_from = writes
        return pending

    def _planned(self) -> _Steps:
        source, placements = self.source, list(self.source.placements)
        if isinstance(source, Planes):
            as_it_lies, sent = source.codec is self.codec, source.tensors
        else:
            same_device = source.flat.device == self.blocks[0].tensor.device
            as_it_lies, sent = self.codec.is_plain(source.dtype) and same_device, [source.flat]
        encoded = None if as_it_lies else self._part(placements)
        stages, part = [], encoded or sent
        for axis, _, there in steps(tuple(placements), self.placements):
            placements[axis] = there
            more = self._part(placements)
            stages.append((list(zip(more, part, strict=True)), self.ranks.axes[axis]))
            part = more
        return encoded, stages

    def _part(self, placements: Sequence[Placement]) -> list[Tensor]:
        """The range of each buffer that a rank with these placements holds."""
        first, count = self.ranks.held(placements, self.layout.num_shards)
        begin = first - self.first_shard
        pairs = zip(self.tensors, self.sizes, strict=True)
        return [tensor[begin * size : (begin + count) * size] for tensor, size in pairs]


# What the source is encoded to (None: sent as it lies), then for each axis the pairs (whole, part).
_Steps = tuple[list[Tensor] | None, list[tuple[list[tuple[Tensor, Tensor]], comm.Axis]]]


class Group:
    """One flat buffer of parameters: gathered, released and reduced together."""

    def __init__(
        self,
        layout: Layout,
        values: Sequence[Tensor],
        ranks: Ranks,
        placements: Placements,
        precision: Precision,
        device: torch.device,
        *,
        tiles: Sequence[Tile | None] | None = None,
        codec: Codec | None = None,
        divisor: float | None = None,
        offload: bool = False,
        pin: bool = False,
    ) -> None:
        """``tiles``: of tensor parallelism. ``codec``: None for numbers of ``precision``'s dtype.
        ``divisor``: of the sum of gradients; None: the number of ranks."""
        self.layout, self.items, self.ranks, self.placements = (
            layout,
            layout.items,
            ranks,
            placements,
        )
        self.precision, self.device, self.offload, self.pin = precision, device, offload, pin
        self.tiles = list(tiles or [None] * len(self.items))
        self.parameter_dtype, self._codec = values[0].dtype, codec
        trained = [value.requires_grad for value in values]
        meta = any(value.is_meta for value in values)
        dtype = precision.main_dtype(self.parameter_dtype, any(trained))
        home = torch.device("cpu") if offload else device
        self.main = self._make_main(dtype, torch.device("meta") if meta else home)
        if not meta:
            for index, value in enumerate(values):
                low, high, *_ = self.main.pieces[index]
                self.main.view(index).view(-1).copy_(value.detach().reshape(-1)[low:high])
        self.sharded: list[nn.Parameter] = []
        for index, (value, requires_grad) in enumerate(zip(values, trained, strict=True)):
            self.sharded.append(self._at_rest(index, requires_grad))
            carry_attributes(value, self.sharded[-1])
        self.gradients = Gradients(layout, ranks, placements, divisor)
        self._build()

    # ------------------------------------------------------------------ construction

    def _make_main(self, dtype: torch.dtype, device: torch.device) -> Buffer:
        pin, placements = self.pin and device.type == "cpu", self.placements.main
        main = Buffer(self.layout, self.ranks, placements, dtype, device, "main", pin=pin)
        main.flat.zero_()  # padding is never read, but it is sent
        return main

    def _at_rest(self, index: int, requires_grad: bool) -> nn.Parameter:
        made: Any = self.main.dtensor(index, self.tiles[index]).requires_grad_(requires_grad)
        made._is_param = True  # all that nn.Parameter() adds; it would make a second DTensor
        return made  # type: ignore[no-any-return]

    def _build(self) -> None:
        """Make what follows from main: the compute weights, the leaves, and room for gradients."""
        main, everywhere = self.main, (REPLICATE,) * len(self.placements.main)
        on_meta = main.flat.is_meta
        device = torch.device("meta") if on_meta else self.device
        dtype = self.precision.compute_dtype(self.parameter_dtype)
        self.codec = codec = self._codec or Cast(dtype)
        held_whole = self.ranks.num_shards(self.placements.main) == 1
        self.persistent = SHARD not in self.placements.compute
        self.aliased = held_whole and codec.is_plain(main.dtype) and main.flat.device == device
        self.whole: Planes | None = None
        self._kept: list[Block] = []  # 1/k of the weights, between forward and backward
        self._kept_from: int | None = None
        self._kept_axis: comm.Axis | None = None
        self._under_way: comm.Pending | None = None
        self._ready: Any = None  # an event after the gather, for the compute lane to wait for
        self.awaited: int | None = None  # writes to main that the gather lane has waited for
        if not self.aliased:
            source: Buffer | Planes = main
            sent = Cast(dtype) if codec.staged_because(self.layout) else codec
            if not self.persistent and self.placements.compute != self.placements.main:
                source = Planes(main, sent, self.placements.compute, device)
            if sent is not codec:  # every rank encodes all of the gathered numbers
                source = Planes(source, sent, everywhere, device, "staging")
                source.release()
            self.whole = Planes(source, codec, everywhere, device)
        trained = self._followed = [parameter.requires_grad for parameter in self.sharded]
        self.unsharded: list[AnyLeaf] = [
            leaf_over(view, tile, requires_grad)
            for view, tile, requires_grad in zip(self._views(), self.tiles, trained, strict=True)
        ]
        for sharded, leaf in zip(self.sharded, self.unsharded, strict=True):
            carry_attributes(sharded, leaf)
        wire_dtype = self.precision.wire_dtype(self.parameter_dtype)
        self.gradients.follow(main, self.sharded, self.unsharded, wire_dtype, device, self.pin)
        if self.comes_and_goes:
            self.whole.release()  # type: ignore[union-attr]

    def _views(self) -> list[Tensor]:
        if self.whole is None:
            return self.main.views()
        tensors = self.whole.tensors
        return [self.codec.view(tensors, self.layout, i) for i in range(len(self.items))]

    @property
    def blocks(self) -> list[Block]:
        """The memory of compute weights beside main."""
        blocks: list[Block] = []
        planes: Buffer | Planes | None = self.whole
        while isinstance(planes, Planes):
            blocks += planes.blocks
            planes = planes.source
        return blocks

    @property
    def format(self) -> str | None:
        """The format of weights in fp8."""
        return self.codec.format

    @property
    def comes_and_goes(self) -> bool:
        """Whether the whole weights are released between their uses."""
        return not (self.persistent or self.aliased)

    @property
    def writes(self) -> int:
        """How often main was written, the same on every rank."""
        return self.main.writes

    @property
    def trainable(self) -> bool:
        return any(leaf.requires_grad for leaf in self.unsharded)

    @property
    def without_values(self) -> list[str]:
        """The parameters that are on the meta device, of a group that is not meant to be there."""
        if not self.main.flat.is_meta or self.device.type == "meta":
            return []
        pairs = zip(self.items, self.sharded, strict=True)
        return [item.name for item, p in pairs if p._local_tensor.is_meta]  # type: ignore[attr-defined]

    def follow_trainability(self) -> None:
        """Give ``requires_grad`` of the parameters at rest to the leaves. A change on a leaf that a
        module holds goes the other way."""
        with plain_attributes():
            now = [parameter.requires_grad for parameter in self.sharded]
            shown = [leaf.requires_grad for leaf in self.unsharded]
        if now == shown == self._followed:
            return
        for index, before in enumerate(self._followed):
            if shown[index] != before:
                self.sharded[index].requires_grad_(shown[index])
            elif now[index] != before:
                self.unsharded[index].requires_grad_(now[index])
        self._followed = [leaf.requires_grad for leaf in self.unsharded]
        self.gradients.listen()

    # ------------------------------------------------------------------ moves and loads

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Let all follow ``fn`` of the flat buffer (``module.to(...)``, ``to_empty``, ...)."""
        before = self.main.flat
        moved = fn(before)
        if moved is before:
            return
        if self.offload and moved.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"parameters are offloaded to the CPU and cannot move to {moved.device}; the "
                f"library brings them to the device for each forward"
            )
        grads = [p.grad for p in self.sharded]
        self._move(moved.dtype, moved.device)
        self.main.flat.copy_(moved)
        for parameter, grad in zip(self.sharded, grads, strict=True):
            if isinstance(grad, ShardedTensor):
                parameter.grad = ShardedTensor(fn(grad._local_tensor), grad.cut)

    def _move(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make everything again from a main of this dtype, there. Parameters stay the same
        objects, so that optimizers keep them."""
        old, was_meta = self.main, self.main.flat.is_meta
        if device.type != "meta" and not self.offload:
            self.device = device
        if dtype != old.dtype:
            self.parameter_dtype = dtype
        self.main = self._make_main(dtype, device)
        main = self.main
        main.divisions, main.writes, main.waiting = old.divisions, old.writes + 1, old.waiting
        main.unsynced = old.unsynced or (was_meta and device.type != "meta")
        for index, parameter in enumerate(self.sharded):
            fresh: Any = self._at_rest(index, parameter.requires_grad)
            if (fresh.dtype, fresh.device) == (parameter.dtype, parameter.device):
                for name in ("_local_tensor", "_spec", "cut", "buffer"):
                    setattr(parameter, name, getattr(fresh, name))
            else:
                parameter.grad = None
                carry_attributes(parameter, fresh)
                torch.utils.swap_tensors(parameter, fresh)
        self._build()

    def assign(self, index: int, value: Tensor) -> None:
        """Take the value that ``load_state_dict(assign=True)`` put in place of a parameter. On the
        meta device values stay with their parameters until all have come."""
        parameter = self.sharded[index]
        with torch.no_grad():
            if not self.main.flat.is_meta:
                parameter.copy_(value)
                return
            if value.is_meta:
                return
            home = torch.device("cpu") if self.offload else self.device
            loaded: Any = torch.empty_like(parameter, device=home).copy_(value)
            loaded.requires_grad_(parameter.requires_grad)
            loaded._is_param = True
            carry_attributes(parameter, loaded)
            torch.utils.swap_tensors(parameter, loaded)
            if not any(p._local_tensor.is_meta for p in self.sharded):  # type: ignore[attr-defined]
                self.adopt()

    @property
    def is_moved(self) -> bool:
        """Whether parameters at rest lie in other memory than the buffer."""
        return any(p.buffer is not self.main for p in self.sharded)  # type: ignore[attr-defined]

    @torch.no_grad()
    def adopt(self) -> None:
        """Move values that lie outside of the buffer into a new one."""
        pieces: list[Tensor] = [p._local_tensor for p in self.sharded]  # type: ignore[attr-defined]
        where = {(piece.dtype, piece.device) for piece in pieces}
        if len(where) > 1:
            pairs = zip(self.items, pieces, strict=True)
            each = [f"'{item.name}' to {piece.dtype} on {piece.device}" for item, piece in pairs]
            raise ValueError(
                f"parameters of one buffer were moved to different dtypes or devices "
                f"({', '.join(each)}); convert them together"
            )
        self._move(*where.pop())
        for index, piece in enumerate(pieces if not self.main.flat.is_meta else ()):
            self.main.view(index).copy_(piece)

    def sync_initial_values(self) -> None:
        """Copy the first replica's values to all, if they were made after wrapping (on meta)."""
        if self.main.unsynced:
            self.main.unsynced = False
            self.broadcast()

    def broadcast(self) -> None:
        """Copy the values of the first replica to all replicas (collective)."""
        for axis, placement in zip(self.ranks.axes, self.placements.main, strict=True):
            if placement == REPLICATE and axis.size > 1 and not self.main.flat.is_meta:
                comm.broadcast(self.main.flat, axis).wait()

    # ------------------------------------------------------------------ the life of the weights

    @property
    def is_current(self) -> bool:
        """Whether the whole weights are there (or on their way), and as main is now."""
        whole = self.whole
        return whole is None or (whole.made_from == self.writes and whole.live)

    def gather(self, flow: Flow) -> None:
        """Begin to gather, if the weights are not there or main was written since. :meth:`wait`
        ends the gather."""
        if self.is_current:
            return
        whole, writes, lanes = self.whole, self.writes, flow.lanes
        assert whole is not None
        self._prepare(flow)
        with lanes.on("gather"):
            self._arrive()
            whole.acquire()
            if self._kept_from == writes:
                pairs = list(zip(whole.tensors, [b.tensor for b in self._kept], strict=True))
                assert self._kept_axis is not None
                self._under_way = comm.all_gather_together(pairs, self._kept_axis)
            else:
                self._under_way = whole.make(writes)
        self._kept_from, whole.made_from = None, writes
        self._issued(flow)

    def _prepare(self, flow: Flow) -> None:
        """Make the gather lane wait for the last writer of main."""
        if self.awaited != self.writes:
            flow.lanes.join("gather", "compute")
            self.awaited = self.writes

    def _issued(self, flow: Flow) -> None:
        """A gather was issued: uses of the weights wait for it, and so do writes to main. The
        writer waits on the compute lane; of offloaded weights the writer is the host."""
        lanes = flow.lanes
        self._ready = event = lanes.mark("gather")
        if event is not None:
            wait = lanes.synchronize if self.offload else partial(lanes.wait, "compute")
            self.main.reading = partial(wait, event)

    def _arrive(self) -> None:
        """Wait for the collective under way. If it fails, nothing counts as gathered."""
        pending, self._under_way = self._under_way, None
        try:
            if pending is not None:
                pending.wait()
        except BaseException:
            assert self.whole is not None
            self.whole.made_from = None
            raise

    @property
    def pending(self) -> bool:
        """Whether a gather is under way, so that :meth:`wait` must come before a use."""
        return self._under_way is not None or self._ready is not None

    def wait(self, flow: Flow) -> None:
        """Make the whole weights usable by what the caller computes next."""
        if self.pending:
            self._arrive()
            flow.lanes.wait("compute", self._ready)
            self._ready = None
            if not self.offload:  # else the host has not waited
                self.main.reading = None
        if self._kept_from is None:
            for block in self._kept:
                block.release()

    def release(self, flow: Flow) -> None:
        """Give the memory back, on the lane that allocated it, once compute has read it. Weights
        that stay only wait, because nobody may write main while a lane reads it."""
        if not self.comes_and_goes or not self.whole.live:  # type: ignore[union-attr]
            return
        assert self.whole is not None
        self.wait(flow)
        flow.lanes.join("gather", "compute")
        with flow.lanes.on("gather"):
            self.whole.release()

    def keep_part(self, flow: Flow, axis: comm.Axis) -> None:
        """Keep 1/k of the weights when they are released, so that backward gathers over k ranks
        only."""
        whole = self.whole
        if whole is None or not self.comes_and_goes or not whole.live:
            return
        self.wait(flow)
        flow.lanes.join("gather", "compute")
        with flow.lanes.on("gather"):
            for number, source in enumerate(whole.tensors):
                length = source.numel() // axis.size
                if len(self._kept) == number:
                    args = length, source.dtype, source.device
                    self._kept.append(Block(*args, "compute"))
                self._kept[number].acquire()
                self._kept[number].tensor.copy_(source.view(axis.size, length)[axis.rank])
        self._kept_axis, self._kept_from = axis, whole.made_from
