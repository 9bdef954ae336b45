# SPDX-License-Identifier: Apache-2.0
"""MXFP8 weights: not a bit changes with how they are stored, gathered or scheduled."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise as sw
from shardwise.layout import ELEMENT, ROW, TENSOR, tensor_fraction
from shardwise.optim.routing import Route, routes_of
from shardwise.precision.fp8_tensor import FP8Tensor
from shardwise.shard import fp8_group
from shardwise.shard.formats import planes_of
from shardwise.shard.module import units_of
from tests.models import STRATEGIES, mesh_for, ranks_for
from tests.one_card import ranks_device
from tests.parity.mxfp8_helpers import (
    AT_USE,
    STEPS,
    STORED,
    assert_same_bits,
    expected_planes,
    loss_of,
    make,
    off_in_the_same_groups,
    optimizer_of,
    planes_seen,
    precision_of,
    tokens,
    train,
    wrap,
)
from tests.ranks import on_ranks, run_ranks


def run(
    rank: int, world_size: int, strategy: str, kind: str, on: bool, format: Any, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    every = ("microbatches", "evaluate", "steps")
    trains = {name: options.pop(name) for name in every if name in options}
    shape = {name: options.pop(name) for name in ("inside", "outside") if name in options}
    model = make(on, format, **shape)
    model = wrap(model, strategy, world_size, precision=precision_of(on, format), **options)
    optimizer = optimizer_of(model, kind)
    return model, train(model, rank, optimizer=optimizer, **trains)


def reductions(calls: list[Any]) -> list[Any]:
    """All but the gathers of weights, in order: what gradients and the optimizer send."""
    return [call for call in calls if call.operation != "all_gather"]


def check_on_and_off(rank: int, world_size: int, strategy: str, kind: str, format: Any) -> int:
    with sw.comm.record() as sent_on:
        coded, on = run(rank, world_size, strategy, kind, True, format)
    with sw.comm.record() as sent_off, off_in_the_same_groups():
        plain, off = run(rank, world_size, strategy, kind, True, format)
    off_groups = {type(g) for u in units_of(plain) for g in u.groups if g.format}
    assert off_groups <= set(AT_USE.values())
    assert_same_bits(on, off, f"{strategy} {kind}: fp8 gather on / off")
    assert reductions(sent_on) == reductions(sent_off), "I5: gradients travel alike"
    assert len(reductions(sent_on)) >= STEPS
    assert set(sw.precision_report(coded).stored) == STORED
    found = planes_seen(coded)
    assert_same_bits(found, expected_planes(coded, format), "codes and scales")
    assert len(found) == len(STORED) * (4 if format == "mxfp8_rowcol" else 2)
    first, last = on["loss 0.0"], on[f"loss {STEPS - 1}.0"]
    assert last < 0.9 * first, f"nothing was learned: {first} to {last}"
    return len(on)


# "muon" has AdamW beside it, for all that is no matrix; "adamw" is torch's own.
@pytest.mark.parametrize(
    ("strategy", "kind", "format"),
    [(strategy, "muon", "mxfp8_rowcol") for strategy in STRATEGIES]
    + [("zero3", "adamw", "mxfp8_rowcol")]
    + [("zero1", "muon", "mxfp8_2d"), ("zero3", "muon", "mxfp8_2d")]
    + [(strategy, "muon", "fp8_block") for strategy in ("zero1", "zero3", "hfsdp")],
)
def test_fp8_gather_on_is_off(strategy: str, kind: str, format: str) -> None:
    world_size = ranks_for(strategy)
    seen = run_ranks(check_on_and_off, world_size, strategy, kind, format)
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
    assert any(name.endswith("column.codes") for name in two[0])


# ------------------------------------------------------------------------------- schedules, memory


def without_prefetch(model: Any) -> None:
    for unit in (model, *model.layers):
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])


OPTIONS: tuple[dict[str, Any], ...] = (
    {"memory": "trace"},
    {"unify_streams": True},
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
    _, expected = run(rank, world_size, strategy, "muon", False, "mxfp8_rowcol", **often)
    assert "evaluation 1" in expected
    for options in OPTIONS:
        _, found = run(rank, world_size, strategy, "muon", True, "mxfp8_rowcol", **often, **options)
        assert_same_bits(found, expected, str(options))
    model = wrap(make(True), strategy, world_size, precision=precision_of(True))
    without_prefetch(model)
    found = train(model, rank, optimizer=optimizer_of(model, "muon"), **often)
    assert_same_bits(found, expected, "without prefetch")


# --------------------------------------------------------------------------------------- transport


def check_transport(rank: int, world_size: int, strategy: str, format: Any) -> tuple[int, int]:
    sent = []
    runs = []
    for direct in (True, False):
        with mock.patch.object(fp8_group, "sends_codes", lambda *_, d=direct: d):
            with sw.comm.record() as calls:
                model, seen = run(rank, world_size, strategy, "adamw", True, format, steps=range(3))
            groups = [g for unit in units_of(model) for g in unit.groups if g.format]
            assert groups and all(group.direct == direct for group in groups)
            runs.append(seen | planes_seen(model))
            sent.append(sum(call.nbytes for call in calls if call.operation == "all_gather"))
    assert_same_bits(runs[0], runs[1], "codes encoded locally / bf16 staged")
    return sent[0], sent[1]


@pytest.mark.parametrize(
    ("strategy", "format"),
    [("zero3", "mxfp8_rowcol"), ("zero1", "mxfp8"), ("hfsdp", "mxfp8_rowcol")]
    + [("hfsdp", "fp8_block")],
)
def test_codes_that_travel_are_those_that_everybody_encodes(strategy: str, format: str) -> None:
    for direct, staged in run_ranks(check_transport, ranks_for(strategy), strategy, format):
        assert 0 < direct < staged


def check_any_grain(rank: int, world_size: int) -> list[list[bool]]:
    """Layouts that cut blocks, or keep matrices whole, compute the same."""
    few: dict[str, Any] = {"steps": range(3)}
    _, expected = run(rank, world_size, "zero3", "muon", False, "mxfp8_rowcol", **few)
    chosen = []
    for grain in (ROW, ELEMENT, TENSOR, tensor_fraction(3)):
        model, found = run(
            rank,
            world_size,
            "zero3",
            "muon",
            True,
            "mxfp8_rowcol",
            grain=lambda *_, g=grain: g,
            **few,
        )
        assert_same_bits(found, expected, str(grain))
        chosen.append([g.direct for unit in units_of(model) for g in unit.groups if g.format])
    return chosen


def test_every_grain_trains_to_the_same_bits() -> None:
    for rows, elements, tensors, _ in run_ranks(check_any_grain, 3):
        assert rows and all(rows) and all(tensors)
        assert not all(elements), "blocks cut by elements travel as bf16"


# ----------------------------------------------------------------------------------- data_parallel


@pytest.mark.parametrize(
    ("stage", "format"),
    [(0, "mxfp8_rowcol"), (1, "mxfp8_rowcol"), (2, "mxfp8"), (1, "mxfp8_2d"), (1, "fp8_block")],
)
@on_ranks(2)
def test_data_parallel_trains_to_the_same_bits(
    rank: int, world_size: int, stage: int, format: Any
) -> None:
    runs: dict[Any, dict[str, Tensor]] = {}
    direct = []
    for on, overlap in ((False, False), (True, False), (True, True)):
        model = sw.data_parallel(
            make(on, format),
            mesh=mesh_for(sw.zero(stage), world_size),
            placements=sw.zero(stage),
            precision=precision_of(on, format),
            bucket_mb=0.05,
            overlap_gather=overlap,
        )
        runs[on, overlap] = train(model, rank, optimizer=optimizer_of(model, "muon"))
        if on:
            report = sw.precision_report(model)
            assert set(report.stored) == STORED
            told = "), because two planes have more bytes" in str(report)
            assert told == ((stage, format) == (1, "mxfp8_rowcol"))
            assert_same_bits(planes_seen(model), expected_planes(model, format), "planes")
            groups = [g for unit in units_of(model) for g in unit.groups if g.format]
            direct = [group.direct for group in groups]
    for overlap in (False, True):
        assert_same_bits(runs[True, overlap], runs[False, False], f"overlap_gather={overlap}")
    assert len(direct) >= 3, "several buckets"
    if (stage, format) == (1, "mxfp8_rowcol"):
        assert not any(direct), "both planes of an element weigh more than its bf16 value"
    if stage and format != "mxfp8_rowcol":
        assert any(direct), "owners of whole matrices send their codes"


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
        sw.data_parallel(
            model, mesh=mesh_for(sw.zero(1), world_size), precision=precision_of(True),
            overlap_gather="step",
        )  # fmt: skip
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
                parameter.copy_(FP8Tensor.encode(parameter).dequantise(dtype=torch.float32))


def never_made_anew(self: Any, phase: Any) -> list[Any]:
    """Wrong: planes that are here are taken to be right, whatever main says by now."""
    blocks = planes_of(self.format, phase, self.persistent)
    wanted = [self.planes[block] for block in blocks]
    return [plane for plane in wanted if not plane.memory.live or plane.filled is None]


def staged_before(self: Any, planes: Any, runtime: Any) -> None:
    """Wrong: what is sent was put into the scratch when the last gather was over."""
    source = self.main
    early = getattr(self, "_early", None)
    now = source.flat.clone()
    if early is not None:
        source.flat.data.copy_(early)
    self._early = now
    RIGHT(self, planes, runtime)
    source.flat.data.copy_(now)


RIGHT = fp8_group.FP8Group._gather_staged


@pytest.mark.parametrize("mistake", ["init", "re-stage", "outside"])
@on_ranks(2)
def test_the_comparison_notices(rank: int, world_size: int, mistake: str) -> None:
    few: dict[str, Any] = {"steps": range(3)}  # each of them shows at once, and stays
    _, off = run(rank, world_size, "zero1", "adamw", False, "mxfp8_rowcol", **few)
    with ExitStack() as stack:
        if mistake == "re-stage":
            stack.enter_context(mock.patch.object(fp8_group.FP8Group, "_missing", never_made_anew))
        if mistake == "outside":
            stack.enter_context(
                mock.patch.object(fp8_group.FP8Group, "_gather_staged", staged_before)
            )
        model = make(True)
        if mistake == "init":
            through_codes(model)
        model = wrap(model, "zero1", world_size, precision=precision_of(True))
        on = train(model, rank, optimizer=optimizer_of(model, "adamw"), **few)
    with pytest.raises(AssertionError, match="differ") as caught:
        assert_same_bits(on, off, mistake)
    said = str(caught.value)
    assert mistake in said


def test_nothing_is_never_the_same_as_nothing() -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_same_bits({}, {}, "empty")
