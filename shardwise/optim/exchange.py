# SPDX-License-Identifier: Apache-2.0
"""Exchange: pieces of matrices to their owners, through Newton-Schulz, and back.

    workspace (this rank's pieces)     | A 0-3 | B 0-1 |
       there     all-to-all            pieces go to the owners, exact sizes
       compute                         owners put parcels together and orthogonalise shape by shape
       back      all-to-all            rows return to where they came from
       share     all-to-all            and go to the other replicas, which computed other parcels

Rounds overlap in two slots: while round k is computed, round k + 1 is on its way there and round
k - 1 on its way back. Whoever runs it hears of every round that is done.

Which calls are made, and how long they are, follows from the plan alone. A parameter without a
gradient, or a rank without work, changes nothing about it, so nobody waits for a message that was
never sent. The plan is compared between ranks once, when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise import comm
from shardwise.optim.owners import Cargo, Plan, plan_owners
from shardwise.optim.split import Parcel
from shardwise.optim.storage import Home, Piece
from shardwise.placements import Turns
from shardwise.streams import Lanes

Orthogonalize = Callable[[Tensor], Tensor]  # [count, rows, cols] -> the same shape


@dataclass(frozen=True, eq=False)
class Freight:
    """One parcel of one parameter: position of the parameter, where its pieces lie, its cost."""

    name: str
    position: int
    parcel: Parcel
    pieces: tuple[Piece, ...]
    cost: int
    pinned: bool
    wave: int = 0


def freight_of(
    name: str,
    position: int,
    parcels: Sequence[Parcel],
    pieces: Sequence[Piece],
    cost: Callable[[int, int], int],
    *,
    pinned: bool,
    wave: int = 0,
) -> list[Freight]:
    """The parcels of one parameter with the pieces of each: both lists go by element."""
    found: list[Freight] = []
    first = 0
    for number, parcel in enumerate(parcels):
        end = parcel.start + parcel.numel
        while first < len(pieces) and pieces[first][2] <= parcel.start:
            first += 1
        held = []
        for rank, lo, hi in pieces[first:]:
            if lo >= end:
                break
            held.append((rank, max(lo, parcel.start) - parcel.start, min(hi, end) - parcel.start))
        total = sum(cost(rows, cols) for rows, cols in parcel.shapes)
        label = name if len(parcels) == 1 else f"{name}[{number}]"
        found.append(Freight(label, position, parcel, tuple(held), total, pinned, wave))
    return found


def plan_exchange(
    freight: Sequence[Freight],
    num_shards: int,
    num_replicas: int,
    slot_bytes: int | None = None,
) -> Plan:
    """Owners for all parcels; see :mod:`shardwise.optim.owners`."""
    cargo = [
        Cargo(
            one.name,
            one.parcel.numel,
            one.pieces,
            one.cost,
            tuple(side for shape in one.parcel.shapes for side in shape),
            one.pinned,
            one.position,
            one.parcel.start,
            one.wave,
        )
        for one in freight
    ]
    return plan_owners(cargo, num_shards, num_replicas, slot_bytes=slot_bytes)


@dataclass(eq=False)
class _Flight:
    """Messages under way, and the memory that they use until they have arrived."""

    pending: comm.Pending
    event: object
    lanes: Lanes
    memory: tuple[Tensor, ...]

    def wait(self) -> Tensor:
        self.pending.wait()
        self.lanes.wait("compute", self.event)
        return self.memory[0]


@dataclass(eq=False)
class _Slot:
    """One round: what this rank sends and receives, and what it computes."""

    owned: list[int]
    travels: bool  # whether any rank of the shard axis sends anything
    there: list[tuple[int, int, int, int]] = field(default_factory=list)  # (peer, parcel, lo, hi)
    arriving: list[tuple[int, int, int, int]] = field(default_factory=list)
    shared: list[tuple[int, int, int]] = field(default_factory=list)  # (parcel, lo, hi)
    foreign: list[tuple[int, int, int, int]] = field(default_factory=list)
    whole: dict[int, Tensor] = field(default_factory=dict)


class Exchange:
    """The plan of one home, and its execution on workspaces."""

    def __init__(
        self,
        home: Home,
        freight: Sequence[Freight],
        device: torch.device,
        *,
        wire: str = "fp32",
        spread: bool = True,
        slot_bytes: int | None = None,
    ) -> None:
        self.home, self.freight, self.device, self.wire = home, list(freight), device, wire
        self.shards = home.shards
        self.replicas = home.replicas if spread else None
        self.rank = self.shards.rank if self.shards is not None else 0
        self.replica = self.replicas.rank if self.replicas is not None else 0
        self.plan = plan_exchange(
            self.freight,
            self.shards.size if self.shards is not None else 1,
            self.replicas.size if self.replicas is not None else 1,
            slot_bytes,
        )
        # My piece of each parameter begins at this element.
        self.begins: dict[int, int] = {}
        for one in self.freight:
            for rank, lo, _ in one.pieces:
                if rank == self.rank:
                    self.begins.setdefault(one.position, one.parcel.start + lo)
        self.slots = [self._slot(members) for members in self.plan.rounds]
        self.skipped: frozenset[int] = frozenset()  # parcels that the caller computes itself
        self.lanes = Lanes(device)
        self._agree()

    def _slot(self, members: Sequence[int]) -> _Slot:
        plan = self.plan
        here = [index for index in members if plan.owners[index][0] == self.replica]
        slot = _Slot(
            [index for index in here if plan.owners[index][1] == self.rank],
            any(plan.sends(index) for index in here),
        )
        for index in members:
            replica, owner = plan.owners[index]
            mine = [(lo, hi) for rank, lo, hi in self.freight[index].pieces if rank == self.rank]
            if replica == self.replica:
                slot.there += [(owner, index, lo, hi) for lo, hi in mine if owner != self.rank]
                slot.shared += [(index, lo, hi) for lo, hi in mine]
                if owner == self.rank:
                    slot.arriving += [(rank, index, lo, hi) for rank, lo, hi in plan.sends(index)]
            else:
                slot.foreign += [(replica, index, lo, hi) for lo, hi in mine]
        for moves in (slot.there, slot.arriving, slot.shared, slot.foreign):
            moves.sort()  # type: ignore[attr-defined]  # both sides go by peer, then by parcel
        return slot

    def _agree(self) -> None:
        """Ranks whose plans differ would wait for each other for ever: find out now."""
        for axis in (self.shards, self.replicas):
            if axis is None or axis.pretends:
                continue
            everyone = comm.agree((self.plan.digest, self.wire), axis)
            if len(set(everyone)) > 1:
                other = next(
                    r for r, theirs in enumerate(everyone) if theirs != everyone[axis.rank]
                )
                raise ValueError(
                    f"ranks {axis.rank} and {other} of axis '{axis.name}' planned different "
                    f"exchanges for {len(self.freight)} matrices: give every rank the same "
                    f"parameters, in the same order, with the same settings"
                )

    def turns(self, position: int) -> Turns | None:
        """What of a parameter each replica computes; None where all do the same."""
        if self.replicas is None:
            return None
        by_rank = self.plan.turns[position]
        order = self.home.replica_order
        return tuple(by_rank[order.index(place)] for place in range(len(order)))

    def stays(self, index: int) -> bool:
        """Whether a parcel is computed here, from pieces that are here, for nobody else."""
        mine = self.plan.owners[index][1] == self.rank and self.replicas is None
        return mine and not self.plan.sends(index)

    # ------------------------------------------------------------------ running it

    def run(self, workspaces: Sequence[Tensor], orthogonalize: Orthogonalize) -> None:
        """All :meth:`rounds`, one after another."""
        for _ in self.rounds(workspaces, orthogonalize):
            pass

    def rounds(self, workspaces: Sequence[Tensor], orthogonalize: Orthogonalize) -> Iterator[int]:
        """Replace this rank's pieces of every matrix by those of its orthogonalised form; the
        number of every round that is done, in order.

        ``workspaces[position]`` is this rank's piece of that parameter, flat, read and overwritten.
        """
        count = len(self.slots)
        later = 2 if self.replicas is not None else 1 if self.plan.moves else 0
        going: list[_Flight | None] = [None] * count
        coming: list[_Flight | None] = [None] * count
        sharing: list[_Flight | None] = [None] * count
        if count:
            going[0] = self._send_there(self.slots[0], workspaces)
        for number in range(count + later):  # one goes there, those before it come back
            if number + 1 < count:
                going[number + 1] = self._send_there(self.slots[number + 1], workspaces)
            if number < count:
                slot = self.slots[number]
                self._assemble(slot, workspaces, going[number])
                going[number] = None
                self._compute(slot, orthogonalize)
                coming[number] = self._send_back(slot)
                self._scatter_own(slot, workspaces)
            if 0 < number <= count:
                before = self.slots[number - 1]
                self._unpack_back(before, workspaces, coming[number - 1])
                coming[number - 1] = None
                sharing[number - 1] = self._share(before, workspaces)
            if number >= later:
                done = number - later
                self._unpack_shared(self.slots[done], workspaces, sharing[done])
                sharing[done] = None
                yield done

    def _mine(self, workspaces: Sequence[Tensor], index: int, lo: int, hi: int) -> Tensor:
        """Elements [lo, hi) of a parcel, which are stored here, in the workspace."""
        one = self.freight[index]
        offset = one.parcel.start - self.begins[one.position]
        return workspaces[one.position][offset + lo : offset + hi]

    def _send_there(self, slot: _Slot, workspaces: Sequence[Tensor]) -> _Flight | None:
        if self.shards is None or not slot.travels:
            return None
        outgoing = [(peer, self._mine(workspaces, i, lo, hi)) for peer, i, lo, hi in slot.there]
        incoming = [(peer, hi - lo) for peer, _, lo, hi in slot.arriving]
        return self._start(self.shards, outgoing, incoming)

    def _assemble(self, slot: _Slot, workspaces: Sequence[Tensor], flight: _Flight | None) -> None:
        """Put this rank's parcels together; one that it holds whole is computed where it lies."""
        for index in slot.owned:
            if index in self.skipped:
                continue
            numel = self.freight[index].parcel.numel
            mine = [piece for piece in self.freight[index].pieces if piece[0] == self.rank]
            if [(lo, hi) for _, lo, hi in mine] == [(0, numel)]:
                slot.whole[index] = self._mine(workspaces, index, 0, numel)
                continue
            whole = torch.empty(numel, device=self.device)
            for _, lo, hi in mine:
                whole[lo:hi] = self._mine(workspaces, index, lo, hi)
            slot.whole[index] = whole
        if flight is not None:
            received = self._decode(flight.wait(), [hi - lo for _, _, lo, hi in slot.arriving])
            for (_, index, lo, hi), part in zip(slot.arriving, received, strict=True):
                slot.whole[index][lo:hi] = part

    def _compute(self, slot: _Slot, orthogonalize: Orthogonalize) -> None:
        """Matrices of one shape at a time, in one batch."""
        shapes: dict[tuple[int, int], list[tuple[int, int, Tensor]]] = {}
        for index in slot.whole:
            parcel = self.freight[index].parcel
            matrices = parcel.take(slot.whole[index].view(parcel.rows, parcel.cols))
            for number, matrix in enumerate(matrices):
                shapes.setdefault(parcel.shapes[number], []).append((index, number, matrix))
        for members in shapes.values():
            batch = torch.stack([matrix for _, _, matrix in members])  # [count, rows, cols]
            for (index, number, _), result in zip(members, orthogonalize(batch), strict=True):
                parcel = self.freight[index].parcel
                whole = slot.whole[index].view(parcel.rows, parcel.cols)
                parcel.put(whole, number, result)

    def _send_back(self, slot: _Slot) -> _Flight | None:
        if self.shards is None or not slot.travels:
            return None
        outgoing = [(peer, slot.whole[i][lo:hi]) for peer, i, lo, hi in slot.arriving]
        incoming = [(peer, hi - lo) for peer, _, lo, hi in slot.there]
        return self._start(self.shards, outgoing, incoming)

    def _scatter_own(self, slot: _Slot, workspaces: Sequence[Tensor]) -> None:
        for index, whole in slot.whole.items():
            for rank, lo, hi in self.freight[index].pieces:
                if rank == self.rank:
                    target = self._mine(workspaces, index, lo, hi)
                    if target.data_ptr() != whole[lo:hi].data_ptr():
                        target.copy_(whole[lo:hi])
        slot.whole.clear()

    def _unpack_back(
        self, slot: _Slot, workspaces: Sequence[Tensor], flight: _Flight | None
    ) -> None:
        if flight is None:
            return
        received = self._decode(flight.wait(), [hi - lo for _, _, lo, hi in slot.there])
        for (_, index, lo, hi), part in zip(slot.there, received, strict=True):
            self._mine(workspaces, index, lo, hi).copy_(part)

    def _share(self, slot: _Slot, workspaces: Sequence[Tensor]) -> _Flight | None:
        if self.replicas is None:
            return None
        mine = [self._mine(workspaces, index, lo, hi) for index, lo, hi in slot.shared]
        peers = [peer for peer in range(self.replicas.size) if peer != self.replica]
        outgoing = [(peer, part) for peer in peers for part in mine]
        incoming = [(peer, hi - lo) for peer, _, lo, hi in slot.foreign]
        return self._start(self.replicas, outgoing, incoming)

    def _unpack_shared(
        self, slot: _Slot, workspaces: Sequence[Tensor], flight: _Flight | None
    ) -> None:
        if flight is None:
            return
        received = self._decode(flight.wait(), [hi - lo for _, _, lo, hi in slot.foreign])
        for (_, index, lo, hi), part in zip(slot.foreign, received, strict=True):
            self._mine(workspaces, index, lo, hi).copy_(part)

    # ------------------------------------------------------------------ the wire

    def _start(
        self,
        axis: comm.Axis,
        outgoing: Sequence[tuple[int, Tensor]],
        incoming: Sequence[tuple[int, int]],
    ) -> _Flight:
        """One all-to-all of exact sizes; what stays here is not part of it."""
        extra = 0 if self.wire == "fp32" else 1
        sizes, out_sizes = [0] * axis.size, [0] * axis.size
        for peer, part in outgoing:
            sizes[peer] += part.numel() + extra
        for peer, length in incoming:
            out_sizes[peer] += length + extra
        source = self._encode([part for _, part in outgoing])
        out = torch.empty(sum(out_sizes), dtype=source.dtype, device=self.device)
        self.lanes.join("gather", "compute")
        with self.lanes.on("gather"):
            pending = comm.all_to_all(out, source, out_sizes, sizes, axis)
            event = self.lanes.mark("gather")
        return _Flight(pending, event, self.lanes, (out, source))

    def _encode(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts one after another. In fp16 each is scaled by a power of two, so that its largest
        element comes near fp16's, and preceded by the exponent."""
        if self.wire == "fp32":
            return torch.cat([part.float() for part in parts]) if parts else self._nothing
        coded = []
        for part in parts:
            part = part.float()
            exponent = torch.frexp(part.abs().amax()).exponent.clamp(-100, 126)
            coded.append(exponent.to(torch.float16).view(1))
            coded.append(torch.ldexp(part, _FP16_TOP - exponent).to(torch.float16))
        return torch.cat(coded) if coded else self._nothing.to(torch.float16)

    def _decode(self, received: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        if self.wire == "fp32":
            return iter(received.split(list(lengths)))
        coded = received.split([length + 1 for length in lengths])
        return (torch.ldexp(part[1:].float(), part[0].int() - _FP16_TOP) for part in coded)

    @property
    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self.device)


_FP16_TOP = 15  # scaled values stay below 2^15; fp16 ends at 65504
