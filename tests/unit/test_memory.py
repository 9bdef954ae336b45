# SPDX-License-Identifier: Apache-2.0
"""Blocks, their sources and the ledger, without ranks."""

from __future__ import annotations

import gc

import torch

from shardwise.core.memory import Block, Caching, Ledger, TracePool, ledger

CPU = torch.device("cpu")
SIZE = 256  # elements: 1024 bytes


def make(numel: int = SIZE, kind: str = "test", lane: str = "compute") -> Block:
    block = Block(numel, torch.float32, CPU, kind, lane=lane)
    block.release(Caching())
    return block


def bytes_of(kind: str) -> int:
    return ledger.current[kind]


# ------------------------------------------------------------------------------ the ledger


def test_the_ledger_counts_by_kind_and_remembers_the_highest() -> None:
    books = Ledger()
    books.add("main", 100)
    books.add("grad", 50)
    books.add("main", -100)
    books.add("grad", 10)
    assert books.snapshot() == {"grad": 60}
    assert (books.total, books.peak_total) == (60, 150)
    assert dict(books.peak) == {"main": 100, "grad": 60}
    books.reset_peak()
    assert books.peak_total == 60 and books.peak["grad"] == 60 and books.peak["main"] == 0


def test_watchers_are_told_of_every_change() -> None:
    books, seen = Ledger(), []
    books.watchers.append(lambda kind, nbytes: seen.append((kind, nbytes)))
    books.add("main", 3)
    books.add("main", -3)
    assert seen == [("main", 3), ("main", -3)]


def test_a_block_is_counted_while_it_has_memory_and_no_longer() -> None:
    gc.disable()
    try:
        block = Block(10, torch.bfloat16, CPU, "counted")
        assert bytes_of("counted") == block.nbytes == 20
        block.release(Caching())
        block.release(Caching())
        assert bytes_of("counted") == 0
        block.acquire(Caching())
        block.acquire(Caching())
        assert bytes_of("counted") == 20
        del block
        assert bytes_of("counted") == 0, "freed at once, without a collection"
    finally:
        gc.enable()


def test_a_block_on_the_meta_device_counts_nothing() -> None:
    block = Block(10, torch.float32, torch.device("meta"), "meta")
    assert bytes_of("meta") == 0 and block.nbytes == 40


# ------------------------------------------------------------------------------ caching


def test_caching_takes_the_memory_and_keeps_the_tensor_and_its_views() -> None:
    block = Block(SIZE, torch.float32, CPU, "test")
    view = block.tensor[16:32].view(4, 4)
    block.release(Caching())
    assert block.tensor.untyped_storage().nbytes() == 0
    block.acquire(Caching())
    block.tensor.copy_(torch.arange(SIZE))
    assert torch.equal(view.flatten(), torch.arange(16.0, 32.0))


def test_a_release_and_refill_is_no_change_to_autograd() -> None:
    block = Block(4, torch.float32, CPU, "test")
    block.tensor.fill_(3.0)
    weight = torch.nn.Parameter(torch.empty(0))
    weight.data = block.tensor.detach()
    x = torch.ones(4, requires_grad=True)
    loss = (x * weight).sum()
    block.release(Caching())
    block.acquire(Caching())
    block.tensor.fill_(3.0)
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 3.0))


# ------------------------------------------------------------------------------ the trace pool


def play(pool: TracePool, script: str, **blocks: Block) -> None:
    """``+a`` acquires, ``-a`` releases; what is alive must keep its contents throughout."""
    alive: dict[str, float] = {}
    for stamp, word in enumerate(script.split()):
        sign, name = word[0], word[1:]
        block = blocks[name]
        if sign == "+":
            block.acquire(pool)
            block.tensor.fill_(float(stamp + 1))
            alive[name] = float(stamp + 1)
        else:
            assert torch.equal(block.tensor, torch.full_like(block.tensor, alive.pop(name))), word
            block.release(pool)
        for other, value in alive.items():
            tensor = blocks[other].tensor
            assert torch.equal(tensor, torch.full_like(tensor, value)), f"{word} overwrote {other}"


STEP = "+a +b -a +c -b -c +c +b -c +a -b -a"  # three units, each with the next one ahead, and back
IDLE = "pool_idle"


def places(blocks: dict[str, Block]) -> dict[str, int]:
    return {name: block.tensor.data_ptr() for name, block in blocks.items()}


def test_blocks_that_are_never_alive_together_share_a_storage() -> None:
    pool, blocks = TracePool(), {name: make() for name in "abc"}
    play(pool, STEP, **blocks)
    assert bytes_of(IDLE) == 2 * SIZE * 4, "two are alive at once"
    play(pool, STEP, **blocks)
    found = places(blocks)
    assert len(set(found.values())) == 2
    for _ in range(3):
        play(pool, STEP, **blocks)
        assert places(blocks) == found, "a step like the last one moves nothing"
    assert bytes_of(IDLE) == 2 * SIZE * 4


def test_the_pool_is_no_larger_than_the_most_that_was_alive() -> None:
    pool = TracePool()
    blocks = {name: make() for name in "abcdef"}
    play(pool, "+a +b -a +c -b +d -c +e -d +f -e -f", **blocks)
    assert bytes_of(IDLE) == 2 * SIZE * 4


def test_storages_hold_blocks_of_different_sizes() -> None:
    """Two are alive at once, and none is larger than the largest block."""
    pool, blocks = TracePool(), {"a": make(100), "b": make(700), "c": make(300), "d": make(1)}
    for _ in range(3):
        play(pool, "+a +b -a +c -b +d -c -d", **blocks)
    assert 1000 * 4 <= bytes_of(IDLE) <= 2 * 700 * 4
    play(pool, "+b +d -b -d", **blocks)
    assert bytes_of(IDLE) <= 2 * 700 * 4, "a small block leaves the large storage to the large one"


def test_lanes_share_no_storage() -> None:
    pool = TracePool()
    blocks = {"a": make(lane="gather"), "b": make(lane="reduce")}
    for _ in range(2):
        play(pool, "+a -a +b -b", **blocks)
    assert bytes_of(IDLE) == 2 * SIZE * 4
    assert blocks["a"].tensor.data_ptr() != blocks["b"].tensor.data_ptr()


def test_another_order_stays_right() -> None:
    pool, blocks = TracePool(), {name: make() for name in "abc"}
    play(pool, STEP, **blocks)
    play(pool, "+a +c -a -c", **blocks)  # they shared a storage
    play(pool, "+c +a +b -c -b -a", **blocks)
    assert bytes_of(IDLE) == 3 * SIZE * 4, "all three at once: one storage more"
    play(pool, STEP, **blocks)
    assert bytes_of(IDLE) == 3 * SIZE * 4


def test_a_block_that_comes_alive_elsewhere_brings_its_storage() -> None:
    pool, block = TracePool(), Block(SIZE, torch.float32, CPU, "test")
    block.release(pool)
    assert bytes_of(IDLE) == SIZE * 4
    play(pool, "+a -a", a=make())
    assert bytes_of(IDLE) == SIZE * 4, "the other block has used it"


def test_the_pool_keeps_no_block_alive() -> None:
    gc.disable()
    try:
        pool, blocks = TracePool(), {name: make(kind="pooled") for name in "abc"}
        play(pool, STEP, **blocks)
        blocks["a"].acquire(pool)
        assert bytes_of("pooled") == SIZE * 4
        blocks["a"].release(pool)
        del blocks
        assert bytes_of("pooled") == 0
        del pool
        assert bytes_of(IDLE) == 0
    finally:
        gc.enable()
