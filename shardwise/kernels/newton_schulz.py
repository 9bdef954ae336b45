# SPDX-License-Identifier: Apache-2.0
"""Orthogonalise a batch of matrices of one shape: Triton kernels on CUDA, torch elsewhere.

    orthogonalise(batch, coefficients)   any float batch [n, rows, columns]
    orthogonalise_packed(packed, ...)    what ``momentum.pack`` or ``normalise`` has made (CUDA)

A matrix's bits depend on its values, the shape and the coefficients: never on the rest of the
batch, so an owner of three matrices and an owner of sixty compute the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels import has_triton
from shardwise.kernels.forms import Form, Norm, Polynomial, Step, choose, stages
from shardwise.kernels.packed import Packed

# A batch is cut so that the two X and four Grams of a part fit.
WORKSPACE_BYTES = 6 * 2**30


def orthogonalise(
    batch: Tensor,  # [n, rows, columns]
    coefficients: Sequence[Step],
    *,
    norm: Norm = "frobenius",
    safety: float = 1.0,
    restart: int | None = None,
    form: Form | None = None,
) -> Tensor:
    """[n, rows, columns]: fp16 from the kernels, fp32 from torch (fp64 for fp64).

    ``norm`` and ``safety`` say what X is divided by first; ``restart`` after how many iterations
    the Gram form forms X anew (by default half of them); ``form`` overrides the choice by measured
    cost. A matrix of zeros stays exactly zero, and one with a NaN or infinity gets NaNs.
    """
    polynomial = Polynomial(
        coefficients=tuple(tuple(map(float, step)) for step in coefficients),
        norm=norm,
        safety=safety,
        restart=restart,
    )
    if batch.dim() != 3:
        raise ValueError(
            f"a batch of shape {tuple(batch.shape)}: give [matrices, rows, columns]; "
            "unsqueeze a single matrix, flatten leading dimensions"
        )
    if not batch.is_floating_point():
        raise ValueError(f"a batch of {batch.dtype}: give a floating-point one")
    if batch.numel() == 0:
        return batch.clone()
    if not uses_kernels(batch.device) or batch.dtype == torch.float64:
        return reference(batch, polynomial, form or "direct")
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
    """The result in the layout of ``packed.values``, whose storage is consumed."""
    form = form or choose(packed.rows, packed.columns, polynomial)
    if form == "block":
        from shardwise.kernels.block import newton_schulz_block

        table = coefficient_table(polynomial.coefficients, packed.values.device)
        return newton_schulz_block(packed, polynomial, table)
    from shardwise.kernels import iterate

    return {"direct": iterate.direct, "gram": iterate.gram}[form](packed, polynomial)


@functools.lru_cache(maxsize=64)
def coefficient_table(coefficients: tuple[Step, ...], device: torch.device) -> Tensor:
    """[steps, 6] on the device; kept, so that a step copies nothing from the host.

    A step's last stage, then the one before it (whose square is 1), or zeros.
    """
    rows = []
    for step in coefficients:
        *before, last = stages(step)
        rows.append((*last, *(before[0] if before else (0.0, 0.0, 0.0))))
    return torch.tensor(rows, device=device, dtype=torch.float32)


def uses_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton() and _is_hopper_or_later(device)


@functools.cache
def _is_hopper_or_later(device: torch.device) -> bool:
    # The product kernels load through the copy engine, which came with compute capability 9.0.
    return torch.cuda.get_device_capability(device) >= (9, 0)


def part_size(batch: Tensor, form: Form) -> int:
    rows, columns = batch.shape[1:]
    elements = 2 * rows * columns + (0 if form == "block" else 4 * min(rows, columns) ** 2)
    most = max(1, WORKSPACE_BYTES // (2 * elements))
    parts = -(-len(batch) // most)
    return -(-len(batch) // parts)


# ------------------------------------------------------------------------------- the definition


def reference(batch: Tensor, polynomial: Polynomial, form: Form = "direct") -> Tensor:
    """The definition, matrix by matrix, in fp32 (fp64 for fp64): batching can't change a bit."""
    wide = batch.dtype if batch.dtype == torch.float64 else torch.float32
    iteration = _direct if form == "direct" else _gram
    return torch.stack([_oriented(matrix.to(wide), polynomial, iteration) for matrix in batch])


def _oriented(matrix: Tensor, polynomial: Polynomial, iteration: object) -> Tensor:
    assert callable(iteration)
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT.contiguous() if tall else matrix  # [short, long]
    largest = x.abs().amax()
    if largest == 0:
        return torch.zeros_like(matrix)
    x = x / torch.exp2(torch.floor(torch.log2(largest)))  # so that no square over- or underflows
    x = x / x.norm()
    if polynomial.norm == "schatten4":
        x = x / (x @ x.mT).norm().sqrt()
    result: Tensor = iteration(x / polynomial.safety, polynomial)
    return result.mT.contiguous() if tall else result


def _direct(x: Tensor, polynomial: Polynomial) -> Tensor:
    for a, *rest in polynomial.coefficients:
        x = a * x + _powers(x @ x.mT, rest) @ x
    return x


def _gram(x: Tensor, polynomial: Polynomial) -> Tensor:
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
    gram, q = x @ x.mT, identity
    for step, (a, *rest) in enumerate(polynomial.coefficients):
        if step == polynomial.first_steps("gram"):
            x, q = q @ x, identity
            gram = x @ x.mT
        z = a * identity + _powers(gram, rest)
        q, gram = q @ z, z @ gram @ z
    return q @ x


def _powers(gram: Tensor, coefficients: Sequence[float]) -> Tensor:
    """b·R + c·R² + ..., term by term."""
    power, total = gram, coefficients[0] * gram
    for coefficient in coefficients[1:]:
        power = power @ gram
        total = total + coefficient * power
    return total
