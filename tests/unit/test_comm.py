# SPDX-License-Identifier: Apache-2.0
"""Collectives against what one process computes from the values of all ranks."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core import comm
from shardwise.core.comm import Axis, Call
from shardwise.core.mesh import Ranks, separate, split
from tests.models import mesh_of
from tests.ranks import on_ranks, run_ranks

WORLDS = (1, 2, 3, 4)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CARRIED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    *FLOAT8,
)
LONG = (comm._ONE_ROUND_BYTES // 4) + 13  # float32 elements: an all-reduce of two rounds, uneven


@cache
def dp() -> Axis:
    return Ranks(mesh_of(dist.get_world_size())).axes[0]


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The contribution of ``rank``: any rank can compute any other's."""
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype in FLOAT8:
        # Every byte pattern but those of NaN, which equal nothing.
        return torch.randint(0, 120, (numel,), generator=generator, dtype=torch.uint8).view(dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (numel,), generator=generator, dtype=dtype)
    scale = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)  # so that order matters
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def rank_order_sum(
    numel: int, world_size: int, dtype: torch.dtype, divisor: float | None
) -> Tensor:
    """((r0 + r1) + r2) + ..., in at least fp32, divided once, rounded once."""
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    total = values(0, numel, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + values(rank, numel, dtype).to(wide)
    return (total / divisor if divisor is not None else total).to(dtype)


# ------------------------------------------------------------------------------ gathers


@pytest.mark.parametrize("world_size", WORLDS)
@on_ranks()
def test_a_gather_concatenates_every_dtype_bit_by_bit(rank: int, world_size: int) -> None:
    for dtype in CARRIED:
        expected = torch.cat(
            [values(peer, 7, dtype).view(torch.uint8) for peer in range(world_size)]
        )
        out = torch.empty(7 * world_size, dtype=dtype)
        comm.all_gather(out, values(rank, 7, dtype), dp()).wait()
        assert expected.numel() and torch.equal(bits(out), expected), dtype
        # In place: the shard is this rank's part of the output.
        out = torch.empty(7 * world_size, dtype=dtype)
        mine = out[rank * 7 : (rank + 1) * 7]
        mine.copy_(values(rank, 7, dtype))
        comm.all_gather(out, mine, dp()).wait()
        assert torch.equal(bits(out), expected), dtype


# ------------------------------------------------------------------------------ sums


def check_sums(rank: int, world_size: int) -> dict[str, Tensor]:
    shared = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for divisor in (None, 1, float(world_size), 3.0):
            length = 5
            expected = rank_order_sum(length * world_size, world_size, dtype, divisor)
            full = values(rank, length * world_size, dtype)
            out = torch.full((length,), float("nan"), dtype=dtype)
            comm.reduce_scatter(out, full, dp(), divisor=divisor).wait()
            mine = expected[rank * length : (rank + 1) * length]
            assert torch.equal(out, mine), (dtype, divisor, out, mine)

            # In place: the result is this rank's part of the input.
            full = values(rank, length * world_size, dtype)
            comm.reduce_scatter(
                full[rank * length : (rank + 1) * length], full, dp(), divisor=divisor
            ).wait()
            assert torch.equal(full[rank * length : (rank + 1) * length], mine), (dtype, divisor)

            whole = values(rank, length * world_size, dtype)
            comm.all_reduce(whole, dp(), divisor=divisor).wait()
            assert torch.equal(whole, expected), (dtype, divisor)
            shared[f"{dtype} {divisor}"] = whole
    return shared


@pytest.mark.parametrize("world_size", WORLDS)
def test_sums_are_taken_in_rank_order_in_fp32_and_divided_once(world_size: int) -> None:
    results = run_ranks(check_sums, world_size)
    assert len(results[0]) == (12 if world_size == 3 else 16)  # 3.0 is then there twice
    for other in results[1:]:
        for name, whole in results[0].items():
            assert torch.equal(whole, other[name]), name


def check_long_sums(rank: int, world_size: int) -> Tensor:
    """Above the one-round limit an all-reduce goes another way; the bits must not."""
    length = LONG
    expected = rank_order_sum(length * world_size, world_size, torch.float32, 3.0)
    full = values(rank, length * world_size)
    out = torch.empty(length)
    comm.reduce_scatter(out, full, dp(), divisor=3.0).wait()
    assert torch.equal(out, expected[rank * length : (rank + 1) * length])
    comm.all_reduce(full, dp(), divisor=3.0).wait()
    assert torch.equal(full, expected)
    uneven = values(rank, LONG)
    assert LONG % 2 and LONG % 3 and LONG % 4
    comm.all_reduce(uneven, dp()).wait()
    assert torch.equal(uneven, rank_order_sum(LONG, world_size, torch.float32, None))
    square = values(rank, 7 * 11).view(7, 11)
    comm.all_reduce(square, dp()).wait()
    assert torch.equal(square.flatten(), rank_order_sum(77, world_size, torch.float32, None))
    return uneven


@pytest.mark.parametrize("world_size", WORLDS)
def test_long_sums_have_the_same_bits_everywhere_by_scatter_and_by_reduce(world_size: int) -> None:
    first, *others = run_ranks(check_long_sums, world_size)
    assert first.numel() == LONG
    assert all(torch.equal(first, other) for other in others)


def test_the_order_of_a_sum_matters_for_these_values() -> None:
    """Negative control: another order gives other bits, so the tests above can tell."""
    backwards = sum(values(rank, 1000) for rank in reversed(range(4)))
    assert isinstance(backwards, Tensor)
    assert not torch.equal(backwards, rank_order_sum(1000, 4, torch.float32, None))


@pytest.mark.parametrize("world_size", WORLDS)
@on_ranks()
def test_maxima_minima_and_integer_sums(rank: int, world_size: int) -> None:
    for numel in (9, LONG):
        stacked = torch.stack([values(peer, numel) for peer in range(world_size)])
        high, low = values(rank, numel), values(rank, numel)
        comm.all_reduce(high, dp(), "max").wait()
        comm.all_reduce(low, dp(), "min").wait()
        assert torch.equal(high, stacked.amax(0)) and torch.equal(low, stacked.amin(0))
    integers = values(rank, 9, torch.int64)
    comm.all_reduce(integers, dp()).wait()
    expected = torch.stack([values(peer, 9, torch.int64) for peer in range(world_size)]).sum(0)
    assert torch.equal(integers, expected)
    one = torch.tensor(float("nan") if rank == world_size - 1 else 1.0)
    comm.all_reduce(one, dp(), "max").wait()
    assert one.isnan().item()


# ------------------------------------------------------------------------------ exchanges


def block(source: int, target: int, numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) + 10 * source + target).to(dtype)


def check_exchange(rank: int, world_size: int) -> int:
    received = 0
    # Nothing to oneself, nothing from the last rank, and lengths that all differ.
    lengths = [
        [0 if s == t or s == world_size - 1 else s + 2 * t + 1 for t in range(world_size)]
        for s in range(world_size)
    ]
    everything = [[s + 2 * t + 1 for t in range(world_size)] for s in range(world_size)]
    for table in (lengths, everything):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, *FLOAT8):
            sizes = table[rank]
            out_sizes = [table[peer][rank] for peer in range(world_size)]
            sent = torch.cat(
                [block(rank, t, n, dtype).view(torch.uint8) for t, n in enumerate(sizes)]
            )
            out = torch.empty(sum(out_sizes), dtype=dtype)
            comm.all_to_all(out, sent.view(dtype), out_sizes, sizes, dp()).wait()
            expected = torch.cat(
                [block(s, rank, n, dtype).view(torch.uint8) for s, n in enumerate(out_sizes)]
            )
            assert torch.equal(bits(out), expected), dtype
            received += out.numel()
    return received


@pytest.mark.parametrize("world_size", WORLDS)
def test_an_exchange_of_uneven_and_empty_parts(world_size: int) -> None:
    received = run_ranks(check_exchange, world_size)
    assert all(count > 0 for count in received)


@pytest.mark.parametrize("world_size", WORLDS)
@on_ranks()
def test_a_broadcast_brings_the_source_to_everybody(rank: int, world_size: int) -> None:
    for source in range(world_size):
        for dtype in CARRIED:
            tensor = values(rank, 5, dtype)
            comm.broadcast(tensor, dp(), source).wait()
            assert torch.equal(bits(tensor), values(source, 5, dtype).view(torch.uint8)), dtype


@pytest.mark.parametrize("world_size", WORLDS)
@on_ranks()
def test_agree_lists_the_objects_of_all_ranks_in_order(rank: int, world_size: int) -> None:
    first = comm._SMALL_OBJECT
    for size in (0, 1, *range(first - 50, first), first, 3 * first):  # some fit exactly
        found = comm.agree([rank, "x" * (size * rank)], dp())
        assert found == [[peer, "x" * (size * peer)] for peer in range(world_size)], size


# ------------------------------------------------------------------------------ order and axes


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_operations_in_flight_do_not_mix_up_their_messages(rank: int, world_size: int) -> None:
    """Several in flight, waited for in another order on each rank; long sums take two rounds."""
    outs = [torch.empty(2 * world_size) for _ in range(4)]
    flights = [
        comm.all_gather(o, torch.full((2,), 10.0 * n + rank), dp()) for n, o in enumerate(outs)
    ]
    sums = [values(rank, LONG), values(rank, 5)]
    flights += [comm.all_reduce(total, dp()) for total in sums]
    for one in flights if rank % 2 else reversed(flights):
        one.wait()
        one.wait()  # a second wait does nothing
    for total in sums:
        numel = total.numel()
        assert torch.equal(total, rank_order_sum(numel, world_size, torch.float32, None))
    for number, result in enumerate(outs):
        expected = torch.tensor([10.0 * number + peer for peer in range(world_size)])
        assert torch.equal(result, expected.repeat_interleave(2))


@on_ranks(4)
def test_the_axes_of_a_mesh_talk_to_their_own_ranks_only(rank: int, world_size: int) -> None:
    outer, inner = Ranks(mesh_of(2, 2)).axes
    assert (outer.name, inner.name) == ("dp_outer", "dp")
    assert (outer.rank, inner.rank) == divmod(rank, 2)
    assert outer.peers == (rank % 2, rank % 2 + 2) and inner.peers == (
        rank // 2 * 2,
        rank // 2 * 2 + 1,
    )
    for axis in (outer, inner):
        for link in (axis, separate(axis)):
            assert link.peers == axis.peers and link.rank == axis.rank and link.name == axis.name
            out = torch.empty(2, dtype=torch.int64)
            comm.all_gather(out, torch.tensor([rank]), link).wait()
            assert out.tolist() == list(axis.peers)


@on_ranks(4)
def test_an_axis_splits_into_runs_of_neighbours(rank: int, world_size: int) -> None:
    pair = split(dp(), 2)
    assert (
        pair.size == 2
        and pair.rank == rank % 2
        and pair.peers == (rank // 2 * 2, rank // 2 * 2 + 1)
    )
    assert split(dp(), 2) is pair
    total = torch.tensor(float(rank))
    comm.all_reduce(total, pair).wait()
    assert total.item() == sum(pair.peers)


# ------------------------------------------------------------------------------ counting


def check_record(rank: int, world_size: int) -> list[Call]:
    axis, w = dp(), world_size
    small, large = torch.zeros(6), torch.zeros(6 * w)
    with comm.record() as calls:
        comm.all_gather(large, small, axis).wait()
        with comm.record() as inner:
            comm.reduce_scatter(small, large, axis).wait()
            comm.all_reduce(small.bfloat16(), axis).wait()
        comm.broadcast(small, axis).wait()
        sizes = [0] * w
        sizes[(rank + 1) % w] += 3
        sizes[rank] += 2  # what stays here is not sent
        out_sizes = [0] * w
        out_sizes[(rank - 1) % w] += 3
        out_sizes[rank] += 2
        comm.all_to_all(torch.zeros(5), torch.zeros(5), out_sizes, sizes, axis).wait()
    comm.all_gather(large, small, axis).wait()
    assert inner == calls[1:3]
    return calls


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_is_counted_with_its_bytes(world_size: int) -> None:
    for calls in run_ranks(check_record, world_size):
        assert [(call.operation, call.nbytes) for call in calls] == [
            ("all_gather", 24 * world_size),
            ("reduce_scatter", 24 * world_size),
            ("all_reduce", 12),
            ("broadcast", 24),
            ("all_to_all", 12),
        ]
        assert {(call.axis, call.size) for call in calls} == {("dp", world_size)}


def test_one_rank_communicates_nothing() -> None:
    assert run_ranks(check_record, 1) == [[]]


def test_wire_bytes_are_those_of_the_best_algorithm() -> None:
    assert Call("all_gather", "dp", 4, 400).wire_bytes == 300
    assert Call("reduce_scatter", "dp", 4, 400).wire_bytes == 300
    assert Call("all_reduce", "dp", 4, 400).wire_bytes == 600
    assert Call("all_to_all", "dp", 4, 400).wire_bytes == 400
    assert Call("broadcast", "dp", 4, 400).wire_bytes == 400


@on_ranks(2)
def test_recorders_nest_and_end(rank: int, world_size: int) -> None:
    with comm.record() as outer:
        with comm.record():
            pass  # as empty as the outer one: leaving it must not end the outer
        comm.all_reduce(torch.zeros(1), dp()).wait()
    comm.all_reduce(torch.zeros(1), dp()).wait()
    assert (len(outer), len(comm._recorders)) == (1, 0)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_a_collective_that_is_dropped_takes_no_other_with_it(rank: int, world_size: int) -> None:
    """One rank is late, so that the others drop messages which cannot have come yet."""
    for numel in (LONG, 3):
        out = torch.empty(world_size * numel)
        if rank == 0:
            time.sleep(0.2)
        comm.all_gather(out, values(rank, numel), dp())  # and nobody keeps what it returns
        comm.all_gather(out, values(rank, numel), dp()).wait()
        assert torch.equal(out, torch.cat([values(r, numel) for r in range(world_size)]))
        total = torch.full((5,), float(rank))
        dist.all_reduce(total)  # by gloo itself, over the same connections
        assert total[0] == sum(range(world_size))
