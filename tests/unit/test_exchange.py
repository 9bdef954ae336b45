# SPDX-License-Identifier: Apache-2.0
"""The owner of each matrix: plans for many ranks, without any; and refusals of plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from shardwise.core import comm
from shardwise.core.layout import ROW, TENSOR, Grain, Item, plan
from shardwise.core.placements import chunk_range
from shardwise.kernels.polynomials import PRESETS, cost
from shardwise.optim import ownership
from shardwise.optim.exchange import Batch, Exchange, Span
from shardwise.optim.ownership import Ownership, assign_owners
from shardwise.optim.replicas import evenly_is_cheaper
from shardwise.optim.split import Matrix, Split, matrices_of, stored_matrices
from shardwise.optim.storage import Sharding
from tests.models import mesh_of
from tests.parity.helpers import small_rounds
from tests.ranks import run_ranks
from tests.reference.exchange import sent, sent_to_replicas

# One layer of Llama-3-8B; the model has 32.
LLAMA = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
}
PRICE = partial(cost, polynomial=PRESETS["polar_express"])


def llama(
    shapes: dict[str, tuple[int, int]], layers: int, ranks: int, grain: Grain = ROW
) -> list[Matrix]:
    """Layers alike, each a buffer of its own, cut over ``ranks``."""
    layout = plan([Item(name, shape, grain) for name, shape in shapes.items()], ranks)
    found = []
    for layer in range(layers):
        for index, (name, shape) in enumerate(shapes.items()):
            pieces = tuple((shard, *layout.piece(index, shard)) for shard in layout.holders(index))
            matrices = matrices_of(shape, None)
            label, pinned = f"{layer}.{name}", grain == TENSOR
            found += stored_matrices(matrices, pieces, PRICE, name=label, pinned=pinned)
    return found


def check(found: Ownership) -> None:
    """Check the rules of every plan."""
    size = found.num_shards
    assert len(found.owners) == len(found.matrices) > 0
    assert all(0 <= r < found.num_replicas and 0 <= s < size for r, s in found.owners)
    assert sorted(i for members in found.rounds for i in members) == list(
        range(len(found.matrices))
    )
    workers = [(replica, rank) for replica in range(found.num_replicas) for rank in range(size)]
    there = sum(sent(found, *worker)[0] for worker in workers)
    back = sum(sent(found, *worker)[1] for worker in workers)
    at_home = sum(
        hi - lo
        for matrix, (_, owner) in zip(found.matrices, found.owners, strict=True)
        for rank, lo, hi in matrix.pieces
        if rank == owner
    )
    assert there == back == sum(matrix.numel for matrix in found.matrices) - at_home


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 24, 64, 128, 256, 512, 1024])
def test_owners_are_balanced_and_send_no_more_than_the_formula(ranks: int) -> None:
    matrices = llama(LLAMA, 32, ranks)
    found = assign_owners(matrices, ranks)
    if ranks <= 128:
        check(found)
    mean = sum(matrix.cost for matrix in matrices) / ranks
    dearest = max(matrix.cost for matrix in matrices)
    assert max(found.loads.values()) <= max(1.1 * mean, dearest)
    # All ranks together: (N - 1) / N of everything each way if no owner held more than its share.
    numel = sum(matrix.numel for matrix in matrices)
    moved = sum(
        hi - lo for index in range(len(matrices)) for _, lo, hi in found.remote_pieces(index)
    )
    assert moved <= (ranks - 1) / ranks * numel
    if 1 < ranks <= 8:
        assert moved < 0.8 * (ranks - 1) / ranks * numel, "holders keep what they hold"


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 1024])
def test_evenly_cut_matrices_cost_exactly_the_formula(ranks: int) -> None:
    """There and back, (N - 1) / N^2 of all elements each, on every rank."""
    rows = 2048 // ranks
    pieces = tuple((rank, rank * rows * 8, (rank + 1) * rows * 8) for rank in range(ranks))
    count = ranks * (3 if ranks <= 64 else 1)
    matrices = [Matrix(0, 2048, 8, name=str(i), pieces=pieces, cost=1) for i in range(count)]
    found = assign_owners(matrices, ranks)
    total = count * 2048 * 8
    for rank in {0, 1, ranks - 1}:
        assert sent(found, 0, rank) == ((ranks - 1) * total // ranks**2,) * 2


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (8, 4), (64, 8)])
def test_replicas_share_the_work_and_hand_their_rows_on(ranks: int, replicas: int) -> None:
    rows = 1024 // ranks
    pieces = tuple((rank, rank * rows * 8, (rank + 1) * rows * 8) for rank in range(ranks))
    count = ranks * replicas
    matrices = [Matrix(0, 1024, 8, name=str(i), pieces=pieces, cost=1) for i in range(count)]
    found = assign_owners(matrices, ranks, replicas)
    check(found)
    assert set(Counter(found.owners).values()) == {1}, "one each"
    total = count * 1024 * 8
    for replica in (0, replicas - 1):
        assert sent(found, replica, 0) == ((ranks - 1) * total // (ranks**2 * replicas),) * 2
        assert sent_to_replicas(found, replica, 0) == (replicas - 1) * total // (replicas * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_whole_tensors_stay_where_they_are(ranks: int) -> None:
    found = assign_owners(llama(LLAMA, 8, ranks, TENSOR), ranks)
    check(found)
    assert not found.needs_exchange and sent(found, 0, 0) == (0, 0)
    rows = assign_owners(llama(LLAMA, 8, ranks, ROW), ranks)
    assert rows.needs_exchange == (ranks > 1)
    # The digest, which ranks compare: of the matrices, their order and the replicas.
    assert rows.digest == assign_owners(llama(LLAMA, 8, ranks), ranks).digest
    assert rows.digest != assign_owners(llama(LLAMA, 8, ranks)[::-1], ranks).digest
    assert rows.digest != assign_owners(llama(LLAMA, 8, ranks), ranks, 2).digest


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_rounds_are_small_and_keep_every_owner_busy(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = llama(LLAMA, 32, ranks)
    largest = 4 * max(matrix.numel for matrix in matrices)
    mean = 4 * sum(matrix.numel for matrix in matrices) / ranks
    monkeypatch.setattr(ownership, "ROUND_BYTES", int(mean / 5))
    found = assign_owners(matrices, ranks)
    assert len(found.rounds) in ((5, 6) if ranks < 64 else (2,))
    most, slowest, batched = mean / len(found.rounds), 0, []
    for number, members in enumerate(found.rounds):
        owned: Counter[tuple[int, int]] = Counter()
        costs: Counter[tuple[int, int]] = Counter()
        stored: Counter[int] = Counter()
        for index in members:
            owned[found.owners[index]] += matrices[index].numel * 4
            costs[found.owners[index]] += matrices[index].cost
            for rank, lo, hi in matrices[index].pieces:
                stored[rank] += 4 * (hi - lo)
            batched.append((found.owners[index], number, matrices[index].shapes))
        assert max(owned.values()) <= 2 * most + largest
        assert max(stored.values()) <= 3 * most + largest, "no rank stores most of a round"
        slowest += max(costs.values())
    assert slowest <= 1.5 * max(found.loads.values()), "owners wait little for each other"
    batches = Counter(owner for owner, _, _ in set(batched))
    assert max(batches.values()) <= len(found.rounds) + 4, "one shape after the other"


def test_a_round_has_256_mib_of_an_owner_and_one_matrix_at_least() -> None:
    pieces = ((0, 0, 4096 * 4096),)
    matrices = [Matrix(0, 4096, 4096, name=str(i), pieces=pieces, cost=1) for i in range(10)]
    assert len(assign_owners(matrices, 1).rounds) == 3, "640 MiB"
    with small_rounds():
        finest = assign_owners(matrices, 1)
    assert [len(one) for one in finest.rounds] == [1] * 10
    assert finest.digest != assign_owners(matrices, 1).digest, "ranks compare it"


def test_pieces_of_matrices() -> None:
    matrices = matrices_of((9, 4), Split.stacked(2, 4, 3))
    assert matrices == (Matrix(0, 2, 4), Matrix(8, 4, 4), Matrix(24, 3, 4))
    pieces = [(0, 0, 10), (2, 10, 30), (1, 30, 36)]
    found = stored_matrices(matrices, pieces, PRICE, name="w", parameter=5)
    assert [(one.name, one.start) for one in found] == [("w[0]", 0), ("w[1]", 8), ("w[2]", 24)]
    assert [one.pieces for one in found] == [
        ((0, 0, 8),),
        ((0, 0, 2), (2, 2, 16)),
        ((2, 0, 6), (1, 6, 12)),
    ]
    assert {one.parameter for one in found} == {5}
    planned = assign_owners(found, 3, 1)
    assert planned.owners[0] == (0, 0), "who holds it all keeps it"


def axis(size: int, rank: int) -> comm.Axis | None:
    """An axis without a process group."""
    if size == 1:
        return None
    return comm.Axis("dp", None, size, rank, {}, tuple(range(size)))


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (3, 1), (1, 3), (4, 2)])
def test_planning_needs_no_process_group_and_both_sides_of_a_message_agree(
    ranks: int, replicas: int
) -> None:
    matrices = llama({"a": (7, 5), "b": (4, 9), "c": (7, 5)}, 3, ranks)
    matrices = [replace(one, parameter=index) for index, one in enumerate(matrices)]
    workers = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
    meta = torch.device("meta")
    with small_rounds(150):
        exchanges = {
            (replica, rank): Exchange(matrices, axis(ranks, rank), axis(replicas, replica), meta)
            for replica, rank in workers
        }
    assert len({len(one.rounds) for one in exchanges.values()}) == 1
    total = 0
    for (replica, rank), one in exchanges.items():
        for number, round_ in enumerate(one.rounds):
            there = {peer: exchanges[replica, peer].rounds[number] for peer in range(ranks)}
            across = {peer: exchanges[peer, rank].rounds[number] for peer in range(replicas)}
            for name, peers in (("to_owners", there), ("to_replicas", across)):
                leg, here = getattr(round_, name), rank if name == "to_owners" else replica
                for peer, theirs in peers.items():
                    other = getattr(theirs, name)
                    assert (leg is None) == (other is None)
                    if leg is not None:
                        assert (leg.axis is None) == (other.axis is None)
                        if leg.axis is not None:
                            assert leg.send_sizes[peer] == other.receive_sizes[here]
                            assert leg.back.send_sizes[peer] == other.back.receive_sizes[here]
                            total += leg.send_sizes[peer] * (peer != here)
        legs = [round_.to_owners for round_ in one.rounds if round_.to_owners.axis]
        away = sum(sum(leg.send_sizes) - leg.send_sizes[rank] for leg in legs)
        assert away == sent(one.ownership, replica, rank)[0]
    assert (total > 0) == (ranks * replicas > 1)


def test_neighbours_for_one_peer_are_one_span_if_they_are_of_one_shape() -> None:
    """Kernels scale a whole span by the shape of its matrices."""
    split = Split.stacked(4, 4, 2, 2, 2, 4, 4, 2, 2)
    pieces = [(1, 0, 3 * 26)]  # rank 1 stores all, and rank 0 computes about half
    matrices = stored_matrices(matrices_of((26, 3), split), pieces, PRICE, parameter=0)
    exchange = Exchange(matrices, axis(2, 1), None, torch.device("meta"))
    (only,) = exchange.rounds
    covered: Counter[int] = Counter()
    for span in only.spans:
        inside = [m for m in matrices if span.begin <= m.start < span.end]
        assert len({m.shapes for m in inside}) == 1 and inside[0] == matrices[span.matrix]
        covered.update(range(span.begin, span.end))
    assert covered == Counter(range(3 * 26)), "each element once"
    assert len(only.spans) < len(matrices), "some joined"


def test_narrow_results_make_whole_matrices_cheaper_for_replicas() -> None:
    """8 matrices for 12 replicas: by matrix, most of what a replica receives is results."""
    matrices = llama({"a": (8, 8)}, 8, 1)
    found = [evenly_is_cheaper(assign_owners(matrices, 1, 12), width) for width in (4, 2)]
    assert found == [True, False]


# ------------------------------------------------------------------------------ on ranks


def exchange_of(rank: int, world_size: int, rows: int) -> Exchange:
    sharding = Sharding(mesh_of(world_size), (True,), (False,))
    matrices = []
    for position in range(3):
        begins = [chunk_range(rows, [world_size], [r]) for r in range(world_size)]
        pieces = [(r, 5 * lo, 5 * hi) for r, (lo, hi) in enumerate(begins) if lo < hi]
        whole = matrices_of((rows, 5), None)
        label = f"m{position}"
        matrices += stored_matrices(whole, pieces, PRICE, name=label, parameter=position)
    shards, replicas = sharding.axis(sharding.sharded), sharding.axis(sharding.replicated)
    exchange = Exchange(matrices, shards, replicas, torch.device("cpu"))
    exchange.agree()
    return exchange


def disagree(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="do not plan the same exchange") as caught:
        exchange_of(rank, world_size, 6 + rank)
    exchange_of(rank, world_size, 6)
    return str(caught.value)


def test_ranks_that_planned_differently_find_out_before_they_wait() -> None:
    messages = run_ranks(disagree, 2)
    assert "rank 0 / rank 1 of axis 'dp': 3 matrices" in messages[0]


def there_and_back(rank: int, world_size: int, rows: int) -> int:
    """Owners see whole matrices, in any rows; what they return comes to where it belongs."""
    exchange = exchange_of(rank, world_size, rows)
    torch.manual_seed(0)
    fulls = [torch.randn(rows, 5) for _ in range(3)]
    begin, end = chunk_range(rows, [world_size], [rank])
    stored = [full[begin:end].reshape(-1) for full in fulls]
    found = [torch.zeros_like(one) for one in stored]
    seen: list[Tensor] = []

    def start(spans: Sequence[Span], places: Sequence[Tensor]) -> None:
        for span, place in zip(spans, places, strict=True):
            place.copy_(stored[span.parameter][span.begin - 5 * begin : span.end - 5 * begin])

    def double(batches: list[Batch]) -> list[Tensor]:
        values = [batch.take() for batch in batches]
        seen.extend(matrix for batch in values for matrix in batch)
        return [batch * 2 for batch in values]

    for spans, values in exchange.run(start, double):
        for span, value in zip(spans, values, strict=True):
            found[span.parameter][span.begin - 5 * begin : span.end - 5 * begin] += value
    for full, one in zip(fulls, found, strict=True):
        assert torch.equal(one, 2 * full[begin:end].reshape(-1))
    for matrix in seen:
        assert any(torch.equal(matrix, full) for full in fulls)
    total = torch.tensor(float(len(seen)))
    torch.distributed.all_reduce(total)
    return int(total)


@pytest.mark.parametrize(("world_size", "rows"), [(1, 6), (2, 7), (3, 7), (4, 2), (4, 13)])
def test_matrices_come_whole_and_rows_come_home(world_size: int, rows: int) -> None:
    assert run_ranks(there_and_back, world_size, rows) == [3] * world_size, "each is seen once"
