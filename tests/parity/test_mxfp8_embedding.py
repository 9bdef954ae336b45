# SPDX-License-Identifier: Apache-2.0
"""Embeddings in MXFP8: not a bit differs from a bf16 embedding that is quantised at use."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.precision import fp8_functions
from shardwise.precision.fp8 import Plane
from shardwise.precision.fp8_functions import rows_of
from shardwise.precision.fp8_tensor import Format, FP8Tensor
from shardwise.shard import fp8_group
from tests.contract.helpers import raised
from tests.models import mesh_for, mesh_of, ranks_for
from tests.one_card import device_type
from tests.parity.mxfp8_embedding_helpers import STORED, WIDTH, WORDS, make, precision_of
from tests.parity.mxfp8_helpers import (
    assert_same_bits,
    expected_planes,
    optimizer_of,
    planes_seen,
    tokens,
    train,
    wrap,
)
from tests.parity.test_mxfp8 import never_made_anew
from tests.ranks import on_ranks, run_ranks

STEPS = 5  # in three nothing is learned


def run(
    rank: int, world_size: int, strategy: str, on: bool, format: Format, tied: bool, **options: Any
) -> tuple[Any, dict[str, Tensor]]:
    kind, steps = options.pop("kind", "adamw"), options.pop("steps", range(STEPS))
    model = make(on, format, tied, **options)
    wrap(model, strategy, world_size, precision=precision_of(on, format))
    return model, train(model, rank, optimizer=optimizer_of(model, kind), steps=steps)


def formats_of(model: Any) -> dict[str, Any]:
    return {row.name: row.format for row in sw.precision_report(model).rows}


def check_on_and_off(
    rank: int, world_size: int, strategy: str, format: Format, tied: bool, options: Any
) -> int:
    model, on = run(rank, world_size, strategy, True, format, tied, **options)
    _, off = run(rank, world_size, strategy, False, format, tied, **options)
    assert_same_bits(on, off, f"{strategy} {format}: embedding on / off")
    assert set(sw.precision_report(model).stored) == STORED
    stored = formats_of(model)
    assert stored["embedding.weight"] == (format if tied else "mxfp8_rows")
    assert stored["layers.0.up.weight"] == format
    found = planes_seen(model)
    assert_same_bits(found, expected_planes(model, format), "codes and scales")
    names = {name.rpartition(" ")[2] for name in found if " embedding.weight " in name}
    squares = {"square.codes", "square.scales"}
    rows, columns = {"row.codes", "row.scales"}, {"column.codes", "column.scales"}
    matrix = squares if format == "mxfp8_2d" else rows | columns
    assert names == (matrix if tied else rows)
    if "steps" not in options:
        first, last = on["loss 0.0"], on[f"loss {STEPS - 1}.0"]
        assert last < 0.98 * first, f"nothing was learned: {first} to {last}"
    return sum(name.endswith("embedding.weight") for name in on)


@pytest.mark.parametrize(
    ("strategy", "format", "tied", "options"),
    [
        (strategy, "mxfp8_rowcol", False, {"padding_idx": 3})
        for strategy in ("zero1", "zero3", "hfsdp")
    ]
    + [
        ("zero0", "mxfp8_rowcol", False, {"steps": range(4)}),
        ("zero3", "mxfp8_2d", False, {"kind": "muon", "scale_grad_by_freq": True}),
        ("zero1", "mxfp8_rowcol", True, {}),
        ("zero3", "mxfp8_rowcol", True, {"kind": "muon"}),
        ("zero3", "mxfp8_2d", True, {"padding_idx": -93}),
    ],
)
def test_an_embedding_in_mxfp8_is_one_quantised_at_use(
    strategy: str, format: str, tied: bool, options: dict[str, Any]
) -> None:
    world_size = ranks_for(strategy)
    compared = run_ranks(check_on_and_off, world_size, strategy, format, tied, options)
    assert compared == [3] * world_size, "its gradient at both ends, and its main weight"


@pytest.mark.parametrize(("stage", "tied"), [(0, False), (1, True)])
@on_ranks(2)
def test_data_parallel(rank: int, world_size: int, stage: int, tied: bool) -> None:
    placements = sw.zero(stage)
    runs = []
    for on in (True, False):
        model = sw.data_parallel(
            make(on, tied=tied), mesh=mesh_for(placements, world_size), placements=placements,
            precision=precision_of(on), bucket_mb=0.02,
        )  # fmt: skip
        runs.append(train(model, rank, optimizer=optimizer_of(model, "muon")))
        if on:
            assert set(sw.precision_report(model).stored) == STORED
            assert_same_bits(planes_seen(model), expected_planes(model, "mxfp8_rowcol"), "planes")
    assert_same_bits(runs[0], runs[1], f"data_parallel zero({stage})")


# ------------------------------------------------------------------------- what travels, and when


def check_traffic(rank: int, world_size: int) -> list[list[int]]:
    """Bytes of each gather in forward, and in backward, of a unit that is released in between."""
    model = sw.fully_shard(
        make(True).embedding, mesh=mesh_of(world_size), reshard_after_forward=True,
        precision=sw.Precision(weights="mxfp8_rowcol", include=("weight",)),
    )  # fmt: skip
    sent = []
    with sw.comm.record() as calls:
        loss = model(tokens(0, 0, rank)).float().square().mean()
    sent.append([call.nbytes for call in calls])
    with sw.comm.record() as calls:
        loss.backward()
    assert any(call.operation == "reduce_scatter" for call in calls)
    sent.append([call.nbytes for call in calls if call.operation == "all_gather"])
    return sent


def test_forward_gathers_codes_and_backward_gathers_nothing() -> None:
    codes = 128 * WIDTH  # 96 rows, in blocks of 32 for two ranks
    for forward, backward in run_ranks(check_traffic, 2):
        assert (sum(forward), backward) == (codes + codes // 32, [])


# -------------------------------------------------------------------------------- save, load, meta


def check_resume(rank: int, world_size: int, path: str) -> int:
    half = STEPS // 2
    model = wrap(make(True), "zero3", world_size, precision=precision_of(True))
    optimizer = optimizer_of(model, "muon")
    train(model, rank, optimizer=optimizer, steps=range(half))
    sw.save(path, model, optimizer)
    expected = train(model, rank, optimizer=optimizer, steps=range(half, STEPS))
    for strategy in ("zero3", "zero1"):
        with torch.device("meta"):
            resumed = make(True)
        wrap(resumed, strategy, world_size, precision=precision_of(True))
        resumed.to_empty(device=device_type())
        again = optimizer_of(resumed, "muon")
        sw.load(path, resumed, again)
        found = train(resumed, rank, optimizer=again, steps=range(half, STEPS))
        assert_same_bits(found, expected, f"resumed in {strategy}, made on the meta device")
        assert_same_bits(planes_seen(resumed), planes_seen(model), "codes and scales")
    return len(expected)


def check_load(rank: int, world_size: int, path: str, on: bool) -> dict[str, Tensor]:
    """Into another number of ranks, and into a bf16 embedding."""
    model = make(True)
    precision = precision_of(True) if on else sw.Precision(weights="mxfp8_rowcol", reduce="fp32")
    wrap(model, "zero3", world_size, precision=precision)
    with torch.no_grad():
        model(tokens(0, 0, rank))  # codes of what is about to be replaced
    sw.load(path, model, optimizer_of(model, "muon"))
    assert ("embedding.weight" in sw.precision_report(model).stored) == on
    assert_same_bits(planes_seen(model), expected_planes(model, "mxfp8_rowcol"), "planes")
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def test_resumed_is_uninterrupted_and_any_world_takes_it(tmp_path: Path) -> None:
    path = str(tmp_path / "half way")
    assert min(run_ranks(check_resume, 2, path)) > STEPS
    three = run_ranks(check_load, 3, path, True)
    (one,) = run_ranks(check_load, 1, path, False)
    for found in three:
        assert_same_bits(found, one, "three ranks with, one without")


# ------------------------------------------------------------------------- refused, listed, decoded


class Reader(nn.Module):
    """Reads its embedding in other ways than nn.Embedding does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, **options)
        self.wrong: dict[str, Any] = {}

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.embedding.weight
        hidden = F.embedding(ids, weight, **self.wrong) + weight[ids]
        return F.linear(hidden, weight)


def check_reading(rank: int, world_size: int) -> list[str]:
    mesh = mesh_of(world_size)
    torch.manual_seed(0)
    model = Reader()
    values = FP8Tensor.encode(model.embedding.weight.detach()).dequantise().requires_grad_()
    sw.fully_shard(model, mesh=mesh, precision=precision_of(True))
    ids = tokens(0, 0, 0)
    found = model(ids)
    expected = F.linear(F.embedding(ids, values) + values[ids], values)
    assert torch.equal(found, expected), "whoever reads the weight reads its rows"
    for output in (found, expected):
        output.float().square().mean().backward()
    assert torch.equal(model.embedding.weight.grad.full_tensor(), values.grad.float())
    said = []
    for wrong in ({"max_norm": 1.0}, {"sparse": True}):
        model.wrong = wrong
        said.append(raised(lambda: model(ids), ValueError))
        model.reset_iter_state()
    made = Reader(sparse=True).requires_grad_(False)  # trained it is refused, as max_norm is
    other = sw.fully_shard(made, mesh=mesh, precision=precision_of(True))
    return [*said, sw.precision_report(other).kept["embedding.weight"]]


def test_other_readers_and_what_is_refused() -> None:
    for *said, sparse in run_ranks(check_reading, 2):
        assert all("'embedding.weight' is stored in fp8, which excludes" in one for one in said)
        assert "max_norm=1.0 rewrites rows" in said[0] and "use sparse=False" in said[1]
        assert "use sparse=False" in sparse


def test_rows_are_no_format_of_linears() -> None:
    with pytest.raises(ValueError, match="mxfp8_rows"):
        sw.Precision(weights="mxfp8_rows")


# ----------------------------------------------------------------------------------------- controls


def next_scales(plane: Plane, ids: Tensor) -> Plane:
    """Wrong: the scales of the rows behind those that are looked up."""
    right = rows_of(plane, ids)
    return replace(right, scales=rows_of(plane, (ids + 1) % len(plane.codes)).scales)


def through_codes(model: Any) -> None:
    """Wrong: a main weight that starts from what the codes say."""
    with torch.no_grad():
        weight = model.embedding.weight
        weight.copy_(FP8Tensor.encode(weight, "mxfp8_rows").dequantise(dtype=torch.float32))


@pytest.mark.parametrize("mistake", ["init", "stale rows", "scales"])
@on_ranks(2)
def test_the_comparison_notices(rank: int, world_size: int, mistake: str) -> None:
    few = range(4)  # each of them shows at once, and stays
    _, off = run(rank, world_size, "zero1", False, "mxfp8_rowcol", False, steps=few)
    wrong = {
        "stale rows": (fp8_group.FP8Group, "_missing", never_made_anew),
        "scales": (fp8_functions, "rows_of", next_scales),
    }
    model = make(True)
    if mistake == "init":
        through_codes(model)
    wrap(model, "zero1", world_size, precision=precision_of(True))
    with ExitStack() as stack:
        if mistake in wrong:
            stack.enter_context(mock.patch.object(*wrong[mistake]))
        on = train(model, rank, optimizer=optimizer_of(model, "adamw"), steps=few)
    with pytest.raises(AssertionError, match="differ") as caught:
        assert_same_bits(on, off, mistake)
    said = str(caught.value)
    assert mistake in said
