# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.polynomials``: where the preset ``nonic`` comes from, and its worth.

Newton-Schulz composes odd polynomials. The best composition of given degrees takes, step by step,
the one that lies nearest to 1 on the interval which the steps before have left (Polar Express,
arXiv 2505.16932, whose coefficients this finds for five of degree 5). A step of degree 9 costs one
product of Grams more than one of degree 5, so degrees 5, 9, 5, 9 (2025 in all) take 18 m^3 for a
square matrix where five of degree 5 (3125) take 20; and divided by the Schatten 4-norm, which lies
nearer to the largest singular value than the Frobenius norm, they need less.

The tables round as the kernels do: 16-bit operands, sums in fp32. The last one is why the degrees
alternate: the Gram form moves R on with every step but the last before X is formed anew, and one of
degree 9 magnifies R's rounding.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import report
from shardwise.kernels.forms import Polynomial, stages
from shardwise.optim.presets import DEFAULT, PRESETS, cost

Array = NDArray[np.float64]
# No step is made for singular values below this share of the largest: those above gain more by it
# than those below lose (Polar Express does so too).
CUSHION = 0.02407327424182761
SIDE = 384
NONIC_DEGREES = (5, 9, 5, 9)
LOWEST = 1.5e-3  # the singular value that the steps are made for


def value(coefficients: Array, x: Array) -> Array:
    return sum((c * x ** (2 * k + 1) for k, c in enumerate(coefficients)), start=np.zeros_like(x))


def nearest_to_one(low: float, high: float, terms: int) -> Array:
    """Remez' exchange: of the odd polynomials with so many terms, the nearest to 1 on an interval.

    Its error swings between equal extremes, one more than it has terms; they are moved to where the
    error of the last try was largest, until they stay.
    """
    count = terms + 1
    signs = (-1.0) ** np.arange(count)
    points = (low + high) / 2 - (high - low) / 2 * np.cos(np.pi * np.arange(count) / terms)
    grid = low + (high - low) * np.linspace(0, 1, 40001) ** 2  # finer where it swings faster
    for _ in range(50):
        powers = np.stack([points ** (2 * k + 1) for k in range(terms)] + [signs], axis=1)
        found = np.linalg.solve(powers, np.ones(count))[:-1]
        error = 1 - value(found, grid)
        slope = np.diff(error)
        turns = [0, *(np.flatnonzero(slope[:-1] * slope[1:] <= 0) + 1), len(grid) - 1]
        extremes: list[int] = []
        for turn in turns:
            if not extremes or error[turn] * error[extremes[-1]] < 0:
                extremes.append(turn)
            elif abs(error[turn]) > abs(error[extremes[-1]]):
                extremes[-1] = turn
        moved = grid[extremes[:count]]
        if len(moved) < count or np.allclose(moved, points, rtol=1e-12):
            break
        points = moved
    return found


def composition(low: float, degrees: Sequence[int]) -> list[Array]:
    """The steps for singular values from ``low`` to 1; each leaves an interval around 1."""
    high, steps = 1.0, []
    for degree in degrees:
        step = nearest_to_one(max(low, CUSHION * high), high, (degree + 1) // 2)
        ends = value(step, np.array([low, high]))
        step = step * 2 / ends.sum()  # both ends as far from 1, also below the cushion
        low = float(value(step, np.array([low]))[0])
        high = 2 - low
        steps.append(step)
    return steps


def spectra() -> dict[str, Tensor]:
    place = torch.arange(1, SIDE + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64)
    return {
        "1/i": 1 / place,
        "1/sqrt i": place**-0.5,
        "one large, the rest to 2 %": torch.cat([place[:1], torch.linspace(0.02, 0, SIDE - 1)]),
        "8 large, the rest 3 %": torch.where(place <= 8, 1.0, 0.03).double(),
        "1 to 1e-3, even in log": torch.logspace(0, -3, SIDE, dtype=torch.float64),
        "1 to 1e-4, even in log": torch.logspace(0, -4, SIDE, dtype=torch.float64),
        "Gaussian": torch.linalg.svdvals(gauss),
    }


def rounded(x: Tensor) -> Tensor:
    return x.half().float()


def normalised(x: Tensor, preset: Polynomial) -> Tensor:
    norm = x.norm() if preset.norm == "frobenius" else (x @ x.mT).norm().sqrt()
    return rounded(x / (norm * preset.safety))


def mirrored(x: Tensor) -> Tensor:
    """A symmetric result as the kernels store it: one half computed, the other its image."""
    lower = rounded(x).tril()
    return lower + lower.tril(-1).mT


def polynomial(gram: Tensor, step: Sequence[float]) -> Tensor:
    found = gram
    for shift, linear, square in stages(tuple(step)):
        found = mirrored(square * (found @ found) + linear * gram + shift * torch.eye(len(gram)))
    return found


def direct(x: Tensor, preset: Polynomial) -> Tensor:
    """The direct form with every product's result rounded to fp16."""
    x = normalised(x, preset)
    for step in preset.coefficients:
        x = rounded(polynomial(mirrored(x @ x.mT), step) @ x)
    return x


def gram(x: Tensor, preset: Polynomial) -> Tensor:
    """The Gram form, likewise; X is formed anew half way."""
    x = normalised(x, preset)
    steps, half = preset.coefficients, preset.first_steps("block")
    for run in (steps[:half], steps[half:]):
        moved, product = mirrored(x @ x.mT), torch.eye(len(x))
        for step in run:
            factor = polynomial(moved, step)
            product = mirrored(factor @ product)
            moved = mirrored(mirrored(factor @ moved) @ factor)
        x = rounded(product @ x)
    return x


def directions() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    u, v = (
        torch.linalg.qr(torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    )
    return u, v


def quality() -> report.Table:
    rows: list[report.Row] = []
    u, v = directions()
    names = ("keller", "polar_express", "nonic")
    for kind, values in spectra().items():
        row: report.Row = {"spectrum": kind}
        for name in names:
            found = direct(((u * values) @ v.mT).float(), PRESETS[name]).double()
            row[name] = float((found * (u @ v.mT)).sum() / found.norm() / SIDE**0.5)
            row[f"{name}_high"] = float((u.mT @ found @ v).diagonal().max())
        rows.append(row)
    rows.append(
        {"spectrum": "m^3 of a square matrix, symmetric halves counted half"}
        | {name: symmetric_cost(PRESETS[name]) for name in names}
    )
    columns = {"spectrum": ("singular values", "")}
    for name in names:
        columns |= {name: (name, ".4f"), f"{name}_high": ("largest", ".2f")}
    note = (
        f"{SIDE} x {SIDE}: cosine between the result and the nearest orthogonal matrix, and the\n"
        f"largest singular value of the result. Default: {DEFAULT}."
    )
    return report.Table(title="What a preset is worth", note=note, columns=columns, rows=rows)


def symmetric_cost(preset: Polynomial) -> float:
    """Of the direct form; ``cost`` counts symmetric products whole."""
    steps = len(preset.coefficients)
    halves = cost(1, 1, preset, "direct") / 2 - steps  # all but the products with X
    return 2 * steps + halves


def coefficients() -> report.Table:
    rows: list[report.Row] = []
    for name, low, degrees in (
        ("polar_express", 1e-3, (5, 5, 5, 5, 5)),
        ("nonic", LOWEST, NONIC_DEGREES),
    ):
        for index, step in enumerate(composition(low, degrees)):
            row: report.Row = {"preset": name, "step": index + 1}
            rows.append(row | {f"s{2 * k + 1}": float(c) for k, c in enumerate(step)})
    columns = {"preset": ("preset", ""), "step": ("step", "")}
    columns |= {f"s{degree}": (f"s^{degree}", ".6f") for degree in (1, 3, 5, 7, 9)}
    note = "As found, before the margin that the library divides singular values by (1.02, 1.01)."
    return report.Table(title="Coefficients", note=note, columns=columns, rows=rows)


def orders() -> report.Table:
    """What rounding costs in either form, by the order of the degrees."""
    u, v = directions()
    rows: list[report.Row] = []
    for degrees in ((5, 5, 9, 9), (5, 9, 5, 9), (5, 9, 9, 5), (9, 5, 5, 9)):
        found = tuple(tuple(map(float, step)) for step in composition(LOWEST, degrees))
        preset = Polynomial(name="tried", coefficients=found, norm="schatten4", safety=1.01)
        row: report.Row = {"degrees": ", ".join(map(str, degrees))}
        low = np.array([LOWEST])
        for step in found:
            low = value(np.array(step), low)
        row["lowest"] = float(low[0])
        for kind, values in spectra().items():
            exact = (values / (values**4).sum() ** 0.25 / preset.safety).numpy()
            for step in found:
                exact = value(np.array(step), exact)
            expected = (u * torch.from_numpy(exact)) @ v.mT
            for form in (direct, gram):
                error = (form(((u * values) @ v.mT).float(), preset) - expected).norm()
                row[f"{form.__name__} {kind}"] = float(error / expected.norm())
        for form in (direct, gram):
            row[form.__name__] = max(
                float(row[f"{form.__name__} {kind}"])  # type: ignore[arg-type]
                for kind in spectra()
            )
        rows.append(row)
    columns = {"degrees": ("degrees", ""), "lowest": (f"{LOWEST} goes to", ".4f")}
    columns |= {"direct": ("error, direct form", ".4f"), "gram": ("error, Gram form", ".4f")}
    note = (
        "The largest relative distance from the exact polynomials over the spectra above, rounded\n"
        "to fp16, where the Gram form forms X anew after two steps."
    )
    return report.Table(title="The order of degrees", note=note, columns=columns, rows=rows)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.polynomials", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder to write to")
    options = parser.parse_args(arguments)
    facts = report.circumstances(arguments)
    facts["command"] = shlex.join(["python", "-m", "benchmarks.polynomials", *arguments])
    paths = report.write(
        [coefficients(), quality(), orders()], facts, "polynomials", options.results
    )
    print(paths[0].read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
