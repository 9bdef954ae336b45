# SPDX-License-Identifier: Apache-2.0
"""The only file that calls collectives: one interface for NCCL, gloo and torch's ``fake`` backend.

    all_gather      | a |   |   |  ->  | a | b | c |     every rank ends with all shards
    reduce_scatter  | a1 b1 c1 |   ->  | a1+a2+a3  |     every rank ends with its shard of the sum
    reduce_parts    | a1 a1 b1 |   ->  | a1+a2 ... |     the same, for parts of any sizes
    all_reduce      | a1 |         ->  | a1+a2+a3  |
    all_to_all      | for 0 | for 1 |  ->  | from 0 | from 1 |     any sizes, exact

With NCCL the native collectives run on the current stream. With gloo all collectives are written as
point-to-point messages. This is 2 to 4 times as fast as gloo's own collectives (gloo's
reduce-scatter is an all-reduce inside) and works for any sizes. Sums are taken in rank order in at
least fp32, so the bits of a gradient depend neither on the strategy nor on the rank that adds.

Every call is counted: ``with record() as calls`` lists operation, axis and bytes. Only checks of a
few bytes (``agree``) are not counted.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from shardwise.core import streams
from shardwise.core.memory import counted

ReduceName = Literal["sum", "max", "min"]
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LOCAL_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
# The size up to which an all-reduce over gloo is one round of messages.
_ONE_ROUND_BYTES = 1 << 18
_SMALL_OBJECT = 2048  # bytes of a rank's object that travel in the first exchange of ``agree``


# ------------------------------------------------------------------------------ axes


@dataclass(eq=False)
class Axis:
    """One mesh axis as a rank sees it: its group, and where this rank stands in it."""

    name: str
    group: Any  # a ProcessGroup; None: the axis has no other ranks, see :meth:`pretended`
    size: int
    rank: int
    backends: dict[str, str]  # by device type
    peers: tuple[int, ...]  # global ranks, by rank on the axis

    @classmethod
    def pretended(cls, name: str, size: int, rank: int, backend: str) -> Axis:
        """An axis for a plan: collectives of meta tensors are counted as ``backend`` would send
        them, and nothing is sent."""
        return cls(name, None, size, rank, {"meta": backend}, tuple(range(size)))

    @property
    def pretends(self) -> bool:
        """Whether one process poses as a rank of many: in a plan, or on torch's fake backend."""
        return "meta" in self.backends or "fake" in self.backends.values()

    def __deepcopy__(self, memo: Any) -> Axis:
        """The same object: a copied model with spread experts uses the axes of the original."""
        return self

    def backend_for(self, tensor: Tensor) -> str | None:
        return self.backends.get(tensor.device.type)


_AXES: WeakKeyDictionary[Any, dict[str, Axis]] = WeakKeyDictionary()  # by group, then by name


def as_axis(group: dist.ProcessGroup | Axis, name: str | None = None) -> Axis:
    """The Axis of a process group. One group may be an axis of several meshes, under several
    names. A pretended mesh has axes in the place of groups."""
    if isinstance(group, Axis):
        return group
    axes = _AXES.setdefault(group, {})
    if name is None:
        name = next(iter(axes), "group")
    if name not in axes:
        axes[name] = Axis(
            name=name,
            group=group,
            size=dist.get_world_size(group),
            rank=dist.get_rank(group),
            backends=_backends(group),
            peers=tuple(dist.get_process_group_ranks(group)),
        )
    return axes[name]


def _backends(group: Any) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` and the like."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)  # type: ignore[misc]


# ------------------------------------------------------------------------------ counting


class Call(NamedTuple):
    """One collective as this rank issued it. ``nbytes`` is the size of the whole buffer that is
    gathered, scattered or reduced; for an all-to-all, the bytes that this rank sends to peers."""

    operation: str
    axis: str
    size: int
    nbytes: int
    arriving: int | None = None  # bytes that an all-to-all brings; None: as many as are sent

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave this rank under a bandwidth-optimal algorithm."""
        if self.operation in ("all_to_all", "broadcast"):
            return self.nbytes
        once = self.nbytes * (self.size - 1) // self.size
        return 2 * once if self.operation == "all_reduce" else once

    @property
    def received_bytes(self) -> int:
        """Bytes that reach this rank, under the same algorithm."""
        return self.wire_bytes if self.arriving is None else self.arriving


_recorders: list[list[Call]] = []


@contextmanager
def record() -> Iterator[list[Call]]:
    """List every collective issued by this process while the context is open."""
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # by identity: two lists that happen to be equal are still two recorders
        _recorders[:] = [other for other in _recorders if other is not calls]


def recorded(
    operation: str, axis: str, size: int, nbytes: int, arriving: int | None = None
) -> None:
    """Add a collective to the list of every open ``record()``."""
    for calls in _recorders:
        calls.append(Call(operation, axis, size, nbytes, None if arriving == nbytes else arriving))


# Of ``sw.debug``: ``issued(call, axis)`` before each collective, ``lacks(name)`` for a parameter
# that is reduced and got no gradient on this rank.
observer: Any = None


# ------------------------------------------------------------------------------ messages


class Pending:
    """A collective under way. ``wait`` makes its result usable by work that the caller issues next.

    With NCCL the result is usable at once on the stream that issued it, and ``wait`` does nothing.
    With gloo ``wait`` blocks the host until the messages have arrived, then runs the local rest.
    """

    __slots__ = ("_finish", "_landed", "_what", "_works")

    def __init__(
        self,
        what: str = "",
        works: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        landed: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._works, self._finish, self._landed = what, works, finish, landed

    def wait(self) -> None:
        works, finish = self._works, self._finish
        if not works and finish is None:
            return
        self._works, self._finish = (), None
        with streams.stalling(self._what):
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{self._what} failed: {error}") from error
            if self._landed is not None:
                self._landed()
            if finish is not None:
                finish()

    def __del__(self) -> None:
        """Messages of a collective that nobody waits for arrive all the same: gloo would drop them
        with their memory, and the next collective would take them for its own."""
        if not sys.is_finalizing():
            with suppress(RuntimeError):  # a peer is gone
                for work in self._works:
                    work.wait()

    def then(self, finish: Callable[[], None]) -> Pending:
        """This collective with ``finish`` as its local rest; without messages it runs at once."""
        if not self._what:
            finish()
        else:
            self._finish = finish
        return self


_DONE = Pending()


def _messages(
    operation: str,
    axis: Axis,
    *parts: tuple[Sequence[Tensor], Sequence[Tensor]],
    finish: Callable[[], None] | None = None,
    second_round: bool = False,
) -> Pending:
    """For each of the ``parts`` (outgoing, incoming), send ``outgoing[peer]`` to each peer and
    receive ``incoming[peer]``, except empty tensors. Messages between two ranks arrive in the order
    in which they were sent. A second round begins in a wait, which may come at different moments on
    the ranks, so it has a tag of its own."""
    what = f"{operation} over axis '{axis.name}' (rank {axis.rank} of {axis.size})"
    if axis.group is None:
        return Pending(what, (), finish)
    works: list[Any] = []
    tag, received = int(second_round), 0
    for outgoing, incoming in parts:
        # Start with the next rank, so that not all ranks talk to rank 0 first.
        for step in range(1, axis.size):
            target, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            if (message := incoming[source]).numel():
                works.append(dist.irecv(_wire(message), axis.peers[source], axis.group, tag))
                received += message.nbytes
            if (message := outgoing[target]).numel():
                works.append(dist.isend(_wire(message), axis.peers[target], axis.group, tag))
    watcher = streams.watcher()
    landed = watcher.flight(operation, axis.name, received) if watcher and works else None
    return Pending(what, works, finish, landed)


def _room_for(message: Tensor) -> Tensor:
    """Memory for a peer's message, until it has been added up."""
    return counted(torch.empty_like(message), "receive")


def _wire(tensor: Tensor) -> Tensor:
    """A view that every backend can send: float8 values travel as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _by_messages(axis: Axis, tensor: Tensor) -> bool:
    return axis.backend_for(tensor) == "gloo"


def _ran_elsewhere(
    axis: Axis, collective: Callable[..., Pending], out: Tensor, *sources: Tensor
) -> bool:
    """Run ``collective(out, *sources)`` on copies on another device, where the axis cannot send
    from the memory of ``out``: gloo reads host memory, NCCL device memory."""
    backend, place = axis.backend_for(out), torch.device("cpu")
    if axis.group is None or (backend and (out.device == place or backend != "gloo")):
        return False
    if backend is None:
        place = torch.device("cuda", torch.cuda.current_device())
    moved = [tensor.to(place) for tensor in (out, *sources)]
    collective(*moved).wait()
    out.copy_(moved[0])
    return True


def _counted_only(
    operation: str, axis: Axis, out: Tensor, nbytes: int, arriving: int | None = None
) -> bool:
    """Count a collective, and whether this is all: in a plan, whose meta tensors have no bytes to
    send (gloo goes on, because it receives into memory that plans count too)."""
    if observer is not None:
        observer.issued(Call(operation, axis.name, axis.size, nbytes, arriving), axis)
    recorded(operation, axis.name, axis.size, nbytes, arriving)
    return out.is_meta and axis.pretends and not _by_messages(axis, out)


def _native(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renamed two collectives; 2.11 has only the old names."""
    return getattr(dist, new, None) or getattr(dist, old)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------ the collectives


def all_gather(out: Tensor, shard: Tensor, axis: Axis) -> Pending:
    """``out`` = the shards of all ranks, in rank order. ``shard`` may be this rank's part of
    ``out``."""
    return all_gather_together([(out, shard)], axis)


def all_gather_together(parts: Sequence[tuple[Tensor, Tensor]], axis: Axis) -> Pending:
    """:func:`all_gather` for several pairs (out, shard) on one device, as one collective."""
    first = parts[0][0]
    for out, shard in parts:
        assert out.numel() == shard.numel() * axis.size and out.dtype == shard.dtype
        mine = out.view(-1).narrow(0, axis.rank * shard.numel(), shard.numel())
        if (axis.size == 1 or _by_messages(axis, out)) and mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
    if axis.size == 1:
        return _DONE

    if all(_ran_elsewhere(axis, partial(all_gather, axis=axis), *pair) for pair in parts):
        return _DONE
    if _counted_only("all_gather", axis, first, sum(out.nbytes for out, _ in parts)):
        return _DONE
    if _by_messages(axis, first):
        chunks = [out.view(-1).chunk(axis.size) for out, _ in parts]
        return _messages("all_gather", axis, *(([c[axis.rank]] * axis.size, c) for c in chunks))
    if len(parts) == 1:
        gather = _native("all_gather_single", "all_gather_into_tensor")
        gather(_wire(first), _wire(parts[0][1]), group=axis.group)
    else:
        outs, shards = ([pair[side] for pair in parts] for side in (0, 1))
        axis.group.allgather_into_tensor_coalesced(outs, shards).wait()
    return _DONE


def reduce_scatter(
    out: Tensor, full: Tensor, axis: Axis, *, divisor: float | None = None
) -> Pending:
    """``out`` = this rank's shard of the sum over ranks, divided by ``divisor`` if one is given.
    ``out`` may be this rank's part of ``full``; ``full`` is read until ``wait``."""
    assert full.numel() == out.numel() * axis.size and out.dtype == full.dtype
    if axis.size == 1:
        if out.data_ptr() != full.data_ptr():
            out.copy_(full)
        if divisor not in (None, 1):
            out.div_(divisor)
        return _DONE
    again, nbytes = partial(reduce_scatter, axis=axis, divisor=divisor), full.nbytes
    if _ran_elsewhere(axis, again, out, full) or _counted_only("reduce_scatter", axis, out, nbytes):
        return _DONE
    if _by_messages(axis, full):
        parts = full.view(-1).chunk(axis.size)
        terms = [part if r == axis.rank else _room_for(part) for r, part in enumerate(parts)]
        add_up = partial(_sum_in_rank_order, out, terms, divisor)
        return _messages("reduce_scatter", axis, (parts, terms), finish=add_up)
    operation, rest = _native_sum(axis, divisor)
    scatter = _native("reduce_scatter_single", "reduce_scatter_tensor")
    scatter(out, full, op=operation, group=axis.group)
    if rest is not None:
        out.div_(rest)
    return _DONE


def reduce_parts(
    out: Tensor,
    source: Tensor,
    sizes: Sequence[int],
    axis: Axis,
    *,
    divisor: float | None = None,
) -> Pending:
    """A reduce-scatter of parts that are ``sizes[rank]`` long: one all-to-all of exact sizes, then
    a sum in rank order on the receiver. An all-reduce that sums in rank order (gloo's) has the same
    bits. ``source`` is read until ``wait``."""
    length = sizes[axis.rank]
    assert out.numel() == length and out.dtype == source.dtype
    if axis.size == 1:
        return reduce_scatter(out, source, axis, divisor=divisor)
    received = counted(source.new_empty(axis.size * length), "receive")
    messages = all_to_all(received, source, [length] * axis.size, sizes, axis)

    def add_up() -> None:
        if length:
            _sum_in_rank_order(out, received.view(axis.size, length).unbind(), divisor)

    return messages.then(add_up)


def _sum_in_rank_order(
    out: Tensor, terms: Sequence[Tensor], divisor: float | None, op: ReduceName = "sum"
) -> None:
    narrow = out.is_floating_point() and out.element_size() < 4
    combine = _LOCAL_REDUCE[op]
    if narrow and op == "sum":
        total = terms[0].float()
        for term in terms[1:]:
            total.add_(term)
        if divisor not in (None, 1):
            total.div_(divisor)
        out.copy_(total.view_as(out))
        return
    flat = out.view(-1)
    # The sum goes into new memory if ``out`` aliases a term that is still to be read.
    aliased = any(term.data_ptr() == flat.data_ptr() for term in terms[2:])
    target = torch.empty_like(flat) if aliased else flat
    combine(terms[0].view(-1), terms[1].view(-1), out=target)
    for term in terms[2:]:
        combine(target, term.view(-1), out=target)
    if divisor not in (None, 1):
        target.div_(divisor)
    if aliased:
        flat.copy_(target)


def _native_sum(axis: Axis, divisor: float | None) -> tuple[Any, float | None]:
    """The reduce op, and the divisor that is left to apply after it, if any."""
    if divisor in (None, 1):
        return dist.ReduceOp.SUM, None
    if divisor == axis.size:
        return dist.ReduceOp.AVG, None
    if "nccl" in axis.backends.values():
        return dist._make_nccl_premul_sum(1.0 / divisor), None  # type: ignore[attr-defined,operator]
    return dist.ReduceOp.SUM, divisor


def all_reduce(
    tensor: Tensor, axis: Axis, op: ReduceName = "sum", *, divisor: float | None = None
) -> Pending:
    """``tensor`` = the sum (maximum, minimum) over ranks, in place, the same bits on all ranks."""
    if axis.size == 1:
        if divisor not in (None, 1):
            tensor.div_(divisor)
        return _DONE
    again, nbytes = partial(all_reduce, axis=axis, op=op, divisor=divisor), tensor.nbytes
    if _ran_elsewhere(axis, again, tensor) or _counted_only("all_reduce", axis, tensor, nbytes):
        return _DONE
    if _by_messages(axis, tensor):
        return _all_reduce_messages(axis, tensor.view(-1), op, divisor)
    operation, rest = (_REDUCE_OPS[op], None) if op != "sum" else _native_sum(axis, divisor)
    dist.all_reduce(tensor, op=operation, group=axis.group)
    if rest is not None:
        tensor.div_(rest)
    return _DONE


def _all_reduce_messages(
    axis: Axis, flat: Tensor, op: ReduceName, divisor: float | None
) -> Pending:
    """One round in which every rank sends all to all, or, for a long tensor, a reduce-scatter and a
    gather, whose bytes do not grow with the number of ranks."""
    if flat.nbytes * axis.size <= _ONE_ROUND_BYTES:
        parts, mine = [flat] * axis.size, flat
    else:
        length = -(-flat.numel() // axis.size)
        parts = [flat[r * length : (r + 1) * length] for r in range(axis.size)]
        mine = parts[axis.rank]
    terms = [parts[r] if r == axis.rank else _room_for(mine) for r in range(axis.size)]

    def add_up() -> None:
        _sum_in_rank_order(mine, terms, divisor, op)
        if mine is not flat:
            shared = [mine] * axis.size, parts
            _messages("all_reduce", axis, shared, second_round=True).wait()

    return _messages("all_reduce", axis, (parts, terms), finish=add_up)


def all_to_all(
    out: Tensor, source: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], axis: Axis
) -> Pending:
    """Send ``sizes[peer]`` elements of ``source`` to each peer; ``out`` receives ``out_sizes``."""
    assert out.numel() == sum(out_sizes) and source.numel() == sum(sizes)
    if axis.size == 1:
        out.copy_(source)
        return _DONE
    width, here = source.element_size(), axis.rank
    sent, arriving = sum(sizes) - sizes[here], sum(out_sizes) - out_sizes[here]
    again = partial(all_to_all, out_sizes=out_sizes, sizes=sizes, axis=axis)
    nbytes = sent * width, arriving * width
    if _ran_elsewhere(axis, again, out, source) or _counted_only("all_to_all", axis, out, *nbytes):
        return _DONE
    lengths = list(out_sizes), list(sizes)
    if _by_messages(axis, out):
        incoming, outgoing = out.split(lengths[0]), source.split(lengths[1])
        incoming[here].copy_(outgoing[here])
        return _messages("all_to_all", axis, (outgoing, incoming))
    dist.all_to_all_single(_wire(out), _wire(source), *lengths, group=axis.group)
    return _DONE


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Pending:
    """``tensor`` = the tensor of the rank ``source`` of the axis."""
    if axis.size == 1:
        return _DONE
    again, nbytes = partial(broadcast, axis=axis, source=source), tensor.nbytes
    if _ran_elsewhere(axis, again, tensor) or _counted_only("broadcast", axis, tensor, nbytes):
        return _DONE
    dist.broadcast(_wire(tensor), axis.peers[source], group=axis.group)
    return _DONE


def agree(values: Any, axis: Axis) -> list[Any]:
    """The small Python objects of all ranks, in rank order: for checks, saves and loads. This is
    one all-gather if no object is large; torch's own function takes two, for sizes and objects. An
    axis that pretends has only this rank."""
    if axis.size == 1 or axis.pretends:
        return [values]
    packed = pickle.dumps(values)
    found = _gather_bytes(len(packed).to_bytes(8, "big") + packed, _SMALL_OBJECT, axis)
    lengths = [8 + int.from_bytes(start[:8], "big") for start in found]
    if max(lengths) > _SMALL_OBJECT:
        more = _gather_bytes(packed[_SMALL_OBJECT - 8 :], max(lengths) - _SMALL_OBJECT, axis)
        found = [start + rest for start, rest in zip(found, more, strict=True)]
    return [pickle.loads(data[8:end]) for data, end in zip(found, lengths, strict=True)]


def _gather_bytes(mine: bytes, length: int, axis: Axis) -> list[bytes]:
    """The first ``length`` bytes of every rank, filled with zeros where a rank has fewer."""
    device = "cpu" if "cpu" in axis.backends else next(iter(axis.backends))
    sent = torch.frombuffer(bytearray(mine[:length].ljust(length, b"\0")), dtype=torch.uint8)
    parts = torch.empty(axis.size, length, dtype=torch.uint8, device=device)
    dist.all_gather(list(parts), sent.to(device), group=axis.group)
    return [bytes(part) for part in parts.cpu().numpy()]


def tell(data: bytes, length: int, axis: Axis) -> bytes:
    """The bytes of the first rank of the axis, on every rank. ``length``: their number."""
    if axis.size == 1 or axis.pretends:
        return data
    device = "cpu" if "cpu" in axis.backends else next(iter(axis.backends))
    sent = torch.zeros(length, dtype=torch.uint8, device=device)
    if axis.rank == 0:
        sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(sent, axis.peers[0], group=axis.group)
    return sent.cpu().numpy().tobytes()


def arrived(value: Tensor) -> Tensor:
    """The tensor, after waiting for one of torch's own collectives that may still write it."""
    return value.wait() if isinstance(value, AsyncCollectiveTensor) else value  # type: ignore[no-any-return]
