# SPDX-License-Identifier: Apache-2.0
"""Sharded Muon and unsharded Muon are the same bits, whatever the strategy, the world, who owns a
matrix, in how many rounds matrices travel, and after a load into another layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwise as sw
from tests.cases import pairwise
from tests.parity.programs import PROGRAMS
from tests.parity.runs import MATRICES, NAMED, UNNAMED, Run, assert_pair, facts, run

BUCKETS = ["buckets zero0", "buckets zero1", "buckets zero2"]
Pair = tuple[Run, Run]


def muon() -> Iterator[Pair]:
    """The oracle is one process with all the data. Two axes: 2 x 1, 1 x 3 and 2 x 2."""
    plain = run("plain", 1)
    worlds = [(name, ranks) for name in ("zero0", "zero3", "hfsdp") for ranks in (2, 3, 4)]
    worlds += [("zero3", 1), ("zero1", 2), ("zero2", 3), ("hsdp", 4)]
    for strategy, ranks in worlds:
        yield run(strategy, ranks), plain
    for strategy, ranks, muon in (
        ("zero3", 2, "heavy ball"), ("hsdp", 4, "cautious"), ("zero3", 2, "polar express"),
    ):  # fmt: skip
        yield run(strategy, ranks, muon=muon), plain.but(muon=muon)
    for grain in (sw.ELEMENT, sw.rows(3), sw.TENSOR):
        yield run("zero3", 3, grain=grain), plain
    for strategy, ranks in (("zero0", 2), ("zero3", 2), ("hsdp", 4), ("hfsdp", 4)):
        yield run(strategy, ranks, under=("small rounds",)), plain
    for strategy, sizes in (("hsdp", None), ("zero0", None), ("two of replicas", (2, 2, 1))):
        for way in ("evenly", "by matrix"):
            yield run(strategy, 4, under=(way,), mesh=sizes), plain
    # Three microbatches go with overlapped gathers.
    for ranks, microbatches, strategy in pairwise([1, 2, 3, 4], [1, 3], BUCKETS):
        one = run(strategy, ranks, microbatches=microbatches, overlap_gather=microbatches == 3)
        yield one, plain.but(microbatches=microbatches)
    for number, placements in enumerate(UNNAMED):
        if placements.compute == (sw.Replicate(), sw.Replicate()):
            yield run(f"buckets two axes {number}", 4, microbatches=3), plain.but(microbatches=3)
    yield CUT, CUT.but("plain", 1)
    yield FILLED, FILLED.but("plain", 1)


# More ranks than matrices; and ten matrices over four ranks, the last two beside an embedding.
CUT = run("buckets zero1", 4, width=64, depth=1, bucket_mb=1 / 32)
FILLED = run(
    "buckets zero1", 4, width=64, depth=5, bucket_mb=1 / 32, overlap_gather=True, steps=2,
    under=("many words", "padding is dear"),
)  # fmt: skip


def resumed() -> Iterator[Pair]:
    """Saved half way and loaded under another strategy, the same as never stopped."""
    for before, after in zip(NAMED, [*NAMED[1:], NAMED[0]], strict=True):
        one = run(before, 4, settings=True, steps=4)
        yield one.but(into=after), one
    for under in ("evenly", "by matrix"):
        one = run("hsdp", 4, steps=4, under=(under,))
        yield one.but(into="zero3"), one


def programs() -> Iterator[Pair]:
    for name in PROGRAMS:
        one = run("hsdp", 4, data="own", program=name)
        yield one.but(under=("evenly",)), one.but(under=("by matrix",))


SAME = {
    f"{family.__name__}: {one}": (one, expected)
    for family in (muon, resumed, programs)
    for one, expected in family()
}


@pytest.mark.parametrize("case", SAME)
def test_steps_equal_those_of_the_unsharded_optimizer(case: str) -> None:
    assert_pair(*SAME[case])


# ------------------------------------------------------------------------------ facts


@pytest.mark.parametrize("strategy", ["zero3", "hsdp", "hfsdp"])
@pytest.mark.cpu_only("counts calls of the CPU's Newton-Schulz")
def test_every_matrix_is_orthogonalised_once(strategy: str) -> None:
    one = run(strategy, 4)
    counted = [seen["products"] for seen in facts(one)]
    assert sum(counted) == MATRICES * one.steps
    assert max(counted) < MATRICES * one.steps, "no rank does it all"


def test_whole_matrices_are_not_sent() -> None:
    for grain in (sw.ELEMENT, sw.rows(3), sw.TENSOR):
        sent = [seen["pieces sent"] for seen in facts(run("zero3", 3, grain=grain))]
        assert (sum(sent) > 0) == (grain != sw.TENSOR), grain


@pytest.mark.parametrize("strategy", ["zero0", "zero3", "hsdp", "hfsdp"])
def test_matrices_travel_in_many_rounds(strategy: str) -> None:
    """Six matrices: four owners of hsdp have two at most, and two of zero0 three or more."""
    ranks = 4 if strategy[0] == "h" else 2
    rounds = [seen["rounds"] for seen in facts(run(strategy, ranks, under=("small rounds",)))]
    assert rounds == [rounds[0]] * ranks and sum(rounds[0]) >= (2 if strategy == "hsdp" else 3)


def test_replicas_hold_each_momentum_once() -> None:
    held = {
        way: [seen["momenta"] for seen in facts(one)]
        for way in ("by matrix", "evenly")
        for one in [run("two of replicas", 4, under=(way,), mesh=(2, 2, 1))]
    }
    assert sum(held["by matrix"]) == sum(held["evenly"]) == 4 * 300
    assert sorted(held["evenly"]) == [240, 320, 320, 320], "two buffers in parts of 160"


def test_buckets_cut_few_matrices_and_fill_up_with_embeddings() -> None:
    few, filled = (facts(one)[0]["buckets"] for one in (CUT, FILLED))
    assert {grain for bucket in few for _, grain in bucket} == {"row", "element"}
    mixed = [[n for n, _ in items] for items in filled if len({grain for _, grain in items}) > 1]
    assert mixed == [["layers.0.down.weight", "layers.0.up.weight", "embedding.weight"]]
    one = run("buckets zero1", 2, data="own")
    assert len(facts(one)[0]["buckets"]) >= 3 and facts(one)[0]["dtypes"] == {"torch.float32"}
    half = one.but(format="bf16", microbatches=3)
    assert facts(half)[0]["dtypes"] == {"torch.bfloat16"}
