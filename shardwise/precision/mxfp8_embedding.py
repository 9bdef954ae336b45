# SPDX-License-Identifier: Apache-2.0
"""Rows of a weight in MXFP8, looked up, and their gradient.

::

    forward    ids [5, 0, 5]   codes  [vocab, columns]      -->  rows 5, 0, 5
                               scales [vocab, columns/32]   -->  rows 5, 0, 5     --decode-->  y
    backward   dW = rows of dy, added up by id: the weight is not read, so nothing is gathered

Only the rows that are looked up are decoded, each as it would be in the whole matrix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.precision.mxfp8 import ROW, SIDE, MXFP8Error, Plane, decode
from shardwise.precision.mxfp8_tensor import MXFP8Tensor


def lookup_problem(*, max_norm: float | None, sparse: bool) -> str | None:
    """Which option of an embedding can't hold for a weight in MXFP8; None where all can."""
    if max_norm is not None:
        return (
            f"max_norm={max_norm} rewrites rows of the weight in forward, and codes are made from "
            f"main weights alone: renormalise those after the optimizer's step"
        )
    return "sparse=True: a gradient that is reduced is dense; use sparse=False" if sparse else None


def rows_of(plane: Plane, ids: Tensor) -> Plane:
    """The rows ``ids`` [n] (n a multiple of 32) of a plane of rows or squares: a plane of rows."""
    high, wide = plane.block
    if wide != SIDE:
        raise MXFP8Error(f"blocks {plane.block}: rows are looked up in planes of rows or squares")
    return Plane(
        codes=plane.codes.index_select(0, ids),
        scales=plane.scales.index_select(0, ids if high == 1 else ids // high),
        block=ROW,
    )


def lookup(plane: Plane, ids: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[..., columns] for ids [...]."""
    flat = ids.reshape(-1)
    whole_blocks = F.pad(flat, (0, -flat.numel() % SIDE))
    rows = decode(rows_of(plane, whole_blocks), dtype=dtype)[: flat.numel()]
    return rows.view(*ids.shape, plane.codes.shape[1])


def mxfp8_embedding(
    ids: Tensor,  # [...], integers
    weight: MXFP8Tensor,  # [vocab, columns]
    *,
    parameter: Tensor | None = None,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # [..., columns]
    """``F.embedding`` over a weight in MXFP8.

    Args:
        parameter: whose gradient the weight's is, in its dtype; None for a frozen weight.
        padding_idx: a row that gets no gradient; from the end where it is negative.
        scale_grad_by_freq: divide each row's gradient by how often it was looked up.
        dtype: of the rows, where there is no parameter to say.
    """
    vocab = weight.shape[0]
    problems = []
    if ids.dtype not in (torch.int32, torch.int64):
        problems.append(f"ids of {ids.dtype}: row numbers are int32 or int64")
    if ids.device != weight.device:
        problems.append(f"ids on {ids.device}, the weight on {weight.device}")
    if padding_idx is not None and not -vocab <= padding_idx < vocab:
        problems.append(f"padding_idx={padding_idx}: the weight has {vocab} rows")
    if parameter is not None and parameter.shape != weight.shape:
        problems.append(
            f"a parameter of shape {tuple(parameter.shape)} for a weight of {tuple(weight.shape)}"
        )
    if problems:
        raise MXFP8Error("; ".join(problems))
    if parameter is None:
        return lookup(weight.plane("forward"), ids, dtype=dtype)
    padding = -1 if padding_idx is None else padding_idx % vocab
    return _Embedding.apply(parameter, ids, weight, padding, scale_grad_by_freq)  # type: ignore[no-any-return, no-untyped-call]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, ids: Tensor, weight: MXFP8Tensor, padding_idx: int, scale: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.options = weight.shape[0], padding_idx, scale
        return lookup(weight.plane("forward"), ids, dtype=parameter.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        # What F.embedding's own backward calls: the gradient has its bits.
        summed = torch.ops.aten.embedding_dense_backward(grad, ids, *ctx.options)
        return summed, None, None, None, None
