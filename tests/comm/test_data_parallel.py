# SPDX-License-Identifier: Apache-2.0
"""Exactly which collectives a bucketed step issues, in order and in bytes.

A bucket's whole buffer has F elements, of `w` bytes as weight and `g` bytes as gradient:

    zero(0)    backward   all-reduces of F*g, with the last microbatch (bf16 weights: a cast here);
                          of matrices all-to-alls, of those at which other ranks take turns
    zero(1)    forward    gathers of F*w, once after a step; backward: reduce-scatters of F*g, once
    zero(2)    the same, and a reduce-scatter with every microbatch
    step       nothing: owners hold their matrices whole
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.core import comm
from tests.models import Model, loss_of, make_model, mesh_of, tokens
from tests.ranks import on_ranks, run_ranks

DEPTH = 4
SMALL = 0.004  # megabytes: a row of two or three matrices fills a bucket
Calls = list[tuple[str, str, int]]  # (operation, axis, bytes)
PRECISIONS = {
    "fp32": (None, 4, 4),
    "bf16": (sw.Precision(weights="bf16", reduce="fp32"), 2, 4),
    "bf16 wire": (sw.Precision(weights="bf16"), 2, 2),
}


def make(world_size: int, stage: int = 1, **options: Any) -> Model:
    return sw.data_parallel(
        make_model(depth=DEPTH),
        mesh=mesh_of(world_size),
        placements=sw.zero(stage),
        **{"bucket_mb": SMALL} | options,
    )


def sizes_of(model: Any) -> list[int]:
    """Elements of every bucket, in the order of backward."""
    return [group.layout.numel for group in model._shardwise_unit.groups]


def listed(calls: list[comm.Call]) -> Calls:
    return [(call.operation, call.axis, call.nbytes) for call in calls]


def optimizer_of(model: Model) -> Any:
    return sw.optimizer(model, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=1e-2))


def expected(
    stage: int, sizes: list[int], microbatches: int, w: int, g: int, others: list[int]
) -> Calls:
    if stage == 0:
        pairs = zip(sizes, others, strict=True)
        return [
            ("all_to_all", "dp", other * g) if other else ("all_reduce", "dp", size * g)
            for size, other in pairs
        ]
    gathers: Calls = [("all_gather", "dp", size * w) for size in reversed(sizes)]
    reductions: Calls = [("reduce_scatter", "dp", size * g) for size in sizes]
    return gathers + reductions * (1 if stage == 1 else microbatches)


def others_of(model: Any, optimizer: Any) -> list[int]:
    """For every bucket, the elements of matrices at which other replicas take turns."""
    found = []
    for group in model._shardwise_unit.groups:
        states = [optimizer.state[p].get("momentum_buffer", p) for p in group.sharded]
        held = zip(group.sharded, states, strict=True)
        found.append(sum(p.to_local().numel() - own.to_local().numel() for p, own in held))
    return found


def check_counts(rank: int, world_size: int, precision: str) -> int:
    policy, w, g = PRECISIONS[precision]
    steps = 0
    for stage in (0, 1, 2):
        for microbatches in (1, 3) if precision == "fp32" else (3,):
            model = make(world_size, stage, precision=policy, overlap_gather=microbatches == 3)
            sizes = sizes_of(model)
            assert len(sizes) >= 4
            optimizer = optimizer_of(model)
            for _ in range(2):
                with comm.record() as calls:
                    for microbatch in range(microbatches):
                        model.set_is_last_backward(microbatch == microbatches - 1)
                        loss_of(model, tokens(0, microbatch, rank, world_size)).backward()
                wanted = expected(stage, sizes, microbatches, w, g, others_of(model, optimizer))
                assert listed(calls) == wanted, (stage, microbatches, listed(calls), wanted)
                with comm.record() as calls:
                    optimizer.step()
                    optimizer.zero_grad()
                # Replicas share the matrices out; where they are sharded each has its owner.
                assert {call.operation for call in calls} == (
                    {"all_to_all"} if stage == 0 else set()
                )
                steps += 1
    return steps


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_issues_exactly_these_collectives(precision: str) -> None:
    count = 12 if precision == "fp32" else 6
    assert run_ranks(check_counts, 2, precision) == [count, count]


def test_three_ranks_issue_the_same() -> None:
    assert run_ranks(check_counts, 3, "fp32") == [12] * 3


def check_cut(rank: int, world_size: int) -> tuple[int, int, int]:
    """Matrices in 4 parts: three go to the owner, and three come back, in exact sizes."""
    model = sw.data_parallel(make_model(64, 1), mesh=mesh_of(world_size), bucket_mb=1 / 32)
    loss_of(model, tokens(0, 0, rank, world_size)).backward()
    optimizer = optimizer_of(model)
    with comm.record() as calls:
        optimizer.step()
    matrix = 192 * 64 * 4  # bytes; there are two of them
    return len(calls), sum(call.nbytes for call in calls), matrix


@pytest.mark.cpu_only("updates travel in 16 bits on a GPU")
def test_parts_of_a_matrix_travel_to_its_owner_and_back() -> None:
    results = run_ranks(check_cut, 4)
    matrix = results[0][2]
    assert all(count == 2 for count, _, _ in results), "there, and back"
    assert sum(nbytes for _, nbytes, _ in results) == 2 * 2 * matrix * 3 // 4


@on_ranks(4)
def test_a_promise_of_whole_matrices_leaves_nothing_to_send(rank: int, world_size: int) -> None:
    mesh = mesh_of(world_size)
    buckets = partial(sw.data_parallel, bucket_mb=1 / 32)
    # Also two matrices of 120 thousand elements, for which half of the ranks store padding.
    for wrap, width in ((buckets, 64), (sw.fully_shard, 64), (buckets, 200), (sw.fully_shard, 200)):
        model = wrap(make_model(width, 1), mesh=mesh, grain="tensor")
        loss_of(model, tokens(0, 0, rank, world_size)).backward()
        optimizer = optimizer_of(model)
        with comm.record() as calls:
            optimizer.step()
        assert calls == []
        for layer in model.layers:
            for weight in (layer.up.weight, layer.down.weight):
                assert weight.to_local().numel() in (0, weight.numel())
        with pytest.raises(ValueError, match="grain='matrix': "):
            wrap(make_model(8, 1), mesh=mesh, grain="matrix")


# ------------------------------------------------------------------------------ when


@on_ranks(2)
def test_buckets_are_reduced_while_backward_runs(rank: int, world_size: int) -> None:
    """How many buckets have been reduced when the gradient of a layer's input comes."""
    model = make(world_size)
    seen: dict[str, int] = {}
    with comm.record() as calls:

        def watch(name: str) -> Any:
            def note(grad: Tensor) -> None:
                seen[name] = sum(call.operation == "reduce_scatter" for call in calls)

            return lambda module, args: args[0].register_hook(note) and None

        for number, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(watch(f"layer {number}"))
        loss_of(model, tokens(0, 0, rank, world_size)).backward()
    seen["end"] = sum(call.operation == "reduce_scatter" for call in calls)
    # The two matrices of a layer fill a bucket; elements come last, with the embedding.
    assert seen == {"layer 3": 1, "layer 2": 2, "layer 1": 3, "layer 0": 4, "end": 5}


@on_ranks(2)
def test_a_bucket_is_awaited_by_the_first_module_that_reads_it(rank: int, world_size: int) -> None:
    """Which buckets are still on their way when a layer runs, with and without overlap."""
    found = []
    for overlap in (False, True):
        model = make(world_size, overlap_gather=overlap)
        unit = model._shardwise_unit
        pending: list[str] = []

        def note(module: Any, args: Any, unit: Any = unit, pending: Any = pending) -> None:
            pending.append("".join("?" if group.pending else "." for group in unit.groups))

        for layer in model.layers:
            layer.register_forward_pre_hook(note)
        model(tokens(0, 0, rank, world_size))
        found.append(pending)
    together, overlapped = found
    assert together == ["....."] * DEPTH
    # Bucket 4 (elements) is the embedding's; then layer 0 awaits bucket 3, and so on.
    assert overlapped == ["???..", "??...", "?....", "....."]


@on_ranks(2)
def test_weights_are_gathered_once_after_a_step(rank: int, world_size: int) -> None:
    """Evaluation after a step gathers once; nothing changed, nothing is sent."""
    model = make(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts = []
    for step in range(2):
        loss_of(model, tokens(step, 0, rank, world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):
            with comm.record() as calls, torch.no_grad():
                model(tokens(step, 0, rank, world_size))
            counts.append(len(calls))
    assert counts == [5, 0, 5, 0]


# ------------------------------------------------------------------------------ where


@on_ranks(2)
def test_owners_are_the_layouts_and_parameters_are_views(rank: int, world_size: int) -> None:
    """The optimizer's owners are the layout's; parameters are views of their buckets."""
    model = make(world_size)
    groups = model._shardwise_unit.groups
    holders = {
        item.name: group.layout.holders(index)[0]
        for group in groups
        for index, item in enumerate(group.items)
        if item.grain == sw.TENSOR
    }
    optimizer = sw.optimizer(model, matrix=sw.muon(), elementwise=sw.adamw())
    ownership = [group.exchange.ownership for group in optimizer._matrix_groups]
    pairs = [pair for one in ownership for pair in zip(one.matrices, one.owners, strict=True)]
    owners = {matrix.name: rank for matrix, (_, rank) in pairs}
    assert owners == holders
    views = 0

    def look(module: Any, args: Any) -> None:
        nonlocal views
        for parameter in module.parameters():
            first, size = parameter.data_ptr(), parameter.element_size()
            whole = [group.whole.tensors[0] for group in groups]
            views += any(
                flat.data_ptr() <= first
                and first + parameter.numel() * size <= flat.data_ptr() + flat.nbytes
                for flat in whole
            )

    for layer in model.layers:
        layer.register_forward_pre_hook(look)
    model(tokens(0, 0, rank, world_size))
    assert (len(owners), views) == (2 * DEPTH, 6 * DEPTH)
