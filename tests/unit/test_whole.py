# SPDX-License-Identifier: Apache-2.0
"""Whole tensors in one exchange are those that ``full_tensor`` brings, or an error."""

from __future__ import annotations

import pytest
import torch

from tests.models import STRATEGIES, make_model, mesh_for, shard_model
from tests.ranks import on_ranks
from tests.whole import whole_parameters, whole_tensors


@on_ranks(4)
def test_whole_tensors_are_those_of_full_tensor(rank: int, world_size: int) -> None:
    for placements in STRATEGIES.values():
        model = shard_model(make_model(), placements, mesh_for(placements, world_size))
        expected = {name: p.full_tensor() for name, p in model.named_parameters()}
        found = whole_parameters(model)
        assert list(found) == list(expected) and len(found) == 21
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(4)
def test_replicas_that_differ_are_noticed_by_all_ranks(rank: int, world_size: int) -> None:
    for name, others in (("zero0", [3]), ("hsdp", [2, 3])):
        placements = STRATEGIES[name]
        model = shard_model(make_model(), placements, mesh_for(placements, world_size))
        before = whole_parameters(model)
        weight = model.layers[0].up.weight
        with torch.no_grad():
            weight.to_local().add_(1.0 if rank in others else 0.0)
        with pytest.raises(AssertionError, match=r"'layers.0.up.weight' differs between"):
            whole_parameters(model)
        with torch.no_grad():
            weight.to_local().add_(0.0 if rank in others else 1.0)
        assert not torch.equal(whole_tensors({"": weight})[""], before["layers.0.up.weight"])
