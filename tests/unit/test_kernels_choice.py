# SPDX-License-Identifier: Apache-2.0
"""The entry without a GPU: the definitions, the choice of a form, its cost, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from shardwise.kernels.forms import (
    Polynomial,
    Step,
    choose,
    flop,
    milliseconds,
    num_squares,
    stages,
)
from shardwise.kernels.newton_schulz import one_by_one, orthogonalise, part_size
from shardwise.kernels.packed import padded, scale_reference
from tests.kernel_cases import PRESETS, gains_of, quality, singular_values, spectrum

FIVE = PRESETS["polar_express"]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (33, 33)], ids=str)
def test_definition_maps_singular_values(name: str, shape: tuple[int, int]) -> None:
    """Against an fp64 SVD: the directions stay, each singular value goes through the polynomial."""
    polynomial = PRESETS[name]
    matrix, u, v = spectrum("power", *shape)
    found = one_by_one(matrix[None], polynomial)[0]
    rotation, gains = quality(found, u, v)
    assert rotation < 1e-6
    expected = gains_of(polynomial, singular_values("power", *shape))
    torch.testing.assert_close(gains, expected, rtol=1e-6, atol=1e-9)
    gram = one_by_one(matrix[None], polynomial, "gram")[0]
    torch.testing.assert_close(gram, found, rtol=0, atol=1e-6)


def test_entry_on_cpu_is_the_definition_matrix_by_matrix() -> None:
    batch = torch.randn(3, 10, 16)
    batch[2] = 0
    found = orthogonalise(batch, FIVE)
    assert torch.equal(found[:2], one_by_one(batch[:2], FIVE)) and not found[2].any()
    assert torch.equal(orthogonalise(batch[1:2], FIVE)[0], found[1])
    assert orthogonalise(batch[:0], FIVE).shape == (0, 10, 16)


def test_flop_is_the_closed_form() -> None:
    """reference/muon.md: direct 15r + 5, Gram 6r + 14 with a restart, 3r + 17 without; cubic."""
    for ratio in (1, 3, 7):
        short, long = 64, 64 * ratio
        count = lambda p, form: sum(flop(short, long, p, form)) / short**3  # noqa: B023, E731
        assert count(FIVE, "direct") == 15 * ratio + 5
        assert count(FIVE, "gram") == 6 * ratio + 14
        never = Polynomial(coefficients=FIVE.coefficients, restart=0)
        assert count(never, "gram") == 3 * ratio + 17
        four = Polynomial(coefficients=FIVE.coefficients[:4])
        assert count(four, "gram") == 6 * ratio + 10
        assert count(PRESETS["cubic"], "direct") == 15 * ratio
        assert count(PRESETS["cubic"], "gram") == 6 * ratio + 9


def test_form_is_chosen_by_cost_and_shape() -> None:
    assert choose(128, 7168, FIVE) == choose(4096, 64, FIVE) == "block"
    assert choose(2048, 8192, FIVE) == choose(8192, 2048, FIVE) == "gram"
    for rows, columns in ((2048, 2048), (4096, 14336), (512, 2048), (8192, 8192)):
        chosen = choose(rows, columns, FIVE)
        costs = [milliseconds(rows, columns, FIVE, form) for form in ("direct", "gram")]
        assert milliseconds(rows, columns, FIVE) == min(costs)
        assert chosen == ("direct", "gram")[costs.index(min(costs))]
    assert milliseconds(2048, 8192, FIVE) > milliseconds(2048, 2048, FIVE) > 0


def test_large_batches_are_cut_evenly() -> None:
    small = torch.empty(505, 2048, 2048, device="meta")
    size = part_size(small, "gram")
    parts = -(-505 // size)
    assert parts > 1 and parts * size - 505 < parts, "no part is much smaller than the others"
    assert part_size(torch.empty(3, 64, 64, device="meta"), "direct") == 3
    assert part_size(torch.empty(2, 65536, 65536, device="meta"), "direct") == 1


def test_scales_are_powers_of_two() -> None:
    batch = torch.randn(4, 3, 4, dtype=torch.float64)
    batch *= torch.tensor([0.0, 1e-30, 1.0, 1e30])[:, None, None]
    scale, inverse = scale_reference(batch)
    mantissa, _ = torch.frexp(scale)
    assert torch.equal(mantissa, torch.full_like(mantissa, 0.5)) and inverse[0] == 0
    rms = batch[1:].square().mean((1, 2)).sqrt() * scale[1:].double()
    assert bool(((rms >= 1) & (rms < 2)).all())
    torch.testing.assert_close(inverse[1:].double() * rms * 12**0.5, torch.ones(3).double())
    assert [padded(size) for size in (1, 8, 9)] == [8, 8, 16]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (torch.zeros(4, 4), {}, r"shape \(4, 4\).*unsqueeze"),
        (torch.zeros(1, 4, 4, dtype=torch.int32), {}, "int32.*floating"),
        (torch.zeros(1, 4, 4), {"coefficients": ()}, "one step or more"),
        (torch.zeros(1, 4, 4), {"norm": "nuclear", "safety": 0.0}, "'nuclear'.*safety=0.0"),
        (torch.zeros(1, 4, 4), {"restart": -1}, "restart=-1"),
    ],
)
def test_bad_input_is_refused_by_name(
    batch: torch.Tensor, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        orthogonalise(batch, replace(FIVE, **options))  # type: ignore[arg-type]


def test_importing_the_package_and_the_entry_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import shardwise, torch\n"
        "shardwise.optimizer  # names are imported when they are first asked for\n"
        "loaded = [name for name in sys.modules if name.startswith('shardwise.kernels.')]\n"
        "plain = ['forms', 'grouped', 'newton_schulz', 'packed', 'tables']\n"
        "assert sorted(name.split('.')[-1] for name in loaded) == plain, loaded\n"
        "from shardwise.kernels.forms import Polynomial\n"
        "from shardwise.kernels.newton_schulz import orthogonalise\n"
        "polynomial = Polynomial(coefficients=[(2.0, -1.5, 0.5)])\n"
        "print(orthogonalise(torch.eye(4)[None], polynomial).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "[1, 4, 4]" in done.stdout, done.stderr[-1500:]


@pytest.mark.parametrize(
    "step", [(3.0, -4.0, 2.0), (2.0, -1.0, 0.0), (6.3, -15.0, 12.8, -4.3, 0.5)]
)
def test_stages_are_the_polynomial(step: Step) -> None:
    r = torch.linspace(0, 4, 101, dtype=torch.float64)
    expected = sum(value * r**power for power, value in enumerate(step))
    for constant in (True, False):
        found = r
        for shift, linear, square in stages(step, constant=constant):
            found = shift + linear * r + square * found**2
        wanted = expected if constant else expected - step[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert num_squares(step) == {3: 1 if step[2] else 0, 5: 2}[len(step)]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ((1.0, 2.0), "give .a, b, c."),
        ((1.0, 2.0, 3.0, 4.0), "or .a, b, c, d, e."),
        ((1.0, 2.0, 3.0, 4.0, 0.0), "not 0; or give three"),
        ((1.0, 2.0, 3.0, 400.0, 1.0), "too large for fp16"),
    ],
)
def test_steps_that_no_kernel_takes_are_refused(step: Step, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Polynomial(coefficients=(FIVE.coefficients[0], step))


def test_nine_is_cheaper_than_five_and_five() -> None:
    """m³ with symmetric halves: what the preset is for."""
    for form, nine, five in (("direct", 18, 20), ("gram", 18, 20)):
        found = [sum(flop(1, 1, PRESETS[name], form)) for name in ("nonic", "polar_express")]
        assert found == [nine, five], (form, found)
