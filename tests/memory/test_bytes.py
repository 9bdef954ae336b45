# SPDX-License-Identifier: Apache-2.0
"""Bytes at rest equal the closed form, and never more than two units are whole at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.memory.helpers import (
    Books,
    Watch,
    backward,
    compute_bytes,
    forward_only,
    main_bytes,
    make,
    parts,
    unit_numels,
)
from tests.models import PRECISIONS, STRATEGIES, loss_of, make_model, ranks_for, tokens
from tests.ranks import on_ranks, run_ranks


def check_at_rest(rank: int, world_size: int, strategy: str, precision: str) -> dict[str, int]:
    books = Books()
    width = 4 if precision == "fp32" else 2
    model = make(strategy, world_size, precision=PRECISIONS[precision])
    numels = unit_numels(model)
    main = main_bytes(strategy, world_size, numels)
    compute = compute_bytes(strategy, world_size, numels, width)
    resting = {"main": main} | ({"compute": compute} if compute else {})
    assert books() == resting, "after wrapping"

    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        backward(model, rank, world_size, step)
        assert books() == resting | {"grad": main}, "gradients lie as the main weights do"
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(tokens(0, 0, rank, world_size))
    model.reshard()
    assert books() == resting, "the memory of dropped gradients is back after the next forward"
    return resting


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_at_rest_equal_the_closed_form(strategy: str, precision: str) -> None:
    world_size = ranks_for(strategy)
    resting = run_ranks(check_at_rest, world_size, strategy, precision)
    assert resting[0]["main"] > 0 and all(other == resting[0] for other in resting)


def test_the_closed_form_is_what_the_table_of_strategies_says() -> None:
    """By hand for 1000 elements: fp32 main, bf16 compute, 2 ranks (4 for two axes)."""
    found = {
        strategy: (
            main_bytes(strategy, ranks_for(strategy), [600, 400]),
            compute_bytes(strategy, ranks_for(strategy), [600, 400], 2),
        )
        for strategy in STRATEGIES
    }
    assert found == {
        "zero0": (4000, 2000),
        "zero1": (2000, 2000),
        "zero2": (2000, 2000),
        "zero3": (2000, 0),
        "hsdp": (2000, 0),
        "hfsdp": (1000, 1000),
    }
    assert compute_bytes("zero0", 2, [600, 400], 4) == 0, "main itself is the compute weight"


@on_ranks(4)
def test_padding_is_little(rank: int, world_size: int) -> None:
    model = make("zero3", world_size)
    laid_out, payload = sum(unit_numels(model)), sum(p.numel() for p in make_model().parameters())
    assert payload <= laid_out <= payload + 4 * 15 * 64


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(ranks_for)
def test_gradients_wait_in_the_bytes_of_their_placement(
    rank: int, world_size: int, strategy: str
) -> None:
    """Between microbatches gradients wait where the placements say, and nowhere else."""
    books = Books()
    model = make(strategy, world_size)
    numels = unit_numels(model)
    resting = books()
    waiting = 4 * sum(numels) // parts(STRATEGIES[strategy].grad, world_size)
    becomes_grad = strategy in ("zero0", "zero2", "zero3")
    for microbatch in range(2):
        model.set_is_last_backward(False)
        backward(model, rank, world_size, 0, microbatch)
        expected = {"grad" if becomes_grad else "grad_accumulator": waiting}
        assert books() == resting | expected, (microbatch, books())
    model.set_is_last_backward(True)
    backward(model, rank, world_size, 0, 2)
    assert books() == resting | {"grad": main_bytes(strategy, world_size, numels)}


# ------------------------------------------------------------------------------ peaks


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "hfsdp"])
@on_ranks(ranks_for)
def test_at_most_two_units_and_two_gradient_buffers_are_whole(
    rank: int, world_size: int, strategy: str, precision: str
) -> None:
    width = 4 if precision == "fp32" else 2
    model = make(strategy, world_size, depth=5, precision=PRECISIONS[precision])
    root, *layers = unit_numels(model)
    largest = max(layers)
    backward(model, rank, world_size)
    model.zero_grad()
    for _ in range(2):
        with Watch() as forward:
            loss = loss_of(model, tokens(0, 0, rank, world_size))
        assert forward.peaks["compute"] <= (root + 2 * largest) * width
        assert forward.peaks["compute"] >= (root + largest) * width, "units were gathered"
        assert forward.peak <= forward.peaks["compute"], "and nothing else"
        with Watch() as back:
            loss.backward()
        # The root was whole already when backward began.
        assert back.peaks["compute"] <= 2 * largest * width
        assert back.peaks["compute"] >= largest * width
        assert 0 < back.peaks["grad_transient"] <= 2 * largest * 4
        assert 1 <= back.most_alive <= 2, "at most two gradient buffers"
        model.zero_grad()
    with Watch() as evaluation:
        forward_only(model, rank, world_size)
    assert evaluation.peaks["compute"] <= (root + 2 * largest) * width


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@on_ranks(2)
def test_the_number_of_gradient_buffers_is_what_was_asked_for(
    rank: int, world_size: int, strategy: str
) -> None:
    model = make(strategy, world_size, depth=5)
    most = []
    for limit in (2, 1, 4):
        model.set_reduce_scatter_max_input_buffers(limit)
        with Watch() as watch:
            backward(model, rank, world_size)
        most.append(watch.most_alive)
    assert most[0] == 2 and most[1] == 1 and 2 < most[2] <= 4


class _Between(torch.autograd.Function):
    """Notes, between the gradients of two matrices, what the packed gradients hold."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seen: list[int]) -> torch.Tensor:
        ctx.seen = seen
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.seen.append(sw.ledger.current.get("grad_transient", 0))
        return grad, None


class _Pair(torch.nn.Module):
    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
        self.seen = seen

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = _Between.apply(self.up(value), self.seen)
        return self.down(hidden)


@on_ranks(2)
def test_packed_gradients_are_gone_before_the_last_gradient_comes(
    rank: int, world_size: int
) -> None:
    """Two units' weights, one's gradients and packed ones would be more than four units."""
    held = {}
    for limit in (1, 2):
        seen: list[int] = []
        model = torch.nn.Sequential(*(_Pair(seen) for _ in range(3)))
        mesh = sw.init_mesh(dp=world_size, device_type="cpu")
        for pair in model:
            sw.fully_shard(pair, mesh=mesh)
        sw.fully_shard(model, mesh=mesh)
        model.set_reduce_scatter_max_input_buffers(limit)
        before = sw.ledger.current.get("grad_transient", 0)
        model(torch.ones(4, 64)).sum().backward()
        held[limit] = [value - before for value in seen]
    assert held[1] == [0, 0, 0]
    assert held[2][0] == 0 and held[2][1] > 0 and held[2][2] > 0, "two were asked for"


@on_ranks(2)
def test_the_peak_is_seen_when_nothing_is_released(rank: int, world_size: int) -> None:
    """Negative control: keep every layer after forward, and the bound above is broken."""
    model = make("zero3", world_size, depth=5, reshard_after_forward=False)
    root, *layers = unit_numels(model)
    with Watch() as watch:
        loss = loss_of(model, tokens(0, 0, rank, world_size))
    assert watch.peaks["compute"] == (root + sum(layers)) * 4 > (root + 2 * max(layers)) * 4
    loss.backward()


# ------------------------------------------------------------------------------ the end


@pytest.mark.parametrize(
    ("strategy", "options"),
    [(strategy, {}) for strategy in STRATEGIES]
    + [(strategy, {"memory": "trace"}) for strategy in ("zero1", "zero3", "hfsdp")],
    ids=str,
)
@on_ranks(ranks_for)
def test_deleting_the_model_frees_every_byte_at_once(
    rank: int, world_size: int, strategy: str, options: dict[str, object]
) -> None:
    books = Books()
    gc.disable()
    try:
        for trained in (False, True):
            model = make(strategy, world_size, **options)
            optimizer = torch.optim.AdamW(model.parameters())
            loss = None
            if trained:
                for step in range(2):
                    loss = loss_of(model, tokens(step, 0, rank, world_size))
                    loss.backward()
                    optimizer.step()
            assert books()
            del model, optimizer, loss
            assert books() == {}, f"trained={trained}"
    finally:
        gc.enable()


@on_ranks(2)
def test_deleting_in_the_middle_of_a_step_frees_every_byte(rank: int, world_size: int) -> None:
    """A forward whose backward never came, and gradients that were never used, die with it."""
    books = Books()
    gc.disable()
    try:
        model = make("zero3", world_size)
        backward(model, rank, world_size)
        loss = loss_of(model, tokens(0, 1, rank, world_size))
        del loss
        loss = loss_of(model, tokens(0, 1, rank, world_size))
        del model, loss
        assert books() == {}
        model = make("zero1", world_size)
        model.set_is_last_backward(False)
        backward(model, rank, world_size)
        del model
        assert books() == {}
    finally:
        gc.enable()


@on_ranks(2)
def test_released_weights_hold_no_memory(rank: int, world_size: int) -> None:
    """The ledger is no fiction: a released block has no storage, and the rest has what it says."""
    model = make("zero3", world_size)
    backward(model, rank, world_size)
    released = 0
    for module in (model, *model.layers):
        group = module._shardwise_unit.groups[0]
        [whole] = group.whole.tensors
        assert whole.untyped_storage().nbytes() == 0
        assert group.main.flat.untyped_storage().nbytes() == group.main.block.nbytes
        assert {p.untyped_storage()._cdata for p in group.unsharded} == {
            whole.untyped_storage()._cdata
        }
        released += 1
    assert released == 4


def test_the_ledger_is_public() -> None:
    assert sw.ledger.total == sum(sw.ledger.current.values())


# ------------------------------------------------------------------------------ every byte


@on_ranks(3)
def test_what_a_reduction_receives_is_in_the_ledger(rank: int, world_size: int) -> None:
    books = Books()
    model = make("zero3", world_size)
    largest = max(unit_numels(model))
    with Watch() as watch:
        backward(model, rank, world_size)
    # Every peer's part of this rank's shard lies beside it until it has been added up.
    assert watch.peaks["receive"] == 4 * largest // world_size * (world_size - 1)
    assert "receive" not in books(), "and no longer"


@on_ranks(2)
def test_the_trace_pool_counts_what_it_holds_idle(rank: int, world_size: int) -> None:
    books = Books()
    model = make("zero3", world_size, memory="trace")
    for step in range(3):
        backward(model, rank, world_size, step)
        model.zero_grad()
    model.reshard()
    idle = books()["pool_idle"]
    assert 0 < idle <= 2 * 4 * max(unit_numels(model)), "two reductions' gradients at the most"
    with Watch() as watch:
        backward(model, rank, world_size)
    assert watch.peaks.get("pool_idle", 0) <= 0
    assert watch.peaks["grad_transient"] > 0
    assert books()["pool_idle"] == idle
    # What lives in the pool is not counted twice: packed gradients cost nothing more.
    outside = watch.peaks.get("grad", 0) + watch.peaks["receive"] + watch.peaks["compute"]
    assert watch.peak <= outside, (watch.peak, outside)
    del model
    assert "pool_idle" not in books()
