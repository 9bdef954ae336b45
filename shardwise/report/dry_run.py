# SPDX-License-Identifier: Apache-2.0
"""``dry_run``: a plan whose step runs the model's own forward, on meta tensors.

A plan takes units to run in the order in which they are registered, and every trainable parameter
to get a gradient. A dry run knows: whether the model's forward and backward go through, and in
which order its units really come. Where both is as taken, they agree to the byte, and the tests say
so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.placements import Placements
from shardwise.report.plan import Plan, plan
from shardwise.shard.call import map_tensors

TOKENS = (1, 8)  # of the default batch; parameters and their gradients do not depend on it


def dry_run(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    placements: Placements | str = "zero3",
    *,
    rank: int = 0,
    loss: Callable[[nn.Module], Tensor] | None = None,
    **options: Any,
) -> Plan:
    """As :func:`~shardwise.report.plan.plan`, with the model's own forward on meta tensors.

    The model must be on the meta device, and is left as it was.

    Args:
        rank: which rank of the mesh this process poses as.
        loss: runs forward and returns what ``backward`` starts from; default: the sum of the
            outputs for a batch of token ids.
        options: those of ``plan``.
    """
    if mesh_shape.get("tp", 1) > 1:
        raise ValueError(
            f"dry_run: tp={mesh_shape['tp']}: the model's own forward would need the other ranks "
            f"of tensor parallelism; plan without a dry run"
        )
    loss = loss or _sum_of_outputs
    made = plan(model, mesh_shape, placements, rank=rank, loss=loss, **options)
    return replace(made, source=f"dry run as rank {rank} of {made.mesh.num_ranks}")


def _sum_of_outputs(model: nn.Module) -> Tensor:
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(collect, model(torch.zeros(TOKENS, dtype=torch.int64)))
    if not found:
        raise ValueError(
            f"{type(model).__name__} gave no output that needs a gradient for token ids of shape "
            f"{TOKENS}: pass loss, a function of the model"
        )
    return sum((tensor.float().sum() for tensor in found[1:]), found[0].float().sum())
