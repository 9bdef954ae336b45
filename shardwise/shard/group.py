# SPDX-License-Identifier: Apache-2.0
"""Group: parameters of one dtype and format in one flat buffer, and the life of their weights.

    main      fp32, placements.main      the source of all others; parameters at rest are DTensors
                                         over it
    compute   bf16, placements.compute   kept only where making it again from main would take a
                                         collective over one axis more each time (hfsdp)
    whole     bf16, all replicated       what forward and backward read, from gather to release

    zero(3)   main |##|  --cast + all-gather, each forward and backward-->  whole |########|
    zero(1)   main |##|  --cast + all-gather, once per optimizer step---->  whole |########| kept
    zero(0)   main |########|  is the whole weight itself, where the dtypes agree

A group does not know modules. ``gather`` is the only place where a compute weight is made from the
main weight. It compares versions, so the next gather sees every write to the main weight, by any
optimizer, a checkpoint or an initialisation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import comm
from shardwise.buffer import Beside, Buffer, Gathered, GatherPlan, Part
from shardwise.layout import Layout
from shardwise.memory import CACHING, Block, storage_of, weakly
from shardwise.mesh import Ranks
from shardwise.notices import warn_once
from shardwise.placements import REPLICATE, SHARD, Placements
from shardwise.precision import Precision
from shardwise.precision.fp8_tensor import Format, Reads
from shardwise.shard.flow import Flow
from shardwise.shard.gradient import Gradients
from shardwise.shard.whole_parameter import Whole, WholeDTensor, WholeParameter, carry_attributes
from shardwise.tile import Tile

logger = logging.getLogger(__name__)


class Group:
    """One flat buffer of parameters: gathered, released and reduced together."""

    label = ""  # the name in messages, once the unit has a name
    # The versions of the whole weights, and ``Whole.loans``, when ``lost_writes`` was last called.
    _versions: Sequence[int] = ()
    _followed: list[bool] | None = None  # which parameters at rest were trainable, as followed
    format: Format | None = None  # of the whole weights; None: plain numbers of a dtype
    moved_apart = False  # whether ``.to()`` and the like have moved only some of the parameters
    movable = False  # whether copies may move: autograd saves no views of them
    # What the whole parameters show while their memory lives, and after its release. Without
    # ``_gone``, a backward that comes through no output would be a segmentation fault, and not an
    # error.
    _views: Sequence[Tensor] = ()
    _gone: Sequence[Tensor] = ()
    scratch: str | None = None  # the kind of ``whole`` in the ledger, if it is only scratch memory
    # Whether backward will run forward once more. The same on ranks whose backward skips the unit.
    reads_again = False

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
        offload: bool = False,
        pin: bool = False,
    ) -> None:
        """``tiles``: the tile of each parameter of tensor parallelism; None for other
        parameters."""
        self.layout, self.items = layout, layout.items
        self.ranks, self.placements = ranks, placements
        self.precision, self.device, self.offload, self.pin = precision, device, offload, pin
        self.tiles = list(tiles or [None] * len(self.items))
        self.parameter_dtype = values[0].dtype
        assert all(value.dtype == self.parameter_dtype for value in values)
        assert self.layout.num_shards == ranks.num_shards(placements.main)
        meta = any(value.is_meta for value in values)
        trained = [value.requires_grad for value in values]
        main_dtype = precision.main_dtype(self.parameter_dtype, any(trained))
        self._build_main(main_dtype, torch.device("meta") if meta else self._home)
        if not meta:
            for index, value in enumerate(values):
                low, high, *_ = self.main.pieces[index]
                self.main.view(index).view(-1).copy_(value.detach().reshape(-1)[low:high])
        self._build_compute()
        self.sharded = [self._sharded_parameter(*each) for each in enumerate(trained)]
        self.unsharded = [self._whole_parameter(*each) for each in enumerate(trained)]
        self.gradients = Gradients(self)
        self._point_at_whole()
        self._rest()
        for original, sharded, whole in zip(values, self.sharded, self.unsharded, strict=True):
            carry_attributes(original, sharded)
            carry_attributes(original, whole)

    # ------------------------------------------------------------------ construction

    @property
    def _home(self) -> torch.device:
        """The device of the main weights: the host with offload, else the model's."""
        return torch.device("cpu") if self.offload else self.device

    def _build_main(self, dtype: torch.dtype, device: torch.device) -> None:
        pin, placements = self.pin and device.type == "cpu", self.placements.main
        self.main = Buffer(self.layout, self.ranks, placements, dtype, device, "main", pin=pin)
        self.main.flat.zero_()  # padding is never read, but it is sent

    def _build_compute(self) -> None:
        """Make the compute buffers that this group needs; see the picture above."""
        everywhere = (REPLICATE,) * len(self.placements.main)
        # ``parameter_dtype`` follows .to() and .half(), so apply the policy to its present value.
        dtype = self.precision.compute_dtype(self.parameter_dtype)
        held_whole = self.ranks.num_shards(self.placements.main) == 1
        same = dtype == self.main.dtype and self.main.flat.device == self.whole_device
        self.aliased = held_whole and same and self.format is None
        self.persistent = SHARD not in self.placements.compute
        self.compute: Buffer | None = None
        self._compute_filled: Any = None  # main.state when ``compute`` was last filled from main
        # 1/k of what backward reads. Alive but not filled: a gather under way sends it.
        self._kept: Part | None = None
        self._gathers: list[comm.Pending] = []
        self._plan: GatherPlan | None = None
        self._ready: Any = None  # an event after the gather, for the compute lane to wait for
        # The last main.state whose writers the gather lane has waited for.
        self.awaited: Any = None
        if self.aliased:
            self.whole, self.copies = self.main, [Gathered(self.main.block)]
            return
        device = self.whole_device
        kind = self.scratch or "compute"
        self.whole = Buffer(self.layout, self.ranks, everywhere, dtype, device, kind, lane="gather")
        self.copies = [Gathered(self.whole.block)]
        if not self.persistent and self.placements.compute != self.placements.main:
            self.compute = Buffer(
                self.layout, self.ranks, self.placements.compute, dtype, device, "compute"
            )
        self.whole.block.moved = weakly(self._point_at_whole)
        narrow = dtype.itemsize == 2 and self.format is None
        if held_whole and self.persistent and narrow and not self.offload:
            self.main.version.beside = Beside(self.main, self.whole, self.copies[0])

    @property
    def whole_device(self) -> torch.device:
        return torch.device("meta") if self.main.flat.is_meta else self.device

    def _sharded_parameter(self, index: int, requires_grad: bool) -> nn.Parameter:
        made: Any = self.main.dtensor(index, self.tiles[index]).requires_grad_(requires_grad)
        # This is all that nn.Parameter() adds. A call of it would make a second DTensor.
        made._is_param = True
        return made  # type: ignore[no-any-return]

    def _whole_parameter(self, index: int, requires_grad: bool) -> Whole:
        tile = self.tiles[index]
        if tile is None:
            return WholeParameter(torch.empty(0, device=self.device), requires_grad=requires_grad)
        memory = torch.empty(0, dtype=self.whole.dtype, device=self.device)
        return WholeDTensor.of(tile, memory, requires_grad)

    def _rest(self) -> None:
        """Release whole weights that are not kept between steps."""
        for memory in self.blocks if self.comes_and_goes else ():
            memory.release(CACHING)

    @property
    def comes_and_goes(self) -> bool:
        """Whether the whole weights are released between their uses."""
        return not (self.persistent or self.aliased)

    @property
    def blocks(self) -> list[Block]:
        """The memory of the whole weights."""
        return [copy.memory for copy in self.copies]

    def _point_at_whole(self) -> None:
        """Make the unsharded parameters views of ``whole``."""
        self._plan = None
        if not self.whole.flat.is_meta:  # meta has no values, and no parameter can move there
            self.show_whole()

    def show_whole(self) -> None:
        """Show the memory of ``whole`` to the unsharded parameters."""
        self._views = [view.detach() for view in self.whole.views()]
        if not self.whole.flat.is_meta:
            value = torch.nan if self.whole.dtype.is_floating_point else 0
            nothing = self.whole.flat.new_full((), value)
            self._gone = [nothing.expand(view.shape) for view in self._views]
        for parameter, view in zip(self.unsharded, self._views, strict=True):
            parameter.show(view)

    @property
    def moved(self) -> bool:
        """Whether parameters at rest lie in other memory than the buffer, or exchanged places."""
        inside = all(map(is_, map(_WRITES, self.sharded), repeat(self.main.version)))
        return not inside or list(map(_INDEX, self.sharded)) != [*range(len(self.sharded))]

    def adopt(self) -> None:
        """Move values that ``module.to(...)``, ``to_empty`` or ``half`` put into other memory into
        a new buffer."""
        locals_ = [parameter._local_tensor for parameter in self.sharded]  # type: ignore[attr-defined]
        views = self.main.views()
        same = all(
            storage_of(new) == storage_of(old) and new.dtype == old.dtype
            for new, old in zip(locals_, views, strict=True)
        )
        if same and not self.main.flat.is_meta:
            return
        dtypes, devices = {new.dtype for new in locals_}, {new.device for new in locals_}
        # The modules of a list move one after the other. If some never move, the next use of the
        # group raises.
        self.moved_apart = len(dtypes) > 1 or len(devices) > 1
        if self.moved_apart:
            return
        device = devices.pop()
        if self.offload and device.type not in ("cpu", "meta"):
            raise ValueError(
                f"parameters are offloaded to the CPU and cannot move to {device}; "
                f"the library brings them to the device for each forward"
            )
        if device.type != "meta" and not self.offload:
            self.device = device
        if dtypes != {self.main.dtype}:
            self.parameter_dtype = next(iter(dtypes))
        version, was_meta = self.main.version, self.main.flat.is_meta
        self._build_main(dtypes.pop(), device)
        # An optimizer that exists already keeps its division between replicas.
        self.main.version.divisions = version.divisions
        self.main.version.count = version.count + 1  # other weights than those that a graph saved
        self.main.version.unsynced = version.unsynced or (was_meta and device.type != "meta")
        if device.type != "meta":
            for index, local in enumerate(locals_):
                self.main.view(index).copy_(local)
        for index, parameter in enumerate(self.sharded):
            fresh = self.main.dtensor(index, self.tiles[index])
            parameter._local_tensor = fresh._local_tensor  # type: ignore[attr-defined]
            parameter._spec = fresh._spec  # type: ignore[attr-defined]
            parameter.cut, parameter.version = fresh.cut, fresh.version  # type: ignore[attr-defined]
        self._build_compute()
        before, self.gradients = self.gradients, Gradients(self)
        self.gradients.take_over(before)
        self._point_at_whole()
        self._rest()

    def refuse_moved_apart(self) -> None:
        """Raise if some parameters were moved to another dtype or device than others."""
        if self.moved_apart:
            pairs = zip(self.items, self.sharded, strict=True)
            where = [f"'{item.name}' to {moved.dtype} on {moved.device}" for item, moved in pairs]
            raise ValueError(
                f"parameters of one group were moved to different dtypes or devices "
                f"({', '.join(where)}); convert them together"
            )

    def assign(self, index: int, value: Tensor) -> None:
        """Take over a value that ``load_state_dict(assign=True)`` put in place of a parameter."""
        parameter = self.sharded[index]
        with torch.no_grad():
            if not self.main.flat.is_meta:
                parameter.copy_(value)
            elif not value.is_meta:
                loaded = nn.Parameter(torch.empty_like(parameter, device=self._home).copy_(value))
                carry_attributes(parameter, loaded)
                loaded.requires_grad_(parameter.requires_grad)
                torch.utils.swap_tensors(parameter, loaded)  # as module.to_empty() does

    def sync_initial_values(self) -> None:
        """Copy the first replica's values to all replicas, if the values were made after wrapping
        (meta device): they may differ."""
        if self.main.version.unsynced:
            self.main.version.unsynced = False
            for axis, placement in zip(self.ranks.axes, self.placements.main, strict=True):
                if placement == REPLICATE:
                    comm.broadcast(self.main.flat, axis).wait()

    # ------------------------------------------------------------------ the life of the weights

    @property
    def pending(self) -> bool:
        """Whether a gather is under way, so that :meth:`wait` must come before a use."""
        return bool(self._gathers) or self._ready is not None

    def gather(self, runtime: Flow, phase: Reads = "forward") -> None:
        """Begin to gather what ``phase`` reads, if it is released or stale. :meth:`wait` ends the
        gather."""
        self._gather(self._missing(phase), runtime)

    def _missing(self, phase: Reads) -> Sequence[Gathered]:
        """The copies that ``phase`` reads and that are released or stale."""
        return () if self.aliased else self._stale(self.copies)

    def _stale(self, copies: Iterable[Gathered]) -> list[Gathered]:
        """The copies that are released, or older than main."""
        state = self.main.state
        return [copy for copy in copies if not copy.memory.live or copy.filled != state]

    def _gather(self, missing: Sequence[Gathered], runtime: Flow) -> None:
        if not missing:
            return
        self._prepare(runtime)
        state, part = self.main.state, self._kept
        comm.purpose = self.label
        with runtime.lanes.on("gather"):
            self._arrive()
            for copy in missing:
                copy.acquire(runtime.source if self.movable else CACHING)
            for parameter, view, _ in zip(self.unsharded, self._views, self._gone, strict=False):
                parameter.show(view)
            rest = missing
            if part is not None and part.filled != state:
                part.memory.release(runtime.source)
            elif part is not None and part.whole in missing:
                whole, mine = part.whole.memory.tensor, part.memory.tensor
                self._gathers, part.filled = [comm.all_gather(whole, mine, part.axis)], None
                rest = [copy for copy in missing if copy is not part.whole]
            if rest:
                self._gathers += self._bring(rest, runtime)
        comm.purpose = ""
        for copy in missing:
            copy.filled = state
        self._issued(runtime)

    def _bring(self, copies: Sequence[Gathered], runtime: Flow) -> list[comm.Pending]:
        """Issue the collectives that fill ``copies`` from main."""
        source = self.main
        if self.compute is not None:
            source = self.compute
            if self._compute_filled != self.main.state:
                self.main.gather(source).wait()
                self._compute_filled = self.main.state
        if self._plan is None:
            self._plan = source.gather_plan(self.whole)
        return [self._plan.run()]

    def _copy_for(self, phase: Reads) -> Gathered | None:
        """The copy that ``phase`` reads."""
        return self.copies[0]

    def _prepare(self, runtime: Flow) -> None:
        """Make the gather lane wait for the last write to main."""
        state = self.main.state
        if self.awaited != state:
            runtime.lanes.join("gather", "compute")
            self.awaited = state

    def _issued(self, runtime: Flow) -> None:
        """A gather was issued. Uses of the whole weights and writes to main must wait for it. The
        writer waits on the compute lane; of offloaded weights the writer is the host."""
        lanes = runtime.lanes
        self._ready = event = lanes.mark("gather")
        if event is not None:
            wait = lanes.synchronize if self.offload else partial(lanes.wait, "compute")
            self.main.version.reading = partial(wait, event)

    def _arrive(self) -> None:
        """Wait for the collectives under way. If one fails, nothing counts as gathered."""
        gathers, self._gathers = self._gathers, []
        try:
            for pending in gathers:
                pending.wait()
        except BaseException:
            for copy in self.copies:
                copy.filled = None
            raise

    def wait(self, runtime: Flow) -> None:
        """Make the whole weights usable by what the caller computes next."""
        if self.pending:
            self._arrive()
            runtime.lanes.wait("compute", self._ready)
            self._ready = None
            if not self.offload:  # else the host has not waited
                self.main.version.reading = None
        if self._kept is not None and self._kept.filled is None:
            self._kept.memory.release(runtime.source)

    def release(self, runtime: Flow) -> None:
        """Give the whole weights back, on the lane that allocated them, once compute has read them.
        Views that a user keeps are undefined from then on, as in torch's FSDP2."""
        if not self.comes_and_goes or not any(memory.live for memory in self.blocks):
            return
        self.wait(runtime)
        runtime.lanes.join("gather", "compute")
        with runtime.lanes.on("gather"):
            for copy in self.copies:
                copy.memory.release(runtime.source if self.movable else CACHING)
                copy.filled = None
        for parameter, gone in zip(self.unsharded, self._gone, strict=False):
            parameter.show_gone(gone)

    def keep_part(self, runtime: Flow, axis: comm.Axis) -> None:
        """Keep 1/k of the weights that backward reads when they are released, so that backward
        gathers over k ranks only. Gathers a copy that forward did not read, while forward goes
        on."""
        copy = self._copy_for("backward")
        if copy is None or not self.comes_and_goes:
            return
        self._gather(self._stale([copy]), runtime)
        runtime.lanes.join("gather", "compute")
        with runtime.lanes.on("gather"):
            self._arrive()
            part = self._kept = self._kept or Part(copy, axis)
            part.memory.acquire(runtime.source)
            part.memory.tensor.copy_(copy.memory.tensor[part.here])
        part.filled = copy.filled
        self._ready = None  # nothing computes with this gather, so the compute lane need not wait

    def lost_writes(self) -> list[str]:
        """The parameters whose whole weights were written since the last call, if the whole weights
        are copies: their release loses the writes."""
        with torch._C.DisableTorchFunctionSubclass():
            now = [*map(_VERSION, self.unsharded), Whole.loans]
            if now == self._versions:
                return []
            self._versions = now
            written = [whole for whole in self.unsharded if whole.was_written()]
            memory = storage_of(self.whole.flat) if self.aliased else None
            lost = [whole.name_here for whole in written if storage_of(whole.memory) != memory]
            if lost and any(memory.live for memory in self.blocks):
                self.show_whole()  # the write may have put a parameter into other memory
                for copy in self.copies:
                    copy.filled = None  # the next use gathers the values of main again
        return lost

    def follow_trainability(self, comes: Callable[[Tensor], bool] | None = None) -> None:
        """Give ``requires_grad`` of the parameters at rest to the whole parameters.

        ``comes``: in backward, whether it has a gradient for a parameter that is trainable again.
        """
        with torch._C.DisableTorchFunctionSubclass():
            now = list(map(_REQUIRES_GRAD, self.sharded))
            before = self._followed if comes else list(map(_REQUIRES_GRAD, self.unsharded))
            self._followed = now
            if now == before:
                return
            for wanted, whole in zip(now, self.unsharded, strict=True):
                if wanted != whole.requires_grad:
                    whole.requires_grad_(wanted)  # ``comes`` reads this flag
                    whole.requires_grad_(wanted and (comes is None or comes(whole)))
        if any(now) and self.main.dtype.itemsize < 4 and self.precision.main is None:
            warn_once(
                logger,
                "'%s' and the parameters stored with it were frozen when they were wrapped, so "
                "their main weights are %s, which round away steps of less than 1/256 of a weight, "
                "and it is trained now: wrap it while it is trainable, or with "
                "Precision(main='fp32')",
                self.items[now.index(True)].name,
                self.main.dtype,
                first=not any(self.ranks.coordinate),
            )

    def take_trainability(self) -> None:
        """Give ``requires_grad`` of the whole parameters, if it was changed outside of forward, to
        the parameters at rest."""
        for index, whole in enumerate(self.unsharded):
            if self._followed and whole.requires_grad != self._followed[index]:
                self.sharded[index].requires_grad_(whole.requires_grad)

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.unsharded)


_REQUIRES_GRAD, _VERSION, _INDEX = map(attrgetter, ("requires_grad", "_version", "cut.index"))
_WRITES = attrgetter("version")  # of the buffer that a parameter at rest lies in
