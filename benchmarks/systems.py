# SPDX-License-Identifier: Apache-2.0
"""What is compared, by name: no wrapping, torch DDP, torch FSDP2, and this library's four stages.

A system is one function that takes a model with ``blocks`` and returns the module to call. All of
them get the same mesh, the same precision and the same plain ``torch.optim.AdamW(fused=True)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[[nn.Module, DeviceMesh, MixedPrecisionPolicy], nn.Module]


def wrap_none(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    return model


def wrap_ddp(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    # Grads as views of the buckets: DDP at its best, not at its default.
    return DistributedDataParallel(
        model, process_group=mesh.get_group(), gradient_as_bucket_view=True
    )


def wrap_fsdp2(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def wrap_zero(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    *,
    stage: int,
    memory: str = "caching",
) -> nn.Module:
    # Imported here: torch's systems can be measured without this library.
    import shardwise as sw

    for module in (*model.blocks, model):  # type: ignore[operator]
        sw.fully_shard(
            module, mesh=mesh, placements=sw.zero(stage), mp_policy=policy, memory=memory
        )
    return model


SYSTEMS: dict[str, Wrap] = {
    "none": wrap_none,
    "ddp": wrap_ddp,
    "fsdp2": wrap_fsdp2,
    "zero0": partial(wrap_zero, stage=0),
    "zero1": partial(wrap_zero, stage=1),
    "zero2": partial(wrap_zero, stage=2),
    "zero3": partial(wrap_zero, stage=3),
    "zero3_trace": partial(wrap_zero, stage=3, memory="trace"),
}
TITLES = {
    "none": "no wrapping",
    "ddp": "torch DDP",
    "fsdp2": "torch FSDP2",
    **{f"zero{stage}": f"shardwise zero({stage})" for stage in range(4)},
    "zero3_trace": 'shardwise zero(3), memory="trace"',
}
BASELINE = "fsdp2"

FULL_PRECISION = MixedPrecisionPolicy()
BF16_COMPUTE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def autocast_for(
    system: str, device: torch.device, policy: MixedPrecisionPolicy
) -> contextlib.AbstractContextManager[object]:
    """Systems that know no precision policy compute in its dtype by autocast."""
    if policy.param_dtype is not None and system in ("none", "ddp"):
        return torch.autocast(device.type, dtype=policy.param_dtype)
    return contextlib.nullcontext()
