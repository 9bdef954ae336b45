# SPDX-License-Identifier: Apache-2.0
"""AdamW for everything that is not a matrix, by torch's kernels on this rank's pieces. In a step
that also clips, one kernel of this library does both in one pass."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from shardwise.kernels import has_triton
from shardwise.optim.gradients import zero_state
from shardwise.optim.rules import range_problems
from shardwise.optim.storage import local_of


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW, bit for bit equal to torch.optim.AdamW on the same shards; ``sw.adamw(...)`` is this
    class.

    ``fused``: torch's one-kernel form. None: used on a GPU, and not on a CPU.
    """

    kind: ClassVar[str] = "elementwise"

    lr: float = 3e-4
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    fused: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        if problems := range_problems(self):
            raise ValueError("sw.adamw(...) cannot work: " + "; ".join(problems))


adamw = AdamWSettings


def new_state(parameter: Tensor, fused: bool) -> dict[str, Any]:
    """A parameter's states before its first step, under torch's names."""
    device = parameter.device if fused else "cpu"
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": zero_state(parameter),
        "exp_avg_sq": zero_state(parameter),
    }


def step(
    group: dict[str, Any], state: dict[Tensor, dict[str, Any]], clip: Tensor | None = None
) -> list[Tensor]:
    """Advance one parameter group; returns the parameters that were written.

    ``clip``: see ``Clip.on_device``; for the fused form only.

    Pieces without elements are left out, because a fused kernel that gets no tensors may still
    write. Their step counter advances all the same, so that checkpoints agree between ranks.
    """
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    updated = [parameter for parameter in stepped if local_of(parameter).numel()]
    empty = [state[p]["step"] for p in stepped if not local_of(p).numel()]
    if empty:  # in one launch: with many ranks most pieces are empty
        torch._foreach_add_(empty, 1.0 if clip is None else [1 - clip[1]] * len(empty))
    if not updated:
        return stepped
    weights = [local_of(parameter) for parameter in updated]
    grads = [local_of(parameter.grad) for parameter in updated]
    averages = [local_of(state[parameter]["exp_avg"]) for parameter in updated]
    squares = [local_of(state[parameter]["exp_avg_sq"]) for parameter in updated]
    steps = [state[parameter]["step"] for parameter in updated]
    if clip is not None and weights[0].device.type == "cuda" and has_triton():
        from shardwise.kernels import adamw as kernel

        if kernel.fits(weights, grads, averages, squares):
            options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
            kernel.step(weights, grads, averages, squares, steps, clip=clip, **options)
            return stepped
    torch_adamw(
        weights,
        [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)],
        averages,
        squares,
        [],
        steps,
        foreach=None,
        fused=group["fused"] or None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=None if clip is None else 1 / clip[0],
        found_inf=None if clip is None else clip[1],
    )
    return stepped
