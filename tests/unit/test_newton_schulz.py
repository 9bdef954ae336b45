# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz against singular values in float64, and its bits against its surroundings."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from shardwise.kernels.forms import Polynomial, milliseconds
from shardwise.optim.presets import (
    choose_form,
    cost,
    newton_schulz,
    polynomial_of,
    price,
)
from tests.kernel_cases import PRESETS
from tests.reference.muon import exact_newton_schulz, polar_factor

SHAPES = [(32, 32), (16, 48), (48, 16), (7, 13), (1, 9), (64, 20)]
# After the last step every singular value above 1 % of the largest lies in here.
RANGES = {
    "keller": (0.65, 1.25),
    "you": (0.85, 1.15),
    "polar_express": (0.85, 1.15),
    "cubic": (0.70, 1.35),
    "s4": (0.70, 1.25),
    "nonic": (0.89, 1.11),
}


def matrix(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Singular values from 1 down to 0.02: what a gradient looks like."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(
        torch.randn(rows, cols, generator=generator, dtype=torch.float64), full_matrices=False
    )
    values = torch.logspace(0, -1.7, min(rows, cols), dtype=torch.float64)
    return ((u * values) @ v).float()


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_applies_the_polynomials_to_the_singular_values(
    name: str, form: str, shape: tuple[int, int]
) -> None:
    preset, x = PRESETS[name], matrix(*shape)
    result = newton_schulz(x[None], preset, form=form)[0]
    expected = exact_newton_schulz(x, preset)
    assert result.dtype == torch.float32 and result.shape == x.shape
    # The first polynomials have slopes of up to 8: rounding of 6e-8 grows by their product.
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", list(PRESETS))
def test_all_singular_values_end_near_one(name: str) -> None:
    x = matrix(32, 64)
    low, high = RANGES[name]
    result = newton_schulz(x[None], PRESETS[name])[0].double()
    values = torch.linalg.svdvals(result)
    assert low < values.min() and values.max() < high, values
    # The directions are those of the polar factor.
    cosine = (result * polar_factor(x)).sum() / result.norm() / polar_factor(x).norm()
    assert cosine > 0.97, cosine


def singular_values(kind: str, count: int) -> Tensor:
    place = torch.arange(1, count + 1, dtype=torch.float64)
    return {
        "even": torch.linspace(1, 0.02, count, dtype=torch.float64),
        "1/i": 1 / place,
        "1/i^2": 1 / place**2,
        "logarithmic": torch.logspace(0, -4, count, dtype=torch.float64),
        "spiky": torch.where(place <= 3, 1.0, 0.01).double(),
    }[kind]


@cache
def directions(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + cols)
    sides = (torch.randn(side, rows, generator=generator).double() for side in (rows, cols))
    u, v = (torch.linalg.qr(side)[0] for side in sides)
    return u, v


def rotation(preset: Polynomial, kind: str, rows: int, cols: int) -> float:
    """The share of the Gram form's result, in fp16, that leaves the input's singular directions."""
    u, v = directions(rows, cols)
    x = (u * singular_values(kind, rows)) @ v.mT
    result = newton_schulz(x.float()[None], preset, form="gram", dtype=torch.float16)[0]
    gains = u.mT @ result.double() @ v
    total = gains.square().sum()
    return float(((total - gains.diagonal().square().sum()).clamp(min=0) / total).sqrt())


@pytest.mark.parametrize("name", list(PRESETS))
def test_the_restart_comes_where_the_gram_form_loses_least(name: str) -> None:
    """Against the singular vectors in fp64, over spectra that gradients have and worse ones."""
    preset = PRESETS[name]
    assert preset.restart is None

    def worst(restart: int | None) -> float:
        chosen = dataclasses.replace(preset, restart=restart)
        shapes = ((96, 96), (128, 384))
        kinds = ("even", "1/i", "1/i^2", "logarithmic", "spiky")
        return max(rotation(chosen, kind, *shape) for kind in kinds for shape in shapes)

    by_restart = {restart: worst(restart) for restart in (1, 2, 3, 4)}
    ours = by_restart[preset.first_steps("block")]
    assert ours == worst(None)
    assert ours < 1.2 * min(by_restart.values()), by_restart  # Keller's is a tie of two and three
    assert ours < 0.03


def test_torch_and_the_kernels_restart_alike() -> None:
    """Each form restarts where it loses least; torch, which rounds product by product, where the
    block form does."""
    first = {name: preset.first_steps("block") for name, preset in PRESETS.items()}
    assert set(first.values()) == {2}
    assert [PRESETS[name].first_steps("gram") for name in ("keller", "s4")] == [3, 2]
    for restart, first in ((0, 5), (1, 1), (4, 4), (5, 5), (9, 5)):
        told = dataclasses.replace(PRESETS["you"], restart=restart)
        assert told.first_steps("block") == told.first_steps("gram") == first


def test_owners_are_weighed_by_what_was_measured_where_kernels_serve() -> None:
    preset = PRESETS["polar_express"]
    shapes = [(2048, 8192), (2048, 2048), (128, 7168), (8192, 2048)]
    operations = [price(*shape, preset) for shape in shapes]
    assert operations == [cost(*shape, preset) for shape in shapes]
    measured = [price(*shape, preset, measured=True) for shape in shapes]
    assert measured == [round(1e6 * milliseconds(*s, preset)) for s in shapes]
    assert measured[0] == measured[3] and all(isinstance(one, int) for one in measured)
    # A head costs far more than its operations say, beside a large matrix.
    assert measured[2] / measured[0] > 2 * operations[2] / operations[0]
    assert price(2, 3, preset, measured=True) >= 1
    direct = price(2048, 8192, preset, "direct", measured=True)
    assert direct == round(1e6 * milliseconds(2048, 8192, preset, "direct"))


def test_keller_agrees_with_torch() -> None:
    x = matrix(48, 64, seed=3)
    theirs = _zeropower_via_newtonschulz(x.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    ours = newton_schulz(x[None], PRESETS["keller"], form="direct")[0]
    # Theirs is computed in bfloat16, with 8 bits.
    assert (ours - theirs.float()).norm() / ours.norm() < 0.03
    narrow = newton_schulz(x[None], PRESETS["keller"], form="direct", dtype=torch.bfloat16)[0]
    assert (narrow - theirs.float()).norm() / ours.norm() < 0.05
    assert not torch.equal(narrow, ours)


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("shape", [(10, 30), (30, 10), (64, 64), (7, 13)], ids=str)
def test_bits_do_not_depend_on_the_batch(form: str, shape: tuple[int, int]) -> None:
    batch = torch.stack([matrix(*shape, seed=seed) for seed in range(5)])
    together = newton_schulz(batch, PRESETS["polar_express"], form=form)
    for index in range(5):
        alone = newton_schulz(batch[index : index + 1], PRESETS["polar_express"], form=form)
        assert torch.equal(alone[0], together[index])
    # Nor on where the matrix lies: an address that is no multiple of 64 bytes, other strides.
    memory = torch.empty(1 + batch[0].numel())
    shifted = memory[1:].view(1, *shape).copy_(batch[:1])
    assert shifted.data_ptr() % 64
    transposed = batch[:1].mT.contiguous().mT
    for moved in (shifted, transposed):
        found = newton_schulz(moved, PRESETS["polar_express"], form=form)[0]
        assert torch.equal(found, together[0])


def test_zero_gives_zero_and_tiny_is_as_good_as_large() -> None:
    x = matrix(12, 20)
    zero = newton_schulz(torch.zeros(2, 12, 20), PRESETS["polar_express"])
    assert torch.equal(zero, torch.zeros(2, 12, 20))
    expected = newton_schulz(x[None], PRESETS["polar_express"])
    for exponent in (-80, -30, 40, 100):
        scaled = newton_schulz(x[None] * 2.0**exponent, PRESETS["polar_express"])
        assert torch.equal(scaled, expected), exponent  # a power of two rounds nothing
    tiny = newton_schulz(x[None] * 2.0**-130, PRESETS["polar_express"])  # subnormal: bits are lost
    assert torch.isfinite(tiny).all() and (tiny - expected).norm() / expected.norm() < 0.05


def test_nan_is_not_hidden() -> None:
    x = matrix(8, 8)
    x[3, 3] = float("nan")
    assert torch.isnan(newton_schulz(x[None], PRESETS["keller"])).all()


def test_an_empty_batch() -> None:
    assert newton_schulz(torch.empty(0, 4, 6), PRESETS["keller"]).shape == (0, 4, 6)


@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (64, 256), (256, 64), (32, 224)])
def test_costs_are_those_of_the_reference(rows: int, cols: int) -> None:
    m, n = min(rows, cols), max(rows, cols)
    r, unit = n // m, m**3
    assert cost(rows, cols, PRESETS["keller"], "direct") == (20 * r + 10) * unit
    assert cost(rows, cols, PRESETS["keller"], "gram") == (8 * r + 28) * unit
    assert cost(rows, cols, PRESETS["cubic"], "direct") == 20 * r * unit


def test_the_cheaper_form_is_chosen() -> None:
    keller = PRESETS["keller"]
    assert choose_form(64, 64, keller) == "direct"
    assert choose_form(64, 128, keller) == choose_form(128, 64, keller) == "gram"
    both = [cost(64, 128, keller, form) for form in ("direct", "gram")]
    assert cost(64, 128, keller) == min(both)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="preset 'kelller' is unknown: use keller, polar"):
        polynomial_of("kelller")
    with pytest.raises(ValueError, match=r"one step or more; safety=0\.5"):
        Polynomial(name="mine", coefficients=(), safety=0.5)
    with pytest.raises(ValueError, match="norm='l2' is unknown"):
        Polynomial(name="mine", coefficients=((1.5, -0.5, 0.0),), norm="l2")
