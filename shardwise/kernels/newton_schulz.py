# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a batch of matrices of one shape: in torch, or by Triton kernels on CUDA.

X = U S Vᵀ becomes U Vᵀ. Each step applies an odd polynomial a s + b s³ + c s⁵ (or up to s⁹) to
every singular value; after a few steps all are near one. The Gram form works on the short side m:

    R = X Xᵀ    Z = a I + b R + c R R    Q = Z Q    R = Z R Z    and X = Q X half way and at the end

The bits of a result depend on the matrix and the polynomial, never on the rest of the batch: an
owner of three matrices and an owner of sixty compute the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernels import has_triton
from shardwise.kernels.packed import Packed
from shardwise.kernels.polynomials import Polynomial, Step, stages


def orthogonalise(batch: Tensor, polynomial: Polynomial) -> Tensor:
    """The orthogonal factors of ``batch`` [n, rows, columns]: fp16 by kernels, else fp32 (fp64 for
    fp64). A matrix of zeros stays zero, and a matrix with a NaN or infinity becomes NaN."""
    if batch.ndim != 3 or not batch.is_floating_point():
        raise ValueError(
            f"a batch of shape {tuple(batch.shape)} and {batch.dtype}: give a floating-point batch "
            f"[matrices, rows, columns]; unsqueeze a single matrix"
        )
    if batch.numel() == 0:
        return batch.clone()
    if batch.device.type != "cuda" or batch.dtype == torch.float64:
        # Rounding of batched products on a CPU depends on the size of the batch.
        return torch.stack([iterate(matrix, polynomial) for matrix in batch])
    if not uses_kernels(batch.device):
        return iterate(batch, polynomial, torch.float16)
    from shardwise.kernels.muon import normalise

    packed = normalise(batch)
    return packed.unpadded(orthogonalise_packed(packed, polynomial))


def orthogonalise_packed(packed: Packed, polynomial: Polynomial) -> Tensor:
    """The result in the layout of ``packed.values``, whose memory is overwritten."""
    from shardwise.kernels.iterate import iterate

    return iterate(packed, polynomial)


def uses_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return device.type == "cuda" and has_triton() and _is_hopper_or_later(device)


@functools.cache
def _is_hopper_or_later(device: torch.device) -> bool:
    # The product kernels load through the copy engine, which needs compute capability 9.0.
    return torch.cuda.get_device_capability(device) >= (9, 0)


# ------------------------------------------------------------------------------- in torch


def iterate(
    matrices: Tensor,
    polynomial: Polynomial,
    dtype: torch.dtype | None = None,
    *,
    tall: bool | None = None,
    reduced: Callable[[Tensor, str], Tensor] = lambda tensor, operation: tensor,
) -> Tensor:
    """Orthogonalise ``[..., rows, cols]``, with products in ``dtype``; fp32 out (fp64 for fp64).
    The definition of the kernels.

    Of blocks of matrices, ``tall`` says that they are rows, and ``reduced`` gives the "sum" of
    Gram matrices, and the "max", over all blocks of a matrix."""
    wide = torch.promote_types(matrices.dtype, torch.float32)
    tall = matrices.shape[-2] > matrices.shape[-1] if tall is None else tall
    # Contiguous, because the rounding of products depends on the strides.
    x = (matrices.mT if tall else matrices).contiguous().to(wide)
    # A power of two scales exactly. Without it, squares of tiny gradients would be 0.
    largest = reduced(x.abs().amax(dim=(-2, -1)), "max")
    exponent = torch.frexp(largest).exponent.clamp(-100, 126)  # 0 for 0; 2^-exponent exists
    x = torch.ldexp(x, -exponent[..., None, None])
    gram = reduced(x @ x.mT, "sum")
    # A bound of the largest singular value; 1 for zeros.
    if polynomial.norm == "schatten4":
        bound = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).sqrt()
    else:  # the trace of X X' is the sum of all squares
        bound = gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()[..., None, None]
    bound = torch.where(bound == 0, 1.0, bound * polynomial.safety)
    x, gram = (x / bound).to(dtype or wide), (gram / bound**2).to(dtype or wide)
    product: Tensor | None = None  # the product of the polynomials since x was formed
    for number, step in enumerate(polynomial.coefficients, start=1):
        z = _evaluate(gram, step)
        product = z if product is None else z @ product
        if number in (polynomial.first_steps, polynomial.steps):
            x, product = product @ x, None
            gram = gram if number == polynomial.steps else reduced(x @ x.mT, "sum")
        else:
            gram = z @ (gram @ z)
    return (x.mT if tall else x).to(wide).contiguous()


def _evaluate(gram: Tensor, step: Step) -> Tensor:
    """a I + b R + c R R (+ d R³ + e R⁴) of ``gram`` [..., m, m]."""
    value = gram
    for shift, linear, square in stages(step):
        value = linear * gram + square * (value @ value) if square else linear * gram
        if shift:
            value.diagonal(dim1=-2, dim2=-1).add_(shift)
    return value
