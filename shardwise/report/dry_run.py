# SPDX-License-Identifier: Apache-2.0
"""``dry_run``: a plan whose step runs the model's own forward, on meta tensors.

A plan takes units to run in the order in which they are registered, and every trainable parameter
to get a gradient. A dry run knows: whether the model's forward and backward go through, and in
which order its units really come. Where both is as taken, they agree to the byte, and the tests say
so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.moe import mixtures_of
from shardwise.placements import Placements
from shardwise.precision import Precision
from shardwise.report.forward import own_forward
from shardwise.report.plan import Plan, plan_with
from shardwise.report.planned import Mesh
from shardwise.shard.call import map_tensors
from shardwise.shard.wrapping import GrainChoice

TOKENS = (1, 8)  # of the default batch; parameters and their gradients do not depend on it


def dry_run(
    model: nn.Module,
    mesh_shape: Mapping[str, int],
    placements: Placements | str = "zero3",
    *,
    rank: int = 0,
    loss: Callable[[nn.Module], Tensor] | None = None,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    microbatches: int = 1,
    wrap: Sequence[nn.Module] | None = None,
    reshard_after_forward: bool | int | None = None,
    bucket_mb: float | None = None,
    grain: GrainChoice | None = None,
    memory: int | None = None,
    other_bytes: int = 0,
    name: str | None = None,
) -> Plan:
    """As :func:`~shardwise.report.plan.plan`, with the model's own forward on meta tensors.

    Work is issued as on a CUDA device. The model must be on the meta device, and is left as it
    was.

    Args:
        rank: which rank of the mesh this process poses as.
        loss: runs forward and returns what ``backward`` starts from; default: the sum of the
            outputs for a batch of token ids.
    """
    if mesh_shape.get("tp", 1) > 1:
        raise ValueError(
            f"dry_run: tp={mesh_shape['tp']}: the model's own forward would need the other ranks "
            f"of tensor parallelism; plan without a dry run"
        )
    mesh = Mesh.of(mesh_shape)
    _check(model, mesh, rank)
    made = plan_with(
        partial(own_forward, loss or _sum_of_outputs),
        model,
        mesh_shape,
        placements,
        precision=precision,
        optimizer=optimizer,
        microbatches=microbatches,
        wrap=wrap,
        reshard_after_forward=reshard_after_forward,
        bucket_mb=bucket_mb,
        grain=grain,
        memory=memory,
        other_bytes=other_bytes,
        name=name,
        rank=rank,
        device="cuda",
        in_model=True,
    )
    return replace(made, source=f"dry run as rank {rank} of {mesh.num_ranks}")


def _check(model: nn.Module, mesh: Mesh, rank: int) -> None:
    problems = []
    real = [name for name, value in model.named_parameters() if not value.is_meta]
    if real:
        problems.append(
            f"{len(real)} parameters ('{real[0]}', ...) are not on the meta device: build the "
            f"model under torch.device('meta')"
        )
    if not 0 <= rank < mesh.num_ranks:
        problems.append(f"rank {rank} of a mesh of {mesh.num_ranks}: name one that exists")
    ep = max((layer.experts.ep for layer in mixtures_of(model)), default=1)
    if ep > 1:
        problems.append(
            f"experts are spread over ep={ep}, and rows without values cannot be "
            f"routed: plan without a dry run"
        )
    if problems:
        raise ValueError("dry_run: " + "; ".join(problems))


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
