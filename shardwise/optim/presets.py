# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz for the optimizer: presets, their costs, and the choice of kernels or torch.

kernels/newton_schulz.py contains the iteration. On a CPU each matrix is computed alone, in fp32. On
a GPU a batch goes through the kernels, or through batched products if Triton is missing or the user
chose a form. In both cases the result for a matrix depends on that matrix alone.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from shardwise.kernels.forms import Polynomial, Step, flop, milliseconds
from shardwise.kernels.newton_schulz import iterate, one_by_one, orthogonalise, uses_kernels

Form = Literal["auto", "direct", "gram"]
DEFAULT = "nonic"


def _with_margin(steps: tuple[Step, ...], margin: float) -> tuple[Step, ...]:
    """The polynomials of s / margin, so that rounding may push s slightly above one."""
    return tuple(
        tuple(value / margin ** (2 * power + 1) for power, value in enumerate(step))
        for step in steps
    )


_POLAR_EXPRESS: tuple[Step, ...] = (
    (8.28721, -23.59589, 17.30039),
    (4.10706, -2.94785, 0.54484),
    (3.94869, -2.90890, 0.55182),
    (3.31842, -2.48849, 0.51005),
    (2.30065, -1.66890, 0.41881),
)
# The best polynomials of degrees 5, 9, 5 and 9, one after
# another, for singular values from 0.0015 to 1 (Polar Express: five of degree 5, from 0.001). In
# this order the Gram form advances R with steps of degree 5 alone. Each step of degree 9 ends a run
# of steps: X is formed from R next, so the rounding errors of R are not magnified further.
_NONIC: tuple[Step, ...] = (
    (8.270078, -23.547102, 17.264619),
    (7.010924, -16.183297, 13.341046, -4.295549, 0.470156),
    (3.597452, -2.693586, 0.533324),
    (3.487338, -6.576122, 6.081160, -2.423502, 0.342695),
)
# The others are published polynomials, under the names that Muon's users know.
PRESETS = {
    preset.name: preset
    for preset in (
        Polynomial(name="keller", coefficients=((3.4445, -4.7750, 2.0315),) * 5),
        Polynomial(name="polar_express", coefficients=_with_margin(_POLAR_EXPRESS, 1.02)),
        Polynomial(name="nonic", coefficients=_with_margin(_NONIC, 1.01), norm="schatten4"),
    )
}


def polynomial_of(preset: str | Polynomial) -> Polynomial:
    """The polynomial of this name; a Polynomial is returned unchanged."""
    if isinstance(preset, Polynomial):
        return preset
    if preset not in PRESETS:
        raise ValueError(
            f"preset {preset!r} is unknown: use {', '.join(PRESETS)}, or your own Polynomial"
        )
    return PRESETS[preset]


def cost(rows: int, cols: int, polynomial: Polynomial, form: Form = "auto") -> int:
    """Floating-point operations for one matrix in torch, which computes both halves of symmetric
    products."""
    if form == "auto":
        return min(cost(rows, cols, polynomial, "direct"), cost(rows, cols, polynomial, "gram"))
    grams, squares, applied = flop(min(rows, cols), max(rows, cols), polynomial, form)
    return 2 * grams + 2 * squares + applied


@cache
def price(
    rows: int, cols: int, polynomial: Polynomial, form: Form = "auto", *, measured: bool = False
) -> int:
    """The load of a matrix when owners are balanced: nanoseconds of the kernels if ``measured``,
    else operations.

    The price depends on the shape alone, so that all ranks agree: nothing is timed here. Operations
    are a poor estimate for small matrices on a GPU, which reach a quarter of the rate of large
    ones.
    """
    if not measured:
        return cost(rows, cols, polynomial, form)
    chosen = None if form == "auto" else form
    return max(1, round(1e6 * milliseconds(rows, cols, polynomial, chosen)))


def choose_form(rows: int, cols: int, polynomial: Polynomial) -> Literal["direct", "gram"]:
    """The form with fewer operations. The shape alone decides, so that all ranks agree."""
    direct, gram = (cost(rows, cols, polynomial, form) for form in ("direct", "gram"))  # type: ignore[arg-type]
    return "gram" if gram < direct else "direct"


def newton_schulz(
    batch: Tensor, polynomial: Polynomial, *, form: Form = "auto", dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise every matrix of ``batch`` [count, rows, cols]; fp32, exactly 0 for 0.

    ``dtype``: the dtype of products. None: fp32 on a CPU; on a GPU fp16 in the Gram form (bf16 has
    too few bits for it) and bf16 in the direct form.
    """
    assert batch.ndim == 3, batch.shape
    count, rows, cols = batch.shape
    if count == 0:
        return batch.float()
    if form == "auto" and dtype is None and uses_kernels(batch.device):
        return orthogonalise(batch, polynomial).float()
    form = choose_form(rows, cols, polynomial) if form == "auto" else form
    batch = batch.float()
    if batch.device.type == "cpu":
        return one_by_one(batch, polynomial, form, dtype)
    narrow = torch.float16 if form == "gram" else torch.bfloat16
    dtype = dtype or (narrow if batch.device.type == "cuda" else torch.float32)
    return iterate(batch, polynomial, form, dtype)
