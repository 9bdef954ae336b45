# SPDX-License-Identifier: Apache-2.0
"""Gradients of one group, from autograd and kernels to the optimizer.

A gradient goes through three of the placements, and is in at most one buffer for each:

    flat      one term of a sum on every axis: packed from autograd, or written by kernels. It is
              kept when nothing may be sent: a microbatch without synchronisation, a delayed
              gradient, placements that wait for the last microbatch (zero(0), zero(1))
    waiting   as ``placements.grad`` says, the sum over microbatches: hsdp, hfsdp
    .grad     as ``placements.main`` says, views of one block that nobody else holds, so dropping
              ``.grad`` frees it

    param.grad --pack--> flat (wire dtype, whole) --reduce-scatter--> .grad (main dtype, shard)

Sums are scaled once, in the last collective or after it. A parameter of a group that is reduced, to
which no microbatch brought a gradient on this rank, is sent as NaN with the last microbatch (or as
zeros, ``unused_parameters="zeros"``): nothing is sent to find out whether another rank has one, and
if so the result is loud. Where no rank has one, ``.grad`` stays None.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core import comm
from shardwise.core.buffer import Buffer
from shardwise.core.compat import GRAD, grad_hooks, plain_attributes, will_run
from shardwise.core.division import Shares, Span, replica_shares
from shardwise.core.layout import Layout
from shardwise.core.memory import CACHING, Block, Caching, TracePool, counted
from shardwise.core.mesh import Ranks
from shardwise.core.placements import PARTIAL, SHARD, Placements, steps
from shardwise.core.tensor import UNREDUCED, ShardedTensor, over_piece
from shardwise.shard.flow import Flow


class Gradients:
    """The gradients of one group. Refers to its tensors, not to the group."""

    main: Buffer
    sharded: Sequence[nn.Parameter]  # at rest
    unsharded: Sequence[Any]  # the leaves, which refer to this object

    def __init__(
        self, layout: Layout, ranks: Ranks, placements: Placements, divisor: float | None
    ) -> None:
        self.placements, self.ranks, self.layout = placements, ranks, layout
        self.divisor = divisor  # of the sum; None: the number of ranks
        self.sum_only = False  # sum in collectives and divide after, never in one pass
        self.last = True  # whether this microbatch is reduced as far as main
        self.keep = False  # whether this microbatch is kept unreduced
        self._final = True  # whether this microbatch is the last of its step, as the user said
        self.unused = "none"
        self.source: Caching | TracePool = CACHING
        # Called when a gradient has come (from autograd, or a delayed one from a kernel).
        self.arrived: Callable[[], None] = lambda: None
        self.missing: set[int] = set()  # what this backward will bring and has not brought
        # If no more elements than this are missing, the last gradient may be next: that of one
        # matrix, with those of its bias and norm.
        sizes = [item.numel for item in layout.items]
        self.one_more = max(sizes) + sum(sizes) // 64
        self.delayed: set[int] = set()  # what kernels will write later, perhaps after backward
        self.has_unpacked = False  # whether autograd has left gradients on the leaves
        self.late = False  # whether forwards say that some gradients will be delayed
        self._wanted: set[int] = set()  # what this backward was asked for
        self.written: set[int] = set()  # the parts of ``flat`` that somebody has defined
        # By parameter: whether a gradient came since the last time that they were published.
        self.seen = [False] * len(self.layout.items)
        # Of the last reduction: what this rank has no gradient of. It sends NaN, for ranks that do.
        self._absent: set[int] = set()
        self.flat: Tensor | None = None
        self._block: Block | None = None  # the memory of ``flat``, if it comes back to a source
        self._packed: Block | None = None
        self._view_cache: tuple[Any, list[Tensor]] = (None, [])
        self._waiting: Tensor | None = None
        self._stamp = 0  # how often main had been written when gradients began to wait
        self._in_flight = False
        self._nodes: dict[int, Any] = {}
        self._shares_of: Any = None  # the divisions for which these were planned
        self._shares_by_axis: dict[int, Shares] = {}
        axes = range(len(self.ranks.sizes))
        grad, main, everywhere = self.placements.grad, self.placements.main, (PARTIAL,) * len(axes)
        several = [size > 1 for size in self.ranks.sizes]
        # (axis, whether it scatters): in each microbatch, and in the last one only.
        self._inside = [
            (s.axis, s.there == SHARD) for s in steps(everywhere, grad) if several[s.axis]
        ]
        self._outside = [(s.axis, s.there == SHARD) for s in steps(grad, main) if several[s.axis]]
        self._waits = PARTIAL in grad  # whether reductions wait for the last microbatch
        self._nothing_inside = all(placement == PARTIAL for placement in grad)
        self._scatters = any(scatters for _, scatters in self._inside + self._outside)

    def follow(
        self,
        main: Buffer,
        sharded: Sequence[nn.Parameter],
        unsharded: Sequence[Any],
        wire_dtype: torch.dtype,
        device: torch.device,
        pin: bool,
    ) -> None:
        """Take over the tensors of a group, which may be new after a move."""
        self.main, self._stamp = main, main.writes
        self.sharded, self.unsharded = sharded, unsharded
        self.wire_dtype, self.device, self.pin = wire_dtype, device, pin
        self._packed, self._nodes = None, {}
        me = weakref.ref(self)
        for index, leaf in enumerate(self.unsharded):
            leaf._gradients, leaf._index = me, index
        self.listen()

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Let gradients of earlier microbatches follow the parameters (``module.to(...)``)."""
        for name in ("flat", "_waiting"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, counted(fn(value), "grad_accumulator"))

    def name(self, index: int) -> str:
        return self.layout.items[index].name

    def listen(self) -> None:
        """Be called for each gradient that autograd has brought. The node that ends a leaf's
        gradient runs once in each backward that reaches the leaf, also if a kernel has written the
        gradient elsewhere. A leaf refers to its node weakly, and hooks go with it: keep it."""
        me = weakref.ref(self)
        for index, leaf in enumerate(self.unsharded):
            if not leaf.requires_grad or index in self._nodes:
                continue
            node = torch.autograd.graph.get_gradient_edge(leaf).node
            node.register_hook(partial(_brought, me, index))
            self._nodes[index] = node

    # ------------------------------------------------------------------ one backward

    @property
    def comes(self) -> bool:
        """Whether the backward that runs now brings the gradient of some parameter."""
        return any(will_run(node) for node in self._nodes.values())

    def begin(self, sync: bool, last: bool, unused: str) -> None:
        """Backward has come to the unit. ``sync``: send gradients. ``last``: of this step."""
        self.last = sync and (last or not self._waits)
        self._final = last
        self.keep = not sync or (self._nothing_inside and not last)
        self.unused, self._wanted, self.missing = unused, set(), set()
        self.expect()

    def expect(self) -> None:
        """Count what the graph that runs now will bring."""
        for index, node in self._nodes.items():
            if index not in self._wanted and self.unsharded[index].requires_grad and will_run(node):
                self._wanted.add(index)
                self.missing.add(index)

    @property
    def missing_elements(self) -> int:
        return sum(self.layout.items[index].numel for index in self.missing)

    def is_wanted(self, index: int) -> bool:
        """Whether the backward that runs now (perhaps that of a reentrant checkpoint) brings this
        gradient, or a kernel will."""
        if index in self._wanted or index in self.delayed:
            return True
        return index in self._nodes and will_run(self._nodes[index])

    def delay(self, index: int) -> None:
        """A kernel will write this gradient later. It needs no weight for that."""
        self.delayed.add(index)
        self.main.waiting = self.main.waiting | {index}

    def kernel_wrote(self, index: int) -> None:
        """A kernel has written, or added to, the gradient of one parameter."""
        self.written.add(index)
        if index in self.delayed:
            self.delayed.discard(index)
            self.arrived()

    def destination(self, index: int) -> tuple[Tensor, bool]:
        """The memory for the gradient of one parameter in this microbatch, and whether its contents
        are undefined. Spare memory, if nobody asked for the gradient."""
        if not self.is_wanted(index):
            shape = self.layout.items[index].shape
            return torch.empty(shape, dtype=self.wire_dtype, device=self.device), True
        with torch.no_grad():
            self._open()
        return self._views()[index].data, index not in self.written

    def _open(self) -> Tensor:
        """The flat gradient of this microbatch."""
        if self.flat is None:
            numel, self.written = self.layout.numel, set()
            if self.keep or self._becomes_grad:
                fresh = torch.empty(numel, dtype=self.main.dtype, device=self.device)
                self.flat = counted(fresh, "grad" if self._becomes_grad else "grad_accumulator")
            elif self._scatters and not self._in_flight:  # else that memory is being sent
                if self._packed is None:
                    args = numel, self.wire_dtype, self.device
                    self._packed = Block(*args, "grad_transient")
                    self._packed.release(CACHING)  # the source may have other memory
                self._packed.acquire(self.source)
                self._block, self.flat = self._packed, self._packed.tensor
            else:
                fresh = torch.empty(numel, dtype=self.wire_dtype, device=self.device)
                self.flat = counted(fresh, "grad_transient")
        return self.flat

    @property
    def _becomes_grad(self) -> bool:
        """Whether nothing is scattered or cast, so that ``flat`` is reduced to ``.grad`` in
        place."""
        main = self.main
        alike = (self.wire_dtype, self.device) == (main.dtype, main.flat.device)
        return alike and main.flat.numel() == self.layout.numel

    def _views(self) -> list[Tensor]:
        """The part of each parameter in ``flat``."""
        flat = self.flat
        assert flat is not None
        key = (id(flat), flat.untyped_storage()._cdata)
        if self._view_cache[0] != key:
            views = self.layout.pieces(0, self.layout.num_shards)
            made = [flat.as_strided(shape, strides, at) for _, _, at, shape, strides in views]
            self._view_cache = key, made
        return self._view_cache[1]

    # ------------------------------------------------------------------ reduce

    @property
    def pending(self) -> bool:
        """Whether gradients wait here for a reduction."""
        waits = self._waiting is not None and not self._in_flight
        return self.flat is not None or waits or self.has_unpacked

    def check_waiting(self) -> None:
        """Raise if main was written while microbatches wait."""
        waits = self.flat is not None or self._waiting is not None
        if waits and self._stamp != self.main.writes:
            raise RuntimeError(
                f"the main weights of '{self.name(0)}' and others changed while their gradients "
                f"waited to be reduced: the optimizer stepped before the last microbatch. "
                f"{UNREDUCED}"
            )

    @torch.no_grad()
    def reduce(self, flow: Flow) -> None:
        """Pack, and bring gradients as far as this microbatch asks for."""
        # Free memory first: the reductions under way and this one must not exceed the limit.
        flow.drain(0 if self._in_flight else flow.max_reductions - 1)
        self._pack()
        main = self.main
        self._stamp = main.writes
        if self.keep:
            main.waiting = {index for index, seen in enumerate(self.seen) if seen}
            return
        last = self.last
        self._fill(last and self._final)
        flat, block = self._taken()
        divisor = self._divisor if last else None
        joins = self._waiting is not None
        chain = [*self._inside, *self._outside] if last else self._inside
        in_collective = divisor if (self._outside or not joins) and not self.sum_only else None
        ready = self._room_for_result(flat) if last else None
        if last:
            came, self.seen = self.seen, [False] * len(self.seen)
        else:
            came = []
            main.waiting = {index for index, seen in enumerate(self.seen) if seen}
        self._in_flight = True
        held: list[Tensor] = [flat]
        collectives = self._collectives(flow, flat, chain, ready, divisor, in_collective, held)
        finish = partial(self._finish, flow, block, held, ready, came)
        flow.launch(collectives, finish, single=len(chain) <= 1 and not main.divisions)

    @property
    def _divisor(self) -> float | None:
        """The divisor of the sum; None for one."""
        divisor = math.prod(self.ranks.sizes) if self.divisor is None else self.divisor
        return None if divisor == 1 else float(divisor)

    def _pack(self) -> None:
        """Bring what autograd left on the leaves into ``flat``, in one pass over all."""
        self._open()
        views, written = self._views(), self.written
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        with plain_attributes():
            for index, leaf in enumerate(self.unsharded):
                grad = GRAD.__get__(leaf)
                if grad is not None:
                    GRAD.__set__(leaf, None)
                if leaf._added:
                    leaf._added = False
                    if not leaf.others_count:
                        continue  # a kernel wrote the gradient, and this one is a dummy
                if grad is not None:
                    pair = views[index], leaf.local_gradient(grad)
                    (more if index in written else fresh).append(pair)
                    written.add(index)
        if fresh:
            torch._foreach_copy_([view for view, _ in fresh], [grad for _, grad in fresh])
        if more:
            torch._foreach_add_([view for view, _ in more], [grad for _, grad in more])
        self.has_unpacked = False
        for index in written:
            self.seen[index] = True

    def _fill(self, final: bool) -> None:
        """Define the parts of ``flat`` that nobody wrote. (Padding is never read.)"""
        self._absent = set()
        if len(self.written) == len(self.unsharded):
            return
        quiet: list[Tensor] = []
        for index, view in enumerate(self._views()):
            if index not in self.written:
                absent = final and self.unused == "none" and not self.seen[index]
                if absent and self.sharded[index].grad is None:
                    self._absent.add(index)
                    view.fill_(torch.nan)
                    if comm.observer is not None:
                        comm.observer.lacks(self.name(index))
                else:
                    quiet.append(view)
        if quiet:
            torch._foreach_zero_(quiet)

    def _taken(self) -> tuple[Tensor, Block | None]:
        """``flat`` in the wire dtype, with the block that its memory comes from."""
        assert self.flat is not None
        flat, block = self.flat, self._block
        self.flat = self._block = None
        self.written = set()
        if flat.dtype != self.wire_dtype:
            kept, self.keep = flat, False
            flat, block = self._open().copy_(kept), self._block
            self.flat = self._block = None
            self._view_cache = (None, [])  # else views of ``kept`` would stay in memory
        if block is None:
            self._view_cache = (None, [])
        return flat, block

    def _room_for_result(self, flat: Tensor) -> Tensor:
        """Memory for the new gradients, which nobody else will hold."""
        main = self.main
        if self._becomes_grad:
            return flat
        pin = self.pin and main.flat.device.type == "cpu"
        made = torch.empty(
            main.flat.numel(), dtype=main.dtype, device=main.flat.device, pin_memory=pin
        )
        return counted(made, "grad")

    def _collectives(
        self,
        flow: Flow,
        flat: Tensor,
        chain: Sequence[tuple[int, bool]],
        ready: Tensor | None,
        divisor: float | None,
        in_collective: float | None,
        held: list[Tensor],
    ) -> Iterator[comm.Pending]:
        """Issue the collectives one after another; the caller waits for each."""
        lanes, current, lane = flow.lanes, flat, "reduce"
        num_inside = len(self._inside)
        for position, (axis, scatters) in enumerate(chain):
            if position == num_inside:
                if self._waiting is not None:  # earlier microbatches, before the outer reduction
                    with lanes.on("reduce"):
                        current = self._joined(current)
                    held.append(current)
                if num_inside:
                    lane = "outer"
                    lanes.join("outer", "reduce")
            is_last = position == len(chain) - 1
            on_wire = in_collective if is_last else None
            with lanes.on(lane):  # type: ignore[arg-type]
                link = flow.reduce_axis(self.ranks.axes[axis])
                if scatters:
                    whole, current = current, current.view(link.size, -1)[link.rank]
                    if is_last and ready is not None and self._waiting is None:
                        alike = (ready.dtype, ready.device) == (current.dtype, current.device)
                        current = ready if alike else current
                    yield comm.reduce_scatter(current, whole, link, divisor=on_wire)
                elif self.main.divisions:
                    yield from reduce_shares(current, self._shares(axis), link, on_wire)
                else:
                    yield comm.all_reduce(current, link, divisor=on_wire)
        with lanes.on(lane):  # type: ignore[arg-type]
            self._store(current, ready, divisor if in_collective is None or not chain else None)

    def _store(self, current: Tensor, ready: Tensor | None, divisor: float | None) -> None:
        """Put a reduced gradient where it is published from, or where it waits."""
        if ready is None:
            if self._waiting is None:
                made = torch.empty(current.numel(), dtype=self.main.dtype, device=self.device)
                self._waiting = counted(made, "grad_accumulator").copy_(current)
            else:
                self._waiting.add_(current)
            return
        if self._waiting is not None and not self._outside:
            current = self._joined(current)
        self._waiting = None
        if divisor is not None:
            current.div_(divisor)
        if ready.data_ptr() != current.data_ptr():
            ready.copy_(current, non_blocking=True)

    def _joined(self, current: Tensor) -> Tensor:
        """The sum of this microbatch and those that wait."""
        assert self._waiting is not None
        total, self._waiting = self._waiting.add_(current), None
        return total.to(current.dtype)

    def _shares(self, axis: int) -> Shares:
        """The elements that the reduction over an axis brings to each replica, where replicas
        divide the gradients of an optimizer between themselves."""
        main, over = self.main, self.ranks
        divisions = main.divisions
        if self._shares_of is not divisions:
            self._shares_of, self._shares_by_axis = divisions, {}
        if axis not in self._shares_by_axis:
            pieces = [(low, high, offset) for low, high, offset, *_ in main.pieces]
            self._shares_by_axis[axis] = replica_shares(
                pieces, divisions, main.placements, over.sizes, over.coordinate, axis
            )
        return self._shares_by_axis[axis]

    # ------------------------------------------------------------------ publish

    def _finish(
        self,
        flow: Flow,
        block: Block | None,
        held: list[Tensor],
        ready: Tensor | None,
        came: list[bool],
    ) -> None:
        """The reduction is done, and compute has waited for it."""
        self._in_flight = False
        held.clear()
        if block is not None:
            block.release(self.source)
        if ready is not None:
            self.main.waiting = set()
            self._publish(flow, ready, came)

    @torch.no_grad()
    def _publish(self, flow: Flow, ready: Tensor, came: list[bool]) -> None:
        """Give the optimizer its gradients, and call the hooks of the parameters."""
        divisions, hooked = self.main.divisions, []
        zeros = self.unused == "zeros"
        with plain_attributes():
            before = [GRAD.__get__(parameter) for parameter in self.sharded]
            if any(grad is not None for grad in before):
                flow.wait_on_host()  # the host may be the one that adds
            for index, (_, _, at, shape, strides) in enumerate(self.main.pieces):
                told = came[index] or (zeros and self.unsharded[index].requires_grad)
                grad = before[index]
                if not told and (grad is None or index in self._absent):
                    continue
                parameter: Any = self.sharded[index]
                piece, cut = ready.as_strided(shape, strides, at), parameter.cut
                if index in divisions:
                    cut, whole = cut.divided(divisions[index]), cut
                    piece = cut.within(whole, piece)
                if grad is not None and getattr(grad, "published", None) is cut:
                    grad._local_tensor.add_(piece)
                else:
                    own: Any = over_piece(piece, cut)
                    own.published = cut  # not a gradient that the user has set, and may set again
                    if isinstance(grad, ShardedTensor):  # from before the replicas divided it
                        piece.add_(cut.within(grad.cut, grad._local_tensor))
                    elif grad is not None:  # a whole gradient, which the user has set
                        own.add_(grad)
                    GRAD.__set__(parameter, own)
                if told and grad_hooks(parameter):
                    hooked.append(parameter)
        if hooked:
            flow.wait_on_host()  # hooks may read the gradients on the host
        for parameter in hooked:
            for hook in grad_hooks(parameter):
                hook(parameter)

    def forget(self) -> None:
        """Forget what was not published (``zero_grad``, ``reset_iter_state``)."""
        for leaf in self.unsharded:
            GRAD.__set__(leaf, None)
            leaf._added = False
        if self._packed is not None and not self._in_flight:
            self._packed.release(self.source)
        self.flat = self._block = self._waiting = None
        self._view_cache = (None, [])
        self.missing, self.delayed, self.written = set(), set(), set()
        self.seen, self.has_unpacked = [False] * len(self.seen), False
        self.main.waiting = set()

    def abandon(self) -> None:
        """The same, of a step that an exception has left; nothing is under way any more."""
        self._in_flight = False
        self.forget()


def _brought(reference: weakref.ref[Gradients], index: int, *_: Any) -> None:
    """Autograd has brought the gradient of one parameter, complete for this backward."""
    gradients = reference()
    if gradients is not None:
        gradients.has_unpacked, missing = True, gradients.missing
        missing.discard(index)
        if len(missing) < 8 and gradients.missing_elements <= gradients.one_more:
            gradients.arrived()  # else there is nothing to do yet


def reduce_shares(
    flat: Tensor, shares: Shares, link: comm.Axis, divisor: float | None
) -> Iterator[comm.Pending]:
    """Reduce in place: shared spans to every rank, each divided span to one rank. On other ranks
    the contents of a divided span are undefined afterwards."""
    if shares.shared:
        packed = _pack_spans(flat, shares.shared)
        yield comm.all_reduce(packed, link, divisor=divisor)
        _unpack(flat, shares.shared, packed)
    if not shares.divided:
        return
    if shares.even:
        length = shares.sizes[0]
        packed = _pack_spans(flat, shares.divided, link.size * length)
        mine = packed.view(link.size, length)[link.rank]
        yield comm.reduce_scatter(mine, packed, link, divisor=divisor)
    else:
        packed = _pack_spans(flat, shares.divided)
        mine = counted(packed.new_empty(shares.sizes[link.rank]), "receive")
        yield comm.reduce_parts(mine, packed, shares.sizes, link, divisor=divisor)
    _unpack(flat, shares.mine, mine)


def _pack_spans(flat: Tensor, spans: Sequence[Span], length: int = 0) -> Tensor:
    """A copy of the spans of a buffer, one after another, with zeros up to ``length``."""
    views = [flat[begin:end] for begin, end in spans]
    missing = length - sum(map(len, views))
    if missing > 0:
        views.append(flat.new_zeros(missing))
    return counted(torch.cat(views), "receive")


def _unpack(flat: Tensor, spans: Sequence[Span], packed: Tensor) -> None:
    """Copy packed spans back to their places in a buffer."""
    if spans:
        views = [flat[begin:end] for begin, end in spans]
        lengths = [len(view) for view in views]
        torch._foreach_copy_(views, list(packed[: sum(lengths)].split(lengths)))
