# SPDX-License-Identifier: Apache-2.0
"""MXFP8 weights: not a bit changes with how they are stored, gathered or scheduled."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from shardwise.core.layout import ELEMENT, ROW, TENSOR, tensor_fraction
from shardwise.optim.routing import Route, routes_of
from shardwise.precision.fp8_codec import FP8
from shardwise.shard.group import Group
from shardwise.shard.module import units_of
from tests.models import STRATEGIES, mesh_for, ranks_for
from tests.one_card import ordered_ranks, ranks_device
from tests.parity.mxfp8_helpers import (
    STEPS,
    STORED,
    Kind,
    assert_same_bits,
    coded,
    expected_planes,
    loss_of,
    make,
    native_by_decoding,
    off_in_the_same_groups,
    optimizer_of,
    planes_seen,
    precision_of,
    staged_weights,
    tokens,
    train,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


def run(
    rank: int, world_size: int, strategy: str, name: str, on: bool, kind: Kind, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    every = ("microbatches", "evaluate", "steps")
    trains = {name: options.pop(name) for name in every if name in options}
    shape = {name: options.pop(name) for name in ("inside", "outside") if name in options}
    model = make(on, kind, **shape)
    options = {"precision": precision_of(on, kind)} | options
    with native_by_decoding():
        model = wrap(model, strategy, world_size, **options)
        return model, train(model, rank, optimizer=optimizer_of(model, name), **trains)


def reductions(calls: list[Any]) -> list[Any]:
    """All but the gathers of weights, in order: what gradients and the optimizer send."""
    return [call for call in calls if call.operation != "all_gather"]


def check_on_and_off(rank: int, world_size: int, strategy: str, name: str, kind: Kind) -> int:
    with sw.comm.record() as sent_on:
        model, on = run(rank, world_size, strategy, name, True, kind)
    with sw.comm.record() as sent_off, off_in_the_same_groups():
        options = {"precision": precision_of(True, kind)}
        plain, off = run(rank, world_size, strategy, name, False, kind, **options)
    assert not any(group.format for unit in units_of(plain) for group in unit.groups)
    assert_same_bits(on, off, f"{strategy} {name}: fp8 gather on / off")
    assert reductions(sent_on) == reductions(sent_off), "I5: gradients travel alike"
    assert len(sent_on) == len(sent_off), "I5: as many collectives"
    assert len(reductions(sent_on)) >= STEPS
    assert set(sw.precision_report(model).stored) == STORED
    found = planes_seen(model)
    assert_same_bits(found, expected_planes(model, kind), "codes and scales")
    assert len(found) == len(STORED) * (4 if kind == "native" else 2)
    first, last = on["loss 0.0"], on[f"loss {STEPS - 1}.0"]
    assert last < 0.9 * first, f"nothing was learned: {first} to {last}"
    return len(on)


# "muon" has AdamW beside it, for all that is no matrix; "adamw" is torch's own.
@pytest.mark.parametrize(
    ("strategy", "name", "kind"),
    [(strategy, "muon", "mxfp8") for strategy in STRATEGIES]
    + [("zero3", "adamw", "mxfp8")]
    + [(strategy, "muon", kind) for strategy in ("zero1", "zero3", "hfsdp")
       for kind in ("native", "fp8_block")],
)  # fmt: skip
def test_fp8_gather_on_is_off(strategy: str, name: str, kind: Kind) -> None:
    world_size = ranks_for(strategy)
    seen = run_ranks(check_on_and_off, world_size, strategy, name, kind)
    assert min(seen) > 2 * STEPS


# ---------------------------------------------------------------------------- two ranks, and four


def check_world(rank: int, world_size: int, strategy: str) -> dict[str, Tensor]:
    """Two of four ranks that reduce together first see the same data: a + a = 2a, exactly."""
    model = wrap(make(True), strategy, world_size, precision=precision_of(True))
    optimizer = optimizer_of(model, "muon")
    seen = train(model, rank * 2 // world_size, optimizer=optimizer, steps=range(3))
    return seen | planes_seen(model)


def test_four_ranks_train_to_the_bits_of_two() -> None:
    two = run_ranks(check_world, 2, "zero3")
    assert not torch.equal(two[0]["loss 0.0"], two[1]["loss 0.0"]), "they see different data"
    for strategy in ("hsdp", "hfsdp"):
        four = run_ranks(check_world, 4, strategy)
        for rank, found in enumerate(four):
            assert_same_bits(found, two[rank // 2], f"rank {rank} of four, {strategy}")
    assert any(name.endswith(" codes") for name in two[0])


# ------------------------------------------------------------------------------- schedules, memory


def without_prefetch(model: Any) -> None:
    for unit in (model, *model.layers):
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


OPTIONS: tuple[dict[str, Any], ...] = (
    {"memory": "trace"},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
    {"inside": True},
    {"outside": True},
    # An optimizer on the host rounds as a CPU does.
    *([{"offload_policy": CPUOffloadPolicy()}] if ranks_device() == "cpu" else []),
)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_overlap_memory_and_recomputation_do_not_change_a_bit(
    rank: int, world_size: int, strategy: str
) -> None:
    """Two microbatches a step and an evaluation after it: planes come, go and come again."""
    often: dict[str, Any] = {"microbatches": 2, "evaluate": True, "steps": range(2)}
    _, expected = run(rank, world_size, strategy, "muon", False, "mxfp8", **often)
    assert "evaluation 1" in expected
    for options in OPTIONS:
        _, found = run(rank, world_size, strategy, "muon", True, "mxfp8", **often, **options)
        assert_same_bits(found, expected, str(options))
    model = wrap(make(True), strategy, world_size, precision=precision_of(True))
    without_prefetch(model)
    found = train(model, rank, optimizer=optimizer_of(model, "muon"), **often)
    assert_same_bits(found, expected, "without prefetch")


# --------------------------------------------------------------------------------------- transport


def check_transport(rank: int, world_size: int, strategy: str, kind: Kind) -> tuple[int, int]:
    sent = []
    runs = []
    for staged in (False, True):
        forced = mock.patch.object(FP8, "staged_because", return_value="a test")
        with forced if staged else nullcontext():
            with sw.comm.record() as calls:
                model, seen = run(rank, world_size, strategy, "adamw", True, kind, steps=range(3))
            assert staged_weights(model) == [staged] * len(staged_weights(model)) != []
            runs.append(seen | planes_seen(model))
            sent.append(sum(call.nbytes for call in calls if call.operation == "all_gather"))
    assert_same_bits(runs[0], runs[1], "codes encoded locally / bf16 staged")
    return sent[0], sent[1]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("zero3", "mxfp8"), ("zero1", "mxfp8"), ("hfsdp", "mxfp8"), ("hfsdp", "fp8_block")],
)
def test_codes_that_travel_are_those_that_everybody_encodes(strategy: str, kind: Kind) -> None:
    for direct, staged in run_ranks(check_transport, ranks_for(strategy), strategy, kind):
        assert 0 < direct < staged


def check_any_grain(rank: int, world_size: int) -> list[list[bool]]:
    """Layouts that cut blocks, or keep matrices whole, compute the same."""
    few: dict[str, Any] = {"steps": range(3)}
    _, expected = run(rank, world_size, "zero3", "muon", False, "mxfp8", **few)
    chosen = []
    for grain in (ROW, ELEMENT, TENSOR, tensor_fraction(3)):
        model, found = run(
            rank,
            world_size,
            "zero3",
            "muon",
            True,
            "mxfp8",
            grain=lambda *_, g=grain: g,
            **few,
        )
        assert_same_bits(found, expected, str(grain))
        chosen.append([not staged for staged in staged_weights(model)])
    return chosen


def test_every_grain_trains_to_the_same_bits() -> None:
    for rows, elements, tensors, _ in run_ranks(check_any_grain, ordered_ranks(3)):
        assert rows and all(rows) and all(tensors)
        assert ranks_device() == "cuda" or not all(elements), (
            "blocks cut by elements travel as bf16"
        )


# ----------------------------------------------------------------------------------- data_parallel


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "mxfp8"), (1, "mxfp8"), (1, "native"), (2, "mxfp8"), (1, "fp8_block")]
)
@on_ranks(2)
def test_data_parallel_trains_to_the_same_bits(
    rank: int, world_size: int, stage: int, kind: Kind
) -> None:
    runs: dict[Any, dict[str, Tensor]] = {}
    staged: list[bool] = []
    for on, overlap in ((False, False), (True, False), (True, True)):
        with native_by_decoding():
            model = sw.data_parallel(
                make(on, kind),
                mesh=mesh_for(sw.zero(stage), world_size),
                placements=sw.zero(stage),
                precision=precision_of(on, kind),
                bucket_mb=0.05,
                overlap_gather=overlap,
            )
            runs[on, overlap] = train(model, rank, optimizer=optimizer_of(model, "muon"))
        if on:
            report = sw.precision_report(model)
            assert set(report.stored) == STORED
            told = "), because two planes have more bytes" in str(report)
            assert told == (kind == "native")
            assert_same_bits(planes_seen(model), expected_planes(model, kind), "planes")
            staged = staged_weights(model)
    for overlap in (False, True):
        assert_same_bits(runs[True, overlap], runs[False, False], f"overlap_gather={overlap}")
    assert len(staged) >= 3, "several buckets"
    if kind == "native":
        assert all(staged), "both planes of an element weigh more than its bf16 value"
    elif stage:
        assert not all(staged), "owners of whole matrices send their codes"


def owners_of(model: Any) -> list[set[str]]:
    """By bucket that is trained: which optimizers write to it."""
    kinds = {id(one.parameter): one.route.kind for one in routes_of(model)}
    return [
        {kinds[id(p)] for p in group.sharded}
        for unit in units_of(model)
        for group in unit.groups
        if group.trainable
    ]


def check_owners(rank: int, world_size: int, mixed: bool) -> tuple[list[set[str]], list[int]]:
    """Owners by bucket, and gathers of each step; ``mixed``: buckets planned as if all parameters
    had one owner."""
    module = sys.modules["shardwise.shard.data_parallel"]  # sw.data_parallel is the function
    plan = module._planned_buckets
    one_owner = Route(kind="elementwise", reason="for everybody")

    def wrong(job: Any, routes: Any, *rest: Any) -> Any:
        return plan(job, dict.fromkeys(routes, one_owner), *rest)

    model = make(True)
    sw.route(model, elementwise="first.weight")  # in MXFP8 and AdamW's, beside Muon's in MXFP8
    with mock.patch.object(module, "_planned_buckets", wrong if mixed else plan):
        sw.data_parallel(model, mesh=mesh_for(sw.zero(1), world_size), precision=precision_of(True))
    optimizer = optimizer_of(model, "muon")
    gathers = []
    for step in range(3):
        with sw.comm.record() as calls:
            loss_of(model, tokens(step, 0, rank))[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        gathers.append(sum(call.operation == "all_gather" for call in calls))
    return owners_of(model), gathers


def assert_one_owner(owners: list[set[str]], gathers: list[int]) -> None:
    mixed = [sorted(kinds) for kinds in owners if len(kinds) > 1]
    assert not mixed, f"buckets of several optimizers: {mixed}"
    # The first step gathers frozen weights too; with "step" what it wrote is sent in the same one.
    assert gathers[1:] == [len(owners)] * 2, f"{gathers} gathers of {len(owners)} buckets"


def test_buckets_have_one_owner_each_and_come_once_a_step() -> None:
    for owners, gathers in run_ranks(check_owners, 2, False):
        assert len(owners) == 3, "Muon's in MXFP8, AdamW's in MXFP8, AdamW's in bf16"
        assert_one_owner(owners, gathers)
    for owners, gathers in run_ranks(check_owners, 2, True):
        with pytest.raises(AssertionError, match="buckets of several optimizers"):
            assert_one_owner(owners, gathers)


# -------------------------------------------------------------------------------- save and resume


def check_resume(rank: int, world_size: int, path: str, other: str) -> int:
    half = STEPS // 2
    model = wrap(make(True), "zero3", world_size, precision=precision_of(True))
    optimizer = optimizer_of(model, "muon")
    train(model, rank, optimizer=optimizer, steps=range(half))
    sw.save(path, model, optimizer)
    expected = train(model, rank, optimizer=optimizer, steps=range(half, STEPS))
    for strategy in ("zero3", other):
        torch.manual_seed(1)
        resumed = make(True)
        with torch.no_grad():
            for parameter in resumed.parameters():
                parameter.add_(1.0)  # nothing of the new model may survive
        resumed = wrap(resumed, strategy, world_size, precision=precision_of(True))
        with torch.no_grad():
            resumed(torch.zeros(1, 1, dtype=torch.long))  # codes of what is about to be replaced
        again = optimizer_of(resumed, "muon")
        sw.load(path, resumed, again)
        found = train(resumed, rank, optimizer=again, steps=range(half, STEPS))
        assert_same_bits(found, expected, f"resumed in {strategy}")
        assert_same_bits(planes_seen(resumed), planes_seen(model), "codes and scales")
    return len(expected)


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    seen = run_ranks(check_resume, 2, str(tmp_path / "half way"), "zero1")
    assert min(seen) > STEPS


# ----------------------------------------------------------------------------------------- controls


def through_codes(model: Any) -> None:
    """Wrong: main weights that start from what the codes say."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in STORED:
                parameter.copy_(coded(parameter).decode())


def is_live(self: Any) -> bool:
    """Wrong: codes that are here are taken to be right, whatever main says by now."""
    return self.whole is None or (self.whole.made_from is not None and self.whole.live)


@pytest.mark.parametrize("mistake", ["init", "stale"])
@on_ranks(2)
def test_the_comparison_notices(rank: int, world_size: int, mistake: str) -> None:
    few: dict[str, Any] = {"steps": range(3)}  # each of them shows at once, and stays
    _, off = run(rank, world_size, "zero1", "adamw", False, "mxfp8", **few)
    wrong = mock.patch.object(Group, "is_current", property(is_live))
    with wrong if mistake == "stale" else nullcontext():
        model = make(True)
        if mistake == "init":
            through_codes(model)
        model = wrap(model, "zero1", world_size, precision=precision_of(True))
        on = train(model, rank, optimizer=optimizer_of(model, "adamw"), **few)
    with pytest.raises(AssertionError, match="differ") as caught:
        assert_same_bits(on, off, mistake)
    assert mistake in str(caught.value)


def test_nothing_is_never_the_same_as_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_same_bits({}, {}, "empty")
