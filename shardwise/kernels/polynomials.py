# SPDX-License-Identifier: Apache-2.0
"""The polynomials of Newton-Schulz, as data.

A step replaces X by (a + b·R + c·R²)·X, where R = X·Xᵀ is the Gram matrix: every singular value s
becomes a·s + b·s³ + c·s⁵. With one more product, a step has degree four in R (nine in s). Two such
steps do the work of three steps of degree five, for fewer operations.

Kernels and torch compute the Gram form. The steps work on R only and form Q, the product of their
polynomials. X is multiplied by Q at the restart and at the end. R holds squares, so in fp16
singular values under 1/50 of the largest are lost in its rounding until the first steps have raised
them: the Gram form needs the restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Triple = tuple[float, float, float]
Step = tuple[float, ...]  # a, b, c of a·s + b·s³ + c·s⁵, or a to e, up to s⁹
Norm = Literal["frobenius", "schatten4"]

# Powers of two that keep 16-bit numbers away from fp16's subnormals and from overflow. Eigenvalues
# of R and singular values of X are at most about 1, and so are their elements.
GRAM_SCALE = 2.0**12
VALUE_SCALE = 2.0**10


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """The polynomials of an iteration, one per step, and the bound that divides X first.

    ``frobenius`` bounds the largest singular value. ``schatten4``, the square root of ||X·Xᵀ||_F,
    is a tighter bound, with which fewer steps suffice, and costs nothing in the Gram form.
    """

    coefficients: tuple[Step, ...]
    name: str = "custom"
    norm: Norm = "frobenius"
    safety: float = 1.0  # a factor of the bound
    restart: int | None = None  # steps before X is formed again; None: half of them; 0: never

    def __post_init__(self) -> None:
        steps = tuple(tuple(map(float, step)) for step in self.coefficients)
        object.__setattr__(self, "coefficients", steps)
        problems = [problem for step in steps for problem in _problems_of(step)]
        if not steps:
            problems.append("coefficients need one (a, b, c) per step, one step or more")
        if self.norm not in get_args(Norm):
            problems.append(f"norm={self.norm!r} is unknown; use {', '.join(get_args(Norm))}")
        if not self.safety >= 1:
            problems.append(f"safety={self.safety} divides by less than the norm; use 1 or more")
        if problems:
            raise ValueError(f"polynomial {self.name!r} cannot work: " + "; ".join(problems))

    @property
    def steps(self) -> int:
        return len(self.coefficients)

    @property
    def nested(self) -> bool:
        """Whether any step squares a square, which needs one more buffer."""
        return any(len(step) > 3 for step in self.coefficients)

    @property
    def first_steps(self) -> int:
        """The number of steps before the restart; all steps if there is none."""
        restart = (self.steps + 1) // 2 if self.restart is None else self.restart
        return restart if 0 < restart < self.steps else self.steps

    @property
    def grams(self) -> int:
        """The most Gram matrices that the kernels hold at one time for each matrix."""
        return 1 + max(self.first_steps, self.steps - self.first_steps) + self.nested


def _problems_of(step: Step) -> list[str]:
    """The reasons why the kernels cannot compute a step."""
    if len(step) not in (3, 5):
        return [f"a step {step}: give (a, b, c), where c may be 0, or (a, b, c, d, e)"]
    if len(step) == 3:
        return []
    if step[4] == 0:
        return [f"a step {step}: five coefficients end with one that is not 0; or give three"]
    (shift, linear, _), _ = stages(step)
    # Singular values stay under 2, so R stays under 4; the squared matrix is stored in fp16, times
    # VALUE_SCALE.
    largest = abs(shift) + 4 * abs(linear) + 16
    if largest * VALUE_SCALE > 65504:
        return [f"a step {step}: its inner square may reach {largest:.0f}, too large for fp16"]
    return []


def stages(step: Step, *, constant: bool = True) -> list[Triple]:
    """The polynomial of a step in stages of one product: P becomes shift + linear·R + square·P².

    P is R at first, and the polynomial at the end; ``constant=False`` leaves ``a`` out. A
    polynomial of degree four in R is a completed square and a remainder:
    e·(R² + α·R + β)² + b'·R + a'.
    """
    a, b, c = step[:3]
    if len(step) == 3:
        return [(a if constant else 0.0, b, c)]
    d, e = step[3:]
    linear = d / (2 * e)
    shift = (c / e - linear**2) / 2
    left = a - e * shift**2
    outer = (left if constant else left - a, b - 2 * e * shift * linear, e)
    return [(shift, linear, 1.0), outer]


def cost(rows: int, cols: int, polynomial: Polynomial) -> int:
    """Multiplications and additions for one matrix, by which owners are balanced. The shape alone
    decides, so all ranks agree. Only half of a symmetric product is computed."""
    short, long = sorted((rows, cols))
    runs = 1 if polynomial.first_steps == polynomial.steps else 2
    squares = sum(square != 0 for step in polynomial.coefficients for *_, square in stages(step))
    # Each step, except the last of a run, updates the Gram (2 products) and Q (1 product).
    products = squares + 3 * (polynomial.steps - runs)
    return runs * 3 * short**2 * long + products * short**3


# ------------------------------------------------------------------------------ published ones


def _with_margin(margin: float, *steps: Step) -> tuple[Step, ...]:
    """The polynomials of s / margin, so that rounding may push s slightly above one."""
    return tuple(
        tuple(value / margin ** (2 * power + 1) for power, value in enumerate(step))
        for step in steps
    )


PRESETS = {
    preset.name: preset
    for preset in (
        Polynomial(name="keller", coefficients=((3.4445, -4.7750, 2.0315),) * 5),
        Polynomial(
            name="polar_express",
            coefficients=_with_margin(
                1.02,
                (8.28721, -23.59589, 17.30039),
                (4.10706, -2.94785, 0.54484),
                (3.94869, -2.90890, 0.55182),
                (3.31842, -2.48849, 0.51005),
                (2.30065, -1.66890, 0.41881),
            ),
        ),
        # The best polynomials of degrees 5, 9, 5 and 9, one after another, for singular values from
        # 0.0015 to 1 (Polar Express: five of degree 5, from 0.001). In this order the Gram form
        # advances R with steps of degree 5 alone. Each step of degree 9 ends a run of steps: X is
        # formed from R next, so the rounding errors of R are not magnified further.
        Polynomial(
            name="nonic",
            norm="schatten4",
            coefficients=_with_margin(
                1.01,
                (8.270078, -23.547102, 17.264619),
                (7.010924, -16.183297, 13.341046, -4.295549, 0.470156),
                (3.597452, -2.693586, 0.533324),
                (3.487338, -6.576122, 6.081160, -2.423502, 0.342695),
            ),
        ),
    )
}
DEFAULT = "nonic"  # the shortest that is as accurate as Keller Jordan's


def polynomial_of(preset: str | Polynomial) -> Polynomial:
    """The polynomial of this name; a Polynomial is returned unchanged."""
    if isinstance(preset, Polynomial):
        return preset
    if preset not in PRESETS:
        raise ValueError(
            f"preset {preset!r} is unknown: use {', '.join(PRESETS)}, or your own Polynomial"
        )
    return PRESETS[preset]
