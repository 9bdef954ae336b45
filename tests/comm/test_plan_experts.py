# SPDX-License-Identifier: Apache-2.0
"""A plan of experts that are spread over ranks is what real ranks over gloo hold and send (I9)."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.core import comm
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.moe import mixtures_of, router
from shardwise.planning.figures import Plan
from shardwise.planning.plan import plan
from shardwise.train.build import build_model, build_optimizer
from shardwise.train.config import TrainConfig
from shardwise.train.fit import named_precision
from shardwise.train.logs import ExpertLoad
from tests.comm.planning import state_bytes
from tests.memory.helpers import Books
from tests.models import mesh_of
from tests.one_card import device_type, ranks_device
from tests.ranks import run_ranks
from tests.train_runs import make_world

Facts = dict[str, Any]
MODEL = GPTConfig(
    vocab_size=64,
    dim=32,
    num_layers=3,
    num_heads=2,
    context=12,
    num_experts=6,  # three for a rank: no two shards of them are alike
    expert_hidden_dim=32,
    shared_hidden_dim=32,
    num_dense_layers=1,
    bias_rate=0.01,
)


def config_of(model: Facts, changes: Facts) -> TrainConfig:
    options: Facts = {"ep": 2, "precision": "fp32", "compile": "off"} | changes
    options.pop("bucket_mb", None)
    return TrainConfig(model=GPTConfig(**(vars(MODEL) | model)), batch=16, **options)


def build_in_buckets(config: TrainConfig, world_size: int, bucket_mb: float) -> GPT:
    """The trainer's model under ``data_parallel``, experts over the ranks that hold the same."""
    model = GPT(config.model)
    grid = init_device_mesh(
        device_type(), (world_size // config.ep, config.ep), mesh_dim_names=("dp", "ep")
    )
    mesh = mesh_of(world_size)
    for layer in mixtures_of(model):
        layer.spread(comm.as_axis(grid.get_group("ep"), "ep"), make_world(0, world_size).axis)
    return sw.data_parallel(
        model,
        mesh=mesh,
        placements=config.placements,
        meshes={"*.experts.*": grid["dp"]},
        bucket_mb=bucket_mb,
        precision=named_precision(config.precision, experts=True),
    )


def plan_of(config: TrainConfig, world_size: int, **options: Any) -> Plan:
    """As the trainer makes it, but for ``options``."""
    with torch.device("meta"):
        model = GPT(config.model)
        for layer in mixtures_of(model) if config.ep > 1 else ():
            layer.keep_share(config.ep)
    return plan(
        model,
        config.mesh_shape(world_size),
        config.strategy,
        precision=named_precision(config.precision, experts=True),
        optimizer=config.optimizer,
        microbatches=config.num_microbatches,
        device=ranks_device(),
        tokens=config.share(world_size) * config.model.context,
        **options,
    )


def evenly(scores: Tensor, count: int) -> Tensor:
    """In the place of the best: every expert is chosen as often as any other."""
    tokens, experts = scores.shape
    first = torch.arange(tokens, device=scores.device)[:, None] * count
    return (first + torch.arange(count, device=scores.device)) % experts


def measure(rank: int, world_size: int, model: Facts, changes: Facts) -> Facts:
    """The second step of the trainer's own model and optimizer, routed evenly."""
    config, world = config_of(model, changes), make_world(rank, world_size)
    books, before = Books(), dict(sw.ledger.current)
    bucket_mb = changes.get("bucket_mb")
    made = (
        build_model(config, world)
        if bucket_mb is None
        else build_in_buckets(config, world_size, bucket_mb)
    )
    optimizer, load = build_optimizer(config, made), ExpertLoad(made)
    rest = books()
    torch.manual_seed(rank)
    for _ in range(2):
        sw.ledger.reset_peak()
        phases: Facts = {"pass": Counter(), "step": Counter()}
        for number in range(config.num_microbatches):
            made.set_is_last_backward(number == config.num_microbatches - 1)
            tokens = torch.randint(64, (config.share(world_size), config.model.context))
            with mock.patch.object(router, "_best", evenly):
                with comm.record() as calls:
                    made(tokens, tokens).backward()
                phases["pass"].update(calls)
        loaded = books()
        with comm.record() as calls:
            optimizer.step()
            load.after_step(torch.tensor(False))
        phases["step"].update(calls)
        optimizer.zero_grad()
        peak, total = dict(sw.ledger.peak), sw.ledger.peak_total
    held = {kind: nbytes - before.get(kind, 0) for kind, nbytes in sorted(peak.items())}
    return {
        "rest": rest,
        "loaded": loaded,
        "peak": {kind: nbytes for kind, nbytes in held.items() if nbytes},
        "peak_total": total - sum(before.values()),
        "state": state_bytes(optimizer),
        **phases,
    }


def routed(calls: Counter[comm.Call]) -> Counter[comm.Call]:
    return Counter({call: n for call, n in calls.items() if call.axis in ("ep", "world")})


def check(rank: int, world_size: int, cases: list[tuple[Facts, Facts]]) -> list[Facts]:
    return [measure(rank, world_size, *case) for case in cases]


def assert_planned(world_size: int, cases: list[tuple[Facts, Facts]]) -> None:
    everyone = run_ranks(check, world_size, cases)
    for number, (model, changes) in enumerate(cases):
        config = config_of(model, changes)
        for rank, results in enumerate(everyone):
            seen = results[number]
            made = plan_of(config, world_size, rank=rank, bucket_mb=changes.get("bucket_mb"))
            what = (model, changes, rank)
            for name in ("rest", "loaded", "peak", "peak_total"):
                assert seen[name] == getattr(made, name), (what, name)
            rows: Counter[comm.Call] = Counter()
            for phase, planned in (("pass", made.calls), ("step", made.exchanged)):
                calls = Counter(seen[phase])
                assert calls - routed(calls) == planned, (what, phase)
                rows += routed(calls)
            assert rows == made.traffic.known + made.traffic.even, what
            assert config.ep == 1 or made.traffic.even, what
            assert made.optimizer_bytes == seen["state"] > 0, what
            done = [*(Counter(seen["pass"]) + Counter(seen["step"])).elements()]
            assert made.check(done) == [] != made.check(done[1:]), what


ADAMW: Facts = {"optimizer": "adamw"}
TWICE: Facts = {"microbatches": 2}


NARROW: Facts = TWICE | {"precision": "bf16"}


@pytest.mark.parametrize(
    ("strategy", "world_size", "changes"),
    [("zero0", 4, NARROW), ("zero1", 2, NARROW), ("zero3", 4, {})],
)
def test_plan_is_exact_on_one_axis(strategy: str, world_size: int, changes: Facts) -> None:
    assert_planned(world_size, [({}, changes | {"strategy": strategy})])


@pytest.mark.parametrize(
    ("strategy", "changes"), [("hsdp", TWICE), ("hfsdp", ADAMW | {"precision": "bf16"})]
)
def test_plan_is_exact_on_two_axes(strategy: str, changes: Facts) -> None:
    """The other half of these crossings is exact without experts (test_plan): what the two axes
    add to experts is their own mesh."""
    assert_planned(4, [({}, {"strategy": strategy} | changes)])


def test_plan_is_exact_for_every_way_to_spread() -> None:
    """Not at all, over all ranks; in another precision; with blocks that run twice."""
    assert_planned(
        4,
        [
            ({}, {"ep": 1} | TWICE),
            ({"num_experts": 8}, {"ep": 4} | ADAMW),
            ({"recompute": "block"}, TWICE),
            ({"balance_coefficient": 0.0, "bias_rate": 0.0}, {"precision": "mxfp8"}),
        ],
    )


def test_plan_is_exact_for_buckets() -> None:
    chosen: Facts = {"strategy": "zero1", "bucket_mb": 2**-6}
    assert_planned(4, [({}, chosen | TWICE), ({}, chosen | ADAMW | {"precision": "mxfp8"})])
