# SPDX-License-Identifier: Apache-2.0
"""The kernels on a GPU: ``python -m tests.device_kernels``; CI has none, so pytest skips this.

Every tile the library uses, every form, preset and orientation, against the torch definitions in
fp64; bits that do not depend on the rest of the batch; extreme inputs; graph capture.
"""
# ruff: noqa: T201

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from shardwise.kernels import muon, products
from shardwise.kernels.newton_schulz import orthogonalise
from shardwise.kernels.packed import BLOCK, SAMPLES, sample_stride
from shardwise.kernels.products import WIDE
from tests.kernel_cases import PRESETS, band, pack_reference, quality, singular_values, spectrum

WORKERS = 14


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=torch.float16)


def relative(found: Tensor, expected: Tensor) -> float:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(error)


def check_products(count: int, side: int, depth: int) -> None:
    tile = WIDE
    x = random(count, side, depth, dtype=torch.float16)
    tall = x.mT.contiguous()
    scales = torch.rand(count, 2, device="cuda") + 0.5
    squares = torch.full((count, sum(products.tiles_of(side, tile))), float("nan")).cuda()
    d = poisoned(count, side, side)
    products.symmetric_product(x, x, d, tile, alpha=1 / depth, scales=scales, squares=squares)
    expected = products.symmetric_reference(x.double(), x.double(), alpha=1 / depth, scales=scales)
    assert relative(d, expected) < 6e-4, relative(d, expected)
    assert torch.equal(d, d.mT), "a mirror image, to the bit"
    assert relative(squares.sum(1), expected.square().sum((1, 2))) < 1e-4
    mirrored = poisoned(count, side, side)
    options = {"alpha": 1 / depth, "scales": scales, "tall": True}
    products.symmetric_product(tall, tall, mirrored, tile, **options)  # type: ignore[arg-type]
    assert torch.equal(mirrored, d), "orientation changes no bit"
    e = poisoned(count, side, side)
    options = {"alpha": 0.3, "beta": -1.7, "shift": 0.6, "scales": scales}
    products.symmetric_product(d, d, e, tile, **options)  # type: ignore[arg-type]
    assert relative(e, products.symmetric_reference(d, d, **options)) < 6e-4  # type: ignore[arg-type]
    other = poisoned(count, side, side)
    products.symmetric_product(d, d, other, tile, **options, c=e)  # type: ignore[arg-type]
    assert relative(other, products.symmetric_reference(d, d, **options, c=e)) < 6e-4  # type: ignore[arg-type]
    y, y_tall = poisoned(*x.shape), poisoned(*tall.shape)
    weights = scales[:, 0].contiguous()
    products.product(e, x, y, tile, alpha=0.5, scales=weights)
    products.product(e, tall, y_tall, tile, alpha=0.5, scales=weights, tall=True)
    assert relative(y, products.product_reference(e, x, alpha=0.5, scales=weights)) < 6e-4
    assert torch.equal(y_tall, y.mT), "orientation changes no bit"


def check_normalise(count: int, rows: int, columns: int) -> None:
    for dtype, size in ((torch.float32, 1e-25), (torch.float32, 1e25), (torch.bfloat16, 1.0)):
        batch = (random(count, rows, columns) * size).to(dtype)
        batch[-1] = 0
        found, expected = muon.normalise(batch), muon.normalise_reference(batch)
        assert torch.equal(found.values, expected.values)
        torch.testing.assert_close(found.inverse_norms, expected.inverse_norms, rtol=1e-6, atol=0)
        assert found.inverse_norms[-1] == 0


def check_momentum(rows: int, columns: int, dtype: torch.dtype) -> None:
    for nesterov in (True, False):
        grads = [1e-5 * random(rows, columns) for _ in range(5)]
        grads = [grad.to(dtype) for grad in grads]
        states = [1e-5 * random(rows, columns) for _ in range(5)]
        copies = [[state.clone() for state in states] for _ in range(2)]
        options = {"beta": 0.95, "nesterov": nesterov}
        found = muon.pack(grads, states, **options)  # type: ignore[arg-type]
        expected = pack_reference(grads, copies[0], **options)  # type: ignore[arg-type]
        torch.testing.assert_close(states, copies[0], rtol=1e-5, atol=1e-12)
        assert relative(found.values, expected.values) < 1e-3
        rim = found.values.clone()
        found.unpadded(rim).zero_()
        assert not rim.any(), "the rim is zero"
        torch.testing.assert_close(found.inverse_norms, expected.inverse_norms, rtol=1e-5, atol=0)
        outs = [poisoned(rows * columns).float() for _ in grads]
        muon.accumulate(grads, copies[1], outs, **options)  # type: ignore[arg-type]
        assert all(map(torch.equal, copies[1], states)), "to the wire or packed, the same state"


def check_bad_guess(rows: int, columns: int) -> None:
    """Matrices whose sample has nothing, or next to nothing, of what the rest has."""
    numel = rows * columns
    seen = torch.zeros(numel, dtype=torch.bool, device="cuda")
    for index in range(SAMPLES):
        seen[index * sample_stride(numel) :][:BLOCK] = True
    assert not seen.all()
    batch = random(4, numel)
    batch[0, seen] = 0
    batch[0, ~seen] *= 1e20
    batch[1, seen] *= 1e-12
    batch[2, ~seen] *= 1e-12
    batch = batch.view(4, rows, columns)
    expected, found = muon.normalise_reference(batch), muon.normalise(batch)
    assert torch.equal(found.values, expected.values)
    torch.testing.assert_close(found.inverse_norms, expected.inverse_norms, rtol=1e-6, atol=0)
    wire, states = torch.empty_like(batch), [list(0.1 * batch) for _ in range(2)]
    muon.accumulate(list(batch), states[0], list(wire), beta=0.9)
    packed, owner = muon.pack(list(batch), states[1], beta=0.9), muon.normalise(wire)
    assert all(map(torch.equal, *states)) and torch.equal(packed.values, owner.values)
    assert torch.equal(packed.inverse_norms, owner.inverse_norms)


def check_update(
    rows: int, columns: int, dtype: torch.dtype, rule: Literal["plain", "cautious"]
) -> None:
    packed = muon.normalise(random(4, rows, columns))
    weights = [random(rows, columns).to(dtype) for _ in range(4)]
    copies = [weight.clone() for weight in weights]
    pieces = list(packed.unpadded(packed.values))
    expected = [
        muon.apply_reference(weight, piece, step=0.1, decay=0.02, rule=rule)
        for weight, piece in zip(weights, pieces, strict=True)
    ]
    muon.apply(weights, packed.values, step=0.1, decay=0.02, rule=rule)
    muon.apply(copies, [p.contiguous() for p in pieces], step=0.1, decay=0.02, rule=rule)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)
    assert all(map(torch.equal, weights, copies)), "batch or pieces, the same weights"


def check_preset(name: str, rows: int, columns: int) -> None:
    """Rotation and singular values beside those of the exact polynomial."""
    polynomial = PRESETS[name]
    for kind in ("even", "power"):
        matrix, u, v = spectrum(kind, rows, columns)
        batch = torch.stack([matrix, matrix.flip(0), torch.zeros_like(matrix)]).cuda()
        found = orthogonalise(batch.float(), polynomial)
        assert found.shape == batch.shape and not found[2].any()
        rotation, gains = quality(found[0].double(), u.cuda(), v.cuda())
        # Small singular values of square matrices lose more in a Gram matrix of 16 bits.
        most = 0.03 if name == "polar_express" and rows == columns else 0.02
        assert rotation < most, f"{kind}: rotation {rotation:.4f}"
        low, high = band(polynomial, singular_values(kind, rows, columns))
        outside = torch.maximum(low.cuda() - gains, gains - high.cuda()).max()
        assert outside < 0.015, f"{kind}: singular values leave the band by {float(outside):.4f}"


def check_batch_invariance(rows: int, columns: int, name: str) -> None:
    polynomial = PRESETS[name]
    run = functools.partial(orthogonalise, polynomial=polynomial)
    batch = random(11, rows, columns)
    whole = run(batch)
    assert torch.equal(run(batch), whole), "the same twice"
    for index in (0, 4, 10):
        assert torch.equal(run(batch[index : index + 1])[0], whole[index]), "alone"
    assert torch.equal(run(batch[3:8]), whole[3:8]), "in a smaller batch"
    batch[5] = float("nan")
    batch[6] = float("inf")
    poisoned_batch = run(batch)
    keep = [0, 1, 2, 3, 4, 7, 8, 9, 10]
    assert torch.equal(poisoned_batch[keep], whole[keep]), "beside NaN and infinity"
    assert poisoned_batch[5].isnan().any() and poisoned_batch[6].isnan().any(), "not hidden"


def check_scale_invariance() -> None:
    batch = random(2, 256, 384)
    for power in (-80, -20, 20, 80):
        scaled = orthogonalise(batch * 2.0**power, PRESETS["polar_express"])
        plain = orthogonalise(batch, PRESETS["polar_express"])
        assert torch.equal(scaled, plain), f"2^{power}"


def check_graph(rows: int, columns: int) -> None:
    batch = random(3, rows, columns)
    run = functools.partial(orthogonalise, polynomial=PRESETS["s4"])
    run(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(batch)
    batch.copy_(random(3, rows, columns))
    graph.replay()
    assert torch.equal(captured, run(batch))


def checks() -> list[tuple[Callable[..., None], tuple[object, ...]]]:
    found: list[tuple[Callable[..., None], tuple[object, ...]]] = []
    for shape in ((3, 256, 512), (2, 200, 264), (5, 136, 72), (2, 1032, 520), (1, 2048, 2048)):
        found.append((check_products, shape))
    for rows, columns in ((64, 4096), (33, 65), (1000, 1003), (1, 7)):
        found.append((check_normalise, (4, rows, columns)))
        for dtype in (torch.float32, torch.bfloat16):
            found.append((check_momentum, (rows, columns, dtype)))
            found += [(check_update, (rows, columns, dtype, r)) for r in ("plain", "cautious")]
    found += [(check_bad_guess, shape) for shape in ((2048, 2048), (1000, 1003))]
    sides = (
        (512, 1024),
        (1024, 512),
        (520, 520),
        (301, 203),
        (128, 512),
        (64, 64),
        (13, 57),
        (1, 9),
    )
    for name in PRESETS:
        found += [(check_preset, (name, *shape)) for shape in sides]
    for name in ("polar_express", "s4", "nonic"):
        for shape in ((2048, 2048), (512, 1536), (1536, 512), (136, 264), (128, 640)):
            found.append((check_batch_invariance, (*shape, name)))
    found += [(check_scale_invariance, ()), (check_graph, (384, 512)), (check_graph, (96, 512))]
    return found


def chosen() -> list[tuple[Callable[..., None], tuple[object, ...]]]:
    """All of them, or those whose name has the argument in it."""
    return [entry for entry in checks() if not sys.argv[1:] or sys.argv[1] in entry[0].__name__]


def run(part: int) -> int:
    """Every ``WORKERS``-th check; the number that failed."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    failures, begin = 0, time.perf_counter()
    for check, arguments in chosen()[part::WORKERS]:
        try:
            check(*arguments)
            torch.cuda.synchronize()
        except Exception:
            failures += 1
            print("FAILED", check.__name__, arguments, traceback.format_exc()[-900:], flush=True)
    print(f"part {part}: {time.perf_counter() - begin:.0f} s", flush=True)
    return failures


def main() -> int:
    begin = time.perf_counter()
    # Many processes, because most of the time goes to the compiler.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        failures = sum(pool.map(run, range(WORKERS)))
    seconds = time.perf_counter() - begin
    print(f"{len(chosen())} checks, {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
