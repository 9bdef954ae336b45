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
from shardwise.core.memory import TracePool, counted
from shardwise.core.mesh import Ranks
from shardwise.core.placements import PARTIAL, SHARD, Placement, Placements, steps
from shardwise.core.streams import LaneName
from shardwise.core.tensor import ShardedTensor, over_piece
from shardwise.shard.flow import Flow


class Gradients:
    """The gradients of one group. Refers to its tensors, not to the group."""

    main: Buffer
    sharded: Sequence[nn.Parameter]  # at rest
    unsharded: Sequence[Any]  # the leaves, which refer to this object

    def __init__(
        self, layout: Layout, ranks: Ranks, placements: Placements, divisor: float | None
    ) -> None:
        self.ranks, self.layout = ranks, layout
        self.divisor = divisor  # of the sum; None: the number of ranks
        self.sum_only = False  # sum in collectives and divide after, never in one pass
        self.unused = "none"
        self.pool: TracePool | None = None
        # Called when a gradient has come (from autograd, or a delayed one from a kernel).
        self.arrived: Callable[[], None] = lambda: None
        # If no more elements than this are missing, the last gradient may be next: that of one
        # matrix, with those of its bias and norm.
        sizes = [item.numel for item in layout.items]
        self.one_more = max(sizes) + sum(sizes) // 64
        # Of the microbatch that runs: whether the user said that it is the last of its step,
        # whether it is reduced as far as main, and whether it is kept unreduced.
        self._final = self._to_main = True
        self._keep = False
        self._wanted: set[int] = set()  # the gradients that this backward was asked for
        self.missing: set[int] = set()  # those of them that it has not brought yet
        self.missing_elements = 0  # of these
        self.delayed: set[int] = set()  # what kernels will write later, perhaps after backward
        self.late = False  # whether forwards say that some gradients will be delayed
        self.has_unpacked = False  # whether autograd has left gradients on the leaves
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []  # the part of each parameter in ``_flat``
        self.written: set[int] = set()  # the parts that somebody has defined
        # By parameter: whether a gradient came since the last time that they were published.
        self._seen = [False] * len(layout.items)
        self._waiting: Tensor | None = None
        self._in_flight = False
        self._nodes: dict[int, Any] = {}
        self._shares_of: Any = None  # the divisions for which these were planned
        self._shares_by_axis: dict[int, Shares] = {}
        grad, main = placements.grad, placements.main
        # (axis, whether it scatters): in each microbatch, and in the last one only.
        self._inside = self._collectives_between((PARTIAL,) * len(grad), grad)
        self._outside = self._collectives_between(grad, main)
        self._waits = PARTIAL in grad  # whether reductions wait for the last microbatch
        self._nothing_inside = all(placement == PARTIAL for placement in grad)

    def _collectives_between(
        self, here: tuple[Placement, ...], there: tuple[Placement, ...]
    ) -> list[tuple[int, bool]]:
        sizes = self.ranks.sizes
        return [(s.axis, s.there == SHARD) for s in steps(here, there) if sizes[s.axis] > 1]

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
        self.main, self.sharded, self.unsharded = main, sharded, unsharded
        self.wire_dtype, self.device, self.pin = wire_dtype, device, pin
        # Whether nothing is scattered or cast: then ``_flat`` becomes ``.grad`` in place.
        alike = (wire_dtype, device) == (main.dtype, main.flat.device)
        self._becomes_grad = alike and main.flat.numel() == self.layout.numel
        self._nodes, me = {}, weakref.ref(self)
        for index, leaf in enumerate(unsharded):
            leaf._gradients, leaf._index = me, index
        self.listen()

    def name(self, index: int) -> str:
        return self.layout.items[index].name

    def listen(self) -> None:
        """Be called for each gradient that autograd has brought. The node that ends a leaf's
        gradient runs once in each backward that reaches the leaf, also if a kernel has written the
        gradient elsewhere. A leaf refers to its node weakly, and hooks go with it: keep it."""
        me = weakref.ref(self)
        for index, leaf in enumerate(self.unsharded):
            if leaf.requires_grad and index not in self._nodes:
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
        self._final, self.unused = last, unused
        self._to_main = sync and (last or not self._waits)
        self._keep = not sync or (self._nothing_inside and not last)
        self._wanted, self.missing, self.missing_elements = set(), set(), 0
        self.expect()

    def expect(self) -> None:
        """Count what the graph that runs now will bring."""
        for index, node in self._nodes.items():
            if index not in self._wanted and self.unsharded[index].requires_grad and will_run(node):
                self._wanted.add(index)
                self.missing.add(index)
                self.missing_elements += self.layout.items[index].numel

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

    @torch.no_grad()
    def destination(self, index: int) -> tuple[Tensor, bool]:
        """The memory for the gradient of one parameter in this microbatch, and whether its contents
        are undefined. Spare memory, if nobody asked for the gradient."""
        if not self.is_wanted(index):
            shape = self.layout.items[index].shape
            return torch.empty(shape, dtype=self.wire_dtype, device=self.device), True
        self._open()
        return self._views[index].data, index not in self.written

    def _open(self) -> None:
        """Take memory for the flat gradient of this microbatch, unless there is some."""
        if self._flat is not None:
            return
        self.written = set()
        numel, dtype, kind = self.layout.numel, self.wire_dtype, "grad_transient"
        if self._becomes_grad or self._keep:
            dtype, kind = self.main.dtype, "grad" if self._becomes_grad else "grad_accumulator"
        elif self.pool is not None:
            self._take(self.pool.take(numel, dtype, self.device, kind))
            return
        self._take(counted(torch.empty(numel, dtype=dtype, device=self.device), kind))

    def _take(self, flat: Tensor) -> None:
        pieces = self.layout.pieces(0, self.layout.num_shards)
        self._flat = flat
        self._views = [flat.as_strided(shape, strides, at) for _, _, at, shape, strides in pieces]

    # ------------------------------------------------------------------ reduce

    @property
    def pending(self) -> bool:
        """Whether gradients wait here for a reduction."""
        waits = self._waiting is not None and not self._in_flight
        return self._flat is not None or waits or self.has_unpacked

    @torch.no_grad()
    def reduce(self, flow: Flow) -> None:
        """Pack, and bring gradients as far as this microbatch asks for."""
        # Free memory first: the reductions under way and this one must not exceed the limit.
        flow.drain(0 if self._in_flight else flow.max_reductions - 1)
        main = self.main
        self._pack()
        if not self._to_main:
            main.waiting = {index for index, seen in enumerate(self._seen) if seen}
        if self._keep:
            return
        self._fill()
        flat, self._flat, self._views, self.written = self._on_wire(), None, [], set()
        came: list[bool] = []
        ready = None
        if self._to_main:
            came, self._seen = self._seen, [False] * len(self._seen)
            ready = flat if self._becomes_grad else self._room_for_result()
        self._in_flight = True
        held = [flat]
        single = len(self._inside) + len(self._outside) * self._to_main <= 1 and not main.divisions
        finish = partial(self._finish, flow, held, ready, came)
        flow.launch(self._send(flow, held, ready), finish, single=single)

    def _pack(self) -> None:
        """Bring what autograd left on the leaves into ``_flat``, in one pass over all."""
        self._open()
        views, written = self._views, self.written
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
            self._seen[index] = True

    def _fill(self) -> None:
        """Define the parts of ``_flat`` that nobody wrote. (Padding is never read.)"""
        if len(self.written) == len(self.unsharded):
            return
        quiet: list[Tensor] = []
        loud = self._to_main and self._final and self.unused == "none"
        for index, view in enumerate(self._views):
            if index in self.written:
                continue
            if loud and not self._seen[index] and self.sharded[index].grad is None:
                view.fill_(torch.nan)
                if comm.observer is not None:
                    comm.observer.lacks(self.name(index))
            else:
                quiet.append(view)
        if quiet:
            torch._foreach_zero_(quiet)

    def _on_wire(self) -> Tensor:
        """The flat gradient in the dtype that is sent."""
        kept = self._flat
        assert kept is not None
        if kept.dtype == self.wire_dtype:
            return kept
        self._flat, self._keep = None, False
        self._open()
        assert self._flat is not None
        return self._flat.copy_(kept)

    def _room_for_result(self) -> Tensor:
        """Memory for the new gradients, which nobody else will hold."""
        numel, dtype, device = self.main.flat.numel(), self.main.dtype, self.main.flat.device
        pin = self.pin and device.type == "cpu"
        return counted(torch.empty(numel, dtype=dtype, device=device, pin_memory=pin), "grad")

    def _send(self, flow: Flow, held: list[Tensor], ready: Tensor | None) -> Iterator[None]:
        """Issue the collectives one after another, each after the one before.

        ``held``: what must stay in memory until compute has waited; at first the packed gradient.
        ``ready``: the memory for the result of the last microbatch; None before it.
        """
        lanes, main, current = flow.lanes, self.main, held[0]
        joins = ready is not None and self._waiting is not None
        chain = [*self._inside, *self._outside] if ready is not None else self._inside
        # The last collective divides, if nothing is added after it.
        divides = bool(chain) and not self.sum_only and (bool(self._outside) or not joins)
        divisor = self._divisor if ready is not None else None
        lane: LaneName = "reduce"
        for number, (axis, scatters) in enumerate(chain):
            is_last = number == len(chain) - 1
            if number == len(self._inside):
                if joins:  # earlier microbatches, before the outer reduction
                    with lanes.on("reduce"):
                        current = self._joined(current)
                    held.append(current)
                if number:
                    lane = "outer"
                    lanes.join("outer", "reduce")
            on_wire = divisor if is_last and divides else None
            link = flow.reduce_axis(self.ranks.axes[axis])
            with lanes.on(lane):
                if scatters:
                    whole, current = current, current.view(link.size, -1)[link.rank]
                    if is_last and ready is not None and self._waiting is None:
                        alike = (ready.dtype, ready.device) == (current.dtype, current.device)
                        current = ready if alike else current
                    pending = comm.reduce_scatter(current, whole, link, divisor=on_wire)
                elif main.divisions:
                    yield from reduce_shares(current, self._shares(axis), link, on_wire)
                    continue
                else:
                    pending = comm.all_reduce(current, link, divisor=on_wire)
                yield
                pending.wait()
        with lanes.on(lane):
            if ready is not None:
                if self._waiting is not None:
                    current = self._joined(current)
                if divisor is not None and not divides:
                    current.div_(divisor)
                if ready.data_ptr() != current.data_ptr():
                    ready.copy_(current, non_blocking=True)
            elif self._waiting is not None:
                self._waiting.add_(current)
            else:
                made = torch.empty(current.numel(), dtype=main.dtype, device=self.device)
                self._waiting = counted(made, "grad_accumulator").copy_(current)

    @property
    def _divisor(self) -> float | None:
        """The divisor of the sum; None for one."""
        divisor = math.prod(self.ranks.sizes) if self.divisor is None else self.divisor
        return None if divisor == 1 else float(divisor)

    def _joined(self, current: Tensor) -> Tensor:
        """The sum of this microbatch and those that wait."""
        assert self._waiting is not None
        total, self._waiting = self._waiting.add_(current), None
        return total.to(current.dtype)

    def _shares(self, axis: int) -> Shares:
        """The elements that the reduction over an axis brings to each replica, where replicas
        divide the gradients of an optimizer between themselves."""
        main, over = self.main, self.ranks
        if self._shares_of is not main.divisions:
            self._shares_of, self._shares_by_axis = main.divisions, {}
        if axis not in self._shares_by_axis:
            pieces = [(low, high, offset) for low, high, offset, *_ in main.pieces]
            self._shares_by_axis[axis] = replica_shares(
                pieces, main.divisions, main.placements, over.sizes, over.coordinate, axis
            )
        return self._shares_by_axis[axis]

    # ------------------------------------------------------------------ publish

    def _finish(
        self, flow: Flow, held: list[Tensor], ready: Tensor | None, came: list[bool]
    ) -> None:
        """The reduction is done, and compute has waited for it."""
        self._in_flight = False
        if self.pool is not None:
            self.pool.give(held[0])
        held.clear()
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
                if not told and grad is None:
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

    def forget(self, under_way: bool = True) -> None:
        """Forget what was not published (``zero_grad``). ``under_way=False``: after a step that an
        exception has left, when nothing is."""
        self._in_flight = self._in_flight and under_way
        for leaf in self.unsharded:
            GRAD.__set__(leaf, None)
            leaf._added = False
        self._flat, self._views, self._waiting = None, [], None
        self.missing, self.delayed, self.written, self.missing_elements = set(), set(), set(), 0
        self._seen, self.has_unpacked = [False] * len(self._seen), False
        self.main.waiting = set()


def _brought(reference: weakref.ref[Gradients], index: int, *_: Any) -> None:
    """Autograd has brought the gradient of one parameter, complete for this backward."""
    gradients = reference()
    if gradients is not None:
        gradients.has_unpacked = True
        if index in gradients.missing:
            gradients.missing.remove(index)
            gradients.missing_elements -= gradients.layout.items[index].numel
        if gradients.missing_elements <= gradients.one_more:
            gradients.arrived()  # else there is nothing to do yet


def reduce_shares(
    flat: Tensor, shares: Shares, link: comm.Axis, divisor: float | None
) -> Iterator[None]:
    """Reduce in place: shared spans to every rank, each divided span to one rank. On other ranks
    the contents of a divided span are undefined afterwards."""
    if shares.shared:
        packed = _pack_spans(flat, shares.shared)
        pending = comm.all_reduce(packed, link, divisor=divisor)
        yield
        pending.wait()
        _unpack(flat, shares.shared, packed)
    if not shares.divided:
        return
    if shares.even:
        length = shares.sizes[0]
        packed = _pack_spans(flat, shares.divided, link.size * length)
        mine = packed.view(link.size, length)[link.rank]
        pending = comm.reduce_scatter(mine, packed, link, divisor=divisor)
    else:
        packed = _pack_spans(flat, shares.divided)
        mine = counted(packed.new_empty(shares.sizes[link.rank]), "receive")
        pending = comm.reduce_parts(mine, packed, shares.sizes, link, divisor=divisor)
    yield
    pending.wait()
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
