# SPDX-License-Identifier: Apache-2.0
"""``Precision(weights="mxfp8")`` as users meet it: what is stored, refused, read."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import notices
from shardwise.core.buckets import plan_elements, plan_matrices
from shardwise.core.layout import ELEMENT, Grain, Item, Layout, plan, rows
from shardwise.precision.fp8 import FP8Error
from shardwise.precision.fp8_codec import FP8
from shardwise.precision.fp8_weight import Coded
from shardwise.precision.policy import Stored
from shardwise.shard import checks, formats
from shardwise.shard.formats import item_of
from shardwise.shard.module import units_of
from tests.contract.helpers import raised
from tests.models import mesh_of
from tests.parity.mxfp8_helpers import (
    PRODUCTS,
    STORED,
    Kind,
    assert_same_bits,
    coded,
    expected_planes,
    loss_of,
    make,
    optimizer_of,
    planes_seen,
    precision_of,
    tokens,
    train,
    wrap,
)
from tests.ranks import on_ranks, run_ranks

MXFP8 = sw.Precision(weights="mxfp8", reduce="fp32")

# --------------------------------------------------------------------------------------- the value


def test_precision_knows_its_format() -> None:
    assert MXFP8.format == "mxfp8" and MXFP8.weights == "mxfp8"
    assert MXFP8.compute_dtype(torch.float32) == MXFP8.input_dtype == torch.bfloat16
    assert sw.Precision(weights="mxfp8").wire_dtype(torch.float32) == torch.bfloat16
    assert MXFP8.wire_dtype(torch.float32) == MXFP8.main_dtype(torch.float32) == torch.float32
    assert sw.Precision(weights="bf16").format is None
    again = replace(MXFP8, exclude=["head.*"])
    assert again.format == "mxfp8" and again.exclude == ("head.*",), "no silent bf16"


def test_precision_refuses() -> None:
    with pytest.raises(ValueError, match=r"mxfp4.*'mxfp8', 'fp8_block'"):
        sw.Precision(weights="mxfp4")
    with pytest.raises(ValueError, match="reduce='mxfp8'"):
        sw.Precision(reduce="mxfp8")
    with pytest.raises(ValueError, match="they say which weights are stored in fp8"):
        sw.Precision(weights="bf16", exclude=("head.*",))
    with pytest.raises(FP8Error, match="give a sequence of patterns"):
        sw.Precision(weights="mxfp8", include="*.mlp.*")
    with pytest.raises(FP8Error, match=r"include=\(\): nothing would be stored in mxfp8"):
        sw.Precision(weights="mxfp8", include=())
    with pytest.raises(ValueError, match=r"products='native'.*'native' for 'mxfp8'"):
        sw.Precision(weights="bf16", products="native")


# ----------------------------------------------------------------------------------------- layouts


def matrices(grain: Any, *shapes: tuple[int, int], side: int = 32) -> list[Item]:
    return [Item(f"w{number}", shape, grain, side) for number, shape in enumerate(shapes)]


def staged(layout: Layout, kind: Kind = "mxfp8") -> str:
    return FP8("mxfp8" if kind == "native" else kind, PRODUCTS[kind]).staged_because(layout)


def grain_of(grain: Grain) -> Grain:
    stored = Stored(name="w", shape=(64, 32), format="mxfp8", dtype=torch.bfloat16, why="")
    return item_of(stored, grain).grain


def test_blocks_are_never_cut_where_rows_may_be() -> None:
    shapes = ((64, 32), (96, 64), (32, 96), (256, 32), (32, 32))
    for num_shards in (1, 2, 3, 4, 7, 16):
        layout = plan(matrices(grain_of(sw.ROW), *shapes), num_shards)
        assert not staged(layout), num_shards
        assert layout.payload == sum(a * b for a, b in shapes)
    assert grain_of(rows(48)) == rows(96) and grain_of(sw.TENSOR) == sw.TENSOR
    # A block of the 0.96B GPT: rows of 5632 cross one boundary, those of 2048 as many as they like.
    block = [(2048, 2048)] * 4 + [(5632, 2048)] * 2 + [(2048, 5632)]
    layout = plan(matrices(rows(128), *block, side=128), 8)
    assert not staged(layout, "fp8_block") and layout.padding * 48 < layout.payload
    # All blocks of that GPT in buckets of whole matrices, and a head.
    every = matrices(sw.TENSOR, *block * 18, side=128)
    costs = [item.numel for item in every]
    for bucket in plan_matrices(every, costs, 16, 6 << 20):
        assert not staged(bucket.layout, "fp8_block"), bucket.layout.shard_size
    for num_shards in (2, 8):
        (bucket,) = plan_elements(matrices(sw.TENSOR, (50304, 768), side=128), num_shards, 1)
        assert not staged(bucket.layout, "fp8_block")


def test_transport_is_chosen_by_layout_and_bytes() -> None:
    whole = plan(matrices(rows(32), (64, 64), (64, 64)), 4)
    assert not staged(whole), "one plane: 1.03 bytes against 2"
    assert staged(whole, "native") == "two planes have more bytes"
    cut = plan(matrices(ELEMENT, (64, 64), (64, 64)), 3)
    assert staged(cut) == "a rank's shard cuts a block"
    shifted = Layout(tuple(matrices(rows(32), (64, 64))), 2, 8192, (64,))
    assert staged(shifted), "its scales would have no address"
    stack = [Item("experts", (2, 256, 128), rows(1), 128)]
    assert not staged(plan(stack, 2), "fp8_block")
    cut = Layout((replace(stack[0], grain=ELEMENT),), 4, 128 * 128, (0,))
    assert not staged(cut) and not staged(cut, "fp8_block"), "whole blocks of rows"


def test_room_is_what_a_format_sends_and_keeps() -> None:
    layout = plan(matrices(rows(32), (64, 64), (64, 64)), 4)
    assert FP8("mxfp8", "emulated").room(layout) == [(torch.uint8, 2048), (torch.uint8, 64)]
    native = FP8("mxfp8", "native").room(layout)
    assert [dtype for dtype, _ in native] == [torch.uint8] * 4
    assert sum(size for _, size in native) == 2 * (2048 + 64)
    blocks = plan(matrices(rows(128), (256, 256), side=128), 2)
    assert FP8("fp8_block", "fp8").room(blocks) == [(torch.uint8, 1 << 15), (torch.float32, 2)]


# ---------------------------------------------------------------------------------- what is stored


@on_ranks(2)
def test_the_report_says_what_is_stored_and_why_the_rest_is_not(rank: int, world_size: int) -> None:
    model = wrap(make(True), "zero3", world_size, precision=MXFP8)
    report = sw.precision_report(model)
    assert set(report.stored) == STORED
    assert report.kept["embedding.weight"] == "read by Embedding, not only by linears"
    assert "17 rows are no multiple of 32" in report.kept["head.weight"]
    assert report.kept["layers.0.up.bias"] == "a bias"
    assert set(report.kept) | STORED == {name for name, _ in model.named_parameters()}
    for unit in units_of(model):
        assert {group.format for group in unit.groups} == {"mxfp8", None}
        for number, group in enumerate(unit.groups):
            rows_ = [unit.stored[number, index] for index in range(len(group.items))]
            assert {row.format for row in rows_} == {group.format}, "groups are split by format"
    few = sw.Precision(weights="mxfp8", include=("up.*", "first.*"), exclude=("*first*",))
    chosen = sw.precision_report(wrap(make(True), "zero3", world_size, precision=few))
    assert set(chosen.stored) == {"layers.0.up.weight", "layers.1.up.weight"}
    assert chosen.kept["first.weight"] == "excluded by '*first*'"
    lines = {line.split()[0]: line.split() for line in str(report).splitlines()}
    assert lines["head.weight"][2] == "bf16" and lines["first.weight"][2] == "mxfp8"
    text = str(report)
    assert "6 of 17 parameters" in text and "layers.1.down.weight" in text
    assert "gathered as bf16" not in text
    cut = sw.fully_shard(nn.Linear(32, 32), mesh=mesh_of(2), grain=sw.ELEMENT, precision=MXFP8)
    assert "gathered as bf16 (2.00 KiB), because a rank's shard cuts a block: weight" in str(
        sw.precision_report(cut)
    )
    assert "mxfp8" in sw.describe(model)


def test_nothing_is_decided_before_something_is_wrapped() -> None:
    with pytest.raises(ValueError, match="no module of this Linear is wrapped yet"):
        sw.precision_report(nn.Linear(32, 32))


def check_refusals(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of(world_size)
    typo = replace(MXFP8, exclude=("haed.*",))
    native = replace(MXFP8, products="native")
    with mock.patch.object(checks, "native_problem", return_value=None):
        lonely = sw.fully_shard(nn.Linear(64, 64), mesh=mesh, precision=native)
    report = sw.precision_report(lonely)
    assert report.rows[0].products == "mxfp8", "where there is hardware for it"
    blocks = sw.Precision(weights="fp8_block")
    notices._warned.clear()
    with mock.patch.object(formats.logger, "warning") as told:
        for precision in (blocks, blocks, replace(blocks, products="emulated")):
            sw.fully_shard(nn.Linear(128, 128), mesh=mesh, precision=precision)
        with mock.patch.object(formats, "scaled_problem", return_value=None):
            sw.fully_shard(nn.Linear(64, 64), mesh=mesh, precision=MXFP8)
    lines = [call.args[0] % call.args[1:] for call in told.call_args_list]
    assert len(lines) == (rank == 0), "once, by one rank, where hardware does neither"
    assert all("cpu multiplies no fp8 in blocks; products are made by" in one for one in lines)
    return [
        raised(lambda: sw.fully_shard(nn.Linear(64, 64), mesh=mesh, precision=native), ValueError),
        raised(lambda: sw.data_parallel(make(True), mesh=mesh, precision=typo), ValueError),
    ]


def test_what_cannot_hold_is_refused_by_name() -> None:
    for native, typo in run_ranks(check_refusals, 2):
        assert "products='native'" in native and "cpu multiplies no MXFP8" in native
        assert "'haed.*' matches none of the 17 parameters" in typo


@on_ranks(2)
def test_a_model_that_stores_nothing_in_mxfp8_is_refused(rank: int, world_size: int) -> None:
    mesh, messages = mesh_of(world_size), []
    odd = replace(MXFP8, include=("*.mpl.*",))
    for precision, width in ((MXFP8, 30), (odd, 64)):
        for placements in (sw.zero(3), sw.zero(1)):
            model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
            for unit in (model[0], model):
                sw.fully_shard(unit, mesh=mesh, placements=placements, precision=precision)
            before = [p.full_tensor() for p in model.parameters()]
            messages.append(raised(lambda m=model, w=width: m(torch.ones(2, w)), ValueError))
            assert all(map(torch.equal, before, (p.full_tensor() for p in model.parameters())))
        model = nn.Sequential(nn.Linear(width, width))
        wrap = lambda m=model, p=precision: sw.data_parallel(m, mesh=mesh, precision=p)  # noqa: E731
        messages.append(raised(wrap, ValueError))
        assert type(model[0].weight) is nn.Parameter, "refused before anything changed"
    some = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))  # one of two units stores something
    for unit in (some[0], some):
        sw.fully_shard(unit, mesh=mesh, precision=MXFP8)
    some(torch.ones(2, 64))
    sw.fully_shard(nn.Identity(), mesh=mesh, precision=MXFP8)(torch.ones(2))  # nothing to store
    for message in messages[:3]:
        assert "nothing would be stored in mxfp8" in message.lower(), message
        assert "30 rows are no multiple of 32" in message and "'bf16'" in message
    for message in messages[3:]:
        assert "'*.mpl.*'" in message


# ---------------------------------------------------------------------- parts kept for backward


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block"])
@on_ranks(4)
def test_a_part_of_what_backward_reads_can_be_kept(rank: int, world_size: int, format: Any) -> None:
    """Backward's plane comes back from two neighbours, recomputed or not; not a bit changes."""
    often: dict[str, Any] = {"steps": range(3), "microbatches": 2, "evaluate": True}
    runs = []
    for options, shape in (
        ({}, {}),
        ({"reshard_after_forward": 2, "memory": "trace"}, {"outside": True}),
    ):
        model = make(True, format, **shape)
        wrap(model, "zero3", world_size, precision=precision_of(True, format), **options)
        optimizer = optimizer_of(model, "muon")
        runs.append(train(model, rank, optimizer=optimizer, **often))
    assert_same_bits(runs[1], runs[0], "parts kept")
    model.outside = False
    before = sw.ledger.snapshot()
    loss = loss_of(model, tokens(9, 0, rank))[0]
    kept = sw.ledger.snapshot()["compute"] - before.get("compute", 0)
    with sw.comm.record() as calls:
        loss.backward()
    planes = [call for call in calls if call.operation == "all_gather" and call.size == 2]
    coded = [g for unit in units_of(model) for g in unit.groups if g.format]
    assert len(planes) == sum(len(unit.groups) for unit in units_of(model))
    assert not [call for call in calls if call.operation == "all_gather" and call.size == 4]
    assert kept >= sum(block.nbytes // 2 for g in coded for block in g.whole.blocks) > 0
    assert sw.ledger.snapshot().get("compute") == before.get("compute"), "given back"
    loss_of(model, tokens(9, 0, rank))  # no backward comes for what this keeps
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_same_bits(planes_seen(model), expected_planes(model, format), "not the parts of before")


# ------------------------------------------------------------------------------------ what is read


class Reader(nn.Module):
    """Reads its weights in other ways than nn.Linear does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.one.weight, Coded) and isinstance(self.one.weight, nn.Parameter)
        self.seen = self.one.weight
        return F.linear(x @ self.one.weight.T, weight=self.two.weight) + self.one.weight.sum()


@on_ranks(2)
def test_whoever_reads_the_weight_reads_its_codes(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Reader()
    first, second = (linear.weight.detach().clone() for linear in (model.one, model.two))
    sw.fully_shard(model, mesh=mesh_of(world_size), precision=MXFP8)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    y = model(x)
    one = coded(first).decode().requires_grad_()
    expected = F.linear(x @ one.T, coded(second).decode()) + one.sum()
    assert torch.equal(y, expected.to(y.dtype))
    y.float().square().mean().backward()
    assert model.one.weight.grad.full_tensor().abs().sum() > 0
    assert model.two.weight.grad.full_tensor().abs().sum() > 0
    weight = model.seen
    model.unshard()
    assert weight.decode().equal(coded(first).decode())
    model.reshard()
    assert "64x64" in repr(weight)
    error = raised(weight.decode, RuntimeError)
    assert "are not gathered" in error and "unshard()" in error


# --------------------------------------------------------------------------------- meta, and memory


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_meta_init(rank: int, world_size: int, strategy: str) -> None:
    expected_model = wrap(make(True), strategy, world_size, precision=MXFP8)
    with torch.device("meta"):
        model = make(True)
    wrap(model, strategy, world_size, precision=MXFP8)
    model.to_empty(device="cpu")
    model.load_state_dict({n: p.full_tensor() for n, p in expected_model.state_dict().items()})
    runs = [
        train(each, rank, optimizer=optimizer_of(each, "adamw"), steps=range(3))
        for each in (model, expected_model)
    ]
    assert_same_bits(runs[0], runs[1], "made on the meta device")
    assert_same_bits(planes_seen(model), expected_planes(model, "mxfp8"), "planes")


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@on_ranks(2)
def test_memory_comes_back(rank: int, world_size: int, strategy: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before = sw.ledger.snapshot()
        model = wrap(make(True), strategy, world_size, precision=precision_of(True))
        made = sw.ledger.snapshot()
        loss = loss_of(model, tokens(0, 0, rank))[0]
        loss.backward()
        model.zero_grad()
        after = sw.ledger.snapshot()
        assert after.get("staging") == before.get("staging"), "scratch outlives no gather"
        assert after.get("compute") == made.get("compute")
        kept = made.get("compute", 0) > before.get("compute", 0)
        assert kept == (strategy == "zero1"), "kept planes, or none"
        del model, loss
        assert sw.ledger.snapshot() == before, "deleting the model frees it at once"
    finally:
        gc.enable()


class _Carefree(Tensor):
    """A subclass as many are written: it has torch compute on whatever it meets."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block"])
@on_ranks(2)
def test_inputs_of_other_classes_read_no_empty_weights(
    rank: int, world_size: int, format: Any
) -> None:
    """Rows of a parameter at rest came into a layer in fp8, and were multiplied by zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 128), nn.Linear(128, 128))
    precision = sw.Precision(weights=format)
    sw.fully_shard(model[1], mesh=mesh_of(world_size), precision=precision)
    sw.fully_shard(model, mesh=mesh_of(world_size), precision=sw.Precision(weights="bf16"))
    with torch.no_grad():
        rows = model[0](torch.arange(6))  # at rest: whole on every rank
        assert type(rows) is not Tensor
        plain = rows.full_tensor().clone()
        expected = model[1](plain)
        assert expected.any() and torch.equal(model[1](rows), expected)
        odd = plain.bfloat16().as_subclass(_Carefree)
        assert (model[1](odd) - expected).norm() < 0.1 * expected.norm(), "decoded values"
