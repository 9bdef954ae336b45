# SPDX-License-Identifier: Apache-2.0
"""Exchange: pieces of matrices go to their owners, through Newton-Schulz, and back.

    spans (what this rank stores)      | A 0-3 | B 0-1 |
       to owners     all-to-all        pieces go to the owners, exact sizes
       compute                         owners assemble matrices and compute them shape by shape
       back          all-to-all        rows return to the ranks that store them
       to replicas   all-to-all        and go to the other replicas, which computed other matrices

Rounds overlap: while round k is computed, round k + 1 goes to its owners and round k - 1 comes
back. The caller fills the spans of a round when the round begins and takes them when it is
finished, so that a step holds a few rounds at a time, and never all matrices.

The calls and their sizes follow from the ownership alone. A parameter without a gradient, or a rank
without work, changes nothing about them, so no rank waits for a message that is never sent.
Building an Exchange communicates nothing and reads no values; :meth:`Exchange.agree` compares the
ownership between ranks, once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise import comm
from shardwise.memory import counted
from shardwise.optim.ownership import assign_owners
from shardwise.optim.split import Matrix
from shardwise.streams import Lanes

Key = tuple[int, int]  # (matrix, number among what is computed by itself in it)
Compute = Callable[[Tensor, list[Key]], Tensor]  # [count, rows, cols] -> the same shape
Part = tuple[int, int, int, int]  # (peer on the axis, matrix, lo, hi)
View = Callable[[int, int, int], Tensor]  # (matrix, lo, hi) -> those elements, flat


@dataclass(frozen=True)
class Span:
    """A run of elements of a parameter that this rank stores, and that one round exchanges."""

    parameter: int
    begin: int  # counted from the beginning of this rank's part of the parameter
    end: int
    mine: bool  # whether this replica computes its matrices; else it is received

    def goes_on_with(self, other: Span) -> bool:
        """Whether both are one span."""
        end = replace(self, begin=self.end, end=other.end)
        return end == other


# The elements of each span, flat and new; none of a span that another replica computes.
Begin = Callable[[Sequence[Span]], list[Tensor]]


KIND = "step"  # the ledger's word for the memory of a step


class _Places:
    """The elements of a round's spans, and where in them its matrices lie."""

    def __init__(self, spans: list[Span], places: dict[int, tuple[int, int]], begin: Begin) -> None:
        self.spans, self._places = spans, places
        self.values = begin(spans)

    def view(self, index: int, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a matrix, which are stored here."""
        number, place = self._places[index]
        value, span = self.values[number], self.spans[number]
        if not len(value):  # they arrive now
            value = counted(value.new_empty(span.end - span.begin), KIND)
            self.values[number] = value
        return value[place + lo : place + hi]

    def keep(self, owned: Container[int]) -> None:
        """Drop the elements of spans that are sent and come back: all but those of ``owned``
        matrices."""
        kept = {number for index, (number, _) in self._places.items() if index in owned}
        for number, value in enumerate(self.values):
            if number not in kept:
                self.values[number] = value.new_empty(0)


class _Leg:
    """One all-to-all of a round: the parts that this rank sends and receives, by peer."""

    def __init__(
        self, axis: comm.Axis, sends: Sequence[Part], receives: Sequence[Part], header: int
    ) -> None:
        self.axis = axis
        self.sends, self.receives = sorted(sends), sorted(receives)  # both sides: by peer, matrix
        self.lengths = [hi - lo for _, _, lo, hi in self.receives]
        self.send_sizes, self.receive_sizes = [0] * axis.size, [0] * axis.size
        for sizes, parts in ((self.send_sizes, sends), (self.receive_sizes, receives)):
            for peer, _, lo, hi in parts:
                sizes[peer] += hi - lo + header


@dataclass(eq=False)
class _Round:
    """Matrices that are exchanged and computed together, as one rank sees them."""

    members: tuple[int, ...]
    owned: dict[int, list[tuple[int, int]]]  # by matrix: the parts [lo, hi) that are stored here
    to_owners: _Leg | None
    back: _Leg | None
    to_replicas: _Leg | None


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
    ) -> None:
        """``shards``: the ranks that store different pieces; ``replicas``: those that store the
        same pieces and compute different matrices; ``step_bytes``: see ``assign_owners``."""
        self.matrices, self.device, self.wire = list(matrices), device, wire
        self.shards, self.replicas = shards, replicas
        self.rank = shards.rank if shards is not None else 0
        self.replica = replicas.rank if replicas is not None else 0
        self.ownership = assign_owners(
            self.matrices,
            shards.size if shards is not None else 1,
            replicas.size if replicas is not None else 1,
            step_bytes=step_bytes,
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
        self.rounds = [self._round(members) for members in self.ownership.rounds]
        self.excluded: frozenset[int] = frozenset()  # matrices that the caller computes itself
        self.lanes = Lanes(device)

    def _round(self, members: Sequence[int]) -> _Round:
        ownership = self.ownership
        here = [index for index in members if ownership.owners[index][0] == self.replica]
        owned = {i: self.stored[i] for i in here if ownership.owners[i][1] == self.rank}
        header = 0 if self.wire == "fp32" else 1
        to_owners = back = to_replicas = None
        if self.shards is not None and any(ownership.remote_pieces(index) for index in here):
            sends = [
                (ownership.owners[index][1], index, lo, hi)
                for index in here
                if index not in owned
                for lo, hi in self.stored[index]
            ]
            receives = [
                (rank, index, lo, hi)
                for index in owned
                for rank, lo, hi in ownership.remote_pieces(index)
            ]
            to_owners = _Leg(self.shards, sends, receives, header)
            back = _Leg(self.shards, receives, sends, header)
        if self.replicas is not None:
            others = [peer for peer in range(self.replicas.size) if peer != self.replica]
            shared = [(index, lo, hi) for index in here for lo, hi in self.stored[index]]
            missing = [
                (ownership.owners[index][0], index, lo, hi)
                for index in members
                if ownership.owners[index][0] != self.replica
                for lo, hi in self.stored[index]
            ]
            sends = [(peer, *part) for peer in others for part in shared]
            to_replicas = _Leg(self.replicas, sends, missing, header)
        return _Round(tuple(members), owned, to_owners, back, to_replicas)

    def agree(self) -> None:
        """Raise where ranks have planned different exchanges, for which they would wait forever
        (collective)."""
        for axis in (self.shards, self.replicas):
            if axis is None or axis.pretends:
                continue
            everyone = comm.agree((self.ownership.digest, self.wire), axis)
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
        ahead = min(delay, 1)
        under_way: dict[int, _Places] = {}
        to_owners: dict[int, _Transfer | None] = {}
        back: dict[int, _Transfer | None] = {}
        to_replicas: dict[int, _Transfer | None] = {}
        for number in range(-ahead, count + delay):
            coming = number + ahead
            if coming < count:  # goes to its owners
                one = self.rounds[coming]
                under_way[coming] = _Places(*self._spans(one), begin)
                to_owners[coming] = self._send(one.to_owners, under_way[coming].view)
                under_way[coming].keep(one.owned)
            if 0 <= number < count:  # is computed
                one, view = self.rounds[number], under_way[number].view
                whole, batches = self._assemble(one, view, to_owners.pop(number))
                self._compute(whole, batches, compute)
            if delay and 0 < number <= count:  # comes back
                one, view = self.rounds[number - 1], under_way[number - 1].view
                self._receive(back.pop(number - 1), view)
                to_replicas[number - 1] = self._send(one.to_replicas, view)
            if 0 <= number < count:
                one, view = self.rounds[number], under_way[number].view
                back[number] = self._send(one.back, lambda i, lo, hi, w=whole: w[i][lo:hi])  # type: ignore[misc]
                self._keep_own(one, whole, view)
                del whole, batches
            if number >= delay:  # is finished
                done = under_way.pop(number - delay)
                self._receive(to_replicas.pop(number - delay, None), done.view)
                yield done.spans, done.values
                del done

    def _spans(self, one: _Round) -> tuple[list[Span], dict[int, tuple[int, int]]]:
        """The spans of a round without excluded matrices, and by matrix the number of its span
        and its place there, counted from the matrix's first element."""
        spans: list[Span] = []
        places: dict[int, tuple[int, int]] = {}
        for index in one.members:
            if index in self.excluded:
                continue
            parameter, offset = self.matrices[index].parameter, self.offsets[index]
            mine = self.ownership.owners[index][0] == self.replica
            for lo, hi in self.stored[index]:
                spans.append(Span(parameter, offset + lo, offset + hi, mine))
                if len(spans) > 1 and spans[-2].goes_on_with(spans[-1]):
                    end = spans.pop().end
                    spans[-1] = replace(spans[-1], end=end)
                places[index] = len(spans) - 1, offset - spans[-1].begin
        return spans, places

    def _assemble(
        self, one: _Round, stored: View, arriving: _Transfer | None
    ) -> tuple[dict[int, Tensor], list[tuple[Tensor, list[Key]]]]:
        """The matrices that this rank owns, flat; and batches of one shape, of which plain matrices
        are views."""
        owned = [index for index in one.owned if index not in self.excluded]
        shapes: dict[tuple[int, int], list[Key]] = {}
        for index in owned:
            for number, shape in enumerate(self.matrices[index].shapes):
                shapes.setdefault(shape, []).append((index, number))
        whole: dict[int, Tensor] = {}
        batches = []
        for shape, keys in shapes.items():
            batch = self._empty(len(keys), *shape)
            batches.append((batch, keys))
            for (index, _), slot in zip(keys, batch, strict=True):
                if not self.matrices[index].sizes:
                    whole[index] = slot.view(-1)
        for index in owned:
            if self.matrices[index].sizes:
                whole[index] = self._empty(self.matrices[index].numel)
            for lo, hi in one.owned[index]:
                whole[index][lo:hi] = stored(index, lo, hi)
        self._receive(arriving, lambda index, lo, hi: whole[index][lo:hi])
        return whole, batches

    def _compute(
        self, whole: dict[int, Tensor], batches: list[tuple[Tensor, list[Key]]], compute: Compute
    ) -> None:
        """Compute matrices of one shape at a time, as one batch, in place."""
        for batch, keys in batches:
            split = [
                (slot, self.matrices[index], whole[index], number)
                for (index, number), slot in zip(keys, batch, strict=True)
                if self.matrices[index].sizes
            ]
            for slot, matrix, flat, number in split:
                slot.copy_(matrix.take(flat.view(matrix.rows, matrix.cols))[number])
            result = compute(batch, keys)
            if result is not batch:
                batch.copy_(result)
            for slot, matrix, flat, number in split:
                matrix.put(flat.view(matrix.rows, matrix.cols), number, slot)

    def _keep_own(self, one: _Round, whole: dict[int, Tensor], stored: View) -> None:
        """Copy the parts of assembled matrices that are stored here into the spans."""
        for index, flat in whole.items():
            for lo, hi in one.owned[index]:
                stored(index, lo, hi).copy_(flat[lo:hi])

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return counted(torch.empty(shape, dtype=dtype, device=self.device), KIND)

    # ------------------------------------------------------------------ messages

    def _send(self, leg: _Leg | None, source: View) -> _Transfer | None:
        """Start one all-to-all of exact sizes; parts that stay here are not in it."""
        if leg is None:
            return None
        sent = self._encode([source(index, lo, hi) for _, index, lo, hi in leg.sends])
        sent = counted(sent, KIND)
        received = self._empty(sum(leg.receive_sizes), dtype=sent.dtype)
        self.lanes.join("gather", "compute")
        with self.lanes.on("gather"):
            sizes = leg.receive_sizes, leg.send_sizes
            pending = comm.all_to_all(received, sent, *sizes, leg.axis)
            event = self.lanes.mark("gather")
        return _Transfer(leg, pending, event, received, sent)

    def _receive(self, transfer: _Transfer | None, target: View) -> None:
        """Wait for an all-to-all and put its parts in their places."""
        if transfer is None:
            return
        transfer.pending.wait()
        self.lanes.wait("compute", transfer.event)
        transfer.sent = None
        parts = self._decode(transfer.received, transfer.leg.lengths)
        for (_, index, lo, hi), part in zip(transfer.leg.receives, parts, strict=True):
            target(index, lo, hi).copy_(part)

    def _encode(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts one after another. In fp16 each is scaled by a power of two, so that its
        largest element comes near fp16's, and the exponent precedes it."""
        if self.wire == "fp32":
            if not parts:
                return torch.empty(0, device=self.device)
            return torch.cat([part.float() for part in parts])
        encoded = [torch.empty(0, dtype=torch.float16, device=self.device)]
        for part in parts:
            part = part.float()
            exponent = torch.frexp(part.abs().amax()).exponent.clamp(-100, 126)
            encoded.append(exponent.to(torch.float16).view(1))
            encoded.append(torch.ldexp(part, _FP16_TOP - exponent).to(torch.float16))
        return torch.cat(encoded)

    def _decode(self, received: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        if self.wire == "fp32":
            return iter(received.split(list(lengths)))
        encoded = received.split([length + 1 for length in lengths])
        return (torch.ldexp(part[1:].float(), part[0].int() - _FP16_TOP) for part in encoded)


_FP16_TOP = 15  # scaled values stay below 2^15; fp16 ends at 65504
