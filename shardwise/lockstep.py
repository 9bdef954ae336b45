# SPDX-License-Identifier: Apache-2.0
"""One mesh axis as a rank sees it; whether its ranks issue the same collectives, and what to say
where they do not.

    rank 0   all_gather 'blocks.1'  waits ...  --\
    rank 1   all_gather 'blocks.2'  waits ...  --->  both publish what they issued and wait for,
                                                     read the other's, and raise both names

Messages of gloo carry a tag made of the operation, its number, its purpose and its size, so two
ranks that disagree wait for each other; they never mix up their bytes. A thread looks at waits that
take long. It raises only what is proven: ranks in a circle, each of which waits for a collective
that the next has not issued, in one group or in several, will wait for ever. A rank that is merely
slow is waited for; after a minute a warning says for what.

NCCL has no tags, and no host waits for it. So ranks also compare, at the end of every backward, a
checksum of all that they issued.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import numpy
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# What writes the weights is no collective, but ranks must do it alike too: steps of optimizers and
# loads, and the settings of these steps.
STEP, SETTINGS = "step", "step settings"
_REMEMBERED = 64  # collectives of each operation; prefetching is never that far ahead
_NUMBERS = 1 << 12  # messages of one operation that are told apart by their number
_PRIME = 1_000_003
_FORGOTTEN = "something longer ago than is remembered"
# Seconds that a wait takes before its reason is looked for.
patience = 5.0


@lru_cache(maxsize=1 << 14)
def _checksum(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


class _Issued:
    """The collectives of one operation: how many, the last ones, a checksum over all, in order."""

    __slots__ = ("count", "recent", "trail")

    def __init__(self) -> None:
        self.count = self.trail = 0
        self.recent: deque[str] = deque(maxlen=_REMEMBERED)


_journals: WeakSet[Journal] = WeakSet()  # of all groups


class Journal:
    """The collectives that this rank has issued over one group, by operation."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        if group is not None:
            _journals.add(self)
        self._issued: dict[str, _Issued] = {}  # by operation
        self._asked = 0  # how often for a difference

    def add(self, operation: str, purpose: str) -> Ticket:
        """Note one more collective, or one more step of an optimizer."""
        issued = self._issued.get(operation)
        if issued is None:
            issued = self._issued[operation] = _Issued()
        issued.count += 1
        issued.recent.append(purpose)
        issued.trail = (issued.trail * _PRIME + _checksum(purpose)) & 0xFFFFFFFF
        return Ticket(self, operation, issued.count, purpose)

    def trail(self) -> NDArray[numpy.bool_]:
        """32 bits that are the same on ranks which have issued the same collectives. Operations
        are kept apart: a rank that reduces late still gathers in step with the others."""
        trails = sorted((operation, issued.trail) for operation, issued in self._issued.items())
        together = zlib.crc32(repr(trails).encode())
        return numpy.unpackbits(numpy.frombuffer(together.to_bytes(4, "big"), numpy.uint8)) > 0

    def first_difference(self) -> str:
        """The error message for ranks whose trails differ. Every rank of the group asks at once."""
        store = dist.distributed_c10d._get_default_store()
        self._asked += 1
        where = f"shardwise/issued/{self.group.group_name}/{self._asked}"
        mine = {"issued": self.issued()}
        store.set(f"{where}/{self.rank}", json.dumps(mine))
        for peer in range(self.size):
            theirs = json.loads(store.get(f"{where}/{peer}"))
            for operation in sorted(mine["issued"].keys() | theirs["issued"].keys()):
                last = max(each["issued"].get(operation, [0])[0] for each in (mine, theirs))
                for number in range(max(last - _REMEMBERED, 0) + 1, last + 1):
                    first, second = (_purpose(each, operation, number) for each in (mine, theirs))
                    if first != second:
                        pair = sorted([(self.rank, first), (peer, second)])
                        if operation in (STEP, SETTINGS):
                            return _stepped_apart(*pair)
                        return _out_of_step(
                            " and ".join(f"rank {who} issued {operation} of {p}" for who, p in pair)
                        )
        return _out_of_step("they issued different collectives, longer ago than is remembered")

    def writes(self) -> tuple[int, int, str]:
        """How often the weights were written, a checksum over it, and the last time in words: the
        same on ranks whose weights belong together."""
        steps = self._issued.get(STEP) or _Issued()
        return steps.count, steps.trail, steps.recent[-1] if steps.recent else "nothing"

    def forget_writes(self) -> None:
        """Begin anew: every rank of the group has loaded its weights."""
        for operation in (STEP, SETTINGS):
            self._issued.pop(operation, None)

    def issued(self) -> dict[str, Any]:
        """How many of each operation, and the last ones, as JSON knows it."""
        return {
            operation: [issued.count, list(issued.recent)]
            for operation, issued in self._issued.items()
        }


class Ticket:
    """One collective in a journal."""

    __slots__ = ("count", "journal", "operation", "purpose")

    def __init__(self, journal: Journal, operation: str, count: int, purpose: str) -> None:
        self.journal, self.operation, self.count, self.purpose = journal, operation, count, purpose

    @property
    def tag(self) -> int:
        """The tag of its messages, 29 bits; the same on all ranks that are in step."""
        check = _checksum(self.purpose) & 0x7FFF
        kind = OPERATIONS.index(self.operation)
        return (check * _NUMBERS + self.count % _NUMBERS) * len(OPERATIONS) + kind


# ------------------------------------------------------------------------------ being counted


class Call(NamedTuple):
    """One collective as this rank issued it. ``nbytes`` is the whole buffer: the gathered one, the
    one to be scattered, the reduced one; what this rank sends to its peers for an all-to-all."""

    operation: str
    axis: str
    size: int
    nbytes: int
    arriving: int | None = None  # bytes that an all-to-all brings; None: as many as it sends

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


@contextmanager
def uncounted() -> Iterator[None]:
    """While a collective runs on a copy elsewhere: it was counted already."""
    open_now = _recorders[:]
    _recorders.clear()
    try:
        yield
    finally:
        _recorders[:] = open_now


def recorded(
    operation: str, axis: str, size: int, nbytes: int, arriving: int | None = None
) -> None:
    """Tell every open ``record()`` of a collective."""
    for calls in _recorders:
        calls.append(Call(operation, axis, size, nbytes, None if arriving == nbytes else arriving))


# ------------------------------------------------------------------------------ long waits


@dataclass
class _Wait:
    ticket: Ticket
    works: Sequence[Any]
    since: float
    proof: str | None = None
    told: bool = False  # whether a warning spoke of it


_waits: dict[int, _Wait] = {}  # by thread
_WAITING = "shardwise/waiting"  # where ranks publish
_watcher: threading.Thread | None = None


@contextmanager
def watched(ticket: Ticket | None, works: Sequence[Any]) -> Iterator[None]:
    """Watch a wait for messages: where the ranks are out of step it raises instead of hanging."""
    global _watcher
    if ticket is None:
        yield
        return
    if _watcher is None:
        _watcher = threading.Thread(target=_watch, name="shardwise-lockstep", daemon=True)
        _watcher.start()
    thread = threading.get_ident()
    wait = _waits[thread] = _Wait(ticket, works, time.monotonic())
    try:
        yield
    except RuntimeError as error:
        # This rank's own proof, or that of a peer, which closed the connection.
        if wait.proof is None:
            with suppress(Exception):
                _look(wait)
        if wait.proof is not None:
            raise RuntimeError(wait.proof) from error
        raise
    finally:
        del _waits[thread]


def _watch() -> None:
    while True:
        time.sleep(min(1.0, patience / 2))
        _look_at_long_waits()  # a function of its own: its variables hold messages


def _look_at_long_waits() -> None:
    for wait in list(_waits.values()):
        waited = time.monotonic() - wait.since
        if waited > patience and wait.proof is None:
            with suppress(Exception):  # the store, or the group, is gone: the wait will tell
                _look(wait)
                if wait.proof is not None:
                    _interrupt(wait.works)
        if waited > 12 * patience and wait.proof is None and not wait.told:
            wait.told, ticket = True, wait.ticket
            logger.warning(
                "rank %d has waited %.0f s in %s of %s, for a rank that has not come to it. Does "
                "every rank run as many batches as the others, and does none wait elsewhere "
                "(dist.barrier, a save or an evaluation on one rank alone)?",
                dist.get_rank(), waited, ticket.operation, ticket.purpose,
            )  # fmt: skip


def _interrupt(works: Sequence[Any]) -> None:
    """End the waits of another thread. gloo closes the connection of a wait that times out; there
    is no other way to end one."""
    for work in works:
        with suppress(Exception):
            work.wait(timedelta(milliseconds=1))


def _look(wait: _Wait) -> None:
    """Publish what this rank waits for, and look for a circle of ranks that wait for each other.

    Old records prove nothing wrong. A rank issues nothing while it waits: where X waits for what Y
    had not issued in Y's record, X waits until after the end of the wait in that record. In a
    circle every wait would end later than itself.
    """
    ticket = wait.ticket
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    peers = dist.get_process_group_ranks(ticket.journal.group)
    mine: dict[str, Any] = {
        "waits": [ticket.operation, ticket.count, ticket.purpose],
        "group": ticket.journal.group.group_name,
        "peers": peers,
        "issued": {journal.group.group_name: journal.issued() for journal in list(_journals)},
    }
    store.set(f"{_WAITING}/{me}", json.dumps(mine))
    records: dict[int, Any] = {me: mine}  # by rank; None: it has published nothing
    path, tried = [me], {me}
    untried = [iter(peers)]  # for each rank of the path: those that it may wait for
    while path:
        waiting, rank = records[path[-1]], next(untried[-1], None)
        if rank is None:
            path.pop()
            untried.pop()
            continue
        if rank not in records:
            key = f"{_WAITING}/{rank}"
            records[rank] = json.loads(store.get(key)) if store.check([key]) else None
        if rank == path[-1] or records[rank] is None or _has(records[rank], waiting):
            continue
        if rank in path:
            circle = sorted(path[path.index(rank) :])[:4]
            found = [(who, records[who]["waits"]) for who in circle]
            wait.proof = _out_of_step(
                " and ".join(f"rank {who} waits in {what[0]} of {what[2]}" for who, what in found)
            )
            return
        if rank not in tried:
            tried.add(rank)
            path.append(rank)
            untried.append(iter(records[rank]["peers"]))


def _has(record: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the owner of a record has issued the collective that the other waits for."""
    operation, number, purpose = other["waits"]
    mine = {"issued": record["issued"].get(other["group"], {})}
    return _purpose(mine, operation, number) in (purpose, _FORGOTTEN)


def _purpose(record: dict[str, Any], operation: str, number: int) -> str:
    """The purpose of a collective in a record."""
    count, recent = record["issued"].get(operation, [0, []])
    position = len(recent) - 1 - (count - number)
    if number > count:
        return "nothing"
    return str(recent[position]) if position >= 0 else _FORGOTTEN


def _out_of_step(where: str) -> str:
    return (
        f"the ranks are out of step: {where}. Every rank must run the same wrapped modules in the "
        f"same order; one whose loss does not depend on a module still has to call it, also "
        f"with unused_parameters='zeros', which stands for gradients alone. The process group "
        f"cannot be used any more: end this run"
    )


def refuse_other_writes(everyone: Sequence[dict[str, tuple[int, int, str]]]) -> None:
    """Raise where ranks of a group have written its weights differently; by rank: the
    :meth:`Journal.writes` of its groups, by their names."""
    first: dict[str, tuple[int, tuple[int, int, str]]] = {}
    for rank, groups in enumerate(everyone):
        for group, writes in groups.items():
            other, theirs = first.setdefault(group, (rank, writes))
            if writes[:2] != theirs[:2]:
                pair = [
                    (who, f"{what[0]} of them, {what[2]} last")
                    for who, what in ((other, theirs), (rank, writes))
                ]
                raise RuntimeError(_stepped_apart(*pair))


def _stepped_apart(*ranks: tuple[int, str]) -> str:
    did = " and ".join(f"rank {who} ran {what}" for who, what in ranks)
    return (
        f"the optimizers of the ranks are out of step: {did}. Every rank must step, load and write "
        f"weights and gradients alike, with the same values, and with the gradients of the same "
        f"parameters: decide by a value that all ranks share. The weights no longer belong "
        f"together: load a checkpoint (sw.load) on every rank"
    )


@dataclass(eq=False)
class Axis:
    """One mesh axis as a rank sees it: its group, and where this rank stands in it."""

    name: str
    group: Any  # a ProcessGroup; None: nobody is behind this axis, see :meth:`pretended`
    size: int
    rank: int
    backends: dict[str, str]  # by device type
    peers: tuple[int, ...]  # global ranks, by rank on the axis
    journal: Journal = field(repr=False)

    @classmethod
    def pretended(cls, name: str, size: int, rank: int, backend: str) -> Axis:
        """An axis for a plan: tensors on the meta device are sent as ``backend`` would send them,
        counted, and go nowhere."""
        journal = Journal(None, rank, size)
        return cls(name, None, size, rank, {"meta": backend}, tuple(range(size)), journal)

    @property
    def pretends(self) -> bool:
        """Whether one process poses as a rank of many: in a plan, or on torch's fake backend."""
        return "meta" in self.backends or "fake" in self.backends.values()

    def __deepcopy__(self, memo: Any) -> Axis:
        """The same: a copy of a model whose experts are spread stands where the model does."""
        return self

    def backend_for(self, tensor: Tensor) -> str | None:
        return self.backends.get(tensor.device.type)


GroupLike: TypeAlias = "Axis | dist.ProcessGroup"
_AXES: WeakKeyDictionary[Any, dict[str, Axis]] = WeakKeyDictionary()


def as_axis(group: GroupLike, name: str | None = None) -> Axis:
    """The Axis of a process group. One group may be an axis of several meshes, under several names;
    its messages are counted together all the same."""
    if isinstance(group, Axis):
        return group
    known = _AXES.setdefault(group, {})
    first = next(iter(known.values()), None)
    if name is None:
        name = first.name if first is not None else "group"
    if name not in known:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        known[name] = Axis(
            name=name,
            group=group,
            size=size,
            rank=rank,
            backends=_backends(group),
            peers=tuple(dist.get_process_group_ranks(group)),
            journal=first.journal if first is not None else Journal(group, rank, size),
        )
    return known[name]


def _backends(group: Any) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` and the like."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)  # type: ignore[misc]
