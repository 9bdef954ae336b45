# SPDX-License-Identifier: Apache-2.0
"""Weights in fp8: not a bit changes with how they are stored, gathered or scheduled. The oracle
gathers bf16, and encodes it where it is multiplied by; every run also compares its codes with
encode(bf16(main)), see ``facts_of``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import shardwise as sw
from shardwise.optim.routing import Route, routes_of
from shardwise.shard.module import units_of
from tests.models import loss_of, mesh_for, ranks_for, tokens
from tests.one_card import ordered_ranks, ranks_device
from tests.parity import mxfp8_helpers as fp8
from tests.parity.runs import NAMED, Run, assert_pair, assert_same, bits, facts, run
from tests.ranks import RanksFailed, run_ranks


def of(strategy: str, format: str = "mxfp8", optimizer: str = "muon", **more: Any) -> Run:
    return run(strategy, ranks_for(strategy), optimizer, format, data="own", **more)


def oracle(one: Run) -> Run:
    """bf16 gathered by fully_shard, in the groups of fp8."""
    kept = {name: value for name, value in one.more if name in OF_ALL}
    strategy = one.strategy.removeprefix("buckets ")
    return run(strategy, one.ranks, one.optimizer, one.format, under=("at use",), **kept)


OF_ALL = ("data", "steps", "microbatches", "evaluate")


def strategies() -> Iterator[Run]:
    yield from (of(strategy) for strategy in NAMED)
    yield of("zero3", optimizer="adamw")
    for format in ("native", "fp8_block"):
        yield from (of(strategy, format) for strategy in ("zero1", "zero3", "hfsdp"))


def schedules() -> Iterator[Run]:
    """Two microbatches a step and an evaluation after it: planes come, go and come again."""
    options: list[dict[str, Any]] = [
        {"memory": "trace"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"inside": True},
        {"outside": True},
        {"change": "without prefetch"},
    ]
    if ranks_device() == "cpu":  # an optimizer on the host rounds as a CPU does
        options.append({"offload": True})
    for strategy in ("zero1", "zero3"):
        for each in options:
            yield of(strategy, steps=2, microbatches=2, evaluate=True, **each)


def transports() -> Iterator[Run]:
    for strategy, format in (("zero3", "mxfp8"), ("zero1", "mxfp8"), ("hfsdp", "fp8_block")):
        yield of(strategy, format, under=("staged",))
    for grain in GRAINS:
        yield run("zero3", ordered_ranks(3), format="mxfp8", data="own", grain=grain)


GRAINS = (sw.rows(1), sw.ELEMENT, sw.TENSOR)


def buckets() -> Iterator[Run]:
    for stage, format, overlap in (
        (0, "mxfp8", False), (1, "mxfp8", True), (1, "native", False), (2, "mxfp8", True),
        (1, "fp8_block", True),
    ):  # fmt: skip
        yield of(f"buckets zero{stage}", format, bucket_mb=0.05, overlap_gather=overlap)


SAME = {
    f"{family.__name__}: {one}": (one, oracle(one))
    for family in (strategies, schedules, transports, buckets)
    for one in family()
}
# Saved half way and loaded under another strategy, where codes of other weights are gathered.
SAME |= {
    f"resumed: {one}": (one, one.but(into=None))
    for format in ("mxfp8", "fp8_block")
    for after in ("zero3", "zero1")
    for one in [of("zero3", format, steps=4, into=after)]
}


@pytest.mark.parametrize("case", SAME)
def test_fp8_gather_on_is_off(case: str) -> None:
    one, expected = SAME[case]
    assert_pair(one, expected)
    ends = bits(one)
    if not one.evaluate and not one.into:
        losses = [ends[f"loss {step}.0 0"] for step in (0, one.steps - 1)]
        assert losses[1] < 0.95 * losses[0], "nothing was learned"


def test_two_of_four_ranks_that_see_the_same_train_to_the_bits_of_two() -> None:
    two = bits(of("zero3"))
    for strategy in ("hsdp", "hfsdp"):
        four = bits(of(strategy).but(data="pairs"))  # a + a = 2a, exactly
        names = [name for name in two if not name.startswith("norm")]
        assert_same({n: four[n] for n in names}, {n: two[n] for n in names}, strategy)
    assert two["loss 0.0 0"] != two["loss 0.0 1"], "ranks see different data"


# ------------------------------------------------------------------------------ facts


def reductions(seen: dict[str, Any]) -> list[Any]:
    return [call for call in seen["calls"] if call[0] != "all_gather"]


def gathered(seen: dict[str, Any]) -> int:
    return sum(call[2] for call in seen["calls"] if call[0] == "all_gather")


def assert_alike(one: Run) -> None:
    """I5: with codes and without, gradients travel alike, and there are as many collectives."""
    for on, off in zip(facts(one), facts(oracle(one)), strict=True):
        assert reductions(on) == reductions(off) and len(reductions(on)) >= one.steps
        assert len(on["calls"]) == len(off["calls"])


@pytest.mark.parametrize("one", [*strategies()], ids=str)
def test_gradients_travel_alike_and_codes_are_few(one: Run) -> None:
    assert_alike(one)
    on, off = facts(one)[0], facts(oracle(one))[0]
    assert on["stored"] == fp8.STORED
    assert len(on["planes"]) == len(fp8.STORED) * (4 if one.format == "native" else 2)
    staged = [reason for reason in on["staged"] if reason]
    assert bool(staged) == ("as bf16" in on["report"])
    if one.format != "native" and gathered(off):  # two planes have more bytes than bf16
        assert gathered(on) < 0.95 * gathered(off)


def test_codes_travel_unless_a_shard_cuts_a_block() -> None:
    for one in transports():
        on = facts(one)[0]
        if "staged" in one.under:
            assert all(on["staged"])
            assert 0 < gathered(facts(one.but(under=()))[0]) < gathered(on)
        elif dict(one.more)["grain"] != sw.ELEMENT:
            assert not any(on["staged"]), one
        elif ranks_device() == "cpu":  # of two ranks, elements may end where blocks do
            assert any(on["staged"]), one
            assert "because a rank's shard cuts a block" in on["report"]


def test_buckets_send_codes_but_for_two_planes() -> None:
    for one in buckets():
        on = facts(one)[0]
        assert on["stored"] == fp8.STORED and len(on["staged"]) >= 2
        assert ("because two planes have more bytes" in on["report"]) == (one.format == "native")
        if one.strategy != "buckets zero0":
            assert all(on["staged"]) == (one.format == "native")


def owners(rank: int, world_size: int, mixed: bool) -> tuple[list[set[str]], list[int]]:
    """The optimizers that write to each bucket, and gathers of each step; ``mixed``: planned as if
    all parameters had one owner."""
    module = sys.modules["shardwise.shard.data_parallel"]  # sw.data_parallel is the function
    plan, everybody = module._planned_buckets, Route(kind="elementwise", reason="for everybody")

    def wrong(job: Any, routes: Any, *rest: Any) -> Any:
        return plan(job, dict.fromkeys(routes, everybody), *rest)

    model = fp8.make(True)
    sw.route(model, elementwise="first.weight")  # in MXFP8 and AdamW's, beside Muon's in MXFP8
    with mock.patch.object(module, "_planned_buckets", wrong if mixed else plan):
        mesh = mesh_for(sw.zero(1), world_size)
        sw.data_parallel(model, mesh=mesh, precision=fp8.precision_of(True))
    optimizer = fp8.optimizer_of(model, "muon")
    gathers = []
    for step in range(3):
        with sw.comm.record() as calls:
            loss_of(model, tokens(step, 0, rank, world_size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        gathers.append(sum(call.operation == "all_gather" for call in calls))
    kinds = {id(one.parameter): one.route.kind for one in routes_of(model)}
    groups = [group for unit in units_of(model) for group in unit.groups if group.trainable]
    return [{kinds[id(p)] for p in group.sharded} for group in groups], gathers


def test_buckets_have_one_owner_each_and_come_once_a_step() -> None:
    for kinds, gathers in run_ranks(owners, 2, False):
        assert len(kinds) == 3, "Muon's in MXFP8, AdamW's in MXFP8, AdamW's in bf16"
        assert all(len(one) == 1 for one in kinds)
        assert gathers[1:] == [3, 3], "the first step gathers frozen weights too"
    for kinds, _ in run_ranks(owners, 2, True):
        assert any(len(one) > 1 for one in kinds), "the comparison sees mixed buckets"


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    "mistake", [{"change": "from codes"}, {"under": ("stale codes",)}], ids=str
)
def test_the_comparison_notices(mistake: dict[str, Any]) -> None:
    one = of("zero1", optimizer="adamw")
    with pytest.raises((AssertionError, RanksFailed), match="differ, first"):
        assert_same(bits(one.but(**mistake)), bits(oracle(one)))


def test_gradients_that_travel_by_format_are_seen() -> None:
    """I5."""
    mistaken = of("zero3", optimizer="adamw", under=("sent by format",))
    with pytest.raises(AssertionError):
        assert_alike(mistaken)
