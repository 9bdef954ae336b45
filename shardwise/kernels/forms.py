# SPDX-License-Identifier: Apache-2.0
"""The polynomials of Newton-Schulz, and the form, tiles and cost for a shape: plain values.

One iteration replaces X by (a + b·R + c·R²)·X, where R = X·Xᵀ is the Gram matrix. Let m be the
short side, and r the ratio of the long side to it. A product of m x m matrices costs 2m³ FLOP, or
half of that if the result is symmetric. Then 5 iterations cost, in m³:

    direct   each iteration: R, then a + b·R + c·R², then its product with X    5·(r + 1 + 2r)
    gram     the iterations work on R only, and form Q, the product of all      6r + 14
             polynomials; X is multiplied by Q at the restart and at the end
    block    the Gram form for one small matrix in one program

With one more product, the polynomial has degree four in R (nine in X). Two such steps do the work
of three steps of degree five in X, for 2m³ less.

The Gram form in fp16 needs the restart: R holds squares, so singular values under 1/50 of the
largest are lost in R's rounding until the first iterations have raised them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

Triple = tuple[float, float, float]
Step = tuple[float, ...]  # a, b, c of a·s + b·s³ + c·s⁵, or a to e, up to s⁹
Form = Literal["direct", "gram", "block"]
Norm = Literal["frobenius", "schatten4"]

# Powers of two that keep 16-bit numbers away from fp16's subnormals and from overflow. Eigenvalues
# of R and singular values of X are at most about 1, and so are their elements.
GRAM_SCALE = 2.0**12
VALUE_SCALE = 2.0**10
LARGEST_BLOCK = 128  # the largest short side of the block form, which one program holds


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
    restart: int | None = None  # Gram form: steps before X is formed again; None: half; 0: never

    def __post_init__(self) -> None:
        steps = tuple(tuple(map(float, step)) for step in self.coefficients)
        object.__setattr__(self, "coefficients", steps)
        problems = []
        if not steps:
            problems.append("coefficients need one (a, b, c) per step, one step or more")
        problems += [problem for step in steps for problem in problems_of(step)]
        if self.norm not in get_args(Norm):
            problems.append(f"norm={self.norm!r} is unknown; use {', '.join(get_args(Norm))}")
        if not self.safety >= 1:
            problems.append(f"safety={self.safety} divides by less than the norm; use 1 or more")
        if self.restart is not None and self.restart < 0:
            problems.append(f"restart={self.restart} counts steps; use 0 for none")
        if problems:
            raise ValueError(f"polynomial {self.name!r} cannot work: " + "; ".join(problems))

    @property
    def steps(self) -> int:
        return len(self.coefficients)

    @property
    def nested(self) -> bool:
        """Whether any step squares a square, which needs one more buffer."""
        return any(len(step) > 3 for step in self.coefficients)

    def first_steps(self, form: Form) -> int:
        """The number of steps before the restart; all steps if there is none.

        The default is half of the steps. With five steps, the kernels' Gram form, which mirrors its
        products, takes three before the restart. The block form, and torch's Gram form, which
        rounds in the same way, take two. This choice had the smallest errors over even, 1/i, 1/i^2,
        logarithmic and spiky spectra.
        """
        half = (self.steps + (form == "gram")) // 2
        restart = half if self.restart is None else self.restart
        return restart if 0 < restart < self.steps else self.steps


def problems_of(step: Step) -> list[str]:
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


@dataclass(frozen=True, kw_only=True)
class ProductTile:
    """The static configuration of one matrix-product kernel; never tuned at run time."""

    rows: int
    columns: int
    step: int  # the length of the summed dimension in one load
    warps: int
    stages: int  # loads in flight
    persistent: bool  # one program per multiprocessor computes many tiles
    flatten: bool = False  # the next tile is loaded while this tile is stored

    def __post_init__(self) -> None:
        if self.columns not in (self.rows, 2 * self.rows):
            raise ValueError(f"a tile of {self.rows}x{self.columns}: columns must be 1 or 2x rows")


# H200, 2026-11-15 (torch 2.11, Triton 3.6): this tile was the
# best of ten, or within a few percent of the best, for every side and product. Narrower tiles read
# more from L2. More stages leave no memory for the store. The chip reaches its power limit in long
# runs (fp16 products fall from 700 to 620 TFLOP/s), so finer choices are lost in the noise.
WIDE = ProductTile(rows=128, columns=256, step=64, warps=8, stages=3, persistent=True, flatten=True)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Useful TFLOP/s of full batches; for a symmetric result, half of the product counts."""

    side: int
    gram: float  # X·Xᵀ
    moved: float  # products of m x m matrices plus a term
    applied: float  # Q·X


# From the same sweep, rows "3 stages flattened". Only the proportions matter.
RATES = (
    Rates(side=0, gram=146, moved=80, applied=244),
    Rates(side=512, gram=309, moved=195, applied=424),
    Rates(side=1024, gram=477, moved=378, applied=630),
    Rates(side=2048, gram=556, moved=510, applied=704),
    Rates(side=4096, gram=640, moved=614, applied=680),
    Rates(side=8192, gram=658, moved=637, applied=655),
)
# 1024 x (128, 7168) in the block form: 5.5 ms, norm and cast included.
BLOCK_RATE = 137.0


def num_grams(polynomial: Polynomial, form: Form) -> int:
    """The most Gram matrices that an iteration holds at one time for each matrix."""
    first = polynomial.first_steps("gram")
    own = {"block": 0, "direct": 2, "gram": 1 + max(first, polynomial.steps - first)}[form]
    return own + (polynomial.nested and form != "block")


@cache
def choose(rows: int, columns: int, polynomial: Polynomial) -> Form:
    """The form with the least measured cost. The shape alone decides, because the bits of a matrix
    must not depend on the other matrices of the batch."""
    if min(rows, columns) <= LARGEST_BLOCK:
        return "block"
    direct = milliseconds(rows, columns, polynomial, "direct")
    gram = milliseconds(rows, columns, polynomial, "gram")
    return "gram" if gram < direct else "direct"


def milliseconds(
    rows: int, columns: int, polynomial: Polynomial, form: Form | None = None
) -> float:
    """The time of one matrix in a full batch on an H200, by which owners are balanced."""
    form = form or choose(rows, columns, polynomial)
    short, long = sorted((rows, columns))
    grams, moved, applied = flop(short, long, polynomial, form)
    if form == "block":
        return 1e-9 * (grams + moved + applied) / BLOCK_RATE
    rates = next(entry for entry in reversed(RATES) if entry.side <= short)
    return 1e-9 * (grams / rates.gram + moved / rates.moved + applied / rates.applied)


def flop(short: int, long: int, polynomial: Polynomial, form: Form) -> tuple[int, int, int]:
    """(X·Xᵀ, products of m x m matrices, Q·X): the operations of a form, without those of partial
    tiles. The first two results are symmetric, and only half of each is computed.
    """
    cube, slab = short**3, short**2 * long
    squares = sum(num_squares(step) for step in polynomial.coefficients)
    steps = polynomial.steps
    if form == "direct":
        return steps * slab, squares * cube, 2 * steps * slab
    first = polynomial.first_steps(form)
    runs = 1 if first == steps else 2
    # Each iteration, except the last of a run, updates the Gram (2 products) and Q (1 product).
    return runs * slab, (squares + 3 * (steps - runs)) * cube, 2 * runs * slab


def num_squares(step: Step) -> int:
    """The number of products in a step's polynomial of R."""
    return sum(square != 0 for *_, square in stages(step))
