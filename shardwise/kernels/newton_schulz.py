# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a batch of matrices of one shape: in torch, or by Triton kernels on CUDA.

    orthogonalise(batch, polynomial)     any float batch [n, rows, columns]
    orthogonalise_packed(packed, ...)    a batch that ``momentum.pack`` or ``normalise`` made (CUDA)
    iterate(matrices, polynomial, ...)   the iteration in torch, the definition of the kernels

X = U S Vᵀ becomes U Vᵀ. Each step applies an odd polynomial a s + b s³ + c s⁵ to every singular
value; after a few steps all are near one. The iteration works on the short side m: a tall matrix is
transposed.

    direct    R = X Xᵀ    B = b R + c R R          X = a X + B X
    gram      R = X Xᵀ    Z = a I + b R + c R R    Q = Z Q    R = Z R Z      and Q X at the end

A step up to s⁹ takes one product more, for Z = e (R R + f R + g I)² + h R + k I, and does nearly as
much as two steps. The Gram form works on m x m matrices alone. Rounding errors grow in R, so the
Gram form restarts (X = Q X, Q = I) half way.

The bits of a result depend on the matrix and the polynomial, never on the rest of the batch: an
owner of three matrices and an owner of sixty compute the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.kernels import has_triton
from shardwise.kernels.forms import Form, Polynomial, Step, choose, stages
from shardwise.kernels.packed import Packed

# A batch is cut into parts whose two X and four Grams fit into this memory.
WORKSPACE_BYTES = 6 * 2**30


def orthogonalise(batch: Tensor, polynomial: Polynomial, form: Form | None = None) -> Tensor:
    """The orthogonal factors [n, rows, columns]: fp16 by kernels, fp32 by torch (fp64 for fp64).

    ``form`` overrides the choice by measured cost. A matrix of zeros stays exactly zero, and a
    matrix with a NaN or infinity becomes NaN.
    """
    if batch.dim() != 3:
        raise ValueError(
            f"a batch of shape {tuple(batch.shape)}: give [matrices, rows, columns]; "
            "unsqueeze a single matrix, flatten leading dimensions"
        )
    if not batch.is_floating_point():
        raise ValueError(f"a batch of {batch.dtype}: give a floating-point batch")
    if batch.numel() == 0:
        return batch.clone()
    if not uses_kernels(batch.device) or batch.dtype == torch.float64:
        return one_by_one(batch, polynomial, form or "direct")
    form = form or choose(batch.shape[1], batch.shape[2], polynomial)
    from shardwise.kernels.normalise import normalise

    parts = batch.split(part_size(batch, form))
    if len(parts) == 1:
        packed = normalise(batch)
        return packed.unpadded(orthogonalise_packed(packed, polynomial, form))
    out = torch.empty(batch.shape, device=batch.device, dtype=torch.float16)
    for target, part in zip(out.split(len(parts[0])), parts, strict=True):
        packed = normalise(part)
        target.copy_(packed.unpadded(orthogonalise_packed(packed, polynomial, form)))
    return out


def orthogonalise_packed(
    packed: Packed, polynomial: Polynomial, form: Form | None = None
) -> Tensor:
    """The result in the layout of ``packed.values``, whose memory is overwritten."""
    form = form or choose(packed.rows, packed.columns, polynomial)
    if form == "block":
        from shardwise.kernels.block import newton_schulz_block

        table = coefficient_table(polynomial.coefficients, packed.values.device)
        return newton_schulz_block(packed, polynomial, table)
    from shardwise.kernels import iterate

    return {"direct": iterate.direct, "gram": iterate.gram}[form](packed, polynomial)


@functools.lru_cache(maxsize=64)
def coefficient_table(coefficients: tuple[Step, ...], device: torch.device) -> Tensor:
    """Coefficients [steps, 6] on the device; cached, so that a step copies nothing from the host.

    A row holds the last stage of a step, then the stage before it (whose square is 1), or zeros.
    """
    rows = []
    for step in coefficients:
        *before, last = stages(step)
        rows.append((*last, *(before[0] if before else (0.0, 0.0, 0.0))))
    return torch.tensor(rows, device=device, dtype=torch.float32)


def uses_kernels(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    return device.type == "cuda" and has_triton() and _is_hopper_or_later(device)


@functools.cache
def _is_hopper_or_later(device: torch.device) -> bool:
    # The product kernels load through the copy engine, which needs compute capability 9.0.
    return torch.cuda.get_device_capability(device) >= (9, 0)


def part_size(batch: Tensor, form: Form) -> int:
    """The number of matrices in each part of a batch."""
    rows, columns = batch.shape[1:]
    elements = 2 * rows * columns + (0 if form == "block" else 4 * min(rows, columns) ** 2)
    most = max(1, WORKSPACE_BYTES // (2 * elements))
    parts = -(-len(batch) // most)
    return -(-len(batch) // parts)


# ------------------------------------------------------------------------------- in torch


def one_by_one(
    batch: Tensor, polynomial: Polynomial, form: Form = "direct", dtype: torch.dtype | None = None
) -> Tensor:
    """:func:`iterate` for each matrix alone, because the rounding of batched products may depend on
    the size of the batch."""
    return torch.stack([iterate(matrix, polynomial, form, dtype) for matrix in batch])


def iterate(
    matrices: Tensor, polynomial: Polynomial, form: Form, dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise ``[..., rows, cols]``, with products in ``dtype``; fp32 out (fp64 for fp64)."""
    wide = torch.promote_types(matrices.dtype, torch.float32)
    tall = matrices.shape[-2] > matrices.shape[-1]
    # Contiguous, because the rounding of products depends on the strides.
    x = (matrices.mT if tall else matrices).contiguous().to(wide)
    x, gram = _normalised(x, polynomial, dtype or wide)
    x = (
        iterate_direct(x, gram, polynomial)
        if form == "direct"
        else iterate_gram(x, gram, polynomial)
    )
    return (x.mT if tall else x).to(wide).contiguous()


def _normalised(x: Tensor, polynomial: Polynomial, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """X divided by a bound of its largest singular value, in new memory, and its Gram.

    X is first scaled by a power of two, which is exact: squares of tiny gradients would be 0.
    """
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-100, 126)  # 0 for 0; 2^-exponent exists
    x = torch.ldexp(x, -exponent)
    if polynomial.norm == "frobenius":
        bound = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * polynomial.safety
        x = (x / torch.where(bound == 0, 1.0, bound)).to(dtype)
        return x, x @ x.mT
    gram = x @ x.mT  # [..., m, m]
    bound = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).sqrt() * polynomial.safety
    bound = torch.where(bound == 0, 1.0, bound)
    return (x / bound).to(dtype), (gram / bound**2).to(dtype)


def iterate_direct(x: Tensor, gram: Tensor, polynomial: Polynomial) -> Tensor:
    """The direct form from a normalised ``x`` [..., m, n] and its Gram."""
    for index, step in enumerate(polynomial.coefficients):
        if index:
            gram = x @ x.mT
        x = step[0] * x + _evaluate(gram, step, constant=False) @ x
    return x


def iterate_gram(
    x: Tensor,
    gram: Tensor,
    polynomial: Polynomial,
    gram_of: Callable[[Tensor], Tensor] = lambda x: x @ x.mT,
) -> Tensor:
    """The Gram form from a normalised ``x`` [..., m, n] and its Gram."""
    product: Tensor | None = None  # the product of the polynomials since x was formed
    for number, step in enumerate(polynomial.coefficients, start=1):
        z = _evaluate(gram, step)
        product = z if product is None else z @ product
        if number == polynomial.steps:
            break
        if number == polynomial.first_steps("block"):
            x, product = product @ x, None
            gram = gram_of(x)
        else:
            gram = z @ (gram @ z)
    assert product is not None, "a polynomial has one step or more"
    return product @ x


def _evaluate(gram: Tensor, step: Step, *, constant: bool = True) -> Tensor:
    """a I + b R + c R R (+ d R³ + e R⁴) of ``gram`` [..., m, m], or the same without a I."""
    value = gram
    for shift, linear, square in stages(step, constant=constant):
        value = linear * gram + square * (value @ value) if square else linear * gram
        if shift:
            value.diagonal(dim1=-2, dim2=-1).add_(shift)
    return value
