# SPDX-License-Identifier: Apache-2.0
"""Gradients of an optimizer's parameters: where they are stored, and their norm.

**Where.** A gradient and its optimizer states are stored like the weight, except where replicas
divide the matrices between them (division.py). The optimizer decides which replica has which
elements (replicas.py) and sets ``Backing.divisions``. From the next backward on, gradients are
reduced accordingly: a rank of another replica has an empty piece.

**Norm.** Float64 sums of |g|^p over this rank's pieces are all-reduced over the axes whose ranks
store different elements. The sums have another order for another sharding, which in float64 nearly
never changes the float32 norm. Replicas store the same gradients and are not added. Ranks outside
the mesh of experts store other experts and are added. Ranks outside the mesh of a DTensor store
copies and are not added. A NaN or an infinity on any rank makes the norm so on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.core import comm
from shardwise.core.compat import GRAD
from shardwise.core.cut import Cut, reduced
from shardwise.core.division import Division
from shardwise.core.hooks import refuse_unreduced
from shardwise.core.tensor import ShardedTensor
from shardwise.core.tensor_whole import gathered
from shardwise.optim.storage import local_of, sharding_of
from shardwise.words import quoted

# Set by sw.optimizer on parameters of experts: the axis whose ranks store other experts, or True if
# there is no such axis.
OTHERS_ELSEWHERE = "_shardwise_others_elsewhere"


class NonFiniteGradient(RuntimeError):  # noqa: N818  (it names what happened)
    """The gradient norm is NaN or infinite, on every rank alike."""


# ------------------------------------------------------------------------------ where


def division_of(parameter: Tensor) -> Division | None:
    """The elements that each replica updates; None: every replica updates the whole parameter."""
    if not isinstance(parameter, ShardedTensor) or parameter.buffer is None:
        return None
    return parameter.buffer.divisions.get(parameter.cut.index)


def divide(parameter: Tensor, division: Division | None) -> None:
    """Have the gradients of a parameter reduced to the replicas that need them; None: to all.

    Collective if a gradient with another division exists, which is brought to all replicas.
    """
    buffer = parameter.buffer if isinstance(parameter, ShardedTensor) else None
    if buffer is None or division_of(parameter) == division:
        return
    assert isinstance(parameter, ShardedTensor)
    index, others = parameter.cut.index, buffer.divisions.items()
    buffer.divisions = {key: value for key, value in others if key != index}
    if division is not None:
        buffer.divisions[index] = division
    grad = GRAD.__get__(parameter)
    if isinstance(grad, ShardedTensor) and grad.cut.division is not None:
        GRAD.__set__(parameter, torch.zeros_like(parameter).copy_(grad))


def state_cut(parameter: ShardedTensor) -> Cut:
    """The cut of a parameter's gradient and optimizer states."""
    division = division_of(parameter)
    return parameter.cut if division is None else parameter.cut.divided(division)


def zero_state(parameter: Tensor) -> Tensor:
    """An optimizer state of zeros, stored like the parameter's gradient."""
    if isinstance(parameter, ShardedTensor):
        cut = state_cut(parameter)
        return ShardedTensor(local_of(parameter).new_zeros(cut.local_shape), cut)
    with torch.no_grad():
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)


@torch.no_grad()
def moved_state(parameter: Tensor, state: Tensor) -> Tensor:
    """The state, stored like :func:`zero_state` (collective if it must move)."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(state, ShardedTensor):
        return state
    return state if state_cut(parameter).matches(state.cut) else zero_state(parameter).copy_(state)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """This rank's piece of the gradient, for the elements that this rank updates."""
    grad = parameter.grad
    if not isinstance(parameter, ShardedTensor) or not isinstance(grad, ShardedTensor):
        return None if grad is None else local_of(grad)
    return state_cut(parameter).within(grad.cut, grad._local_tensor)


def place_gradients(parameters: Sequence[Tensor]) -> None:
    """Store gradients where the states of their parameters are stored (collective for those that
    the user set, or that were reduced to another replica; those of a backward lie there)."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(parameter, ShardedTensor) and isinstance(grad, ShardedTensor):
            if not state_cut(parameter).is_part_of(grad.cut):
                parameter.grad = torch.empty_like(parameter).copy_(grad)
        elif isinstance(parameter, ShardedTensor) and grad is not None:
            whole = gathered(grad) if isinstance(grad, DTensor) else grad
            parameter.grad = ShardedTensor(parameter.cut.take(whole).contiguous(), parameter.cut)
        elif not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
            continue
        elif grad.placements != parameter.placements:  # tensor parallelism left partial sums
            parameter.grad = grad.redistribute(placements=parameter.placements)


def widen_gradients(parameters: Sequence[Tensor]) -> None:
    """Convert gradients that are narrower than their weights (``Precision.gradients``) to the
    weights' dtype, for steps without a kernel that reads narrow gradients."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.dtype != parameter.dtype:
            parameter.grad = grad.to(parameter.dtype)


# ------------------------------------------------------------------------------ norm


@dataclass(frozen=True, eq=False)
class Clip:
    """A clip to apply: the norm of all gradients, and the largest norm allowed."""

    norm: Tensor
    max_norm: float
    parts: list[tuple[Tensor, Tensor]]  # (parameter, norm of this rank's piece of its gradient)

    @property
    def factor(self) -> Tensor:
        return (self.max_norm / (self.norm + 1e-6)).clamp(max=1.0)

    def on_device(self) -> Tensor:
        """[2] fp32, for kernels: the factor of the gradients; and 1 if the norm is not finite, so
        that the step must change nothing, else 0."""
        return torch.stack([self.factor, (~torch.isfinite(self.norm)).float()])

    def refuse_nonfinite(self, name_of: Callable[[Tensor], str]) -> None:
        """Raise, on every rank alike, if the norm is not finite (the host waits for it)."""
        if bool(torch.isfinite(self.norm)):
            return
        broken = [name_of(parameter) for parameter, norm in self.parts if not norm.isfinite()]
        raise NonFiniteGradient(
            f"the gradient norm is {self.norm.item()}; on this rank gradients of "
            f"{quoted(broken) or 'no parameter'} are not finite. A parameter that has a gradient "
            f"on some ranks only is NaN on purpose, as experts are that got no token on one rank: "
            f"wrap with unused_parameters='zeros'. sw.debug(model) names the ranks"
        )

    def scale(self, parameters: Sequence[Tensor]) -> None:
        """Scale the gradients in place."""
        widen_gradients(parameters)
        by_kind: dict[Any, list[Tensor]] = {}
        for grad in (parameter.grad for parameter in parameters):
            if grad is not None and (local := local_of(grad)).numel():
                by_kind.setdefault((local.device, local.dtype), []).append(local)
        for (device, dtype), members in by_kind.items():
            torch._foreach_mul_(members, self.factor.to(device=device, dtype=dtype))


def measure_clip(parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Clip:
    """The clip that brings the global norm of the gradients, as one vector, to at most
    ``max_norm``. Collective over the axes of all parameters, whether they have gradients or not."""
    if not max_norm > 0 or not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm(max_norm={max_norm!r}, norm_type={norm_type!r}): both are more than 0"
        )
    refuse_unreduced(parameters, f"clip_grad_norm({max_norm})")
    place_gradients(parameters)
    # (parameter, gradient) by the axes to add over, and by the number of copies that are added.
    members_of: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    widest = max(parameters, key=_num_ranks, default=None)
    device = torch.device("cpu")
    for parameter in parameters:
        members = members_of.setdefault(_axes_and_copies(parameter, widest), [])
        device, grad = parameter.device, gradient_of(parameter)
        if grad is not None:
            members.append((parameter, grad))
    largest = norm_type == math.inf
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts: list[tuple[Tensor, Tensor]] = []
    for (axes, copies), members in members_of.items():
        value = torch.zeros_like(total)
        if held := [(parameter, grad) for parameter, grad in members if grad.numel()]:
            norms = torch._foreach_norm([grad for _, grad in held], norm_type, dtype=torch.float64)
            stacked = torch.stack([norm.to(device) for norm in norms])
            value = stacked.amax() if largest else stacked.pow(norm_type).sum() / copies
            parts += zip((parameter for parameter, _ in held), stacked.unbind(), strict=True)
        value = reduced(value.view(1), "max" if largest else "sum", axes).view(())
        total = torch.maximum(total, value) if largest else total + value
    norm = (total if largest else total.pow(1.0 / norm_type)).float()
    return Clip(norm, max_norm, parts)


def _axes_and_copies(parameter: Tensor, widest: Tensor | None) -> tuple[tuple[comm.Axis, ...], int]:
    """The axes over which the norm of a gradient is added, and how many copies of it are added.

    Ranks outside the mesh of experts store other experts. For torch's DTensors this is known of our
    experts alone, which ``sw.optimizer`` marks: ranks outside a mesh of tensor parallelism store
    copies."""
    others: Any
    if isinstance(parameter, ShardedTensor):
        axes, others = state_cut(parameter).axes, parameter.cut.ranks.others or True
    else:
        axes = sharding_of(parameter).cutting_axes
        others = getattr(parameter, OTHERS_ELSEWHERE, False)
    if isinstance(others, comm.Axis):
        return (*axes, others), 1
    assert widest is not None
    if others and 0 < _num_ranks(parameter) < _num_ranks(widest):
        # Add over all ranks, which include the copies of each piece.
        sharding = sharding_of(parameter)
        copies = 1 if division_of(parameter) else sharding.count(sharding.replicated)
        return sharding_of(widest).axes, copies
    return axes, 1


def _num_ranks(parameter: Tensor) -> int:
    """The number of ranks that a parameter is sharded or replicated over by data parallelism."""
    if isinstance(parameter, ShardedTensor):
        return parameter.cut.mesh.size()
    return math.prod(sharding_of(parameter).sizes) if isinstance(parameter, DTensor) else 0
