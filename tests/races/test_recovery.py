# SPDX-License-Identifier: Apache-2.0
"""Errors around a gather: messages that fail, a stream being captured."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.core import comm
from tests.models import make_model, mesh_of, shard_model, tokens
from tests.races.helpers import backward, make, posing
from tests.ranks import run_ranks

# ------------------------------------------------------------------------------ messages that fail


class Failing:
    """A gather whose messages come damaged, and which says so."""

    def __init__(self, pending: comm.Pending, out: Tensor) -> None:
        self._pending, self._out, self._waited = pending, out, False

    def wait(self) -> None:
        if self._waited:  # as of a Pending: it says so once
            return
        self._waited = True
        self._pending.wait()
        self._out.fill_(77)
        raise RuntimeError("all_gather failed: connection closed by peer")


FORMATS: dict[str, sw.Precision] = {
    "bf16": sw.Precision(weights="bf16"),
    "mxfp8": sw.Precision(weights="mxfp8"),
}


def fail_once(rank: int, world_size: int, stage: int, format: str, failing: int) -> None:
    model = make_model(width=128, depth=2)
    shard_model(model, sw.zero(stage), mesh_of(world_size), precision=FORMATS[format])
    batch = tokens(0, 0, rank, world_size)
    with torch.no_grad():
        expected = model(batch)
        for parameter in model.parameters():
            parameter.mul_(1)  # so that weights which are kept are gathered anew
    count, gather = 0, comm.all_gather_together

    def all_gather(pairs: Any, axis: Any) -> Any:
        nonlocal count
        count += 1
        pending = gather(pairs, axis)
        return Failing(pending, pairs[0][0]) if count == failing else pending

    refused = pytest.raises(RuntimeError, match="connection closed by peer")
    with patch.object(comm, "all_gather_together", all_gather), torch.no_grad(), refused:
        model(batch)
    assert count >= failing
    model.reset_iter_state()
    with torch.no_grad():
        assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gather_that_failed_has_gathered_nothing(stage: int, format: str) -> None:
    for failing in (1, 2, 3):
        run_ranks(fail_once, 2, stage, format, failing)


# ------------------------------------------------------------------------------------- CUDA graphs


def test_a_capture_is_refused_by_name() -> None:
    with posing() as meshes, patch("torch.cuda.is_current_stream_capturing", lambda: True):
        model = make(meshes, "zero3")
        backward(model)  # on a CPU there is nothing to capture
        for unit in (model, *model.layers):
            unit._shardwise_unit.runtime.lanes.device = torch.device("cuda")
        with pytest.raises(RuntimeError, match=r"forward of 'Model' .* CUDA graph"):
            model(tokens(0))
        with pytest.raises(RuntimeError, match=r"'layers.1' .* CUDA graph"):
            model.layers[1].unshard()
        with pytest.raises(RuntimeError, match=r"forward of 'layers.1' .* CUDA graph"):
            model.layers[1](torch.randn(2, 32))
