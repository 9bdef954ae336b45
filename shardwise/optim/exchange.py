# SPDX-License-Identifier: Apache-2.0
"""Exchange: pieces of matrices go to their owners, through Newton-Schulz, and back.

    workspace (this rank's pieces)     | A 0-3 | B 0-1 |
       to owners     all-to-all        pieces go to the owners, exact sizes
       compute                         owners assemble matrices and compute them shape by shape
       back          all-to-all        rows return to the ranks that store them
       to replicas   all-to-all        and go to the other replicas, which computed other matrices

Rounds overlap: while round k is computed, round k + 1 goes to its owners and round k - 1 comes
back. The caller is told of every finished round.

The calls and their sizes follow from the ownership alone. A parameter without a gradient, or a rank
without work, changes nothing about them, so no rank waits for a message that is never sent.
Building an Exchange communicates nothing and reads no values; :meth:`Exchange.agree` compares the
ownership between ranks, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise import comm
from shardwise.optim.ownership import assign_owners
from shardwise.optim.split import Matrix
from shardwise.streams import Lanes

Key = tuple[int, int]  # (matrix, number among what is computed by itself in it)
Compute = Callable[[Tensor, list[Key]], Tensor]  # [count, rows, cols] -> the same shape
Part = tuple[int, int, int, int]  # (peer on the axis, matrix, lo, hi)
View = Callable[[int, int, int], Tensor]  # (matrix, lo, hi) -> those elements, flat


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
    sent: Tensor


class Exchange:
    """The exchange of matrices that are stored on the same ranks, run on workspaces."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        shards: comm.Axis | None,
        replicas: comm.Axis | None,
        device: torch.device,
        *,
        wire: str = "fp32",
        round_bytes: int | None = None,
    ) -> None:
        """``shards``: the ranks that store different pieces; ``replicas``: those that store the
        same pieces and compute different matrices."""
        self.matrices, self.device, self.wire = list(matrices), device, wire
        self.shards, self.replicas = shards, replicas
        self.rank = shards.rank if shards is not None else 0
        self.replica = replicas.rank if replicas is not None else 0
        self.ownership = assign_owners(
            self.matrices,
            shards.size if shards is not None else 1,
            replicas.size if replicas is not None else 1,
            round_bytes=round_bytes,
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
        # By matrix: where it starts, counted from the beginning of its workspace.
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
        return _Round(owned, to_owners, back, to_replicas)

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

    def is_local(self, index: int) -> bool:
        """Whether this rank owns and stores all of a matrix, and no replica waits for it."""
        owned = self.ownership.owners[index][1] == self.rank and self.replicas is None
        return owned and not self.ownership.remote_pieces(index)

    # ------------------------------------------------------------------ running

    def run(self, workspaces: Sequence[Tensor], compute: Compute) -> Iterator[int]:
        """Replace this rank's pieces of every matrix by those of the computed matrix; yields the
        number of every finished round, in order.

        ``workspaces[p]`` is this rank's piece of parameter ``p``, flat, read and overwritten.
        """

        def stored(index: int, lo: int, hi: int) -> Tensor:
            offset = self.offsets[index]
            return workspaces[self.matrices[index].parameter][offset + lo : offset + hi]

        count = len(self.rounds)
        delay = 2 if self.replicas is not None else 1 if self.ownership.needs_exchange else 0
        to_owners: list[_Transfer | None] = [None] * count
        back: list[_Transfer | None] = [None] * count
        to_replicas: list[_Transfer | None] = [None] * count
        if count:
            to_owners[0] = self._send(self.rounds[0].to_owners, stored)
        for number in range(count + delay):  # one round goes to owners, earlier ones come back
            if number + 1 < count:
                to_owners[number + 1] = self._send(self.rounds[number + 1].to_owners, stored)
            if number < count:
                one = self.rounds[number]
                whole = self._assemble(one, stored, to_owners[number])
                to_owners[number] = None
                self._compute(whole, compute)
                back[number] = self._send(one.back, lambda i, lo, hi, w=whole: w[i][lo:hi])  # type: ignore[misc]
                self._keep_own(one, whole, stored)
                del whole
            if 0 < number <= count:
                self._receive(back[number - 1], stored)
                back[number - 1] = None
                to_replicas[number - 1] = self._send(self.rounds[number - 1].to_replicas, stored)
            if number >= delay:
                self._receive(to_replicas[number - delay], stored)
                to_replicas[number - delay] = None
                yield number - delay

    def _assemble(self, one: _Round, stored: View, arriving: _Transfer | None) -> dict[int, Tensor]:
        """The matrices that this rank owns, flat; a view where it stores the matrix whole."""
        whole: dict[int, Tensor] = {}
        for index, parts in one.owned.items():
            if index in self.excluded:
                continue
            numel = self.matrices[index].numel
            if parts == [(0, numel)]:
                whole[index] = stored(index, 0, numel)
                continue
            whole[index] = torch.empty(numel, device=self.device)
            for lo, hi in parts:
                whole[index][lo:hi] = stored(index, lo, hi)
        self._receive(arriving, lambda index, lo, hi: whole[index][lo:hi])
        return whole

    def _compute(self, whole: dict[int, Tensor], compute: Compute) -> None:
        """Compute matrices of one shape at a time, as one batch."""
        shapes: dict[tuple[int, int], list[tuple[int, int, Tensor]]] = {}
        for index, flat in whole.items():
            matrix = self.matrices[index]
            for number, block in enumerate(matrix.take(flat.view(matrix.rows, matrix.cols))):
                shapes.setdefault(matrix.shapes[number], []).append((index, number, block))
        for members in shapes.values():
            batch = torch.stack([block for _, _, block in members])  # [count, rows, cols]
            keys = [(index, number) for index, number, _ in members]
            for (index, number), result in zip(keys, compute(batch, keys), strict=True):
                matrix = self.matrices[index]
                matrix.put(whole[index].view(matrix.rows, matrix.cols), number, result)

    def _keep_own(self, one: _Round, whole: dict[int, Tensor], stored: View) -> None:
        """Copy the parts of assembled matrices that are stored here into the workspaces."""
        for index, flat in whole.items():
            for lo, hi in one.owned[index]:
                if hi - lo < self.matrices[index].numel:  # otherwise it is a view of them
                    stored(index, lo, hi).copy_(flat[lo:hi])

    # ------------------------------------------------------------------ messages

    def _send(self, leg: _Leg | None, source: View) -> _Transfer | None:
        """Start one all-to-all of exact sizes; parts that stay here are not in it."""
        if leg is None:
            return None
        sent = self._encode([source(index, lo, hi) for _, index, lo, hi in leg.sends])
        received = torch.empty(sum(leg.receive_sizes), dtype=sent.dtype, device=self.device)
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
