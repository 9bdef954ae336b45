# SPDX-License-Identifier: Apache-2.0
"""One global gradient norm, and one decision about it on every rank.

    per home    sum of |g|^p over this rank's pieces, float64  --all-reduce over shard axes only-->
    all homes   added up, root taken

Replicas hold the same gradients, so they are not added; ranks that hold different pieces are, each
once (replicas too, where they take turns). So are ranks outside the mesh of experts, which hold
other experts; those outside the mesh of a DTensor hold copies. The sums are float64: the norm, and
with it the clipped gradient, is then the same float32 whatever the sharding. A NaN or an infinity
anywhere makes the norm so on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import comm
from shardwise.optim.gradients import Gradients, gradient_home, gradient_of
from shardwise.optim.storage import Home, local_of
from shardwise.tensor import ShardedTensor

SPREAD = "_shardwise_spread"  # an attribute of parameters of which other ranks hold other experts


class NonFiniteGradient(RuntimeError):  # noqa: N818  (it names what happened)
    """The gradient norm is NaN or infinite, on every rank alike."""


def clip_grad_norm(
    gradients: Gradients,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their global norm is ``max_norm`` at most; the norm before.

    Collective over the axes of all parameters, whether they have gradients or not.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm({max_norm!r}): the norm must be more than 0")
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm(norm_type={norm_type!r}): use 2, 1 or inf")
    gradients.settle()
    norm = grad_norm(gradients.parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteGradient(f"the gradient norm of order {norm_type} is {norm.item()}")
    locals_ = [local_of(p.grad) for p in gradients.parameters if p.grad is not None]
    by_place: dict[Any, list[Tensor]] = {}
    for local in locals_:
        if local.numel():
            by_place.setdefault((local.device, local.dtype), []).append(local)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (device, dtype), members in by_place.items():
        torch._foreach_mul_(members, factor.to(device=device, dtype=dtype))
    return norm


def grad_norm(parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients as one vector, float32, on every rank the same."""
    everywhere = [gradient_home(parameter) for parameter in parameters]
    widest = max(everywhere, key=_num_ranks, default=None)
    homes: dict[Any, tuple[Home, list[Tensor]]] = {}
    device = torch.device("cpu")
    for parameter, home in zip(parameters, everywhere, strict=True):
        apart = _others_hold_others(parameter) and 0 < _num_ranks(home) < _num_ranks(widest)
        members = homes.setdefault((home.key, apart), (home, []))[1]
        device = parameter.device
        grad = gradient_of(parameter)
        if grad is not None:
            members.append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    largest = norm_type == math.inf
    for (_, apart), (home, members) in homes.items():
        value = _partial(members, norm_type, device)
        axes = home.axes
        if apart:  # everybody adds its part of its experts, copies sharing theirs
            assert widest is not None
            axes = widest.every_axis
            value = value if largest else value / home.num_replicas
        for axis in axes:
            # A maximum of gathered values: NCCL's own drops a NaN.
            if largest:
                gathered = value.new_empty(axis.size)
                comm.all_gather(gathered, value.view(1), axis).wait()
                value = gathered.amax()
            else:
                value = value.view(1)
                comm.all_reduce(value, axis).wait()
                value = value.view(())
        total = torch.maximum(total, value) if largest else total + value
    return (total if largest else total.pow(1.0 / norm_type)).float()


def _others_hold_others(parameter: Tensor) -> bool:
    """Whether ranks outside a parameter's mesh hold other experts in its place, and not copies.

    Of torch's DTensors nothing but experts of ours does (``sw.optimizer`` marks them): placements
    say what an axis holds, and ranks beside the mesh (of tensor parallelism) hold copies."""
    return isinstance(parameter, ShardedTensor) or bool(getattr(parameter, SPREAD, False))


def _num_ranks(home: Home | None) -> int:
    return math.prod(home.sizes) if home is not None and home.mesh is not None else 0


def _partial(members: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over local pieces, or their largest element."""
    held = [local for local in members if local.numel()]
    if not held:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [norm.to(device) for norm in torch._foreach_norm(held, norm_type, dtype=torch.float64)]
    stacked = torch.stack(norms)
    return stacked.amax() if norm_type == math.inf else stacked.pow(norm_type).sum()
