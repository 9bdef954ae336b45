# SPDX-License-Identifier: Apache-2.0
"""Gradients of one group: accumulated, packed, reduced, published.

One microbatch of one group, and what is alive:

    param.grad  --pack-->  packed (wire dtype, whole)  --reduce-scatter-->  main grad (fp32, shard)

The buffers in which gradients wait for later microbatches before they are reduced:

    partial    whole and unreduced: zero(0), zero(1), or without gradient sync
    inner      reduced over the inner axes, partial over the outer: hsdp, hfsdp

Over an axis of replicas gradients are all-reduced. Gradients that an optimizer divides between the
replicas (``Version.divisions``) are sent only to the replica that works on them, which shows them.

The reduction over an axis divides every contribution by the size of the axis, exactly once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.buffer import Buffer
from shardwise.memory import CACHING, Source
from shardwise.placements import PARTIAL, SHARD, Placement, steps
from shardwise.shard.flow import Flow
from shardwise.shard.main_grad import MainGrad, plain_attributes, read_grad, reduce_shares
from shardwise.shard.whole_parameter import AUTOGRADS
from shardwise.tensor import UNREDUCED, ShardedTensor

if TYPE_CHECKING:
    from shardwise.shard.group import Group


class Gradients:
    """The gradients of one group, from autograd to the optimizer."""

    def __init__(self, group: Group) -> None:
        """Made again for each new main weight of the group. Does not keep the group alive."""
        self.as_computed = group.precision.gradients == "computed"
        for sharded in group.sharded if self.as_computed else ():
            sharded.grad_dtype = None  # any
        self.placements, self.main_weight = group.placements, group.main
        self.sharded, self.unsharded = group.sharded, group.unsharded
        self.main = MainGrad(group.main, group.sharded, pin=group.pin)
        self.wire_dtype = group.precision.wire_dtype(group.parameter_dtype)
        self.device, self.ranks, self.layout = group.whole_device, group.ranks, group.layout
        # A custom divisor for the whole mesh; None: the mean over its ranks.
        self.divisor: float | None = None
        self.sum_only = False  # sum on the wire and divide after, never in one pass
        self.label = ""  # of the group, for messages
        # By parameter: whether this backward, or one before whose gradients waited, brought one.
        self.brought: list[bool] = []
        self._waited: set[int] = set()  # the parameters whose gradients began to wait
        self.shows_zeros = False  # whether a parameter without a gradient shows zeros, or None
        self.unwanted: bool = False  # a backward for inputs alone: kernels write to spare memory
        self.keep = False  # whether gradients of this microbatch wait, unreduced, for a later one
        self._final = True  # whether this microbatch is the last, as the user has said
        self.last = True  # whether the gradients are reduced as far as the main grad
        self.source: Source = CACHING
        # Called when a kernel has written the gradient of one parameter.
        self.on_written: Callable[[int], None] = lambda index: None
        # Called when the gradient of one parameter is delayed, perhaps until after this backward.
        self.on_delayed: Callable[[int], None] = lambda index: None
        for index, parameter in enumerate(self.unsharded):
            parameter._gradients, parameter._index = weakref.ref(self), index
        self._steps = {last: self._plan_steps(last) for last in (False, True)}
        # Buffers are made when first used, so frozen groups have none.
        self._packed: Buffer | None = None
        self._partial: Buffer | None = None
        self._inner: Buffer | None = None
        self._views: dict[int, list[Tensor]] = {}  # by the id of a whole buffer
        self._open: Buffer | None = None  # the buffer in which this microbatch is summed
        self._open_fresh = True  # whether the contents of that buffer were undefined
        self._written: set[int] = set()  # the parameters whose gradient a kernel has written there
        self._in_flight = False  # whether a reduction of this group is under way
        self._stamp: Any = None  # main.state when gradients began to wait; None: none wait

    def take_over(self, before: Gradients) -> None:
        """Continue ``before``: the same parameters in memory of another dtype or device. ``.grad``
        of each parameter has been converted already."""
        self.divisor, self.sum_only, self.label = before.divisor, before.sum_only, before.label
        for name in ("_partial", "_inner"):
            old = getattr(before, name)
            if old is not None and old.block.live:
                dtype = self.main_weight.dtype
                new = self._buffer(dtype, "grad_accumulator", old.placements)
                new.block.acquire(CACHING)
                new.flat.copy_(old.flat)
                setattr(self, name, new)
        if before._waited:
            self._waited, self._stamp = before._waited, self.main_weight.state
            self.main_weight.version.waiting = before.main_weight.version.waiting

    # ------------------------------------------------------------------ where gradients go

    def begin(self, *, sync: bool, last: bool, zeros: bool, unwanted: bool = False) -> None:
        """A backward begins. ``sync``: reduce its gradients. ``last``: reduce as far as the main
        grad. ``zeros``: parameters without a gradient show zeros. ``unwanted``: the backward is for
        inputs alone."""
        self.shows_zeros, self.unwanted = zeros, unwanted
        waiting = [placement == PARTIAL for placement in self.placements.grad]
        self.last = sync and (last or not any(waiting))
        self._final = last
        self.keep = not sync or (all(waiting) and not last)
        self._drop_waiting()

    def count_waiting(self) -> None:
        """No backward comes: only the gradients that wait will be reduced."""
        waiting = self.main_weight.version.waiting
        self.brought = [index in waiting for index in range(len(self.unsharded))]

    def destination(self, index: int) -> tuple[Tensor, bool]:
        """The memory for the gradient of one parameter in this microbatch, and whether its contents
        are undefined. Spare memory, if the gradient is unwanted."""
        if self.unwanted:
            shape = self.layout.items[index].shape
            return torch.empty(shape, dtype=self.wire_dtype, device=self.device), True
        target = self._open_target()
        return self._views_of(target)[index], self._open_fresh and index not in self._written

    def mark_written(self, index: int) -> None:
        """A kernel has defined the gradient of one parameter in this microbatch."""
        if not self.unwanted:
            self._written.add(index)

    def _open_target(self) -> Buffer:
        if self._open is None:
            target, self._open_fresh = self._choose()
            target.block.acquire(self._source_of(target))
            self._open = target
        return self._open

    def _choose(self) -> tuple[Buffer, bool]:
        """The buffer in which this microbatch is summed, and whether its contents are undefined."""
        if self.keep or (self._partial is not None and self._partial.block.live):
            dtype = self.main_weight.dtype
            self._partial = self._partial or self._buffer(dtype, "grad_accumulator")
            return self._partial, not self._partial.block.live
        main_fresh = self.main.fresh
        # If nothing is scattered or cast, sum in the main grad itself and reduce it in place.
        unscattered = self.ranks.num_shards(self.placements.main) == 1
        if (
            unscattered
            and self.wire_dtype == self.main_weight.dtype
            and self.device == self.main_weight.flat.device
            and self.last
            and not self._inner_waits
            and (main_fresh or self._alone)
        ):
            main = self.main.ready(unused=True) if main_fresh else self.main.repaired()
            return main, main_fresh
        self._packed = self._packed or self._buffer(self.wire_dtype, "grad_transient")
        return self._packed, True

    @property
    def waits(self) -> bool:
        """Whether gradients of earlier microbatches wait to be reduced, or reduced further."""
        return self._inner_waits or (self._partial is not None and self._partial.block.live)

    @property
    def _inner_waits(self) -> bool:
        """Whether gradients of earlier microbatches were reduced over the inner axes, and wait to
        be reduced over the outer axes."""
        return self._inner is not None and self._inner.block.live

    @property
    def _alone(self) -> bool:
        """Whether a gradient needs no reduction: there is one rank, and no divisor."""
        return all(size == 1 for size in self.ranks.sizes) and self.divisor is None

    def _buffer(
        self, dtype: torch.dtype, kind: str, placements: Sequence[Placement] | None = None
    ) -> Buffer:
        """A buffer without memory. ``placements``: None for whole, unreduced gradients."""
        placements = placements or (PARTIAL,) * len(self.ranks.sizes)
        buffer = Buffer(self.layout, self.ranks, placements, dtype, self.device, kind)
        buffer.block.release(CACHING)
        buffer.block.moved = partial(self._views.pop, id(buffer), None)  # to be made again
        return buffer

    def _source_of(self, buffer: Buffer) -> Source:
        """The source of the memory of a buffer. Only packed gradients are freed within the
        backward that makes them."""
        return self.source if buffer is self._packed else CACHING

    def _views_of(self, buffer: Buffer) -> list[Tensor]:
        if buffer is self.main.buffer:
            return self.main.views()
        views = self._views.get(id(buffer))
        if views is None:
            views = self._views[id(buffer)] = buffer.views()
        return views

    # ------------------------------------------------------------------ one microbatch

    def reduce(self, runtime: Flow) -> None:
        """Reduce the gradients of this microbatch as far as ``begin`` has set."""
        # Free memory first: the reductions under way and this one must not exceed the limit.
        runtime.drain(0 if self._in_flight else runtime.max_reductions - 1)
        last = self.last
        if self.as_computed and self._take_computed():
            runtime.launch(iter(()), 0, partial(self._publish, runtime), self.label)
            return
        target = self._open_target()
        self._pack(target)
        self._open, self._written = None, set()
        if self.keep:
            self._wait()
            return
        if target is self._partial and self.wire_dtype != target.dtype:
            self._packed = self._packed or self._buffer(self.wire_dtype, "grad_transient")
            self._packed.block.acquire(self.source)
            self._packed.flat.copy_(target.flat)
            self._release(target)
            target = self._packed
        fresh = last and self.main.fresh
        if last and fresh:
            self.main.ready(unused=target is not self.main.buffer)
        elif last and target is not self.main.buffer:
            self.main.repaired()
        self._in_flight = True
        held: list[Tensor] = []
        collectives = self._reduction(runtime, target, last, fresh, held)
        # Replicas that divide matrices split a step into two collectives.
        number = len(self._steps[last]) * (2 if self.main.divisions else 1)
        finish = partial(self._finish, runtime, target, last, held)
        runtime.launch(collectives, number, finish, self.label)
        if last and self.main.buffer is not None and runtime.lanes.asynchronous:
            # Make other writers wait: autograd may add the gradient of a penalty on weights.
            done = runtime.lanes.mark("outer")
            self.main.buffer.version.reading = partial(runtime.lanes.wait, "compute", done)

    def _take_computed(self) -> bool:
        """Take the gradients as autograd computed them, without a copy. Possible if this rank has
        every parameter whole, nothing else is to be added, and each parameter got a gradient.
        Returns whether they were taken."""
        main = self.main_weight
        whole = self._alone and all(one.cut.tile is None for one in self.sharded)  # type: ignore[attr-defined]
        if not (whole and self._final and self.device == main.flat.device) or self.keep:
            return False
        if self._open is not None or self.waits or not self.main.fresh:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            grads = list(map(AUTOGRADS.__get__, self.unsharded))
            if not all(map(self._is_exact, grads)):
                return False
            for parameter in self.unsharded:
                AUTOGRADS.__set__(parameter, None)
        self.brought = [True] * len(grads)
        self.main.take(grads)
        return True

    def _release(self, buffer: Buffer) -> None:
        """Give the memory of a buffer back."""
        buffer.block.release(self._source_of(buffer))

    def _is_exact(self, grad: Tensor | None) -> bool:
        """Whether this gradient has the values that the main gradient would have."""
        if grad is None or isinstance(grad, ShardedTensor) or grad.layout is not torch.strided:
            return False
        main = self.main_weight.dtype
        exact = grad.is_contiguous() and torch.promote_types(grad.dtype, main) == main
        return exact and self.wire_dtype in (main, grad.dtype)

    def _pack(self, target: Buffer) -> None:
        """Bring the gradients that autograd has left into ``target``, in one pass over all."""
        views = self._views_of(target)
        into, values = [], []
        came = [True] * len(self.unsharded)
        with torch._C.DisableTorchFunctionSubclass():  # faster: no dispatch for each attribute
            grads = list(map(AUTOGRADS.__get__, self.unsharded))
            for parameter in self.unsharded:
                AUTOGRADS.__set__(parameter, None)
        for index, (parameter, grad) in enumerate(zip(self.unsharded, grads, strict=True)):
            if parameter._added:
                parameter._added = False
                if grad is not None and parameter.others_count:
                    views[index].add_(parameter.local_gradient(grad))
            elif grad is not None:
                into.append(views[index])
                values.append(parameter.local_gradient(grad))
            else:
                came[index] = False
                if self._open_fresh:
                    views[index].zero_()
        waiting = self.main_weight.version.waiting
        self.brought = [here or index in waiting for index, here in enumerate(came)]
        if self.last and not (self.shows_zeros or self._alone):
            for index in self._lacking():
                views[index].fill_(torch.nan)
        if into:
            combine = torch._foreach_copy_ if self._open_fresh else torch._foreach_add_
            combine(into, values)

    def _lacking(self) -> list[int]:
        """The parameters that nothing has brought a gradient, in this step. If another rank has
        one, NaN in its place says so; if none has, nobody looks at it."""
        with plain_attributes():
            shown = list(map(read_grad, self.sharded))
        return [
            index
            for index, brought in enumerate(self.brought)
            if not brought and shown[index] is None
        ]

    def _reduction(
        self, runtime: Flow, target: Buffer, last: bool, fresh: bool, held: list[Tensor]
    ) -> Iterator[comm.Pending]:
        """Issue the collectives one after another. The caller waits for each. ``held``: a list for
        tensors that must live until the reduction is done."""
        lanes = runtime.lanes
        current, lane = target.flat, "reduce"
        planned = self._steps[last]
        main = self.main.buffer if last else None
        inner_live = self._inner_waits
        divisors = self._divisors(planned)
        for position, (axis, scatter, outer) in enumerate(planned):
            if outer and lane == "reduce":
                if inner_live:  # add the earlier microbatches before the outer reduction
                    with lanes.on("reduce"):
                        current = self._join_inner(current)
                    held.append(current)  # the outer lane reads it
                    inner_live = False
                lane = "outer"
                lanes.join("outer", "reduce")
            with lanes.on(lane):  # type: ignore[arg-type]
                link = runtime.reduce_axis(self.ranks.axes[axis])
                divisor = divisors[position]
                on_wire = None if self.sum_only else divisor
                if scatter:
                    # In place, unless the result can go to the main grad at once.
                    whole, current = current, current.view(link.size, -1)[link.rank]
                    if position == len(planned) - 1 and fresh and main is not None:
                        alike = (main.dtype, main.flat.device) == (current.dtype, current.device)
                        current = main.flat if alike else current
                    yield comm.reduce_scatter(current, whole, link, divisor=on_wire)
                elif self.main.divisions:  # some gradients are sent to one replica only
                    yield from reduce_shares(current, self.main.shares(axis), link, on_wire)
                else:
                    yield comm.all_reduce(current, link, divisor=on_wire)
                if self.sum_only and divisor is not None:
                    current.div_(divisor)
        with lanes.on(lane):  # type: ignore[arg-type]
            if inner_live and last:
                current = self._join_inner(current)
            if last and not planned and self.divisor is not None:
                current.div_(self.divisor)
            self._store(current, last, fresh)

    def _plan_steps(self, last: bool) -> list[tuple[int, bool, bool]]:
        """(axis, whether it scatters, whether it runs in the last microbatch only), in order."""
        grad, main, sizes = self.placements.grad, self.placements.main, self.ranks.sizes
        inside = steps((PARTIAL,) * len(grad), grad)
        outside = steps(grad, main) if last else ()
        planned = [(axis, there == SHARD, False) for axis, _, there in inside]
        # If no axis is reduced in each microbatch, the whole reduction runs on one lane.
        planned += [(axis, there == SHARD, bool(inside)) for axis, _, there in outside]
        return [step for step in planned if sizes[step[0]] > 1]

    def _divisors(self, planned: Sequence[tuple[int, bool, bool]]) -> list[float | None]:
        """The divisor of each step: the size of its axis. The first step applies a custom divisor,
        also if it is an outer step (because the inner axes have one rank)."""
        if self.divisor is None:
            return [float(self.ranks.sizes[axis]) for axis, _, _ in planned]
        return [self.divisor if position == 0 else None for position in range(len(planned))]

    def _join_inner(self, current: Tensor) -> Tensor:
        """The sum of this microbatch and those that wait for the outer reduction."""
        assert self._inner is not None
        total = self._inner.flat.add_(current)
        return total if total.dtype == current.dtype else total.to(current.dtype)

    def _store(self, value: Tensor, last: bool, fresh: bool) -> None:
        """Put a reduced gradient into the main grad, or where it waits for later microbatches."""
        if last:
            assert self.main.buffer is not None
            into = self.main.buffer.flat
            if into.data_ptr() == value.data_ptr():
                return
        else:
            dtype, grad = self.main_weight.dtype, self.placements.grad
            self._inner = self._inner or self._buffer(dtype, "grad_accumulator", grad)
            fresh = not self._inner.block.live
            self._inner.block.acquire(CACHING)
            into = self._inner.flat
            self._wait()
        if fresh:
            into.copy_(value, non_blocking=True)
        else:
            into.add_(value.to(into.device))

    def _finish(self, runtime: Flow, target: Buffer, last: bool, held: list[Tensor]) -> None:
        """The reduction is done, and the compute lane has waited for it."""
        self._in_flight = False
        held.clear()
        if target is not self.main.buffer:
            self._release(target)
        if last:
            if self.main.buffer is not None:
                self.main.buffer.version.reading = None
            if self._inner is not None:
                self._inner.block.release(CACHING)
            self._wait_no_more()
            self._publish(runtime)

    def _publish(self, runtime: Flow) -> None:
        """Show the gradients as ``.grad``, and call the hooks of the parameters."""
        hooked = self.main.publish(self.unsharded, self.brought, self.shows_zeros)
        if hooked:
            runtime.wait_on_host()  # hooks may read the gradients on the host
        for parameter in hooked:
            for hook in list(parameter._post_accumulate_grad_hooks.values()):  # type: ignore[attr-defined]
                hook(parameter)

    # ------------------------------------------------------------------ between backwards

    def tidy(self) -> None:
        """Prepare for a forward: give back the memory of gradients that the user dropped."""
        self.main.give_back()
        self._drop_waiting()
        if self._stamp is not None and self._stamp != self.main_weight.state:
            names = [item.name for item in self.layout.items]
            raise RuntimeError(
                f"the main weights of {names} changed while their gradients waited to be reduced: "
                f"the optimizer stepped before the last microbatch. {UNREDUCED}"
            )

    def unreduced(self) -> list[int]:
        """Parameters whose gradient of this microbatch has come and was not reduced."""
        with plain_attributes():
            grads = list(map(read_grad, self.unsharded))
        if not self._written and all(map(is_, grads, repeat(None))):
            return []
        return [i for i, grad in enumerate(grads) if grad is not None or i in self._written]

    def kept(self) -> list[int]:
        """Parameters with a gradient, or whose earlier microbatches wait to be reduced."""
        waiting = self.main_weight.version.waiting
        with plain_attributes():
            grads = map(read_grad, self.sharded)
            return [i for i, grad in enumerate(grads) if i in waiting or grad is not None]

    def discard(self) -> None:
        """Forget all gradients, also those that wait (``reset_iter_state``)."""
        for parameter in self.unsharded:
            parameter.grad = None  # of the parameter at rest too
            parameter._added = False
        for buffer in (self._packed, self._partial, self._inner):
            if buffer is not None:
                self._release(buffer)
        self._open, self._written, self._in_flight = None, set(), False
        self._wait_no_more()

    def _wait(self) -> None:
        """Note that the gradients summed so far wait for a later microbatch."""
        self._stamp = self.main_weight.state
        self._waited = {index for index, brought in enumerate(self.brought) if brought}
        self.main_weight.version.waiting = set(self._waited)

    def _drop_waiting(self) -> None:
        """Forget the waiting gradients of parameters whose ``.grad`` was dropped or set."""
        waiting = self.main_weight.version.waiting
        dropped = self._waited - waiting
        if not dropped:
            return
        for buffer in (self._partial, self._inner):
            if buffer is not None and buffer.block.live and not waiting:
                self._release(buffer)
            elif buffer is not None and buffer.block.live:
                for index in sorted(dropped):
                    buffer.view(index).zero_()
        if waiting:
            self._waited = set(waiting)
        else:
            self._wait_no_more()

    def _wait_no_more(self) -> None:
        self._stamp, self._waited = None, set()
        self.main_weight.version.waiting = set()
