# SPDX-License-Identifier: Apache-2.0
"""Reductions to one value: norms, sums and extremes of tensors that are cut over ranks.

    rank 0   piece  ->  partial \\
    rank 1   piece  ->  partial  >  one collective per sharded axis  ->  the value, on every rank
    rank 2   (none) ->  neutral /

Partials travel in float64 (or int64): the square of a float32 norm is exact there, and
half-precision partials would be rounded, or overflow, before they are combined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.cut import Cut
from shardwise.tensor_whole import whole


def norms(
    locals_: Sequence[Tensor],
    cuts: Sequence[Cut | None],
    order: float,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """The norm of each whole tensor; tensors without a cut are whole already.

    One collective per sharded axis serves the whole list. Meshes come in order of first appearance,
    which is the same on every rank.
    """
    result: list[Any] = [None] * len(locals_)
    alone: list[int] = []
    meshes: dict[Any, list[int]] = {}
    for index, cut in enumerate(cuts):
        if cut is None or not cut.norm_axes:
            alone.append(index)
        else:
            meshes.setdefault((cut.mesh, cut.norm_axes), []).append(index)
    if alone:
        found = torch._foreach_norm([locals_[index] for index in alone], order, dtype=dtype)
        for index, norm in zip(alone, found, strict=True):
            result[index] = norm if cuts[index] is None else whole(norm)
    for (_, axes), members in meshes.items():
        cut = cuts[members[0]]
        assert cut is not None
        partials = _partial_norms([locals_[index] for index in members], order)
        if order == math.inf:
            values = cut.reduce(partials, "max", axes)
        elif order == -math.inf:
            values = cut.reduce(partials, "min", axes)
        elif order == 0:
            values = cut.reduce(partials, "sum", axes)
        else:
            values = cut.reduce(partials.pow_(order), "sum", axes).pow_(1 / order)
        targets = [dtype or locals_[index].dtype.to_real() for index in members]
        if len(set(targets)) == 1:
            values = values.to(targets[0])
        for index, norm, target in zip(members, values.unbind(), targets, strict=True):
            result[index] = whole(norm.to(target))
    return result


def _partial_norms(locals_: Sequence[Tensor], order: float) -> Tensor:
    """The norm of each local piece, float64; what changes nothing where a piece is empty."""
    neutral = math.inf if order < 0 else 0.0
    held = [local for local in locals_ if local.numel()]
    if not held:
        device = locals_[0].device
        return torch.full((len(locals_),), neutral, dtype=torch.float64, device=device)
    narrow = any(local.dtype.itemsize < 4 for local in held)
    found = torch._foreach_norm(held, order, dtype=torch.float32 if narrow else None)
    packed = torch.stack([norm.double() for norm in found] if narrow else found).double()
    if len(held) == len(locals_):
        return packed
    norms = packed.new_full((len(locals_),), neutral)
    positions = [index for index, local in enumerate(locals_) if local.numel()]
    norms[torch.tensor(positions, device=norms.device)] = packed
    return norms


def whole_value(name: str, local: Tensor, cut: Cut, dtype: torch.dtype | None) -> Tensor:
    """``sum``, ``mean``, ``max``, ``amin``, ``any``, ... of the whole tensor, as a plain tensor."""
    floating = local.is_floating_point() or (dtype is not None and dtype.is_floating_point)
    wide = torch.float64 if floating else torch.int64
    op: Literal["sum", "max", "min"] = "sum"
    if name in ("sum", "mean"):
        partial = local.sum(dtype=wide)
        dtype = dtype or (local.dtype if floating else torch.int64)
        if name == "mean" and not floating:
            raise ValueError(f"mean of '{cut.name}' in {local.dtype}: give a floating dtype")
    elif name in ("any", "all", "count_nonzero"):
        partial = torch.count_nonzero(local)
    else:
        op, dtype = ("max" if name.endswith("max") else "min"), local.dtype
        partial = _extreme(local, op, wide)
    total = cut.reduce(partial.reshape(1), op)[0]
    if name == "any":
        return whole(total > 0)
    if name == "all":
        return whole(total == cut.numel)
    if name == "mean":
        total = total / cut.numel
    return whole(total if dtype is None else total.to(dtype))


def _extreme(local: Tensor, op: str, wide: torch.dtype) -> Tensor:
    if local.numel():
        return (local.amax() if op == "max" else local.amin()).to(wide)
    if wide.is_floating_point:
        neutral: float = -math.inf if op == "max" else math.inf
    else:
        neutral = torch.iinfo(wide).min if op == "max" else torch.iinfo(wide).max
    return torch.full((), neutral, dtype=wide, device=local.device)
