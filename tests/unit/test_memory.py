# SPDX-License-Identifier: Apache-2.0
"""Blocks, the pool and the ledger, without ranks."""

from __future__ import annotations

import gc

import pytest
import torch

from shardwise.core.memory import Block, Ledger, TracePool, ledger

CPU = torch.device("cpu")
SIZE = 256  # elements: 1024 bytes


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


def test_a_block_is_counted_while_it_has_memory_and_no_longer() -> None:
    gc.disable()
    try:
        block = Block(10, torch.bfloat16, CPU, "counted")
        assert bytes_of("counted") == block.nbytes == 20
        block.release()
        block.release()
        assert bytes_of("counted") == 0
        block.acquire()
        block.acquire()
        assert bytes_of("counted") == 20
        del block
        assert bytes_of("counted") == 0, "freed at once, without a collection"
    finally:
        gc.enable()


def test_a_block_on_the_meta_device_counts_nothing() -> None:
    block = Block(10, torch.float32, torch.device("meta"), "meta")
    assert bytes_of("meta") == 0 and block.nbytes == 40


def test_a_release_and_refill_is_no_change_to_autograd() -> None:
    block = Block(4, torch.float32, CPU, "test")
    block.tensor.fill_(3.0)
    weight = torch.nn.Parameter(torch.empty(0))
    weight.data = block.tensor.detach()
    x = torch.ones(4, requires_grad=True)
    loss = (x * weight).sum()
    block.release()
    block.acquire()
    block.tensor.fill_(3.0)
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((4,), 3.0))


# ------------------------------------------------------------------------------ the trace pool


STEP = "+a +b -a +c -b -c +c +b -c +a -b -a"  # three units, each with the next one ahead, and back
IDLE = "pool_idle"
MEANT = {"a": 100, "b": 700, "c": 300, "d": 1}  # sizes of a script with several


def play(pool: TracePool, script: str, sizes: dict[str, int] | None = None) -> None:
    """``+a`` takes, ``-a`` gives back; what is alive must keep its contents throughout."""
    alive: dict[str, tuple[torch.Tensor, float]] = {}
    for stamp, word in enumerate(script.split()):
        sign, name = word[0], word[1:]
        if sign == "+":
            numel = SIZE if sizes is None else sizes[name]
            taken = pool.take(numel, torch.float32, CPU, "pooled")
            assert taken.shape == (numel,)
            alive[name] = taken.fill_(float(stamp)), float(stamp)
        else:
            pool.give(alive.pop(name)[0])
        for other, (tensor, value) in alive.items():
            assert torch.equal(tensor, torch.full_like(tensor, value)), f"{word} overwrote {other}"


@pytest.mark.parametrize(
    ("script", "sizes", "least", "most"),
    [
        (STEP, None, 2 * SIZE, 2 * SIZE),  # two are alive at once
        ("+a +b -a +c -b +d -c +e -d +f -e -f", None, 2 * SIZE, 2 * SIZE),
        ("+a +b -a +c -b +d -c -d", MEANT, 1000, 2 * 700),  # none is larger than the largest
        ("+a -a +a +b +c -c -b -a", None, 3 * SIZE, 3 * SIZE),
    ],
    ids=["units", "a chain", "sizes", "another order"],
)
def test_the_pool_is_as_large_as_what_was_alive_at_once(
    script: str, sizes: dict[str, int] | None, least: int, most: int
) -> None:
    pool = TracePool()
    for _ in range(3):
        play(pool, script, sizes)
        assert least * 4 <= bytes_of(IDLE) <= most * 4 and not bytes_of("pooled")
    held = bytes_of(IDLE)
    play(pool, STEP, None if sizes is None else sizes)
    assert bytes_of(IDLE) == held, "a step like the last ones takes nothing"


def test_the_pool_keeps_nothing_alive_and_takes_nothing_that_it_did_not_lend() -> None:
    gc.disable()
    try:
        pool = TracePool()
        pool.give(torch.empty(SIZE))
        assert bytes_of(IDLE) == 0
        taken = pool.take(SIZE, torch.float32, CPU, "pooled")
        assert bytes_of("pooled") == SIZE * 4
        del taken  # dropped by an exception, never given back
        assert bytes_of("pooled") == bytes_of(IDLE) == 0
        play(pool, STEP)
        del pool
        assert bytes_of(IDLE) == 0
    finally:
        gc.enable()
