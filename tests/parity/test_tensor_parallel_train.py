# SPDX-License-Identifier: Apache-2.0
"""The GPT with layers cut by ``parallelize_module``, as docs/tensor_parallel.md shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import shardwise as sw
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import GPTConfig
from tests.one_card import device_type, ranks_device
from tests.ranks import on_ranks
from tests.tensor_parallel import whole

MODEL = GPTConfig(dim=16, num_layers=2, num_heads=4, num_kv_heads=2, context=16, vocab_size=33)
# On a GPU matrices are orthogonalised in 16 bits, those that tensor parallelism cuts apart.
NEAR = 1e-4 if ranks_device() == "cpu" else 2e-3
PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"


@on_ranks(4)
def test_the_example_of_the_page(rank: int, world_size: int) -> None:
    """For 16 GPUs there, for 4 CPU ranks here: three axes."""
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert "dp=4" in code
    alone = GPT(MODEL).to(device_type())
    alone.init_weights(3)
    names: dict[str, Any] = {"model": GPT(MODEL).to(device_type())}
    names["model"].init_weights(3)
    exec(code.replace("dp=4", "dp=1"), names)  # the page, as a reader types it
    model, optimizer, mesh = names["model"], names["optimizer"], names["mesh"]
    assert mesh.mesh_dim_names == ("dp_outer", "dp", "tp")
    assert model.blocks[0].feed_forward.down.weight.placements[-1] == Shard(1)
    reference = sw.optimizer(alone, matrix=sw.muon(lr=0.02), elementwise=sw.adamw(lr=3e-4))
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 33, (4, 16), generator=generator)
        mine = tokens[2 * mesh.get_local_rank("dp_outer") :][:2]
        model(mine, mine).backward()
        alone(tokens, tokens).backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), its.detach(), atol=NEAR, rtol=0, msg=name.__add__)


def test_a_plan_knows_no_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match="no tensor parallelism"):
        sw.plan(GPT(MODEL), {"dp": 2, "tp": 2})
