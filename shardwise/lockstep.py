# SPDX-License-Identifier: Apache-2.0
"""One mesh axis as a rank sees it, and the check that its ranks issue the same collectives.

    rank 0   all_gather 'blocks.1'  waits ...  --\
    rank 1   all_gather 'blocks.2'  waits ...  --->  both publish what they issued and wait for,
                                                     read the other's, and raise both names

Messages of gloo carry a tag that is made of the operation, its number, its purpose and its size. So
two ranks that disagree wait for each other and never mix up their bytes. A thread looks at waits
that take long. It raises only what is proven: ranks in a circle, where each waits for a collective
that the next has not issued (in one group or in several), will wait for ever. A slow rank is waited
for; after a minute a warning says what the wait is for. NCCL has no tags, and the host does not
wait for it.
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

import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_REMEMBERED = 64  # collectives of each operation; prefetching is never that far ahead
_NUMBERS = 1 << 12  # the number of a message in its tag starts again after so many
_FORGOTTEN = "something longer ago than is remembered"
# Seconds that a wait takes before the watching thread looks for its reason.
patience = 5.0


@lru_cache(maxsize=1 << 14)
def _checksum(purpose: str) -> int:
    return zlib.crc32(purpose.encode())


@dataclass(slots=True, eq=False)
class _History:
    """The collectives of one operation that a rank has issued."""

    count: int = 0
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # purposes


_journals: WeakSet[Journal] = WeakSet()  # of all groups


class Journal:
    """The collectives that this rank has issued over one group, by operation."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        if group is not None:
            _journals.add(self)
        self._histories: dict[str, _History] = {}  # by operation

    def add(self, operation: str, purpose: str) -> Ticket:
        """Note one more collective."""
        history = self._histories.get(operation)
        if history is None:
            history = self._histories[operation] = _History()
        history.count += 1
        history.recent.append(purpose)
        return Ticket(self, operation, history.count, purpose)

    def issued(self) -> dict[str, Any]:
        """For each operation: how many were issued, and the last purposes. For JSON."""
        return {
            operation: [history.count, list(history.recent)]
            for operation, history in self._histories.items()
        }


@dataclass(slots=True, eq=False)
class Ticket:
    """One collective in a journal."""

    journal: Journal
    operation: str
    count: int
    purpose: str

    @property
    def tag(self) -> int:
        """The tag of the messages, 29 bits; the same on all ranks that are in step."""
        check = _checksum(self.purpose) & 0x7FFF
        kind = OPERATIONS.index(self.operation)
        return (check * _NUMBERS + self.count % _NUMBERS) * len(OPERATIONS) + kind


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


@contextmanager
def uncounted() -> Iterator[None]:
    """Count no collectives while the context is open, because the caller has counted them."""
    recorders = _recorders[:]
    _recorders.clear()
    try:
        yield
    finally:
        _recorders[:] = recorders


def recorded(
    operation: str, axis: str, size: int, nbytes: int, arriving: int | None = None
) -> None:
    """Add a collective to the list of every open ``record()``."""
    for calls in _recorders:
        calls.append(Call(operation, axis, size, nbytes, None if arriving == nbytes else arriving))


# ------------------------------------------------------------------------------ long waits


@dataclass
class _Wait:
    ticket: Ticket
    works: Sequence[Any]
    since: float
    proof: str | None = None  # the error message, once it is proven that the wait will not end
    warned: bool = False


_waits: dict[int, _Wait] = {}  # by thread
_WAITING = "shardwise/waiting"  # the keys under which ranks publish their waits
_watcher: threading.Thread | None = None


@contextmanager
def watched(ticket: Ticket | None, works: Sequence[Any]) -> Iterator[None]:
    """Watch a wait for messages: if the ranks are out of step, raise instead of hanging."""
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
        # The watching thread ended this wait, or a peer closed the connection with a proof.
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
        _look_at_long_waits()  # another function, so that no variable here keeps messages alive


def _look_at_long_waits() -> None:
    for wait in list(_waits.values()):
        waited = time.monotonic() - wait.since
        if waited > patience and wait.proof is None:
            with suppress(Exception):  # the store or the group is gone: the wait itself will fail
                _look(wait)
                if wait.proof is not None:
                    _interrupt(wait.works)
        if waited > 12 * patience and wait.proof is None and not wait.warned:
            wait.warned, ticket = True, wait.ticket
            logger.warning(
                "rank %d has waited %.0f s in %s of %s, for a rank that has not come to it. Does "
                "every rank run as many batches as the others, and does none wait elsewhere "
                "(dist.barrier, a save or an evaluation on one rank alone)?",
                dist.get_rank(), waited, ticket.operation, ticket.purpose,
            )  # fmt: skip


def _interrupt(works: Sequence[Any]) -> None:
    """End the waits of another thread: gloo closes the connection of a wait that times out. There
    is no other way to end a wait."""
    for work in works:
        with suppress(Exception):
            work.wait(timedelta(milliseconds=1))


def _look(wait: _Wait) -> None:
    """Publish what this rank waits for, and look for a circle of ranks that wait for each other.

    An old record leads to no wrong proof. A rank issues nothing while it waits. So if X waits for a
    collective that Y had not issued when Y published its record, then X's wait ends after the wait
    in that record. In a circle every wait would end later than itself.
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
    records: dict[int, Any] = {me: mine}  # by rank; None: that rank has published nothing
    path, tried = [me], {me}
    untried = [iter(peers)]  # for each rank of the path: the ranks that it may wait for
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
            waits = [(member, *records[member]["waits"]) for member in circle]
            wait.proof = _out_of_step(
                " and ".join(f"rank {r} waits in {name} of {p}" for r, name, _, p in waits)
            )
            return
        if rank not in tried:
            tried.add(rank)
            path.append(rank)
            untried.append(iter(records[rank]["peers"]))


def _has(record: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the rank of ``record`` has issued the collective that ``other``'s rank waits for."""
    operation, number, purpose = other["waits"]
    issued = record["issued"].get(other["group"], {})
    return _purpose(issued, operation, number) in (purpose, _FORGOTTEN)


def _purpose(issued: dict[str, Any], operation: str, number: int) -> str:
    """The purpose of one collective in ``Journal.issued()``."""
    count, recent = issued.get(operation, [0, []])
    position = len(recent) - 1 - (count - number)
    if number > count:
        return "nothing"
    return str(recent[position]) if position >= 0 else _FORGOTTEN


def _out_of_step(where: str) -> str:
    return (
        f"the ranks are out of step: {where}. Every rank must run the same wrapped modules in the "
        f"same order. A rank whose loss does not depend on a module must call the module all the "
        f"same, also with unused_parameters='zeros', which replaces gradients and not forwards. "
        f"The process group cannot be used any more: end this run"
    )


@dataclass(eq=False)
class Axis:
    """One mesh axis as a rank sees it: its group, and where this rank stands in it."""

    name: str
    group: Any  # a ProcessGroup; None: the axis has no other ranks, see :meth:`pretended`
    size: int
    rank: int
    backends: dict[str, str]  # by device type
    peers: tuple[int, ...]  # global ranks, by rank on the axis
    journal: Journal = field(repr=False)

    @classmethod
    def pretended(cls, name: str, size: int, rank: int, backend: str) -> Axis:
        """An axis for a plan: collectives of meta tensors are counted as ``backend`` would send
        them, and nothing is sent."""
        journal = Journal(None, rank, size)
        return cls(name, None, size, rank, {"meta": backend}, tuple(range(size)), journal)

    @property
    def pretends(self) -> bool:
        """Whether one process poses as a rank of many: in a plan, or on torch's fake backend."""
        return "meta" in self.backends or "fake" in self.backends.values()

    def __deepcopy__(self, memo: Any) -> Axis:
        """The same object: a copied model with spread experts uses the axes of the original."""
        return self

    def backend_for(self, tensor: Tensor) -> str | None:
        return self.backends.get(tensor.device.type)


GroupLike: TypeAlias = "Axis | dist.ProcessGroup"
_AXES: WeakKeyDictionary[Any, dict[str, Axis]] = WeakKeyDictionary()  # by group, then by name


def as_axis(group: GroupLike, name: str | None = None) -> Axis:
    """The Axis of a process group. One group may be an axis of several meshes, under several names;
    these axes share one journal."""
    if isinstance(group, Axis):
        return group
    axes = _AXES.setdefault(group, {})
    first = next(iter(axes.values()), None)
    if name is None:
        name = first.name if first is not None else "group"
    if name not in axes:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        axes[name] = Axis(
            name=name,
            group=group,
            size=size,
            rank=rank,
            backends=_backends(group),
            peers=tuple(dist.get_process_group_ranks(group)),
            journal=first.journal if first is not None else Journal(group, rank, size),
        )
    return axes[name]


def _backends(group: Any) -> dict[str, str]:
    """``{"cpu": "gloo", "cuda": "nccl"}`` and the like."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)  # type: ignore[misc]
