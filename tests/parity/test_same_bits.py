# SPDX-License-Identifier: Apache-2.0
"""Runs that end with the same bits, runs that end near, and runs that must be told apart.

What does not change a bit: the strategy, the number of ranks, buckets, overlap, the source of
memory. (Muon, functions of matrices and weights in fp8 have tables of their own.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models import ranks_for
from tests.one_card import ordered_ranks, ranks_device
from tests.parity.runs import (
    NAMED,
    UNNAMED,
    Run,
    assert_near,
    assert_pair,
    assert_same,
    bits,
    facts,
    run,
)
from tests.ranks import RanksFailed

THREE, FOUR = ordered_ranks(3), ordered_ranks(4)
BUCKETS = ["buckets zero0", "buckets zero1", "buckets zero2"]
Pair = tuple[Run, Run]


def stages() -> Iterator[Pair]:
    """Each rank has data of its own. In fp32 the oracle is one process."""
    for ranks in {THREE, FOUR}:
        for strategy in NAMED[:4]:
            one = run(strategy, ranks, "adamw", data="own")
            yield one, one.but("plain")
    for format, ranks in (("bf16", 2), ("bf16 wire", THREE)):
        for strategy in NAMED[1:4]:
            one = run(strategy, ranks, "adamw", format, data="own")
            yield one, one.but("zero0")
    for strategy, ranks, microbatches in (
        (BUCKETS[1], 2, 1), (BUCKETS[2], THREE, 1), (BUCKETS[0], THREE, 1),
        (BUCKETS[1], THREE, 3), (BUCKETS[2], 2, 3),
    ):  # fmt: skip
        one = run(strategy, ranks, data="own", microbatches=microbatches)
        yield one, one.but("plain" if microbatches == 1 else strategy.removeprefix("buckets "))
    one = run(BUCKETS[1], 2, format="bf16", data="own", microbatches=3)
    yield one, one.but("zero1")


SCHEDULES = [
    {"change": "without prefetch"},
    {"change": "eager prefetch"},
    {"change": "one reduction"},
    {"change": "many reductions"},
    {"change": "separate groups"},
    {"memory": "trace"},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
]


def schedules() -> Iterator[Pair]:
    for strategy in ("zero1", "zero3", "hfsdp"):
        one = run(strategy, ranks_for(strategy), "adamw", data="own", microbatches=2)
        for options in SCHEDULES:
            yield one.but(**options), one


SAME = {
    f"{family.__name__}: {one}": (one, expected)
    for family in (stages, schedules)
    for one, expected in family()
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_bits(case: str) -> None:
    assert_pair(*SAME[case])


# ------------------------------------------------------------------------------ to 1e-5


def near() -> Iterator[Run]:
    """Against one process, with 1 and 3 microbatches, gradients that are kept as zeros, SGD, which
    shows how gradients are scaled, and every way to scale them."""
    full = [
        [(1, False, "adamw"), (3, True, "sgd")],
        [(1, True, "adamw"), (3, False, "sgd")],
        [(1, False, "sgd"), (3, True, "adamw")],
    ]
    few = [(3, True, "adamw"), (3, False, "sgd")]
    rows = [(name, ranks_for(name), full[n % 3]) for n, name in enumerate(NAMED)]
    rows += [(name, n, few) for name, n in (("zero3", 3), ("zero3", 4), ("hfsdp", 2), ("hfsdp", 3))]
    rows += [(name, 1, few) for name in ("zero1", "zero3", "hfsdp")]
    rows += [(f"two axes {number}", 4, [(3, True, "adamw")]) for number in range(len(UNNAMED))]
    for strategy, ranks, recipes in rows:
        for microbatches, keep, optimizer in recipes:
            yield run(strategy, ranks, optimizer, data="own", steps=2, microbatches=microbatches,
                      keep_grads=keep)  # fmt: skip
    sgd = run("zero3", 2, "sgd", data="own", steps=2)
    for sizes in ((2, 2, 1), (2, 1, 2), (1, 2, 2)):
        for count in (1, 3):
            yield sgd.but("three axes", 4, microbatches=count, mesh=sizes)
    for strategy in [*NAMED, *(f"two axes {number}" for number in range(len(UNNAMED)))]:
        ranks = 4 if strategy.startswith("two") else ranks_for(strategy)
        yield sgd.but(strategy, ranks, microbatches=3, factor=5.0)
    for strategy in NAMED:
        ranks = ranks_for(strategy)
        yield sgd.but(strategy, ranks, microbatches=3, unsynced=True)
        yield sgd.but(strategy, ranks, microbatches=3, factor=5.0, force_sum=True)
        # A second time without clearing: the divisor meets only what is new.
        yield sgd.but(strategy, ranks, rounds=2, factor=5.0 if ranks == 2 else None)
    for strategy in ("zero1", "hfsdp"):
        yield sgd.but(strategy, ranks_for(strategy), force_sum=True)
        yield sgd.but(strategy, ranks_for(strategy), force_sum=True, factor=1.0, microbatches=3)


NEAR = {str(one): one for one in near()}


@pytest.mark.parametrize("case", NEAR)
def test_near_to_one_process(case: str) -> None:
    one = NEAR[case]
    assert_near(bits(one), bits(oracle(one)))


def oracle(one: Run) -> Run:
    """The same run in one process, where nothing is sent."""
    sent = dict.fromkeys(("force_sum", "unsynced", "keep_grads"), False)
    return one.but("plain", mesh=None, under=(), change=None, **sent)


# ------------------------------------------------------------------------------ told apart


OWN = run("zero3", 2, "adamw", data="own")
SGD = run("zero3", 2, "sgd", data="own", steps=2)
TRACE = run("zero3", 2, "adamw", data="own", microbatches=2, memory="trace")
DIFFERENT = [
    (OWN, OWN.but(format="bf16")),
    (OWN.but(format="bf16"), OWN.but(format="bf16 wire")),
    (TRACE.but(under=("written by two",)), TRACE),  # I8
    (run("zero3", 2, settings=True), run("plain", 1)),
    (run("zero3", 2, "normuon"), run("plain", 1)),
    *((run("zero3", 2, muon=muon), run("plain", 1)) for muon in ("heavy ball", "cautious")),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=str)
def test_runs_are_told_apart(one: Run, other: Run) -> None:
    ends, others = bits(one), bits(other)
    both = ends.keys() & others.keys()  # optimizers have states of their own
    with pytest.raises(AssertionError, match="differ, first"):
        assert_same({name: ends[name] for name in both}, {name: others[name] for name in both})


@pytest.mark.parametrize(
    "mistaken",
    [SGD.but(under=("scaled twice",)), SGD.but(data="lost"), SGD.but(lost_step=True)],
    ids=str,
)
def test_a_mistake_is_not_near(mistaken: Run) -> None:
    """I4; a batch that is lost; a step that is lost."""
    with pytest.raises(AssertionError):
        assert_near(bits(mistaken), bits(oracle(SGD)))


def test_a_weight_that_no_step_reaches_is_noticed() -> None:
    with pytest.raises(RanksFailed, match="a weight has not changed"):
        bits(OWN.but(under=("left behind",)))  # I10
    with pytest.raises(AssertionError):
        assert_same({}, {})


def test_the_model_of_these_tests_is_cut_unevenly() -> None:
    """Else the tables would prove nothing about rows that do not divide."""
    held = [seen["held"] for seen in facts(run("zero3", 4))]
    by_parameter = [*zip(*held, strict=True)]
    assert any(0 in pieces for pieces in by_parameter), "a rank that owns nothing of a parameter"
    assert any(max(pieces) > min(pieces) for pieces in by_parameter)
    assert ranks_device() == "cpu" or len(held) == 4
