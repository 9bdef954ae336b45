# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits whose vocabulary is cut over ranks (tensor parallelism).

rank 0   logits of words 0 to 2     max, sum of exp, logit of the target or 0
rank 1   logits of words 3 to 5     max, sum of exp, logit of the target or 0
         -> log(sum over ranks) - (target's logit), per token; no rank ever has a row of V logits
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shardwise import comm
from shardwise.mesh import Ranks
from shardwise.placements import chunk_range

IGNORED = -100  # a target that is not scored


def cut_cross_entropy(
    logits: Tensor, targets: Tensor, z_coefficient: float = 0.0, axis: comm.Axis | None = None
) -> Tensor:
    """The mean over scored targets, in fp32; 0, not nan, where no target is scored (collective).

    ``logits``: a DTensor [..., V] whose last dimension is cut over the one axis of its mesh, or the
    first of the plain parts that ``axis`` cuts it into; ``z_coefficient``: weight of the squared
    logarithm of the softmax's denominator.
    """
    first = 0
    if isinstance(logits, DTensor):
        [axis], [placement] = Ranks(logits.device_mesh).axes, logits.placements
        assert placement.is_shard(logits.ndim - 1), f"the vocabulary is {placement}"
        first, _ = chunk_range(logits.shape[-1], [axis.size], [axis.rank])
        logits = logits.to_local()
    assert axis is not None
    rows, answers = logits.flatten(0, -2).float(), targets.flatten()
    losses = _CutVocabulary.apply(rows, answers, first, axis, z_coefficient)  # type: ignore[no-untyped-call]
    return losses.sum() / (answers != IGNORED).sum().clamp(min=1)  # type: ignore[no-any-return]


class _CutVocabulary(torch.autograd.Function):
    """The loss of every token, [N], of this rank's columns [N, V/t], which begin at ``first``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, answers: Tensor, first: int, axis: comm.Axis, z_coefficient: float
    ) -> Tensor:
        largest = rows.amax(-1)
        comm.all_reduce(largest, axis, "max").wait()  # a NaN that is lost here comes in the sum
        shifted = rows - largest[:, None]
        scored = answers != IGNORED
        at = answers - first
        here = scored & (at >= 0) & (at < rows.shape[1])
        at = at.clamp(0, rows.shape[1] - 1)[:, None]
        mine = torch.where(here, shifted.gather(1, at)[:, 0], 0.0)
        chances = shifted.exp_()  # shifted is read no more
        both = torch.stack((chances.sum(-1), mine))
        comm.all_reduce(both.view(-1), axis).wait()
        chances.div_(both[0][:, None])
        denominator = both[0].log() + largest  # a logarithm
        ctx.save_for_backward(chances, at, here, scored * (1 + 2 * z_coefficient * denominator))
        losses = both[0].log() - both[1] + z_coefficient * denominator.square()
        return losses.where(scored, 0.0)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        chances, at, here, weights = ctx.saved_tensors
        found = chances * (grad * weights)[:, None]
        found.scatter_add_(1, at, -(grad * here)[:, None])
        return found, None, None, None, None
