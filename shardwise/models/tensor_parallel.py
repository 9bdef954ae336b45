# SPDX-License-Identifier: Apache-2.0
"""GPT over an axis ``tp``: sequence parallelism between the products, and a loss that never gathers
the vocabulary.

    embedding         words cut           -> hidden [B, T/t, C], a part of every sequence
    block   norm      on this part
            wq wk wv  rows cut (heads)    <- gathered [B, T, C];  attention on H/t heads
            wo        columns cut         -> partial sums, reduce-scattered to [B, T/t, C]
            gate up   rows cut, down columns cut: the same
    norm, head        words cut           <- gathered; logits [B, T, V/t] are not gathered
    loss              per token: a maximum, a sum of exponentials, one logit (three numbers)

torch's ``parallelize_module`` does this. Call ``fully_shard`` over the data-parallel axes after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.core import comm
from shardwise.core.placements import chunk_range
from shardwise.models.gpt import GPT
from shardwise.models.gpt_config import tensor_parallel_problems
from shardwise.shard.found import UNEVEN


def cut_over(model: GPT, mesh: DeviceMesh) -> GPT:
    """Cut the parameters of a model over an axis, in place (collective unless on meta)."""
    problems = tensor_parallel_problems(model.config, mesh.size())
    if problems:
        raise ValueError("tensor parallelism: " + "; ".join(problems))
    heads = {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in _HEAD_NORMS}
    within = {
        "attention_norm": SequenceParallel(use_local_output=True),
        "attention": _gathers((Shard(1), *_OTHERS), (Replicate(), *_OTHERS)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **({f"attention.{name}": style for name, style in heads.items()}),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(use_local_output=True),
        "feed_forward": _gathers((Shard(1),), (Replicate(),)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    if not model.config.qk_norm:
        within = {name: style for name, style in within.items() if name[-6:] not in _HEAD_NORMS}
    for block in model.blocks:
        parallelize_module(block, mesh, within)
    around: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    if model.head is not None:
        around["head"] = ColwiseParallel(use_local_output=False)  # its weight; GPT multiplies
    parallelize_module(model, mesh, around)
    gathered = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )
    parallelize_module(model, mesh, {"norm": gathered})
    model.sequence_parts = mesh.size()
    return model


_HEAD_NORMS = ("q_norm", "k_norm")
_OTHERS = (None, None)  # rotary, mask


def _gathers(here: Any, there: Any) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=here, desired_input_layouts=there)


def planned_tiles(model: nn.Module, tp: int) -> nn.Module:
    """The model for a plan over ``tp`` ranks. A model that ``parallelize_module`` has cut is not
    changed. A GPT becomes a copy on the meta device with the tiles of the first rank. Other models
    raise an error."""
    over = {p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)}
    if over == {tp}:
        return model
    if over or not isinstance(model, GPT):
        found = f"is cut over {sorted(over)} ranks" if over else "has no DTensors"
        raise ValueError(
            f"plan: tp={tp}, but this {type(model).__name__} {found}, so the cut of its parameters "
            f"is unknown. Cut it with parallelize_module over {tp} ranks, or plan a GPT"
        )
    problems = tensor_parallel_problems(model.config, tp)
    if problems:
        raise ValueError("plan: " + "; ".join(problems))
    model = copy.deepcopy(model)
    for name, parameter in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        dim, shape = _CUT.get(path.rpartition(".")[2]), list(parameter.shape)
        if dim is not None:
            shape[dim] = chunk_range(shape[dim], [tp], [0])[1]
        tile = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
        setattr(tile, UNEVEN, dim is not None and parameter.shape[dim] % tp > 0)
        setattr(model.get_submodule(path), last, tile)
    _exchange(model, comm.Axis.pretended("tp", tp, 0, "nccl"))
    return model


_CUT = dict.fromkeys(("wq", "wk", "wv", "gate", "up", "embedding", "head"), 0)
_CUT |= dict.fromkeys(("wo", "down"), 1)


# ------------------------------------------------------------------------------ in a plan

_Move = Callable[[Tensor, comm.Axis], Tensor]


def _exchange(model: GPT, axis: comm.Axis) -> None:
    """Register hooks that send plain meta tensors over ``axis`` where a run sends DTensors."""
    model.sequence_parts, model.words_over = axis.size, axis

    def gathers(module: nn.Module, args: Any, output: Tensor | None = None) -> Any:
        whole = _Moved.apply(args[0] if output is None else output, axis, _gather, _scatter)  # type: ignore[no-untyped-call]
        return (whole, *args[1:]) if output is None else whole

    def scatters(module: nn.Module, args: Any, output: Tensor) -> Any:
        return _Moved.apply(output, axis, _scatter, _gather)  # type: ignore[no-untyped-call]

    def sums(module: nn.Module, args: Any) -> Any:
        return (_Partial.apply(args[0], module.weight, axis),)  # type: ignore[no-untyped-call]

    model.embedding.register_forward_hook(scatters)
    for block in model.blocks:
        for inside, last in ((block.attention, "wo"), (block.feed_forward, "down")):
            inside.register_forward_pre_hook(gathers)  # type: ignore[union-attr]
            getattr(inside, last).register_forward_hook(scatters)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(sums)
    model.norm.register_forward_hook(gathers)


class _Moved(torch.autograd.Function):
    """``there`` in forward and ``back`` in backward: the gradient of a scatter is a gather."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: comm.Axis, there: _Move, back: _Move) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(value, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.back(grad, ctx.axis), None, None, None


class _Partial(torch.autograd.Function):
    """The input of a norm over a part of the sequence, whose weight gets a partial gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, axis: comm.Axis) -> Tensor:
        ctx.axis, ctx.like = axis, weight.to("meta") if weight.requires_grad else None
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.like is not None:
            comm.all_reduce(torch.empty_like(ctx.like), ctx.axis).wait()
        return grad, None, None


def _gather(part: Tensor, axis: comm.Axis) -> Tensor:
    """Gather the parts [B, T/t, C] of all ranks to [B, T, C] as DTensor does: along the first
    dimension, and then a copy."""
    together = part.new_empty(axis.size * part.shape[0], *part.shape[1:])
    comm.all_gather(together, part.contiguous(), axis).wait()
    return torch.cat(together.chunk(axis.size), 1)


def _scatter(whole: Tensor, axis: comm.Axis) -> Tensor:
    """Reduce-scatter the partial sums [B, T, C] to this rank's part [B, T/t, C] of the sum."""
    stacked = torch.cat(whole.chunk(axis.size, 1))
    part = stacked.new_empty(stacked.shape[0] // axis.size, *stacked.shape[1:])
    comm.reduce_scatter(part, stacked, axis).wait()
    return part
