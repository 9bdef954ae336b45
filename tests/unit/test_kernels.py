# SPDX-License-Identifier: Apache-2.0
"""The kernels in Triton's interpreter, fp32 and fp16, against the torch functions beside them.

Triton decides at import whether it interprets, so test_interpreter.py runs these tests in a process
of their own. (bf16 is wrong in the interpreter; tests/device_kernels.py has it.)
"""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from tests.interpreter import INSIDE, inside, loops

pytest.importorskip("triton", reason="the kernels are an extra: pip install shardwise[triton]")


if INSIDE:
    import triton.language as tl

    from shardwise.kernels import adamw, iterate, muon, products, row_sums
    from shardwise.kernels.newton_schulz import orthogonalise
    from shardwise.kernels.packed import BLOCK, SAMPLES, Packed, sample_size, sample_stride
    from shardwise.kernels.polynomials import Polynomial
    from shardwise.kernels.products import ProductTile
    from shardwise.kernels.tables import Matrices
    from tests.kernel_cases import PRESETS, pack_reference

    TILES = [
        ProductTile(rows=16, step=16, warps=4, stages=2),
        ProductTile(rows=32, step=32, warps=4, stages=2),
    ]
    TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4}


pytestmark = loops


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@inside
@pytest.mark.parametrize(
    ("tile", "tall", "dtype"),
    [(0, False, torch.float32), (0, True, torch.float16), (1, True, torch.float32)],
    ids=str,
)
def test_symmetric_product(tile: int, tall: bool, dtype: torch.dtype) -> None:
    chosen = TILES[tile]
    x = (torch.randn(3, 40, 24) / 4).to(dtype)  # neither side a multiple of a tile
    x = x.mT.contiguous() if tall else x
    scales = torch.rand(3, 2) + 0.5
    d = poisoned(3, 40, 40, dtype=dtype)
    squares = poisoned(3, sum(products.tiles_of(40, chosen)))
    options = {"alpha": 1.5, "scales": scales}
    products.symmetric_product(x, x, d, chosen, **options, squares=squares, tall=tall)
    expected = products.symmetric_reference(x, x, **options, tall=tall)
    assert relative(d, expected) < TOLERANCE[dtype]
    assert torch.equal(d, d.mT)
    assert relative(squares.sum(1), expected.square().sum((1, 2))) < 1e-6
    e = poisoned(3, 40, 40, dtype=dtype)
    options = {"alpha": 0.5, "beta": -2.0, "shift": 0.7, "scales": scales}
    products.symmetric_product(d, d, e, chosen, **options)
    assert relative(e, products.symmetric_reference(d, d, **options)) < TOLERANCE[dtype]
    f = poisoned(3, 40, 40, dtype=dtype)
    products.symmetric_product(x, x, f, chosen, **options, c=e, tall=tall)
    expected = products.symmetric_reference(x, x, **options, c=e, tall=tall)
    assert relative(f, expected) < TOLERANCE[dtype] and torch.equal(f, f.mT)


@inside
@pytest.mark.parametrize("size", [8, 32, 56, 72])
def test_no_tile_is_for_nothing(size: int) -> None:
    """Every number of row blocks, odd and even, one and many: all of the result, once."""
    x = torch.randn(2, size, 8, dtype=torch.float16)
    for tile in TILES:
        d = poisoned(2, size, size, dtype=torch.float16)
        squares = poisoned(2, sum(products.tiles_of(size, tile)))
        products.symmetric_product(x, x, d, tile, squares=squares)
        expected = products.symmetric_reference(x, x)
        assert relative(d, expected) < 4e-4 and torch.equal(d, d.mT)
        assert relative(squares.sum(1), expected.square().sum((1, 2))) < 1e-6
        wides, squares_left = products.tiles_of(size, tile)
        blocks = -(-size // tile.rows)
        computed = wides * tile.columns // tile.rows + squares_left
        assert computed == blocks * (blocks + 1) // 2, "the triangle, to the block"


@inside
@pytest.mark.parametrize(("tile", "tall"), [(0, False), (0, True), (1, False)], ids=str)
def test_product(tile: int, tall: bool) -> None:
    q = torch.randn(2, 40, 40, dtype=torch.float16)  # symmetric but for rounding; here not at all
    x = torch.randn(2, 40, 72, dtype=torch.float16)
    x = x.mT.contiguous() if tall else x
    out, scales = poisoned(*x.shape, dtype=torch.float16), torch.tensor([0.5, 2.0])
    products.product(q, x, out, TILES[tile], alpha=0.3, scales=scales, tall=tall)
    expected = products.product_reference(q, x, alpha=0.3, scales=scales, tall=tall)
    assert relative(out, expected) < TOLERANCE[torch.float16]


@inside
@pytest.mark.parametrize("tiles", [0, 1, 5, 72])
def test_factors(tiles: int) -> None:
    inverse, squares = torch.rand(3), torch.rand(3, tiles) + 1.0 if tiles else None
    inverse[2] = 0
    if squares is not None:
        squares[2] = 0
    found = iterate.factors(inverse, squares, 4096.0, 1.01)
    for name, expected in vars(iterate.factors_reference(inverse, squares, 4096.0, 1.01)).items():
        value = getattr(found, name)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
        assert value.data_ptr() % 16 == 0 and value.is_contiguous(), name


@inside
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_normalise(size: float) -> None:
    batch = size * torch.randn(3, 9, 21)
    batch[2] = 0
    found, expected = muon.normalise(batch), muon.normalise_reference(batch)
    assert torch.equal(found.values, expected.values)
    assert found.values.shape == (3, 16, 24) and not found.values[:, 9:].any()
    torch.testing.assert_close(found.inverse_norms, expected.inverse_norms, rtol=1e-6, atol=0)
    rms = found.unpadded(found.values)[:2].float().square().mean((1, 2)).sqrt()
    assert bool((rms >= 0.99).all()) and bool((rms <= 2.01).all())
    assert found.inverse_norms[2] == 0 and not found.values[2].any()


@inside
@pytest.mark.parametrize(
    ("shape", "nesterov"),
    [((16, 64), True), ((7, 13), True), ((7, 13), False)],
    ids=str,
)
def test_momentum(shape: tuple[int, int], nesterov: bool) -> None:
    grads = [1e-6 * torch.randn(shape) for _ in range(3)]
    states = [1e-6 * torch.randn(shape) for _ in range(3)]
    copies = [[state.clone() for state in states] for _ in range(2)]
    options = {"beta": 0.9, "nesterov": nesterov}
    expected = pack_reference(grads, copies[0], **options)
    found = muon.pack(grads, states, **options)
    torch.testing.assert_close(states, copies[0], rtol=1e-6, atol=1e-13)
    assert relative(found.values, expected.values) < 4e-4
    torch.testing.assert_close(found.inverse_norms, expected.inverse_norms, rtol=1e-6, atol=0)
    buffer = poisoned(3, shape[0] * shape[1])  # one send buffer, pieces side by side
    muon.accumulate(grads, copies[1], list(buffer), **options)
    assert all(map(torch.equal, copies[1], states))
    scaled = found.unpadded(found.values)[1].float() * found.inverse_norms[1]
    torch.testing.assert_close(
        scaled, buffer[1].view(shape) / buffer[1].norm(), rtol=2e-3, atol=1e-5
    )


def in_the_sample(numel: int) -> Tensor:
    found = torch.zeros(numel, dtype=torch.bool)
    for index in range(SAMPLES):
        found[index * sample_stride(numel) :][:BLOCK] = True
    assert int(found.sum()) == sample_size(numel) < numel
    return found


def uneven() -> Tensor:
    """Matrices whose sample says: nothing, far too little, enough; zeros; all the same."""
    seen = in_the_sample(264 * 512)
    batch = torch.randn(4, len(seen))
    batch[0, seen] = 0
    batch[0, ~seen] *= 1e20
    batch[1, seen] *= 1e-12
    batch[2, ~seen] *= 16
    batch[3] = 0
    return batch.view(4, 264, 512)


@inside
def test_a_bad_guess_is_settled() -> None:
    batch = uneven()
    expected = muon.normalise_reference(batch)
    rms = expected.values[:3].float().square().mean((1, 2)).sqrt()
    assert bool(((rms[:2] > 0.99) & (rms[:2] < 2.01)).all()), "the whole's rms, not the sample's"
    assert rms[2] > 2.01, "a guess that serves is kept"
    found = muon.normalise(torch.cat([batch, torch.full_like(batch[:1], float("nan"))]))
    assert torch.equal(found.values[:4], expected.values)
    torch.testing.assert_close(found.inverse_norms[:4], expected.inverse_norms)
    assert bool(found.values[4].isnan().all()) and bool(found.inverse_norms[4].isnan())
    # Momentum's values are those of the wire, normalised by their owner: the state moves once.
    grads, states = list(batch), list(0.1 * batch)
    copies = [state.clone() for state in states]
    wire = poisoned(*batch.shape)
    muon.accumulate(grads, copies, list(wire), beta=0.9)
    packed, owner = muon.pack(grads, states, beta=0.9), muon.normalise(wire)
    assert all(map(torch.equal, states, copies))
    assert torch.equal(packed.values, owner.values)
    assert torch.equal(packed.inverse_norms, owner.inverse_norms)
    alone = muon.pack([grads[1]], [0.1 * batch[1]], beta=0.9)
    assert torch.equal(alone.values[0], packed.values[1]), "bits depend on the matrix alone"


@inside
@pytest.mark.parametrize(
    ("guessed", "kept"), [(2**3, True), (2**4, False), (2**-9, True), (2**-10, False)]
)
def test_a_guess_is_kept_as_long_as_it_serves(guessed: float, kept: bool) -> None:
    """A matrix of ones: too large a guess makes subnormals of it, too small a one overflows."""
    batch, values = torch.ones(1, 64, 64), poisoned(1, 64, 64, dtype=torch.float16)
    samples = torch.full((1, SAMPLES), guessed**2 / SAMPLES, dtype=torch.float64)
    partials, inverse = torch.full((1, 1), 4096.0, dtype=torch.float64), poisoned(1)
    muon._momentum_kernel[(1, 1)](
        batch, batch, 4096, 0.0, 0.0, values, samples, partials, inverse,
        1, 4096, 1, 64, 64, 4096, clipped=False,
        grad_type=tl.float32, out_type=tl.float16, work=muon.SETTLE.value, moves=False,
        nesterov=False, aligned=False, rim=False, block=BLOCK, chunk=BLOCK, width=1, num_warps=8,
    )  # fmt: skip
    assert bool(values.isnan().all()) if kept else bool((values == 1).all())
    assert float(inverse) == (guessed / 64 if kept else 1 / 64)


@inside
@pytest.mark.parametrize(("shape", "rule"), [((16, 64), "plain"), ((7, 13), "cautious")], ids=str)
def test_update(shape: tuple[int, int], rule: str) -> None:
    packed = muon.normalise(torch.randn(2, *shape))
    pieces = [piece.contiguous() for piece in packed.unpadded(packed.values)]
    weights = [torch.randn(shape) for _ in range(2)]
    copies = [weight.clone() for weight in weights]
    options = {"step": 0.1, "decay": 0.25, "rule": rule}
    expected = [muon.apply_reference(w, o, **options) for w, o in zip(weights, pieces, strict=True)]
    muon.apply(weights, packed.values, **options)
    muon.apply(copies, pieces, **options)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)
    assert all(map(torch.equal, weights, copies))


@inside
def test_adamw_steps_as_torch_does_with_clipped_gradients() -> None:
    """Pieces of several lengths and steps, one of them too long for one program; torch's own AdamW
    on gradients that were scaled before; a clip that is not finite stops all."""
    sizes = (3, 2048, adamw.CHUNK + 77)
    columns = [[torch.randn(size) for size in sizes] for _ in range(3)]
    squares = [torch.rand(size) for size in sizes]
    steps = [torch.tensor(float(number)) for number in (0, 4, 1000)]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    copies = [[one.clone() for one in column] for column in (*columns, squares, steps)]
    torch._foreach_mul_(copies[1], 0.25)
    torch_adamw(
        *copies[:4], [], copies[4], amsgrad=False, maximize=False, foreach=False,
        beta1=0.9, beta2=0.95, lr=0.01, eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    pieces = (columns[0], columns[1], columns[2], squares)
    assert adamw.fits(*pieces)
    adamw.step(*pieces, steps, clip=torch.tensor([0.25, 0.0]), **options)
    stepped = (columns[0], columns[2], squares, steps)
    for found, expected in zip(stepped, (copies[0], *copies[2:]), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)
    before = [[one.clone() for one in column] for column in (*pieces, steps)]
    stops = torch.tensor([float("nan"), 1.0])
    adamw.step(*pieces, steps, clip=stops, **options)
    after = (*pieces, steps)
    assert all(all(map(torch.equal, one, two)) for one, two in zip(after, before, strict=True))


def run(packed: Packed, polynomial: Polynomial) -> Tensor:
    return packed.unpadded(iterate.iterate(packed, polynomial, TILES[0]))


@inside
@pytest.mark.parametrize("preset", ["you", "polar_express", "cubic", "s4", "nonic"])
def test_the_iteration_computes_the_preset(preset: str) -> None:
    """fp32 shows that the algebra is the definition's; fp16 that its rounding stays small."""
    polynomial = PRESETS[preset]
    torch.manual_seed(5)
    batch = 1e-20 * torch.randn(2 if preset == "cubic" else 1, 17, 30)
    batch[1:] = 0
    batch = batch.mT.contiguous() if preset == "you" else batch  # one of them tall
    expected = orthogonalise(batch.double(), polynomial)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 2e-2)):
        if dtype == torch.float32 and preset in ("you", "s4"):
            continue  # the algebra of polar_express and of nonic with other numbers
        found = run(muon.normalise(batch, dtype), polynomial)
        assert found.shape == batch.shape and not found[1:].any()
        assert relative(found[0], expected[0]) < tolerance, relative(found[0], expected[0])


@inside
def test_bits_do_not_depend_on_the_batch() -> None:
    batch = torch.randn(2, 12, 28)
    polynomial = Polynomial(coefficients=PRESETS["s4"].coefficients[:3], restart=1)
    together = run(muon.normalise(batch), polynomial)
    for index in range(2):
        alone = run(muon.normalise(batch[index : index + 1]), polynomial)
        assert torch.equal(alone[0], together[index])
    batch[1] = float("nan")
    beside = run(muon.normalise(batch), polynomial)
    assert torch.equal(beside[0], together[0]) and bool(beside[1].isnan().any())


@inside
@pytest.mark.parametrize("restart", [0, 1, 4])
def test_the_iteration_restarts_where_told(restart: int) -> None:
    polynomial = Polynomial(coefficients=PRESETS["you"].coefficients, restart=restart)
    torch.manual_seed(5)
    batch = torch.randn(1, 16, 24)
    expected = orthogonalise(batch.double(), polynomial)
    found = run(muon.normalise(batch, torch.float32), polynomial)
    assert relative(found, expected) < 1e-3


@inside
def test_a_clip_scales_gradients_and_stops_a_step() -> None:
    """Both kernels, on matrices inside flat tensors: the factor; then nothing moves."""
    shape, rule = (7, 16), {"beta": 0.9, "nesterov": True}
    flat = [torch.randn(4 * 7 * 16) for _ in range(3)]
    begins = [numpy.array([0, 112, 224, 336])]
    grads, states, weights = (Matrices([one], begins, *shape) for one in flat)
    plain = [grad * 0.25 for grad in grads]
    copies = [[one.clone() for one in column] for column in (states, weights)]
    expected = muon.pack(plain, copies[0], **rule)
    muon.apply(copies[1], expected.values, step=0.1, decay=0.2)
    clip = torch.tensor([0.25, 0.0])
    found = muon.pack(grads, states, clip=clip, **rule)
    muon.apply(weights, found.values, step=0.1, decay=0.2, clip=clip)
    assert torch.equal(found.values, expected.values)
    assert all(map(torch.equal, states, copies[0]))
    assert all(map(torch.equal, weights, copies[1])), "the same bits as gradients scaled before"
    broken = torch.tensor([float("nan"), 1.0])
    outs = poisoned(4, 112)
    muon.pack(grads[1:], states[1:], clip=broken, **rule)
    muon.accumulate(grads, states, list(outs), clip=broken, **rule)
    muon.apply(weights, outs.view(4, 7, 16).half().new_zeros(4, 8, 16), step=1.0, clip=broken)
    assert all(map(torch.equal, states, copies[0])) and all(map(torch.equal, weights, copies[1]))


@inside
@pytest.mark.parametrize("columns", [48, 1030])
def test_row_sums(columns: int) -> None:
    rows = torch.randn(10, columns)
    places = torch.tensor([[0, 3, 10], [9, 9, 1], [10, 10, 10], [5, 6, 7]])
    found = row_sums.row_sums(rows, places)
    padded = torch.cat([rows, rows.new_zeros(1, columns)])
    torch.testing.assert_close(found, padded[places].sum(1))
    assert not found[2].any(), "a token whose choices were dropped"
    places[1] = torch.tensor([2, 9, 1])  # each row has one place
    copies = row_sums.row_copies(found, places, 10)
    expert = [0, 1, 1, 0, 3, 3, 3, 3, 1, 1]
    kept = [0, 1, 2, 3, 5, 6, 7, 9]
    assert torch.equal(copies[kept], found[expert][kept])
