# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz: the nearest orthogonal matrix by products alone.

X = U S V'  -->  U V'. Each step applies an odd polynomial a s + b s^3 + c s^5 to every singular
value; after a few of them all are near one. The short side m is iterated on (a tall matrix is seen
transposed), with r = n / m:

    direct    A = X X'    B = b A + c A A    X = a X + B X                per step (4r + 2) m^3
    gram      R = X X'    Z = a I + b R + c R R    Q = Z Q    R = Z R Z    and Q X at the end

A step up to s^9 takes one product more, for Z = e (R R + f R + g I)^2 + h R + k I, and does nearly
as much as two steps: a factor of 9 in degree, where they make 25.

The Gram form works on m x m matrices alone and wins for r > 1.5. Rounding grows in R, so it
restarts (X = Q X, Q = I) half way: of five steps after the second, as the kernels' block form does.
(Their Gram form mirrors its products, which rounds otherwise, and restarts after the third.)

Bits: a matrix's result depends on nothing but the matrix. On a CPU each one is computed by itself
in fp32, from memory of its own; batched products happen to agree bit for bit with MKL on one
thread, but nobody promises it. On a GPU a batch goes through the kernels, or batched products
where Triton is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardwise.kernels.forms import Polynomial, Step, milliseconds, num_squares, problems_of, stages

Form = Literal["auto", "direct", "gram"]


DEFAULT = "nonic"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A sequence of polynomials, and what X is divided by before the first.

    ``frobenius`` bounds the largest singular value safely. ``schatten4``, the square root of
    ``||X X'||_F``, bounds it more tightly, so that fewer steps do.
    """

    name: str
    coefficients: tuple[Step, ...]
    norm: Literal["frobenius", "schatten4"] = "frobenius"
    safety: float = 1.0
    # Gram form: the steps before X is formed anew; 0: never; None: about half, where the one who
    # computes (torch, a kernel) loses least
    restart: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not self.coefficients:
            problems.append("coefficients need one (a, b, c) per step, one step or more")
        problems += [problem for step in self.coefficients for problem in problems_of(step)]
        if self.safety < 1:
            problems.append(f"safety={self.safety} divides by less than the norm; use 1 or more")
        if self.restart is not None and self.restart < 0:
            problems.append(f"restart={self.restart} counts steps; use 0 for none")
        if self.norm not in ("frobenius", "schatten4"):
            problems.append(f"norm={self.norm!r} is unknown; use 'frobenius' or 'schatten4'")
        if problems:
            raise ValueError(f"preset {self.name!r} cannot work: " + "; ".join(problems))

    def __str__(self) -> str:
        return self.name

    @property
    def first_steps(self) -> int:
        """The Gram form's steps before its restart, in torch; all of them where there is none.

        Half of them lose least over even, 1/i, 1/i^2, logarithmic and spiky spectra.
        """
        steps = len(self.coefficients)
        restart = steps // 2 if self.restart is None else self.restart
        return restart if 0 < restart < steps else steps

    @property
    def polynomial(self) -> Polynomial:
        """The same for the kernels."""
        return Polynomial(
            coefficients=self.coefficients,
            norm=self.norm,
            safety=self.safety,
            restart=self.restart,
        )


def _at_ease(steps: tuple[Step, ...], margin: float) -> tuple[Step, ...]:
    """The same polynomials of s / margin: rounding may then push s a little over one."""
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
# `python -m benchmarks.polynomials`: the best of degrees 5, 9, 5 and 9, one after another, for
# singular values from 0.0015 to 1 (Polar Express: of five times 5, from 0.001). In this order the
# Gram form moves R on with steps of degree 5 alone: those of degree 9 end a run, before X is formed
# anew, and what they would magnify of R's rounding is never seen.
_NONIC: tuple[Step, ...] = (
    (8.270078, -23.547102, 17.264619),
    (7.010924, -16.183297, 13.341046, -4.295549, 0.470156),
    (3.597452, -2.693586, 0.533324),
    (3.487338, -6.576122, 6.081160, -2.423502, 0.342695),
)
# Where the others come from: reference/muon.md 1b and 2b, with the papers.
PRESETS = {
    preset.name: preset
    for preset in (
        Preset(name="keller", coefficients=((3.4445, -4.7750, 2.0315),) * 5),
        Preset(
            name="you",
            coefficients=(
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            ),
        ),
        Preset(name="polar_express", coefficients=_at_ease(_POLAR_EXPRESS, 1.02)),
        Preset(
            name="cubic",
            coefficients=(
                (3.3656576, -3.3420992, 0.0),
                (2.5744352, -1.4957376, 0.0),
                (2.5368962, -1.4312570, 0.0),
                (2.4418906, -1.2764040, 0.0),
                (2.2230472, -0.9630650, 0.0),
            ),
        ),
        Preset(
            name="s4",
            coefficients=(
                (8.057942, -22.052186, 15.540709),
                (3.926349, -2.753793, 0.497354),
                (3.454472, -2.487546, 0.477513),
                (2.511527, -1.852448, 0.438833),
            ),
            norm="schatten4",
            safety=1.01,
        ),
        Preset(name="nonic", coefficients=_at_ease(_NONIC, 1.01), norm="schatten4"),
    )
}


def preset_of(name: str | Preset) -> Preset:
    if isinstance(name, Preset):
        return name
    if name not in PRESETS:
        raise ValueError(
            f"preset {name!r} is unknown: use {', '.join(PRESETS)}, or a Preset of your own"
        )
    return PRESETS[name]


def cost(rows: int, cols: int, preset: Preset, form: Form = "auto") -> int:
    """Floating-point operations of one matrix."""
    if form == "auto":
        return min(cost(rows, cols, preset, "direct"), cost(rows, cols, preset, "gram"))
    m, n = min(rows, cols), max(rows, cols)
    wide, square = 2 * m * m * n, 2 * m * m * m
    products = [num_squares(step) for step in preset.coefficients]  # of Grams
    if form == "direct":
        return 2 * wide * len(products) + square * sum(products)
    total, fresh = wide, True
    for step, squares in enumerate(products):
        last = step + 1 == len(products)
        restart = step + 1 == preset.first_steps and not last
        total += square * squares + (0 if fresh else square)  # Z, then Q
        fresh = False
        if restart:
            total, fresh = total + 2 * wide, True
        elif last:
            total += wide
        else:
            total += 2 * square
    return total


def price(
    rows: int, cols: int, preset: Preset, form: Form = "auto", *, measured: bool = False
) -> int:
    """What owners are balanced by: nanoseconds of the kernels as ``measured``, else operations.

    Of the shape alone, so that all ranks agree: nothing is timed here. Operations say too little of
    small matrices on a GPU, which runs them at a quarter of the rate of large ones.
    """
    if not measured:
        return cost(rows, cols, preset, form)
    chosen = None if form == "auto" else form
    return max(1, round(1e6 * milliseconds(rows, cols, preset.polynomial, chosen)))


def choose_form(rows: int, cols: int, preset: Preset) -> Form:
    """The cheaper form for a shape: of the shape alone, so that all ranks choose alike."""
    direct, gram = (cost(rows, cols, preset, form) for form in ("direct", "gram"))  # type: ignore[arg-type]
    return "gram" if gram < direct else "direct"


def newton_schulz(
    batch: Tensor, preset: Preset, *, form: Form = "auto", dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise every matrix of ``batch`` [count, rows, cols]; fp32 out, exact 0 for exact 0.

    ``dtype`` is what products are computed in; by default fp32 on a CPU, and on a GPU fp16 in the
    Gram form (bf16 has too few bits for it) and bf16 in the direct form.
    """
    assert batch.ndim == 3, batch.shape
    count, rows, cols = batch.shape
    chosen, by_default = form, dtype is None
    if form == "auto":
        form = choose_form(rows, cols, preset)
    if dtype is None:
        narrow = torch.float16 if form == "gram" else torch.bfloat16
        dtype = narrow if batch.device.type == "cuda" else torch.float32
    if count == 0:
        return batch.float()
    if batch.device.type == "cpu":
        return torch.stack([_orthogonalize(matrix, preset, form, dtype) for matrix in batch])
    if chosen == "auto" and by_default and has_kernels(batch.device):
        from shardwise.kernels.newton_schulz import orthogonalise

        return orthogonalise(
            batch,
            preset.coefficients,
            norm=preset.norm,
            safety=preset.safety,
            restart=preset.restart,
        ).float()
    return _orthogonalize(batch, preset, form, dtype)


def has_kernels(device: torch.device) -> bool:
    """Whether there are kernels for a device; they choose a form by what was measured."""
    if device.type != "cuda":
        return False
    from shardwise.kernels.newton_schulz import uses_kernels

    return uses_kernels(device)


def _orthogonalize(matrix: Tensor, preset: Preset, form: Form, dtype: torch.dtype) -> Tensor:
    """Of ``[..., rows, cols]``: one matrix, or a batch of them."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    # One order of elements whatever the caller stored: products round by it.
    x, gram = _normalized((matrix.mT if tall else matrix).contiguous(), preset, dtype)
    iterate = _iterate_gram if form == "gram" else _iterate_direct
    x = iterate(x, gram, preset)
    return (x.mT if tall else x).float().contiguous()


def _normalized(matrix: Tensor, preset: Preset, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Divided by a bound of its largest singular value, in new memory, and its Gram.

    A power of two comes first, which rounds nothing: the squares of tiny gradients would be 0.
    """
    x = matrix.float()
    largest = x.abs().amax(dim=(-2, -1), keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-100, 126)  # 0 for 0; 2^-exponent exists
    x = torch.ldexp(x, -exponent)
    if preset.norm == "frobenius":
        bound = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * preset.safety
        x = (x / torch.where(bound == 0, 1.0, bound)).to(dtype)
        return x, x @ x.mT
    gram = x @ x.mT  # [..., m, m]
    bound = torch.linalg.vector_norm(gram, dim=(-2, -1), keepdim=True).sqrt() * preset.safety
    bound = torch.where(bound == 0, 1.0, bound)
    return (x / bound).to(dtype), (gram / bound**2).to(dtype)


def _iterate_direct(x: Tensor, gram: Tensor, preset: Preset) -> Tensor:
    for index, step in enumerate(preset.coefficients):
        if index:
            gram = x @ x.mT
        x = step[0] * x + polynomial_of(gram, step, constant=False) @ x
    return x


def polynomial_of(gram: Tensor, step: Step, *, constant: bool = True) -> Tensor:
    """Of ``gram`` [..., m, m]: a I + b R + c R R (+ d R^3 + e R^4), or the same without a I."""
    found = gram
    for shift, linear, square in stages(step, constant=constant):
        found = linear * gram + square * (found @ found) if square else linear * gram
        if shift:
            found.diagonal(dim1=-2, dim2=-1).add_(shift)
    return found


def _iterate_gram(x: Tensor, gram: Tensor, preset: Preset) -> Tensor:
    product: Tensor | None = None  # of the polynomials since x was formed
    steps = len(preset.coefficients)
    for index, step in enumerate(preset.coefficients):
        z = polynomial_of(gram, step)
        product = z if product is None else z @ product
        if index + 1 == steps:
            break
        if index + 1 == preset.first_steps:
            x, product = product @ x, None
            gram = x @ x.mT
        else:
            gram = z @ (gram @ z)
    assert product is not None, "a preset has one step or more"
    return product @ x
