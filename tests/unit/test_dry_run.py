# SPDX-License-Identifier: Apache-2.0
"""A dry run of the real code says what the plan of it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core import layout
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from shardwise.planning.plan import dry_run, plan
from tests.models import Model
from tests.unit.test_plan import BF16, MESHES, facts, small


@pytest.mark.parametrize("strategy", MESHES)
def test_a_dry_run_of_the_real_code_says_the_same(strategy: str) -> None:
    wire = sw.Precision(weights="bf16")
    for precision, microbatches in ((None, 3), (BF16, 1), (wire, 3)):
        options: dict[str, Any] = {"precision": precision, "microbatches": microbatches}
        planned = plan(small(), MESHES[strategy], strategy, **options)
        measured = dry_run(small(), MESHES[strategy], strategy, rank=3, **options)
        assert facts(measured) == facts(planned), (precision, microbatches)
        # not only the peak: every acquisition and release, in order
        steps = [made.timeline for made in (planned, measured)]
        assert steps[0] == steps[1] and len(steps[0]) >= 4
        assert planned.peak_total > sum(planned.rest.values())


@pytest.mark.parametrize("reshard", [True, False, 4])
def test_a_dry_run_agrees_on_what_is_kept_after_forward(reshard: bool | int) -> None:
    for strategy in ("zero3", "hfsdp"):
        options: dict[str, Any] = {"precision": BF16, "reshard_after_forward": reshard}
        planned = plan(small(), MESHES[strategy], strategy, **options)
        measured = dry_run(small(), MESHES[strategy], strategy, rank=63, **options)
        assert facts(measured) == facts(planned)


@pytest.mark.parametrize(("experts", "recompute"), [(0, "none"), (4, "none"), (0, "block")])
def test_a_dry_run_of_the_reference_model_agrees(experts: int, recompute: Any) -> None:
    config = GPTConfig(num_layers=3, num_experts=experts, tied=not experts, recompute=recompute)

    def build() -> GPT:
        with torch.device("meta"):
            return GPT(config)

    strategies = ("zero0", "zero1", "hfsdp") if experts else ("zero0", "zero3", "hsdp")
    for strategy in strategies if recompute == "none" else ("zero3",):
        options: dict[str, Any] = {"precision": BF16, "microbatches": 2, "optimizer": "muon"}
        planned = plan(build(), MESHES[strategy], strategy, rank=5, **options)
        measured = dry_run(build(), MESHES[strategy], strategy, rank=5, **options)
        assert facts(measured) == facts(planned), strategy
        assert bool(planned.divisions) == (strategy in ("hsdp", "zero0"))
        assert planned.matrices is not None and planned.matrices.num_matrices >= 3 * 5


@pytest.mark.parametrize("experts", [0, 4])
def test_a_dry_run_of_buckets_agrees(experts: int) -> None:
    def build() -> GPT:
        with torch.device("meta"):
            return GPT(GPTConfig(num_layers=3, num_experts=experts, tied=not experts))

    for strategy, precision in (("zero1", BF16), ("zero2", sw.Precision(weights="bf16"))):
        options: dict[str, Any] = {"microbatches": 2, "optimizer": "muon", "bucket_mb": 0.05}
        planned = plan(build(), {"dp": 64}, strategy, rank=5, precision=precision, **options)
        measured = dry_run(build(), {"dp": 64}, strategy, rank=5, precision=precision, **options)
        assert facts(measured) == facts(planned), strategy
        assert len(planned.units) == 1 and len(planned.units[0].groups) > 5
        assert "buckets of 0.05 MB" in str(planned)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_dry_run_agrees_on_units_inside_units(strategy: str) -> None:
    """The layer's own gradients come after those of the unit inside it."""

    def wrapped(model: Model) -> list[nn.Module]:
        return [module for layer in model.layers for module in (layer.down, layer)]

    models = small(), small()
    planned = plan(models[0], {"dp": 4}, strategy, wrap=wrapped(models[0]))
    measured = dry_run(models[1], {"dp": 4}, strategy, wrap=wrapped(models[1]))
    assert facts(measured) == facts(planned)
    steps = [made.timeline for made in (planned, measured)]
    assert steps[0] == steps[1] and len(steps[0]) >= 4


def test_a_dry_run_leaves_the_ledger_as_it_was() -> None:
    before = sw.ledger.snapshot()
    joined = torch.distributed.is_initialized()  # by another test of this process, perhaps
    measured = dry_run(small(), {"dp": 8}, "zero3")
    assert measured.rest["main"] > 0 and "rank 0 of 8" in measured.source
    assert sw.ledger.snapshot() == before
    assert torch.distributed.is_initialized() == joined


def test_a_dry_run_names_all_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"not on the meta device.*rank 9 of a mesh of 8"):
        dry_run(Model(), {"dp": 8}, rank=9)
    model, tokens = small(), torch.zeros(1, 2, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match="loss must call the model that it is given"):
        dry_run(model, {"dp": 8}, loss=lambda _: model(tokens).sum())


@pytest.mark.parametrize("strategy", MESHES)
def test_a_dry_run_agrees_on_mxfp8(strategy: str) -> None:
    """Bytes of codes, on the wire and at peak; 64 ranks, so that some shards are empty."""

    def build() -> Model:
        with torch.device("meta"):
            return Model(64, 3)

    for options in ({"grain": layout.ROW, "microbatches": 3}, {"reshard_after_forward": None}):
        options = {"precision": sw.Precision(weights="mxfp8", reduce="fp32"), **options}
        planned = plan(build(), MESHES[strategy], strategy, **options)
        measured = dry_run(build(), MESHES[strategy], strategy, rank=3, **options)
        assert facts(measured) == facts(planned), options
        steps = [made.timeline for made in (planned, measured)]
        assert steps[0] == steps[1] and len(steps[0]) >= 4
