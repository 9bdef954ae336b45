# SPDX-License-Identifier: Apache-2.0
"""Exchange: pieces of matrices go to their owners, are computed there, and come back.

    spans (what this rank stores)      | A 0-3 | B 0-1 |
       to owners     all-to-all        pieces go to the owners, in exact sizes
       compute                         owners assemble matrices and compute them shape by shape
       back          all-to-all        rows return to the ranks that store them
       to replicas   all-to-all        rows go to the other replicas, which computed other matrices

Rounds overlap: while round k is computed, round k + 1 goes to its owners and round k - 1 comes
back. When a round begins, the caller writes its spans directly into the send buffer. At the end,
the caller reads the results in the receive buffer. So a step holds a few rounds at a time, never
all matrices.

The collectives and their sizes follow from the ownership alone. A parameter without a gradient, or
a rank without work, changes nothing about them, so no rank waits for a message that is never sent.
Building an Exchange communicates nothing and reads no values; :meth:`Exchange.agree` compares the
ownership between ranks, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.agreement import raise_together
from shardwise.core.memory import counted
from shardwise.core.streams import Lanes
from shardwise.optim.ownership import assign_owners
from shardwise.optim.split import Matrix

KIND = "step"  # the kind of a step's memory in the ledger
Key = tuple[int, int]  # (matrix, number within its ``shapes``)
Part = tuple[int, int, int, int]  # (peer on the axis, matrix, lo, hi)


@dataclass(frozen=True)
class Span:
    """A run of elements of a parameter that this rank stores, and that one round exchanges."""

    parameter: int
    begin: int  # elements [begin, end) of the parameter
    end: int
    matrix: int  # the first of its matrices, which have one shape

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Batch:
    """Matrices of one shape, [count, rows, cols]. The caller of ``take`` frees their memory."""

    def __init__(self, values: Tensor, keys: list[Key]) -> None:
        self._values, self.keys = [values], keys

    def take(self) -> Tensor:
        return self._values.pop()


# Writes the flat elements of the first spans, from which this replica computes matrices, into the
# given memory. The other spans are those whose matrices another replica computes.
Begin = Callable[[Sequence[Span], Sequence[Tensor]], object]
# The computed matrices of every batch of a round, in new memory.
Compute = Callable[[list[Batch]], list[Tensor]]


class _Leg(NamedTuple):
    """One all-to-all of a round, in elements by peer; what a rank keeps is among them. Without an
    axis there are no other ranks, and nothing moves."""

    axis: comm.Axis | None
    send_sizes: list[int]
    receive_sizes: list[int]

    @property
    def back(self) -> _Leg:
        return _Leg(self.axis, self.receive_sizes, self.send_sizes)


@dataclass(eq=False)
class _Round:
    """Matrices that are exchanged and computed together, from the view of one rank.

    The order of the spans: first those that this replica computes, in the order in which they are
    sent to owners; then those that other replicas compute, in the same order, replica by replica.
    """

    spans: list[Span]
    num_mine: int  # spans whose matrices this replica computes
    received: list[Part]  # the parts of the matrices that this rank computes, as they arrive
    batches: list[tuple[tuple[int, int], list[Key]]]  # (shape, matrices that this rank computes)
    to_owners: _Leg
    to_replicas: _Leg | None

    @cached_property
    def lengths(self) -> list[int]:
        """The elements of each span."""
        return [span.numel for span in self.spans]


class Exchange:
    """The exchange of matrices that are stored on the same ranks."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        shards: comm.Axis | None,
        replicas: comm.Axis | None,
        device: torch.device,
        *,
        results: torch.dtype = torch.float32,
        apart: Sequence[int] = (),
    ) -> None:
        """``shards``: the ranks that store different pieces; ``replicas``: the ranks that store the
        same pieces and compute different matrices; ``results``: the dtype of computed matrices;
        ``apart``: a number of each parameter; those of different numbers share no batch."""
        self.matrices, self.device, self.apart = list(matrices), device, apart
        self.shards, self.replicas, self.results = shards, replicas, results
        self.rank = shards.rank if shards is not None else 0
        self.replica = replicas.rank if replicas is not None else 0
        self.ownership = assign_owners(
            self.matrices,
            shards.size if shards is not None else 1,
            replicas.size if replicas is not None else 1,
        )
        # By matrix: the parts [lo, hi) that this rank stores. Matrices that are cut alike share
        # one tuple of pieces, which is filtered once.
        pieces_of = {id(matrix.pieces): matrix.pieces for matrix in self.matrices}
        stored = {
            key: [(lo, hi) for rank, lo, hi in pieces if rank == self.rank]
            for key, pieces in pieces_of.items()
        }
        self.stored = [stored[id(matrix.pieces)] for matrix in self.matrices]
        self.excluded: frozenset[int] = frozenset()  # local matrices that the caller computes
        self.lanes = Lanes(device)

    def exclude(self, indices: Iterable[int]) -> None:
        """Leave local matrices to the caller."""
        self.excluded = frozenset(indices)
        self.__dict__.pop("rounds", None)

    @cached_property
    def rounds(self) -> list[_Round]:
        return [self._round(members) for members in self.ownership.rounds]

    def _round(self, members: Sequence[int]) -> _Round:
        owners, stored = self.ownership.owners, self.stored
        members = [index for index in members if index not in self.excluded]
        computed = [index for index in members if owners[index][0] == self.replica]
        owned = [index for index in computed if owners[index][1] == self.rank]
        # Sender and receiver both sort by peer, then by matrix.
        sends = sorted((owners[n][1], n, lo, hi) for n in computed for lo, hi in stored[n])
        pieces = ((rank, n, lo, hi) for n in owned for rank, lo, hi in self.matrices[n].pieces)
        receives = sorted(pieces)
        remote = any(map(self.ownership.remote_pieces, computed))
        to_owners = _Leg(None, [], [])
        if self.shards is not None and remote:
            size = self.shards.size
            to_owners = _Leg(self.shards, _sizes(size, sends), _sizes(size, receives))
        mine, elsewhere, to_replicas = self._spans(sends), [], None
        if self.replicas is not None:
            others = [n for n in members if owners[n][0] != self.replica]
            missing = sorted((owners[n], n, lo, hi) for n in others for lo, hi in stored[n])
            elsewhere, size = self._spans(missing), self.replicas.size
            numel = sum(hi - lo for *_, lo, hi in sends)
            leaving = [numel * (peer != self.replica) for peer in range(size)]
            arriving = _sizes(size, ((owner[0], n, lo, hi) for owner, n, lo, hi in missing))
            to_replicas = _Leg(self.replicas, leaving, arriving)
        batches: dict[tuple[tuple[int, int], int], list[Key]] = {}
        for index in owned:
            apart = self.apart[self.matrices[index].parameter] if self.apart else 0
            for number, shape in enumerate(self.matrices[index].shapes):
                batches.setdefault((shape, apart), []).append((index, number))
        return _Round(
            spans=mine + elsewhere,
            num_mine=len(mine),
            received=receives,
            batches=[(shape, keys) for (shape, _), keys in batches.items()],
            to_owners=to_owners,
            to_replicas=to_replicas,
        )

    def _spans(self, parts: Iterable[tuple[Any, int, int, int]]) -> list[Span]:
        """The spans of sorted parts. Parts for one peer that are neighbours in memory, and whose
        matrices have the same shapes, become one span where they travel in one buffer."""
        spans: list[Span] = []
        before: object = None  # the peer and the shapes of the last span
        for peer, index, lo, hi in parts:
            matrix = self.matrices[index]
            begin, end, kind = matrix.start + lo, matrix.start + hi, (peer, matrix.shapes)
            last = spans[-1] if kind == before and self.communicates else None
            if last is not None and (last.parameter, last.end) == (matrix.parameter, begin):
                spans[-1] = replace(last, end=end)
            else:
                spans.append(Span(matrix.parameter, begin, end, index))
            before = kind
        return spans

    def agree(self) -> None:
        """Raise where ranks have planned different exchanges, in which they would wait for each
        other forever (collective)."""
        axes = [axis for axis in (self.shards, self.replicas) if axis and not axis.pretends]
        plan = f"{len(self.matrices)} matrices ({self.ownership.digest}, {self.results})"
        raise_together("this exchange cannot work", (), [plan], axes, same="plan the same exchange")

    @property
    def communicates(self) -> bool:
        """Whether anything is sent."""
        return self.replicas is not None or self.ownership.needs_exchange

    def is_local(self, index: int) -> bool:
        """Whether this rank owns and stores all of a matrix, and no replica waits for it."""
        owned = self.ownership.owners[index][1] == self.rank and self.replicas is None
        return owned and not self.ownership.remote_pieces(index)

    # ------------------------------------------------------------------ running

    def run(self, begin: Begin, compute: Compute) -> Iterator[tuple[list[Span], list[Tensor]]]:
        """Exchange and compute round by round; yields the spans of every finished round, in order,
        with the elements of the computed matrices."""
        count = len(self.rounds)
        delay = 2 if self.replicas is not None else 1 if self.ownership.needs_exchange else 0
        running = {n: self._run(round_, begin, compute) for n, round_ in enumerate(self.rounds)}
        for now in range(-min(delay, 1), count + delay):
            # Round now + 1 goes to its owners while round now is computed. Then round now - 1 comes
            # back. The numbers name the rounds that run stages 2, 1, 3, 5, 4 and 6 of ``_run``.
            turns = (now, now + 1, now, now - 1, now, now - delay) if delay else (now,) * 6
            for number in turns:
                done = next(running[number]) if 0 <= number < count else None
            if done is not None:
                yield done
                del done, running[now - delay]

    def _run(
        self, round_: _Round, begin: Begin, compute: Compute
    ) -> Iterator[tuple[list[Span], list[Tensor]] | None]:
        """One round, in six stages, between which other rounds run. Each stage drops the memory
        that later stages do not need."""
        # 1. Write the values of this rank's spans, and send them to the owners.
        lengths = round_.lengths[: round_.num_mine]
        sent = self._empty(sum(lengths))
        begin(round_.spans, sent.split(lengths))
        arrive = self._send(round_.to_owners, sent)
        del sent
        yield None
        # 2. Assemble the matrices that this rank owns, in batches of one shape.
        received = arrive()
        del arrive  # and with it the sent memory
        batches = self._assemble(round_, received)
        del received
        yield None
        # 3. Compute the batches.
        results = self._results(batches, compute)
        del batches
        yield None
        # 4. Send the rows back to the ranks that store them.
        values = [results[index][lo:hi] for _, index, lo, hi in round_.received]
        if self.communicates:  # in one buffer, so that the whole matrices are freed
            arrive = self._send(round_.to_owners.back, self._joined(values))
            values = []
        del results
        yield None
        # 5. Wait for the results of this replica, and send them to the other replicas.
        if self.communicates:
            received = arrive()
            values = list(received.split(lengths))
            del arrive
        if round_.to_replicas is not None and self.replicas is not None:
            sent = counted(received.repeat(self.replicas.size - 1), KIND)
            arrive = self._send(round_.to_replicas, sent)
            del sent, received
        yield None
        # 6. Wait for the results of other replicas.
        if round_.to_replicas is not None:
            values += arrive().split(round_.lengths[round_.num_mine :])
        yield round_.spans, values

    def _assemble(self, round_: _Round, received: Tensor) -> list[Batch]:
        """The matrices that this rank owns, out of the received parts."""
        whole: dict[int, Tensor] = {}
        batches = [(self._empty(len(keys), *shape), keys) for shape, keys in round_.batches]
        for batch, keys in batches:
            for (index, _), slot in zip(keys, batch, strict=True):
                if not self.matrices[index].sizes:
                    whole[index] = slot.view(-1)
                elif index not in whole:
                    whole[index] = self._empty(self.matrices[index].numel)
        if parts := round_.received:
            targets = [whole[index][lo:hi] for _, index, lo, hi in parts]
            sizes = [hi - lo for *_, lo, hi in parts]
            torch._foreach_copy_(targets, list(received.split(sizes)))
        for batch, keys in batches:
            for (index, number), slot in zip(keys, batch, strict=True):
                matrix = self.matrices[index]
                if matrix.sizes:
                    slot.copy_(matrix.take(whole[index].view(matrix.rows, matrix.cols))[number])
        return [Batch(batch, keys) for batch, keys in batches]

    def _results(self, batches: list[Batch], compute: Compute) -> dict[int, Tensor]:
        """The results, flat, by matrix."""
        results: dict[int, Tensor] = {}
        for batch, computed in zip(batches, compute(batches), strict=True):
            counted(computed, KIND)
            for (index, number), value in zip(batch.keys, computed, strict=True):
                matrix = self.matrices[index]
                if not matrix.sizes:
                    results[index] = value.reshape(-1)
                    continue
                if index not in results:
                    results[index] = self._empty(matrix.numel, dtype=computed.dtype)
                matrix.put(results[index].view(matrix.rows, matrix.cols), number, value)
        return results

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return counted(torch.empty(shape, dtype=dtype, device=self.device), KIND)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Results one after another."""
        if not parts:
            return torch.empty(0, dtype=self.results, device=self.device)
        return counted(torch.cat(list(parts)), KIND)

    def _send(self, leg: _Leg, sent: Tensor) -> Callable[[], Tensor]:
        """Start one all-to-all of exact sizes. The returned function waits for it, and returns the
        received parts one after another. It holds the sent memory until then."""
        if leg.axis is None:
            return lambda: sent
        received = self._empty(sum(leg.receive_sizes), dtype=sent.dtype)
        self.lanes.join("gather", "compute")
        with self.lanes.on("gather"):
            sizes = leg.receive_sizes, leg.send_sizes
            pending = comm.all_to_all(received, sent, *sizes, leg.axis)
            event = self.lanes.mark("gather")

        def arrive(held: Tensor = sent) -> Tensor:
            pending.wait()
            self.lanes.wait("compute", event)
            return received

        return arrive


def _sizes(size: int, parts: Iterable[Part]) -> list[int]:
    """The elements of each of so many peers."""
    sizes = [0] * size
    for peer, _, lo, hi in parts:
        sizes[peer] += hi - lo
    return sizes
