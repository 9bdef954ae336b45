# SPDX-License-Identifier: Apache-2.0
"""Which form of Newton-Schulz suits a shape, with which tiles, and what it costs: values only.

One iteration takes X to (a + b·R + c·R²)·X with R = X·Xᵀ, the Gram. With m the short side, r the
long one over it and a product of m x m matrices counted as 2m³ FLOP, half of that where the result
is symmetric, 5 iterations cost, in m³:

    direct   R, then a + b·R + c·R², then its product with X, each time        5·(r + 1 + 2r)
    gram     the iterations run on R alone and gather Q, the product of all     6r + 14
             polynomials; X is multiplied twice, by Q at the restart and at the end
    block    the Gram form of one small matrix, whole, in one program

The Gram form in fp16 needs the restart: R holds squares, so a singular value under 1/50 of the
largest is lost in R's rounding, until the first iterations have lifted it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, get_args

Triple = tuple[float, float, float]
Form = Literal["direct", "gram", "block"]
Norm = Literal["frobenius", "schatten4"]

# Powers of two that keep 16-bit numbers away from fp16's subnormals, and far from overflow: R's
# eigenvalues and X's singular values are at most about 1, and an element is no larger than those.
GRAM_SCALE = 2.0**12
VALUE_SCALE = 2.0**10
LARGEST_BLOCK = 128  # short side that one program holds


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """What to compute: the coefficients, the bound X is divided by first, and the restart."""

    coefficients: tuple[Triple, ...]
    norm: Norm = "frobenius"  # or ||X·Xᵀ||_F^½, a tighter bound that the Gram form gets for free
    safety: float = 1.0  # the bound is multiplied by it
    restart: int = 3  # iterations before the Gram is computed afresh; 0: never

    def __post_init__(self) -> None:
        problems = []
        if not self.coefficients:
            problems.append("no coefficients: give at least one (a, b, c)")
        if any(len(triple) != 3 for triple in self.coefficients):
            problems.append(f"coefficients {self.coefficients}: each must be (a, b, c); c may be 0")
        if self.norm not in get_args(Norm):
            problems.append(f"norm {self.norm!r}: choose from {', '.join(get_args(Norm))}")
        if not self.safety > 0:
            problems.append(f"safety {self.safety}: a bound is positive; 1.0 takes it as it is")
        if self.restart < 0:
            problems.append(f"restart {self.restart}: an iteration counted from 0, or 0 for none")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def steps(self) -> int:
        return len(self.coefficients)

    @property
    def first_steps(self) -> int:
        """Iterations before the restart; all of them where there is none."""
        return self.restart if 0 < self.restart < self.steps else self.steps


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How one matrix-product kernel cuts its result; never tuned at run time."""

    rows: int
    columns: int
    step: int  # of the summed dimension, per load
    warps: int
    stages: int  # loads in flight
    persistent: bool  # one program per multiprocessor walks many tiles
    flatten: bool = False  # and fetches the next tile's operands while it stores this one

    def __post_init__(self) -> None:
        if self.columns not in (self.rows, 2 * self.rows):
            raise ValueError(f"a tile of {self.rows}x{self.columns}: columns must be 1 or 2x rows")


WIDE = Tile(rows=128, columns=256, step=64, warps=8, stages=3, persistent=True)
SQUARE = Tile(rows=128, columns=128, step=64, warps=8, stages=4, persistent=True)
SMALL = Tile(rows=64, columns=64, step=64, warps=4, stages=4, persistent=True)


def symmetric_tile(short: int) -> Tile:
    return WIDE if short >= 1024 else SQUARE if short >= 384 else SMALL


def product_tile(short: int) -> Tile:
    return WIDE if short >= 512 else SQUARE if short >= 256 else SMALL


# Measured useful TFLOP/s (a symmetric product counted as half a product) of full batches.
_SIDES = (0, 512, 1024, 2048)
_SYMMETRIC = (100.0, 250.0, 450.0, 520.0)
_PRODUCT = (200.0, 400.0, 550.0, 620.0)


def choose(rows: int, columns: int, polynomial: Polynomial) -> Form:
    """The form with the least measured cost. By shape alone: a matrix's bits can't depend on how
    many others are orthogonalised with it."""
    if min(rows, columns) <= LARGEST_BLOCK:
        return "block"
    direct = milliseconds(rows, columns, polynomial, "direct")
    gram = milliseconds(rows, columns, polynomial, "gram")
    return "gram" if gram < direct else "direct"


def milliseconds(
    rows: int, columns: int, polynomial: Polynomial, form: Form | None = None
) -> float:
    """One matrix's share of a full batch on an H200: what owners are balanced by."""
    form = form or choose(rows, columns, polynomial)
    short, long = sorted((rows, columns))
    symmetric, product = flop(short, long, polynomial, form)
    entry = bisect_right(_SIDES, short) - 1
    return 1e-9 * (symmetric / _SYMMETRIC[entry] + product / _PRODUCT[entry])


def flop(short: int, long: int, polynomial: Polynomial, form: Form) -> tuple[float, float]:
    """(in symmetric products, in plain ones): what the form must compute, no tile's waste."""
    cube, slab = float(short) ** 3, float(short) ** 2 * long
    quintic = [triple[2] != 0 for triple in polynomial.coefficients]
    if form == "direct":
        return polynomial.steps * slab + sum(quintic) * cube, 2 * polynomial.steps * slab
    symmetric, plain = 0.0, 0.0
    first = polynomial.first_steps
    for begin, end in ((0, first), (first, polynomial.steps)):
        if begin == end:
            continue
        count = end - begin
        # Each iteration but the last moves the Gram on (2); each but the first gathers Q (1).
        symmetric += slab + (sum(quintic[begin:end]) + 3 * (count - 1)) * cube
        plain += 2 * slab
    return symmetric, plain
