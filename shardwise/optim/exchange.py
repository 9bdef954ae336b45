# SPDX-License-Identifier: Apache-2.0
"""Exchange: pieces of matrices go to their owners, through Newton-Schulz, and back.

    spans (what this rank stores)      | A 0-3 | B 0-1 |
       to owners     all-to-all        pieces go to the owners, exact sizes
       compute                         owners assemble matrices and compute them shape by shape
       back          all-to-all        rows return to the ranks that store them
       to replicas   all-to-all        and go to the other replicas, which computed other matrices

Rounds overlap: while round k is computed, round k + 1 goes to its owners and round k - 1 comes
back. The caller writes the spans of a round where they are sent from, when the round begins, and
reads the results where they were received: a step holds a few rounds at a time, never all matrices.

The calls and their sizes follow from the ownership alone. A parameter without a gradient, or a rank
without work, changes nothing about them, so no rank waits for a message that is never sent.
Building an Exchange communicates nothing and reads no values; :meth:`Exchange.agree` compares the
ownership between ranks, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardwise import comm
from shardwise.memory import counted
from shardwise.optim.ownership import assign_owners
from shardwise.optim.split import Matrix
from shardwise.streams import Lanes

KIND = "step"  # the ledger's word for the memory of a step
Key = tuple[int, int]  # (matrix, number among what is computed by itself in it)
Part = tuple[int, int, int, int]  # (peer on the axis, matrix, lo, hi)


@dataclass(frozen=True)
class Span:
    """A run of elements of a parameter that this rank stores, and that one round exchanges."""

    parameter: int
    begin: int  # counted from the beginning of this rank's part of the parameter
    end: int
    mine: bool  # whether this replica computes its matrices; else it is received
    matrix: int  # the first of its matrices, which have one shape

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Batch:
    """Matrices of one shape, [count, rows, cols]. Who takes them frees their memory."""

    def __init__(self, values: Tensor, keys: list[Key]) -> None:
        self._values: Tensor | None = values
        self.shape, self.keys = values.shape, keys

    def take(self) -> Tensor:
        assert self._values is not None, "taken before"
        values, self._values = self._values, None
        return values


# Writes what is computed: the elements of each span, flat, into the memory given for it.
Begin = Callable[[Sequence[Span], Sequence[Tensor]], object]
Compute = Callable[[Batch], Tensor]  # new memory of the same shape


class _Leg:
    """One all-to-all of a round: the parts that this rank sends and receives, by peer."""

    def __init__(
        self, axis: comm.Axis, sends: Sequence[Part], receives: Sequence[Part], *, coded: bool
    ) -> None:
        """``coded``: in fp16, each part after the exponent that scales it."""
        self.axis, self.coded = axis, coded
        self.sends, self.receives = sorted(sends), sorted(receives)  # both sides: by peer, matrix
        self.send_lengths, self.lengths = (
            [hi - lo for _, _, lo, hi in parts] for parts in (self.sends, self.receives)
        )
        self.send_sizes, self.receive_sizes = [0] * axis.size, [0] * axis.size
        for sizes, parts in ((self.send_sizes, sends), (self.receive_sizes, receives)):
            for peer, _, lo, hi in parts:
                sizes[peer] += hi - lo + coded


@dataclass(eq=False)
class _Round:
    """Matrices that are exchanged and computed together, as one rank sees them.

    Its spans, in order: those that are sent to owners, as the leg sends them; parts of matrices
    that this rank owns; those that other replicas compute, as they arrive.
    """

    spans: list[Span]
    num_sent: int
    num_mine: int
    own: list[tuple[int, int, int]]  # (matrix, lo, hi), one for each span
    batches: list[tuple[tuple[int, int], list[Key]]]  # what this rank computes, by shape
    to_owners: _Leg | None
    back: _Leg | None
    to_replicas: _Leg | None

    @cached_property
    def lengths(self) -> list[int]:
        """The elements of each span."""
        return [span.numel for span in self.spans]

    @cached_property
    def by_matrix(self) -> list[int]:
        """The numbers of the spans that this replica computes, by matrix, as replicas send them."""
        return sorted(range(self.num_mine), key=lambda number: self.spans[number].matrix)


@dataclass(eq=False)
class _Transfer:
    """A leg under way, and the memory that it uses until it has arrived."""

    leg: _Leg
    pending: comm.Pending
    event: object
    received: Tensor
    sent: Tensor | None


class Exchange:
    """The exchange of matrices that are stored on the same ranks."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        shards: comm.Axis | None,
        replicas: comm.Axis | None,
        device: torch.device,
        *,
        wire: str = "fp32",
        step_bytes: int | None = None,
        results: torch.dtype = torch.float32,
        work: Callable[[Matrix], int] | None = None,
    ) -> None:
        """``shards``: the ranks that store different pieces; ``replicas``: those that store the
        same pieces and compute different matrices; ``results``: the dtype of what is computed;
        ``step_bytes``, ``work``: see ``assign_owners``."""
        self.matrices, self.device, self.wire = list(matrices), device, wire
        self.shards, self.replicas, self.results = shards, replicas, results
        self.rank = shards.rank if shards is not None else 0
        self.replica = replicas.rank if replicas is not None else 0
        self.ownership = assign_owners(
            self.matrices,
            shards.size if shards is not None else 1,
            replicas.size if replicas is not None else 1,
            step_bytes=step_bytes,
            work=work,
            result_width=results.itemsize,
        )
        # By matrix: the parts [lo, hi) that are stored here. Matrices that are cut alike share
        # their pieces.
        cuts = {id(matrix.pieces): matrix.pieces for matrix in self.matrices}
        here = {
            key: [(lo, hi) for rank, lo, hi in pieces if rank == self.rank]
            for key, pieces in cuts.items()
        }
        self.stored = [here[id(matrix.pieces)] for matrix in self.matrices]
        begins: dict[int, int] = {}  # this rank's piece of each parameter begins at this element
        for matrix, parts in zip(self.matrices, self.stored, strict=True):
            for lo, _ in parts:
                begins.setdefault(matrix.parameter, matrix.start + lo)
        # By matrix: where it starts, counted from the beginning of this rank's part.
        self.offsets = [m.start - begins.get(m.parameter, 0) for m in self.matrices]
        self.excluded: frozenset[int] = frozenset()  # matrices that the caller computes itself
        self.lanes = Lanes(device)

    def exclude(self, indices: Iterable[int]) -> None:
        """Leave local matrices to the caller."""
        self.excluded = frozenset(indices)
        self.__dict__.pop("rounds", None)

    @cached_property
    def rounds(self) -> list[_Round]:
        return [self._round(members) for members in self.ownership.rounds]

    def _round(self, members: Sequence[int]) -> _Round:
        owners = self.ownership.owners
        members = [index for index in members if index not in self.excluded]
        here = [index for index in members if owners[index][0] == self.replica]
        owned = [index for index in here if owners[index][1] == self.rank]
        sends: list[Part] = []
        missing: list[Part] = []
        to_owners = back = to_replicas = None
        coded = self.wire == "fp16" and self.results == torch.float32
        if self.shards is not None and any(self.ownership.remote_pieces(index) for index in here):
            sends = [
                (owners[index][1], index, lo, hi)
                for index in here
                if owners[index][1] != self.rank
                for lo, hi in self.stored[index]
            ]
            receives = [
                (rank, index, lo, hi)
                for index in owned
                for rank, lo, hi in self.ownership.remote_pieces(index)
            ]
            to_owners = _Leg(self.shards, sends, receives, coded=self.wire == "fp16")
            back = _Leg(self.shards, receives, sends, coded=coded)
        if self.replicas is not None:
            others = [peer for peer in range(self.replicas.size) if peer != self.replica]
            shared = [(index, lo, hi) for index in here for lo, hi in self.stored[index]]
            missing = [
                (owners[index][0], index, lo, hi)
                for index in members
                if owners[index][0] != self.replica
                for lo, hi in self.stored[index]
            ]
            parts = [(peer, *part) for peer in others for part in shared]
            to_replicas = _Leg(self.replicas, parts, missing, coded=coded)
        own = [(index, lo, hi) for index in owned for lo, hi in self.stored[index]]
        sent = self._spans(sorted(sends), mine=True)
        mine = sent + [self._span(*part, mine=True) for part in own]
        shapes: dict[tuple[int, int], list[Key]] = {}
        for index in owned:
            for number, shape in enumerate(self.matrices[index].shapes):
                shapes.setdefault(shape, []).append((index, number))
        return _Round(
            spans=mine + self._spans(sorted(missing), mine=False),
            num_sent=len(sent),
            num_mine=len(mine),
            own=own,
            batches=list(shapes.items()),
            to_owners=to_owners,
            back=back,
            to_replicas=to_replicas,
        )

    def _span(self, index: int, lo: int, hi: int, *, mine: bool) -> Span:
        offset = self.offsets[index]
        return Span(self.matrices[index].parameter, offset + lo, offset + hi, mine, index)

    def _spans(self, parts: Sequence[Part], *, mine: bool) -> list[Span]:
        """Parts in order; neighbours for one peer that follow each other in memory are one span."""
        found: list[Span] = []
        before: Part | None = None
        for part in parts:
            span = self._span(*part[1:], mine=mine)
            if before is not None and before[0] == part[0]:
                last = found[-1]
                alike = self.matrices[before[1]].shapes == self.matrices[part[1]].shapes
                if alike and (last.parameter, last.end) == (span.parameter, span.begin):
                    span = replace(found.pop(), end=span.end)
            found.append(span)
            before = part
        return found

    def agree(self) -> None:
        """Raise where ranks have planned different exchanges, for which they would wait forever
        (collective)."""
        for axis in (self.shards, self.replicas):
            if axis is None or axis.pretends:
                continue
            plan = (self.ownership.digest, self.wire, str(self.results))
            everyone = comm.agree(plan, axis)
            mine = everyone[axis.rank]
            other = next((rank for rank, theirs in enumerate(everyone) if theirs != mine), None)
            if other is not None:
                raise ValueError(
                    f"ranks {axis.rank} and {other} of axis '{axis.name}' planned different "
                    f"exchanges for {len(self.matrices)} matrices: give every rank the same "
                    f"parameters, in the same order, with the same settings"
                )

    @property
    def moves(self) -> bool:
        """Whether anything is sent."""
        return self.replicas is not None or self.ownership.needs_exchange

    def is_local(self, index: int) -> bool:
        """Whether this rank owns and stores all of a matrix, and no replica waits for it."""
        owned = self.ownership.owners[index][1] == self.rank and self.replicas is None
        return owned and not self.ownership.remote_pieces(index)

    # ------------------------------------------------------------------ running

    def run(self, begin: Begin, compute: Compute) -> Iterator[tuple[list[Span], list[Tensor]]]:
        """Exchange and compute round by round; yields the spans of every finished round, in order,
        with the elements of the computed matrices. ``begin`` makes what is computed."""
        count = len(self.rounds)
        delay = 2 if self.replicas is not None else 1 if self.ownership.needs_exchange else 0
        under_way = {n: self._run(one, begin, compute) for n, one in enumerate(self.rounds)}
        for now in range(-min(delay, 1), count + delay):
            # Round now + 1 goes to its owners while round now is computed, after which round
            # now - 1 comes back; see the stages of ``_run``.
            turns = (now, now + 1, now, now - 1, now, now - delay) if delay else (now,) * 6
            for number in turns:
                done = next(under_way[number]) if 0 <= number < count else None
            if done is not None:
                yield done
                del done, under_way[now - delay]

    def _run(
        self, one: _Round, begin: Begin, compute: Compute
    ) -> Iterator[tuple[list[Span], list[Tensor]] | None]:
        """One round, in six stages; others run in between. Memory is dropped as soon as it can."""
        # 1. Make what is computed, and send it to its owners.
        lengths = one.lengths[: one.num_mine]
        sent = self._empty(sum(lengths[: one.num_sent]))
        own = list(self._empty(sum(lengths[one.num_sent :])).split(lengths[one.num_sent :]))
        begin(one.spans[: one.num_mine], [*sent.split(lengths[: one.num_sent]), *own])
        transfer = None
        if one.to_owners is not None:
            if one.to_owners.coded:
                sent = self._encode(sent.split(one.to_owners.send_lengths))
            transfer = self._send(one.to_owners, sent)
        del sent
        yield None
        # 2. The matrices that this rank owns, in batches of one shape.
        received = self._receive(transfer)  # and what was sent is free
        batches = self._assemble(one, own, received)
        del own, transfer, received
        yield None
        # 3. Compute matrices of one shape at a time.
        results = self._compute(batches, compute)
        del batches
        yield None
        # 4. Send the rows of other ranks, and keep those that are stored here.
        if one.back is not None:
            parts = [results[index][lo:hi] for _, index, lo, hi in one.back.sends]
            transfer = self._send(one.back, self._joined(parts, one.back.coded))
            del parts
        values = [results[index][lo:hi] for index, lo, hi in one.own]
        if self.moves:  # and not the whole matrices
            values = list(self._joined(values).split(lengths[one.num_sent :]))
        del results
        yield None
        # 5. Wait for the results of this replica, and send them to the others.
        if one.back is not None:
            received = self._receive(transfer)
            assert received is not None
            values = [*received.split(lengths[: one.num_sent]), *values]
            del received
        transfer = None
        if one.to_replicas is not None:
            transfer = self._send_to_replicas(one.to_replicas, [values[n] for n in one.by_matrix])
        yield None
        # 6. Wait for the results of other replicas.
        received = self._receive(transfer)
        if received is not None:
            values += received.split(one.lengths[one.num_mine :])
        yield one.spans, values

    def _assemble(self, one: _Round, own: Sequence[Tensor], received: Tensor | None) -> list[Batch]:
        whole: dict[int, Tensor] = {}
        batches = []
        for shape, keys in one.batches:
            batch = self._empty(len(keys), *shape)
            batches.append(batch)
            for (index, _), slot in zip(keys, batch, strict=True):
                if not self.matrices[index].sizes:
                    whole[index] = slot.view(-1)
                elif index not in whole:
                    whole[index] = self._empty(self.matrices[index].numel)
        targets = [whole[index][lo:hi] for index, lo, hi in one.own]
        sources = list(own)
        if one.to_owners is not None and received is not None:
            targets += [whole[index][lo:hi] for _, index, lo, hi in one.to_owners.receives]
            sources += received.split(one.to_owners.lengths)
        if targets:
            torch._foreach_copy_(targets, sources)
        for batch, (_, keys) in zip(batches, one.batches, strict=True):
            for (index, number), slot in zip(keys, batch, strict=True):
                matrix = self.matrices[index]
                if matrix.sizes:
                    slot.copy_(matrix.take(whole[index].view(matrix.rows, matrix.cols))[number])
        return [Batch(batch, keys) for batch, (_, keys) in zip(batches, one.batches, strict=True)]

    def _compute(self, batches: list[Batch], compute: Compute) -> dict[int, Tensor]:
        """The results, flat, by matrix."""
        results: dict[int, Tensor] = {}
        for batch in batches:
            computed = counted(compute(batch), KIND)
            for (index, number), value in zip(batch.keys, computed, strict=True):
                matrix = self.matrices[index]
                if not matrix.sizes:
                    results[index] = value.reshape(-1)
                    continue
                if index not in results:
                    results[index] = self._empty(matrix.numel, dtype=computed.dtype)
                matrix.put(results[index].view(matrix.rows, matrix.cols), number, value)
        return results

    def _send_to_replicas(self, leg: _Leg, parts: list[Tensor]) -> _Transfer:
        peers = leg.axis.size - 1
        if not leg.coded:
            return self._send(leg, self._joined(parts * peers))
        once = self._joined(parts).split(leg.send_lengths[: len(leg.sends) // peers])
        return self._send(leg, self._encode(once * peers))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return counted(torch.empty(shape, dtype=dtype, device=self.device), KIND)

    # ------------------------------------------------------------------ messages

    def _send(self, leg: _Leg, sent: Tensor) -> _Transfer:
        """Start one all-to-all of exact sizes; parts that stay here are not in it."""
        received = self._empty(sum(leg.receive_sizes), dtype=sent.dtype)
        self.lanes.join("gather", "compute")
        with self.lanes.on("gather"):
            sizes = leg.receive_sizes, leg.send_sizes
            pending = comm.all_to_all(received, sent, *sizes, leg.axis)
            event = self.lanes.mark("gather")
        return _Transfer(leg, pending, event, received, sent)

    def _receive(self, transfer: _Transfer | None) -> Tensor | None:
        """Wait for an all-to-all; returns its parts one after another."""
        if transfer is None:
            return None
        transfer.pending.wait()
        self.lanes.wait("compute", transfer.event)
        transfer.sent = None
        if transfer.leg.coded:
            return self._decode(transfer.received, transfer.leg.lengths)
        return transfer.received

    def _joined(self, parts: Sequence[Tensor], coded: bool = False) -> Tensor:
        """Results one after another, as they are or ``coded``."""
        if coded:
            return self._encode(parts)
        if not parts:
            return torch.empty(0, dtype=self.results, device=self.device)
        return counted(torch.cat(list(parts)), KIND)

    def _encode(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts one after another in fp16. Each is scaled by a power of two, so that its
        largest element comes near fp16's, and the exponent precedes it."""
        encoded = [torch.empty(0, dtype=torch.float16, device=self.device)]
        for part in parts:
            exponent = torch.frexp(part.abs().amax()).exponent.clamp(-100, 126)
            encoded.append(exponent.to(torch.float16).view(1))
            encoded.append(torch.ldexp(part, _FP16_TOP - exponent).to(torch.float16))
        return counted(torch.cat(encoded), KIND)

    def _decode(self, received: Tensor, lengths: Sequence[int]) -> Tensor:
        parts = received.split([length + 1 for length in lengths])
        found = [torch.ldexp(part[1:].float(), part[0].int() - _FP16_TOP) for part in parts]
        return counted(torch.cat([torch.empty(0, device=self.device), *found]), KIND)


_FP16_TOP = 15  # scaled values stay below 2^15; fp16 ends at 65504
