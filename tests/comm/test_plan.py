# SPDX-License-Identifier: Apache-2.0
"""`plan` predicts, to the byte, the memory and the messages of real ranks over gloo (I9)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.core import comm
from shardwise.core.division import Evenly
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan
from tests.comm.planning import (
    CASES,
    FEW,
    MODELS,
    PRECISIONS,
    Case,
    Facts,
    assert_planned,
    facts_of,
    mesh_shape,
    wrap,
)
from tests.memory.helpers import Books
from tests.models import loss_of, tokens
from tests.one_card import ranks_device
from tests.ranks import run_ranks

BUCKETS = {"bucket_mb": 2**-8}


# Each strategy, model, format and option once: (ranks, model, strategy, cases, options).
@pytest.mark.parametrize(
    ("ranks", "model", "strategy", "cases", "options"),
    [
        (1, "plain", "zero3", CASES, {}),
        (3, "plain", "zero0", CASES[:2], {}),
        (2, "half frozen", "zero1", FEW, {}),
        (3, "blocks of 32", "zero2", [("mxfp8", 2)], {}),
        (2, "uneven", "zero3", FEW, {"reshard_after_forward": False}),
        (2, "half frozen", "zero3", FEW, {"reshard_after_forward": True}),
        (4, "blocks of 32", "zero3", [("mxfp8", 2)], {"reshard_after_forward": 2}),
        (4, "recomputing", "zero3", [("bf16", 2)], {"reshard_after_forward": 2}),
        (4, "plain", "hsdp", CASES[::2], {}),
        (2, "plain", "hsdp", FEW[:1], {}),  # an inner axis of one rank
        (4, "born narrow", "hfsdp", [("fp32", 1), ("bf16", 2)], {}),
        (3, "wide", "zero1", [("fp8_block", 1)], {}),
        (2, "backbone", "zero1", FEW, {}),
        (3, "uneven", "zero2", CASES[:2], BUCKETS),
        (2, "half frozen", "zero0", FEW[:1], BUCKETS),
    ],
)
def test_plan_is_exact(
    ranks: int, model: str, strategy: str, cases: list[Case], options: Facts
) -> None:
    assert_planned(ranks, model, strategy, cases, **options)


def test_blocks_gather_half_the_bytes_of_bf16() -> None:
    """1.03 bytes against 2; norms and biases, 0.4 % of these layers, stay bf16."""
    sent = {}
    for precision in ("bf16", "mxfp8"):
        with torch.device("meta"):
            made = plan(MODELS["wide"](), {"dp": 2}, precision=PRECISIONS[precision])
        calls = made.calls.items()  # the root's weights are gathered once, those of layers twice
        sent[precision] = sum(c.nbytes for c, n in calls if c.operation == "all_gather" and n > 1)
    assert 0.50 < sent["mxfp8"] / sent["bf16"] <= 0.52


# ------------------------------------------------------------------------------ Muon's exchange


def check_muon(
    rank: int, world_size: int, strategy: str, model_name: str, precision: str, options: Facts
) -> tuple[tuple[int, ...], Counter[comm.Call], int, Facts]:
    """(coordinate on the mesh, what one optimizer step exchanges, bytes of its state, and what that
    step, with the forward and backward before it, gathered, reduced and held)."""
    torch.manual_seed(0)
    model = MODELS[model_name]()
    books = Books()
    before = dict(sw.ledger.current)
    mesh = wrap(model, world_size, strategy, precision, options)
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    rest = books()
    for step in range(2):  # the second: its forward finds what the first step has brought
        sw.ledger.reset_peak()
        issued: Counter[comm.Call] = Counter()
        for microbatch in range(2):
            model.set_is_last_backward(microbatch == 1)
            with comm.record() as calls:
                loss_of(model, tokens(step, microbatch, rank, world_size)).backward()
            issued.update(calls)
        loaded = books()
        with comm.record() as calls:
            optimizer.step()
        optimizer.zero_grad()
        # Replicas gather nothing of their own accord.
        replicas = strategy == "zero0"
        exchanged = Counter(one for one in calls if replicas or one.operation == "all_to_all")
        assert Counter(calls) == exchanged
    peak = {kind: n - before.get(kind, 0) for kind, n in sorted(sw.ledger.peak.items())}
    facts = {
        "rest": rest,
        "loaded": loaded,
        "peak": {kind: nbytes for kind, nbytes in peak.items() if nbytes},
        "peak_total": sw.ledger.peak_total - sum(before.values()),
        "calls": issued,
    }
    state = sum(
        value.to_local().nbytes
        for entry in optimizer.state.values()
        for name, value in entry.items()
        if name != "step"
    )
    with torch.no_grad():  # waits for what the step has sent for: others use the group after this
        loss_of(model, tokens(0, 0, rank, world_size))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return tuple(coordinate), exchanged, state, facts


def assert_exchanged(
    strategy: str, world_size: int, model_name: str, precision: str = "fp32", **early: Any
) -> Plan:
    with torch.device("meta"):
        model = MODELS[model_name]()
    shape = mesh_shape(strategy, world_size)
    options: Facts = {"optimizer": "muon", "device": ranks_device(), "microbatches": 2, **early}
    options["precision"] = PRECISIONS[precision]
    made = plan(model, shape, strategy, **options)
    everyone = run_ranks(check_muon, world_size, strategy, model_name, precision, early)
    sent, most = {}, 0
    for rank, (coordinate, calls, state, facts) in enumerate(everyone):
        of_rank = plan(model, shape, strategy, rank=rank, **options)
        assert facts == facts_of(of_rank), (rank, strategy)
        assert of_rank.optimizer_bytes == state
        assert of_rank.matrices is not None
        assert calls == of_rank.exchanged and calls, coordinate
        sent[coordinate] = calls
        every = (Counter(calls) + Counter(facts["calls"])).items()
        most = max(most, sum(call.wire_bytes * count for call, count in every))
        if ranks_device() == "cpu":  # a GPU's updates have 16 bits
            assert sum(call.received_bytes * count for call, count in every) == sum(
                call.wire_bytes * count for call, count in every
            ), "who sends a matrix on one leg gets it on the other"
    assert made.matrices is not None and made.exchanged in sent.values()
    assert sum(one.wire_bytes for one in made.collectives) == most
    return made


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("zero0", 2), ("zero3", 3), ("hsdp", 4), ("hfsdp", 4)],
)
def test_the_exchange_of_matrices_is_planned_to_the_byte(strategy: str, world_size: int) -> None:
    assert_exchanged(strategy, world_size, "uneven")


def test_even_parts_of_replicas_are_planned_to_the_byte() -> None:
    """Four replicas and one matrix: one of them would receive and send four copies."""
    made = assert_exchanged("zero0", 4, "single", bucket_mb=1)
    assert [type(one) for one in made.divisions.values()] == [Evenly]
    assert made.matrices is not None
    assert {call.operation for call in made.exchanged} == {"all_to_all", "all_gather"}


# ------------------------------------------------------------------------------ data_parallel


@pytest.mark.parametrize(
    ("strategy", "model_name", "precision", "options"),
    [("zero0", "uneven", "bf16", {}), ("zero2", "blocks of 32", "mxfp8", {})]
    + [("zero1", "stacked", "fp32", {"bucket_mb": 1})],
)
def test_buckets_under_muon_are_planned_to_the_byte(
    strategy: str, model_name: str, precision: str, options: Facts
) -> None:
    with torch.device("meta"):
        model = MODELS[model_name]()
    options = {"bucket_mb": 2**-8, **options}
    everyone = run_ranks(check_muon, 3, strategy, model_name, precision, options)
    for rank, (_, exchanged, state, facts) in enumerate(everyone):
        made = plan(
            model,
            {"dp": 3},
            strategy,
            optimizer="muon",
            device=ranks_device(),
            microbatches=2,
            precision=PRECISIONS[precision],
            rank=rank,
            **options,
        )
        assert facts == facts_of(made), (rank, strategy)
        assert made.matrices is not None and exchanged == made.exchanged
        assert made.optimizer_bytes == state
        assert len(made.units[0].layouts) >= 4 or model_name == "stacked", "several buckets"
